"""What the INT8 kernels leave to the caller's arrays: the log-sum-exp, sinks, dtype and layout.

On the host `scores.log_sum_exp` and `merge.apply_sinks` do this in float64. Here it is float32, so
an LSE, and a row with a sink, agree to float32's rounding; without sinks the output keeps its bits.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ...numerics import fixedpoint as fx
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import make_find_block
from .int8_four_rows import (
    CHANNELS,
    ROWS,
    Shape,
    first_row,
    make_is_whole,
    make_join_sums,
    row_ahead,
    shape_of,
    spread,
)
from .scores import LN2, LOG2E

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
THREADS = 128
WARPS = THREADS // 32
BLOCK_ROWS = 64
WORDS = BLOCK_ROWS // ROWS  # groups of four rows of a block
LOWEST, INFINITE = f32(-3.4028234663852886e38), f32(math.inf)

# pointers: out of the kernel, m, l, q bytes, their scales, mean of k, sinks; out and lse of the
# caller
# strides in bytes: batch, head and row of out
# sizes: query heads, KV heads, queries, D, Dv, bytes of a row of q, channels of the kernel's out
# factors: scale of the scores
SIGNATURE = types.void(
    types.UniTuple(u64, 9), types.UniTuple(i64, 3), types.UniTuple(i32, 7), types.UniTuple(f32, 1)
)


@device_function
def half_of(x):
    """float16 bits."""
    return ptx.half_bits(x)


@device_function
def bfloat16_of(x):
    """bfloat16 bits, rounded to even; sm_75 has no instruction for it."""
    bits = ptx.bits(x)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return u32(0x7FC0) if x != x else u32(rounded)


@functools.cache
def make_dot(shape: Shape) -> Any:
    """dot(sums, q, means, first, stop, row_bytes, c): a lane's part of four rows of Q with the means.

    `q` is where the head's bytes begin, `means` the lane's part of K's means.
    """
    span, n_words = CHANNELS * shape.lanes, ROWS * shape.turns

    @device_function
    def dot(sums, q, means, first, stop, row_bytes, c):
        words = cuda.local.array(n_words, u32)
        for r in range(ROWS):
            row = i32(first + row_ahead(r))
            at = q + u64(i64(row) * i64(row_bytes) + i64(c))
            for t in range(shape.turns):
                words[shape.turns * r + t] = u32(0)
                if row < stop and c + span * t < row_bytes:
                    words[shape.turns * r + t] = u32(ptx.load_global_s32(at + u64(span * t)))
        for r in range(ROWS):
            sums[r] = f32(0)
            for t in range(shape.turns):
                for i in range(CHANNELS):
                    n = i32(words[shape.turns * r + t] << u32(24 - 8 * i)) >> 24
                    sums[r] = ptx.fma(ptx.to_float(n), means[CHANNELS * t + i], sums[r])

    return dot


@functools.cache
def make_fetch(shape: Shape) -> Any:
    """fetch(raw, found, first, stop, columns, c): a lane's part of four rows of `columns` channels."""
    span = CHANNELS * shape.lanes

    @device_function
    def fetch(raw, found, first, stop, columns, c):
        for r in range(ROWS):
            row = i32(first + row_ahead(r))
            at = found + u64((i64(row) * columns + c) * 4)
            for t in range(shape.turns):
                if row < stop and c + span * t < columns:
                    place = CHANNELS * (shape.turns * r + t)
                    ptx.load_global_v4(raw, place, at + u64(span * t * 4))

    return fetch


@functools.cache
def make_write(shape: Shape, dtype: str, sinks: bool) -> Any:
    """write(raw, out, row_step, shares, first, stop, columns, whole, c).

    Four rows that `fetch` brought to the caller's, which begin at `out`; with `sinks` times their
    shares.
    """
    wide, span = dtype == "float32", CHANNELS * shape.lanes
    size = 4 if wide else 2
    narrow = bfloat16_of if dtype == "bfloat16" else half_of

    @device_function
    def write(raw, out, row_step, shares, first, stop, columns, whole, c):
        four = cuda.local.array(CHANNELS, u32)
        for r in range(ROWS):
            row = i32(first + row_ahead(r))
            to = out + u64(i64(row) * row_step + i64(c * size))
            for t in range(shape.turns):
                channel = i32(c + span * t)
                if row < stop and channel < columns:
                    for i in range(CHANNELS):
                        x = ptx.from_bits(raw[CHANNELS * (shape.turns * r + t) + i])
                        if sinks:
                            x = f32(0) if shares[r] == f32(0) else ptx.mul(x, shares[r])
                        four[i] = ptx.bits(x) if wide else narrow(x)
                    place = to + u64(span * t * size)
                    if whole:
                        if wide:
                            ptx.store_global_v4(place, four, 0)
                        else:
                            four[0] |= four[1] << u32(16)
                            four[1] = four[2] | four[3] << u32(16)
                            ptx.store_global_v2(place, four, 0)
                    else:
                        for i in range(CHANNELS):
                            if channel + i < columns and wide:
                                ptx.store_global(place + u64(size * i), four[i])
                            elif channel + i < columns:
                                ptx.store_global_u16(place + u64(size * i), four[i])

    return write


@device_function
def with_sink(lse, sink):
    """(log-sum-exp with a sink, what is left to the keys)."""
    share = f32(1)
    if lse < INFINITE:
        top = ptx.fmax(lse, sink)
        base = f32(0) if top == -INFINITE else top
        own = ptx.ex2(ptx.mul(ptx.sub(lse, base), LOG2E))
        both = ptx.add(own, ptx.ex2(ptx.mul(ptx.sub(sink, base), LOG2E)))
        share = f32(0) if both == f32(0) else ptx.div(own, both)
        lse = ptx.add(base, ptx.mul(ptx.lg2(both), LN2))
    return lse, share


def int8_results(
    d: int,
    dv: int,
    dtype: str,
    pv: str = "int8",
    smooth: bool = True,
    sinks: bool = False,
    folded: bool = False,
) -> Source:
    """The kernel for padded head sizes, the dtype of the caller's output, and the weights of `pv`.

    Blocks: `BLOCK_ROWS` rows, query heads, batches. A warp takes four rows at a time.
    """
    unit = f32(1 / fx.WEIGHT_ONE[pv])
    shape, find_block = shape_of(max(d, dv)), make_find_block(BLOCK_ROWS, folded=folded)
    dot, fetch, write = make_dot(shape), make_fetch(shape), make_write(shape, dtype, sinks)
    join, n_x = make_join_sums(shape.lanes), shape.numbers
    is_whole, size = make_is_whole(dtype), 4 if dtype == "float32" else 2
    own, span, group_words = CHANNELS * shape.turns, CHANNELS * shape.lanes, WORDS // shape.beside

    def results(pointers, strides, sizes, factors):
        found, m, l, q, q_scale, means, sinks_at, out, lse_out = pointers
        heads, kv_heads, queries, channels, columns, row_bytes, v_columns = sizes
        thread = i32(cuda.threadIdx.x)
        first, head, batch = find_block(queries)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        mine = i32(lane & (shape.lanes - 1))
        c = i32(CHANNELS * mine)
        before = u64(i32(batch * heads + head)) * u64(queries)
        found += before * u64(v_columns * 4)
        q += before * u64(row_bytes)
        out += u64(i64(batch) * strides[0] + i64(head) * strides[1])
        whole = is_whole(out, strides[2], i64(size), columns)
        mean, sums = cuda.local.array(own, f32), cuda.local.array(ROWS, f32)
        raw, shares = cuda.local.array(n_x, u32), cuda.local.array(ROWS, f32)
        if smooth:
            kv = i32(batch * kv_heads + head // (heads // kv_heads))
            for t in range(shape.turns):
                for i in range(CHANNELS):
                    channel, n = i32(c + span * t + i), CHANNELS * t + i
                    mean[n] = f32(0)
                    if channel < channels:
                        mean[n] = ptx.load_global_f32(means + u64(i32(kv * channels + channel) * 4))
        word = i32(lane // shape.lanes * group_words)
        stop = i32(word + group_words)
        word = i32(word + warp)
        while word < stop:
            c = ptx.fresh(c)
            row = i32(first + first_row(word))
            i = i32(row + row_ahead(lane & 3))
            there = mine < ROWS and i < queries
            at = (before + u64(i if i < queries else 0)) * u64(4)
            fetch(raw, found, row, queries, v_columns, c)
            total = ptx.load_global_f32(l + at)
            octave = ptx.to_float(ptx.load_global_s32(m + at))
            lse = ptx.mul(ptx.add(octave, ptx.lg2(ptx.mul(total, unit))), LN2)
            if smooth:  # what was taken off every score of the row
                dot(sums, q, mean, row, queries, row_bytes, c)
                taken = ptx.mul(join(sums, lane), ptx.load_global_f32(q_scale + at))
                lse = ptx.add(lse, ptx.mul(taken, factors[0]))
            if lse < LOWEST:
                lse = LOWEST
            if total == f32(0):
                lse = -INFINITE
            if sinks:
                lse, share = with_sink(lse, ptx.load_global_f32(sinks_at + u64(head * 4)))
                spread(shares, share, lane)
            if there:
                ptx.store_global_f32(lse_out + at, lse)
            write(raw, out, strides[2], shares, row, queries, columns, whole, c)
            word = i32(word + WARPS)

    return Source(results, SIGNATURE, THREADS)
