"""Forward kernels beside the shipped ones: compared with float64 on a small problem, then timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from ...tiling import TILINGS
from ...validation import Problem
from .. import launch
from ..device import Device
from ..device.operands import Launch
from ..launch_float import float_forward, hopper_forward
from . import attention
from .cases import problem_of
from .steps import Row, Step, keys_of

OLDER = "sm_80 code"
SQUARE = "sm_90a-float16"  # the tiling of 128 x 128
# Both have an even number of tiles of rows, packed heads too: clusters are chosen by that; and keys of
# which tiles of 176 hide least. What is compared is then what is timed.
CHECKED = (1, 16, 16, 250, 330, 128)
TIMED = (2, 16, 16, 8192, 8192, 128)


class Variant(NamedTuple):
    """A forward kernel that is timed beside the shipped one, and a problem for it."""

    name: str
    shape: tuple[int, ...]
    causal: bool
    precision: str = "float16"
    constants: dict[str, Any] = {}  # noqa: RUF012 -- those that are changed; {}: as it ships
    tiling: str = ""  # the name of another one than the shipped launch's

    def launch(self, problem: Problem, arch: str) -> Launch:
        """The launch, on arrays in host memory."""
        if self.name.startswith(OLDER):
            return float_forward(problem, arch)
        if not self.constants and not self.tiling:
            return launch.plan(problem, arch)
        work = hopper_forward(problem, tiling=TILINGS.get(self.tiling))
        cluster = self.constants.get("cluster", work.cluster)
        return replace(work, constants=work.constants | self.constants, cluster=cluster)


def _hopper(shape: tuple[int, ...], wide: tuple[int, ...]) -> Iterator[Variant]:
    for causal in (False, True):
        yield Variant("no overlap", shape, causal, constants={"overlap": False})
        yield Variant("no ping-pong", shape, causal, constants={"ping_pong": False})
    for tiles, kind, width, causal in (
        ("128 x 128", "", shape[-1], False),
        ("128 x 128, 64 channels,", "", 64, False),
        ("128 x 128, 64 channels,", "", 64, True),
        ("128 x 176", "-full", shape[-1], True),
    ):
        yield Variant(f"{tiles} tiles", (*shape[:-1], width), causal, tiling=SQUARE + kind)
    yield Variant(f"{shape[-1]} channels, clusters", shape, False, constants={"cluster": 2})
    yield Variant(f"{wide[-1]} channels, no clusters", wide, False, constants={"cluster": 1})
    for width in (64, 128):
        for causal in (False, True):
            yield Variant(f"{OLDER}, {width} channels", (*shape[:-1], width), causal)


def variants(arch: str, shape: tuple[int, ...]) -> list[Variant]:
    """What is timed beside the shipped forward kernels."""
    b, h, hkv, length, s, d = shape
    grouped, wide = (b, h, max(1, hkv // 8), length, s, d), (b, h // 2, hkv // 2, length, s, 256)
    found = list(_hopper(shape, wide)) if arch == "sm_90a" else []
    found.append(Variant("8 query heads per key head", grouped, False))
    found += [Variant("256 channels", wide, causal) for causal in (False, True)]
    if arch != "sm_75":
        found.append(Variant("bfloat16", shape, False, "bfloat16"))
    return found


def checks(arch: str) -> Iterator[Step]:
    """Each variant on a small problem."""
    for one in variants(arch, CHECKED):
        yield _check(one, arch)


def _check(one: Variant, arch: str) -> Step:
    def plans() -> tuple[Problem, Launch]:
        problem = problem_of(one.shape, one.precision, {"is_causal": one.causal})
        return problem, one.launch(problem, arch)

    def run(device: Device) -> Iterator[Row]:
        yield attention.compared(device, *plans(), None)

    name = f"{one.name}{', causal' * one.causal}"
    return Step(name, lambda: keys_of(plans()[1]), run)


def timings(arch: str) -> Iterator[Step]:
    """Times of each variant; the older kernels' are among those of the forward pass."""
    for one in variants(arch, TIMED):
        if not one.name.startswith(OLDER):
            yield _timing(one, arch)


def _timing(one: Variant, arch: str) -> Step:
    name = f"numflash {one.name}"
    return attention.forward_timing(
        name, one.shape, one.causal, one.precision, lambda problem: one.launch(problem, arch)
    )
