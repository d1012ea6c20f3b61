"""From scores and dP to what the sums of a backward pass on Hopper multiply: P and dS of a tile."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .backward_band import make_find_bounds

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32


class Rows(NamedTuple):
    """What a thread knows of its two rows, 8 apart, and of its columns."""

    row: Any  # the first one
    lse: Any  # local arrays of two, where queries own
    delta: Any
    pairs: Any  # shared address of the ring's statistics, where keys own
    last: Any  # and of two bytes of its own


def make_find_statistics(of_keys: bool) -> Any:
    """find_statistics(rows, block, call): LSE and D of the rows, zeros where there are none: such a
    row has zeros for Q and dO, and so for dS.
    """

    @device_function
    def find_statistics(rows, block, call):
        heads, stat_rows = call.sizes[4], call.sizes[7]
        for r in range(2):
            rows.lse[r], rows.delta[r] = f32(0), f32(0)
            row = i32(rows.row + 8 * r)
            if not of_keys and row < stat_rows:
                row = (block.batch * heads + block.head) * stat_rows + row
                at = call.pointers[3] + u64(row * 8)
                rows.lse[r] = ptx.load_global_f32(at)
                rows.delta[r] = ptx.load_global_f32(at + u64(4))

    return find_statistics


@functools.cache
def make_weights(
    columns: int, dtype: str, of_keys: bool, band: bool, edge: bool
) -> tuple[Any, Any]:
    """(weigh, grade), for a tile whose columns begin with `start` and whose stage's statistics are at
    `pairs`:

    weigh(s, p, start, pairs, rows, block, scale): scores become P, also packed; `scale` times log2(e)
    grade(g, s, ds, start, pairs, rows, block): from dP and P, which is in s, dS packed

    At an `edge` what a row does not attend to becomes zero, whatever it was. Each pair is packed at
    once: the registers of the numbers are free for others.
    """
    pairs_of_8, find_bounds, pack = columns // 8, make_find_bounds(band), ptx.pack[dtype]

    @device_function
    def bounds_of(low, high, start, rows, block):
        """[low, high) of each row, counted from the thread's first column."""
        if edge:  # not in registers from tile to tile
            find_bounds(low, high, block, ptx.fresh(rows.row))
            own = i32(start + 2 * (ptx.fresh(i32(cuda.threadIdx.x)) & 3))
            for r in range(2):
                low[r], high[r] = i32(low[r] - own), i32(high[r] - own)

    @device_function
    def weigh(s, p, start, pairs, rows, block, scale):
        four = cuda.local.array(4, u32)
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        bounds_of(low, high, start, rows, block)
        for n in range(pairs_of_8):
            if of_keys:
                ptx.load_shared_v4(four, 0, pairs + u32(64 * n))
            for i in range(4):
                lse = rows.lse[i >> 1]
                if of_keys:
                    lse = ptx.from_bits(four[2 * (i & 1)])
                x = ptx.ex2(ptx.fma(s[4 * n + i], scale, -lse))
                if edge:
                    column = i32(8 * n + (i & 1))
                    x = x if column >= low[i >> 1] and column < high[i >> 1] else f32(0)
                s[4 * n + i] = x
            if of_keys:
                for i in range(2):
                    p[2 * n + i] = pack(s[4 * n + 2 * i], s[4 * n + 2 * i + 1])

    @device_function
    def grade(g, s, ds, start, pairs, rows, block):
        four, x = cuda.local.array(4, u32), cuda.local.array(4, f32)
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        bounds_of(low, high, start, rows, block)
        for n in range(pairs_of_8):
            if of_keys:
                ptx.load_shared_v4(four, 0, pairs + u32(64 * n))
            for i in range(4):
                delta = rows.delta[i >> 1]
                if of_keys:
                    delta = ptx.from_bits(four[2 * (i & 1) + 1])
                x[i] = s[4 * n + i] * (g[4 * n + i] - delta)
                if edge:
                    column = i32(8 * n + (i & 1))
                    x[i] = x[i] if column >= low[i >> 1] and column < high[i >> 1] else f32(0)
            for i in range(2):
                ds[2 * n + i] = pack(x[2 * i], x[2 * i + 1])

    return weigh, grade
