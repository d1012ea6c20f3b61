"""The definition of INT8 decode over one sequence of a KV cache, in NumPy.

Queries of 14 bits and a sign, weights of 15 bits, an unrounded row sum: the bits of every decode
kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..numerics import fixedpoint as fx
from ..numerics.quantization import QuantizedTensor
from ..numerics.rotation import WHOLE, rotate
from ..tiling import KEY_BLOCK
from .int8 import HIDDEN, F, combined_scale


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


def decode_query(query: np.ndarray, most: int = fx.QUERY_ONE) -> QuantizedTensor:
    """A query (..., D) float32 as decode rounds it: int16 up to `most`, a scale per row.

    data = rint(query * (most / max|query|)), scale = max / most. Rows of zeros have scale 1, rows
    that are not finite are zeros and marked. INT8 takes 127 * 128, INT4 `fixedpoint.CODE_QUERY_ONE`.
    """
    x = np.asarray(query, F)
    top = np.abs(x).max(-1, keepdims=True)
    nonfinite = ~np.isfinite(top)
    usable = (top > F(2.0**-100)) & ~nonfinite
    safe = np.where(usable, top, F(1))
    data = np.where(usable, x, F(0)) * (F(most) / safe)
    scale = np.where(usable, safe / F(most), F(1))
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
    """The definition of INT8 decode over one sequence of a KV cache; INT4's is `int4.decode`.

    Returns out (H, L, Dv) float32, octave m (H, L), sum l (H, L) float32, in units of
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
                with np.errstate(all="ignore"):
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
        with np.errstate(all="ignore"):
            out[h] = np.where(l[:, None] == 0, F(0), o * (one / l)[:, None])
        ms[h], ls[h] = m, l
    return out, ms, ls


def rotated_decode(
    query: np.ndarray,
    k: QuantizedTensor,
    v: QuantizedTensor,
    scale: float,
    seen: np.ndarray,
    splits: int = 1,
    change: Callable[[int, slice, np.ndarray], np.ndarray] | None = None,
    most: int = WHOLE,
    query_one: int = fx.QUERY_ONE,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The definition of decode over a cache that rotates: `integer_decode` of rotated rows.

    query (H, L, D) float32, not rotated, then rounded to whole numbers up to `query_one`; k and v of
    rotated rows, matrices of at most `most` channels. A query rotated like the keys has the same
    scores; the output is a sum of rotated values and is rotated back. Out (H, L, Dv) float32, octave
    m and sum l (H, L).
    """
    q = decode_query(rotate(np.asarray(query, F), most), query_one)
    out, m, l = integer_decode(q, k, v, scale, seen, splits, change)
    return rotate(out, most), m, l


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
    ratio = np.zeros(v_scale.shape, np.uint32)
    if v_max > 0:  # a block of zeros in 4 bits has none
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
