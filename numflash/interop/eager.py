"""Functions that PyTorch's compiler leaves as they are."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which inside `torch.compile` runs as it does outside, behind a graph break.

    Dynamo would trace what looks up plans, kernels and memory; the kernels it cannot see anyway. The
    functions of `numflash.torch` are operators of PyTorch's, and become a part of the graph.
    """

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        torch = sys.modules.get("torch")
        if torch is None or not torch.compiler.is_compiling():
            return function(*args, **options)
        return torch.compiler.disable(function)(*args, **options)

    return call
