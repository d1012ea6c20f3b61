"""Chapter 03: INT8."""

from __future__ import annotations

import numpy as np

from ..exercises import Exercise


def quantise(x: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Symmetric int8 values of x, and their scale."""
    scale = np.float32(np.abs(x).max() / 127)
    return np.rint(x / scale).astype(np.int8), scale


def shift_of_scores(q: np.ndarray, m: np.ndarray) -> np.ndarray:
    """What the scores of each row of q lose when m is taken from every key."""
    return (q @ m) / np.sqrt(q.shape[1])


_rng = np.random.default_rng(1)

EXERCISES = {
    "03.1": Exercise(
        "quantise",
        (
            "Return a tuple of two: the int8 array, then the scale.",
            "Divide by the scale, round with np.rint, then convert with astype(np.int8). "
            "astype alone cuts off instead of rounding.",
        ),
        model=quantise,
        cases=(
            (_rng.standard_normal(32).astype(np.float32),),
            (np.array([1, -2, 0.1], np.float32),),
        ),
        slip=("np.round(x / scale)", "(x / scale)"),
    ),
    "03.2": Exercise(
        "the scale of V",
        (
            "Which index is summed over: j (the row of V) or c (its channel)? The other one is free.",
        ),
        expected="channel",
        allowed=("row", "channel"),
    ),
    "03.3": Exercise(
        "shift of the scores of each row",
        (
            "Write the score of a key k - m: q . (k - m) * scale = q . k * scale - ...",
            "q has shape (rows, D), m has shape (D,): one number per row comes from q @ m.",
        ),
        model=shift_of_scores,
        cases=(
            (
                _rng.standard_normal((4, 32)).astype(np.float32),
                _rng.standard_normal(32).astype(np.float32),
            ),
        ),
        within=1e-4,
        slip=("** -0.5", ""),
    ),
}
