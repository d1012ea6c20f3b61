"""Other shapes of Hopper's gradient kernel beside the shipped ones: compared, then timed."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from ..launch_backward import Backward, float_backward
from ..launch_backward_hopper import shape_of
from . import attention
from .steps import Step

CHECKED = (1, 2, 2, 300, 300)
TIMED = (2, 16, 16, 8192, 8192)


class Variant(NamedTuple):
    """Columns per tile, stages, and whether own rows are in registers, of a pass for head size d; the
    other pass is as it ships.
    """

    d: int
    gradients: str
    columns: int
    stages: int
    held: bool

    @property
    def name(self) -> str:
        """As the rows call it."""
        where = "registers" if self.held else "shared memory"
        return f"d{self.gradients.upper()}: {self.columns} columns, {self.stages} stages, own rows in {where}"

    def shape(self, gradients: str, dtype: str, d: int) -> dict[str, int]:
        """Constants of a pass."""
        shipped = shape_of(gradients, dtype, d)
        if gradients != self.gradients:
            return shipped
        return shipped | {"columns": self.columns, "stages": self.stages, "held": self.held}

    def plan(self, arch: str) -> functools.partial[Backward]:
        """(problem, gradient, output, LSE) -> the launches."""
        return functools.partial(float_backward, arch=arch, shape=self.shape)


VARIANTS = (
    Variant(128, "kv", 64, 2, False),
    Variant(128, "kv", 48, 4, False),
    Variant(128, "q", 64, 4, False),
    Variant(128, "q", 80, 4, False),
    Variant(128, "q", 96, 3, False),
    Variant(128, "q", 128, 2, False),
    Variant(64, "kv", 96, 4, False),
    Variant(64, "kv", 112, 4, False),
    Variant(64, "kv", 64, 4, True),
    Variant(64, "q", 128, 4, False),
    Variant(64, "q", 96, 4, True),
    Variant(64, "q", 64, 4, True),
)


def variants(arch: str) -> Iterator[tuple[Variant, bool]]:
    """Each, with full and with causal attention."""
    for one in VARIANTS if arch == "sm_90a" else ():
        yield from ((one, causal) for causal in (False, True))


def checks(arch: str) -> Iterator[Step]:
    """Each on a small problem."""
    for one, causal in variants(arch):
        name = f"{one.name}, D={one.d}{', causal' * causal}"
        case = name, (*CHECKED, one.d), "float16", {"is_causal": causal}
        yield attention.compared_gradients(case, arch, False, one.plan(arch))


def timings(arch: str) -> Iterator[Step]:
    """Times of each: all launches of the backward pass."""
    for one, causal in variants(arch):
        yield attention.gradient_timing(
            f"numflash {one.name}", (*TIMED, one.d), causal, "float16", one.plan(arch)
        )
