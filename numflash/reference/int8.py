"""The definition of precision "int8": the integer model whose bits every INT8 kernel must produce.

`integer_steps` gives it key block by key block, `integer_model` whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..interop.arrays import convert, widen
from ..numerics import fixedpoint as fx
from ..numerics.fused import multiply_add
from ..numerics.quantization import QuantizedTensor
from ..tiling import KEY_BLOCK
from ..validation import Problem
from .float64 import LN2, visible

F = np.float32


@dataclass(frozen=True)
class Step:
    """One key block of one head in the integer pipeline, as the kernels hold it.

    The first step with pv "int8" and "int16" is that of the sequence's first keys.

    first, stop : the keys of the block
    s : (L, n) int32 raw scores;  t : (L, n) int32 log2 scores, Q8.8 (MASKED where hidden)
    octave : (L,) int32 the whole octave at or above the row's largest score in the block
    top : (L,) int32 Q8.8 what the block's weights refer to: `octave`, with pv "int8" the largest score
        rounded up to eighths of an octave
    p : (L, n) uint8 weights (uint16 P12 of the first keys, uint16 W15 with pv "int16", uint32 in units
        of 2**-15 with pv "bf16", uint32 Q16.16 with pv "fp32")
    m : (L,) int32 running octave;  l : (L,) float32 running sum;  o : (L, Dv) float32 running
        output, all after this block
    """

    first: int
    stop: int
    s: np.ndarray
    t: np.ndarray
    octave: np.ndarray
    top: np.ndarray
    p: np.ndarray
    m: np.ndarray
    l: np.ndarray
    o: np.ndarray


# pv -> weights of a block's scores, and their dtype
WEIGHTS: dict[str, tuple] = {
    "int8": (fx.exp2_p8, np.uint8),
    "int16": (fx.exp2_w15, np.uint16),
    "bf16": (fx.exp2_bf16, np.uint32),
    "fp32": (fx.exp2_quadratic, np.uint32),
}
HIDDEN = np.int32(-(1 << 31))  # t of a hidden key: below every score


def score_unit(scale: float, softcap: float = 0.0) -> float:
    """What turns scaled dot products of quantised operands into Q8.8 scores of log2, or into units
    of a softcap.
    """
    return scale / softcap if softcap else scale * math.log2(math.e) * 256


def combined_scale(
    q: QuantizedTensor, k: QuantizedTensor, scale: float, softcap: float = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """cq (..., L) and ck (..., S) float32 with t = (float32(S) * ck[j]) * cq[i] in Q8.8, or in
    units of a softcap.

    cq = q.scale * score_unit and ck = k.scale, each limited to 2**100 so that no product with an
    int32 is NaN. The scale of a key or query that was not finite is NaN.
    """
    limit = F(2.0**100)
    with np.errstate(all="ignore"):
        cq = np.clip(q.row_scale() * F(score_unit(scale, softcap)), -limit, limit)
        ck = np.minimum(k.row_scale(), limit)
    for factor, nonfinite in ((cq, q.nonfinite), (ck, k.nonfinite)):
        if nonfinite is not None:
            factor[nonfinite] = np.nan
    return cq, ck


def row_shift(q: QuantizedTensor, k: QuantizedTensor, scale: float) -> np.ndarray | None:
    """(B, H, L) float64: what smoothing took from every score of a row, scale * q . offset.

    None without smoothing.
    """
    if k.offset is None:
        return None
    offset = np.repeat(k.offset.astype(np.float64), q.data.shape[1] // k.offset.shape[1], 1)
    # no BLAS: its threads keep spinning (docs/pitfalls.md, "BLAS threads keep spinning")
    dots = np.einsum("bhld,bhd->bhl", q.data, offset[:, :, 0])
    return dots * q.row_scale() * scale


def cap_shift(problem: Problem) -> np.ndarray | None:
    """(B, H, L) float32: `row_shift` in units of the softcap, which is what tanh would lack."""
    shift = row_shift(problem.query, problem.key, problem.scale)
    if shift is None:
        return None
    return np.clip(shift / problem.softcap, -fx.T_LIMIT, fx.T_LIMIT).astype(F)


def value_units(problem: Problem, b: int, g: int) -> np.ndarray:
    """(Dv,) float32, the units of a KV head's channels with float values: 2**32 for those with a
    value of 2**96 or more, whose sums would overflow, otherwise 1. Tokens with a value that is not
    finite are left out.
    """
    v = problem.value[b, g]
    peak = np.abs(v[np.isfinite(v).all(-1)]).max(0, initial=0)
    return np.where(peak >= 2.0**96, F(2.0**32), F(1))


def integer_steps(
    problem: Problem, b: int, h: int, key_block: int = KEY_BLOCK, plain: bool = False
) -> Iterator[Step]:
    """The integer pipeline of one head, key block by key block (INT8 pipeline, steps 2 to 7).

    `problem.query`, `key` and `value` are QuantizedTensors. For teaching and as the model of every
    kernel. With pv "bf16" and "fp32" the value is a float array, in `value_units`, and the weights
    are floats: with "bf16" both are bfloat16, of 8 significant bits; with "fp32" weights stay in
    Q16.16.

    With pv "int16" the weights of a block have 15 bits instead of 8. A sum of P.V is at most
    32640 * 128 * KEY_BLOCK = 5.3e8: int32 holds it, and it is rounded once, to float32.

    With pv "int8" and "int16" the first `fixedpoint.FIRST_KEYS` keys of the sequence come by themselves, before
    the block that they are taken out of: their keys and values have 5 more bits
    (`QuantizedTensor.low`), their weights 12. Where one of them takes nearly all the weight, the
    other keys of its block would share few levels of 8 bits, and its own rounding would be the
    error of the row. `problem.first_keys` says how many keys of a later part of a sequence are
    among them.

    With pv "int8" the weights of a block refer to the row's largest score in it, rounded up to eighths
    of an octave, so that the largest one is 234 to 255; relative to the whole octave above it could be
    128. The block's sums are multiplied by what is missing (`fixedpoint.below_octave`), and O takes
    them in by a fused multiply-add. The sums so far shift by whole octaves, exactly.

    `plain` : without both, first keys like others and weights relative to whole octaves: the pipeline
    that the course builds.
    """
    head = head_of(problem, b, h)
    length, s_len = head.seen.shape
    count = 0 if plain or problem.pv in fx.FLOAT_VALUES else min(problem.first_keys, s_len)
    m = np.full(length, fx.MIN_OCTAVE, np.int32)
    l, o = np.zeros(length, F), np.zeros((length, head.v.shape[1]), F)
    with np.errstate(all="ignore"):
        for cols in blocks_of(s_len, count, key_block):
            first = cols.stop <= count
            s, t, spoiled = scores_of(head, cols, first)
            step = fx.ONE_Q8 if plain or first else fx.REFERENCE_STEP[problem.pv]
            octave, top, p = weights_of(t, problem.pv, first, step)
            unit = fx.WEIGHT_ONE[problem.pv] / fx.FIRST_ONE if first else fx.SUM_UNIT[problem.pv]
            m, before = np.maximum(m, octave), m
            o, l = o * power(m - before)[:, None], l * power(m - before)
            some = octave > fx.MIN_OCTAVE
            factor = np.where(some, power(m - octave) * fx.below_octave(top), F(0))
            l = l + (p.sum(1, dtype=np.int64) * unit).astype(F) * factor
            l = np.where(spoiled, F(np.nan), l).astype(F)
            if first:
                o = one_by_one(p * F(unit), finer_rows(problem.value, b, head.g)[cols] / fx.FINER)
            else:
                sums = ((p * unit) @ head.v[cols]).astype(F)
                o = multiply_add(sums, factor[:, None], o).astype(F)
            yield Step(cols.start, cols.stop, s, t, octave, top, p, m, l, o)


@dataclass(frozen=True)
class Head:
    """One query head's operands, all numbers that they are multiplied as.

    q : (L, D), k : (S, D), v : (S, Dv) float64; a value that is not finite is 0
    cq : (L,) float32;  ck : (S,) float32, NaN where the key or its value is not finite
    shift : (L,) float32, see `cap_shift`, or None
    seen : (L, S) bool
    """

    problem: Problem
    b: int
    h: int
    g: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    cq: np.ndarray
    ck: np.ndarray
    shift: np.ndarray | None
    seen: np.ndarray


def head_of(problem: Problem, b: int, h: int) -> Head:
    """The operands of query head h of batch entry b."""
    g = h * problem.shape[2] // problem.shape[1]
    cq, ck = combined_scale(problem.query, problem.key, problem.scale, problem.softcap)
    ck, v = ck[b, g].copy(), problem.value
    if problem.pv in fx.FLOAT_VALUES:
        bad = ~np.isfinite(v[b, g]).all(-1)
        value = np.where(bad[:, None], 0, v[b, g]).astype(np.float64) / value_units(problem, b, g)
        value = widen(convert(value, "bfloat16")) if problem.pv == "bf16" else value
    else:
        bad = np.zeros(len(ck), bool) if v.nonfinite is None else v.nonfinite[b, g]
        value = np.where(bad[:, None], 0, v.data[b, g])
    ck[bad] = np.nan
    shift = cap_shift(problem) if problem.softcap else None
    q, k, value = (
        x.astype(np.float64) for x in (problem.query.data[b, h], problem.key.data[b, g], value)
    )
    shift = None if shift is None else shift[b, h]
    return Head(problem, b, h, g, q, k, value, cq[b, h], ck, shift, visible(problem, b, h))


def blocks_of(s_len: int, count: int, key_block: int) -> Iterator[slice]:
    """The first `count` keys, then the key blocks without them."""
    if count:
        yield slice(0, count)
    for first in range(0, s_len, key_block):
        if first + key_block > count and s_len > count:
            yield slice(max(first, count), min(first + key_block, s_len))


def scores_of(head: Head, cols: slice, first: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of the keys `cols`: raw scores s and log2 scores t, int32 as in `Step`; (L,) whether a row sees one that is NaN.

    first : whether these are the sequence's first keys, with 5 more bits
    """
    problem, b, h = head.problem, head.b, head.h
    k, ck = head.k[cols], head.ck[cols]
    if first:
        k, ck = finer_rows(problem.key, b, head.g)[cols], ck * F(1 / fx.FINER)
    s = (head.q @ k.T).astype(np.int32)  # exact: |s| <= 128 * 128 * FINER * D
    x = (s.astype(F) * ck) * head.cq[:, None]
    x = np.clip(x, -fx.T_LIMIT, fx.T_LIMIT)  # NaN stays NaN
    x = transform(problem, b, h, x, cols, head.shift)
    seen = head.seen[:, cols]
    if problem.bias is not None:
        seen = seen & (problem.bias[b, h][:, cols] != -np.inf)
    spoiled = np.isnan(x) & seen
    seen = seen & ~spoiled
    t = np.rint(np.clip(np.where(seen, x, 0), -fx.T_LIMIT, fx.T_LIMIT)).astype(np.int32)
    return s, np.where(seen, t, HIDDEN), spoiled.any(1)


def weights_of(
    t: np.ndarray, pv: str, first: bool, step: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Octave, top and weights p, as in `Step`, of log2 scores; top is a multiple of `step`."""
    exp2, kind = (fx.exp2_p12, np.uint16) if first else WEIGHTS[pv]
    largest = t.max(1)
    octave = np.where(largest == HIDDEN, fx.MIN_OCTAVE, (largest + 255) >> 8).astype(np.int32)
    top = (largest + (step - 1)) & -step
    y = np.minimum(top[:, None].astype(np.int64) - t, 65535).astype(np.uint16)
    return octave, top, np.where(t == HIDDEN, 0, exp2(y)).astype(kind)


def power(n: np.ndarray) -> np.ndarray:
    """2**-min(n, MOST_BELOW) float32 of whole numbers n from 0 on."""
    return np.exp2(-np.minimum(n, fx.MOST_BELOW).astype(F)).astype(F)


def finer_rows(t: QuantizedTensor, b: int, g: int) -> np.ndarray:
    """(first keys, D) float64: a sequence's first keys or values in 1 / FINER of their steps."""
    rows = t.data[b, g, : fx.FIRST_KEYS].astype(np.float64) * fx.FINER
    return rows if t.low is None else rows + t.low[b, g]


def one_by_one(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p.v in float32, key by key: a product is exact, a sum is rounded."""
    o = np.zeros((len(p), v.shape[1]), F)
    for j in range(len(v)):
        o += p[:, j : j + 1].astype(F) * v[j].astype(F)
    return o


def transform(problem, b, h, x, cols, shift):
    """Softcap (of scores in its units), ALiBi and bias (Q8.8) in float32, in the field's order.

    One rounding per operation.
    """
    if problem.softcap:
        x = fx.softcap(x if shift is None else x + shift[:, None], F(problem.softcap) * fx.LOG2E_Q8)
    if problem.alibi_slopes is not None:
        slope = F(F(problem.alibi_slopes[b, h]) * fx.LOG2E_Q8)
        i = np.arange(x.shape[0])[:, None] + problem.diagonal[b]
        j = np.arange(cols.start, cols.stop)[None]
        x = x - slope * np.abs(i - j).astype(F)
    if problem.bias is not None:
        x = x + problem.bias[b, h][:, cols].astype(F) * fx.LOG2E_Q8
    return x


def integer_model(
    problem: Problem, key_block: int = KEY_BLOCK, plain: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The definition of precision "int8": out (B, H, L, Dv) float32, lse (B, H, L) float32.

    With pv "int8" and "int16" every kernel gives these bits; with pv "bf16" and "fp32" weights and
    their sums have these bits, and the sums of P.V are rounded in each kernel's own order. `plain` as for `integer_steps`.
    """
    nb, nh, nkv, length, _, _, dv = problem.shape
    out = np.zeros((nb, nh, length, dv), F)
    m = np.full((nb, nh, length), fx.MIN_OCTAVE, np.int32)
    l = np.zeros((nb, nh, length), F)
    wide = problem.pv in fx.FLOAT_VALUES
    for b in range(nb):
        for h in range(nh):
            *_, step = (None, *integer_steps(problem, b, h, key_block, plain))
            if step is not None:
                m[b, h], l[b, h] = step.m, step.l
                with np.errstate(all="ignore"):
                    r = F(1) / step.l
                    g = h * nkv // nh
                    value_scale = value_units(problem, b, g) if wide else problem.value.scale[b, g]
                    out[b, h] = np.where(
                        step.l[:, None] == 0, F(0), (step.o * r[:, None]) * value_scale
                    )
    shift = None if problem.softcap else row_shift(problem.query, problem.key, problem.scale)
    return out, log_sum_exp(m, l, shift, fx.WEIGHT_ONE[problem.pv])


def log_sum_exp(
    m: np.ndarray, l: np.ndarray, shift: np.ndarray | None, one: int = fx.P_ONE
) -> np.ndarray:
    """LSE = (m + log2(l / one)) * ln 2 + shift, natural log, float32; `one` is the weight 1.0.

    -inf where l is 0, and only there: below float32's range, the lowest finite number.
    """
    with np.errstate(all="ignore"):
        lse = (m + np.log2(l.astype(np.float64) / one)) * LN2
        lse = lse if shift is None else lse + shift
        return np.where(l == 0, -np.inf, np.maximum(lse, np.finfo(F).min)).astype(F)
