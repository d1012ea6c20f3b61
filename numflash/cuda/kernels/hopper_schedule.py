"""Which tiles of rows a persistent block computes, and in what order: a static schedule.

There are as many blocks as multiprocessors (or tiles), and each computes one tile of rows after the
other; the blocks of a cluster take neighbouring ones. Turn n gives out the next tiles, one to each
block, unit after unit (a batch entry's heads whose rows are packed together). Where tiles of rows
take different times the host says which are next (`device.arrangement`). Nothing is counted in memory:
there is nothing to reset before a launch, which a captured graph may repeat, and the same block
always computes the same rows.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32, u64 = types.int32, types.uint32, types.uint64


@functools.cache
def make_place_in(cluster: int) -> Any:
    """place_in(turn): this block's place in its turn; beyond all tiles of rows it is done.

    `cluster` blocks, a power of two, take their turns together: their ranks follow their places.
    """
    bits = u32(cluster.bit_length() - 1)

    @device_function
    def place_in(turn):
        block = u32(cuda.blockIdx.x)
        own, all_of_them = block >> bits, u32(cuda.gridDim.x) >> bits
        together = u32(u32(turn) * all_of_them + own)
        return u32((together << bits) + (block & u32(cluster - 1)))

    return place_in


@functools.cache
def make_rows_at(arranged: bool) -> Any:
    """rows_at(place, order, row_tiles): (tile of rows, unit) at a place.

    order : where the host's arrangement lies, if it has `arranged` the tiles
    """

    @device_function
    def rows_at(place, order, row_tiles):
        number = place
        if arranged:
            number = u32(ptx.load_global_s32(order + u64(place * u32(4))))
        unit = ptx.udiv(number, u32(row_tiles))
        return i32(number - unit * u32(row_tiles)), i32(unit)

    return rows_at
