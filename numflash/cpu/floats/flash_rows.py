"""Attention one row at a time, in plain loops for every CPU.

The portable kernel in float32, and the rescue in float64.

The same algorithm as `flash_float` without its tiles. In float64 nothing that fits float32 can
overflow, and a value whose weight is 0 is never touched, so NaN and infinity in hidden keys and
values stay where they are.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inline, kernel
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ..isa.score_calls import batch_of, call_tile
from ..isa.vectors import next_task
from ..semantics import seen_range

KEYS = 256  # scores of a row kept at a time
ROWS = 8  # rows that a worker takes at a time
F = np.float32
LN2 = np.log(2.0)
LARGEST = np.finfo(np.float32).max
LOG2E = 1 / LN2


@functools.cache
def row_functions(double: bool):
    """What the row kernels call, in float64 or float32: dot, soften, change, nothing_seen."""
    R = np.float64 if double else np.float32

    @inline
    def soften(semantics, s):
        """Softcap of scores in units of log2."""
        cap = R(semantics.softcap)
        for j in range(s.size):
            if semantics.functions.masked == 0 or s[j] != R(-np.inf):
                s[j] = cap * R(np.tanh(s[j] / cap))

    @inline
    def change(semantics, b, h, i, first, s):
        """ALiBi, bias and mask of scores in units of log2.

        A hidden key is -inf, even where its score is NaN.
        """
        if semantics.slopes.size > 0:
            slope, centre = R(semantics.slopes[b, h]), i + semantics.diagonal[b] - first
            for j in range(s.size):
                s[j] = s[j] - slope * R(abs(centre - j))
        if semantics.has_bias:
            x = semantics.bias
            row = x[
                min(b, x.shape[0] - 1),
                min(h, x.shape[1] - 1),
                min(i, x.shape[2] - 1),
                first : first + s.size,
            ]
            for j in range(s.size):
                s[j] = R(-np.inf) if row[j] == F(-np.inf) else s[j] + R(row[j]) * R(LOG2E)
        if semantics.has_mask:
            y = semantics.mask
            seen = y[
                min(b, y.shape[0] - 1),
                min(h, y.shape[1] - 1),
                min(i, y.shape[2] - 1),
                first : first + s.size,
            ]
            for j in range(s.size):
                s[j] = s[j] if seen[j] else R(-np.inf)

    @inline
    def nothing_seen(semantics, b, h, i, first, stop):
        """Whether a dense mask or bias hides all of these keys."""
        if semantics.has_mask:
            y = semantics.mask
            return not y[
                min(b, y.shape[0] - 1), min(h, y.shape[1] - 1), min(i, y.shape[2] - 1), first:stop
            ].any()
        if semantics.has_bias:
            x = semantics.bias
            return (
                x[
                    min(b, x.shape[0] - 1),
                    min(h, x.shape[1] - 1),
                    min(i, x.shape[2] - 1),
                    first:stop,
                ]
                == F(-np.inf)
            ).all()
        return False

    @inline
    def dot(x, y):
        total = R(0)
        for e in range(x.size):
            total += x[e] * R(y[e])
        return total

    return dot, soften, change, nothing_seen


@functools.cache
def make_attend_rows(double: bool):
    """The kernel in float64 or float32.

    attend_rows(q, k, v, todo, scale, semantics, heads, s, counter, out, lse).
    """
    R = np.float64 if double else np.float32
    dot, soften, change, nothing_seen = row_functions(double)

    @inline(float_math=True)
    def work(_, q, k, v, todo, scale, semantics, heads, s, counter, out, lse):
        """One worker: some rows at a time, as long as there are any.

        One long function: the plain form of the algorithm, from top to bottom.
        """
        length, dv = q.shape[1], v.shape[2]
        h_all, h_kv, _ = heads
        row = uncleared((q.shape[2],), R, "query of a row")
        scores, o = uncleared((KEYS,), R, "scores of a row"), uncleared((dv,), R, "output of a row")
        while True:
            task = next_task(counter)
            if task * ROWS >= todo.size:
                break
            for place in range(task * ROWS, min(todo.size, (task + 1) * ROWS)):
                n, i = todo[place] // length, todo[place] % length
                b, h = n // h_all, n % h_all
                keys, values = k[b * h_kv + h * h_kv // h_all], v[b * h_kv + h * h_kv // h_all]
                lo, hi = seen_range(semantics, b, h, i, s)
                m, l = R(-np.inf), R(0)
                o[:] = R(0)
                row[:] = q[n, i]
                for first in range(lo, hi, KEYS):
                    p = scores[: min(KEYS, hi - first)]
                    if semantics.general and nothing_seen(
                        semantics, b, h, i, first, first + p.size
                    ):
                        continue
                    for j in range(p.size):
                        p[j] = dot(row, keys[first + j]) * R(scale)
                    functions = semantics.functions
                    if functions.masked != 0:
                        call_tile(
                            functions.masked,
                            functions.masked_frame,
                            p,
                            0,
                            0,
                            1,
                            p.size,
                            batch_of(functions, b),
                            h,
                            i,
                            first,
                            R(LN2),
                            R(LOG2E),
                        )
                    if semantics.softcap > F(0):
                        soften(semantics, p)
                    if semantics.general:
                        change(semantics, b, h, i, first, p)
                    top, spoiled = R(-np.inf), False
                    for j in range(p.size):
                        top = max(top, p[j])
                        spoiled |= p[j] != p[j]
                    if spoiled:
                        top = R(np.nan)
                    if top == R(-np.inf):
                        continue
                    if not top <= m:
                        shrink = R(np.exp2(m - top))
                        l = l * shrink
                        for t in range(dv):
                            o[t] = o[t] * shrink
                        m = top
                    for j in range(p.size):
                        p[j] = R(np.exp2(p[j] - m))
                        l = l + p[j]
                    for j in range(p.size):
                        weight, value = p[j], values[first + j]
                        if weight != R(0):
                            for t in range(dv):
                                o[t] = o[t] + weight * R(value[t])
                result = out[n, i]
                for t in range(dv):
                    result[t] = F(0) if l == R(0) else F(o[t] / l)
                # -inf is for rows that see nothing
                lse[n, i] = F(max((m + np.log2(l)) * LN2, R(-LARGEST))) if l != R(0) else F(-np.inf)

    @kernel
    def attend_rows(q, k, v, todo, scale, semantics, heads, s, counter, out, lse):
        """Rows `todo` (int64, n * L + i) of all heads.

        q (N, L, D), k (Nkv, S, D), v (Nkv, S, Dv) float32; scale in units of log2; out (N, L, Dv),
        lse (N, L) float32.
        """
        over_tasks(work, heads[2], (q, k, v, todo, scale, semantics, heads, s, counter, out, lse))

    return attend_rows
