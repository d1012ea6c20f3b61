"""What the tests hold everything against.

Attention written out once more, row by row in float64, and shapes that break kernels.
"""

from __future__ import annotations

import numpy as np

# L and S around every tile and block edge: register rows 2, 4, 6, query tiles 24 and 32, key
# half-block 64, block 128
TAILS = [
    (1, 1),
    (1, 128),
    (2, 3),
    (5, 7),
    (6, 64),
    (7, 65),
    (23, 127),
    (24, 128),
    (25, 129),
    (33, 255),
    (49, 257),
    (130, 300),
]


def draw(shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def qkv(b=1, h=2, l=33, s=None, d=16, dv=None, hkv=None, seed=0, dtype=np.float32):
    s = l if s is None else s
    hkv = hkv or h
    return (
        draw((b, h, l, d), seed, dtype),
        draw((b, hkv, s, d), seed + 1, dtype),
        draw((b, hkv, s, dv or d), seed + 2, dtype),
    )


def naive(
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    window=(None, None),
    alignment="upper_left",
    key_lengths=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
):
    """Attention by its definition, one row at a time, in float64. Returns out and lse."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    nb, nh, length, d = query.shape
    nkv, s = key.shape[1:3]
    out = np.zeros((nb, nh, length, value.shape[3]))
    lse = np.full((nb, nh, length), -np.inf)
    mask = None if attn_mask is None else np.broadcast_to(attn_mask, (nb, nh, length, s))
    slopes = None if alibi_slopes is None else np.broadcast_to(alibi_slopes, (nb, nh))
    for b, h, i in np.ndindex(nb, nh, length):
        count = s if key_lengths is None else key_lengths[b]
        centre = i + (count - length if alignment == "lower_right" else 0)
        g = h // (nh // nkv)
        scores = []
        seen = []
        for j in range(count):
            x = float(query[b, h, i] @ key[b, g, j]) * (1 / np.sqrt(d) if scale is None else scale)
            if softcap:
                x = softcap * np.tanh(x / softcap)
            if slopes is not None:
                x -= slopes[b, h] * abs(centre - j)
            visible = not (
                (is_causal and j > centre)
                or (window[0] is not None and j < centre - window[0])
                or (window[1] is not None and j > centre + window[1])
            )
            if mask is not None:
                visible &= (
                    bool(mask[b, h, i, j]) if mask.dtype == bool else mask[b, h, i, j] != -np.inf
                )
                x += 0 if mask.dtype == bool else float(mask[b, h, i, j])
            if visible:
                scores.append(x)
                seen.append(j)
        sink = [] if sinks is None else [float(sinks[h])]
        if scores or sink:
            top = max(scores + sink)
            weights = np.exp(np.array(scores) - top)
            total = weights.sum() + sum(np.exp(x - top) for x in sink)
            out[b, h, i] = weights @ value[b, g, seen] / total if seen else 0
            lse[b, h, i] = top + np.log(total)
    return out, lse


def naive_gradients(
    grad_out,
    query,
    key,
    value,
    attn_mask=None,
    is_causal=False,
    scale=None,
    window=(None, None),
    alignment="upper_left",
    key_lengths=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
    dtype=np.float64,
    with_scores=False,
    grad_lse=None,
):
    """Gradients of `naive` by the chain rule, a head's whole score matrix in memory.

    Returns dq, dk, dv, and those (B, H, L, S) of the scores that the softmax takes; all in `dtype`.
    """
    grad_out, query, key, value = (np.asarray(x, dtype) for x in (grad_out, query, key, value))
    nb, nh, length, d = query.shape
    nkv, s = key.shape[1:3]
    scale = dtype(1 / np.sqrt(d) if scale is None else scale)
    mask = None if attn_mask is None else np.broadcast_to(attn_mask, (nb, nh, length, s))
    left, right = (np.inf if side is None else side for side in window)
    right = 0 if is_causal else right
    dq, dk, dv = (np.zeros(x.shape, dtype) for x in (query, key, value))
    of_scores = np.zeros((nb, nh, length, s), dtype)
    for b, h in np.ndindex(nb, nh):
        g = h // (nh // nkv)
        q = query[b, h]
        k = key[b, g]
        v = value[b, g]
        do = grad_out[b, h]
        count = s if key_lengths is None else key_lengths[b]
        away = (
            np.arange(s)
            - np.arange(length)[:, None]
            - (count - length if alignment == "lower_right" else 0)
        )
        seen = (np.arange(s) < count) & (away >= -left) & (away <= right)
        x = q @ k.T * scale
        slope = dtype(1)
        if softcap:
            x = np.tanh(x / dtype(softcap))
            x, slope = x * dtype(softcap), 1 - x * x
        if alibi_slopes is not None:
            x = x - dtype(np.broadcast_to(alibi_slopes, (nb, nh))[b, h]) * np.abs(away).astype(
                dtype
            )
        if mask is not None and mask.dtype == bool:
            seen &= mask[b, h]
        elif mask is not None:
            seen &= mask[b, h] != -np.inf
            x = x + np.where(seen, mask[b, h], 0).astype(dtype)
        x = np.where(seen, x, -np.inf)
        sink = np.full((length, 1), -np.inf if sinks is None else sinks[h], dtype)
        top = np.maximum(x.max(-1, keepdims=True, initial=-np.inf), sink)
        top = np.where(np.isinf(top), dtype(0), top)
        p = np.exp(x - top)
        total = p.sum(-1, keepdims=True) + np.exp(sink - top)
        p = p / np.where(total > 0, total, dtype(1))
        dp = do @ v.T
        of_scores[b, h] = p * (dp - (p * dp).sum(-1, keepdims=True))
        if grad_lse is not None:  # the derivative of log(sum of exp) is the softmax
            of_scores[b, h] += p * np.asarray(grad_lse[b, h], dtype)[:, None]
        ds = of_scores[b, h] * slope
        dq[b, h], dk[b, g], dv[b, g] = (
            ds @ k * scale,
            dk[b, g] + ds.T @ q * scale,
            dv[b, g] + p.T @ do,
        )
    return (dq, dk, dv, of_scores) if with_scores else (dq, dk, dv)
