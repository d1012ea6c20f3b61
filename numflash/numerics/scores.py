"""Scales, shifts and log-sum-exps of the integer pipeline.

What every INT8 launcher computes once per call.

Scores in Q8.8 have 256 units per octave (one unit of log2). The oracle has its own version of each
function in `reference`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from . import fixedpoint as fx
from .fixedpoint import LN2, LOWEST
from .quantization import QuantizedTensor

if TYPE_CHECKING:
    from ..validation import Problem

F = np.float32
LIMIT = 2.0**100  # combined scales are cut here


def largest(x: np.ndarray) -> float:
    """The largest element, 0 of an empty array."""
    # x.max() takes twice as long where nothing is in the cache
    return float(np.maximum.reduce(x, None, initial=0))


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

    cq = q.scale * score_unit and ck = k.scale, each cut at 2**100 so that no product with an int32
    is NaN. A key or query that was not finite has scale NaN.
    """
    unit = score_unit(scale, softcap)
    cq = q.row_scale()
    ck = k.row_scale()
    if max(largest(q.scale) * abs(unit), largest(k.scale)) < LIMIT:
        cq = cq * F(unit)
    else:
        with np.errstate(all="ignore"):
            cq = np.clip(cq * F(unit), F(-LIMIT), F(LIMIT))
            ck = np.minimum(ck, F(LIMIT))
    if q.nonfinite is not None:
        cq = np.where(q.nonfinite, F(np.nan), cq)
    if k.nonfinite is not None:
        ck = np.where(k.nonfinite, F(np.nan), ck)
    return cq.astype(F, copy=False), ck.astype(F, copy=False)


def offset_products(query: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """(B, H, L) float64: q . offset, what smoothing took off the products of each row.

    query (B, H, L, D) int8 or float64; offset (B, Hkv, D) float32.
    """
    repeated = np.repeat(offset.astype(np.float64), query.shape[1] // offset.shape[1], 1)
    # no BLAS: its threads would keep spinning after the call
    return np.einsum("bhld,bhd->bhl", query, repeated)


def row_shift(q: QuantizedTensor, offset: np.ndarray | None, scale: float) -> np.ndarray | None:
    """(B, H, L) float64: what smoothing took from every score of a row, scale * q . offset.

    None without smoothing.

    offset : (B, Hkv, 1, D) float32, what was taken off the keys, or None
    """
    if offset is None:
        return None
    return offset_products(q.data, offset[:, :, 0]) * q.row_scale() * scale


def cap_shift(problem: Problem) -> np.ndarray | None:
    """(B, H, L) float32: `row_shift` in units of the softcap, which is what tanh would lack."""
    shift = row_shift(problem.query, problem.key.offset, problem.scale)
    if shift is None:
        return None
    return np.clip(shift / problem.softcap, -fx.T_LIMIT, fx.T_LIMIT).astype(F)


def lse_as_float32(lse: np.ndarray) -> np.ndarray:
    """A float64 LSE as float32.

    +inf beyond its range, but never -inf, which only rows without keys have.
    """
    with np.errstate(all="ignore"):
        return np.where(lse == -np.inf, lse, np.maximum(lse, LOWEST)).astype(np.float32)


def log_sum_exp(
    m: np.ndarray, l: np.ndarray, shift: np.ndarray | None, one: int = fx.P_ONE
) -> np.ndarray:
    """LSE = (m + log2(l / one)) * ln 2 + shift, natural log, float32; `one` is the weight 1.0.

    -inf where l is 0, and only there: below float32's range, the lowest finite number.
    """
    with np.errstate(all="ignore"):
        lse = (m + np.log2(l.astype(np.float64) / one)) * LN2
        return lse_as_float32(lse if shift is None else lse + shift)
