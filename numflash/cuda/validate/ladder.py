"""The study kernels on a card, each plain and with its keys and values kept in L2."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

from .. import study
from ..device import Device
from .steps import Row, Step, keys_of

ROWS = 16896  # 132 tiles of 128: a block for each multiprocessor of an H100, or two of 64 rows
KEYS = 4096
D = 64


@functools.cache
def _problem() -> tuple[np.ndarray, ...]:
    """The problem of every rung: its float64 result takes a second."""
    return study.problem(ROWS, D, 0, KEYS)


def timings(arch: str) -> Iterator[Step]:
    """A row per rung (the last of mma.sync is the documents' kernel), checked before it is timed.

    `seconds_persisting`: with an L2 window over keys and values.
    """
    for rung in study.LADDER:
        if rung.runs_on(arch):
            yield _timing(rung, arch)


def _timing(rung: study.Rung, arch: str) -> Step:
    name = f"rung {rung.number}: {rung.name}"

    def run(device: Device) -> Iterator[Row]:
        plain, kept = study.clock_rung(rung, _problem())
        row: Row = {"kernel": name, "L": ROWS, "S": KEYS, "D": D, "causal": False}
        row |= {"seconds": plain, "tflops": 4 * ROWS * KEYS * D / plain / 1e12}
        yield row | ({"seconds_persisting": kept} if kept is not None else {})

    # the kernels do not depend on the numbers of rows and keys
    q, k, v, _ = study.problem(256, D, 0)
    return Step(name, lambda: keys_of(study.launch(rung, q, k, v, arch)), run)
