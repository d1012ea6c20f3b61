"""Attention of few rows of queries, as a new token has: keys and values are read where they are.

A packed key pays where many rows multiply it. For the heads of one group and one token, packing
takes longer than all products, which are here those of `few_products`.

Scores are float32, in blocks of `KEYS` with online softmax as in `flash_float`. Keys are divided
into parts where there are few heads, as many for every number of threads, and the parts' states put
together in order. Rows that float32 cannot hold are marked, to be done again in float64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, inlined, kernel
from ...jit.memory import array_at, uncleared, unpacked, zeros
from ...jit.parallel import limit_threads, over_tasks, use_threads
from ...numerics.fixedpoint import LN2
from ..isa.strided import Strided
from ..isa.vectors import address
from ..semantics import OPTION_NUMBERS, OptionNumbers, Semantics, semantics_at
from . import float_rows
from .call import FACTORS, NUMBERS, Factors, Numbers, operands_at
from .few_products import (
    HIDDEN,
    KEYS,
    SIZES,
    hide_unseen,
    make_few_products,
    room_for_rows,
    row_of,
    seen_keys,
)
from .flash_rows import LARGEST, LOWEST, option_changes, row_functions
from .float_isas import FLOAT_ISAS

F = np.float32


class Few(NamedTuple):
    """What the kernel reads and writes.

    q, k, v : (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv), float32 or bfloat16
    scale : of the scores, in units of log2
    out : (B * Hkv, parts, rows, Dv) float32 sums of weights times values; rows those of all heads of a
        group
    m, l : (B * Hkv, parts, rows) float32 maxima and sums of weights
    spoiled : (B * Hkv, parts, rows) uint8, 1 for scores that are not finite
    """

    q: Strided
    k: Strided
    v: Strided
    scale: float
    semantics: Semantics
    out: np.ndarray
    m: np.ndarray
    l: np.ndarray
    spoiled: np.ndarray


@functools.cache
def make_work(name: str, kind: str):
    """work(task, few): the states of one part of the keys of one KV head."""
    isa = FLOAT_ISAS[name]
    lanes, size = isa.lanes, SIZES[kind]
    rows_at_hand, block_scores, block_values = make_few_products(name, kind)
    top_of = float_rows.row_max(name)
    weights = float_rows.row_exp(name)
    total_of = float_rows.row_total(name)
    times = float_rows.row_times(name)
    _, _, _, nothing_seen = row_functions(False)
    apply_options = option_changes(False)

    @inlined
    def changed(few, b, h, i, first, x, at, count):
        """The options' changes of a row's scores x[at:]; False where all keys are hidden."""
        semantics, p = few.semantics, x[at : at + count]
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + count):
            return False
        apply_options(semantics, b, h, i, first, p)
        return True

    @bare
    def weigh(x, at, vectors, m, l, o):
        """Scores x[at:] of a row to weights, whose sum is added to the vector l; what l and o hold is
        rescaled. Returns the row's new maximum.
        """
        top = top_of(x, at, vectors)
        if top == HIDDEN:
            for j in range(at, at + vectors * lanes):
                if x[j] != x[j]:
                    top = F(np.nan)
        if not top <= m:
            if m != HIDDEN:
                shrink = F(np.exp2(F(m - top)))
                for t in range(lanes):
                    l[t] = l[t] * shrink
                for t in range(o.size):
                    o[t] = o[t] * shrink
            m = top
        if m == HIDDEN:
            x[at : at + vectors * lanes] = F(0)
        else:
            weights(x, at, vectors, m, x, at, l, 0)
        return m

    @inlined
    def block_rows(few, n, first, count, lo, hi, x, m, l, o, spoiled):
        """The weights of all rows for a block; False if none of them sees any of its keys."""
        rows, length, kv_heads = few.out.shape[2], few.q.length, few.k.heads
        b, group, vectors = n // kv_heads, rows // length, (count + lanes - 1) // lanes
        any_seen = False
        for r in range(rows):
            at, h = r * KEYS, n % kv_heads * group + r // length
            if times(x, at, vectors, few.scale, x, at):
                spoiled[r] = np.uint8(1)
            there = changed(few, b, h, r % length, first, x, at, count)
            seen, seen_stop = lo[r] - first, hi[r] - first if there else 0
            any_seen |= hide_unseen(x, at, count, vectors * lanes, seen, seen_stop)
            m[r] = weigh(x, at, vectors, m[r], l[r], o[r])
        return any_seen

    @inline(float_math=True)
    def work(task, few):
        """One part of the keys of one KV head."""
        _, parts, rows, dv = few.out.shape
        n, part = task // parts, task % parts
        x = uncleared((rows * KEYS,), F, "scores of few rows")
        l = zeros((rows, lanes), F, "sums of few rows' weights")
        lo = uncleared((rows,), np.int64, "first keys of few rows")
        hi = uncleared((rows,), np.int64, "ends of few rows")
        nbytes = room_for_rows(few.k, rows, size)
        room = uncleared((nbytes,), np.uint8, "keys of few rows")
        room_at = address(room) if nbytes > 0 else 0
        o, m, spoiled = few.out[n, part], few.m[n, part], few.spoiled[n, part]
        o[:], m[:], spoiled[:] = F(0), HIDDEN, np.uint8(0)
        begin, end = seen_keys(few.semantics, few.q, few.k, n, lo, hi)
        share = (end - begin + parts - 1) // parts
        stop = min(end, begin + (part + 1) * share)
        for first in range(begin + part * share, stop, KEYS):
            count = min(KEYS, stop - first)
            keys = rows_at_hand(few.k, n, first, count, room_at)
            block_scores(keys, few.k.heads, n, count, few.q, x)
            if block_rows(few, n, first, count, lo, hi, x, m, l, o, spoiled):
                block_values(rows_at_hand(few.v, n, first, count, 0), count, x, o)
        for r in range(rows):
            few.l[n, part, r] = total_of(l[r], 0)

    return work


@functools.cache
def make_few_call(name: str, kind: str):
    """`call.make_call` for few rows: call(q, k, v, out, lse, room, numbers, strides, factors).

    kind : "float32" or "bfloat16", of q, k and v
    """
    work = make_work(name, kind)

    @inline
    def row_state(few, n, r, out):
        """out = the sum of a row's parts, each in units of the largest; the maximum and the sum of
        weights.
        """
        parts, top, total = few.out.shape[1], HIDDEN, F(0)
        for part in range(parts):
            y = few.m[n, part, r]
            top = top if y <= top else y  # a NaN stays
        out[:] = F(0)
        for part in range(parts):
            if few.m[n, part, r] != HIDDEN:
                factor = F(np.exp2(F(few.m[n, part, r] - top)))
                total += few.l[n, part, r] * factor
                for t in range(out.size):
                    out[t] += few.out[n, part, r, t] * factor
        return top, total

    @inline
    def finish(few, n, r, out, uncertain):
        """A row's result and LSE, and whether float32 could not hold it."""
        redo = False
        for part in range(few.out.shape[1]):
            redo |= few.spoiled[n, part, r] != 0
        top, total = row_state(few, n, r, out)
        if total == F(0):
            return HIDDEN, redo or uncertain
        for t in range(out.size):
            out[t] = out[t] / total
            redo |= not abs(out[t]) <= LARGEST
        lse = F((top + np.log2(total)) * F(LN2))
        return max(lse, -LARGEST), redo or not lse > LOWEST

    @kernel
    def call(q_at, k_at, v_at, out_at, lse_at, room, numbers, strides, factors):
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = Factors(*unpacked(factors, FACTORS))
        threads = limit_threads(p.workers)
        semantics = semantics_at(o, f.softcap, False)
        heads, rows = p.batch * p.kv_heads, p.heads // p.kv_heads * p.length
        states = room + p.states
        sums = heads * p.parts * rows
        q, k, v, out = operands_at(p, strides, q_at, k_at, v_at, out_at, p.head_dim)
        few = Few(
            q,
            k,
            v,
            F(f.scale),
            semantics,
            array_at(states, (heads, p.parts, rows, p.value_dim), np.float32),
            array_at(states + sums * p.value_dim * 4, (heads, p.parts, rows), np.float32),
            array_at(states + sums * (p.value_dim + 1) * 4, (heads, p.parts, rows), np.float32),
            array_at(room + p.spoiled, (heads, p.parts, rows), np.uint8),
        )
        over_tasks(work, heads * p.parts, (few,))
        lse = array_at(lse_at, (heads, rows), np.float32)
        redo = array_at(room + p.redo, (heads, rows), np.uint8)
        # a row of nothing may have scores that options have put beyond float32
        uncertain = semantics.has_bias or semantics.slopes.size > 0
        uncertain |= semantics.functions.masked != 0
        some = False
        for n in range(heads):
            for r in range(rows):
                result = array_at(row_of(out, k.heads, n, r), (out.d,), np.float32)
                lse[n, r], again = finish(few, n, r, result, uncertain)
                redo[n, r] = again
                some |= again
        if p.workers < threads:
            use_threads(threads)
        return some

    return call
