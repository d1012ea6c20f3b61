"""From a validated problem to its result: which kernel solves it, in the emulator or on a card."""

from __future__ import annotations

import numpy as np

from ..validation import Problem
from .device import current_device
from .device.operands import MMA_ROWS, Launch, Results, emulated, mappable, packed_heads
from .launch_float import float32_forward, float_forward, hopper_forward
from .launch_int8 import int8_forward


def plan(problem: Problem, arch: str, results: Results = None) -> Launch:
    """The kernel launch that solves a problem on an architecture.

    `results` (out, lse) say that its arrays are on the card. There `arrays.forward` asks first
    whether several blocks share the keys.

    On sm_90a wgmma kernels take INT8 and 16-bit problems. To the sm_80 kernels, built for sm_90a,
    go INT8 with float values; broadcast operands on the card, which tensor maps do not describe;
    and few rows, which fill no tile of 128: of INT8 any, of 16 bits those of heads that share keys.
    Few 16-bit rows of heads that do not stay: by reckoning memory limits such a call in both
    kernels (a tile of 128 x 176 scores at D = 128 takes 1.5 us of products and 0.8 us of
    exponentials, its keys and values 3.5 us of an H100's memory).
    """
    if problem.precision == "int8":
        return int8_forward(problem, arch)
    if problem.precision == "float32":
        return float32_forward(problem, arch, results)
    _, nh, nkv, length, *_ = problem.shape
    few = nh > nkv and length * packed_heads(nh // nkv) <= MMA_ROWS
    operands = (problem.query, problem.key, problem.value)
    if arch != "sm_90a" or few or (results is not None and not mappable(*operands)):
        return float_forward(problem, arch, results)
    return hopper_forward(problem, results=results)


def run(problem: Problem, emulator: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """out (B, H, L, Dv) and lse (B, H, L) float32 of a problem in host memory.

    Parameters
    ----------
    emulator : str or None
        Run the PTX of this architecture's kernel in the emulator instead of on a card.

    Raises
    ------
    UnsupportedError
        No driver or card, a precision or head size without a kernel.
    """
    if emulator:
        return emulated(plan(problem, emulator))[:2]
    device = current_device()
    launch = plan(problem, device.arch)
    device.prepared(launch, lambda work: work())
    return launch.finish()
