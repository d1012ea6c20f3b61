"""Two warps for the same 16 rows of an INT8 kernel.

Each multiplies half of a block's keys, then half of the channels.

With 256 channels the sums of 16 rows take 128 of a thread's 255 registers, and a block's scores 64
more: with the addresses that is too many. A pair of warps holds half of both, and computes nothing
twice. What it has to exchange for every block of keys are the largest score of each row, since the
weights of a block refer to one octave, and the weights themselves: a lane holds the same rows and
the same places among 64 keys as its counterpart, so registers cross as they are.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_rows import PART

i32, u32 = types.int32, types.uint32
TOP = PART + 12  # place of a row's largest score in the table


@device_function
def join_maxima(top, table, beside, lane):
    """`top`, the largest scores of the thread's two rows, from both warps.

    `table` and `beside` are the row's places in theirs.

    The whole block waits: from here on no warp reads keys.
    """
    cuda.syncwarp()  # other lanes have read the row's entry, 16 bytes at a time
    if lane & 3 == 0:
        for r in range(2):
            ptx.store_shared(table + u32(TOP + 128 * r), u32(top[r]))
    cuda.syncthreads()
    for r in range(2):
        top[r] = ptx.imax(top[r], ptx.load_shared_s32(beside + u32(TOP + 128 * r)))


@functools.cache
def make_give(own: int) -> Any:
    """give(w, at, thread): `w`, the warp's own weights in `own` registers, for both of the pair.

    Their addresses for this lane.

    `at` is where the block has 128 bytes of shared memory per own register and warp. The pair's
    weights are stored there in the order of the keys, four registers every 512 bytes.
    """
    vectors = own // 4

    @device_function
    def give(w, at, thread):
        at = u32(at + u32((thread & 31) * 16))
        warp = i32(thread >> 5)
        for i in range(vectors):
            ptx.store_shared_v4(at + u32((warp * vectors + i) * 512), w, 4 * i)
        ptx.barrier(u32(1 + (warp >> 1)), u32(64))
        return u32(at + u32((warp & -2) * (vectors * 512)))

    return give


@functools.cache
def make_take(registers: int) -> Any:
    """take(w, at): that many registers of what `give` has left, from `at` on."""
    vectors = registers // 4

    @device_function
    def take(w, at):
        for i in range(vectors):
            ptx.load_shared_v4(w, 4 * i, at + u32(512 * i))

    return take


@functools.cache
def make_sum_given(registers: int) -> Any:
    """sum_given(at, total).

    Sums of each row's Q16.16 weights in that many registers of what `give` has left.
    """
    vectors = registers // 4

    @device_function
    def sum_given(at, total):
        four = cuda.local.array(4, i32)
        for r in range(2):
            total[r] = i32(0)
        for i in range(vectors):
            ptx.load_shared_v4(four, 0, at + u32(512 * i))
            for r in range(2):
                total[r] = i32(total[r] + i32(four[2 * r] + four[2 * r + 1]))

    return sum_given
