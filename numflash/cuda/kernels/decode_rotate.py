"""Rotating rows on the card by a Hadamard matrix, as `numflash.numerics.rotation` does it, with its bits.

Before tokens are rounded and appended, before a query is rounded, and back again for the outputs: a
kernel of its own, because the decode kernels have no registers left for it; outputs of several splits
are turned where they are merged, `decode_combine`. A warp takes a row, a lane every 32nd channel:
turns below 32 channels cross lanes, the others stay in them.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...numerics.rotation import DOWN, HUGE, UP, block_of
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import EXPONENT, THREADS, WARPS, divided, warp_max_i32

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
LANES = 32
LARGEST = f32(3.4028234663852886e38)
SMALLER, LARGER, HUGE_BITS = f32(DOWN), f32(UP), int(HUGE)

# pointers: rows (n, D) float32, written in place; offset (heads, D) float32, subtracted first
# sizes: n, rows of a head
SIGNATURE = types.void(types.UniTuple(u64, 2), types.UniTuple(i32, 2))


def make_turn_row(d: int) -> tuple[Any, int]:
    """(turn_row(x, lane), numbers of a lane): a warp's row of d channels turned, in place.

    x : the lane's every 32nd channel, 0 behind the last
    """
    block, turns = block_of(d), (d + LANES - 1) // LANES
    unit = f32(np.float32(np.sqrt(1.0 / block)))
    across, inside = min(block, LANES).bit_length() - 1, max(block // LANES, 1).bit_length() - 1

    @device_function
    def turn_row(x, lane):
        y = cuda.local.array(turns, f32)
        top = i32(0)
        for t in range(turns):
            top = ptx.imax(top, i32(ptx.bits(x[t]) & u32(0x7FFFFFFF)))
        top = warp_max_i32(top)
        factor = ptx.mul(unit, SMALLER) if top > HUGE_BITS else unit
        for t in range(turns):
            x[t] = ptx.mul(x[t], factor)
        for turn in range(across):
            half = i32(1) << turn
            for t in range(turns):
                other = ptx.shuffle_xor(x[t], u32(half))
                x[t] = ptx.sub(other, x[t]) if lane & half else ptx.add(x[t], other)
        for turn in range(inside):
            for t in range(turns):
                other = x[t ^ (1 << turn)]
                y[t] = ptx.sub(other, x[t]) if t & (1 << turn) else ptx.add(x[t], other)
            for t in range(turns):
                x[t] = y[t]
        for t in range(turns):
            if top > HUGE_BITS:  # a finite row stays finite
                x[t] = ptx.mul(x[t], LARGER)
                if top < EXPONENT:
                    x[t] = ptx.fmin(ptx.fmax(x[t], -LARGEST), LARGEST)

    return turn_row, turns


def decode_rotate(d: int, smooth: bool = False) -> Source:
    """The kernel for rows of d channels."""
    turn_row, turns = make_turn_row(d)

    def rotate(pointers, sizes):
        rows, offset = pointers
        n, of_head = sizes
        thread = i32(cuda.threadIdx.x)
        lane = thread & 31
        row = i32(cuda.blockIdx.x) * WARPS + (thread >> 5)
        if row < n:
            at = rows + u64(row) * u64(d * 4)
            x = cuda.local.array(turns, f32)
            for t in range(turns):
                c = lane + LANES * t
                x[t] = f32(0)
                if c < d:
                    x[t] = ptx.from_bits(u32(ptx.load_global_written(at + u64(c * 4))))
                    if smooth:
                        moved = ptx.sub(
                            x[t],
                            ptx.load_global_f32(
                                offset + (u64(divided(row, of_head)) * u64(d) + u64(c)) * u64(4)
                            ),
                        )
                        if abs(x[t]) <= LARGEST:
                            moved = ptx.fmin(ptx.fmax(moved, -LARGEST), LARGEST)
                        x[t] = moved
            turn_row(x, lane)
            for t in range(turns):
                c = lane + LANES * t
                if c < d:
                    ptx.store_global_f32(at + u64(c * 4), x[t])

    return Source(rotate, SIGNATURE, THREADS)
