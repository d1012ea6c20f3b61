"""The gradient of attention with few rows of queries: keys and values are read where they are.

The tiles of `flash_backward` hold a vector of queries, so that one query costs what sixteen do, and
keys are copied for them. Here a block of keys is multiplied by the rows of all query heads that share
it, with the products of `floats.few_products`; the keys of a row are along the lanes:

    s = q.k * scale * log2(e),  dP = dO.v        `block_scores`
    softcap, ALiBi, bias, mask                   only where asked for
    p = 2**(s - LSE),  ds = p * (dP - D)         `row_gradients`
    dV = sum over the rows of p * dO             `key_sums`: each row of dV and dK is written once
    dK = sum over the rows of ds * q * scale
    dQ += ds.k                                   `block_values`

Nothing is known of K and V before. Where float32 does not hold a score, a ds or dQ, as with a NaN in a
key that is hidden, the call says so and `flash_backward` computes all of it. A row that sees no key
takes part with zeros. Score functions are left to the tiles as well.

Keys are divided into parts where there are few heads, as many for every number of threads, and the
parts' dQ added up in order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, inlined, kernel
from ...jit.memory import array_at, uncleared, unpacked
from ...jit.parallel import limit_threads, over_tasks, use_threads
from ...numerics.quantize_kernels import largest_bits
from ..floats import float_rows
from ..floats.few_products import (
    KEYS,
    hide_unseen,
    make_few_products,
    room_for_rows,
    row_of,
    seen_keys,
)
from ..floats.flash_rows import LARGEST, row_functions
from ..floats.float_isas import FLOAT_ISAS
from ..isa.strided import Strided, row_at
from ..isa.vectors import address
from ..semantics import OPTION_NUMBERS, OptionNumbers, Semantics, semantics_at
from .call import REALS, RealNumbers, given_at, results_at
from .edge_rows import softcap_slope
from .head_rows import copy_rows
from .held import LARGEST_GRADIENT, Found, examine_rows, magnitude
from .key_sums import key_sums, keys_at_a_time
from .operands import Factors, Gradients
from .row_gradients import row_gradients

F = np.float32
WIDE = 4  # vectors of columns that are summed at a time


class Numbers(NamedTuple):
    """What the compiled call reads from one int64 array, in this order, before `OptionNumbers`."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    head_dim: int
    value_dim: int
    parts: int  # of the keys
    workers: int
    # from here on bytes from the start of scratch memory: `held.Found`, without that of keys
    skip: int
    lse: int
    delta: int
    exact_delta: int
    # `Few`
    bounds: int
    q: int
    do: int
    dq: int
    spoiled: int


NUMBERS = len(Numbers._fields)
PLACES = slice(Numbers._fields.index("skip"), NUMBERS)


class Few(NamedTuple):
    """What the tasks read and write, float32; `rows` are those of all query heads of a KV head.

    q, do : contiguous (B, H, L, D) and (B, H, L, Dv), 0 in rows that take no part
    k, v : (B, Hkv, S, D) and (B, Hkv, S, Dv)
    lse : (B * Hkv, rows) in units of log2, +inf for a row that takes no part
    delta : (B * Hkv, rows) rowsum(dO * O) - dLSE
    bounds : (B * Hkv, rows) what a row's ds have to be below
    dq : (B * Hkv, parts, rows, D), without the scale
    spoiled : (B * Hkv, parts) uint8, 1 where float32 does not hold a score or a ds
    """

    q: Strided
    do: Strided
    k: Strided
    v: Strided
    lse: np.ndarray
    delta: np.ndarray
    bounds: np.ndarray
    factors: Factors
    semantics: Semantics
    dq: np.ndarray
    spoiled: np.ndarray
    out: Gradients


@functools.cache
def make_block_sums(name: str):
    """block_sums(p, x, rows, factor, out, n, first, count): rows `first` and on of KV head n of `out`,
    Strided, become factor * sum over the rows r of p[r * KEYS + j] * x[r].

    x : address of contiguous rows of as many columns as `out` has, whole vectors
    """
    lanes, some = FLOAT_ISAS[name].lanes, keys_at_a_time(name)
    wide_sums, sums = (key_sums(name, width) for width in (WIDE, 1))

    @bare
    def block_sums(p, x, rows, factor, out, n, first, count):
        d, weights, target = out.d, address(p), row_at(out, n, first)
        for j in range(0, count, some):
            here, there, to, t = weights + j * 4, min(some, count - j), target + j * out.row, 0
            while t < d:
                if t + WIDE * lanes <= d:
                    wide_sums(
                        here, KEYS * 4, rows, x + t * 4, d * 4, there, factor, to + t * 4, out.row
                    )
                    t += WIDE * lanes
                else:
                    sums(here, KEYS * 4, rows, x + t * 4, d * 4, there, factor, to + t * 4, out.row)
                    t += lanes

    return block_sums


@functools.cache
def make_few_weights(name: str):
    """few_weights(few, n, first, count, lo, hi, x, dp, slope): scores x and products dp of all rows with
    a block of keys become p and ds; whether float32 does not hold them.

    The gradients of the scores that a mask was applied to are stored where they are wanted.
    """
    lanes = FLOAT_ISAS[name].lanes
    times, leaves = float_rows.row_times(name), float_rows.row_leaves(name)
    softcap = float_rows.row_softcap(name)
    gradients, sloped_gradients = (row_gradients(name, x, of_row=True) for x in (False, True))
    _, _, change, nothing_seen = row_functions(False)

    @inlined
    def changed(semantics, b, h, i, first, x, at, count, slope):
        """The options' changes of a row's scores x[at:]; False where all keys are hidden."""
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + count):
            return False
        cap, vectors = semantics.softcap, (count + lanes - 1) // lanes
        if cap > F(0):
            softcap(x, at, vectors, cap)
            for c in range(at, at + count):
                slope[c] = softcap_slope(x[c], cap)
        if semantics.general:
            change(semantics, b, h, i, first, x[at : at + count])
        return True

    @inlined
    def few_weights(few, n, first, count, lo, hi, x, dp, slope):
        semantics, length, kv_heads = few.semantics, few.q.length, few.k.heads
        b, group, vectors = n // kv_heads, few.q.heads // kv_heads, (count + lanes - 1) // lanes
        sloped, spoiled = semantics.softcap > F(0), False
        unchanged = slope if sloped else dp  # ds before it is multiplied by the slope of the cap
        for r in range(lo.size):
            at, h, i = r * KEYS, n % kv_heads * group + r // length, r % length
            spoiled |= times(x, at, vectors, few.factors.scores, x, at)
            there = changed(semantics, b, h, i, first, x, at, count, slope)
            seen, seen_stop = lo[r] - first, hi[r] - first if there else 0
            hide_unseen(x, at, count, vectors * lanes, seen, seen_stop)
            lse, delta, bound = few.lse[n, r], few.delta[n, r], few.bounds[n, r]
            if sloped:
                sloped_gradients(x, dp, at, vectors, lse, delta, 0, slope, x, dp)
            else:
                gradients(x, dp, at, vectors, lse, delta, 0, slope, x, dp)
            spoiled |= leaves(unchanged, at, vectors, F(1), -bound, bound)
            if few.out.scores.size > 0:
                row = few.out.scores[n * group + r // length, i]
                for j in range(count):
                    row[first + j] = unchanged[at + j]
        return spoiled

    return few_weights


@functools.cache
def make_work(name: str):
    """work(task, few): the gradients of one part of the keys of one KV head, and its dQ."""
    rows_at_hand, block_scores, block_values = make_few_products(name, "float32")
    block_sums, few_weights = make_block_sums(name), make_few_weights(name)

    @bare
    def clear(out, n, first, stop):
        """Keys that no row sees."""
        for j in range(first, stop):
            for x in (out.dk, out.dv):
                array_at(row_at(x, n, j), (x.d,), np.float32)[:] = F(0)

    @inline(float_math=True)
    def work(task, few):
        parts, rows = few.dq.shape[1:3]
        n, part = task // parts, task % parts
        x = uncleared((rows * KEYS,), F, "scores of few rows")
        dp = uncleared((rows * KEYS,), F, "score gradients of few rows")
        slope = uncleared((rows * KEYS,), F, "slopes of few rows")
        lo = uncleared((rows,), np.int64, "first keys of few rows")
        hi = uncleared((rows,), np.int64, "ends of few rows")
        of_keys, of_values = room_for_rows(few.k, rows, 4), room_for_rows(few.v, rows, 4)
        room = uncleared((max(of_keys, of_values),), np.uint8, "keys or values of few rows")
        keys_at = address(room) if of_keys > 0 else 0
        values_at = address(room) if of_values > 0 else 0
        q, do = row_of(few.q, few.k.heads, n, 0), row_of(few.do, few.k.heads, n, 0)
        dq, spoiled, k, v, out = few.dq[n, part], False, few.k, few.v, few.out
        dq[:] = F(0)
        begin, end = seen_keys(few.semantics, few.q, k, n, lo, hi)
        share = (k.length + parts - 1) // parts
        stop = min(k.length, (part + 1) * share)
        for block in range(part * share, stop, KEYS):
            block_stop = min(block + KEYS, stop)
            first = min(max(block, begin), block_stop)
            last = max(min(block_stop, end), first)
            count = last - first
            clear(out, n, block, first)
            clear(out, n, last, block_stop)
            if count > 0:
                values = rows_at_hand(v, n, first, count, values_at)
                block_scores(values, k.heads, n, count, few.do, dp)
                keys = rows_at_hand(k, n, first, count, keys_at)
                block_scores(keys, k.heads, n, count, few.q, x)
                spoiled |= few_weights(few, n, first, count, lo, hi, x, dp, slope)
                block_sums(x, do, rows, F(1), out.dv, n, first, count)
                block_sums(dp, q, rows, few.factors.dk, out.dk, n, first, count)
                block_values(keys, count, dp, dq)
        few.spoiled[n, part] = np.uint8(spoiled)

    return work


@bare
def _prepare(n, given, found, bounds, q, do):
    """Q and dO of a query head, and the bounds of its rows."""
    copy_rows(given.q, found.skip, n, 0, given.q.length, q[n], 0)
    copy_rows(given.do, found.skip, n, 0, given.q.length, do[n], 0)
    for i in range(given.q.length):
        size = max(1.0, magnitude(largest_bits(q[n, i])))
        bounds[n, i] = F(LARGEST_GRADIENT / (size * given.scale))


@bare
def _left_out(given, found):
    """Whether a row that sees keys is left out."""
    left = False
    for n in range(found.skip.shape[0]):
        for i in range(found.skip.shape[1]):
            left |= found.skip[n, i] and given.lse[n, i] != F(-np.inf)
    return left


@bare
def _add_parts(few):
    """dQ as the sum of its parts; whether float32 does not hold it."""
    n_kv, parts, rows, _ = few.dq.shape
    spoiled = False
    for n in range(n_kv):
        for r in range(rows):
            at = row_of(few.out.dq, few.k.heads, n, r)
            out = array_at(at, (few.out.dq.d,), np.float32)
            for e in range(out.size):
                total = few.dq[n, 0, r, e]
                for part in range(1, parts):
                    total += few.dq[n, part, r, e]
                out[e] = total * few.factors.dq
                spoiled |= not abs(out[e]) <= LARGEST
    return spoiled


@inline
def _contiguous(at, heads, length, d):
    return Strided(at, heads * length * d * 4, length * d * 4, d * 4, heads, length, d)


@inline
def _few_at(p, o, f, given, found, room, results):
    """The `Few` of a call, whose rows are prepared."""
    n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
    rows = p.heads // p.kv_heads * p.length
    bounds = array_at(room + p.bounds, (n, p.length), np.float32)
    q = array_at(room + p.q, (n, p.length, p.head_dim), np.float32)
    do = array_at(room + p.do, (n, p.length, p.value_dim), np.float32)
    over_tasks(_prepare, n, (given, found, bounds, q, do))
    return Few(
        _contiguous(room + p.q, p.heads, p.length, p.head_dim),
        _contiguous(room + p.do, p.heads, p.length, p.value_dim),
        given.k,
        given.v,
        array_at(room + p.lse, (n_kv, rows), np.float32),
        array_at(room + p.delta, (n_kv, rows), np.float32),
        array_at(room + p.bounds, (n_kv, rows), np.float32),
        Factors(F(f.scores), F(f.dq), F(f.dk)),
        semantics_at(o, f.softcap, False),
        array_at(room + p.dq, (n_kv, p.parts, rows, p.head_dim), np.float32),
        array_at(room + p.spoiled, (n_kv, p.parts), np.uint8),
        results,
    )


@functools.cache
def make_few_call(name: str) -> Callable[..., bool]:
    """`call.make_call` for few rows, with this module's `Numbers`: it returns whether float32 does not
    hold all rows, and then all has to be computed otherwise; scores are zeros again.
    """
    work = make_work(name)

    @kernel
    def call(q, k, v, do, out, lse, grad_lse, dq, dk, dv, scores, room, numbers, strides, reals):
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = RealNumbers(*unpacked(reals, REALS))
        n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
        given = given_at(p, o, f, False, strides, (q, k, v, do, out, lse, grad_lse))
        found = Found(
            array_at(room + p.skip, (n, p.length), np.bool_),
            array_at(room, (0, 0), np.bool_),
            array_at(room + p.lse, (n, p.length), np.float32),
            array_at(room + p.delta, (n, p.length), np.float32),
            array_at(room + p.exact_delta, (n, p.length), np.float64),
            array_at(room, (n_kv, 0, 2), np.int32),
        )
        threads = limit_threads(p.workers)
        examine_rows(given, found)
        left = _left_out(given, found)
        if not left:
            results = results_at(p, strides, (dq, dk, dv, scores))
            few = _few_at(p, o, f, given, found, room, results)
            over_tasks(work, n_kv * p.parts, (few,))
            left = _add_parts(few)
            for i in range(n_kv):
                for part in range(p.parts):
                    left |= few.spoiled[i, part] != 0
            if left:
                results.scores[:] = F(0)
        if p.workers < threads:
            use_threads(threads)
        return left

    return call
