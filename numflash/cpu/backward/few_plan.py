"""What equal calls of the gradient of few rows have in common."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...jit.scratch import Layout, placed, scratch
from ...jit.threads import restoring_threads
from ...validation import Problem
from ..plan import KernelPlan
from ..problem_arrays import semantics
from ..semantics import OPTION_NUMBERS, option_numbers
from .few_gradients import NUMBERS, PLACES, Numbers, make_few_call
from .tiled import GradientPlan, places_in, real_numbers, strides_of

F = np.float32


class FewGradientPlan(KernelPlan):
    """`tiled.GradientPlan` of few rows, without score functions.

    Parameters
    ----------
    problem, isa, workers : as of `tiled.GradientPlan`, which computes what float32 does not hold here
    vectors : the instruction set whose vectors the kernel uses
    parts : of the keys
    """

    def __init__(self, problem: Problem, isa: str, workers: int, vectors: str, parts: int) -> None:
        super().__init__()
        self.problem, self.isa, self.workers = problem.without_memory(), isa, workers
        nb, nh, nkv, length, _, d, dv = shape = problem.shape
        rows = nb * nh, length
        self.layout = Layout()
        kinds = {
            "skip": (np.bool_, rows),
            "lse": (F, rows),
            "delta": (F, rows),
            "exact_delta": (np.float64, rows),
            "bounds": (F, rows),
            "q": (F, (*rows, d)),
            "do": (F, (*rows, dv)),
            "dq": (F, (parts, *rows, d)),
            "spoiled": (np.uint8, (nb * nkv, parts)),
        }
        numbers = Numbers(*shape, parts, workers, **places_in(self.layout, kinds))
        self.numbers = np.array((*numbers, *(0,) * OPTION_NUMBERS), np.int64)
        self.set_arrays()
        self.reals, self.strides = real_numbers(problem), strides_of(shape)
        self.call = make_few_call(vectors)

    def set_arrays(self) -> None:
        """As of `KernelPlan`."""
        self.arrays = semantics(self.problem)
        self.numbers[NUMBERS:] = option_numbers(self.arrays)

    def run(
        self, operands: Sequence[int], strides: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """As of `tiled.GradientPlan`."""
        with scratch.take(self.layout.nbytes) as room:
            numbers = placed(self.numbers, PLACES, self.layout, room)
            steps = self.strides if strides is None else strides
            given = *operands, room.address, numbers, steps, self.reals
            if not restoring_threads(self.call, *given):
                return None
        return GradientPlan(self.problem, self.isa, self.workers).run(operands, strides)
