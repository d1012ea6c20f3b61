"""Score and mask functions in the form in which a `Problem` carries them to the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..cpu.semantics import NO_TILES, ScoreTiles
from .evaluate import evaluate
from .machine import Tile, tile
from .prepared import EMPTY, Prepared
from .program import Program

KEPT = 64  # problem shapes whose tile functions are remembered
Shape = tuple[int, int, int, int]


class Pair(NamedTuple):
    """Tile functions for blocks that all rows see, and for others.

    None where nothing is changed.
    """

    unmasked: Tile | None
    masked: Tile | None


class Fused:
    """What the kernels need of a problem's functions.

    Parameters
    ----------
    prepared : the traced functions
    states : (B or 1, H or 1, blocks of L, blocks of S) uint8 or None
    block : rows and keys of a block
    batch : (B,) int64 or None
        What the functions see as `b`, and how far it goes, where that is not the problem's own.
    """

    def __init__(
        self,
        prepared: Prepared,
        states: np.ndarray | None = None,
        block: tuple[int, int] = (128, 128),
        batch: np.ndarray | None = None,
    ) -> None:
        self.prepared, self.block, self.batch = prepared, block, batch
        self.states = NO_TILES.states if states is None else states
        self.spans = NO_TILES.spans if states is None else spans(states, block[1])

    def tiles(self, shape: Shape, double: bool = False) -> ScoreTiles:
        """The tile functions of a problem of shape (B, H, L, S) as kernels take them.

        The object must be kept as long as they are used.
        """
        if self.batch is not None:
            shape = (int(self.batch.max(initial=0)) + 1, *shape[1:])
        pair = self._pair(shape, double)
        return self._with_blocks(
            {**_place("unmasked", pair.unmasked), **_place("masked", pair.masked)}
        )

    def _with_blocks(self, places: dict[str, int]) -> ScoreTiles:
        return NO_TILES._replace(
            **places,
            states=self.states,
            spans=self.spans,
            rows=self.block[0],
            keys=self.block[1],
            batch=NO_TILES.batch if self.batch is None else self.batch,
        )

    def evaluate(
        self, scores: np.ndarray, b: int, h: int, rows: slice
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The changed scores of some rows in float64, -inf where hidden, and their slopes, by
        NumPy.
        """
        prepared = self.prepared
        arguments = {"score": scores, "b": b, "h": h}
        if self.batch is not None:
            arguments["b"] = self.batch[b]
        arguments["q"] = np.arange(rows.start, rows.stop)[:, None]
        arguments["k"] = np.arange(scores.shape[1])
        slope = None
        if prepared.score is not None:
            changed = (prepared.score, prepared.slope)
            scores, slope = evaluate(prepared.graph, changed, arguments)
        if prepared.mask is not None:
            (seen,) = evaluate(prepared.graph, (prepared.mask,), arguments)
            scores = np.where(seen, scores, -np.inf)
        return scores, slope

    def _pair(self, shape: Shape, double: bool) -> Pair:
        plans = self.prepared.plans
        key = ("forward", shape, double)
        if key not in plans:
            self.prepared.check(shape)
            score = self.prepared.score
            mask = self.prepared.mask
            unmasked = None if score is None else self._tile(score, None, None, shape, double)
            masked = unmasked if mask is None else self._tile(score, None, mask, shape, double)
            self._keep(key, Pair(unmasked, masked))
        return plans[key]

    def slopes(self, shape: Shape, double: bool = False) -> ScoreTiles:
        """The gradient tile function as `masked`; `unmasked` is not 0 where scores change."""
        if self.batch is not None:
            shape = (int(self.batch.max(initial=0)) + 1, *shape[1:])
        plans = self.prepared.plans
        key = ("gradient", shape, double)
        if key not in plans:
            self.prepared.check(shape)
            slope = self.prepared.slope
            made = self._tile(self.prepared.score, slope, self.prepared.mask, shape, double, True)
            self._keep(key, made)
        changes = int(self.prepared.score is not None)
        return self._with_blocks({"unmasked": changes, **_place("masked", plans[key])})

    def _tile(self, score: Any, slope: Any, mask: Any, shape: Shape, *form: bool) -> Tile:
        return tile(Program(self.prepared.graph, score, slope, mask, shape), *form)

    def _keep(self, key: Any, value: Any) -> None:
        plans = self.prepared.plans
        if len(plans) >= KEPT:
            plans.clear()
        plans[key] = value


def spans(states: np.ndarray, keys: int) -> np.ndarray:
    """(..., blocks of L, 2) int64.

    The first key of blocks that are not empty, and where they end.
    """
    seen = states != EMPTY
    count = seen.shape[-1]
    some = seen.any(-1)
    first = np.where(some, seen.argmax(-1), 0)
    end = np.where(some, count - seen[..., ::-1].argmax(-1), 0)
    return np.stack([first * keys, end * keys], -1).astype(np.int64)


def _place(name: str, found: Tile | None) -> dict[str, int]:
    if found is None:
        return {}
    return {name: found.address, f"{name}_frame": found.data}
