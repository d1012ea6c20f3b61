"""What `smooth` takes from the keys of a sequence: one vector per KV head, which changes no softmax.

Without the channel means of the first append, keys are smaller, so that their scales and their
rounding errors are. In language models the first key is far from that mean and gets much of every
row's weight (an attention sink): its rounding error enters all rows, and with a few large channels
it is the largest error of all. Any vector may be subtracted, the mean is only a good one. So each
channel's mean is moved by the rounding error of the first key, less than a step: the first key less
that vector is then stored without an error. Where the move would make the other keys much larger,
and so less exact (`MOST`), the means stay as they are.
"""

from __future__ import annotations

import numpy as np

from ..interop.arrays import widen
from ..numerics.rotation import rotate
from .settings import Settings

F = np.float32
SMOOTH_TOKENS = 16  # fewer first tokens say too little about the channel means
MOST = 1.5  # the sum of squares of the other keys may grow by this factor
INT8_TOP, INT4_TOP = F(127), F(15)  # the largest stored numbers; INT4's are odd


def offset_of(key: np.ndarray, settings: Settings) -> np.ndarray:
    """(Hkv, D) float32 to subtract from all keys of a sequence whose first are key (Hkv, n, D).

    Zeros for fewer than `SMOOTH_TOKENS` keys. Keys that are not finite
    are left out of the means.
    """
    heads, n, d = key.shape
    if n < SMOOTH_TOKENS:
        return np.zeros((heads, d), F)
    tokens = widen(key).astype(np.float64)
    finite = np.asarray(np.isfinite(tokens).all(2, keepdims=True))
    tokens = np.where(finite, tokens, 0)
    means = (tokens.sum(1) / np.maximum(finite.sum(1), 1)).astype(F)
    with np.errstate(all="ignore"):
        first = tokens[:, 0].astype(F) - means
        moved = means + (first - _storable(first, settings))
        before, after = (_size(tokens[:, 1:], finite[:, 1:].sum(1), x) for x in (means, moved))
    taken = (
        finite[:, 0] & (after <= MOST * before)[:, None]
    )  # NaN compares false: the means are used
    return np.where(taken, moved, means)


def _size(tokens: np.ndarray, count: np.ndarray, offset: np.ndarray) -> np.ndarray:
    """(Hkv,) sums of squares of tokens (Hkv, n, D) less offset (Hkv, D), (Hkv, 1) of them count."""
    squares = np.einsum("hnd,hnd->h", tokens, tokens)
    x = offset.astype(np.float64)
    found: np.ndarray = squares + (x * (count * x - 2 * tokens.sum(1))).sum(1)
    return found


def _storable(rows: np.ndarray, settings: Settings) -> np.ndarray:
    """Rows (N, D) near the given ones that the cache stores without an error; NaN for zeros."""
    turned = rotate(rows, settings.rotation) if settings.rotate else rows
    top = np.abs(turned).max(1, keepdims=True)
    if settings.dtype == "int4":
        step = top / INT4_TOP
        numbers = np.clip(2 * np.floor(turned / (2 * step)) + 1, -INT4_TOP, INT4_TOP)
    else:
        step = top / INT8_TOP
        numbers = np.rint(turned / step)
    stored = (numbers * step).astype(F)
    return rotate(stored, settings.rotation) if settings.rotate else stored
