"""One call of the INT8 kernels in one compiled function.

Quantise and pack float operands, or pack quantised ones, and attend.

What a call needs besides its arrays comes as two arrays of numbers, which `launch_int8` prepares
once for all equal calls. Arrays come as addresses, as in `floats.call`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import array_at, reinterpret, unpacked
from ...jit.parallel import limit_threads, threads_now, use_threads
from ...numerics.fixedpoint import FINER, FIRST_KEYS
from ...numerics.scores import LIMIT
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, running_lanes
from ..isa.strided import strided_at
from ..semantics import OPTION_NUMBERS, OptionNumbers, semantics_at
from .arguments import Operands, Results, Sizes
from .first_keys import FirstKeys
from .flash_int8 import make_attend
from .packing import PackedKeys, key_packer, value_packer
from .quantize import PLAIN_BITS, Quantized, Source, largest_of, make_quantize
from .quantize_values import value_form, value_type

F = np.float32
MOST = 2.0**30  # scores from here on are not rounded to int32 at once


class Numbers(NamedTuple):
    """What the compiled call reads from one int64 array, in this order, before `OptionNumbers`."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    head_dim: int
    value_dim: int
    packed_length: int  # keys, in whole blocks
    channels: int  # of a packed key
    columns: int  # of a packed value
    smooth: int  # take the mean off K
    first_count: int  # keys that are the first of their sequence
    workers: int  # at most
    stream: int  # address of the AMX stream, or 0
    q: int  # from here on bytes from the start of scratch memory
    q_scale: int
    scores_scale: int
    packed_keys: int
    starts: int
    key_scale: int
    wide: int
    packed_values: int
    first_keys: int
    first_scale: int
    first_values: int
    value_scale: int
    offset: int
    m: int
    l: int
    counter: int


class Ready(NamedTuple):
    """Addresses of quantised operands, of their scales and of `QuantizedTensor.low`, 0 for none."""

    q: int
    q_scale: int
    k: int
    k_scale: int
    k_low: int
    v: int
    v_scale: int
    v_low: int


class Factors(NamedTuple):
    """What it reads from one float64 array: `scores.score_unit`, and the softcap in Q8.8 units."""

    unit: float
    softcap: float


PLACES = slice(Numbers._fields.index("q"), len(Numbers._fields))
NUMBERS = len(Numbers._fields)
FACTORS = len(Factors._fields)


@bare
def most_score(unit, q_scale, k_scale, d):
    """A bound of all scores, from the largest scales."""
    return abs(unit) * q_scale * k_scale * 128 * 128 * d


@bare
def largest_scale(scale):
    """The largest of positive float32 numbers, by their bits: a loop that LLVM makes vectors of."""
    return np.float64(np.int32(largest_of(reinterpret(scale, np.int32))).view(np.float32))


@functools.cache
def operands_at(isa_name: str, pv: str):
    """Functions (p, room) -> packed keys, packed values and first keys in scratch memory."""
    operand: type[np.generic] = np.int8 if VECTOR_ISAS[isa_name].group == 4 else np.int16
    value = value_type(isa_name, pv)

    @inline
    def keys_at(p, room):
        n, keys = p.batch * p.kv_heads, p.packed_length
        wide = array_at(room + p.wide, (n, keys // KEY_BLOCK), np.uint8)
        wide[:] = 0
        return PackedKeys(
            array_at(room + p.packed_keys, (n, keys * p.channels), operand),
            array_at(room + p.starts, (n, keys), np.int32),
            array_at(room + p.key_scale, (n, keys), np.float32),
            wide,
        )

    @inline
    def values_at(p, room):
        n, keys = p.batch * p.kv_heads, p.packed_length
        return array_at(room + p.packed_values, (n, keys * p.columns), value)

    @inline
    def first_at(p, room):
        n = p.batch * p.kv_heads
        return FirstKeys(
            array_at(room + p.first_keys, (n, FIRST_KEYS, p.head_dim), np.int16),
            array_at(room + p.first_scale, (n, FIRST_KEYS), np.float32),
            array_at(room + p.first_values, (n, FIRST_KEYS, p.columns), np.float32),
            p.first_count,
        )

    return keys_at, values_at, first_at


@functools.cache
def attend_packed(isa_name: str, pv: str, *rows: int):
    """f(p, o, f, most, operands, out, strides, room): attention of packed operands."""
    attend = make_attend(isa_name, pv, *rows)

    @inline
    def run(p, o, f, most, operands, out, strides, room):
        n = p.batch * p.heads
        counter = array_at(room + p.counter, (1,), np.int64)
        counter[0] = 0
        attend(
            operands,
            semantics_at(o, f.softcap, most >= MOST),
            Sizes(p.heads, p.kv_heads, p.keys, min(p.workers, threads_now()), p.stream),
            counter,
            Results(
                strided_at(strides, 3, out, p.heads, p.length, p.value_dim),
                array_at(room + p.m, (n, p.length), np.int32),
                array_at(room + p.l, (n, p.length), np.float32),
            ),
        )

    return run


@functools.cache
def make_float_call(isa_name: str, kind: str, pv: str, *rows: int) -> Callable[..., bool]:
    """call(at, out, room, numbers, strides, factors) -> whether the operands need `general_int8`; then nothing
    was written.

    at : the addresses of q (B, H, L, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv), rows of contiguous
        `kind`
    out, room : addresses of out (B, H, L, Dv) float32 and of scratch memory
    numbers : int64, the fields of `Numbers` and of `OptionNumbers`;  factors : float64, of `Factors`
    strides : of q, k, v and out, as `strided_at` takes them
    kind : "float32" or "bfloat16"
    rows : of a query tile, where these are not the tiling's
    """
    quantize = make_quantize(isa_name, kind, value_form(isa_name, pv))
    keys_at, values_at, first_at = operands_at(isa_name, pv)
    attend = attend_packed(isa_name, pv, *rows)

    @inline
    def operands(p, room):
        n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
        return Quantized(
            array_at(room + p.q, (n, p.length, p.head_dim), np.int8),
            array_at(room + p.q_scale, (n, p.length), np.float32),
            array_at(room + p.scores_scale, (n, p.length), np.float32),
            keys_at(p, room),
            values_at(p, room),
            first_at(p, room),
            array_at(room + p.value_scale, (n_kv, p.value_dim), np.float32),
            array_at(room + p.offset, (n_kv, p.head_dim), np.float32),
        )

    @kernel
    def call(at, out, room, numbers, strides, factors):
        q_at, k_at, v_at = at
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = Factors(*unpacked(factors, FACTORS))
        threads = limit_threads(p.workers)
        to = operands(p, room)
        source = Source(
            strided_at(strides, 0, q_at, p.heads, p.length, p.head_dim),
            strided_at(strides, 1, k_at, p.kv_heads, p.keys, p.head_dim),
            strided_at(strides, 2, v_at, p.kv_heads, p.keys, p.value_dim),
            array_at(o.key_lengths, (p.batch,), np.int64),
            p.smooth != 0,
            F(f.unit),
        )
        top, q_scale, k_scale = quantize(source, threads_now(), to)
        general = top >= PLAIN_BITS or np.float64(q_scale) * abs(f.unit) >= LIMIT
        if not general:
            most = most_score(f.unit, np.float64(q_scale), np.float64(k_scale), p.head_dim)
            x = Operands(to.q, to.cq, to.keys, to.values, to.first, to.v_scale)
            attend(p, o, f, most, x, out, strides, room)
        if p.workers < threads:
            use_threads(threads)
        return general

    return call


@functools.cache
def make_ready_call(isa_name: str, pv: str, *rows: int) -> Callable[..., bool]:
    """call(ready: the addresses of `Ready`, out, room, numbers, strides, factors) -> as the float call.

    Contiguous q (B, H, L, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) int8 with scales (B, H, L),
    (B, Hkv, S) and (B, Hkv, Dv) float32, all finite.
    """
    pack_keys = key_packer(isa_name, running_lanes(isa_name))
    pack_values = value_packer(isa_name, running_lanes(isa_name))
    keys_at, values_at, first_at = operands_at(isa_name, pv)
    attend = attend_packed(isa_name, pv, *rows)
    whole_words = VECTOR_ISAS[isa_name].group == 4
    step = VECTOR_ISAS[isa_name].step

    @bare
    def finer(x, low, i, n, j, t):
        """Value t of first row j of head n, in 1 / FINER of its step; low has i rows, or none."""
        rest = np.int16(low[n, j, t]) if i > 0 else np.int16(0)
        return np.int16(np.int16(x[n, j, t]) * np.int16(FINER) + rest)

    @inline
    def pack_first(p, k, k_low_at, k_scale, v, v_low_at, first):
        n, count = p.batch * p.kv_heads, min(FIRST_KEYS, p.keys)
        k_rows = count if k_low_at != 0 else 0
        v_rows = count if v_low_at != 0 else 0
        k_low = array_at(k_low_at, (n, k_rows, p.head_dim), np.int8)
        v_low = array_at(v_low_at, (n, v_rows, p.value_dim), np.int8)
        step = F(1 / FINER)
        first.keys[:], first.scale[:], first.values[:] = np.int16(0), F(0), F(0)
        for g in range(n):
            for j in range(count):
                first.scale[g, j] = k_scale[g * p.keys + j] * step
                for t in range(p.head_dim):
                    first.keys[g, j, t] = finer(k, k_low, k_rows, g, j, t)
                for t in range(p.value_dim):
                    first.values[g, j, t] = F(finer(v, v_low, v_rows, g, j, t)) * step

    @inline
    def pack(p, k_at, v_at, scale, keys, values):
        n = p.batch * p.kv_heads
        words = n * p.keys * p.head_dim // 4 if whole_words and p.head_dim % step == 0 else 0
        pack_keys(
            array_at(k_at, (n, p.keys, p.head_dim), np.int8),
            array_at(k_at, (words,), np.int32),
            scale.reshape((n, p.keys)),
            keys,
        )
        pack_values(array_at(v_at, (n, p.keys, p.value_dim), np.int8), values, p.columns)

    @kernel
    def call(ready, out, room, numbers, strides, factors):
        at = Ready(*ready)
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = Factors(*unpacked(factors, FACTORS))
        n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
        q_scale = array_at(at.q_scale, (n * p.length,), np.float32)
        k_scale = array_at(at.k_scale, (n_kv * p.keys,), np.float32)
        top_q, top_k = largest_scale(q_scale), largest_scale(k_scale)
        if max(top_q * abs(f.unit), top_k) >= LIMIT:
            return True
        threads = limit_threads(p.workers)
        cq = array_at(room + p.scores_scale, (n, p.length), np.float32)
        flat, unit = cq.reshape(cq.size), F(f.unit)
        for i in range(flat.size):
            flat[i] = F(q_scale[i] * unit)
        keys, values, first = keys_at(p, room), values_at(p, room), first_at(p, room)
        pack(p, at.k, at.v, k_scale, keys, values)
        k = array_at(at.k, (n_kv, p.keys, p.head_dim), np.int8)
        v = array_at(at.v, (n_kv, p.keys, p.value_dim), np.int8)
        pack_first(p, k, at.k_low, k_scale, v, at.v_low, first)
        most = most_score(f.unit, top_q, top_k, p.head_dim)
        q = array_at(at.q, (n, p.length, p.head_dim), np.int8)
        v_scale = array_at(at.v_scale, (n_kv, p.value_dim), np.float32)
        attend(p, o, f, most, Operands(q, cq, keys, values, first, v_scale), out, strides, room)
        if p.workers < threads:
            use_threads(threads)
        return False

    return call
