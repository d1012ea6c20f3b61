"""Rotating rows by a Hadamard matrix before they are rounded.

Keys of real models have a few channels that are much larger than the others, and one scale per row
wastes the digits of the rest on them. A Hadamard matrix spreads every channel over all; applied to
query and key both, it leaves their products unchanged (QuaRot, arXiv 2404.00456). Additions and
subtractions in a fixed order and one factor: the same bits on every machine.
"""

from __future__ import annotations

import numpy as np

from .jit.compiler import bare, kernel
from .jit.parallel import over_tasks
from .jit.threads import one_at_a_time, refuse_after_fork

F = np.float32
I = np.int32
EIGHT = 8
CHUNK = 256  # rows per task
LARGEST = F(np.finfo(np.float32).max)
MAGNITUDE = I(0x7FFFFFFF)
HUGE = I((127 + 100) << 23)  # bits of 2**100: sums of 576 such numbers still are finite
DOWN, UP = F(2.0**-32), F(2.0**32)
WHOLE = 1 << 20  # larger than any row: its Hadamard matrices are not limited


def block_of(channels: int) -> int:
    """The largest power of two that divides `channels`: the size of the Hadamard matrices."""
    return channels & -channels


def shared_block(channels: int, first: int) -> int:
    """The largest matrix whose blocks rotate a row and its `first` channels by themselves."""
    return min(block_of(channels), block_of(first))


@bare
def _turn_eight(out, first):
    """The additions of the turns of 1, 2 and 4 for eight numbers from `first` on."""
    a, b, c, d = out[first], out[first + 1], out[first + 2], out[first + 3]
    e, f, g, h = out[first + 4], out[first + 5], out[first + 6], out[first + 7]
    a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
    a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
    out[first], out[first + 4] = a + e, a - e
    out[first + 1], out[first + 5] = b + f, b - f
    out[first + 2], out[first + 6] = c + g, c - g
    out[first + 3], out[first + 7] = d + h, d - h


@bare
def _rotate_row(row, bits, block, factor, out):
    top = I(0)
    for e in range(row.size):
        top = max(top, I(bits[e] & MAGNITUDE))
    large = top > HUGE
    unit = factor * DOWN if large else factor
    for e in range(row.size):
        out[e] = row[e] * unit
    half = 1
    if (
        block >= EIGHT
    ):  # the first three turns in registers: loops of 1, 2 and 4 cost four times as much
        for first in range(0, row.size, EIGHT):
            _turn_eight(out, first)
        half = EIGHT
    while half < block:
        for first in range(0, row.size, 2 * half):
            for e in range(first, first + half):
                x, y = out[e], out[e + half]
                out[e] = x + y
                out[e + half] = x - y
        half *= 2
    if large:  # a finite row stays finite
        for e in range(row.size):
            x = out[e] * UP
            out[e] = x if x != x or top >= I(0x7F800000) else min(max(x, -LARGEST), LARGEST)


@bare
def rotate_row(row, most):
    """One row (D,) float32 as `rotate` gives it, in place."""
    block = min(row.size & -row.size, most)
    if block > 1:
        _rotate_row(row, row.view(I), block, F(np.sqrt(1.0 / block)), row)


@bare
def _rotate_chunk(task, x, bits, block, factor, out):
    for i in range(task * CHUNK, min((task + 1) * CHUNK, x.shape[0])):
        _rotate_row(x[i], bits[i], block, factor, out[i])


@kernel
def _rotate(x, bits, block, factor, out):
    """Rows of x (N, D) float32 with their bits as int32, into out (N, D)."""
    over_tasks(_rotate_chunk, (x.shape[0] + CHUNK - 1) // CHUNK, (x, bits, block, factor, out))


def rotate(x: np.ndarray, most: int = WHOLE) -> np.ndarray:
    """The rows of x (..., D) times a Hadamard matrix, float32.

    Twice gives x again, but for rounding.

    Where D is no power of two, one matrix for each `block_of(D)` channels, and none larger than
    `most`, a power of two. A row that is not finite stays so, a finite one stays finite.
    """
    rows = np.ascontiguousarray(x, F).reshape(-1, x.shape[-1])
    block = min(block_of(rows.shape[1]), most)
    if block == 1:
        return rows.reshape(x.shape).copy()
    out = np.empty_like(rows)
    refuse_after_fork()
    with one_at_a_time():
        _rotate(rows, rows.view(I), block, F(block**-0.5), out)
    return out.reshape(x.shape)
