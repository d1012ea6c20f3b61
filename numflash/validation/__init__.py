"""Arguments of the public functions, checked and described by one frozen `Problem`.

`Options` is what a call asks for, `Problem` that and its arrays. May import `numerics`, `interop`,
`tiling`, `errors`; computes nothing.
"""

from .description import NO_LIMIT, Problem
from .int8 import quantized, quantized_problem
from .operands import (
    LARGEST_LSE,
    describe,
    gradient_operands,
    import_operands,
    problem,
    problem_of,
    tensor,
)
from .option_arrays import described, lengths
from .packed import are_neighbours, cuts_of, gathered, scattered, sequences

__all__ = [
    "LARGEST_LSE",
    "NO_LIMIT",
    "Problem",
    "are_neighbours",
    "cuts_of",
    "describe",
    "described",
    "gathered",
    "gradient_operands",
    "import_operands",
    "lengths",
    "problem",
    "problem_of",
    "quantized",
    "quantized_problem",
    "scattered",
    "sequences",
    "tensor",
]
