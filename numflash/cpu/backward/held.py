"""Rows and keys whose gradients float32 holds, and what the tiled gradient needs to know of rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import array_at
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LOG2E
from ...numerics.quantize_kernels import INFINITE, largest_bits
from ...validation import LARGEST_LSE
from ..isa.strided import Strided, row_at

F = np.float32
I = np.int32
# scores, and what one row adds to a gradient, stay below in float32
LARGEST_SCORE = 2.0**120
LARGEST_GRADIENT = 2.0**100
CHUNK = 64  # rows that one task looks at


class Given(NamedTuple):
    """float32 arrays of N query heads and Nkv KV heads, and a problem's numbers.

    q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv), do (B, H, L, Dv), out (B, H, L, Dv)
    lse : (N, L) contiguous
    grad_lse : (N, L) contiguous, or (0, L) for a gradient of 0
    key_lengths : (B,) int64
    scale : float64, at least 1
    bounds : bool, whether a key that is not finite may have a finite score: softcap and score functions
        see to it
    """

    q: Strided
    k: Strided
    v: Strided
    do: Strided
    out: Strided
    lse: np.ndarray
    grad_lse: np.ndarray
    key_lengths: np.ndarray
    scale: float
    bounds: bool


class Found(NamedTuple):
    """What `examine` finds out.

    skip : (N, L) bool, rows that are left out: not finite, or their scores or gradients come near
        the largest float
    hidden : (Nkv, S) bool, keys beyond their sequence's length or that are not finite
    lse : (N, padded L) float32 in units of log2, +inf for rows that are left out or not there
    delta : (N, padded L) float32 rowsum(dO * O) - dLSE, 0 for those
    exact_delta : (N, L) float64, of all rows
    largest : (Nkv, chunks of S, 2) int32, bits of the largest magnitudes of keys and values, of finite
        ones unless the problem `bounds` scores
    """

    skip: np.ndarray
    hidden: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    exact_delta: np.ndarray
    largest: np.ndarray


@bare
def _examine_keys(task, given, found):
    """A chunk of keys and values."""
    n_kv, s = found.hidden.shape
    chunks = found.largest.shape[1]
    n, chunk = task // chunks, task % chunks
    length = given.key_lengths[n * given.key_lengths.size // n_kv]
    most_k, most_v = I(0), I(0)
    first_k, first_v = row_at(given.k, n, 0), row_at(given.v, n, 0)
    for j in range(chunk * CHUNK, min(s, (chunk + 1) * CHUNK)):
        of_key = largest_bits(array_at(first_k + j * given.k.row, (given.k.d,), np.float32))
        of_value = largest_bits(array_at(first_v + j * given.v.row, (given.v.d,), np.float32))
        found.hidden[n, j] = j >= length or of_key >= INFINITE or of_value >= INFINITE
        if j < length:
            most_k = max(most_k, of_key if of_key < INFINITE or given.bounds else I(0))
            most_v = max(most_v, of_value if of_value < INFINITE else I(0))
    found.largest[n, chunk, 0], found.largest[n, chunk, 1] = most_k, most_v


@bare
def _is_held(q, do, k, v, delta, lse, widths, scale):
    """Whether float32 holds the scores and gradients of a row.

    q, do, k, v, delta, lse float64: the largest magnitudes of the row and of its keys and values,
    infinity for a row that is not finite. Products of these stay in float64's range; NaN, which
    infinity * 0 is, makes a comparison false.
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


@bare
def magnitude(bits):
    """The magnitude with these bits as float64; infinity for NaN."""
    return np.float64(I(min(bits, INFINITE)).view(F))


@bare
def _examine_rows(task, given, found):
    """A chunk of rows, once all keys are examined."""
    length, chunks = given.q.length, (found.lse.shape[1] + CHUNK - 1) // CHUNK
    n, chunk = task // chunks, task % chunks
    n_kv = n * found.largest.shape[0] // found.lse.shape[0]
    most_k, most_v = I(0), I(0)
    for c in range(found.largest.shape[1]):
        most_k = max(most_k, found.largest[n_kv, c, 0])
        most_v = max(most_v, found.largest[n_kv, c, 1])
    k, v = magnitude(most_k), magnitude(most_v)
    widths = np.float64(given.q.d), np.float64(given.do.d)
    first_q, first_do = row_at(given.q, n, 0), row_at(given.do, n, 0)
    first_out = row_at(given.out, n, 0)
    for i in range(chunk * CHUNK, min(found.lse.shape[1], (chunk + 1) * CHUNK)):
        held, lse, delta = False, np.float64(0), np.float64(0)
        if i < length:
            grad = array_at(first_do + i * given.do.row, (given.do.d,), np.float32)
            q = magnitude(
                largest_bits(array_at(first_q + i * given.q.row, (given.q.d,), np.float32))
            )
            do = magnitude(largest_bits(grad))
            lse, delta = (
                np.float64(given.lse[n, i]),
                _dot(grad, array_at(first_out + i * given.out.row, (given.out.d,), np.float32)),
            )
            if given.grad_lse.size > 0:
                delta -= np.float64(given.grad_lse[n, i])
            held = _is_held(q, do, k, v, delta, lse, widths, given.scale)
            found.skip[n, i], found.exact_delta[n, i] = not held, delta
        found.lse[n, i] = F(lse * LOG2E) if held else F(np.inf)
        found.delta[n, i] = F(delta) if held else F(0)


@inline
def examine_rows(given, found):
    """Fill what `found` has of rows; where its `largest` has no chunks, whatever the keys are."""
    chunks = (found.lse.shape[1] + CHUNK - 1) // CHUNK
    over_tasks(_examine_rows, found.lse.shape[0] * chunks, (given, found))


@inline
def examine(given, found):
    """Fill `found`, whose arrays hold anything before."""
    over_tasks(_examine_keys, found.largest.shape[0] * found.largest.shape[1], (given, found))
    examine_rows(given, found)


@kernel
def _examine(given, found):
    examine(given, found)


def found_of(given: Given) -> Found:
    """What float32 holds of a problem."""
    (n, length), s = given.lse.shape, given.k.length
    n_kv = n // given.q.heads * given.k.heads
    found = Found(
        np.empty((n, length), np.bool_),
        np.empty((n_kv, s), np.bool_),
        np.empty((n, length), F),
        np.empty((n, length), F),
        np.empty((n, length), np.float64),
        np.empty((n_kv, -(-s // CHUNK), 2), I),
    )
    _examine(given, found)
    return found
