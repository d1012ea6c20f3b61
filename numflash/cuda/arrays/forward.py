"""What attention of arrays on the card launches: for INT8, for few rows over many keys, for the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...validation import Problem
from .. import launch, launch_split
from ..device.operands import Launch
from . import quantized


def launches(
    problem: Problem,
    dtype: str,
    card: Any,
    results: tuple[np.ndarray, np.ndarray],
    empty: Callable[[tuple[int, ...], str], np.ndarray],
) -> list[Launch]:
    """The launches, in order.

    Parameters
    ----------
    problem : of arrays on the card
    dtype : their own, which the output has too
    card : its `arch` and its number of `multiprocessors`
    results : out (B, H, L, Dv) of any strides whose rows are contiguous, and lse (B, H, L)
    empty : makes scratch memory on the card, of a shape and dtype
    """
    if problem.precision == "int8":
        scratch = empty((quantized.scratch_bytes(problem, card.arch),), "uint8")
        return quantized.plan(problem, card.arch, dtype, results, scratch)
    parts = launch_split.parts_of(problem, card.arch, card.multiprocessors)
    if parts > 1:
        return launch_split.forward(problem, card.arch, parts, results, empty)
    return [launch.plan(problem, card.arch, results)]
