"""Forward and backward passes on a card: compared with the emulator and float64, then timed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from ... import reference, validation
from ...errors import UnsupportedError
from ...interop.arrays import widen
from ...tiling import TILINGS
from .. import launch, launch_backward
from ..device import Device, median_seconds
from ..device.operands import Launch
from ..launch_float import float_forward, hopper_forward
from . import decode, expected, from_floats
from .cases import (
    CHANNELS,
    ROWS,
    Case,
    floats_of,
    gradient_operands,
    problem_of,
    relative_l2,
)

OLDER = "numflash float16, sm_80 code"  # on a Hopper card, beside the wgmma kernel
SQUARE = "sm_90a-float16"  # the tiling of 128 x 128
VARIANT_CHECK = (1, 16, 16, 200, 200, 128)
VARIANT_SHAPE = (2, 16, 16, 8192, 8192, 128)
Row = dict[str, Any]


def compare(
    precision: str, problem: validation.Problem, card: tuple, emulator: Iterable[np.ndarray]
) -> Row:
    """Card against emulator (equal bits for INT8), and both against the oracle."""
    emulator = tuple(emulator)
    if precision == "int8":
        different = sum(
            int((a.view(np.int32) != b.view(np.int32)).sum())
            for a, b in zip(card, emulator, strict=True)
        )
        row = {"equal_bits": not different, "passed": not different}
        return row if row["passed"] else row | {"different_numbers": different}
    exact, _ = reference.oracle(problem)
    errors = [relative_l2(out, exact) for out in (card[0], emulator[0])]
    # the card adds in another order and keeps fewer bits than the emulator: the same size of error,
    # not the same bits
    return {
        "card_error": errors[0],
        "emulator_error": errors[1],
        "passed": errors[0] <= 2 * errors[1] + 1e-6,
    }


def gradient_row(
    device: Device, problem: validation.Problem, emulator: Iterable[np.ndarray] | None = None
) -> Row:
    """dq, dk and dv of card and emulator against float64; the card twice, for equal bits."""
    grad, out, lse = gradient_operands(problem)
    card, again = (launch_backward.run(problem, grad, out, lse) for _ in range(2))
    if emulator is None:
        steps = launch_backward.plan(problem, grad, out, lse, device.arch)
        emulator, _ = launch_backward.emulated(steps)
    exact = reference.gradients(problem, widen(grad), widen(out), lse)
    errors = [
        [relative_l2(x, right) for x, right in zip(found, exact, strict=True)]
        for found in (card, emulator)
    ]
    equal = all(a.tobytes() == b.tobytes() for a, b in zip(card, again, strict=True))
    close = all(mine <= 2 * theirs + 1e-6 for mine, theirs in zip(*errors, strict=True))
    return {
        "card_error": errors[0],
        "emulator_error": errors[1],
        "equal_bits": equal,
        "passed": equal and close,
    }


def check(device: Device, cases: Iterable[Case], backward: bool = False) -> Iterator[Row]:
    """One row per case."""
    for case in cases:
        name, shape, precision, options = case
        row: Row = {"case": name, "arch": device.arch}
        try:
            problem = problem_of(shape, precision, options)
            emulator = expected.get("backward" if backward else "forward", case, device.arch)
            if backward:
                row |= gradient_row(device, problem, emulator)
            else:
                row |= compare(precision, problem, launch.run(problem), emulator)
                if precision == "int8":
                    found = from_floats.solved(floats_of(shape, precision, options))
                    there = compare(precision, problem, (found,), emulator[:1])
                    row |= {"from_floats": there, "passed": row["passed"] and there["passed"]}
        except UnsupportedError as error:
            row |= decode.refused(error)
        yield row


def shapes(lengths: Iterable[int]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """(B, H, Hkv, L, S, D) and causal of the timings, long ones first.

    16,384 query rows times heads of 2048 channels are in flight, D is 64 and 128.
    """
    for length, d, causal in itertools.product(
        sorted(lengths, reverse=True), (128, 64), (False, True)
    ):
        h = CHANNELS // d
        yield (max(1, ROWS // length), h, h, length, length, d), causal


def timed(
    name: str, shape: tuple[int, ...], causal: bool, found: float | str, backward: bool = False
) -> Row:
    """A timing's row: seconds and TFLOP/s, or why there are none.

    Gradients: five products count, the two that are computed twice do not.
    """
    b, h, hkv, length, _, d = shape
    row: Row = {"kernel": name, "L": length, "D": d, "B": b, "H": h, "Hkv": hkv, "causal": causal}
    if isinstance(found, str):
        return row | {"error": found}
    flop = 4 * b * h * length * length * d * (0.5 if causal else 1.0) * (2.5 if backward else 1.0)
    return row | {"seconds": found, "tflops": flop / found / 1e12}


def median_of(device: Device, work: Any) -> float:
    """Median seconds of a launch, or of several in a row."""
    return device.prepared(work, lambda run: median_seconds(device, run))


def forward_times(device: Device, precision: str, lengths: Iterable[int]) -> Iterator[Row]:
    """What ships for the card, and on Hopper the float16 kernel that it replaces."""
    for shape, causal in shapes(lengths):
        problem = problem_of(shape, precision, {"is_causal": causal})
        kernels = {f"numflash {precision}": launch.plan(problem, device.arch)}
        if device.arch == "sm_90a" and precision == "float16":
            kernels[OLDER] = float_forward(problem, device.arch)
        for name, work in kernels.items():
            yield timed(name, shape, causal, median_of(device, work))
        if precision == "int8":
            floats = floats_of(shape, precision, {"is_causal": causal})
            card, run, _ = from_floats.on_the_card(floats)
            seconds = median_seconds(device, run, stream=card.stream)
            yield timed("numflash int8, float32 arrays", shape, causal, seconds)


def backward_times(device: Device, precision: str, lengths: Iterable[int]) -> Iterator[Row]:
    """All launches of the backward pass; LSE and output are made up, which changes no time."""
    for shape, causal in shapes(lengths):
        problem = problem_of(shape, precision, {"is_causal": causal})
        lse = np.full(problem.query.shape[:3], np.log(shape[4]), np.float32)
        work = launch_backward.float_backward(
            problem, problem.query, problem.query, lse, device.arch
        )
        seconds = median_of(device, work.launches)
        yield timed(f"numflash {precision}, backward", shape, causal, seconds, True)


class Variant(NamedTuple):
    """A forward kernel that is timed beside the shipped one, and a problem for it."""

    name: str
    shape: tuple[int, ...]
    causal: bool
    precision: str
    constants: dict[str, Any]  # those that are changed; {}: the launch as it ships
    tiling: str = ""  # the name of another one than the shipped launch's

    def problem(self) -> validation.Problem:
        """Standard normal numbers of the shape."""
        return problem_of(self.shape, self.precision, {"is_causal": self.causal})

    def launch(self, arch: str) -> Launch:
        """The launch, on arrays in host memory."""
        if not self.constants and not self.tiling:
            return launch.plan(self.problem(), arch)
        work = hopper_forward(self.problem(), tiling=TILINGS.get(self.tiling))
        return replace(work, constants=work.constants | self.constants)


def variants(arch: str, shape: tuple[int, ...]) -> list[Variant]:
    """What is timed beside the shipped forward kernels."""
    b, h, hkv, length, s, d = shape
    found = [
        Variant(name, shape, causal, "float16", constants)
        for causal in (False, True)
        for name, constants in (
            ("no overlap", {"overlap": False}),
            ("no ping-pong", {"ping_pong": False}),
        )
        if arch == "sm_90a"
    ]
    if arch == "sm_90a":
        found += [
            Variant(f"{tiles} tiles", (*shape[:-1], width), causal, "float16", {}, SQUARE + kind)
            for tiles, kind, width, causal in (
                ("128 x 128", "", d, False),
                ("128 x 128, 64 channels,", "", 64, False),
                ("128 x 128, 64 channels,", "", 64, True),
                ("128 x 176", "-full", d, True),
            )
        ]
    grouped, wide = (b, h, max(1, hkv // 8), length, s, d), (b, h // 2, hkv // 2, length, s, 256)
    if arch == "sm_90a":
        found += [
            Variant(f"{shared[-1]} channels, no clusters", shared, False, "float16", {"cluster": 1})
            for shared in (shape, wide)
        ]
    found.append(Variant("8 query heads per key head", grouped, False, "float16", {}))
    found.append(Variant("256 channels", wide, False, "float16", {}))
    if arch != "sm_75":
        found.append(Variant("bfloat16", shape, False, "bfloat16", {}))
    return found


def variant_rows(device: Device, checked: bool) -> Iterator[Row]:
    """The variants: on a small problem against float64 if `checked`, else their times."""
    for one in variants(device.arch, VARIANT_CHECK if checked else VARIANT_SHAPE):
        work = one.launch(device.arch)
        if not checked:
            seconds = median_of(device, work)
            yield timed(f"numflash {one.name}", one.shape, one.causal, seconds)
            continue
        device.prepared(work, lambda run: run())
        exact, _ = reference.oracle(one.problem())
        error = relative_l2(work.finish()[0], exact)
        limit = 8e-3 if one.precision == "bfloat16" else 1e-3
        name = f"{one.name}{', causal' if one.causal else ''}"
        yield {"case": name, "card_error": error, "passed": error <= limit}
