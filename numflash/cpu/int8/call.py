"""One call of the INT8 kernels in one compiled function.

Quantise and pack float operands, or pack quantised ones, and attend: where heads are shared out evenly, a
worker does all of it for its own (`by_head`), otherwise one comes after the other.

What a call needs besides its arrays comes as two arrays of numbers, which `launch_int8` prepares
once for all equal calls. Arrays come as addresses, as in `floats.call`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import array_at, reinterpret, uncleared, unpacked
from ...jit.parallel import limit_threads, threads_now, use_threads
from ...numerics.fixedpoint import FINER, FIRST_KEYS
from ...numerics.scores import LIMIT
from ...tiling import KEY_BLOCK
from ..head_shares import heads_are_shared_out, least_heads
from ..isa.isas import VECTOR_ISAS, running_lanes
from ..isa.strided import strided_at
from ..semantics import OPTION_NUMBERS, OptionNumbers, semantics_at
from .arguments import Operands, Results, Sizes
from .by_head import MOST, TOO_LARGE, make_attend_heads
from .first_keys import FirstKeys
from .flash_int8 import make_attend
from .packing import (
    PackedKeys,
    key_packer,
    key_rows_packer,
    panel_room,
    value_block_packer,
    value_packer,
)
from .quantize import PLAIN_BITS, Quantized, Source, largest_of, make_quantize
from .quantize_values import value_form, value_type

F = np.float32


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


class Floats(NamedTuple):
    """Float operands, and what becomes of them."""

    source: Source
    to: Quantized


class Integers(NamedTuple):
    """Quantised keys and values, and what they are packed to."""

    k: np.ndarray  # (Nkv, S, D) int8
    words: np.ndarray  # K as int32, or nothing
    k_scale: np.ndarray  # (Nkv, S) float32
    k_low: np.ndarray  # (Nkv, up to FIRST_KEYS, D) int8, or no rows
    v: np.ndarray  # (Nkv, S, Dv) int8
    v_low: np.ndarray
    keys: PackedKeys
    values: np.ndarray
    first: FirstKeys
    most: float  # a bound of all scores


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


@bare
def sizes_of(p):
    return Sizes(p.heads, p.kv_heads, p.keys, min(p.workers, threads_now()), p.stream)


@bare
def results_at(p, out, strides, room):
    n = p.batch * p.heads
    return Results(
        strided_at(strides, 3, out, p.heads, p.length, p.value_dim),
        array_at(room + p.m, (n, p.length), np.int32),
        array_at(room + p.l, (n, p.length), np.float32),
    )


@inline
def counter_at(p, room):
    """Of tasks, and whether something was found that needs `general_int8`."""
    counter = array_at(room + p.counter, (2,), np.int64)
    counter[0] = 0
    counter[1] = 0
    return counter


@functools.cache
def make_float_call(isa_name: str, kind: str, pv: str, *rows: int) -> Callable[..., bool]:
    """call(at, out, room, numbers, strides, factors) -> whether the operands need `general_int8`; what was
    written then does not count.

    at : the addresses of q (B, H, L, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv), rows of contiguous
        `kind`
    out, room : addresses of out (B, H, L, Dv) float32 and of scratch memory
    numbers : int64, the fields of `Numbers` and of `OptionNumbers`;  factors : float64, of `Factors`
    strides : of q, k, v and out, as `strided_at` takes them
    kind : "float32" or "bfloat16"
    rows : of a query tile, where these are not the tiling's
    """
    quantize, quantize_heads, heads_need = make_quantize(isa_name, kind, value_form(isa_name, pv))
    keys_at, values_at, first_at = operands_at(isa_name, pv)
    attend, least = make_attend(isa_name, pv, *rows), least_heads(isa_name)

    @bare
    def bound(found, source):
        """A bound of all scores, from the largest magnitude, as bits, and the largest scales."""
        top, q_scale, k_scale = found
        unit, q_most, k_most = np.float64(source.unit), np.float64(q_scale), np.float64(k_scale)
        if top >= PLAIN_BITS or q_most * abs(unit) >= LIMIT:
            return TOO_LARGE
        return most_score(unit, q_most, k_most, source.q.d)

    @inline
    def needs_of(heads, given):
        return heads_need(heads, given.source, given.to)

    @bare
    def prepare(first, stop, slot, given, needs):
        found = quantize_heads(first, stop, slot, given.source, given.to, needs)
        return bound(found, given.source)

    attend_heads = make_attend_heads(isa_name, pv, needs_of, prepare, *rows)

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
        x = Operands(to.q, to.cq, to.keys, to.values, to.first, to.v_scale)
        sizes, results, counter = (
            sizes_of(p),
            results_at(p, out, strides, room),
            counter_at(p, room),
        )
        n_kv = p.batch * p.kv_heads
        if heads_are_shared_out(n_kv, sizes.workers, source.lengths, least):
            attend_heads(Floats(source, to), o, f.softcap, x, sizes, counter, results)
        else:
            most = bound(quantize(source, sizes.workers, to), source)
            if most < TOO_LARGE:
                attend(x, semantics_at(o, f.softcap, most >= MOST), sizes, counter, results)
            else:
                counter[1] = 1
        if p.workers < threads:
            use_threads(threads)
        return counter[1] != 0

    return call


@functools.cache
def make_ready_call(isa_name: str, pv: str, *rows: int) -> Callable[..., bool]:
    """call(ready: the addresses of `Ready`, out, room, numbers, strides, factors) -> as the float call.

    Contiguous q (B, H, L, D), k (B, Hkv, S, D) and v (B, Hkv, S, Dv) int8 with scales (B, H, L),
    (B, Hkv, S) and (B, Hkv, Dv) float32, all finite.
    """
    lanes = running_lanes(isa_name)
    pack_keys, pack_values = key_packer(isa_name, lanes), value_packer(isa_name, lanes)
    key_rows, value_block = key_rows_packer(isa_name, lanes), value_block_packer(isa_name, lanes)
    new_panel = panel_room(isa_name, lanes)
    keys_at, values_at, first_at = operands_at(isa_name, pv)
    attend, least = make_attend(isa_name, pv, *rows), least_heads(isa_name)
    whole_words = VECTOR_ISAS[isa_name].group == 4
    step = VECTOR_ISAS[isa_name].step

    @bare
    def finer(x, low, i, n, j, t):
        """Value t of first row j of head n, in 1 / FINER of its step; low has i rows, or none."""
        rest = np.int16(low[n, j, t]) if i > 0 else np.int16(0)
        return np.int16(np.int16(x[n, j, t]) * np.int16(FINER) + rest)

    @bare
    def pack_first(n, slot, x):
        """The first keys of head n to a slot of `first`."""
        keys, scale, values = x.first.keys[slot], x.first.scale[slot], x.first.values[slot]
        keys[:], scale[:], values[:] = np.int16(0), F(0), F(0)
        unit = F(1 / FINER)
        for j in range(min(FIRST_KEYS, x.k.shape[1])):
            scale[j] = x.k_scale[n, j] * unit
            for t in range(x.k.shape[2]):
                keys[j, t] = finer(x.k, x.k_low, x.k_low.shape[1], n, j, t)
            for t in range(x.v.shape[2]):
                values[j, t] = F(finer(x.v, x.v_low, x.v_low.shape[1], n, j, t)) * unit

    @bare
    def columns_of(x):
        return x.values.shape[1] // x.keys.start.shape[1]

    @inline
    def needs_of(heads, x):
        block = uncleared((KEY_BLOCK * columns_of(x),), np.int8, "values of a block of keys")
        return new_panel(x.keys), block

    @bare
    def prepare(first, stop, slot, x, needs):
        """Pack KV heads `first` to stop - 1, from a slot on."""
        panel, block = needs
        for n in range(first, stop):
            to = slot + n - first
            key_rows(n, to, 0, x.keys.start.shape[1], x.k, x.words, x.k_scale, panel, x.keys)
            for i in range(x.keys.wide.shape[1]):
                value_block(n, to, i, x.v, block, columns_of(x), x.values)
            pack_first(n, to, x)
        return x.most

    @inline
    def prepare_all(x):
        pack_keys(x.k, x.words, x.k_scale, x.keys)
        pack_values(x.v, x.values, columns_of(x))
        for n in range(x.k.shape[0]):
            pack_first(n, n, x)

    attend_heads = make_attend_heads(isa_name, pv, needs_of, prepare, *rows)

    @inline
    def integers(p, at, k_scale, most, room):
        n, first_rows = p.batch * p.kv_heads, min(FIRST_KEYS, p.keys)
        words = n * p.keys * p.head_dim // 4 if whole_words and p.head_dim % step == 0 else 0
        k_rows, v_rows = first_rows if at.k_low != 0 else 0, first_rows if at.v_low != 0 else 0
        return Integers(
            array_at(at.k, (n, p.keys, p.head_dim), np.int8),
            array_at(at.k, (words,), np.int32),
            k_scale.reshape((n, p.keys)),
            array_at(at.k_low, (n, k_rows, p.head_dim), np.int8),
            array_at(at.v, (n, p.keys, p.value_dim), np.int8),
            array_at(at.v_low, (n, v_rows, p.value_dim), np.int8),
            keys_at(p, room),
            values_at(p, room),
            first_at(p, room),
            most,
        )

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
        most = most_score(f.unit, top_q, top_k, p.head_dim)
        given = integers(p, at, k_scale, most, room)
        q = array_at(at.q, (n, p.length, p.head_dim), np.int8)
        v_scale = array_at(at.v_scale, (n_kv, p.value_dim), np.float32)
        x = Operands(q, cq, given.keys, given.values, given.first, v_scale)
        sizes, results, counter = (
            sizes_of(p),
            results_at(p, out, strides, room),
            counter_at(p, room),
        )
        lengths = array_at(o.key_lengths, (p.batch,), np.int64)
        if heads_are_shared_out(n_kv, sizes.workers, lengths, least):
            attend_heads(given, o, f.softcap, x, sizes, counter, results)
        else:
            prepare_all(given)
            attend(x, semantics_at(o, f.softcap, most >= MOST), sizes, counter, results)
        if p.workers < threads:
            use_threads(threads)
        return False

    return call
