"""Rows and keys whose gradients float32 holds, and what the tiled gradient needs to know of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LOG2E
from ...validation import LARGEST_LSE

F = np.float32
# scores, and what one row adds to a gradient, stay below in float32
LARGEST_SCORE = 2.0**120
LARGEST_GRADIENT = 2.0**100
INFINITY = np.uint32(0x7F800000)
CHUNK = 64  # rows that one task looks at


class Rows(NamedTuple):
    """What `examine` finds out about N query heads and Nkv KV heads.

    held : (N, L) bool, rows that are finite and whose scores and gradients stay far from the
        largest float
    hidden : (Nkv, S) bool, keys beyond their sequence's length or that are not finite
    lse : (N, padded L) float32 in units of log2, +inf for rows that are not held
    delta : (N, padded L) float32 rowsum(dO * O), 0 for those
    exact_delta : (N, L) float64, of all rows
    largest : (Nkv, chunks of S, 2) float32, the largest magnitudes of keys and values that are not
        hidden
    """

    held: np.ndarray
    hidden: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    exact_delta: np.ndarray
    largest: np.ndarray


def empty_rows(n: int, length: int, padded: int, n_kv: int, s: int) -> Rows:
    """Room for N x L rows, padded to `padded`, and Nkv x S keys."""
    return Rows(
        np.empty((n, length), np.bool_),
        np.empty((n_kv, s), np.bool_),
        np.empty((n, padded), F),
        np.empty((n, padded), F),
        np.empty((n, length), np.float64),
        np.empty((n_kv, -(-s // CHUNK), 2), F),
    )


@bare
def _largest_bits(words):
    """The largest magnitude of a row of float32, as bits: above INFINITY for NaN."""
    top = np.uint32(0)
    for e in range(words.size):
        top = max(top, np.uint32(words[e] & np.uint32(0x7FFFFFFF)))
    return top


@bare
def _examine_keys(task, k, v, key_lengths, rows):
    """A chunk of keys and values; k, v (Nkv, S, ...) are bits."""
    n_kv, s, _ = k.shape
    chunks = rows.largest.shape[1]
    n, chunk = task // chunks, task % chunks
    length = key_lengths[n * key_lengths.size // n_kv]
    most_k, most_v = np.uint32(0), np.uint32(0)
    for j in range(chunk * CHUNK, min(s, (chunk + 1) * CHUNK)):
        of_key, of_value = _largest_bits(k[n, j]), _largest_bits(v[n, j])
        hidden = j >= length or of_key >= INFINITY or of_value >= INFINITY
        rows.hidden[n, j] = hidden
        if j < length and of_key < INFINITY:
            most_k = max(most_k, of_key)
        if j < length and of_value < INFINITY:
            most_v = max(most_v, of_value)
    rows.largest.view(np.uint32)[n, chunk, 0] = most_k
    rows.largest.view(np.uint32)[n, chunk, 1] = most_v


@bare
def _is_held(q, do, k, v, delta, lse, widths, scale):
    """Whether float32 holds a row, given the largest magnitudes of its operands.

    False where any of them is NaN. In float64, where no product of these leaves the range.
    """
    of_weights, of_delta = do * v * widths[1] * scale, abs(delta) * scale
    return (
        q * k * widths[0] * scale <= LARGEST_SCORE
        and do <= LARGEST_GRADIENT
        and of_weights * max(1.0, q) <= LARGEST_GRADIENT
        and of_weights * k <= LARGEST_GRADIENT
        and of_delta * max(1.0, q) <= LARGEST_GRADIENT
        and of_delta * k <= LARGEST_GRADIENT
        and abs(lse) < LARGEST_LSE
    )


@bare(float_math=True)
def _dot(a, b):
    total = 0.0
    for e in range(a.size):
        total += np.float64(a[e]) * np.float64(b[e])
    return total
