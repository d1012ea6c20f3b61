"""Score functions that are a soft cap and nothing else: the kernels have one of their own.

INT8's runs beside the products, where a function is called on scores that were written first.
"""

from __future__ import annotations

from ..interop.arguments import SMALLEST_FACTOR
from ..validation.operands import LARGEST_INT8_CAP
from .graph import Node

ROUNDING = 2.0**-51  # of the cap times its reciprocal


def soft_cap(score: Node) -> float:
    """The c of c * tanh(score / c), however its factors are written; 0 of any other graph.

    Only a c that is allowed as the option of INT8.
    """
    cap, bent = _factored(score)
    if bent.op != "tanh":
        return 0.0
    inner, bare = _factored(bent.args[0])
    same = bare.op == "score" and abs(cap * inner - 1) <= ROUNDING
    return cap if same and SMALLEST_FACTOR <= cap <= LARGEST_INT8_CAP else 0.0


def _factored(x: Node) -> tuple[float, Node]:
    """A node as the product of a number and another node."""
    factor = 1.0
    while x.op in ("mul", "div"):
        left, right = x.args
        if right.op == "const":
            factor = factor * right.data if x.op == "mul" else _quotient(factor, right.data)
            x = left
        elif left.op == "const" and x.op == "mul":
            factor, x = factor * left.data, right
        else:
            break
    return factor, x


def _quotient(x: float, y: float) -> float:
    return x / y if y else float("nan")
