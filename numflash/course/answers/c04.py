"""Chapter 04: fixed point."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise


def to_q8(x: float) -> int:
    """x in Q8.8, saturated."""
    return int(np.clip(np.rint(x * 256), -32768, 32767))


def ratio_off(gap: float, error: float) -> float:
    """By what factor a ratio of probabilities is off when scores grow by `error`."""
    return float(np.exp(-gap * error))


def _shrink(steps: Any, row: int) -> float:
    return float(2.0 ** (int(steps[1].m[row]) - int(steps[2].m[row])))


EXERCISES = {
    "04.1": Exercise(
        "Q8.8",
        (
            "A step is 1/256, so multiply by 256 and round.",
            "int16 ends at -32768 and 32767: take the nearer end for numbers outside.",
        ),
        model=to_q8,
        cases=((1.0,), (-0.3,), (127.999,), (181.0,), (-1e6,)),
        slip=("32767", "32768"),
    ),
    "04.2": Exercise(
        "slope of a line without jumps",
        (
            "At f = 1 the line must give what the next octave gives at f = 0: twice its start.",
            "(256 + slope * 1) / 256 = 2.",
        ),
        expected=256,
    ),
    "04.3": Exercise(
        "ratio of probabilities",
        (
            "The right ratio is exp(-gap), the ratio that comes is exp(-gap * (1 + error)).",
            "By what factor: divide the one that comes by the right one.",
        ),
        model=ratio_off,
        cases=((5.0, 0.0109), (20.0, 0.0109), (3.0, 0.0)),
        slip=("(1 + error)", "(1 - error)"),
    ),
    "04.4": Exercise(
        "the shrink at the third block",
        (
            "Read m after the second block and after the third in the table.",
            "l shrinks by 2**(old m - new m), which is at most 1.",
        ),
        expected=_shrink,
    ),
    "04.5": Exercise(
        "the largest weight is smaller by at most",
        (
            "Rounding up to a whole octave moves m by less than one.",
            "One octave is a factor of ...",
        ),
        expected=2,
    ),
}
