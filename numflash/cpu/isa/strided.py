"""Arrays of the caller as kernels read and write them in place: rows that are contiguous, anywhere."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...interop.arrays import WORD, carray, to_float32, writable
from ...jit.compiler import bare, own
from ...jit.memory import LINE
from .vectors import prefetch_line


class Strided(NamedTuple):
    """Where the rows of a (B, H, L, D) array are: address, strides in bytes, sizes.

    The address is the first row's; the strides lead to the next batch, head and row.
    """

    start: int
    batch: int
    head: int
    row: int
    heads: int
    length: int
    d: int


@own
def strided_at(strides, n, start, heads, length, d):
    """Array number n of a call, whose arrays' strides, three of each, are one array."""
    return Strided(start, strides[3 * n], strides[3 * n + 1], strides[3 * n + 2], heads, length, d)


@own
def row_at(x, n, i):
    """Address of row i of head n, heads of all batches counted through.

    A loop over rows takes the first one's and adds `x.row`: the two divisions here take as long as
    copying a row.
    """
    return x.start + n // x.heads * x.batch + n % x.heads * x.head + i * x.row


@bare
def ask_for_rows(x, n, first, count, row_bytes):
    """Prefetch up to `count` rows of head n from row `first` on, of those that exist."""
    if first >= 0:
        start = row_at(x, n, first)
        for i in range(min(count, x.length - first)):
            for line in range(0, row_bytes, LINE):
                prefetch_line(start + i * x.row + line)


def strided(x: np.ndarray) -> Strided:
    """Where a (B, H, L, D) array is, whose rows are contiguous."""
    return Strided(x.ctypes.data, *x.strides[:3], *x.shape[1:])


def contiguous_strides(*arrays: tuple[tuple[int, ...], int]) -> np.ndarray:
    """What `strided_at` takes of contiguous arrays, each by its shape and the bytes of an element."""
    found: list[int] = []
    for (_, heads, rows, columns), size in arrays:
        row = columns * size
        found += heads * rows * row, rows * row, row
    return np.array(found, np.int64)


def rows_of(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """x (B, H, L, D), floats or the bits of bfloat16, as rows of contiguous float32 or, where these are
    the `dtype`, of the bits; copied only where they are not, or where a row begins within a word.
    """
    if x.dtype != dtype:
        x = to_float32(x)
    split = dtype.itemsize < WORD and any(step % WORD for step in x.strides[:3])
    if x.strides[3] != x.itemsize or split or not x.flags.aligned:
        return carray(x)
    return writable(x)
