"""Attention one row at a time, in plain loops for every CPU.

The portable kernel in float32, and the rescue in float64.

The same algorithm as `flash_float` without its tiles. In float64 nothing that fits float32 can
overflow, and a value whose weight is 0 is never touched, so NaN and infinity in hidden keys and
values stay where they are.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, inlined, kernel
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LN2, LOG2E
from ...tiling import tiling
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, batch_of, call_tile
from ..isa.vectors import next_task
from ..semantics import Semantics, row_of, seen_range

KEYS = tiling("portable", "float32").key_block  # scores of a row kept at a time
ROWS = 8  # rows that a worker takes at a time
F = np.float32
LARGEST = np.finfo(np.float32).max
LOWEST = F(-1e37)  # a row whose maximum is lower has left float32: it is computed again in float64


class Given(NamedTuple):
    """What the kernel reads, float32 unless said."""

    q: np.ndarray  # (N, L, D)
    k: np.ndarray  # (Nkv, S, D)
    v: np.ndarray  # (Nkv, S, Dv)
    todo: np.ndarray  # int64, the rows to be done as n * L + i
    scale: float  # of the scores, in units of log2
    semantics: Semantics
    heads: int
    kv_heads: int
    keys: int
    workers: int


class Row(NamedTuple):
    """A row of queries: its place, and its operands."""

    b: int
    h: int
    i: int
    query: np.ndarray  # (D,) in the kernel's precision
    keys: np.ndarray  # (S, D)
    values: np.ndarray  # (S, Dv)


@functools.cache
def row_functions(double: bool):
    """What the row kernels call, in float64 or float32: dot, apply_softcap, change, nothing_seen."""
    R = np.float64 if double else np.float32

    @inlined
    def apply_softcap(semantics, s):
        """Softcap of scores in units of log2."""
        cap = R(semantics.softcap)
        for j in range(s.size):
            if semantics.functions.masked == 0 or s[j] != R(-np.inf):
                s[j] = cap * R(np.tanh(s[j] / cap))

    @inlined
    def change(semantics, b, h, i, first, s):
        """ALiBi, bias and mask of scores in units of log2.

        A hidden key is -inf, even where its score is NaN.
        """
        if semantics.slopes.size > 0:
            slope, centre = R(semantics.slopes[b, h]), i + semantics.diagonal[b] - first
            for j in range(s.size):
                s[j] = s[j] - slope * R(abs(centre - j))
        if semantics.has_bias:
            at, bias = row_of(semantics.bias, b, h, i) + first, semantics.bias
            row = bias.reshape(bias.size)[at : at + s.size]
            for j in range(s.size):
                s[j] = R(-np.inf) if row[j] == F(-np.inf) else s[j] + R(row[j]) * R(LOG2E)
        if semantics.has_mask:
            at, mask = row_of(semantics.mask, b, h, i) + first, semantics.mask
            seen = mask.reshape(mask.size)[at : at + s.size]
            for j in range(s.size):
                s[j] = s[j] if seen[j] else R(-np.inf)

    @inlined
    def nothing_seen(semantics, b, h, i, first, stop):
        """Whether a dense mask or bias hides all of these keys."""
        seen = False
        if semantics.has_mask:
            at, mask = row_of(semantics.mask, b, h, i), semantics.mask
            row = mask.reshape(mask.size)[at + first : at + stop]
            for j in range(row.size):
                seen |= row[j] != 0
        elif semantics.has_bias:
            at, bias = row_of(semantics.bias, b, h, i), semantics.bias
            biases = bias.reshape(bias.size)[at + first : at + stop]
            for j in range(biases.size):
                seen |= biases[j] != F(-np.inf)
        else:
            return False
        return not seen

    @bare
    def dot(x, y):
        total = R(0)
        for e in range(x.size):
            total += x[e] * R(y[e])
        return total

    return dot, apply_softcap, change, nothing_seen


@functools.cache
def option_changes(double: bool):
    """f(semantics, b, h, i, first, s): what the options make of a row's scores, in units of log2, from
    key `first` on.
    """
    R = np.float64 if double else np.float32
    _, apply_softcap, change, _ = row_functions(double)

    @inlined
    def apply_options(semantics, b, h, i, first, s):
        functions = semantics.functions
        if functions.masked != 0:
            function = Function(functions.masked, functions.masked_frame)
            corner = Corner(batch_of(functions, b), h, i, first)
            call_tile(function, Rows(s, 0, 0), 1, s.size, corner, R(LN2), R(LOG2E))
        if semantics.softcap > F(0):
            apply_softcap(semantics, s)
        if semantics.general:
            change(semantics, b, h, i, first, s)

    return apply_options


@functools.cache
def make_attend_rows(double: bool):
    """attend_rows(given, counter, out, lse): the kernel in float64 or float32."""
    R = np.float64 if double else np.float32
    dot, _, _, nothing_seen = row_functions(double)
    apply_options = option_changes(double)

    @inline
    def score(given, row, first, p):
        """Scores p of one row for keys from `first` on; False if all of them are hidden."""
        semantics, b, h, i = given.semantics, row.b, row.h, row.i
        if semantics.general and nothing_seen(semantics, b, h, i, first, first + p.size):
            return False
        for j in range(p.size):
            p[j] = dot(row.query, row.keys[first + j]) * R(given.scale)
        apply_options(semantics, b, h, i, first, p)
        return True

    @inline
    def largest(p):
        """The largest score, NaN if any score is NaN."""
        top, spoiled = R(-np.inf), False
        for j in range(p.size):
            top = max(top, p[j])
            spoiled |= p[j] != p[j]
        return R(np.nan) if spoiled else top

    @inline
    def add_block(p, first, values, m, l, o):
        """Online softmax: add the keys from `first` on, of scores p, to the sum l and the output o.

        Returns the new maximum and sum.
        """
        top = largest(p)
        if top == R(-np.inf):
            return m, l
        if not top <= m:
            shrink = R(np.exp2(m - top))
            l = l * shrink
            for t in range(o.size):
                o[t] = o[t] * shrink
            m = top
        for j in range(p.size):
            p[j] = R(np.exp2(p[j] - m))
            l = l + p[j]
        for j in range(p.size):
            weight, value = p[j], values[first + j]
            if weight != R(0):
                for t in range(o.size):
                    o[t] = o[t] + weight * R(value[t])
        return m, l

    @inline(float_math=True)
    def work(_, given, counter, out, lse):
        """One worker: some rows at a time, as long as there are any."""
        q, todo, heads, kv_heads = given.q, given.todo, given.heads, given.kv_heads
        length, dv = q.shape[1], given.v.shape[2]
        query = uncleared((q.shape[2],), R, "query of a row")
        scores, o = uncleared((KEYS,), R, "scores of a row"), uncleared((dv,), R, "output of a row")
        while True:
            task = next_task(counter)
            if task * ROWS >= todo.size:
                break
            for place in range(task * ROWS, min(todo.size, (task + 1) * ROWS)):
                n, i = todo[place] // length, todo[place] % length
                b, h = n // heads, n % heads
                kv = b * kv_heads + h * kv_heads // heads
                row = Row(b, h, i, query, given.k[kv], given.v[kv])
                lo, hi = seen_range(given.semantics, b, h, i, given.keys)
                m, l = R(-np.inf), R(0)
                o[:] = R(0)
                query[:] = q[n, i]
                for first in range(lo, hi, KEYS):
                    p = scores[: min(KEYS, hi - first)]
                    if score(given, row, first, p):
                        m, l = add_block(p, first, row.values, m, l, o)
                result = out[n, i]
                for t in range(dv):
                    result[t] = F(0) if l == R(0) else F(o[t] / l)
                # -inf is for rows that see nothing
                lse[n, i] = F(max((m + np.log2(l)) * LN2, R(-LARGEST))) if l != R(0) else F(-np.inf)

    @kernel
    def attend_rows(given, counter, out, lse):
        """The rows `given.todo` of all heads: out (N, L, Dv), lse (N, L) float32.

        counter (1,) int64 zero.
        """
        over_tasks(work, given.workers, (given, counter, out, lse))

    return attend_rows
