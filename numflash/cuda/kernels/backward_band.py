"""Which rows a block of a backward pass owns, and which columns of the other side they attend to.

A pass that owns queries has keys as its columns, a pass that owns keys has queries: the band of one
is the other's, mirrored.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import device_function, types
from ..instructions import ptx
from .blocks import make_find_block

i32, u64, f32 = types.int32, types.uint64, types.float32


class Block(NamedTuple):
    """What a block works on: a head's rows, and which columns they attend to.

    Row r attends to the columns from r + offset - before to r + offset + after.
    """

    batch: Any
    head: Any
    own_left: Any  # rows, and columns, that exist
    other_left: Any
    diagonal: Any
    offset: Any
    before: Any
    after: Any


@functools.cache
def make_block_of(of_keys: bool) -> Any:
    """block_of(head, batch, diagonals, lengths, sizes): the `Block` of a head's rows.

    diagonals, lengths : addresses of a number per batch entry;  sizes : the kernel's
    """

    @device_function
    def block_of(head, batch, diagonals, lengths, sizes):
        own_rows, other_rows, _, _, _, left, right = sizes[:7]
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        own_left, other_left = (keys, other_rows) if of_keys else (own_rows, keys)
        offset, before, after = (
            (i32(-diagonal), right, left) if of_keys else (diagonal, left, right)
        )
        return Block(batch, head, own_left, other_left, diagonal, offset, before, after)

    return block_of


@functools.cache
def make_find_rows(rows: int, of_keys: bool, band: bool, folded: bool) -> Any:
    """find_rows(diagonals, lengths, sizes): the block's first row of `rows`, and its `Block`."""
    # the first keys are seen by most queries
    find_block, block_of = (
        make_find_block(rows, band and not of_keys, folded),
        make_block_of(of_keys),
    )

    @device_function
    def find_rows(diagonals, lengths, sizes):
        first, head, batch = find_block(sizes[0])
        return first, block_of(head, batch, diagonals, lengths, sizes)

    return find_rows


@functools.cache
def make_find_columns(rows: int, columns: int, of_keys: bool, band: bool) -> Any:
    """find_columns(block, first): tiles of `columns` for the `rows` rows from `first` on.

    Returns the first tile that they attend to and the end of these tiles, then the first column that
    all of them attend to and the end of those.
    """

    @device_function
    def find_columns(block, first):
        tile, tiles = i32(0), i32((block.other_left + columns - 1) // columns)
        whole_low, whole_high = i32(0), block.other_left
        if band:
            low = i32(first + block.offset)
            high = i32(min(first + rows, block.own_left) - 1 + block.offset)
            tile = i32(max(low - block.before, 0) // columns)
            tiles = i32(min(tiles, (max(high + block.after + 1, 0) + columns - 1) // columns))
            whole_low = i32(max(high - block.before, 0))
            whole_high = i32(min(block.other_left, low + block.after + 1))
        if of_keys and first >= block.own_left:
            tiles = tile
        return tile, tiles, whole_low, whole_high

    return find_columns


@functools.cache
def make_find_bounds(band: bool, has_mask: bool = False) -> Any:
    """find_bounds(low, high, block, row): the columns [low, high) that each of two rows, `row` and
    the one 8 further, attends to. With a mask rows that do not exist attend to none.
    """

    @device_function
    def find_bounds(low, high, block, row):
        for r in range(2):
            mine = i32(row + 8 * r)
            low[r], high[r] = i32(0), block.other_left
            if band:
                low[r] = i32(mine + block.offset - block.before)
                end = i32(mine + block.offset + block.after + 1)
                high[r] = i32(min(block.other_left, end))
            if has_mask and mine >= block.own_left:
                high[r] = i32(0)

    return find_bounds


@functools.cache
def make_clear(tiles_of_8: int) -> Any:
    """clear(x, low, high, column0): zeros for the columns of a fragment of 16 rows that a row does
    not attend to. `column0` is the column of the thread's first number.
    """

    @device_function
    def clear(x, low, high, column0):
        for n in range(tiles_of_8):
            for i in range(4):
                column = i32(column0 + 8 * n + (i & 1))
                if column < low[i >> 1] or column >= high[i >> 1]:
                    x[4 * n + i] = f32(0)

    return clear
