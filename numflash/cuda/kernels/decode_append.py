"""Appending tokens to a cache on the card: convert or quantise, and store, in one kernel.

A `cudaMemcpyAsync` does not convert: the tokens are uploaded as they are and converted here. One
warp takes a token of a KV head; the last block to finish moves the sequence's length on, so nothing
else has to be told.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_codes import KEY_PAIR, VALUE_PAIR, make_round_row
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
# k, v, scales, offset (B, Hkv, D) float32
# bytes: of a page over all heads and of one head in it: of K, then of V, then of the scales
# sizes: n, KV heads, D, Dv, elements of a stored key, of a stored value, pages of a sequence, log2
# of the slots of a page, sinks, ring
SIGNATURE = types.void(types.UniTuple(u64, 10), types.UniTuple(i64, 6), types.UniTuple(i32, 10))


def make_element(source: str) -> Any:
    """element(address, n) -> float32: the n-th element of an array of this type."""
    wide = source == "float32"
    bfloat16 = source == "bfloat16"

    @device_function
    def element(address, n):
        if wide:
            x = ptx.load_global_f32(address + n * u64(4))
        elif bfloat16:
            x = ptx.from_bits(ptx.load_global_u16(address + n * u64(2)) << u32(16))
        else:
            x = ptx.half_to_float(ptx.load_global_u16(address + n * u64(2)))
        return x

    return element


class Slot(NamedTuple):
    """Where a token of a KV head is stored."""

    k: Any  # addresses of the head's page of keys, and of values
    v: Any
    scale: Any  # address of the key's scale; `values_at` bytes further is the value's
    values_at: Any
    inside: Any  # the slot in its page
    within: Any  # and in its block of `span` slots, in which integers are stored row after row
    span: Any
    k_stored: Any  # elements of a stored key, of a stored value
    v_stored: Any


class Row(NamedTuple):
    """A row that a warp holds: a lane has every 32nd channel, zeros behind the last."""

    x: Any
    channels: Any
    top: Any  # bits of the largest |x|


@device_function
def store_value(to, row, element):
    """Store one element of an integer value, in the block's row for it."""
    at = to.v + u64(to.inside - to.within) * u64(to.v_stored)
    ptx.store_global_u8(at + u64(row * to.span + to.within), u32(element))


@device_function
def store_scales(to, key, value):
    """Store the scales of an integer token."""
    ptx.store_global_f32(to.scale, key)
    ptx.store_global_f32(to.scale + to.values_at, value)


def make_store_int8(turns: int) -> Any:
    """store(to: Slot, key: Row, value: Row, lane)."""

    @device_function
    def store(to, key, value, lane):
        good = key.top < EXPONENT and value.top < EXPONENT
        largest_k, largest_v = ptx.from_bits(u32(key.top)), ptx.from_bits(u32(value.top))
        factor_k, factor_v, scale_k, scale_v = f32(0), f32(0), f32(1), NO_VALUE
        if largest_k > NO_SCALE:
            factor_k, scale_k = ptx.div(f32(127), largest_k), ptx.div(largest_k, f32(127))
        if largest_v > NO_SCALE:
            factor_v, scale_v = ptx.div(f32(127), largest_v), ptx.div(largest_v, f32(127))
        for t in range(turns):
            c = lane + 32 * t
            if c < to.k_stored:
                n = ptx.to_int(ptx.mul(key.x[t], factor_k)) if good else i32(0)
                ptx.store_global_u8(to.k + u64(to.inside) * u64(to.k_stored) + u64(c), u32(n))
            if c < to.v_stored:
                store_value(to, c, ptx.to_int(ptx.mul(value.x[t], factor_v)) if good else i32(0))
        if lane == 0:
            store_scales(
                to, ptx.fmin(scale_k, KEY_LIMIT) if good else NAN, scale_v if good else NO_VALUE
            )

    return store


def make_store_int4(turns: int) -> Any:
    """store(to: Slot, key: Row, value: Row, lane): pairs of codes, as `decode_codes` says."""
    round_row = make_round_row(turns)

    @device_function
    def store(to, key, value, lane):
        good = key.top < EXPONENT and value.top < EXPONENT
        codes_k, codes_v = cuda.local.array(turns, i32), cuda.local.array(turns, i32)
        scale_k = round_row(key.x, key.channels, key.top, lane, codes_k)
        scale_v = round_row(value.x, value.channels, value.top, lane, codes_v)
        for t in range(turns):
            code = codes_k[t] if good else i32(0)
            pair = code | (ptx.shuffle_xor_i32(code, u32(KEY_PAIR)) << 4)
            at = KEY_PAIR * t + lane
            if lane < KEY_PAIR and at < to.k_stored:
                ptx.store_global_u8(to.k + u64(to.inside) * u64(to.k_stored) + u64(at), u32(pair))
            code = codes_v[t] if good else i32(0)
            pair = code | (ptx.shuffle_xor_i32(code, u32(VALUE_PAIR)) << 4)
            row = 16 * t + VALUE_PAIR * (lane >> 4) + (lane & (VALUE_PAIR - 1))
            if lane & VALUE_PAIR == 0 and row < to.v_stored:
                store_value(to, row, pair)
        if lane == 0:
            store_scales(
                to, ptx.fmin(scale_k, KEY_LIMIT) if good else NAN, scale_v if good else f32(0)
            )

    return store


def make_store_float(turns: int, dtype: str, turing: bool) -> Any:
    """store(to: Slot, key: Row, value: Row, lane) of 16 bits."""
    pack = ptx.pack_turing if turing else ptx.pack[dtype]
    nan_bits = 0x7FC0 if dtype == "bfloat16" else 0x7E00
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00

    @device_function
    def store(to, key, value, lane):
        # what rounds to infinity is not finite either
        finite = i32(1)
        for t in range(turns):
            bits_k = pack(key.x[t], f32(0)) & u32(0x7FFF)
            bits_v = pack(value.x[t], f32(0)) & u32(0x7FFF)
            if bits_k >= u32(infinite) or bits_v >= u32(infinite):
                finite = i32(0)
        good = warp_max_i32(i32(1) - finite) == 0
        for t in range(turns):
            c = lane + 32 * t
            if c < to.k_stored:
                ptx.store_global_u16(
                    to.k + (u64(to.inside) * u64(to.k_stored) + u64(c)) * u64(2),
                    pack(key.x[t], f32(0)) & u32(0xFFFF) if good else u32(nan_bits),
                )
            if c < to.v_stored:
                ptx.store_global_u16(
                    to.v + (u64(to.inside) * u64(to.v_stored) + u64(c)) * u64(2),
                    pack(value.x[t], f32(0)) & u32(0xFFFF) if good else u32(0),
                )

    return store


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

    `source` (float32, float16 or bfloat16 tokens) to `dtype` ("int8", "int4" or a 16-bit float).

    INT8 has the bits of `quantization.quantize(granularity="row")`, INT4 of `int4.quantize` of rows
    that `decode_rotate` has rotated. A token that is not finite is stored as zeros with a key scale
    that is NaN, for floats as a NaN key with zero values.
    """
    longest = max(d, dv)
    turns = (longest + 31) // 32
    element, page_of = make_element(source), make_page_of(paged)
    smoothed = smooth
    if dtype == "int8":
        store = make_store_int8(turns)
    else:
        store = (
            make_store_int4(turns) if dtype == "int4" else make_store_float(turns, dtype, turing)
        )

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
        position = length + i
        # of the tokens that share a slot of a ring the last one: blocks run in any order
        lasting = position < sinks or position >= length + count - ring_slots
        if i < count and lasting:
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
                    x[t] = element(key, at)
                    if smoothed:
                        moved = ptx.sub(
                            x[t],
                            ptx.load_global_f32(offset + (head * u64(channels) + u64(c)) * u64(4)),
                        )
                        if abs(x[t]) <= LARGEST:
                            moved = ptx.fmin(ptx.fmax(moved, -LARGEST), LARGEST)
                        x[t] = moved
                if c < columns:
                    y[t] = element(value, token * u64(columns) + u64(c))
                top_k = ptx.imax(top_k, i32(ptx.bits(x[t]) & u32(0x7FFFFFFF)))
                top_v = ptx.imax(top_v, i32(ptx.bits(y[t]) & u32(0x7FFFFFFF)))
            top_k, top_v = warp_max_i32(top_k), warp_max_i32(top_v)
            span = min(i32(1) << shift, i32(BLOCK))
            to = Slot(
                k + page * u64(k_page) + u64(g) * u64(k_head),
                v + page * u64(v_page) + u64(g) * u64(v_head),
                scales + page * u64(s_page) + u64(g) * u64(s_head) + u64(inside * 4),
                u64(s_head) >> u64(1),
                inside,
                inside & (span - 1),
                span,
                k_stored,
                v_stored,
            )
            store(to, Row(x, channels, top_k), Row(y, columns, top_v), lane)
        cuda.syncthreads()
        if thread == 0:
            blocks = i32(cuda.gridDim.x * cuda.gridDim.y)
            # the last block: all others have read the length
            if ptx.atomic_add(tickets + u64(b * 4), i32(1)) == blocks - 1:
                ptx.atomic_add(tickets + u64(b * 4), -blocks)
                ptx.atomic_add(lengths + u64(b * 4), count)

    return Source(append, SIGNATURE, THREADS)
