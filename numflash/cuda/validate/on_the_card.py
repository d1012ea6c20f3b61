"""Attention of arrays that are on the card: what `arrays.attention` launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ...validation import Problem
from .. import launch_split
from ..arrays import forward
from ..device.operands import Launch
from ..device.resident import Card

Results = tuple[np.ndarray, np.ndarray]
Empty = Callable[[tuple[int, ...], Any], np.ndarray]


class Planned(NamedTuple):
    """A card that is not there: what would be launched there is known by this."""

    arch: str
    multiprocessors: int = 132


def launches(problem: Problem, card: Any, empty: Empty = np.zeros) -> tuple[list[Launch], Results]:
    """The launches and their results, out and LSE; memory comes from `empty(shape, dtype)`.

    problem : of float arrays, for precision "int8" float16 or float32;  card : `arrays.forward`
    """
    nb, nh, _, length, _, _, dv = problem.shape
    own = problem.query.dtype
    results = empty((nb, nh, length, dv), own), empty((nb, nh, length), np.float32)
    return forward.launches(problem, own.name, card, results, empty), results


def _there(card: Card, x: np.ndarray) -> np.ndarray:
    """A copy on the card; axes that are broadcast stay so."""
    part = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)]
    memory = card.zeros(part.shape, part.dtype)
    card.upload(memory, part)
    return np.broadcast_to(memory, x.shape)


def prepared(problem: Problem) -> tuple[Card, Callable[[], None], Results]:
    """The card with the problem's arrays, what solves it on the card's stream, and the results."""
    card = Card()
    names = ("query", "key", "value", "mask", "bias", "sinks")
    arrays = {name: getattr(problem, name) for name in names}
    there: dict[str, Any] = {k: _there(card, x) for k, x in arrays.items() if x is not None}
    card.synchronise()
    steps, results = launches(problem.changed(**there), card, card.zeros)

    def work() -> None:
        for step in steps:
            card.device.submit(step, card.stream)

    return card, work, results


def solved(problem: Problem) -> tuple[list[np.ndarray], int]:
    """Out and LSE, from the card, and in how many parts the keys were attended to."""
    card, work, results = prepared(problem)
    work()
    card.synchronise()
    parts = launch_split.parts_of(problem, card.arch, card.multiprocessors)
    return [card.download(x) for x in results], parts
