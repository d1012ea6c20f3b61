"""A fused multiply-add in NumPy: a product and a sum, rounded once, as the instruction of CPUs and cards."""

from __future__ import annotations

import numpy as np

# of float64's bits those that float32 lacks, and what they are half way between two float32 numbers
LOST, HALF_WAY = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
UP, DOWN = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


def rounding_error(product: np.ndarray, c: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What float64 lost of product + c when it rounded it to `total` (Knuth's two-sum)."""
    return (product - (total - (total - product))) + (c - (total - product))


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, as float64 that becomes the right float32 when it is rounded.

    The product is exact: 48 bits. Their sum is rounded, and rounding it again goes wrong where it
    lies half way between two float32 numbers now, and did not before: such a sum moves by its last
    bit, to the side on which it was.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    tie = (total.view(np.uint64) & LOST) == HALF_WAY
    if tie.any():
        error = rounding_error(product, c, total)
        moved = total.view(np.uint64) + np.where((error > 0) == (total > 0), UP, DOWN)
        total = np.where(tie & (error != 0), moved.view(np.float64), total)
    return total
