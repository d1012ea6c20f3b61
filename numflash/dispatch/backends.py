"""Which backend computes a problem: CPU or CUDA kernels, the emulator, or the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..interop.arguments import emulated_arch
from ..interop.arrays import convert
from ..jit.threads import refuse_after_fork
from ..numerics import merge
from ..numerics.scores import lse_as_float32
from ..validation import Problem

ON_CPU = ("auto", "cpu", "portable")


def solve(
    problem: Problem, impl: str, results: tuple[np.ndarray, np.ndarray] | None = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """out (B, H, L, Dv) float32 or in the problem's own storage, lse (B, H, L) float32 where the
    problem needs it.

    `results`, contiguous float32 arrays of these shapes, are written and returned where they are
    given, for a problem that returns the LSE.
    """
    b, h, _, length, s, _, dv = problem.shape
    if 0 in (b, length, s):
        out = np.zeros((b, h, length, dv), np.float32)
        lse = np.full((b, h, length), -np.inf, np.float32)
    else:
        quantises = impl in ON_CPU  # by itself
        if problem.precision == "int8" and isinstance(problem.query, np.ndarray) and not quantises:
            from ..numerics.quantization import quantize_problem

            problem = quantize_problem(problem)
        out, lse = _run(problem, impl, results)
    if problem.sinks is not None:
        out = convert(out, "float32")
        merge.apply_sinks(out, lse, problem.sinks)
    if results is not None:
        out, lse = _written((out, lse), results)
    return out, lse if problem.return_lse else None


def _written(found: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> Sequence[np.ndarray]:
    """The caller's float32 arrays with what was found: copied, unless it was written there."""
    for x, to in zip(found, results, strict=True):
        if x is not to:
            to[...] = convert(x, "float32")
    return results


def _run(problem: Problem, impl: str, results: Any) -> tuple[np.ndarray, Any]:
    if impl == "reference":
        from .. import reference

        out, lse = reference.solve(problem.changed(sinks=None))
        return out.astype(np.float32), lse_as_float32(lse)
    if impl in ON_CPU:
        refuse_after_fork()
        from ..cpu import launch

        isa = {"isa": "portable"} if impl == "portable" else {}
        return launch.run(problem, results=results, **isa)
    try:
        from ..cuda import launch as launch_cuda
    except ImportError as error:
        raise UnsupportedError(
            f"impl: got {impl!r}, which cannot be loaded here ({error})"
        ) from error
    return launch_cuda.run(problem, emulator=emulated_arch(impl))


def refuse_gradient_of_mask(impl: str, asked: bool) -> None:
    """Raise where a card is asked for the gradient of a float mask."""
    if asked:
        raise UnsupportedError(
            f"impl: got {impl!r} with the gradient of a float mask, which CUDA has not; allowed: 'auto' with arrays "
            "in host memory, 'cpu', 'portable', 'reference'"
        )


def solve_backward(
    problem: Problem,
    operands: tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None],
    impl: str,
    results: Sequence[np.ndarray] | None = None,
    scores: np.ndarray | None = None,
) -> Sequence[np.ndarray]:
    """dq (B, H, L, D), dk (B, Hkv, S, D), dv (B, Hkv, S, Dv), float32 or in the problem's own
    storage.

    operands : grad_out, out, lse and grad_lse, as `validation.gradient_operands` gives them
    results : contiguous float32 arrays of these shapes, to be written and returned, or None
    scores : contiguous float32 zeros (B, H, L, S), or None
        They become the gradients of the scores that mask and bias were applied to; not on a card.
    """
    if problem.precision == "int8":
        raise UnsupportedError(
            "precision: got 'int8', which has no gradient; allowed: 'float32', 'bfloat16', 'float16'"
        )
    if impl in ON_CPU:
        refuse_after_fork()
        from ..cpu import launch_backward

        return launch_backward.run(
            problem,
            *operands,
            isa="portable" if impl == "portable" else None,
            results=results,
            scores=scores,
        )
    if impl == "reference":
        from .. import reference

        found = reference.gradients(problem, *operands, scores)
    else:
        refuse_gradient_of_mask(impl, scores is not None)
        from ..cuda.launch_backward import run

        found = run(problem, *operands, emulator=emulated_arch(impl))
    return found if results is None else _written(found, results)
