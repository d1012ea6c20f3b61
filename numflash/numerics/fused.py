"""A fused multiply-add in NumPy: a product and a sum, rounded once, as the instruction of CPUs and cards."""

from __future__ import annotations

import numpy as np

# LOST: the 29 bits of float64's fraction that float32 lacks. HALF_WAY: these bits for a number
# exactly between two float32 numbers.
LOST, HALF_WAY = np.uint64(0x1FFFFFFF), np.uint64(0x10000000)
UP, DOWN = np.uint64(1), np.uint64(0xFFFFFFFFFFFFFFFF)


def rounding_error(product: np.ndarray, c: np.ndarray, total: np.ndarray) -> np.ndarray:
    """What float64 lost of product + c when it rounded it to `total` (Knuth's two-sum)."""
    return (product - (total - (total - product))) + (c - (total - product))


def multiply_add(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c of float32 arrays, as float64 that becomes the right float32 when it is rounded.

    The product is exact: 48 bits. The sum is rounded to float64, then to float32. The second
    rounding is wrong only if the float64 sum is exactly half way between two float32 numbers and
    the exact sum is not. Such a sum is moved by its last bit toward the exact sum.
    """
    product = np.multiply(a, b, dtype=np.float64)
    total = product + c
    tie = (total.view(np.uint64) & LOST) == HALF_WAY
    if tie.any():
        error = rounding_error(product, c, total)
        moved = total.view(np.uint64) + np.where((error > 0) == (total > 0), UP, DOWN)
        total = np.where(tie & (error != 0), moved.view(np.float64), total)
    return total
