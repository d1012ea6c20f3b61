"""float32 gradients for correctness, not for speed.

A warp per row of the side that owns, no tensor cores, every option.

The two passes of `kernels.backward`; a lane holds the columns c with c % 32 = lane. What a row does
not attend to is never read, so its value cannot matter.
"""

from __future__ import annotations

from typing import Any

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import make_find_block
from .flash_float32 import WARPS, warp_sum
from .scores import LOG2E, tanh_accurate
from .softmax import NEG_INF

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: q, k, v, dO, O, LSE, sum_a, sum_b, diagonal, key_lengths, mask, bias, slopes; with `of_lse`
# dLSE
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, keys, d, dv, query heads, left, right
# factors: scale * log2(e), scale, softcap * log2(e)
REST = types.UniTuple(i64, 8), types.UniTuple(i32, 7), types.UniTuple(f32, 3)


def make_row(width: int) -> tuple[Any, Any, Any, Any]:
    """(load, dot, add, store) of a row of up to `width` float32 in the lanes' registers and one in
    global memory.
    """
    parts = width // 32

    @device_function
    def load(row, source, left, lane):
        for i in range(parts):
            c = lane + 32 * i
            row[i] = ptx.load_global_f32(source + u64(c * 4)) if c < left else f32(0)

    @device_function
    def dot(row, source, left, lane):
        total = f32(0)
        for i in range(parts):
            c = lane + 32 * i
            if c < left:
                total = ptx.fma(row[i], ptx.load_global_f32(source + u64(c * 4)), total)
        return warp_sum(total)

    @device_function
    def add(row, factor, source, left, lane):
        for i in range(parts):
            c = lane + 32 * i
            if c < left:
                row[i] = ptx.fma(factor, ptx.load_global_f32(source + u64(c * 4)), row[i])

    @device_function
    def store(row, to, factor, left, lane):
        for i in range(parts):
            c = lane + 32 * i
            if c < left:
                ptx.store_global_f32(to + u64(c * 4), row[i] * factor)

    return load, dot, add, store


def backward_float32(
    gradients: str,
    d: int,
    dv: int,
    group: int = 1,
    mask: bool = False,
    bias: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    folded: bool = False,
    of_lse: bool = False,
) -> Source:
    """The kernel for head sizes up to d and dv, multiples of 32.

    `gradients` is "kv" or "q", the pass.
    """
    of_keys = gradients == "kv"
    d_parts, dv_parts, heads_of_other = d // 32, dv // 32, group if of_keys else 1
    load_a, dot_a, add_a, store_a = make_row(d)
    load_b, dot_b, add_b, store_b = make_row(dv)
    find_block = make_find_block(WARPS, folded=folded)

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def backward(pointers, strides, sizes, factors):
        q, k, v, grad, out, lse_at, out_a, out_b, diagonals, lengths, mask_at, bias_at, slopes = (
            pointers[:13]
        )
        queries, key_count, d_left, dv_left, heads, left, right = sizes
        scale_log2, scale, cap = factors
        lane, warp = i32(cuda.threadIdx.x) & 31, i32(cuda.threadIdx.x) >> 5
        own_rows = key_count if of_keys else queries
        first, head, batch = find_block(own_rows)
        own = first + warp
        if own < own_rows:
            keys = min(ptx.load_global_s32(lengths + u64(batch * 4)), key_count)
            diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
            kv_head = batch * (heads // group) + (head if of_keys else head // group)
            first_head = head * group if of_keys else head
            a, b = cuda.local.array(d_parts, f32), cuda.local.array(dv_parts, f32)
            sum_a, sum_b = cuda.local.array(d_parts, f32), cuda.local.array(dv_parts, f32)
            for i in range(d_parts):
                sum_a[i] = f32(0)
            for i in range(dv_parts):
                sum_b[i] = f32(0)
            low, high = max(own + diagonal - left, 0), min(keys, own + diagonal + right + 1)
            at = u64((batch * heads + head) * queries + own)
            if of_keys:
                low, high = max(own - diagonal - right, 0), min(queries, own - diagonal + left + 1)
                if own >= keys:
                    high = low
                at = u64(kv_head * key_count + own)
            load_a(a, (k if of_keys else q) + at * u64(d_left * 4), d_left, lane)
            load_b(b, (v if of_keys else grad) + at * u64(dv_left * 4), dv_left, lane)
            for h in range(first_head, first_head + heads_of_other):
                for other in range(low, high):
                    query, key = (other, own) if of_keys else (own, other)
                    seen, added = True, f32(0)
                    if mask:
                        seen = ptx.load_global_u8(
                            mask_at
                            + u64(
                                batch * strides[0]
                                + h * strides[1]
                                + query * strides[2]
                                + key * strides[3]
                            )
                        ) != u32(0)
                    if bias:
                        added = ptx.load_global_f32(
                            bias_at
                            + u64(
                                batch * strides[4]
                                + h * strides[5]
                                + query * strides[6]
                                + key * strides[7]
                            )
                        )
                        seen = seen and added != NEG_INF
                    if seen:
                        q_at = u64((batch * heads + h) * queries + query)
                        k_at = u64(kv_head * key_count + key)
                        x = dot_a(
                            a,
                            (q + q_at * u64(d_left * 4))
                            if of_keys
                            else (k + k_at * u64(d_left * 4)),
                            d_left,
                            lane,
                        )
                        x, slope = x * scale_log2, f32(1)
                        if softcap:
                            t = tanh_accurate(ptx.div(x, cap))
                            x, slope = cap * t, f32(1) - t * t
                        if alibi:
                            steepness = (
                                ptx.load_global_f32(slopes + u64((batch * heads + h) * 4)) * LOG2E
                            )
                            x -= steepness * f32(abs(query + diagonal - key))
                        p = ptx.ex2(
                            x + added * LOG2E - ptx.load_global_f32(lse_at + q_at * u64(4)) * LOG2E
                        )
                        other_b = (
                            grad + q_at * u64(dv_left * 4)
                            if of_keys
                            else v + k_at * u64(dv_left * 4)
                        )
                        g = dot_b(b, other_b, dv_left, lane)
                        row = cuda.local.array(dv_parts, f32)
                        load_b(row, grad + q_at * u64(dv_left * 4), dv_left, lane)
                        delta = dot_b(row, out + q_at * u64(dv_left * 4), dv_left, lane)
                        if of_lse:
                            delta -= ptx.load_global_f32(pointers[13] + q_at * u64(4))
                        ds = p * (g - delta) * slope
                        add_a(
                            sum_a,
                            ds,
                            (q + q_at * u64(d_left * 4))
                            if of_keys
                            else (k + k_at * u64(d_left * 4)),
                            d_left,
                            lane,
                        )
                        if of_keys:
                            add_b(sum_b, p, other_b, dv_left, lane)
            store_a(sum_a, out_a + at * u64(d_left * 4), scale, d_left, lane)
            if of_keys:
                store_b(sum_b, out_b + at * u64(dv_left * 4), f32(1), dv_left, lane)

    pointers = types.UniTuple(u64, 14 if of_lse else 13)
    return Source(backward, types.void(pointers, *REST), 32 * WARPS)
