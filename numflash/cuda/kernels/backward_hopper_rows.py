"""The end of a block of a backward pass on Hopper: its sums go to global memory."""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper_rows import make_exchange

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32


@functools.cache
def make_write_sums(d: int, dtype: str) -> Any:
    """write_sums(sums, factor, to, step, row, rows, live, row_bytes): a thread's two rows of a sum,
    times a factor.

    to, step : the head's first row, and bytes from row to row
    row, rows : the first of the two, and how many there are
    live : rows from this one on are zeros, whatever the sums hold
    row_bytes : that exist of a row
    """
    columns, n_words, pack = d // 8, d // 4, ptx.pack[dtype]
    exchange_1, exchange_2 = (make_exchange(n_words, bit) for bit in (1, 2))

    @device_function
    def write_sums(sums, factor, to, step, row, rows, live, row_bytes):
        lane = i32(cuda.threadIdx.x) & 3
        words = cuda.local.array(n_words, u32)
        for r in range(2):
            there = i32(row + 8 * r) < live
            for c in range(columns):
                n = 4 * c + 2 * r
                word = pack(sums[n] * factor, sums[n + 1] * factor)
                words[r * columns + c] = word if there else u32(0)
        exchange_1(words, lane)
        exchange_2(words, lane)
        for r in range(2):
            at = to + u64(i32(row + 8 * r)) * u64(step)
            for c in range(0, columns, 4):
                column = i32((c + lane) * 16)
                if i32(row + 8 * r) < rows and column < row_bytes:
                    ptx.store_global_v4(at + u64(column), words, r * columns + c)

    return write_sums
