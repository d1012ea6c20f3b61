"""From a validated problem to the kernels of its gradient.

Packing, options as arrays, and the rows that float32 cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from ..interop.arrays import to_float32
from ..jit import guard
from ..jit.memory import fresh
from ..jit.threads import count, limit, one_at_a_time
from ..numerics.fixedpoint import LOG2E
from ..validation import LARGEST_LSE, Problem
from ..validation.options import OptionArrays
from .backward import backward_rows, plans, tiled
from .backward.held import Given, found_of
from .floats.call import addresses
from .isa.strided import strided
from .launch_float import isa_of
from .problem_arrays import at_address, gradient_semantics, heads

F = np.float32
LSE = 5  # its place among the addresses of a call


@guard.guarded
def run(
    problem: Problem,
    grad_out: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    grad_lse: np.ndarray | None = None,
    isa: str | None = None,
    results: Sequence[np.ndarray] | None = None,
    scores: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ (B, H, L, D), dK (B, Hkv, S, D) and dV (B, Hkv, S, Dv) in float32, by the kernels of `isa`
    (None: the best of the target).

    grad_out and out (B, H, L, Dv), lse and its gradient grad_lse (B, H, L), None for 0: float32, of
    any strides. `results`: contiguous
    arrays that are written, and returned, where they are given. `scores`: contiguous float32 zeros
    (B, H, L, S), which become the gradients of the scores that mask, bias and slopes were applied
    to, 0 where a row does not attend to a key; or None.
    """
    isa = isa_of(problem, isa)
    nb, nh, nkv, length, s, d, dv = problem.shape
    shapes = (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)
    dq, dk, dv_ = results or tuple(fresh(shape, F) for shape in shapes)
    empty = 0 in (nb, length, s)
    if empty or isa == "portable":  # which adds up what each row gives
        for x in (dq, dk, dv_):
            x.fill(0)
    if not empty:
        operands = problem.query, problem.key, problem.value, grad_out, out, lse
        q, k, v, do, out, lse = map(to_float32, operands)
        rows = lse, None if grad_lse is None else to_float32(grad_lse)
        threads = min(count(), plans.most_threads(problem, isa))
        with one_at_a_time():
            if isa == "portable":
                with limit(threads):
                    _portable(problem, (q, k, v, do), out, rows, (dq, dk, dv_), scores)
            else:
                plan = plans.plan_of(problem, isa, threads)  # sets the number of threads itself
                _planned(problem, plan, (q, k, v, do), out, rows, (dq, dk, dv_), scores)
    return dq, dk, dv_


class GradientRunner:
    """What computes the gradients of equal problems without score functions.

    problem : the first of them, without masks, slopes and sinks
    isa : an instruction set with register tiles
    """

    def __init__(self, problem: Problem, isa: str) -> None:
        self.problem, self.isa = problem.without_memory(), isa
        self.most = plans.most_threads(problem, isa)
        self.plans: dict[int, plans.Plan] = {}

    def run_at(
        self,
        places: Sequence[int],
        strides: np.ndarray | None,
        options: tuple[OptionArrays, str, tuple[int, int, int, int]] | None,
    ) -> bool:
        """Write the gradients of query, key and value; False where some rows have to be computed again
        in float64, by `run`.

        places : addresses of query, key, value, grad_out, out, lse and its gradient or 0, of the results,
            and of zeros for the gradients of the scores, or 0; float32
        strides : as `backward.call.make_call` takes them, or None where all are contiguous
        options : masks, lengths, slopes and sinks, the alignment and (B, H, L, S), as `for_arrays` takes
            them, if there are any
        """
        threads = min(count(), self.most)
        plan = self.plans.get(threads)
        if plan is None:
            plan = self.plans[threads] = plans.plan_of(self.problem, self.isa, threads)
        if options is not None:
            plan, _ = plan.for_arrays(*options)
            assert plan is not None  # all keys have a place in its memory
        left = plan.run(places, strides)
        if left is None:
            return True
        lse = at_address(places[LSE], left[0].shape, "=f4")
        return not _sees_keys(left[0], lse).any()


def gradient_runner(problem: Problem) -> GradientRunner | None:
    """The runner of a problem and of all that are equal but for their operands and the numbers of their
    options' arrays; None where there is no such thing.
    """
    isa = isa_of(problem)
    other = problem.functions is not None or isa == "portable"
    return None if other else GradientRunner(problem, isa)


def _portable(
    problem: Problem,
    operands: tuple[np.ndarray, ...],
    out: np.ndarray,
    of_rows: tuple[np.ndarray, np.ndarray | None],
    results: tuple[np.ndarray, ...],
    scores: np.ndarray | None,
) -> None:
    """All rows one at a time, those that float32 does not hold in float64."""
    lse, grad_lse = of_rows
    rows = [strided(x) for x in (*operands, out)]
    q, k, v, do, lse = map(heads, (*operands, lse))
    dlse = np.zeros((0, lse.shape[1]), F) if grad_lse is None else heads(grad_lse)
    numbers = problem.key_lengths, tiled.largest_scale(problem), tiled.bounds(problem)
    found = found_of(Given._make((*rows, lse, dlse, *numbers)))
    arrays, delta = (q, k, v, do), found.exact_delta
    gradients = (*map(heads, results), _of_heads(scores))
    _rows(problem, False, ~found.skip, arrays, lse, delta, gradients)
    _rest(problem, found.skip, arrays, lse, delta, gradients)


def _planned(
    problem: Problem,
    plan: plans.Plan,
    operands: tuple[np.ndarray, ...],
    out: np.ndarray,
    of_rows: tuple[np.ndarray, np.ndarray | None],
    results: tuple[np.ndarray, ...],
    scores: np.ndarray | None,
) -> None:
    """By the plan's kernel; rows that float32 does not hold one at a time in float64."""
    q, k, v, do = operands
    dq, dk, dv = results
    lse, grad_lse = of_rows
    q_at, k_at, v_at, do_at, lse_at = addresses(q, k, v, do, lse)
    out_at, dq_at, dk_at, dv_at, _ = addresses(out, dq, dk, dv, lse)
    scores_at, dlse_at = (0 if x is None else x.ctypes.data for x in (scores, grad_lse))
    of_operands = q_at, k_at, v_at, do_at, out_at, lse_at, dlse_at
    left = plan.run((*of_operands, dq_at, dk_at, dv_at, scores_at))
    if left is not None:
        skip, delta = left
        gradients = (*map(heads, results), _of_heads(scores))
        _rest(problem, skip, tuple(map(heads, operands)), heads(lse), delta, gradients)


def _of_heads(scores: np.ndarray | None) -> np.ndarray:
    """The gradients of scores as (N, L, S), empty where they are not wanted."""
    return np.zeros((0, 0, 0), F) if scores is None else heads(scores)


def _rest(
    problem: Problem,
    skip: np.ndarray,
    operands: tuple[np.ndarray, ...],
    lse: np.ndarray,
    delta: np.ndarray,
    gradients: tuple[np.ndarray, ...],
) -> None:
    """The rows that were left out, but for those that see no key."""
    _rows(problem, True, _sees_keys(skip, lse), operands, lse, delta, gradients)


def _sees_keys(skip: np.ndarray, lse: np.ndarray) -> np.ndarray:
    """Which of the rows that were left out attend to a key: the gradients of the others are 0."""
    return skip & ~np.isneginf(lse)


def _rows(
    problem: Problem,
    double: bool,
    todo: np.ndarray,
    operands: tuple[np.ndarray, ...],
    lse: np.ndarray,
    delta: np.ndarray,
    gradients: tuple[np.ndarray, ...],
) -> None:
    """Add the gradients of the rows where `todo` (N, L) bool is true, one at a time."""
    _, nh, nkv, length, s, _, _ = problem.shape
    rows = np.flatnonzero(todo)
    if not rows.size:
        return
    query_pass, key_pass = backward_rows.make_backward_rows(double)
    sinks = (
        np.full(nh, -np.inf)
        if problem.sinks is None
        else np.multiply(problem.sinks, LOG2E, dtype=np.float64)
    )
    units = np.where(  # the LSE of a row out of range is computed anew
        np.abs(lse) >= LARGEST_LSE,
        np.where(np.isneginf(lse), lse, np.inf),
        np.multiply(lse, LOG2E, dtype=np.float64),
    )
    limit = np.inf if double else tiled.FINITE  # 0 * infinity is no number
    scales = tuple(float(np.clip(x, -limit, limit)) for x in (problem.scale * LOG2E, problem.scale))
    options = gradient_semantics(problem, double)
    threads = numba.get_num_threads()
    given = backward_rows.Given._make(
        (*operands, units, np.ones(lse.shape), delta, rows, *scales, options, nh, nkv, s, threads)
    )
    starts = np.searchsorted(rows, np.arange(lse.shape[0] + 1) * length)
    dq, dk, dv, scores = gradients
    query_pass(given, sinks.astype(np.float64), np.zeros(1, np.int64), dq, scores)
    key_pass(given, starts, np.zeros(1, np.int64), dk, dv)
