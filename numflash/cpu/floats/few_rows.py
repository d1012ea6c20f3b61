"""Attention of few rows of queries, as a new token has: keys and values are read where they are.

A packed key pays where many rows multiply it. For the heads of one group and one token, packing
takes longer than all products, so that here the scores of as many keys as a vector has lanes are
summed from their rows by a transposing tree, and rows of V are added up in registers.

Scores are float32, in blocks of `KEYS` with online softmax as in `flash_float`. Keys are divided
into parts where there are few heads, as many for every number of threads, and the parts' states put
together in order. Rows that float32 cannot hold are marked, to be done again in float64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import inline, kernel, own
from ...jit.memory import array_at, uncleared, unpacked, zeros
from ...jit.parallel import limit_threads, over_tasks, use_threads
from ...numerics.fixedpoint import LN2
from ..isa.strided import Strided, row_at
from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    address,
    fold_tree,
    load_at,
    pointer,
    pointer_at,
    prefetch,
    repeat,
    store_at,
)
from ..semantics import OPTION_NUMBERS, OptionNumbers, Semantics, seen_range, semantics_at
from . import float_rows
from .call import FACTORS, NUMBERS, Factors, Numbers, operands_at
from .flash_rows import LARGEST, LOWEST, option_changes, row_functions
from .float_isas import FLOAT_ISAS

KEYS = 64  # of a block: their rows stay in L1 for all rows of queries
WIDE = 4  # vectors of V's columns that are summed at a time
SIZES = {"float32": 4, "bfloat16": 2}  # bytes
HIDDEN = np.float32(-np.inf)
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


def _floats(b, isa, kind: str, base, element):
    """A vector of float32 or bfloat16 numbers from `element` on, as float32."""
    place = b.mul(element, I64(SIZES[kind]))
    if kind == "float32":
        return load_at(b, base, isa.floats, place)
    ints, halves = isa.vector(I32), load_at(b, base, isa.vector(I16), place, 2)
    return b.bitcast(b.shl(b.zext(halves, ints), isa.fill(b, ints, 16)), isa.floats)


@functools.cache
def key_scores(name: str, kind: str, ahead: bool):
    """Intrinsic f(k, stride, count, d, q, out): q . k of a vector's lanes of keys, to `out`, float32.

    k, q, out : addresses, of `kind` but for out;  stride : bytes from one key to the next;  count : keys
        that there are, the last of which stands for the others;  d : whole vectors
    ahead : prefetch the keys after these, which so many rows side by side hide from the CPU's own
        prefetching
    """
    isa = FLOAT_ISAS[name]
    lanes = isa.lanes

    @intrinsic
    def scores(typingctx, k, stride, count, d, q, out):
        def codegen(context, b, sig, a):
            pk, pq, po = (pointer(b, a[n]) for n in (0, 4, 5))
            last = b.sub(a[2], I64(1))
            rows = []
            for r in range(lanes):
                row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
                rows.append(pointer_at(b, pk, b.mul(a[1], row)))

            def add(n, sums):
                at = b.mul(n, I64(lanes))
                x = _floats(b, isa, kind, pq, at)
                if ahead:
                    next_keys = b.add(b.mul(a[1], I64(lanes)), b.mul(n, I64(lanes * SIZES[kind])))
                    for row in rows:
                        prefetch(b, pointer_at(b, row, next_keys))
                return [
                    isa.fma(b, _floats(b, isa, kind, row, at), x, y)
                    for row, y in zip(rows, sums, strict=True)
                ]

            nothing = [isa.fill(b, isa.floats, 0.0)] * lanes
            sums = repeat(b, I64(0), b.sdiv(a[3], I64(lanes)), nothing, add)
            store_at(b, fold_tree(b, sums, b.fadd), po, I64(0))
            return context.get_dummy_value()

        return types.void(k, stride, count, d, q, out), codegen

    return scores


@functools.cache
def add_values(name: str, kind: str, rows: int, width: int):
    """Intrinsic f(p, p_stride, v, v_stride, count, o, o_stride): o[r] += p[r, j] * v[j].

    p, v, o : addresses of `rows` rows of weights, of `count` rows of V, of `kind`, and of `rows` rows of
        sums, `width` vectors of columns;  strides in bytes
    """
    isa = FLOAT_ISAS[name]
    columns = range(width)

    @intrinsic
    def add(typingctx, p, p_stride, v, v_stride, count, o, o_stride):
        def codegen(context, b, sig, a):
            pv = pointer(b, a[2])
            weights, sums = (
                [pointer_at(b, pointer(b, a[n]), b.mul(a[n + 1], I64(r))) for r in range(rows)]
                for n in (0, 5)
            )
            places = [I64(4 * isa.lanes * c) for c in columns]

            def one(j, state):
                row = pointer_at(b, pv, b.mul(j, a[3]))
                values = [_floats(b, isa, kind, row, I64(isa.lanes * c)) for c in columns]
                at = b.mul(j, I64(4))
                new = []
                for r in range(rows):
                    weight = isa.splat(b, load_at(b, weights[r], F32, at), isa.floats)
                    for c in columns:
                        new.append(isa.fma(b, weight, values[c], state[r * width + c]))
                return new

            begun = [load_at(b, row, isa.floats, at) for row in sums for at in places]
            done = repeat(b, I64(0), a[4], begun, one)
            for n, x in enumerate(done):
                store_at(b, x, sums[n // width], places[n % width])
            return context.get_dummy_value()

        return types.void(p, p_stride, v, v_stride, count, o, o_stride), codegen

    return add


@own
def row_of(x, few, n, r):
    """Address of row r of those of KV head n, in the queries or the result."""
    group = few.q.heads // few.k.heads
    return row_at(x, n * group + r // x.length, r % x.length)


@functools.cache
def make_work(name: str, kind: str):
    """work(task, few): the states of one part of the keys of one KV head."""
    isa = FLOAT_ISAS[name]
    lanes, size = isa.lanes, SIZES[kind]
    # of the first row, which also prefetches the next keys, and of the others
    first_scores, scores_of = (key_scores(name, kind, ahead) for ahead in (True, False))
    two_rows_wide, two_rows, one_row_wide, one_row = (
        add_values(name, kind, rows, width) for rows in (2, 1) for width in (WIDE, 1)
    )
    top_of = float_rows.row_max(name)
    weights = float_rows.row_exp(name)
    total_of = float_rows.row_total(name)
    times = float_rows.row_times(name)
    _, _, _, nothing_seen = row_functions(False)
    apply_options = option_changes(False)

    @inline
    def block_scores(few, n, first, count, x):
        """x = Q.K^T of all rows for `count` keys from `first` on, a vector's lanes of keys at a time."""
        rows, q, row = few.out.shape[2], few.q, few.k.row
        keys = row_at(few.k, n, first)
        for c in range(0, count, lanes):
            here, there, to = keys + c * row, min(lanes, count - c), address(x) + c * 4
            first_scores(here, row, there, q.d, row_of(q, few, n, 0), to)
            for r in range(1, rows):
                scores_of(here, row, there, q.d, row_of(q, few, n, r), to + r * KEYS * 4)

    @inline
    def changed(few, b, h, i, first, x, at, count):
        """The options' changes of a row's scores x[at:]; False where all keys are hidden."""
        semantics, p = few.semantics, x[at : at + count]
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + count):
            return False
        apply_options(semantics, b, h, i, first, p)
        return True

    @inline
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

    @inline
    def block_values(few, n, first, count, x, o):
        """O += P.V of all rows, two rows at a time, WIDE vectors of columns at a time."""
        rows, dv = few.out.shape[2], few.out.shape[3]
        row, sums = few.v.row, dv * 4
        v = row_at(few.v, n, first)
        r = 0
        while r < rows:
            two = r + 1 < rows
            p, t = address(x) + r * KEYS * 4, 0
            while t < dv:
                wide = t + WIDE * lanes <= dv
                to, place = address(o) + (r * dv + t) * 4, v + t * size
                if two and wide:
                    two_rows_wide(p, KEYS * 4, place, row, count, to, sums)
                elif two:
                    two_rows(p, KEYS * 4, place, row, count, to, sums)
                elif wide:
                    one_row_wide(p, KEYS * 4, place, row, count, to, sums)
                else:
                    one_row(p, KEYS * 4, place, row, count, to, sums)
                t += WIDE * lanes if wide else lanes
            r += 2 if two else 1

    @inline
    def edges(few, n, rows, lo, hi):
        """The first key that each row sees and the key after its last one; those of all rows."""
        kv_heads, length, keys = few.k.heads, few.q.length, few.k.length
        group, b = rows // length, n // kv_heads
        first, stop = keys, 0
        for r in range(rows):
            h = n % kv_heads * group + r // length
            lo[r], hi[r] = seen_range(few.semantics, b, h, r % length, keys)
            if lo[r] < hi[r]:
                first, stop = min(first, lo[r]), max(stop, hi[r])
        return first, max(first, stop)

    @inline
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
            seen, seen_stop = max(lo[r] - first, 0), min(hi[r] - first, count)
            if not there:
                seen_stop = seen
            for j in range(at, at + min(seen, count)):
                x[j] = HIDDEN
            for j in range(at + max(seen, seen_stop), at + vectors * lanes):
                x[j] = HIDDEN
            m[r] = weigh(x, at, vectors, m[r], l[r], o[r])
            any_seen |= seen_stop > seen
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
        o, m, spoiled = few.out[n, part], few.m[n, part], few.spoiled[n, part]
        o[:], m[:], spoiled[:] = F(0), HIDDEN, np.uint8(0)
        begin, end = edges(few, n, rows, lo, hi)
        share = (end - begin + parts - 1) // parts
        stop = min(end, begin + (part + 1) * share)
        for first in range(begin + part * share, stop, KEYS):
            count = min(KEYS, stop - first)
            block_scores(few, n, first, count, x)
            if block_rows(few, n, first, count, lo, hi, x, m, l, o, spoiled):
                block_values(few, n, first, count, x, o)
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
                result = array_at(row_of(out, few, n, r), (out.d,), np.float32)
                lse[n, r], again = finish(few, n, r, result, uncertain)
                redo[n, r] = again
                some |= again
        if p.workers < threads:
            use_threads(threads)
        return some

    return call
