"""One attention problem over all ranks.

It says which rank stores which tokens, which rows attend to them, and what is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .. import validation
from ..errors import ArgumentError
from ..interop.arguments import choice
from ..numerics.fixedpoint import FIRST_KEYS
from ..numerics.quantization import QuantizedTensor
from ..tiling import KEY_BLOCK
from ..validation import NO_LIMIT, Problem
from ..validation.options import IMPLS, Options
from .agreement import agree, require_same
from .splits import Range, Split, named_split

SPLITS = ("plain", "zigzag")


@dataclass(frozen=True)
class RankPlan:
    """What each rank can compute before the first message.

    Attributes
    ----------
    problem : Problem
        This rank's operands; diagonal, key_lengths and window count tokens of the whole sequences.
    queries, keys : Split
    rank : int
    """

    problem: Problem
    queries: Split
    keys: Split
    rank: int

    def itinerary(self) -> Callable[[int, int], tuple[Range, ...]]:
        """(owner, step) -> the range of keys to send of each of the owner's chunks.

        These are the keys that some rank, `step` or more places further round the ring, attends to;
        the range is empty where no rank does. The first key is the start of a key block of its
        chunk.
        """
        n = self.keys.ranks
        p = self.problem
        q = edges(self.queries)
        k = edges(self.keys)
        nothing = not len(p.diagonal)
        low, high = (0, 0) if nothing else (int(p.diagonal.min()), int(p.diagonal.max()))
        left, right = p.reach
        first = q[..., 0] + low - left
        stop = np.minimum(
            q[..., 1] + high + right,
            0 if nothing else int(p.key_lengths.max()),
        )
        # a rank without queries attends to no key
        stop = np.where(q[..., 1] > q[..., 0], stop, -NO_LIMIT)
        ring = (np.arange(n)[:, None] + np.arange(n)) % n  # (owner, step): the rank at that step
        # (owner, 1, 1, chunk)
        a = k[:, None, None, :, 0]
        b = k[:, None, None, :, 1]
        # (owner, step, query chunk, chunk)
        lo = np.maximum(first[ring][..., None], a)
        hi = np.minimum(stop[ring][..., None], b)
        lo, hi = np.where(lo < hi, lo, NO_LIMIT).min(2), np.where(lo < hi, hi, -NO_LIMIT).max(2)
        lo = np.minimum.accumulate(lo[:, ::-1], 1)[:, ::-1]
        hi = np.maximum.accumulate(hi[:, ::-1], 1)[:, ::-1]
        start = np.broadcast_to(k[:, None, :, 0], lo.shape)
        lo = np.where(lo < hi, lo - (lo - start) % KEY_BLOCK, start)
        hi = np.maximum(lo, hi)

        def ranges(owner: int, step: int) -> tuple[Range, ...]:
            chunks = len(self.keys.chunks[owner % n])
            return tuple(
                zip(
                    lo[owner % n, step, :chunks].tolist(),
                    hi[owner % n, step, :chunks].tolist(),
                    strict=True,
                )
            )

        return ranges

    def pieces(self) -> list[tuple[slice, int]]:
        """Query chunks of this rank.

        Its own rows, and the place of the first one in the whole sequence.
        """
        found = []
        at = 0
        for start, stop in self.queries.chunks[self.rank]:
            found.append((slice(at, at + stop - start), start))
            at += stop - start
        return found

    def sees(self, rows: slice, start: int, keys: Range) -> bool:
        """Whether query rows, the first at `start` of the whole sequence, attend to any of the
        keys.
        """
        p = self.problem
        n = rows.stop - rows.start
        if not len(p.diagonal):
            return False
        left, right = p.reach
        first = start + int(p.diagonal.min()) - left
        stop = min(start + n + int(p.diagonal.max()) + right, int(p.key_lengths.max()))
        return max(first, keys[0]) < min(stop, keys[1])

    def part(
        self, query: Any, rows: slice, start: int, key: Any, value: Any, keys: Range
    ) -> Problem:
        """The problem of some rows and some keys, in their own coordinates.

        `query` is the rank's operand, quantised or not. Keys from the middle of the sequence are
        none of its first ones, although they come first in this problem.
        """
        p = self.problem
        return p.changed(
            query=take(query, rows),
            key=key,
            value=value,
            diagonal=p.diagonal + (start - keys[0]),
            sinks=None,
            key_lengths=np.clip(p.key_lengths - keys[0], 0, keys[1] - keys[0]),
            return_lse=True,
            first_keys=max(FIRST_KEYS - keys[0], 0),
        )


def edges(split: Split) -> np.ndarray:
    """(ranks, chunks, 2) int64, padded with empty chunks."""
    most = max(1, *(len(c) for c in split.chunks))
    return np.array([[*c, *[(0, 0)] * (most - len(c))] for c in split.chunks], np.int64)


def take(x: Any, rows: slice) -> Any:
    """Rows of a (B, H, L, D) array or QuantizedTensor with one scale per row."""
    if not isinstance(x, QuantizedTensor):
        return x[:, :, rows]
    bad = None if x.nonfinite is None else x.nonfinite[:, :, rows]
    return replace(x, data=x.data[:, :, rows], scale=x.scale[:, :, rows], nonfinite=bad, low=None)


def make_plan(
    comm: Any,
    query: Any,
    key: Any,
    value: Any,
    asked: dict[str, Any],
    check: Callable[[], None] = lambda: None,
) -> RankPlan:
    """Check every rank's arguments, and that they fit together, before anything is exchanged but
    these descriptions.

    asked : split, split_kv, impl, and those of `Options`, not checked yet: an error belongs to
        all ranks
    check : raises for other arguments of this rank
    """
    given = dict(asked)
    split, split_kv, impl = (given.pop(name) for name in ("split", "split_kv", "impl"))
    local: list[tuple[Problem, Options]] = []

    def describe() -> tuple[dict[str, Any], int, int]:
        check()
        choice("impl", impl, IMPLS)
        for name, x in (("split", split), ("split_kv", split_kv)):
            if not isinstance(x, Split) and not (x is None and name == "split_kv"):
                choice(name, x, SPLITS)
        options = Options(**given)
        p = validation.problem(query, key, value, replace(options, key_lengths=None))
        b, h, hkv, l, s, d, dv = p.shape
        counts = options.key_lengths
        if counts is not None:
            counts = validation.lengths("key_lengths", counts, b, NO_LIMIT).tolist()
        local.append((p, options))
        slopes, sinks = (None if x is None else x.tolist() for x in (p.alibi_slopes, p.sinks))
        return (
            {
                "query's batch": b,
                "query's heads": h,
                "key's heads": hkv,
                "query's head_dim": d,
                "value's head_dim": dv,
                "query's dtype": p.query.dtype.name,
                "precision": p.precision,
                "pv": p.pv,
                "scale": p.scale,
                "is_causal": options.is_causal,
                "window": options.window,
                "alignment": options.alignment,
                "key_lengths": counts,
                "softcap": p.softcap,
                "alibi_slopes": slopes,
                "sinks": sinks,
                "return_lse": p.return_lse,
                "impl": impl,
                "split": split,
                "split_kv": split_kv,
            },
            l,
            s,
        )

    everyone = agree(comm, describe)
    require_same([arguments for arguments, _, _ in everyone])
    queries = whole_split("split", split, [l for _, l, _ in everyone])
    other, name = (split, "split") if split_kv is None else (split_kv, "split_kv")
    keys = whole_split(name, other, [s for _, _, s in everyone])
    p, options = local[0]
    b = p.shape[0]
    left, right = options.limits(queries.length + keys.length)
    counts = validation.lengths("key_lengths", options.key_lengths, b, keys.length)
    diagonal = np.zeros(b, np.int64)
    if options.alignment == "lower_right":
        diagonal = counts - queries.length
    return RankPlan(
        p.changed(left=left, right=right, diagonal=diagonal, key_lengths=counts),
        queries,
        keys,
        comm.rank,
    )


def whole_split(name: str, split: str | Split, lengths: list[int]) -> Split:
    """The split of shards of these lengths, checked against them."""
    found = split if isinstance(split, Split) else named_split(split, lengths)
    if found.ranks != len(lengths):
        raise ArgumentError(
            f"{name}: got a split over {found.ranks} ranks; allowed: over {len(lengths)}, the communicator's"
        )
    for rank, (mine, wanted) in enumerate(zip(lengths, found.lengths, strict=True)):
        if mine != wanted:
            kind = f"the {split} split of {sum(lengths)}" if isinstance(split, str) else "the split"
            raise ArgumentError(
                f"rank {rank}: {name}: got {mine} tokens; allowed: {wanted}, from {kind}"
            )
    return found
