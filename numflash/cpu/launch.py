"""From a validated problem to its result on the CPU.

Which launcher, one call at a time where the threads need it.
"""

from __future__ import annotations

import numpy as np

from ..jit import guard, target
from ..jit.scratch import keep
from ..jit.threads import one_at_a_time
from ..validation import Problem
from . import launch_float, launch_int8
from .launch_float import Results


@guard.guarded
def run(
    problem: Problem, isa: str | None = None, results: Results = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """Attention on the CPU by the kernels of `isa` (None: the best of the target).

    They write into `results` where given.
    """
    nb, nh, nkv, length, s, d, dv = problem.shape
    keep((4 * nb * (nh * length + nkv * s) * (d + dv)).bit_length())  # queries, out, K and V
    with one_at_a_time():
        if problem.precision != "int8":
            return launch_float.run(problem, isa, results)
        return launch_int8.run(problem, target.require(isa), results)


def runner(problem: Problem) -> launch_float.FloatPlan | launch_int8.Int8Plan | None:
    """What computes this problem and all with the same shapes and options, if there is such a
    thing.
    """
    if problem.precision == "int8":
        isa = target.require(None)
        return launch_int8.Int8Plan(problem, isa) if launch_int8.is_plain(problem, isa) else None
    isa = launch_float.isa_of(problem)
    return None if isa == "portable" else launch_float.FloatPlan(problem, isa)
