"""Which rank holds which tokens of a sequence, and how much causal work that gives each of them.

A causal row i has i + 1 keys to visit. With consecutive shards the last of n ranks does (2n - 1) /
n times the mean, close to twice, and everybody else waits for it. Zigzag gives each rank one chunk
from the front and its mirror image from the back, so that all ranks do the same work at every step
of the ring (the layout of Llama 3's context parallelism, Grattafiori et al. 2024, section 3.3.2,
and of the zigzag variant of ring attention).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import index

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError

Range = tuple[int, int]  # tokens start <= i < stop


def _count(name: str, n: int, least: int = 0) -> int:
    """An integer that is no smaller than `least`."""
    try:
        found = index(n)
    except TypeError:
        raise ArgumentTypeError(f"{name}: got {n!r}; allowed: integers from {least} on") from None
    if found < least:
        raise ArgumentError(f"{name}: got {n}; allowed: integers from {least} on")
    return found


def _check_tokens(name: str, x: np.ndarray, axis: int, length: int) -> None:
    """Raise unless an array has so many tokens along `axis`."""
    shape = np.shape(x)
    try:
        axis = index(axis)
    except TypeError:
        raise ArgumentTypeError(f"axis: got {axis!r}; allowed: an integer") from None
    if not -len(shape) <= axis < len(shape) or shape[axis] != length:
        raise ArgumentError(
            f"{name}: got shape {shape}; allowed: {length} tokens along axis {axis}"
        )


@dataclass(frozen=True)
class Split:
    """A sequence over ranks: every token on exactly one of them.

    Attributes
    ----------
    chunks : one entry per rank, its (start, stop) ranges in the order in which the rank stores them
        Any order, any lengths; ranks may hold nothing.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        The ranges do not cover 0 to L exactly once, or are no pairs of integers.
    """

    chunks: tuple[tuple[Range, ...], ...]

    def __post_init__(self) -> None:
        try:
            pairs = tuple(tuple((index(a), index(b)) for a, b in rank) for rank in self.chunks)
        except (TypeError, ValueError):
            raise ArgumentTypeError(
                f"chunks: got {self.chunks!r}; allowed: of each rank a tuple of (start, stop) integers"
            ) from None
        kept = tuple(tuple((a, b) for a, b in rank if b != a) for rank in pairs)
        object.__setattr__(self, "chunks", kept)
        end = 0
        for start, stop in sorted(c for rank in kept for c in rank):
            if start != end or stop < start:
                raise ArgumentError(
                    f"chunks: got a chunk {start} to {stop} where {end} is next; allowed: each token exactly once"
                )
            end = stop

    @classmethod
    def of_lengths(cls, lengths: Sequence[int]) -> Split:
        """Consecutive shards of these lengths."""
        edges = [0, *accumulate(_count("lengths", n) for n in lengths)]
        return cls(tuple((edge,) for edge in pairwise(edges)))

    @classmethod
    def plain(cls, length: int, ranks: int) -> Split:
        """Consecutive shards, as equal as can be; the first ones are the longer ones."""
        length, ranks = _count("length", length), _count("ranks", ranks, 1)
        return cls.of_lengths([length // ranks + (r < length % ranks) for r in range(ranks)])

    @classmethod
    def zigzag(cls, length: int, ranks: int) -> Split:
        """2 n chunks, as equal as can be; rank r holds chunk r and chunk 2 n - 1 - r."""
        ranks = _count("ranks", ranks, 1)
        pieces = cls.plain(length, 2 * ranks).chunks
        return cls(tuple(pieces[r] + pieces[2 * ranks - 1 - r] for r in range(ranks)))

    @property
    def ranks(self) -> int:
        """Ranks of the split."""
        return len(self.chunks)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens on each rank."""
        return tuple(sum(b - a for a, b in rank) for rank in self.chunks)

    @property
    def length(self) -> int:
        """Tokens of the whole sequence."""
        return sum(self.lengths)

    def indices(self, rank: int) -> np.ndarray:
        """(tokens of the rank,) int64.

        Their places in the whole sequence, as the rank stores them.
        """
        if not 0 <= _count("rank", rank) < self.ranks:
            raise ArgumentError(f"rank: got {rank}; allowed: 0 to {self.ranks - 1}")
        return np.concatenate([np.arange(0), *(np.arange(a, b) for a, b in self.chunks[rank])])

    def permutation(self) -> np.ndarray:
        """(L,) int64: place in the whole sequence of token n of all shards, concatenated in rank
        order.
        """
        return np.concatenate([np.arange(0), *(self.indices(r) for r in range(self.ranks))])

    def shard(self, x: np.ndarray, rank: int, axis: int = -2) -> np.ndarray:
        """The rank's part of an array of the whole sequence, with tokens along `axis`."""
        _check_tokens("x", x, axis, self.length)
        return np.take(x, self.indices(rank), axis)

    def join(self, shards: Iterable[np.ndarray], axis: int = -2) -> np.ndarray:
        """The whole array from the shards of all ranks, in rank order: the inverse of `shard`."""
        shards = list(shards)
        if len(shards) != self.ranks:
            raise ArgumentError(
                f"shards: got {len(shards)}; allowed: {self.ranks}, one of each rank"
            )
        for rank, (x, length) in enumerate(zip(shards, self.lengths, strict=True)):
            _check_tokens(f"shards[{rank}]", x, axis, length)
        return np.take(np.concatenate(shards, axis), np.argsort(self.permutation()), axis)


def named_split(name: str, lengths: Sequence[int]) -> Split:
    """The split called "plain" or "zigzag", for shards of these lengths."""
    return (
        Split.of_lengths(lengths) if name == "plain" else Split.zigzag(sum(lengths), len(lengths))
    )


def causal_work(split: Split) -> np.ndarray:
    """(ranks, ranks) int64: the work of each rank and step.

    Query-key pairs that rank r computes at step t of the ring, of a causal problem of equal L and
    S.
    """
    work = np.zeros((split.ranks, split.ranks), np.int64)
    for r in range(split.ranks):
        rows = split.indices(r)
        for t in range(split.ranks):
            for a, b in split.chunks[(r - t) % split.ranks]:
                work[r, t] += np.clip(rows + 1 - a, 0, b - a).sum()
    return work


def imbalance(split: Split) -> float:
    """Causal work of the busiest rank over the mean.

    What the ring takes against perfect balance.
    """
    work = causal_work(split).sum(1)
    return float(work.max() / work.mean()) if work.any() else 1.0
