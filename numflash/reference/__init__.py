"""What is right: the float64 oracle, and the integer models that define INT8 attention and decode.

NumPy only; nothing here is fast, and no kernel imports it. May import `validation`, `numerics`,
`interop`, `tiling`.
"""

from __future__ import annotations

import numpy as np

from ..validation import Problem
from .float64 import gradients, oracle, visible
from .int8 import (
    HIDDEN,
    Step,
    cap_shift,
    combined_scale,
    integer_model,
    integer_steps,
    log_sum_exp,
    row_shift,
    transform,
    value_units,
)
from .int8_decode import decode_change, decode_query, integer_decode, rotated_decode

__all__ = [
    "HIDDEN",
    "Step",
    "cap_shift",
    "combined_scale",
    "decode_change",
    "decode_query",
    "gradients",
    "integer_decode",
    "integer_model",
    "integer_steps",
    "log_sum_exp",
    "oracle",
    "rotated_decode",
    "row_shift",
    "solve",
    "transform",
    "value_units",
    "visible",
]


def solve(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """What impl="reference" computes: the integer model for precision "int8", else the oracle."""
    return integer_model(problem) if problem.precision == "int8" else oracle(problem)
