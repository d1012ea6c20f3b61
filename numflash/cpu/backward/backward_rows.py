"""The gradient of attention one row at a time, in plain loops for every CPU.

The portable kernel in float32, the rescue in float64.

The algorithm of `flash_backward` without its tiles, in two passes that share nothing, so that no worker
adds to what another writes: `query_pass` owns a row of dQ and goes through its keys, `key_pass`
owns a block of keys and goes through the rows that see it. A key of weight 0 is never touched, so
NaN and infinity in hidden keys and values stay where they are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import inline, kernel
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LN2, LOG2E
from ..floats.flash_rows import row_functions
from ..isa.operands import Packed, Rows
from ..isa.score_calls import Corner, Function, batch_of, call_slopes
from ..isa.vectors import next_task
from ..semantics import row_range

KEYS = 64  # keys that a worker owns, and weights of a row kept at a time
ROWS = 8  # rows of dQ that a worker takes at a time
F = np.float32


class Given(NamedTuple):
    """What both passes read, float32 unless said."""

    q: np.ndarray  # (N, L, D)
    k: np.ndarray  # (Nkv, S, D)
    v: np.ndarray  # (Nkv, S, Dv)
    do: np.ndarray  # (N, L, Dv)
    lse: np.ndarray  # (N, L) float64, in units of log2
    share: np.ndarray  # (N, L) float64 ones: weights are 2**(s - lse) * share
    delta: np.ndarray  # (N, L) float64
    todo: np.ndarray  # int64, the rows to be done as n * L + i, rising
    factor: Any  # of the scores, in units of log2
    scale: Any  # of dQ and dK
    semantics: Any
    heads: int
    kv_heads: int
    keys: int
    workers: int


class Row(NamedTuple):
    """A row of queries: its place, and its operands."""

    b: int
    h: int
    i: int
    query: np.ndarray  # (D,)
    grad: np.ndarray  # (Dv,)
    keys: np.ndarray  # (S, D)
    values: np.ndarray  # (S, Dv)


@functools.cache
def make_backward_rows(double: bool):
    """The kernels in float64 or float32.

    (query_pass, key_pass), over the same arguments but for what they write.
    """
    R = np.float64 if double else np.float32
    dot, apply_softcap, change, nothing_seen = row_functions(double)

    @inline
    def score(given, row, first, s, slope):
        """Scores s of one row for keys from `first` on, and softcap's slope; False if all are hidden.

        There are s.size of them; a hidden one is -inf.
        """
        semantics, b, h, i = given.semantics, row.b, row.h, row.i
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + s.size):
            return False
        for j in range(s.size):
            s[j], slope[j] = dot(row.query, row.keys[first + j]) * R(given.factor), R(1)
        functions = semantics.functions
        if functions.masked != 0:
            function = Function(functions.masked, functions.masked_frame)
            corner = Corner(batch_of(functions, b), h, i, first)
            x = Rows(s, 0, 1)  # rows are keys
            call_slopes(function, x, Packed(slope, 0), s.size, 1, corner, R(LN2), R(LOG2E))
        if semantics.softcap > F(0):
            apply_softcap(semantics, s)
            cap = R(semantics.softcap)
            for j in range(s.size):  # exactly 0 at the cap, whatever a division is compiled to
                slope[j] *= R(0) if abs(s[j]) >= cap else R(1) - (s[j] / cap) ** 2
        if semantics.general:
            change(semantics, b, h, i, first, s)
        return True

    @inline
    def weigh(p, m, share):
        """Scores to weights 2**(p - m) * share, at most 1.

        The weight of a hidden key is 0 whatever m and share are.
        """
        for j in range(p.size):
            x = p[j] - m
            p[j] = R(0) if p[j] == R(-np.inf) else R(np.exp2(R(0) if x > R(0) else x)) * share

    @inline
    def differentiate(p, row, first, delta, slope):
        """slope = slope * p * (do . v - delta), the gradient of the scores.

        0 where the weight is 0.
        """
        for j in range(p.size):
            slope[j] = (
                slope[j] * p[j] * (dot(row.grad, row.values[first + j]) - delta)
                if p[j] != R(0)
                else R(0)
            )

    @inline
    def normalise(given, row, lo, hi, room, slope, sink):
        """(m, share) of a row whose LSE float64 may not hold.

        Its weights are 2**(s - m) * share.
        """
        m = R(-np.inf)
        for first in range(lo, hi, KEYS):
            s = room[: min(KEYS, hi - first)]
            if score(given, row, first, s, slope):
                for j in range(s.size):
                    m = m if s[j] <= m else s[j]  # a NaN becomes the maximum
        if sink > m:
            m = sink
        if m == R(-np.inf):
            return m, R(1)
        l = R(np.exp2(sink - m))
        for first in range(lo, hi, KEYS):
            s = room[: min(KEYS, hi - first)]
            if score(given, row, first, s, slope):
                for j in range(s.size):
                    l += R(np.exp2(s[j] - m))
        return m, R(1) / l

    @inline
    def gradients(given, row, n, first, p, ds):
        """Weights p of a row of head n and gradients of its scores; False if it sees none."""
        if not score(given, row, first, p, ds):
            return False
        weigh(p, R(given.lse[n, row.i]), R(given.share[n, row.i]))
        differentiate(p, row, first, R(given.delta[n, row.i]), ds)
        return True

    @inline
    def add_keys(ds, keys, first, sums):
        """sums += the score gradients times the keys.

        A gradient of 0 hides a key, as a weight of 0 does: softcap makes it of an infinite score.
        """
        for j in range(ds.size):
            if ds[j] != R(0):
                x, key = ds[j], keys[first + j]
                for e in range(sums.size):
                    sums[e] += x * R(key[e])

    @inline
    def store_scores(p, row, first, delta, scores):
        """scores (S,) = the gradients of the scores that softcap and functions have changed."""
        for j in range(p.size):
            if p[j] != R(0):
                of_weight = dot(row.grad, row.values[first + j])
                scores[first + j] = F(p[j] * (of_weight - delta))

    @inline(float_math=True)
    def query_work(_, given, sinks, counter, dq, scores):
        """One worker of `query_pass`."""
        length, d = given.q.shape[1], given.q.shape[2]
        todo, lse, share = given.todo, given.lse, given.share
        query, sums = (
            uncleared((d,), R, "query of a row"),
            uncleared((d,), R, "gradient of a query"),
        )
        grad = uncleared((given.v.shape[2],), R, "output gradient of a row")
        weights = uncleared((KEYS,), R, "weights of a row")
        slopes = uncleared((KEYS,), R, "slopes of a row")
        while True:
            task = next_task(counter)
            if task * ROWS >= todo.size:
                break
            for place in range(task * ROWS, min(todo.size, (task + 1) * ROWS)):
                n, i = todo[place] // length, todo[place] % length
                b, h = n // given.heads, n % given.heads
                n_kv = b * given.kv_heads + h * given.kv_heads // given.heads
                row = Row(b, h, i, query, grad, given.k[n_kv], given.v[n_kv])
                lo, hi = row_range(given.semantics, b, i, given.keys)
                query[:], grad[:], sums[:] = given.q[n, i], given.do[n, i], R(0)
                if lse[n, i] == np.inf:
                    lse[n, i], share[n, i] = normalise(
                        given, row, lo, hi, weights, slopes, R(sinks[h])
                    )
                if lse[n, i] == -np.inf:
                    hi = lo
                for first in range(lo, hi, KEYS):
                    p, ds = weights[: min(KEYS, hi - first)], slopes[: min(KEYS, hi - first)]
                    if gradients(given, row, n, first, p, ds):
                        add_keys(ds, row.keys, first, sums)
                        if scores.size > 0:
                            store_scores(p, row, first, R(given.delta[n, i]), scores[n, i])
                for e in range(d):
                    dq[n, i, e] = F(sums[e] * R(given.scale))

    @kernel
    def query_pass(given, sinks, counter, dq, scores):
        """dQ (N, L, D) float32 of the rows that are to be done; an LSE of infinity is computed
        anew, in place.

        sinks (H,) float64 in units of log2; counter (1,) int64 zero; scores (N, L, S) float32 zeros,
        which become the gradients of scores, or empty.
        """
        over_tasks(query_work, given.workers, (given, sinks, counter, dq, scores))

    @inline
    def add_rows(p, ds, row, at, dk_sums, dv_sums):
        """What a row adds to the sums of its keys, from row `at` on."""
        for j in range(p.size):
            if p[j] != R(0):
                x, y, dk_row, dv_row = ds[j], p[j], dk_sums[at + j], dv_sums[at + j]
                if x != R(0):
                    for e in range(dk_row.size):
                        dk_row[e] += x * row.query[e]
                for e in range(dv_row.size):
                    dv_row[e] += y * row.grad[e]

    @inline(float_math=True)
    def key_work(_, given, starts, counter, dk, dv):
        """One worker of `key_pass`."""
        length, d, columns = given.q.shape[1], given.q.shape[2], given.v.shape[2]
        s, group = given.keys, given.heads // given.kv_heads
        blocks = (s + KEYS - 1) // KEYS
        query = uncleared((d,), R, "query of a row")
        grad = uncleared((columns,), R, "output gradient of a row")
        weights = uncleared((KEYS,), R, "weights of a row")
        slopes = uncleared((KEYS,), R, "slopes of a row")
        dk_sums = uncleared((KEYS, d), R, "gradients of keys")
        dv_sums = uncleared((KEYS, columns), R, "gradients of values")
        while True:
            task = next_task(counter)
            if task >= given.k.shape[0] * blocks:
                break
            n_key, block = task // blocks, task % blocks * KEYS
            stop = min(block + KEYS, s)
            dk_sums[:], dv_sums[:] = R(0), R(0)
            for n in range(n_key * group, (n_key + 1) * group):
                b, h = n // given.heads, n % given.heads
                for place in range(starts[n], starts[n + 1]):
                    i = given.todo[place] % length
                    lo, hi = row_range(given.semantics, b, i, s)
                    first, end = max(lo, block), min(hi, stop)
                    if first >= end or given.lse[n, i] == -np.inf:
                        continue
                    query[:], grad[:] = given.q[n, i], given.do[n, i]
                    row = Row(b, h, i, query, grad, given.k[n_key], given.v[n_key])
                    p, ds = weights[: end - first], slopes[: end - first]
                    if gradients(given, row, n, first, p, ds):
                        add_rows(p, ds, row, first - block, dk_sums, dv_sums)
            for j in range(stop - block):
                dk_row, dv_row = dk[n_key, block + j], dv[n_key, block + j]
                for e in range(d):
                    dk_row[e] = F(R(dk_row[e]) + dk_sums[j, e] * R(given.scale))
                for e in range(columns):
                    dv_row[e] = F(R(dv_row[e]) + dv_sums[j, e])

    @kernel
    def key_pass(given, starts, counter, dk, dv):
        """What the rows add to dK (Nkv, S, D) and dV (Nkv, S, Dv), float32; after `query_pass`.

        starts (N + 1,) int64: todo[starts[n]:starts[n + 1]] are the rows of head n.
        """
        over_tasks(key_work, given.workers, (given, starts, counter, dk, dv))

    return query_pass, key_pass
