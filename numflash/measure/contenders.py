"""The contenders of a benchmark.

Every contender computes the same attention, is checked before it is timed, and says its peer.

The A64FX summary (docs/sources.md) compares the fused kernel with a parallel float32 reference;
PyTorch takes part where it is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from .. import reference, validation
from ..cpu.study import reference_float32
from ..dispatch.backends import solve
from ..errors import ArgumentError, UnsupportedError
from ..jit import target
from ..jit.threads import check_threads, limit
from ..numerics import quantization
from ..tiling import MAX_HEAD_DIM
from ..validation.options import Options
from .metrics import Errors, errors
from .timing import Timing, timed

CHECKED_ROWS = 256  # the last rows of each head are checked against float64


@dataclass(frozen=True)
class Case:
    """One benchmark: L queries and keys, random N(0, 1)."""

    length: int
    head_dim: int
    causal: bool = False
    heads: int = 1
    batch: int = 1

    @property
    def operations(self) -> float:
        """Multiplications and additions of the two products over the visible part.

        What GOP/s counts, for everybody.
        """
        visible = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        return 4.0 * self.batch * self.heads * self.head_dim * visible

    @property
    def traffic(self) -> float:
        """Bytes of INT8 operands and float32 output, each moved once."""
        return 7.0 * self.batch * self.heads * self.length * self.head_dim

    def __str__(self) -> str:
        many = "" if self.heads == self.batch == 1 else f" B={self.batch} H={self.heads}"
        return f"L={self.length} D={self.head_dim}{many}{' causal' if self.causal else ''}"

    @functools.cached_property
    def arrays(self) -> tuple[Any, Any, Any]:
        """query, key, value: (B, H, L, D) float32, the same in every run."""
        rng = np.random.default_rng(self.length)
        shape = (self.batch, self.heads, self.length, self.head_dim)
        q, k, v = (rng.standard_normal(shape, np.float32) for _ in range(3))
        return q, k, v

    @functools.cached_property
    def exact(self) -> np.ndarray:
        """The last CHECKED_ROWS rows in float64."""
        q, k, v = self.arrays
        tail = q[:, :, -CHECKED_ROWS:]
        return reference.oracle(
            validation.problem(tail, k, v, Options(is_causal=self.causal, alignment="lower_right"))
        )[0]

    def check(self, out: np.ndarray) -> Errors:
        """Errors of an output's last rows."""
        return errors(np.asarray(out, np.float64)[:, :, -CHECKED_ROWS:], self.exact)


@dataclass(frozen=True)
class Contender:
    """name, the largest relative L1 error it may have, and case -> call without arguments that
    returns the output.
    """

    name: str
    budget: float
    prepare: Callable[[Case], Callable[[], Any]]


def _float32(case: Case) -> validation.Problem:
    return validation.problem(*case.arrays, Options(is_causal=case.causal, precision="float32"))


def _int8(isa: str, pv: str = "int8") -> Callable[[Case], Callable[[], Any]]:
    def prepare(case: Case) -> Callable[[], Any]:
        from ..cpu import launch

        problem = validation.problem(
            *case.arrays, Options(is_causal=case.causal, precision="int8", pv=pv)
        )
        quantised = quantization.quantize_problem(problem)
        return lambda: launch.run(quantised, isa=isa)[0]

    return prepare


def _whole(precision: str) -> Callable[[Case], Callable[[], Any]]:
    def prepare(case: Case) -> Callable[[], Any]:
        problem = validation.problem(
            *case.arrays, Options(is_causal=case.causal, precision=precision)
        )
        return lambda: solve(problem, "cpu")[0]

    return prepare


def _reference(case: Case) -> Callable[[], Any]:
    problem = _float32(case)
    return lambda: reference_float32.run(problem)


def _torch(case: Case) -> Callable[[], Any]:
    import torch

    q, k, v = (torch.from_numpy(x) for x in case.arrays)
    attend = torch.nn.functional.scaled_dot_product_attention

    def call() -> Any:
        with torch.inference_mode():
            return attend(q, k, v, is_causal=case.causal).numpy()

    return call


PEER = "PyTorch float32"
REFERENCE = "float32 reference"
PORTABLE = "numflash int8 portable"


def contenders(everybody: bool = False) -> list[Contender]:
    """The contenders that can run here, the machine's best first.

    `everybody` adds the other precisions and instruction sets.
    """
    best, *others = target.available()
    found = [Contender(f"numflash int8 {best}", 0.03, _int8(best))]
    if everybody:
        found += [
            Contender(f"numflash int8 {isa}", 0.03, _int8(isa))
            for isa in others
            if isa != "portable"
        ]
        found += [
            Contender("numflash int8 with quantisation", 0.03, _whole("int8")),
            Contender("numflash int8, pv int16", 0.025, _int8(best, "int16")),
            Contender("numflash int8, pv bf16", 0.022, _int8(best, "bf16")),
            Contender("numflash int8, pv fp32", 0.02, _int8(best, "fp32")),
            Contender("numflash float32", 1e-5, _whole("float32")),
        ]
    if best != "portable":
        found.append(Contender(PORTABLE, 0.03, _int8("portable")))
    found.append(Contender(REFERENCE, 1e-5, _reference))
    if find_spec("torch"):
        found.append(Contender(PEER, 1e-5, _torch))
    return found


def check_request(head_dim: int, *threads: int) -> None:
    """Refuse what could not be measured, before minutes of measuring.

    Raises
    ------
    ArgumentError
    """
    if head_dim > MAX_HEAD_DIM:
        raise ArgumentError(f"head_dim: got {head_dim}; allowed: 1 to {MAX_HEAD_DIM}")
    for n in threads:
        check_threads(n)


@contextmanager
def on_threads(threads: int) -> Iterator[None]:
    """Numba and PyTorch on `threads` threads."""
    if not find_spec("torch"):
        with limit(threads):
            yield
        return
    import torch

    before = torch.get_num_threads()
    try:
        with limit(threads):
            torch.set_num_threads(threads)
            yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Result:
    """A checked contender's median time."""

    contender: str
    case: Case
    threads: int
    timing: Timing
    errors: Errors

    @property
    def seconds(self) -> float:
        """Median time of a call."""
        return self.timing.seconds

    @property
    def rate(self) -> float:
        """Operations per second."""
        return self.case.operations / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """The same as a dictionary, for --json."""
        return {
            "contender": self.contender,
            "length": self.case.length,
            "head_dim": self.case.head_dim,
            "causal": self.case.causal,
            "heads": self.case.heads,
            "batch": self.case.batch,
            "threads": self.threads,
            "seconds": self.seconds,
            "spread": self.timing.spread,
            "disturbed": self.timing.disturbed,
            "operations_per_second": self.rate,
            "bytes_per_second": self.case.traffic / self.seconds,
            **self.errors.as_dict(),
        }


def compete(contender: Contender, case: Case, threads: int = 1, repeats: int = 5) -> Result | None:
    """Check a contender, then time it (median). None where it cannot run here.

    Raises
    ------
    ArithmeticError
        Its result is off by more than its budget: a wrong answer is not timed.
    """
    with on_threads(threads):
        try:
            call = contender.prepare(case)
            found = case.check(call())
        except UnsupportedError:
            return None
        if not found.relative_l1 <= contender.budget:
            raise ArithmeticError(
                f"{contender.name} at {case}: relative L1 {found.relative_l1:.3g}, budget {contender.budget}"
            )
        return Result(contender.name, case, threads, timed(call, repeats), found)
