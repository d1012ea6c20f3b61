"""Packed sequences: attention of each on its own, and its gradient, those that fit together as one
batch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..interop.arrays import convert
from ..validation import Problem, gathered, scattered, sequences
from .backends import solve, solve_backward

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


Gradient = tuple[np.ndarray, np.ndarray, np.ndarray]
Operands = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]


def differentiate_packed(
    whole: Problem,
    operands: Operands,
    cuts: tuple[np.ndarray, np.ndarray],
    alignment: str,
    functions: Callable[[Problem, list[int]], Problem] | None,
    impl: str,
) -> Gradient:
    """dq (total_q, H, D), dk (total_k, Hkv, D) and dv (total_k, Hkv, Dv), float32.

    Parameters
    ----------
    whole, cuts, functions : as for `solve_packed`
    operands : grad_out, out (1, H, total_q, Dv), lse and grad_lse (1, H, total_q), the last may be None
    """
    _, heads, kv_heads, total, keys, d, dv = whole.shape
    dq, dk = np.zeros((total, heads, d), F), np.zeros((keys, kv_heads, d), F)
    dv_ = np.zeros((keys, kv_heads, dv), F)
    for batch, chosen in sequences(whole, *cuts, alignment):
        problem = batch if functions is None else functions(batch, chosen)
        found = solve_backward(*_own_rows(problem, operands, cuts[0], chosen), impl)
        for to, part, cu in zip((dq, dk, dv_), found, (cuts[0], cuts[1], cuts[1]), strict=True):
            scattered(to, convert(part, "float32"), cu, chosen)
    return dq, dk, dv_


def _own_rows(
    problem: Problem, operands: Operands, cu: np.ndarray, chosen: list[int]
) -> tuple[Problem, Operands]:
    """The problem of a batch and the operands of its gradient. The rows that fill up a sequence are
    those of others: they become zeros that attend to no key.
    """
    at, lengths = cu[:-1][chosen], np.diff(cu)[chosen]
    rows = np.arange(problem.shape[3])
    there = (rows < lengths[:, None])[:, None]
    whole = bool(there.all())

    def own(x: np.ndarray, other: float) -> np.ndarray:
        return x if whole else np.where(there[..., None], x, x.dtype.type(other))

    def of_rows(x: np.ndarray, other: float) -> np.ndarray:
        return own(gathered(x[..., None], at, lengths), other)[..., 0]

    grad_out, out, lse, grad_lse = operands
    return problem.changed(query=own(problem.query, 0)), (
        own(gathered(grad_out, at, lengths), 0),
        own(gathered(out, at, lengths), 0),
        of_rows(lse, -np.inf),
        None if grad_lse is None else of_rows(grad_lse, 0),
    )
