"""What a block works on: its rows, the tiles of keys that they attend to, the kernel's arguments."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32 = types.int32, types.uint32


class Call(NamedTuple):
    """The arguments of the kernel."""

    pointers: Any
    strides: Any
    sizes: Any
    factors: Any


@functools.cache
def make_tile_range(block_q: int, block_k: int, group: int, band: bool) -> Any:
    """tile_range(first, rows, keys, diagonal, left, right).

    The keys that the `block_q` packed rows from `first` on attend to.

    Returns the first tile of keys that any of them attends to and the end of these tiles, then the
    first key that all of them attend to and the end of those.
    """

    @device_function
    def all_keys(first, rows, keys, diagonal, left, right):
        return i32(0), i32((keys + block_k - 1) // block_k), i32(0), i32(keys)

    @device_function
    def a_band(first, rows, keys, diagonal, left, right):
        low = i32(first // group + diagonal)
        high = i32((min(first + block_q, rows) - 1) // group + diagonal)
        end = min(
            i32((keys + block_k - 1) // block_k),
            i32((max(high + right + 1, 0) + block_k - 1) // block_k),
        )
        return (
            i32(max(low - left, 0) // block_k),
            i32(end),
            i32(max(high - left, 0)),
            i32(min(keys, low + right + 1)),
        )

    return a_band if band else all_keys


@functools.cache
def make_find_block(rows: int, last_first: bool = False, folded: bool = False) -> Any:
    """find_block(total): this block's first row of `total`, its head and its batch entry.

    A block has `rows` rows. The grid is tiles of rows, heads, batch entries; where these are more
    than its last axis takes, it is `folded`: tiles of rows of one batch entry after the other,
    heads (`Launch.blocks`). That is code of its own: what a division gives takes a register, and a
    block's number none.

    With `last_first`, for a band, the last rows, which attend to most keys when causal, start
    first: the short ones fill the end of the launch.
    """

    @device_function
    def find_block(total):
        tile = (
            u32(u32(cuda.gridDim.x) - u32(1) - u32(cuda.blockIdx.x))
            if last_first
            else u32(cuda.blockIdx.x)
        )
        return i32(tile * u32(rows)), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)

    @device_function
    def find_folded(total):
        tiles = u32(u32(total + rows - 1) // u32(rows))
        batch = ptx.udiv(u32(cuda.blockIdx.x), tiles)
        tile = u32(u32(cuda.blockIdx.x) - batch * tiles)
        if last_first:
            tile = u32(tiles - u32(1) - tile)
        return i32(tile * u32(rows)), i32(cuda.blockIdx.y), i32(batch)

    return find_folded if folded else find_block
