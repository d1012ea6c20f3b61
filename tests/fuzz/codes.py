"""Rotated rows, and rows in 4 bits, by their definitions, in NumPy alone."""

from __future__ import annotations

import numpy as np

F = np.float32
LARGEST = F(np.finfo(np.float32).max)
NO_SCALE = F(2.0**-100)  # peaks below count as zero
HUGE = F(2.0**100)  # sums of larger numbers are made in units of 2**32
ONE = 32767  # the largest of a row's numbers before they become codes
STEPS = (15, 16, 17)
WHOLE = 1 << 20  # larger than any row


def hadamard(d: int, most: int = WHOLE) -> np.ndarray:
    """(D, D) float64: blocks of the largest power of two that divides D, `most` at most."""
    block = min(d & -d, most)
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(d // block), h / np.sqrt(block))


def rotated(x: np.ndarray, most: int = WHOLE) -> np.ndarray:
    """Rows times their Hadamard matrices, float64."""
    return x @ hadamard(x.shape[-1], most)


@np.errstate(all="ignore")
def turned(x: np.ndarray, most: int = WHOLE) -> np.ndarray:
    """The same in float32, sum by sum in the order that all machines keep."""
    d = x.shape[-1]
    block = min(d & -d, most)
    if block == 1:
        return x
    large = np.abs(x).max(-1, keepdims=True) > HUGE
    factor = F(np.sqrt(1.0 / block))
    out = x * np.where(large, factor * F(2.0**-32), factor)
    half = 1
    while half < block:
        pairs = out.reshape(*x.shape[:-1], d // (2 * half), 2, half)
        out = np.stack(
            [pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2
        )
        out = out.reshape(x.shape)
        half *= 2
    again = out * F(2.0**32)
    finite = np.isfinite(x).all(-1, keepdims=True)
    return np.where(large, np.where(finite, np.clip(again, -LARGEST, LARGEST), again), out)


@np.errstate(all="ignore")
def quantized(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotated rows (..., D) as odd numbers from -15 to 15, their scales, and which are not finite."""
    x = turned(np.asarray(rows, F))
    top = np.abs(x).max(-1, keepdims=True, initial=0)
    bad = ~np.isfinite(x).all(-1, keepdims=True)
    usable = (top > NO_SCALE) & ~bad
    safe = np.where(usable, top, F(1))
    whole = np.rint(np.where(usable, x, F(0)) * (F(ONE) / safe)).astype(np.int64)
    best = np.zeros(x.shape)
    gain, factor = np.full(top.shape, -1, F), np.zeros(top.shape, F)
    for steps in STEPS:
        n = np.clip((whole * steps >> 16) + 8, 0, 15) * 2 - 15
        product = (whole * n).sum(-1, keepdims=True).astype(F)
        square = (n * n).sum(-1, keepdims=True).astype(F)
        won = product * product / square
        better = won > gain
        gain, factor = np.where(better, won, gain), np.where(better, product / square, factor)
        best = np.where(better, n, best)
    scale = np.where(usable, safe / F(ONE), F(0)) * factor
    return best, scale[..., 0].astype(np.float64), bad[..., 0]
