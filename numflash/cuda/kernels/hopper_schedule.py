"""Which tiles of rows a persistent block computes, and in what order: a static schedule.

There are as many blocks as multiprocessors (or tiles), and each computes one tile of rows after the
other; the blocks of a cluster take neighbouring ones. The tiles are numbered longest first, and turn
n gives out the next ones, one to each block: in even turns in the order of the blocks, in odd ones
backwards, so that who got a long one gets a short one next. Nothing is counted in memory: there is
nothing to reset before a launch, which a captured graph may repeat, and the same block always
computes the same rows.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32 = types.int32, types.uint32


@functools.cache
def make_number_in(cluster: int) -> Any:
    """number_in(turn): the number of this block's tile of rows in its turn.

    `cluster` blocks, a power of two, take their turns together: their ranks follow their numbers.
    """
    bits = u32(cluster.bit_length() - 1)

    @device_function
    def number_in(turn):
        block = u32(cuda.blockIdx.x)
        own, all_of_them = block >> bits, u32(cuda.gridDim.x) >> bits
        place = u32(all_of_them - u32(1) - own) if turn & 1 else own
        together = u32(u32(turn) * all_of_them + place)
        return u32((together << bits) + (block & u32(cluster - 1)))

    return number_in


@functools.cache
def make_rows_of(last_first: bool) -> Any:
    """rows_of(number, row_tiles, units, together): (tile of rows, unit) of a number.

    A unit is a batch entry's heads whose rows are packed together. The numbers go through all rows
    of `together` units (whose keys stay in L2), unit after unit in each tile of rows; with
    `last_first` the last rows, which attend to most keys when causal, come first.
    """

    @device_function
    def rows_of(number, row_tiles, units, together):
        section = ptx.udiv(number, u32(together * row_tiles))
        first_unit = u32(section * u32(together))
        inside = u32(number - section * u32(together * row_tiles))
        width = ptx.umin(u32(together), u32(u32(units) - first_unit))
        rows = ptx.udiv(inside, width)
        unit = i32(first_unit + inside - rows * width)
        return i32(row_tiles - 1 - i32(rows)) if last_first else i32(rows), unit

    return rows_of
