"""The study kernels on a card, each plain and with its keys and values kept in L2."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .. import study

LENGTH = 4096
D = 64


def rows() -> Iterator[dict[str, Any]]:
    """A row per rung (the last of mma.sync is the notes' kernel), checked before it is timed.

    `seconds_persisting`: with an L2 window over keys and values.
    """
    names = {rung.number: rung.name for rung in study.LADDER}
    for number, (plain, kept) in study.clock(LENGTH, D).items():
        yield {
            "kernel": f"rung {number}: {names[number]}",
            "L": LENGTH,
            "D": D,
            "causal": False,
            "seconds": plain,
            "seconds_persisting": kept,
            "tflops": 4 * LENGTH * LENGTH * D / plain / 1e12,
        }
