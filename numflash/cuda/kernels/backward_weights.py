"""From the scores and dP of a part of a tile to its weights and to dS, in the backward pass of
`mma.sync`: P = exp(S - LSE) and dS = P * (dP - D) with D = rowsum(dO * O), and what options change.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .scores import LOG2E, tanh_fast
from .softmax import NEG_INF

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
MASK, SLOPES = 9, 10  # places in the kernel's pointers


class Statistics(NamedTuple):
    """LSE and D of a thread's two rows, where queries own."""

    lse0: Any
    lse1: Any
    delta0: Any
    delta1: Any


@functools.cache
def make_find_statistics(of_keys: bool) -> Any:
    """find_statistics(stats, block: Block, row, heads, stat_rows): of row `row` and the one 8 further;
    their rows are padded to whole blocks. Where keys own, the statistics are the columns'.
    """

    @device_function
    def find_statistics(stats, block, row, heads, stat_rows):
        if of_keys:
            return Statistics(f32(0), f32(0), f32(0), f32(0))
        at = stats + u64(((block.batch * heads + block.head) * stat_rows + row) * 8)
        return Statistics(
            ptx.load_global_f32(at),
            ptx.load_global_f32(at + u64(64)),
            ptx.load_global_f32(at + u64(4)),
            ptx.load_global_f32(at + u64(68)),
        )

    return find_statistics


@functools.cache
def make_weigh(
    chunk: int, of_keys: bool, want_a: bool, mask: str, softcap: bool, alibi: bool
) -> Any:
    """weigh(s, g, low, high, block, query_head, statistics, stat_at, row, column0, call).

    P in place of S, and dS in place of dP, of `chunk` columns, without regard to bounds where there
    is no mask.

    s, g : S and dP, as products leave them;  low, high : the columns that the two rows attend to
    stat_at : where the statistics of the columns lie in shared memory, where keys own
    row, column0 : of the thread's first number
    """
    tiles_of_8, has_mask, float_mask = chunk // 8, bool(mask), mask == "float"
    transform = softcap or alibi or float_mask

    @device_function
    def weigh(s, g, low, high, block, query_head, statistics, stat_at, row, column0, call):
        scale_log2, _, cap, twice = call.factors
        mask_batch, mask_head, mask_query, mask_key = call.strides[18:]
        row_step, column_step = (mask_key, mask_query) if of_keys else (mask_query, mask_key)
        four = cuda.local.array(4, u32)
        upper, lower, steep = u64(0), u64(0), f32(0)
        if has_mask:
            upper = ptx.fresh_address(
                call.pointers[MASK]
                + u64(
                    ptx.fresh(block.batch) * mask_batch
                    + ptx.fresh(query_head) * mask_head
                    + row * row_step
                    + column0 * column_step
                )
            )
            lower = ptx.fresh_address(upper + u64(8 * row_step))
        if alibi:
            at = call.pointers[SLOPES] + u64((block.batch * call.sizes[4] + query_head) * 4)
            steep = ptx.load_global_f32(at) * LOG2E
        for n in range(tiles_of_8):
            if of_keys:
                ptx.load_shared_v4(four, 0, stat_at + u32(64 * n))
            for i in range(4):
                second = i > 1
                lse = statistics.lse1 if second else statistics.lse0
                delta = statistics.delta1 if second else statistics.delta0
                if of_keys:
                    lse = ptx.from_bits(four[2 if i & 1 else 0])
                    delta = ptx.from_bits(four[3 if i & 1 else 1])
                column = i32(column0 + 8 * n + (i & 1))
                x, slope, seen = s[4 * n + i], f32(1), True
                if transform:
                    x = x * scale_log2  # in units of log2
                    if softcap:
                        t = tanh_fast(x, twice)
                        x, slope = cap * t, f32(1) - t * t
                    if alibi:
                        mine = i32(row + (8 if second else 0))
                        away = i32(column - mine) if of_keys else i32(mine - column)
                        x -= steep * ptx.to_float(i32(abs(away + block.diagonal)))
                if has_mask:
                    seen = column >= low[i >> 1] and column < high[i >> 1]
                    if seen:
                        at = (lower if second else upper) + u64((8 * n + (i & 1)) * column_step)
                        if float_mask:
                            bias = ptx.load_global_f32(at)
                            seen = bias != NEG_INF
                            x += bias * LOG2E
                        else:
                            seen = ptx.load_global_u8(at) != u32(0)
                p = ptx.ex2(x - lse if transform else ptx.fma(x, scale_log2, -lse))
                if want_a:
                    ds = p * (g[4 * n + i] - delta)
                    if softcap:
                        ds *= slope
                    g[4 * n + i] = ds if seen else f32(0)
                s[4 * n + i] = p if seen else f32(0)

    return weigh
