"""A result held against the oracle's."""

from __future__ import annotations

import numpy as np

from .oracle import EPS_OF

SMALLEST = {"float32": 1e-37, "float64": 1e-37, "float16": 6e-8, "bfloat16": 1e-37}
LARGEST = {"float32": 3.4e38, "float64": 1.7e308, "float16": 65519.0, "bfloat16": 3.38e38}


class WrongError(Exception):
    """A result that is not what it must be."""


def same_kind(name: str, got: np.ndarray, shape: tuple[int, ...], dtype: str) -> None:
    if (
        not isinstance(got, np.ndarray | np.generic)
        or got.shape != tuple(shape)
        or got.dtype.name != dtype
    ):
        raise WrongError(
            f"{name}: got {type(got).__name__} {got.dtype} {got.shape}, expected {dtype} {tuple(shape)}"
        )


def close(name: str, got: np.ndarray, want: np.ndarray, error: np.ndarray, dtype: str) -> None:
    """Entries within `error` and the rounding of `dtype`; NaN and infinity where they belong.

    Infinite errors say nothing. What may lie beyond the largest number of `dtype`, by its error,
    may be infinite.
    """
    got = np.asarray(got).astype(np.float64)
    with np.errstate(all="ignore"):
        known = error < np.inf
        far = np.abs(want) + np.where(known, error, 0) > LARGEST[dtype] * 0.99
        limit = error + 2 * EPS_OF[dtype] * np.abs(want) + SMALLEST[dtype]
        right = np.where(np.isnan(want), np.isnan(got), np.abs(got - want) <= limit)
        right = np.where(np.isinf(want), got == want, right)
        wrong = ~right & known & ~(far & np.isfinite(want))
        # what is finite and known to no digit must still be finite
        wrong |= ~known & np.isfinite(want) & ~np.isnan(error) & np.isnan(got)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongError(
            f"{name}{list(at)} of {list(got.shape)}: got {got[at]:.9g}, expected {want[at]:.9g} within {limit[at]:.3g}; "
            f"{int(wrong.sum())} of {wrong.size} are wrong"
        )


def inside(name: str, got: np.ndarray, v: np.ndarray, room: float) -> None:
    """Means of finite values lie between them. v (B, H, S, Dv) of every query head."""
    if not v.shape[2] or not got.size or not np.isfinite(v).all():
        return
    with np.errstate(all="ignore"):
        low = np.minimum(v.min(2), 0)[:, :, None]
        high = np.maximum(v.max(2), 0)[:, :, None]
        slack = room * np.maximum(np.abs(low), np.abs(high)) + 1e-30
        got = np.asarray(got).astype(np.float64)
        wrong = (got < low - slack) | (got > high + slack)
    if wrong.any():
        at = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise WrongError(
            f"{name}{list(at)}: got {got[at]:.9g}, beyond every value that it is a mean of"
        )
