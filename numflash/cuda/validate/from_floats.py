"""INT8 attention of float32 arrays that are on the card: what `arrays.attention` launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ...validation import Problem
from ..arrays import quantized
from ..device.operands import Launch
from ..device.resident import Card


def launches(
    problem: Problem, arch: str, empty: Callable[[tuple[int, ...], Any], np.ndarray] = np.empty
) -> tuple[list[Launch], np.ndarray]:
    """The launches and their output; memory comes from `empty(shape, dtype)`."""
    nb, nh, _, length, _, _, dv = problem.shape
    out = empty((nb, nh, length, dv), np.float32)
    lse = empty((nb, nh, length), np.float32)
    scratch = empty((quantized.scratch_bytes(problem, arch),), np.uint8)
    return quantized.plan(problem, arch, "float32", (out, lse), scratch), out


def on_the_card(problem: Problem) -> tuple[Card, Callable[[], None], np.ndarray]:
    """The card with the problem's arrays, what solves it on the card's stream, and the output."""
    card = Card()
    there: dict[str, Any] = {}
    for name in ("query", "key", "value"):
        x = getattr(problem, name)
        there[name] = card.zeros(x.shape, x.dtype)
        card.upload(there[name], x)
    card.synchronise()
    steps, out = launches(replace(problem, **there), card.arch, card.zeros)

    def work() -> None:
        for step in steps:
            card.device.submit(step, card.stream)

    return card, work, out


def solved(problem: Problem) -> np.ndarray:
    """The output, from the card."""
    card, work, out = on_the_card(problem)
    work()
    card.synchronise()
    return card.download(out)
