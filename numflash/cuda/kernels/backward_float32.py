"""float32 gradients for correctness, not for speed.

A warp per row of the side that owns, no tensor cores, every option.

The two passes of `kernels.backward`; a lane holds the columns c with c % 32 = lane. What a row does
not attend to is never read, so its value cannot matter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_find_block
from .float32_pairs import WARPS, bias_of, mask_allows, slope_of
from .scores import LOG2E, tanh_accurate
from .softmax import NEG_INF, warp_sum

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


class Pair(NamedTuple):
    """A query and a key that it attends to."""

    batch: Any
    head: Any  # of queries
    query: Any
    key: Any
    q: Any  # the query's number among the rows of q, dO, O and LSE
    k: Any  # the key's among those of k and v


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

    @device_function
    def find_range(own, keys, diagonal, call):
        """The rows of the other side that row `own` attends to, or that attend to it."""
        queries, left, right = call.sizes[0], call.sizes[5], call.sizes[6]
        low, high = max(own + diagonal - left, 0), min(keys, own + diagonal + right + 1)
        if of_keys:
            low, high = max(own - diagonal - right, 0), min(queries, own - diagonal + left + 1)
            if own >= keys:
                high = low
        return low, high

    @device_function
    def attends(batch, head, query, key, call):
        """Whether a query attends to a key, and what the bias adds to its score."""
        seen, added = True, f32(0)
        if mask:
            seen = mask_allows(call.pointers[10], call.strides, batch, head, query, key)
        if bias:
            added = bias_of(call.pointers[11], call.strides, batch, head, query, key)
            seen = seen and added != NEG_INF
        return seen, added

    @device_function
    def weigh(x, added, pair, diagonal, call):
        """P = exp(S - LSE) of a product x, and the derivative of the softcap."""
        x, slope = x * call.factors[0], f32(1)
        if softcap:
            t = tanh_accurate(ptx.div(x, call.factors[2]))
            x, slope = call.factors[2] * t, f32(1) - t * t
        if alibi:
            steepness = slope_of(call.pointers[12], pair.batch, call.sizes[4], pair.head)
            x -= steepness * f32(abs(pair.query + diagonal - pair.key))
        lse = ptx.load_global_f32(call.pointers[5] + pair.q * u64(4)) * LOG2E
        return ptx.ex2(x + added * LOG2E - lse), slope

    @device_function
    def find_delta(pair, lane, call):
        """D = sum(dO * O) of the pair's query, less the gradient of its LSE."""
        grad, out, dv_left = call.pointers[3], call.pointers[4], call.sizes[3]
        row = cuda.local.array(dv_parts, f32)
        load_b(row, grad + pair.q * u64(dv_left * 4), dv_left, lane)
        delta = dot_b(row, out + pair.q * u64(dv_left * 4), dv_left, lane)
        if of_lse:
            delta -= ptx.load_global_f32(call.pointers[13] + pair.q * u64(4))
        return delta

    @device_function
    def add_pair(a, b, sum_a, sum_b, added, pair, diagonal, lane, call):
        """sum_a += dS.c and, of keys, sum_b += P.e of a row c, e of the other side."""
        q, k, v, grad = call.pointers[:4]
        d_left, dv_left = call.sizes[2:4]
        c = (q + pair.q * u64(d_left * 4)) if of_keys else (k + pair.k * u64(d_left * 4))
        p, slope = weigh(dot_a(a, c, d_left, lane), added, pair, diagonal, call)
        e = grad + pair.q * u64(dv_left * 4) if of_keys else v + pair.k * u64(dv_left * 4)
        g = dot_b(b, e, dv_left, lane)
        ds = p * (g - find_delta(pair, lane, call)) * slope
        add_a(sum_a, ds, c, d_left, lane)
        if of_keys:
            add_b(sum_b, p, e, dv_left, lane)

    def backward(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        q, k, v, grad, _, _, out_a, out_b, diagonals, lengths = pointers[:10]
        queries, key_count, d_left, dv_left, heads, _, _ = sizes
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
            low, high = find_range(own, keys, diagonal, call)
            at = u64((batch * heads + head) * queries + own)
            if of_keys:
                at = u64(kv_head * key_count + own)
            load_a(a, (k if of_keys else q) + at * u64(d_left * 4), d_left, lane)
            load_b(b, (v if of_keys else grad) + at * u64(dv_left * 4), dv_left, lane)
            for h in range(first_head, first_head + heads_of_other):
                for other in range(low, high):
                    query, key = (other, own) if of_keys else (own, other)
                    seen, added = attends(batch, h, query, key, call)
                    if seen:
                        q_at = u64((batch * heads + h) * queries + query)
                        pair = Pair(batch, h, query, key, q_at, u64(kv_head * key_count + key))
                        add_pair(a, b, sum_a, sum_b, added, pair, diagonal, lane, call)
            store_a(sum_a, out_a + at * u64(d_left * 4), factors[1], d_left, lane)
            if of_keys:
                store_b(sum_b, out_b + at * u64(dv_left * 4), f32(1), dv_left, lane)

    pointers = types.UniTuple(u64, 14 if of_lse else 13)
    return Source(backward, types.void(pointers, *REST), 32 * WARPS)
