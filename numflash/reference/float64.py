"""Attention and its gradient in float64: what every float kernel is compared with."""

from __future__ import annotations

import numpy as np

from ..interop.arrays import widen
from ..validation import LARGEST_LSE, Problem

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
    seen = visible(problem, b, h, rows)
    if problem.bias is not None:
        bias = problem.bias[b, h, rows]
        scores = scores + bias
        seen &= bias != -np.inf  # added to NaN or infinity it would be NaN
    return np.where(seen, scores, -np.inf), slope


def _oracle_rows(problem, b, h, rows, q, k, v):
    with np.errstate(all="ignore"):
        scores, _ = _scores(problem, b, h, rows, q, k)
        top = scores.max(-1, keepdims=True)
        p = np.where(scores == -np.inf, 0.0, np.exp(scores - np.where(top == -np.inf, 0, top)))
        l = p.sum(-1)
        finite = np.isfinite(v)
        out = p @ np.where(finite, v, 0)
        # 0 * NaN must not reach rows that do not see the key
        for j in np.flatnonzero(~finite.all(1)):
            out += np.where(p[:, j : j + 1] > 0, p[:, j : j + 1] * np.where(finite[j], 0, v[j]), 0)
        lse = np.where(l == 0, -np.inf, top[:, 0] + np.log(l))
        out = np.where(l[:, None] == 0, 0, out / l[:, None])
        if problem.sinks is not None:
            total = np.logaddexp(lse, float(problem.sinks[h]))
            out = out * np.exp(np.where(l == 0, -np.inf, lse - total))[:, None]
            lse = total
    return out, lse


def gradients(
    problem: Problem,
    grad_out: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    grad_lse: np.ndarray | None = None,
    of_scores: np.ndarray | None = None,
    block: int = 512,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ (B, H, L, D), dK (B, Hkv, S, D) and dV (B, Hkv, S, Dv) in float64, from dO, O (B, H, L,
    Dv), LSE (B, H, L) and its gradient dLSE, or None for 0.

    P = exp(S - LSE), dV = P^T.dO, dS = P * (dO.V^T - rowsum(dO * O) + dLSE), times the slope of softcap;
    dQ = dS.K * scale, dK = dS^T.Q * scale (FlashAttention 2, section 2.3.2). A key of weight 0
    takes no part, even where it is not finite. An LSE of `LARGEST_LSE` or more is recomputed.
    `of_scores` (B, H, L, S), unless None, is written: dS without the slope of softcap, what a bias
    has as gradient.
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
            with np.errstate(all="ignore"):
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
                delta = (do * out[b, h, rows]).sum(-1, keepdims=True)
                if grad_lse is not None:
                    delta -= np.asarray(grad_lse[b, h, rows, None], np.float64)
                ds = p * (do @ v.T - delta)
                ds = np.where(p == 0, 0, ds)
                if of_scores is not None:
                    of_scores[b, h, rows] = ds
                ds = np.where(p == 0, 0, ds * (1 if slope is None else slope)) * problem.scale
            dq[b, h, rows] += _product(ds, k)
            dk[b, g] += _product(ds.T, q[rows])
            dv[b, g] += _product(p.T, do)
    return dq, dk, dv


def _product(a: np.ndarray, x: np.ndarray) -> np.ndarray:
    """a.x where a weight of 0 hides NaN and infinity."""
    finite = np.isfinite(x)
    out = a @ np.where(finite, x, 0)
    with np.errstate(all="ignore"):
        for j in np.flatnonzero(~finite.all(1)):
            out += np.where(a[:, j : j + 1] != 0, a[:, j : j + 1] * np.where(finite[j], 0, x[j]), 0)
    return out
