"""Which rows a block of the 16-bit Hopper kernel computes in its turn, and which keys they attend to."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import device_function, types
from ..instructions import ptx
from .blocks import make_tile_range
from .hopper_rows import PARTS
from .hopper_schedule import make_place_in, make_rows_at
from .hopper_scores import OWN
from .key_parts import make_share
from .score_functions import make_tile_list

i32, u32, u64 = types.int32, types.uint32, types.uint64
DIAGONALS, LENGTHS, ORDER = 3, 4, 8  # places in the kernel's pointers


class Keys(NamedTuple):
    """What a tile of rows attends to."""

    keys: Any
    diagonal: Any
    listed_at: Any
    tile: Any  # numbers of its tiles of keys
    tiles: Any
    seen: Any  # of those that all of its rows see
    seen_end: Any


@functools.cache
def make_rows_in(block_q: int, packed: int, cluster: int, arranged: bool, split: bool) -> Any:
    """rows_in(turn, call: Call): first row, first head, batch entry and part of the keys of the block's
    tile of rows in its turn.

    arranged : the host has said in what order tiles of rows come;  split : they have parts of the keys
    """
    place_in, rows_at = make_place_in(cluster), make_rows_at(arranged)

    @device_function
    def rows_in(turn, call):
        _, _, heads, _, _, row_tiles, _, parts = call.sizes
        rows, unit = rows_at(place_in(turn), call.pointers[ORDER], row_tiles)
        part = i32(0)
        if split:
            tile = i32(ptx.udiv(u32(rows), u32(parts)))
            rows, part = tile, i32(rows - tile * parts)
        groups = i32(heads // packed)
        batch = i32(ptx.udiv(u32(unit), u32(groups)))
        return i32(rows * block_q), i32((unit - batch * groups) * packed), batch, part

    return rows_in


@functools.cache
def make_keys_of(
    block_q: int, block_k: int, packed: int, band: bool, listed: bool, split: bool
) -> Any:
    """keys_of(place, call: Call) -> Keys: the tiles of keys that a tile of rows attends to.

    `place` is what `rows_in` returns.
    """
    tile_range, share_of = make_tile_range(block_q, block_k, packed, band), make_share(split)
    find_tiles, _, _, all_seen = make_tile_list(OWN, listed, block_k)

    @device_function
    def keys_of(place, call):
        first_row, first_head, batch, part = place
        queries, _, _, left, right = call.sizes[:5]
        keys = ptx.load_global_s32(call.pointers[LENGTHS] + u64(batch * 4))
        diagonal = ptx.load_global_s32(call.pointers[DIAGONALS] + u64(batch * 4))
        tile, tiles, low, high = tile_range(
            first_row, queries * packed, keys, diagonal, left, right
        )
        listed_at, tile, tiles = find_tiles(
            call.pointers, batch, first_head // packed, first_row // block_q, tile, tiles
        )
        tile, tiles = share_of(tile, tiles, part, call.sizes[PARTS])
        seen, seen_end = all_seen(listed_at, tile, tiles, low, high) if band else (tile, tiles)
        return Keys(keys, diagonal, listed_at, tile, tiles, seen, seen_end)

    return keys_of
