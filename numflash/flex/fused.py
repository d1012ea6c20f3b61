"""Score and mask functions in the form in which a `Problem` carries them to the kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..cpu.semantics import NO_TILES, ScoreTiles
from .evaluate import evaluate
from .machine import Tile, tile
from .prepared import EMPTY, FULL, Prepared

if TYPE_CHECKING:
    from .device import OnDevice
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
        self.prepared, self.block = prepared, block
        self.batch = None if batch is None else np.ascontiguousarray(batch)
        self.states = NO_TILES.states if states is None else np.ascontiguousarray(states)
        self.spans = NO_TILES.spans if states is None else spans(states, block[1])
        self._known: dict[tuple[Shape, bool], tuple[ScoreTiles, Pair]] = {}

    @property
    def changes_scores(self) -> bool:
        """Whether there is a score function."""
        return self.prepared.score is not None

    def tiles(self, shape: Shape, double: bool = False) -> ScoreTiles:
        """The tile functions of a problem of shape (B, H, L, S) as kernels take them.

        The object must be kept as long as they are used.
        """
        known = self._known.get((shape, double))
        if known is None:
            known = self._make_tiles(shape, double)
            if len(self._known) >= KEPT:
                self._known.clear()
            self._known[shape, double] = known
        return known[0]

    def _reach(self, shape: Shape) -> Shape:
        """The shape that the functions see: their batch entries may be others than the problem's."""
        if self.batch is None:
            return shape
        return (int(self.batch.max(initial=0)) + 1, *shape[1:])

    def _make_tiles(self, shape: Shape, double: bool) -> tuple[ScoreTiles, Pair]:
        shape = self._reach(shape)
        self.prepared.check(shape)
        pair = self._pair(shape, double)
        places = {**_place("unmasked", pair.unmasked), **_place("masked", pair.masked)}
        return self._with_blocks(places), pair

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
        q = np.arange(rows.start, rows.stop)[:, None]
        entry = b if self.batch is None else self.batch[b]
        return self.evaluate_at(scores, entry, h, q, np.arange(scores.shape[1]))

    def evaluate_at(
        self, scores: np.ndarray, b: int, h: int, q: Any, k: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The same for queries q and keys k, which broadcast to the scores."""
        prepared = self.prepared
        arguments = {"score": scores, "b": b, "h": h, "q": q, "k": k}
        slope = None
        if prepared.score is not None:
            changed = (prepared.score, prepared.slope)
            scores, slope = evaluate(prepared.graph, changed, arguments)
        if prepared.mask is not None:
            (seen,) = evaluate(prepared.graph, (prepared.mask,), arguments)
            scores = np.where(seen, scores, -np.inf)
        return scores, slope

    def _pair(self, shape: Shape, double: bool) -> Pair:
        key = ("forward", shape, double)
        found = self.prepared.plans.get(key)
        if found is not None:
            return found
        score, mask = self.prepared.score, self.prepared.mask
        unmasked = None if score is None else self._tile(score, None, None, shape, double)
        masked = unmasked if mask is None else self._tile(score, None, mask, shape, double)
        return keep(self.prepared, key, Pair(unmasked, masked))

    def slopes(self, shape: Shape, double: bool = False) -> ScoreTiles:
        """The gradient tile function as `masked`; `unmasked` is not 0 where scores change."""
        shape = self._reach(shape)
        key = ("gradient", shape, double)
        found = self.prepared.plans.get(key)
        if found is None:
            self.prepared.check(shape)
            slope = self.prepared.slope
            made = self._tile(self.prepared.score, slope, self.prepared.mask, shape, double, True)
            found = keep(self.prepared, key, made)
        changes = int(self.prepared.score is not None)
        return self._with_blocks({"unmasked": changes, **_place("masked", found)})

    def cached(self, shape: Shape, kind: str) -> Tile:
        """The tile function of decoding: see `InCache.tile`."""
        prepared, key = self.prepared, (kind, shape)
        found = prepared.plans.get(key)
        if found is None:
            made = prepared.program(prepared.score, None, prepared.mask, shape)
            found = keep(prepared, key, tile(made, cached=kind))
        return found

    def on_device(self, shape: Shape) -> OnDevice:
        """The functions of a problem of shape (B, H, L, S) as CUDA kernels take them."""
        from .device import DeviceProgram, on_device

        batches = np.arange(shape[0]) if self.batch is None else self.batch
        reach = self._reach(shape)
        prepared = self.prepared
        prepared.check(reach)
        program = DeviceProgram(prepared.graph, prepared.score, None, prepared.mask, reach)
        return on_device(program, batches)

    def _tile(
        self,
        score: Any,
        slope: Any,
        mask: Any,
        shape: Shape,
        double: bool = False,
        gradient: bool = False,
    ) -> Tile:
        return tile(self.prepared.program(score, slope, mask, shape), double, gradient)


def spans(states: np.ndarray, keys: int) -> np.ndarray:
    """(..., blocks of L, 5) int64.

    The first key of blocks that are not empty, and where they end; the same of the longest run of
    full blocks, 0 and 0 if there is none; whether there are empty blocks between.
    """
    seen = states != EMPTY
    count = seen.shape[-1]
    some = seen.any(-1)
    first = np.where(some, seen.argmax(-1), 0)
    end = np.where(some, count - seen[..., ::-1].argmax(-1), 0)
    number = np.arange(count, dtype=np.int32)
    before = np.maximum.accumulate(np.where(states == FULL, np.int32(-1), number), -1)
    run = number - before  # full blocks up to this one
    full_end = np.where(run.max(-1, initial=0) > 0, run.argmax(-1) + 1, 0)
    full_first = full_end - run.max(-1, initial=0)
    holes = seen.sum(-1) < end - first
    ends = keys * np.stack([first, end, full_first, full_end], -1).astype(np.int64)
    return np.concatenate([ends, holes[..., None]], -1)


def _place(name: str, found: Tile | None) -> dict[str, int]:
    if found is None:
        return {}
    return {name: found.address, f"{name}_frame": found.data}


def fused_of(prepared: Prepared) -> Fused:
    """The functions without known blocks, made once."""
    return prepared.plans.get("fused") or keep(prepared, "fused", Fused(prepared))


def keep(prepared: Prepared, key: Any, made: Any) -> Any:
    """Remember what was made of the functions, and return it."""
    if len(prepared.plans) >= KEPT:
        prepared.plans.clear()
    prepared.plans[key] = made
    return made


class InCache:
    """The functions of decode calls over caches of up to `reach` tokens: see `in_cache`."""

    def __init__(self, prepared: Prepared, reach: int) -> None:
        self.fused = fused_of(prepared)
        self.reach = reach

    def tile(self, batch: int, heads: int, kind: str) -> Tile:
        """The tile function and its frame, which whoever uses their addresses keeps.

        kind : of the scores, "floats" or "integers"
        """
        return self.fused.cached((batch, heads, self.reach, self.reach), kind)

    def change(self, scores: np.ndarray, b: int, h: int, q: int, k: np.ndarray) -> np.ndarray:
        """Scores (S,) of one row at position q and of tokens k (S,), in float64."""
        return self.fused.evaluate_at(scores, b, h, q, k)[0]


def in_cache(prepared: Prepared, longest: int) -> InCache:
    """The functions over a cache whose longest sequence has so many tokens.

    Code is made for the next power of two, and found again until then.
    """
    reach = 1 << max(0, longest - 1).bit_length()
    return prepared.plans.get(reach) or keep(prepared, reach, InCache(prepared, reach))
