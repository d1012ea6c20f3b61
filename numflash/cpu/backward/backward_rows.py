"""The gradient of attention one row at a time, in plain loops for every CPU.

The portable kernel in float32, the rescue in float64.

The algorithm of `backward` without its tiles, in two passes that share nothing, so that no worker
adds to what another writes: `query_pass` owns a row of dQ and goes through its keys, `key_pass`
owns a block of keys and goes through the rows that see it. A key of weight 0 is never touched, so
NaN and infinity in hidden keys and values stay where they are.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inline, kernel
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ..floats.flash_rows import LN2, LOG2E, row_functions
from ..isa.score_calls import batch_of, call_slopes
from ..isa.vectors import next_task
from ..semantics import row_range

KEYS = 64  # keys that a worker owns, and weights of a row kept at a time
ROWS = 8  # rows of dQ that a worker takes at a time
F = np.float32


@functools.cache
def make_backward_rows(double: bool):
    """The kernels in float64 or float32.

    (query_pass, key_pass), over the same arguments but for what they write.
    """
    R = np.float64 if double else np.float32
    dot, soften, change, nothing_seen = row_functions(double)

    @inline
    def score(semantics, b, h, i, first, row, keys, scale, s, slope):
        """Scores s of one row for keys from `first` on, and softcap's slope; False if all are hidden.

        There are s.size of them; a hidden one is -inf.
        """
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + s.size):
            return False
        for j in range(s.size):
            s[j], slope[j] = dot(row, keys[first + j]) * R(scale), R(1)
        functions = semantics.functions
        if functions.masked != 0:
            user, frame = functions.masked, functions.masked_frame
            seen_as = batch_of(functions, b)
            call_slopes(
                user, frame, s, 0, slope, 0, 1, s.size, 1, seen_as, h, i, first, R(LN2), R(LOG2E)
            )  # rows are keys
        if semantics.softcap > F(0):
            soften(semantics, s)
            for j in range(s.size):
                slope[j] *= R(1) - (s[j] / R(semantics.softcap)) ** 2
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
    def differentiate(p, do, values, first, delta, slope):
        """slope = slope * p * (do . v - delta), the gradient of the scores.

        0 where the weight is 0.
        """
        for j in range(p.size):
            slope[j] = (
                slope[j] * p[j] * (dot(do, values[first + j]) - delta) if p[j] != R(0) else R(0)
            )

    @inline
    def normalise(semantics, b, h, i, lo, hi, row, keys, scale, room, slope, sink):
        """(m, share) of a row whose LSE float64 may not hold.

        Its weights are 2**(s - m) * share.
        """
        m = R(-np.inf)
        for first in range(lo, hi, KEYS):
            s = room[: min(KEYS, hi - first)]
            if score(semantics, b, h, i, first, row, keys, scale, s, slope):
                for j in range(s.size):
                    m = m if s[j] <= m else s[j]  # a NaN becomes the maximum
        if sink > m:
            m = sink
        if m == R(-np.inf):
            return m, R(1)
        l = R(np.exp2(sink - m))
        for first in range(lo, hi, KEYS):
            s = room[: min(KEYS, hi - first)]
            if score(semantics, b, h, i, first, row, keys, scale, s, slope):
                for j in range(s.size):
                    l += R(np.exp2(s[j] - m))
        return m, R(1) / l

    @inline(float_math=True)
    def query_work(
        _, q, k, v, do, lse, share, delta, todo, scales, semantics, heads, s, sinks, counter, dq
    ):
        """One worker of `query_pass`."""
        length, d = q.shape[1], q.shape[2]
        h_all, h_kv, _ = heads
        row, sums = uncleared((d,), R, "query of a row"), uncleared((d,), R, "gradient of a query")
        grad = uncleared((v.shape[2],), R, "output gradient of a row")
        weights = uncleared((KEYS,), R, "weights of a row")
        slopes = uncleared((KEYS,), R, "slopes of a row")
        while True:
            task = next_task(counter)
            if task * ROWS >= todo.size:
                break
            for place in range(task * ROWS, min(todo.size, (task + 1) * ROWS)):
                n, i = todo[place] // length, todo[place] % length
                b, h = n // h_all, n % h_all
                keys, values = k[b * h_kv + h * h_kv // h_all], v[b * h_kv + h * h_kv // h_all]
                lo, hi = row_range(semantics, b, i, s)
                row[:], grad[:], sums[:] = q[n, i], do[n, i], R(0)
                if lse[n, i] == np.inf:
                    lse[n, i], share[n, i] = normalise(
                        semantics,
                        b,
                        h,
                        i,
                        lo,
                        hi,
                        row,
                        keys,
                        scales[0],
                        weights,
                        slopes,
                        R(sinks[h]),
                    )
                if lse[n, i] == -np.inf:
                    hi = lo
                for first in range(lo, hi, KEYS):
                    p, ds = weights[: min(KEYS, hi - first)], slopes[: min(KEYS, hi - first)]
                    if score(semantics, b, h, i, first, row, keys, scales[0], p, ds):
                        weigh(p, R(lse[n, i]), R(share[n, i]))
                        differentiate(p, grad, values, first, R(delta[n, i]), ds)
                        for j in range(p.size):
                            if p[j] != R(0):
                                x, key = ds[j], keys[first + j]
                                for e in range(d):
                                    sums[e] += x * R(key[e])
                result = dq[n, i]
                for e in range(d):
                    result[e] = F(sums[e] * R(scales[1]))

    @kernel
    def query_pass(
        q, k, v, do, lse, share, delta, todo, scales, semantics, heads, s, sinks, counter, dq
    ):
        """dQ of the rows `todo` (int64, n * L + i, rising).

        An LSE of infinity is computed anew, in place.

        q (N, L, D), k (Nkv, S, D), v (Nkv, S, Dv), do (N, L, Dv) float32; lse (N, L) float64 in
        units of log2 and share (N, L) float64 ones: weights are 2**(s - lse) * share; delta (N, L)
        float64; scales = (factor of the scores in units of log2, factor of dQ and dK); heads = (H,
        Hkv, workers); sinks (H,) float64 in units of log2; counter (1,) int64 zero; dq (N, L, D)
        float32.
        """
        over_tasks(
            query_work,
            heads[2],
            (q, k, v, do, lse, share, delta, todo, scales, semantics, heads, s, sinks, counter, dq),
        )

    @inline(float_math=True)
    def key_work(
        _,
        q,
        k,
        v,
        do,
        lse,
        share,
        delta,
        todo,
        scales,
        semantics,
        heads,
        s,
        starts,
        counter,
        dk,
        dv,
    ):
        """One worker of `key_pass`."""
        length, d, columns = q.shape[1], q.shape[2], v.shape[2]
        h_all, h_kv, _ = heads
        group, blocks = h_all // h_kv, (s + KEYS - 1) // KEYS
        row = uncleared((d,), R, "query of a row")
        grad = uncleared((columns,), R, "output gradient of a row")
        weights = uncleared((KEYS,), R, "weights of a row")
        slopes = uncleared((KEYS,), R, "slopes of a row")
        dk_sums = uncleared((KEYS, d), R, "gradients of keys")
        dv_sums = uncleared((KEYS, columns), R, "gradients of values")
        while True:
            task = next_task(counter)
            if task >= k.shape[0] * blocks:
                break
            n_key, block = task // blocks, task % blocks * KEYS
            stop = min(block + KEYS, s)
            dk_sums[:], dv_sums[:] = R(0), R(0)
            for n in range(n_key * group, (n_key + 1) * group):
                b, h = n // h_all, n % h_all
                for place in range(starts[n], starts[n + 1]):
                    i = todo[place] % length
                    lo, hi = row_range(semantics, b, i, s)
                    first, end = max(lo, block), min(hi, stop)
                    if first >= end or lse[n, i] == -np.inf:
                        continue
                    row[:], grad[:] = q[n, i], do[n, i]
                    p, ds = weights[: end - first], slopes[: end - first]
                    if score(semantics, b, h, i, first, row, k[n_key], scales[0], p, ds):
                        weigh(p, R(lse[n, i]), R(share[n, i]))
                        differentiate(p, grad, v[n_key], first, R(delta[n, i]), ds)
                        for j in range(p.size):
                            if p[j] != R(0):
                                x, y = ds[j], p[j]
                                dk_row = dk_sums[first - block + j]
                                dv_row = dv_sums[first - block + j]
                                for e in range(d):
                                    dk_row[e] += x * row[e]
                                for e in range(columns):
                                    dv_row[e] += y * grad[e]
            for j in range(stop - block):
                dk_row, dv_row = dk[n_key, block + j], dv[n_key, block + j]
                for e in range(d):
                    dk_row[e] = F(R(dk_row[e]) + dk_sums[j, e] * R(scales[1]))
                for e in range(columns):
                    dv_row[e] = F(R(dv_row[e]) + dv_sums[j, e])

    @kernel
    def key_pass(
        q, k, v, do, lse, share, delta, todo, scales, semantics, heads, s, starts, counter, dk, dv
    ):
        """What the rows `todo` add to dK and dV. Arguments as in `query_pass`, which comes first.

        starts (N + 1,) int64: todo[starts[n]:starts[n + 1]] are the rows of head n; dk (Nkv, S, D),
        dv (Nkv, S, Dv) float32.
        """
        over_tasks(
            key_work,
            heads[2],
            (
                q,
                k,
                v,
                do,
                lse,
                share,
                delta,
                todo,
                scales,
                semantics,
                heads,
                s,
                starts,
                counter,
                dk,
                dv,
            ),
        )

    return query_pass, key_pass
