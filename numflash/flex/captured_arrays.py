"""The gradients of arrays that a score function has captured, from those of its results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..interop.arrays import widen
from ..validation import Problem
from .evaluate import evaluate, inside
from .gradient import derivative
from .graph import INDICES, Graph, Node, reachable
from .prepared import Prepared, prepare

SCORES = 1 << 20  # scores that are evaluated at a time


class Captured(NamedTuple):
    """Arrays that a traced function has captured, by their numbers in its graph."""

    prepared: Prepared
    numbers: list[int]

    def owners(self) -> list[Any]:
        """The arrays as the caller knows them."""
        return [self.prepared.graph.owners[n] for n in self.numbers]

    def gradients(self, problem: Problem, scores: np.ndarray) -> list[np.ndarray]:
        """float32, shaped like the arrays.

        Each value of an array that a score depends on changes that score by a factor, the derivative
        of the function by this value, which is a graph as well. It is evaluated for all scores, and
        times the gradients of these added up where the value came from.

        scores : (B, H, L, S) float32, the gradients of the scores after softcap; 0 where they are not
            seen, which takes no part
        """
        graph, root = self.prepared.graph, self.prepared.score
        found = {n: np.zeros(graph.arrays[n].shape) for n in self.numbers}
        assert root is not None
        if problem.softcap:
            cap = graph.constant(float(problem.softcap))
            root = graph.make("mul", cap, graph.make("tanh", graph.make("div", root, cap)))
        for load in reachable([root]):
            if load.op == "load" and load.data in found:
                slope = derivative(graph, root, load)
                _add(graph, load, slope, problem, scores, found[load.data].reshape(-1))
        return [found[n].astype(np.float32) for n in self.numbers]


def captured_by(score_mod: Any, arrays: Sequence[Any]) -> Captured:
    """These arrays, all of which the function must have captured."""
    prepared = prepare(score_mod or (lambda score, b, h, q, k: score), None)
    numbers = []
    for x in arrays:
        number = next((n for n, y in enumerate(prepared.graph.owners) if y is x), None)
        if number is None:
            raise ArgumentError(
                f"wrt: got {type(x).__name__} of shape {getattr(x, 'shape', ())}, which score_mod does not index by b, h, "
                "q_idx or kv_idx; allowed: names, and the array objects that it does"
            )
        dtype = prepared.graph.arrays[number].dtype
        if dtype.kind != "f" and dtype.name != "bfloat16":
            raise ArgumentError(f"wrt: got a captured array of dtype {dtype}; allowed: floats")
        numbers.append(number)
    return Captured(prepared, numbers)


def _add(
    graph: Graph, load: Node, slope: Node, problem: Problem, scores: np.ndarray, total: np.ndarray
) -> None:
    """Add what all scores give to the elements that `load` reads; total : the array's, flat."""
    uses = load.uses | slope.uses
    if "score" not in uses:  # scores that have the element and the factor in common
        same = tuple(n for n, name in enumerate(INDICES) if name not in uses)
        scores = scores.sum(axis=same, keepdims=True, dtype=np.float64) if same else scores
    nb, nh, length, s = scores.shape
    if not scores.size:
        return
    step = max(1, SCORES // s)
    for b, h in np.ndindex(nb, nh):
        for first in range(0, length, step):
            rows = np.arange(first, min(first + step, length))
            arguments: dict[str, Any] = {"b": b, "h": h, "q": rows[:, None], "k": np.arange(s)}
            if "score" in uses:
                arguments["score"] = _scores(problem, b, h, rows)
            *index, factor = evaluate(graph, (*load.args, slope), arguments)
            weights = scores[b, h, rows]
            with np.errstate(all="ignore"):
                weights = np.where(weights == 0, 0, weights * factor)
            place = np.zeros((), np.int64)
            shape = graph.arrays[load.data].shape
            for at, size in zip(inside(index, shape), shape, strict=True):
                place = place * size + at
            low = int(place.min())
            places = np.broadcast_to(place - low, weights.shape)
            sums = np.bincount(places.reshape(-1), weights.reshape(-1))
            total[low : low + sums.size] += sums


def _scores(problem: Problem, b: int, h: int, rows: np.ndarray) -> np.ndarray:
    """What the function was given for some queries and all keys of a head."""
    heads, kv_heads = problem.shape[1:3]
    query, key = (
        np.asarray(widen(x), np.float32)
        for x in (problem.query[b, h, rows], problem.key[b, h * kv_heads // heads])
    )
    with np.errstate(all="ignore"):
        found: np.ndarray = query @ key.T * np.float32(problem.scale)
    return found
