"""Chapter 11: backward."""

from __future__ import annotations

import numpy as np

from ..exercises import Exercise


def softmax_backward(p: np.ndarray, dp: np.ndarray) -> np.ndarray:
    """The gradient of the scores, by the Jacobian of softmax."""
    return (np.diag(p) - np.outer(p, p)) @ dp


_row = np.array([0.5, 0.25, 0.25])

EXERCISES = {
    "11.1": Exercise(
        "gradient of the scores",
        (
            "Raising every score by the same number changes nothing, so the result sums to 0.",
            "dS = P * (dP - delta). delta is the mean of dp, weighted with p.",
        ),
        model=softmax_backward,
        cases=((_row, np.array([1.0, 2.0, -3.0])), (_row, np.ones(3))),
        slip=("(p * dp).sum()", "dp.mean()"),
    ),
    "11.2": Exercise(
        "products",
        (
            "The gradients take three products (dQ, dK, dV), and two must be computed again or new: "
            "S and dP. Which of the five does each pass need?",
            "The pass over keys needs S, dP, dV and dK; the pass over queries S, dP and dQ.",
        ),
        expected=(7, 5),
    ),
}
