"""Functions that PyTorch's compiler leaves as they are.

Dynamo would trace what looks up plans, kernels and memory; the kernels themselves it cannot see. So
numflash's own functions run inside `torch.compile` as they do outside, behind a graph break. Those of
`numflash.torch` are operators of PyTorch's, and become a part of the graph.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def is_traced() -> bool:
    """Whether `torch.compile` follows the code that asks; never in releases that do not say it."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    check = getattr(compiler, "is_dynamo_compiling", None)
    return check is not None and check()


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """The function behind a graph break; only of use where a compiler traces."""
    found: Callable[P, R] = sys.modules["torch"].compiler.disable(function)
    return found


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """The function, behind a graph break where a compiler traces; costs 0.3 us in each call."""

    @functools.wraps(function)
    def call(*args: P.args, **options: P.kwargs) -> R:
        if is_traced():
            return untraced(function)(*args, **options)
        return function(*args, **options)

    return call
