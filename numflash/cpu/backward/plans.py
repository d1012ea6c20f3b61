"""Which kernel computes the gradients of a problem, and its plan."""

from __future__ import annotations

from ...tiling import PlanCache, few_gradient_parts, workers
from ...validation import Problem
from ..launch_float import few_rows_isa
from .few_plan import FewGradientPlan
from .tiled import GradientPlan

Plan = GradientPlan | FewGradientPlan
_plans: PlanCache[Plan] = PlanCache()


def parts_of(problem: Problem, isa: str) -> int:
    """How many parts of the keys the kernel of few rows takes; 0 where the register tiles compute it."""
    nb, _, nkv, length, s, _, _ = problem.shape
    if problem.functions is not None or few_rows_isa(problem, isa) is None:
        return 0
    return few_gradient_parts(length, nb * nkv, s)


def most_threads(problem: Problem, isa: str) -> int:
    """Threads that pay, at most."""
    nb, nh, _, length, s, d, dv = problem.shape
    kind = "few rows" if parts_of(problem, isa) else "float32"
    return workers(kind, nb * nh * length * s * (3 * d + 2 * dv))


def _new_plan(problem: Problem, isa: str, threads: int) -> Plan:
    parts, vectors = parts_of(problem, isa), few_rows_isa(problem, isa)
    if parts and vectors is not None:
        return FewGradientPlan(problem, isa, threads, vectors, parts)
    return GradientPlan(problem, isa, threads)


def plan_of(problem: Problem, isa: str, threads: int) -> Plan:
    """The plan of a problem, kept for the next one whose options are numbers.

    isa : with register tiles;  threads : that share the work
    """
    arrays = problem.mask, problem.bias, problem.alibi_slopes, problem.functions
    if any(x is not None for x in arrays):
        return _new_plan(problem, isa, threads)
    key = (
        isa, threads, problem.shape, problem.scale, problem.softcap, problem.left, problem.right,
        problem.diagonal.tobytes(), problem.key_lengths.tobytes(),
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        plan = _new_plan(problem, isa, threads)
        _plans.keep(key, plan)
    return plan
