"""Chapter 21: many machines."""

from __future__ import annotations

import numpy as np

from ..exercises import Exercise


def merge(out_a: np.ndarray, lse_a: np.ndarray, out_b: np.ndarray, lse_b: np.ndarray) -> np.ndarray:
    """Two divided outputs, weighted by e**lse."""
    a, b = (np.exp(x - np.maximum(lse_a, lse_b))[:, None] for x in (lse_a, lse_b))
    return (a * out_a + b * out_b) / (a + b)


def _faster() -> float:
    from ...mpi import Split, causal_work

    plain, zigzag = (
        np.asarray(causal_work(split)).max(0).sum()
        for split in (Split.plain(512, 8), Split.zigzag(512, 8))
    )
    return float(plain / zigzag)


_rng = np.random.default_rng(2)

EXERCISES = {
    "21.1": Exercise(
        "the merged output",
        (
            "Part a holds e**lse_a of the total weight e**lse_a + e**lse_b.",
            "The outputs are (rows, D), the lse (rows,): add an axis with [:, None].",
            "An lse can be 1000, and e**1000 is no float: subtract the larger lse first.",
        ),
        model=merge,
        cases=tuple(
            (
                _rng.standard_normal((5, 3)),
                size + _rng.standard_normal(5),
                _rng.standard_normal((5, 3)),
                size + _rng.standard_normal(5),
            )
            for size in (0, 1000)
        ),
        within=1e-4,
        slip=("lse_b - lse_a", "lse_a - lse_b"),
    ),
    "21.2": Exercise(
        "zigzag is faster by",
        (
            "Take the largest number of each column (step) of both tables, table.max(0), and add "
            "them up.",
            "Divide plain's sum by zigzag's.",
        ),
        expected=_faster,
        within=0.01,
    ),
}
