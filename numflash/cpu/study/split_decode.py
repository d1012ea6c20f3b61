"""One new token against a cache of keys, in miniature.

FlashDecoding's split, and FlashDecoding++'s unified maximum. float32.

`split` (FlashDecoding, Dao et al. 2023): with one query row there are no rows to divide among
workers but the keys. Each takes a part of them with its own maximum m and sum l and leaves an
output that is not divided yet; `merge` brings the parts to one maximum, adds them and divides: out
= sum(2**(m_i - m) o_i) / sum(2**(m_i - m) l_i).

`unified` (FlashDecoding++, Hong et al. 2023, section 3): all parts subtract one number phi fixed
beforehand, so that they add up as they are, no maximum is looked for and nothing is rescaled. It is
right only while 2**(s - phi) stays inside float32, so every row is tested: a score too far above
phi, or a sum so far below that precision is gone, sends the row to `split`.

`cpu.decode` is the kernel that ships, on the split and without the unified maximum.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from ...jit.compiler import inline, kernel
from ...numerics.fixedpoint import LOG2E

F = np.float32
BLOCK = 128  # keys whose scores are kept at a time
HIGHEST = F(64)  # octaves above phi: 2**64, and sums of 2**60 of them, fit float32
LEAST = F(2.0**-60)  # a row sum below this: every score is some 60 octaves below phi


@inline
def scores(q, k, c, s):
    """s[j] = q . k[j] * c, the log2 of a weight; returns the largest."""
    top = F(-np.inf)
    for j in range(k.shape[0]):
        row, total = k[j], F(0)
        for e in range(q.size):
            total += q[e] * row[e]
        s[j] = F(total * c)
        top = max(top, s[j])
    return top


@inline
def add_values(s, shift, v, o):
    """o += sum over j of 2**(s[j] - shift) * v[j]; returns the sum of the weights."""
    total = F(0)
    for j in range(s.size):
        p, row = np.exp2(F(s[j] - shift)), v[j]
        total += p
        for t in range(o.size):
            o[t] += p * row[t]
    return total


@inline
def part(length, splits, i):
    """First key of part i and the one after the last, in whole blocks."""
    blocks = (length + BLOCK - 1) // BLOCK
    share = (blocks + splits - 1) // splits * BLOCK
    return min(i * share, length), min((i + 1) * share, length)


@kernel(parallel=True, float_math=True)
def split(q, k, v, c, o, m, l):
    """Each part on its own: q (H, D), k, v (H, S, .), c = scale * log2(e).

    o (H, splits, Dv), m, l (H, splits).
    """
    splits = m.shape[1]
    for task in prange(m.size):
        h, i = np.intp(task) // splits, np.intp(task) % splits
        s, sums = np.empty(BLOCK, F), o[h, i]
        sums[:], top, total = F(0), F(-np.inf), F(0)
        first, stop = part(k.shape[1], splits, i)
        for j in range(first, stop, BLOCK):
            z = min(j + BLOCK, stop)
            new = max(top, scores(q[h], k[h, j:z], c, s))
            if new > top:
                shrink = np.exp2(F(top - new)) if total > F(0) else F(0)
                total = F(total * shrink)
                for t in range(sums.size):
                    sums[t] *= shrink
                top = new
            total = F(total + add_values(s[: z - j], top, v[h, j:z], sums))
        m[h, i], l[h, i] = top, total


@kernel
def merge(o, m, l, out):
    """The parts in their order, brought to one maximum, added and divided.

    A head without keys gives 0.
    """
    for h in range(m.shape[0]):
        top, total, row = m[h].max(), F(0), out[h]
        row[:] = F(0)
        for i in range(m.shape[1]):
            share = np.exp2(F(m[h, i] - top)) if l[h, i] > F(0) else F(0)
            total += share * l[h, i]
            for t in range(row.size):
                row[t] += share * o[h, i, t]
        if total > F(0):
            for t in range(row.size):
                row[t] /= total


@kernel(parallel=True, float_math=True)
def unified(q, k, v, c, phi, o, l, high):
    """Each part with the same shift phi (H,), in octaves.

    high (H, splits) uint8 becomes 1 where a score is too far above phi.
    """
    splits = l.shape[1]
    for task in prange(l.size):
        h, i = np.intp(task) // splits, np.intp(task) % splits
        s, sums, total, above = np.empty(BLOCK, F), o[h, i], F(0), False
        sums[:] = F(0)
        first, stop = part(k.shape[1], splits, i)
        for j in range(first, stop, BLOCK):
            z = min(j + BLOCK, stop)
            above |= scores(q[h], k[h, j:z], c, s) > F(phi[h] + HIGHEST)
            total = F(total + add_values(s[: z - j], phi[h], v[h, j:z], sums))
        l[h, i], high[h, i] = total, above


def split_decode(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    splits: int = 4,
    scale: float | None = None,
) -> np.ndarray:
    """Attention of one token per head.

    query (H, D), key (H, S, D), value (H, S, Dv) float32 -> (H, Dv).
    """
    heads, dv = query.shape[0], value.shape[2]
    o = np.empty((heads, splits, dv), F)
    m = np.empty((heads, splits), F)
    l = np.empty((heads, splits), F)
    split(
        query, key, value, F((query.shape[1] ** -0.5 if scale is None else scale) * LOG2E), o, m, l
    )
    out = np.empty((heads, dv), F)
    merge(o, m, l, out)
    return out


def unified_decode(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    phi: np.ndarray,
    splits: int = 4,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The same with one shift phi (H,), in units of log2, for all parts.

    (out (H, Dv), rows (H,) bool that had to fall back).
    """
    heads, dv = query.shape[0], value.shape[2]
    o = np.empty((heads, splits, dv), F)
    l = np.empty((heads, splits), F)
    high = np.empty((heads, splits), np.uint8)
    unified(
        query,
        key,
        value,
        F((query.shape[1] ** -0.5 if scale is None else scale) * LOG2E),
        phi.astype(F),
        o,
        l,
        high,
    )
    total = l.sum(1)
    unfit = (high.any(1) | ~(total >= LEAST)) & (key.shape[1] > 0)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        out = np.where(total[:, None] > 0, o.sum(1) / total[:, None], F(0)).astype(F)
    if unfit.any():
        out[unfit] = split_decode(query[unfit], key[unfit], value[unfit], splits, scale)
    return out, unfit
