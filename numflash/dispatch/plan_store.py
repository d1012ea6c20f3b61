"""The plans of calls that were made before, by their keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..interop.arrays import Imported
from ..jit import guard
from ..tiling import PlanCache
from ..validation import Problem
from ..validation.options import Options
from .call_keys import Key
from .plans import ArrayGradientPlan, ArrayPlan, PackedPlan, QuantizedPlan

F = np.float32
NO_ARRAYS = {"mask": None, "bias": None, "alibi_slopes": None, "sinks": None}
_plans: PlanCache[Any] = PlanCache()


def find(key: Key) -> Any:
    """The plan of a call that was made before; none for `guard`, which looks at calls in full."""
    if guard.ON:
        return None
    try:
        return _plans.get(key)
    except (TypeError, ValueError):  # an option that cannot be hashed (ValueError: a memoryview)
        return None


def _runs_on_cpu(problem: Problem, impl: str) -> bool:
    """Whether a problem, of any size, goes to the kernels of the CPU; not for `guard`, as in `find`."""
    return impl in ("auto", "cpu") and 0 not in problem.shape and not guard.ON


def runner_of(problem: Problem, impl: str) -> Any:
    """What computes a problem and all that are equal but for the numbers in their arrays.

    None where there is no such thing. It keeps no mask.
    """
    if not _runs_on_cpu(problem, impl):
        return None
    from ..cpu import launch

    lengths = {"key_lengths": problem.key_lengths, "diagonal": problem.diagonal}
    return launch.runner(problem.changed(**NO_ARRAYS | lengths))


def keep(
    key: tuple[Any, ...],
    problem: Problem,
    given: Sequence[Imported],
    options: Options,
    impl: str,
) -> None:
    """Keep a plan of a call that has succeeded, if there is one for it."""
    runner = runner_of(problem, impl)
    if runner is not None:
        native = all(dtype == F for dtype in key[1:4])
        _plans.keep(key, ArrayPlan(problem, given, options, runner, native))


def keep_made(key: Key, call: Any) -> None:
    """Keep what computes a call on tensors on a card that has succeeded."""
    _plans.keep(key, call)


def keep_packed(
    key: tuple[Any, ...],
    batches: list[tuple[Problem, list[int]]],
    cuts: tuple[np.ndarray, np.ndarray],
    query: Imported,
    options: Options,
    impl: str,
) -> None:
    """The same for `attention_varlen`: batches of sequences, and how they were cut."""
    parts = [(runner_of(problem, impl), problem.shape, chosen) for problem, chosen in batches]
    if parts and all(runner is not None for runner, _, _ in parts):
        plan = PackedPlan(parts, cuts, query, options, batches[0][0].precision)
        _plans.keep(key, plan)


def keep_quantized(
    key: tuple[Any, ...], problem: Problem, ndim: int, options: Options, impl: str
) -> None:
    """The same for `attention_int8`."""
    runner = runner_of(problem, impl)
    if runner is not None:
        _plans.keep(key, QuantizedPlan(problem, ndim, options, runner))


# of calls on tensors, by a key of their own: what computes them, and their gradients
runners: PlanCache[Any] = PlanCache()
gradients: PlanCache[Any] = PlanCache()


def _gradient_runner(problem: Problem, impl: str, given: str) -> Any:
    """What computes the gradients of a problem of operands of dtype `given`, if it does not round them,
    and of all that are equal but for the numbers in their arrays; or None. It keeps no mask.
    """
    if problem.precision != given or not _runs_on_cpu(problem, impl):
        return None
    from ..cpu import launch_backward

    return launch_backward.gradient_runner(problem.changed(**NO_ARRAYS))


def keep_gradients(key: Any, problem: Problem, impl: str, given: str) -> None:
    """Keep what computes the gradients of a call on tensors of dtype `given` that has succeeded."""
    runner = _gradient_runner(problem, impl, given)
    if runner is not None:
        gradients.keep(key, runner)


def keep_array_gradients(
    key: tuple[Any, ...], problem: Problem, ndim: int, options: Options, impl: str
) -> None:
    """The same for `attention_backward` on NumPy arrays of float32 with `ndim` dimensions."""
    runner = None
    if ndim == 4 and options.layout == "bhld":
        runner = _gradient_runner(problem, impl, "float32")
    if runner is not None:
        _plans.keep(key, ArrayGradientPlan(problem, options, runner))


def keep_runner(key: Any, problem: Problem, impl: str, given: str) -> None:
    """Keep what computes a call on tensors of dtype `given` that has succeeded, if it takes them as they
    are, or as float32, and gives float32.
    """
    if problem.precision in (given, "float32", "int8"):
        runner = runner_of(problem, impl)
        if runner is not None and runner.takes in (given, "float32"):
            runners.keep(key, runner)
