"""Sequences packed one behind the other: the arguments of `attention_varlen`.

Sequences of similar lengths are padded to one length and share a call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ..errors import ArgumentError
from ..interop.arrays import Imported, import_integers, writable
from .description import Problem


def _cumulative(name: str, x: Any, total: int) -> np.ndarray:
    """(N + 1,) int64 cumulative lengths from 0 to `total`."""
    array = import_integers(name, x)
    if array.ndim != 1 or not array.size:
        raise ArgumentError(f"{name}: got shape {array.shape}; allowed: (N + 1,)")
    array = array.astype(np.int64)
    if array[0] != 0 or array[-1] != total or (np.diff(array) < 0).any():
        raise ArgumentError(
            f"{name}: got {shorten(array)}; allowed: from 0, never falling, up to the packed length {total}"
        )
    return array


def shorten(array: np.ndarray) -> str:
    """An array as text short enough for a message."""
    return np.array2string(array, threshold=8)


# Multiplications that take about as long as a call: sequences share a call where filling them up to
# one length costs less.
CALL_COST = 1e6


def cuts_of(
    operands: Sequence[Imported], cu_seqlens_q: Any, cu_seqlens_k: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Where the sequences of packed query, key and value begin and end: (N + 1,) int64 of queries and
    of keys.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Operands that are not (total, H, D), or lengths that do not fit them or each other.
    """
    for name, x in zip(("query", "key", "value"), operands, strict=True):
        if x.array.ndim != 3:
            raise ArgumentError(
                f"{name}: got shape {x.array.shape}; allowed: three dimensions, (total, H, D)"
            )
    cu_q = _cumulative("cu_seqlens_q", cu_seqlens_q, operands[0].array.shape[0])
    cu_k = _cumulative("cu_seqlens_k", cu_seqlens_k, operands[1].array.shape[0])
    if len(cu_q) != len(cu_k):
        raise ArgumentError(
            f"cu_seqlens_k: got {len(cu_k)} entries; allowed: as many as cu_seqlens_q, {len(cu_q)}"
        )
    return cu_q, cu_k


def sequences(
    whole: Problem, cu_q: np.ndarray, cu_k: np.ndarray, alignment: str
) -> Iterator[tuple[Problem, list[int]]]:
    """The packed problem, (1, H, total, D), as few batches of sequences of like lengths, filled up
    to the longest.

    Yields the problem of a batch, and the numbers of its sequences.
    """
    q_lengths = np.diff(cu_q)
    k_lengths = np.diff(cu_k)
    _, h, _, _, _, d, dv = whole.shape
    queue = [n for n in np.lexsort((k_lengths, q_lengths))[::-1].tolist() if q_lengths[n]]
    allowed_padding = CALL_COST / (h * (d + dv))
    first = 0
    while first < len(queue):
        longest = q_lengths[queue[first]]
        stop = first
        waste = 0
        most = 0
        cells = 0
        while stop < len(queue):  # one more sequence, if that is cheaper than one more call
            n = queue[stop]
            most = max(most, k_lengths[n])
            cells = cells + q_lengths[n] * k_lengths[n]
            padding = (stop + 1 - first) * longest * most - cells
            if padding - waste > allowed_padding:
                break
            stop = stop + 1
            waste = padding
        chosen = np.sort(queue[first:stop])
        yield (
            _batch(
                whole, cu_q[chosen], q_lengths[chosen], cu_k[chosen], k_lengths[chosen], alignment
            ),
            chosen.tolist(),
        )
        first = stop


def are_neighbours(at: np.ndarray, lengths: np.ndarray) -> bool:
    """Whether sequences that begin at rows `at` are of one length, one behind the other."""
    together = np.array_equal(at[1:], at[:-1] + lengths[:-1])
    return len(at) == 1 or (together and lengths.min() == lengths.max())


def gathered(x: np.ndarray, at: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(N, H, longest, D): rows of a packed x (1, H, total, D) from `at` (N,) on, `lengths` of each.

    Filled up with any rows; a view where the sequences `are_neighbours`.
    """
    rows = x[0].transpose(1, 0, 2)
    n = len(at)
    longest = int(lengths.max())
    if are_neighbours(at, lengths):
        return (
            rows[at[0] : at[0] + n * longest]
            .reshape(n, longest, *rows.shape[1:])
            .transpose(0, 2, 1, 3)
        )
    return rows[np.minimum(at[:, None] + np.arange(longest), len(rows) - 1)].transpose(0, 2, 1, 3)


def scattered(to: np.ndarray, part: np.ndarray, cu: np.ndarray, chosen: list[int]) -> None:
    """Write rows of a batch, part (N, H, longest, ...), to packed ones, to (total, H, ...)."""
    for i, n in enumerate(chosen):
        to[cu[n] : cu[n + 1]] = part[i, :, : cu[n + 1] - cu[n]].swapaxes(0, 1)


def _batch(
    whole: Problem, at_q: np.ndarray, l: np.ndarray, at_k: np.ndarray, s: np.ndarray, alignment: str
) -> Problem:
    """Sequences that begin at packed rows `at_q` and keys `at_k`, `l` and `s` long, as a batch.

    Filled up with any rows.
    """
    slopes = whole.alibi_slopes
    return whole.changed(
        query=gathered(whole.query, at_q, l),
        key=gathered(whole.key, at_k, s),
        value=gathered(whole.value, at_k, s),
        diagonal=(s - l if alignment == "lower_right" else np.zeros(len(l), np.int64)),
        key_lengths=s,
        alibi_slopes=None
        if slopes is None
        else writable(np.broadcast_to(slopes, (len(l), slopes.shape[1]))),
    )
