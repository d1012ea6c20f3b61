"""What is right: the float64 oracle, the integer model whose bits every INT8 kernel must produce,
and a step-by-step generator.

Nothing here is fast, and no kernel imports it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from . import fixedpoint as fx
from .interop import widen
from .quantization import QuantizedTensor
from .tiling import KEY_BLOCK
from .validation import LARGEST_LSE, Problem

F = np.float32
LN2 = np.log(2.0)


def visible(problem: Problem, b: int, h: int, rows: slice = slice(None)) -> np.ndarray:
    """(rows, S) bool: which keys each query row may see; additive -inf not included."""
    length = problem.shape[3]
    s = problem.shape[4]
    i = np.arange(length)[rows, None] + problem.diagonal[b]
    j = np.arange(s)[None, :]
    seen = np.broadcast_to(j < problem.key_lengths[b], (len(i), s)).copy()
    if problem.left is not None:
        seen &= j >= i - problem.left
    if problem.right is not None:
        seen &= j <= i + problem.right
    if problem.mask is not None:
        seen &= problem.mask[b, h, rows]
    return seen


def oracle(problem: Problem, block: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Attention in float64: out (B, H, L, Dv), lse (B, H, L).

    Rows with nothing visible give 0 and -inf.
    """
    nb, nh, nkv, length, s, _, dv = problem.shape
    out = np.zeros((nb, nh, length, dv))
    lse = np.full((nb, nh, length), -np.inf)
    query, key, value = (
        np.asarray(widen(x), np.float64) for x in (problem.query, problem.key, problem.value)
    )
    for b in range(nb):
        for h in range(nh):
            k = key[b, h * nkv // nh]
            v = value[b, h * nkv // nh]
            for start in range(0, length if s else 0, block):
                rows = slice(start, min(start + block, length))
                out[b, h, rows], lse[b, h, rows] = _oracle_rows(
                    problem, b, h, rows, query[b, h, rows], k, v
                )
    return out, lse


def _scores(problem, b, h, rows, q, k):
    """Scores of some rows in float64, -inf where hidden, and what softcap makes of a small change
    of them (None without it).
    """
    slope = None
    scores = (q @ k.T) * problem.scale
    if problem.functions is not None:
        scores, slope = problem.functions.evaluate(scores, b, h, rows)
    if problem.softcap:
        tanh = np.tanh(scores / problem.softcap)
        hidden = scores == -np.inf if problem.functions is not None else False
        scores = np.where(hidden, -np.inf, problem.softcap * tanh)
        slope = (1 - tanh * tanh) * (1 if slope is None else slope)
    if problem.alibi_slopes is not None:
        i = np.arange(rows.start, rows.stop)[:, None] + problem.diagonal[b]
        j = np.arange(k.shape[0])[None]
        scores = scores - float(problem.alibi_slopes[b, h]) * np.abs(i - j)
    if problem.bias is not None:
        scores = scores + problem.bias[b, h, rows]
    return np.where(visible(problem, b, h, rows), scores, -np.inf), slope


def _oracle_rows(problem, b, h, rows, q, k, v):
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scores, _ = _scores(problem, b, h, rows, q, k)
        top = scores.max(-1, keepdims=True)
        p = np.where(scores == -np.inf, 0.0, np.exp(scores - np.where(top == -np.inf, 0, top)))
        l = p.sum(-1)
        finite = np.isfinite(v)
        out = p @ np.where(finite, v, 0)
        for j in np.flatnonzero(
            ~finite.all(1)
        ):  # 0 * NaN must not reach rows that do not see the key
            out += np.where(p[:, j : j + 1] > 0, p[:, j : j + 1] * np.where(finite[j], 0, v[j]), 0)
        lse = np.where(l == 0, -np.inf, top[:, 0] + np.log(l))
        out = np.where(l[:, None] == 0, 0, out / l[:, None])
        if problem.sinks is not None:
            total = np.logaddexp(lse, float(problem.sinks[h]))
            out = out * np.exp(np.where(l == 0, -np.inf, lse - total))[:, None]
            lse = total
    return out, lse


def gradients(
    problem: Problem, grad_out: np.ndarray, out: np.ndarray, lse: np.ndarray, block: int = 512
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ (B, H, L, D), dK (B, Hkv, S, D) and dV (B, Hkv, S, Dv) in float64, from dO, O (B, H, L,
    Dv) and LSE (B, H, L).

    P = exp(S - LSE), dV = P^T.dO, dS = P * (dO.V^T - rowsum(dO * O)), times the slope of softcap;
    dQ = dS.K * scale, dK = dS^T.Q * scale (FlashAttention 2, section 2.3.2). A key of weight 0
    takes no part, even where it is not finite. An LSE of `LARGEST_LSE` or more is recomputed.
    """
    nb, nh, nkv, length, s, _, _ = problem.shape
    query, key, value = (
        np.asarray(widen(x), np.float64) for x in (problem.query, problem.key, problem.value)
    )
    dq, dk, dv = (np.zeros(x.shape) for x in (query, key, value))
    grad_out, out, lse = (np.asarray(x, np.float64) for x in (grad_out, out, lse))
    for b, h in np.ndindex(nb, nh):
        g = h * nkv // nh
        q = query[b, h]
        k = key[b, g]
        v = value[b, g]
        for start in range(0, length if s else 0, block):
            rows = slice(start, min(start + block, length))
            do = grad_out[b, h, rows]
            with np.errstate(invalid="ignore", over="ignore"):
                scores, slope = _scores(problem, b, h, rows, q[rows], k)
                m = lse[b, h, rows][:, None]
                l = np.ones_like(m)
                anew = (np.abs(m) >= LARGEST_LSE) & (m > -np.inf)
                if anew.any():
                    sink = -np.inf if problem.sinks is None else float(problem.sinks[h])
                    top = np.maximum(scores.max(-1, keepdims=True), sink)
                    total = np.exp(scores - top).sum(-1, keepdims=True) + np.exp(sink - top)
                    m = np.where(anew, top, m)
                    l = np.where(anew, total, l)
                p = np.where((scores == -np.inf) | (m == -np.inf), 0, np.exp(scores - m) / l)
                ds = (
                    p
                    * (do @ v.T - (do * out[b, h, rows]).sum(-1, keepdims=True))
                    * (1 if slope is None else slope)
                )
                ds = np.where(p == 0, 0, ds) * problem.scale
            dq[b, h, rows] += _product(ds, k)
            dk[b, g] += _product(ds.T, q[rows])
            dv[b, g] += _product(p.T, do)
    return dq, dk, dv


def _product(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """a.x where a weight of 0 hides NaN and infinity."""
    finite = np.isfinite(x)
    out = a @ np.where(finite, x, 0)
    with np.errstate(invalid="ignore"):
        for j in np.flatnonzero(~finite.all(1)):
            out += np.where(a[:, j : j + 1] != 0, a[:, j : j + 1] * np.where(finite[j], 0, x[j]), 0)
    return out


@dataclass(frozen=True)
class Step:
    """One key block of one head in the integer pipeline, as the kernels hold it.

    first, stop : the keys of the block
    s : (L, n) int32 raw scores;  t : (L, n) int32 log2 scores, Q8.8 (MASKED where hidden)
    octave : (L,) int32 the block's own whole octave;  p : (L, n) uint8 weights (uint32 Q16.16 with
        pv "fp32")
    m : (L,) int32 running octave;  l : (L,) float32 running sum;  o : (L, Dv) float32 running
        output, all after this block
    """

    first: int
    stop: int
    s: np.ndarray
    t: np.ndarray
    octave: np.ndarray
    p: np.ndarray
    m: np.ndarray
    l: np.ndarray
    o: np.ndarray


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
    with np.errstate(over="ignore"):
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
    dots = np.einsum(
        "bhld,bhd->bhl", q.data, offset[:, :, 0]
    )  # no BLAS: its threads keep spinning (docs/pitfalls.md, "BLAS threads keep spinning")
    return dots * q.row_scale() * scale


def cap_shift(problem: Problem) -> np.ndarray | None:
    """(B, H, L) float32: `row_shift` in units of the softcap, which is what tanh would lack."""
    shift = row_shift(problem.query, problem.key, problem.scale)
    if shift is None:
        return None
    return np.clip(shift / problem.softcap, -fx.T_LIMIT, fx.T_LIMIT).astype(F)


def value_units(problem: Problem, b: int, g: int) -> np.ndarray:
    """(Dv,) float32, the units of a KV head's channels with pv "fp32": 2**32 for those with a
    value of 2**96 or more, whose sums would overflow, otherwise 1. Tokens with a value that is not
    finite are left out.
    """
    v = problem.value[b, g]
    peak = np.abs(v[np.isfinite(v).all(-1)]).max(0, initial=0)
    return np.where(peak >= 2.0**96, F(2.0**32), F(1))


def integer_steps(problem: Problem, b: int, h: int, key_block: int = KEY_BLOCK) -> Iterator[Step]:
    """The integer pipeline of one head, key block by key block (INT8 pipeline, steps 2 to 7).

    `problem.query`, `key` and `value` are QuantizedTensors. For teaching and as the model of every
    kernel. With pv "fp32" the value is a float array, in `value_units`, and the weights stay in
    Q16.16.
    """
    nh = problem.shape[1]
    nkv = problem.shape[2]
    length = problem.shape[3]
    s_len = problem.shape[4]
    dv = problem.shape[6]
    g = h * nkv // nh
    q = problem.query
    k = problem.key
    v = problem.value
    cq, ck = combined_scale(q, k, problem.scale, problem.softcap)
    cq = cq[b, h]
    ck = ck[b, g].copy()
    wide = problem.pv == "fp32"
    exp2, unit = (fx.exp2_quadratic, 1 / fx.ONE_Q16) if wide else (fx.exp2_p8, 1.0)
    bad_value = (
        ~np.isfinite(v[b, g]).all(-1)
        if wide
        else np.zeros(s_len, bool)
        if v.nonfinite is None
        else v.nonfinite[b, g]
    )
    ck[bad_value] = np.nan
    shift = cap_shift(problem) if problem.softcap else None
    qi = q.data[b, h].astype(np.float64)
    ki = k.data[b, g].astype(np.float64)
    vi = np.where(bad_value[:, None], 0, (v if wide else v.data)[b, g]).astype(np.float64)
    vi /= value_units(problem, b, g) if wide else 1
    m = np.full(length, fx.MIN_OCTAVE, np.int32)
    l = np.zeros(length, F)
    o = np.zeros((length, dv), F)
    seen_all = visible(problem, b, h)
    power = lambda n: np.exp2(-np.minimum(n, 126).astype(F)).astype(F)  # noqa: E731
    with np.errstate(invalid="ignore", over="ignore"):
        for first in range(0, s_len, key_block):
            cols = slice(first, min(first + key_block, s_len))
            seen = seen_all[:, cols]
            s = (qi @ ki[cols].T).astype(np.int32)  # exact: |s| <= 128 * 128 * D
            x = (s.astype(F) * ck[cols]) * cq[:, None]
            x = np.clip(x, -fx.T_LIMIT, fx.T_LIMIT)  # NaN stays NaN
            x = transform(problem, b, h, x, cols, None if shift is None else shift[b, h])
            if problem.bias is not None:
                seen = seen & (problem.bias[b, h][:, cols] != -np.inf)
            spoiled = np.isnan(x) & seen
            seen = seen & ~spoiled
            t = np.rint(np.clip(np.where(seen, x, 0), -fx.T_LIMIT, fx.T_LIMIT)).astype(np.int32)
            t = np.where(seen, t, HIDDEN)
            top = t.max(1)
            some = top != HIDDEN
            octave = np.where(some, (top + 255) >> 8, fx.MIN_OCTAVE).astype(np.int32)
            y = np.minimum((octave[:, None].astype(np.int64) << 8) - t, 65535).astype(np.uint16)
            p = np.where(seen, exp2(y), 0).astype(np.uint32 if wide else np.uint8)
            m_new = np.maximum(m, octave)
            o = o * power(m_new - m)[:, None]
            l = l * power(m_new - m)
            weight = np.where(some, power(m_new - octave), F(0))
            l = l + (p.sum(1, dtype=np.int64) * unit).astype(F) * weight
            o = o + ((p * unit) @ vi[cols]).astype(F) * weight[:, None]
            m = m_new
            l = np.where(spoiled.any(1), F(np.nan), l).astype(F)
            yield Step(first, cols.stop, s, t, octave, p, m, l, o)


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


def integer_model(problem: Problem, key_block: int = KEY_BLOCK) -> tuple[np.ndarray, np.ndarray]:
    """The definition of precision "int8": out (B, H, L, Dv) float32, lse (B, H, L) float32.

    With pv "int8" every kernel gives these bits; with pv "fp32" the sums of P.V are rounded in each
    kernel's own order.
    """
    nb, nh, nkv, length, _, _, dv = problem.shape
    out = np.zeros((nb, nh, length, dv), F)
    m = np.full((nb, nh, length), fx.MIN_OCTAVE, np.int32)
    l = np.zeros((nb, nh, length), F)
    wide = problem.pv == "fp32"
    for b in range(nb):
        for h in range(nh):
            *_, step = (None, *integer_steps(problem, b, h, key_block))
            if step is not None:
                m[b, h], l[b, h] = step.m, step.l
                with np.errstate(divide="ignore", invalid="ignore"):
                    r = F(1) / step.l
                    g = h * nkv // nh
                    value_scale = value_units(problem, b, g) if wide else problem.value.scale[b, g]
                    out[b, h] = np.where(
                        step.l[:, None] == 0, F(0), (step.o * r[:, None]) * value_scale
                    )
    shift = None if problem.softcap else row_shift(problem.query, problem.key, problem.scale)
    return out, log_sum_exp(m, l, shift, 1 if wide else fx.P_ONE)


def log_sum_exp(
    m: np.ndarray, l: np.ndarray, shift: np.ndarray | None, one: int = fx.P_ONE
) -> np.ndarray:
    """LSE = (m + log2(l / one)) * ln 2 + shift, natural log, float32; `one` is the weight 1.0.

    -inf where l is 0, and only there: below float32's range, the lowest finite number.
    """
    with np.errstate(divide="ignore", over="ignore"):
        lse = (m + np.log2(l.astype(np.float64) / one)) * LN2
        lse = lse if shift is None else lse + shift
        return np.where(l == 0, -np.inf, np.maximum(lse, np.finfo(F).min)).astype(F)


def decode_change(
    softcap: float, slopes: np.ndarray | None, shift: np.ndarray | None, away: np.ndarray
) -> Callable[[int, slice, np.ndarray], np.ndarray]:
    """Soft cap and ALiBi for `integer_decode`.

    slopes (H,) or None; shift (H, L) float32, what smoothing took from the scores in units of the
    soft cap; away (L, S) distances.
    """

    def change(h: int, cols: slice, x: np.ndarray) -> np.ndarray:
        if softcap:
            cap = F(softcap) * fx.LOG2E_Q8
            x = x * (F(1) / cap)
            x = fx.softcap(x if shift is None else x + shift[h][:, None], cap)
        if slopes is not None:
            x = x - F(slopes[h]) * fx.LOG2E_Q8 * away[:, cols].astype(F)
        return x

    return change


def decode_query(query: np.ndarray) -> QuantizedTensor:
    """A query (..., D) float32 as INT8 decode rounds it: int16 up to 127 * 128, a scale per row.

    data = rint(query * (16256 / max|query|)), scale = max / 16256. Rows of zeros have scale 1, rows
    that are not finite are zeros and marked.
    """
    x = np.asarray(query, F)
    top = np.abs(x).max(-1, keepdims=True)
    nonfinite = ~np.isfinite(top)
    usable = (top > F(2.0**-100)) & ~nonfinite
    safe = np.where(usable, top, F(1))
    data = np.where(usable, x, F(0)) * (F(fx.QUERY_ONE) / safe)
    scale = np.where(usable, safe / F(fx.QUERY_ONE), F(1))
    bad = nonfinite[..., 0] if nonfinite.any() else None
    return QuantizedTensor(np.rint(data).astype(np.int16), scale, "row", None, bad)


def integer_decode(
    q: QuantizedTensor,
    k: QuantizedTensor,
    v: QuantizedTensor,
    scale: float,
    seen: np.ndarray,
    splits: int = 1,
    change: Callable[[int, slice, np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition of INT8 decode over one sequence of a KV cache.

    Out (H, L, Dv) float32, octave m (H, L), sum l (H, L) float32, in units of
    `fixedpoint.SUM_ONE`.

    q (H, L, D) is `decode_query` of the query, int16: products with it are exact in int32. k (Hkv,
    S, D) and v (Hkv, S, Dv) are int8; all have one scale per row. seen (L, S) bool. As
    `integer_steps`, but weights are not rounded to 8 bits, and a value's scale belongs to its
    token: relative to the largest one v_max of the key block, a uint16 fraction, it is folded into
    the weight, which keeps 15 bits. The row sum l takes 14 bits of the weights without it. The key
    blocks go in `splits` equal shares, each from a fresh state; the states are merged in order, by
    powers of two. Outputs are summed up times `fixedpoint.VALUE_UNIT`.

    change : f(head, keys, scores), as `decode_change` makes it, of rounded Q8.8 scores (L, keys)
        float32; rounded again.
    """
    (nh, length, _), (nkv, s_len, dv) = q.data.shape, v.data.shape
    out = np.zeros((nh, length, dv), F)
    ms = np.zeros((nh, length), F)
    ls = np.zeros((nh, length), F)
    cq, ck = combined_scale(q, k, scale)
    bad = np.isnan(ck) | (False if v.nonfinite is None else v.nonfinite)
    factors = np.where(bad, F(0), np.minimum(ck, F(fx.KEY_SCALE_LIMIT)))
    blocks = (s_len + KEY_BLOCK - 1) // KEY_BLOCK
    share = (blocks + splits - 1) // splits * KEY_BLOCK
    for h in range(nh):
        g = h * nkv // nh
        lost = np.isnan(cq[h])
        states = []
        for split in range(splits):
            m = np.full(length, fx.MIN_OCTAVE, F)
            l = np.zeros(length, F)
            o = np.zeros((length, dv), F)
            for first in range(split * share, min((split + 1) * share, s_len), KEY_BLOCK):
                cols = slice(first, min(first + KEY_BLOCK, s_len))
                s = (q.data[h].astype(np.float64) @ k.data[g, cols].T.astype(np.float64)).astype(F)
                hidden = ~seen[:, cols] | bad[g, cols] | lost[:, None]
                with np.errstate(over="ignore"):
                    x = (s * factors[g, cols]) * np.where(lost, F(0), cq[h])[:, None]
                t = np.rint(np.clip(x, -fx.T_LIMIT, fx.T_LIMIT))
                if change is not None:
                    x = change(h, cols, t.astype(np.int32).astype(F))
                    t = np.rint(np.clip(x, -fx.T_LIMIT, fx.T_LIMIT))
                t = np.where(hidden, HIDDEN, t.astype(np.int32))
                m, l, o = _decode_block(t, v.data[g, cols], v.scale[g, cols, 0], (m, l, o))
            states.append((m, l, o))
        m, l, o = _merge(states)
        spoiled = (seen & bad[g]).any(1) | (lost & seen.any(1))
        l = np.where(spoiled, F(np.nan), l)
        one = F(fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT)
        with np.errstate(divide="ignore", invalid="ignore"):
            out[h] = np.where(l[:, None] == 0, F(0), o * (one / l)[:, None])
        ms[h], ls[h] = m, l
    return out, ms, ls


def _power(n: np.ndarray) -> np.ndarray:
    """2**max(n, -126) float32 of whole numbers n up to 0."""
    return np.exp2(np.maximum(n, F(-126))).astype(F)


def _decode_block(t, value, v_scale, state):
    """The state (m, l, o) after one key block.

    t (L, n) int32 scores; value (n, Dv) int8 with scales v_scale (n,).
    """
    m, l, o = state
    hidden = t == HIDDEN
    top = t.max(1)
    some = top != HIDDEN
    octave = np.where(some, (top + 255) >> 8, fx.MIN_OCTAVE)
    y = np.minimum((octave[:, None].astype(np.int64) << 8) - t, 65535).astype(np.uint16)
    p = np.where(hidden, 0, fx.exp2_p16(y).astype(np.uint32))
    # rows of zeros have no say in the block's scale
    v_scale = np.where(value.any(-1), v_scale, F(fx.ZERO_VALUE_SCALE))
    v_max = v_scale.max()
    ratio = np.minimum(np.rint(v_scale * (F(65536) / v_max)), 65535).astype(np.uint32)
    w = (p.astype(np.uint32) * ratio) >> 17
    m_new = np.maximum(m, octave.astype(F))
    weight = np.where(some, _power(octave.astype(F) - m_new), F(0))
    l = l * _power(m - m_new) + (p >> 2).sum(1).astype(F) * weight
    products = (w.astype(np.int64) @ value.astype(np.int64)).astype(F)
    unit = (weight * (v_max * F(fx.VALUE_UNIT)))[:, None]
    return m_new, l, o * _power(m - m_new)[:, None] + products * unit


def _merge(states):
    """The splits' states (m, l, o) as one, summed in order."""
    m = np.max([state[0] for state in states], 0)
    first_m, l, o = states[0]
    l = l * _power(first_m - m)
    o = o * _power(first_m - m)[:, None]
    for m_i, l_i, o_i in states[1:]:
        l = l + l_i * _power(m_i - m)
        o = o + o_i * _power(m_i - m)[:, None]
    return m, l, o


def solve(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """What impl="reference" computes: the integer model for precision "int8", else the oracle."""
    return integer_model(problem) if problem.precision == "int8" else oracle(problem)
