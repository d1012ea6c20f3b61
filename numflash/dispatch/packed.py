"""Packed sequences: attention of each on its own, those that fit together as one batch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..interop.arrays import convert
from ..validation import Problem, scattered, sequences
from .backends import solve

F = np.float32


def solve_packed(
    whole: Problem,
    cuts: tuple[np.ndarray, np.ndarray],
    alignment: str,
    functions: Callable[[Problem, list[int]], Problem] | None,
    impl: str,
) -> tuple[np.ndarray, np.ndarray, list[tuple[Problem, list[int]]]]:
    """out (total_q, H, Dv) and lse (total_q, H), float32, and the batches: problems and which
    sequences they are.

    Parameters
    ----------
    whole : the problem of the packed arrays, (1, H, total, D)
    cuts : (N + 1,) cumulative lengths of queries and of keys
    functions : a batch with the score and mask functions of its sequences, or None
    """
    _, heads, _, total, _, _, dv = whole.shape
    out = np.zeros((total, heads, dv), F)
    lse = np.full((total, heads), -np.inf, F)
    batches = []
    for batch, chosen in sequences(whole, *cuts, alignment):
        problem = batch if functions is None else functions(batch, chosen)
        part, part_lse = solve(problem, impl)
        scattered(out, convert(part, "float32"), cuts[0], chosen)
        if part_lse is not None:
            scattered(lse, part_lse, cuts[0], chosen)
        batches.append((problem, chosen))
    return out, lse, batches
