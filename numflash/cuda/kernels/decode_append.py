"""Appending tokens to a cache on the card: convert or quantise, and store, in one kernel.

A `cudaMemcpyAsync` does not convert: the tokens are uploaded as they are and converted here. One
warp takes a token of a KV head; the last block to finish moves the sequence's length on, so nothing
else has to be told.
"""

from __future__ import annotations

import math

from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .decode_pieces import (
    EXPONENT,
    KEY_LIMIT,
    NO_SCALE,
    NO_VALUE,
    THREADS,
    WARPS,
    make_page_of,
    remainder,
    warp_max_i32,
)

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
NAN, LARGEST = f32(math.nan), f32(3.4028234663852886e38)
BLOCK = 128

# pointers: key (B, Hkv, n, D), value (B, Hkv, n, Dv), counts (B), table, lengths (B), tickets (B),
# k, v, scales, offset (B, Hkv, D)
#           float32
# bytes: of a page of K, V and scales, over all heads, and of one head in it sizes: n, KV heads, D,
# Dv, channels of a stored key, of a stored value, pages of a sequence, log2 of the slots of a page,
# sinks,
#        ring
SIGNATURE = types.void(types.UniTuple(u64, 10), types.UniTuple(i64, 6), types.UniTuple(i32, 10))


def decode_append(
    d: int,
    dv: int,
    source: str,
    dtype: str,
    paged: bool = False,
    smooth: bool = False,
    turing: bool = False,
) -> Source:
    """The kernel for channels d and dv.

    `source` (float32, float16 or bfloat16 tokens) to `dtype` ("int8" or a 16-bit float).

    INT8 has the bits of `quantization.quantize(granularity="row")`. A token that is not finite is
    stored as zeros with a key scale that is NaN, for floats as a NaN key with zero values.
    """
    exact = dtype == "int8"
    longest = max(d, dv)
    turns = (longest + 31) // 32
    wide = source == "float32"
    bfloat16 = source == "bfloat16"
    pack = None if exact else ptx.pack_turing if turing else ptx.pack[dtype]
    page_of = make_page_of(paged)
    smoothed, nan_bits = smooth, 0x7FC0 if dtype == "bfloat16" else 0x7E00
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def append(pointers, bytes_of, sizes):
        key, value, counts, tables, lengths, tickets, k, v, scales, offset = pointers
        k_page, k_head, v_page, v_head, s_page, s_head = bytes_of
        tokens, kv_heads, channels, columns, k_stored, v_stored, width, shift, sinks, ring_slots = (
            sizes
        )
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        g, b = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        length = ptx.load_global_written(lengths + u64(b * 4))
        count = ptx.load_global_s32(counts + u64(b * 4))
        head = u64(b * kv_heads + g)
        x = cuda.local.array(turns, f32)
        y = cuda.local.array(turns, f32)
        i = i32(cuda.blockIdx.x) * WARPS + warp
        if i < count:
            position = length + i
            slot = position
            if slot >= sinks:
                slot = sinks + remainder(position - sinks, ring_slots)
            page = page_of(tables + u64(b * width) * u64(4) if paged else u64(b), slot, shift)
            inside = slot & ((i32(1) << shift) - 1)
            token = head * u64(tokens) + u64(i)
            top_k, top_v = i32(0), i32(0)
            for t in range(turns):
                c = lane + 32 * t
                x[t], y[t] = f32(0), f32(0)
                if c < channels:
                    at = token * u64(channels) + u64(c)
                    if wide:
                        x[t] = ptx.load_global_f32(key + at * u64(4))
                    elif bfloat16:
                        x[t] = ptx.from_bits(ptx.load_global_u16(key + at * u64(2)) << u32(16))
                    else:
                        x[t] = ptx.half_to_float(ptx.load_global_u16(key + at * u64(2)))
                    if smoothed:
                        moved = ptx.sub(
                            x[t],
                            ptx.load_global_f32(offset + (head * u64(channels) + u64(c)) * u64(4)),
                        )
                        if abs(x[t]) <= LARGEST:
                            moved = ptx.fmin(ptx.fmax(moved, -LARGEST), LARGEST)
                        x[t] = moved
                if c < columns:
                    at = token * u64(columns) + u64(c)
                    if wide:
                        y[t] = ptx.load_global_f32(value + at * u64(4))
                    elif bfloat16:
                        y[t] = ptx.from_bits(ptx.load_global_u16(value + at * u64(2)) << u32(16))
                    else:
                        y[t] = ptx.half_to_float(ptx.load_global_u16(value + at * u64(2)))
                top_k = ptx.imax(top_k, i32(ptx.bits(x[t]) & u32(0x7FFFFFFF)))
                top_v = ptx.imax(top_v, i32(ptx.bits(y[t]) & u32(0x7FFFFFFF)))
            top_k, top_v = warp_max_i32(top_k), warp_max_i32(top_v)
            k_at = k + page * u64(k_page) + u64(g) * u64(k_head)
            v_at = v + page * u64(v_page) + u64(g) * u64(v_head)
            if exact:
                good = top_k < EXPONENT and top_v < EXPONENT
                largest_k, largest_v = ptx.from_bits(u32(top_k)), ptx.from_bits(u32(top_v))
                factor_k, factor_v, scale_k, scale_v = f32(0), f32(0), f32(1), NO_VALUE
                if largest_k > NO_SCALE:
                    factor_k, scale_k = ptx.div(f32(127), largest_k), ptx.div(largest_k, f32(127))
                if largest_v > NO_SCALE:
                    factor_v, scale_v = ptx.div(f32(127), largest_v), ptx.div(largest_v, f32(127))
                span = min(i32(1) << shift, i32(BLOCK))
                within = inside & (span - 1)
                for t in range(turns):
                    c = lane + 32 * t
                    if c < k_stored:
                        n = ptx.to_int(ptx.mul(x[t], factor_k)) if good else i32(0)
                        ptx.store_global_u8(k_at + u64(inside) * u64(k_stored) + u64(c), u32(n))
                    if c < columns:
                        n = ptx.to_int(ptx.mul(y[t], factor_v)) if good else i32(0)
                        ptx.store_global_u8(
                            v_at + u64(inside - within) * u64(columns) + u64(c * span + within),
                            u32(n),
                        )
                if lane == 0:
                    at = page * u64(s_page) + u64(g) * u64(s_head) + u64(inside * 4)
                    ptx.store_global_f32(scales + at, ptx.fmin(scale_k, KEY_LIMIT) if good else NAN)
                    ptx.store_global_f32(
                        scales + at + (u64(s_head) >> u64(1)), scale_v if good else NO_VALUE
                    )
            else:
                # what rounds to infinity is not finite either
                finite = i32(1)
                for t in range(turns):
                    bits_k = pack(x[t], f32(0)) & u32(0x7FFF)
                    bits_v = pack(y[t], f32(0)) & u32(0x7FFF)
                    if bits_k >= u32(infinite) or bits_v >= u32(infinite):
                        finite = i32(0)
                good = warp_max_i32(i32(1) - finite) == 0
                for t in range(turns):
                    c = lane + 32 * t
                    if c < k_stored:
                        ptx.store_global_u16(
                            k_at + (u64(inside) * u64(k_stored) + u64(c)) * u64(2),
                            pack(x[t], f32(0)) & u32(0xFFFF) if good else u32(nan_bits),
                        )
                    if c < v_stored:
                        ptx.store_global_u16(
                            v_at + (u64(inside) * u64(v_stored) + u64(c)) * u64(2),
                            pack(y[t], f32(0)) & u32(0xFFFF) if good else u32(0),
                        )
        cuda.syncthreads()
        if thread == 0:
            blocks = i32(cuda.gridDim.x * cuda.gridDim.y)
            if (
                ptx.atomic_add(tickets + u64(b * 4), i32(1)) == blocks - 1
            ):  # all others have read the length
                ptx.atomic_add(tickets + u64(b * 4), -blocks)
                ptx.atomic_add(lengths + u64(b * 4), count)

    return Source(append, SIGNATURE, THREADS)
