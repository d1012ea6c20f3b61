"""From a validated problem to the kernels of its gradient.

Packing, options as arrays, and the rows that float32 cannot hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numba
import numpy as np

from ..interop.arrays import to_float32
from ..jit import guard, target
from ..jit.compiler import bare, inline, kernel
from ..jit.memory import fresh
from ..jit.parallel import over_tasks
from ..jit.threads import one_at_a_time
from ..numerics.fixedpoint import LOG2E
from ..validation import LARGEST_LSE, Problem
from .backward import flash_backward
from .backward.backward_rows import Given, make_backward_rows
from .launch_float import heads, semantics, slope_functions

F = np.float32
# scores, and what one row adds to a gradient, stay below in float32
LARGEST_SCORE = 2.0**120
LARGEST_GRADIENT = 2.0**100
INFINITY = np.uint32(0x7F800000)


@inline
def largest_bits(words):
    """The largest magnitude of float32 `words`, as bits."""
    top = np.uint32(0)
    for e in range(words.size):
        top = max(top, np.uint32(words[e] & np.uint32(0x7FFFFFFF)))
    return top


@bare
def _magnitude(row, words, out):
    out[row] = largest_bits(words[row])


@kernel
def _magnitudes(words, out):
    """Write to out (rows,) uint32 the bits of the largest |x| of each row.

    words (rows, columns) are the bits of x, float32.
    """
    over_tasks(_magnitude, words.shape[0], (words, out))


@bare(float_math=True)
def _row_dot(row, a, b, out):
    x, y, total = a[row], b[row], 0.0
    for e in range(x.size):
        total += np.float64(x[e]) * np.float64(y[e])
    out[row] = total


@kernel
def _row_dots(a, b, out):
    """out (rows,) float64 = a . b of each row."""
    over_tasks(_row_dot, a.shape[0], (a, b, out))


def magnitudes(x: np.ndarray) -> np.ndarray:
    """(N, rows, columns) float32 to (N, rows).

    The largest magnitude of each row, infinity for a row that is not finite.
    """
    bits = fresh((x.shape[0] * x.shape[1],), np.uint32)
    _magnitudes(x.view(np.uint32).reshape(-1, x.shape[2]), bits)
    return np.minimum(bits, INFINITY).view(F).reshape(x.shape[:2])


def held_rows(
    problem: Problem,
    q: np.ndarray,
    do: np.ndarray,
    delta: np.ndarray,
    lse: np.ndarray,
    most_k: np.ndarray,
    most_v: np.ndarray,
) -> np.ndarray:
    """(N, L) bool: rows whose scores and gradients float32 holds.

    All finite, and far from the largest float.
    """
    _, nh, nkv, _, _, d, dv = problem.shape
    most_q, most_do = (magnitudes(x).astype(np.float64) for x in (q, do))
    # of the keys of the row's own head, those that are finite
    k, v = (
        np.repeat(np.where(np.isfinite(x), x, 0).max(1).astype(np.float64), nh // nkv)[:, None]
        for x in (most_k, most_v)
    )
    scale = max(1.0, abs(problem.scale))
    with np.errstate(over="ignore", invalid="ignore"):
        of_weights = np.maximum(most_do * v * dv, np.abs(delta)) * scale
        return (
            (most_q * k * d * scale <= LARGEST_SCORE)
            & (np.maximum(most_do, of_weights) <= LARGEST_GRADIENT)
            & (of_weights * np.maximum(most_q, k) <= LARGEST_GRADIENT)
            & (np.abs(lse) < LARGEST_LSE)
        )


@guard.guarded
def run(
    problem: Problem,
    grad_out: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    isa: str | None = None,
    results: Sequence[np.ndarray] | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ (B, H, L, D), dK (B, Hkv, S, D) and dV (B, Hkv, S, Dv) in float32, by the kernels of `isa`
    (None: the best of the target).

    grad_out and out (B, H, L, Dv), lse (B, H, L) float32, of any strides. `results`: contiguous
    zeros that are added to, and returned, where they are given.
    """
    isa = target.require(isa, target.FLOAT_ISAS)
    nb, nh, nkv, length, s, d, dv = problem.shape
    shapes = (nb, nh, length, d), (nb, nkv, s, d), (nb, nkv, s, dv)
    dq, dk, dv_ = results or tuple(np.zeros(shape, F) for shape in shapes)
    gradients = tuple(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in (dq, dk, dv_))
    if 0 not in (nb, length, s):
        q, k, v = (heads(to_float32(x)) for x in (problem.query, problem.key, problem.value))
        with one_at_a_time():
            _solve(problem, isa, (q, k, v, heads(grad_out)), heads(out), heads(lse), gradients)
    return dq, dk, dv_


def _solve(
    problem: Problem,
    isa: str,
    operands: tuple[np.ndarray, ...],
    out: np.ndarray,
    lse: np.ndarray,
    gradients: tuple[np.ndarray, ...],
) -> None:
    q, k, v, do = operands
    delta = fresh(lse.shape, np.float64)
    _row_dots(do.reshape(-1, do.shape[2]), out.reshape(-1, do.shape[2]), delta.reshape(-1))
    padding = np.arange(k.shape[1]) >= np.repeat(problem.key_lengths, problem.shape[2])[:, None]
    most_k, most_v = (np.where(padding, F(np.inf), magnitudes(x)) for x in (k, v))
    empty = np.isneginf(lse)
    held = held_rows(problem, q, do, delta, lse, most_k, most_v)
    units = np.where(
        np.abs(lse) >= LARGEST_LSE,
        np.where(empty, lse, np.inf),
        np.multiply(lse, LOG2E, dtype=np.float64),
    )
    rest = q, k, v, do, units, np.ones(lse.shape), delta
    if isa == "portable":
        _rows(problem, False, np.flatnonzero(held), rest, gradients)
    else:
        flash_backward.run(
            problem,
            isa,
            operands,
            np.where(held, units, np.inf).astype(F),
            delta,
            (~held, ~np.isfinite(most_k) | ~np.isfinite(most_v)),
            gradients,
        )
    if not (held | empty).all():
        _rows(problem, True, np.flatnonzero(~(held | empty)), rest, gradients)


def _rows(
    problem: Problem,
    double: bool,
    todo: np.ndarray,
    rest: tuple[np.ndarray, ...],
    gradients: tuple[np.ndarray, ...],
) -> None:
    """Add the gradients of the rows `todo`, one at a time."""
    _, nh, nkv, length, s, _, _ = problem.shape
    query_pass, key_pass = make_backward_rows(double)
    sinks = (
        np.full(nh, -np.inf)
        if problem.sinks is None
        else np.multiply(problem.sinks, LOG2E, dtype=np.float64)
    )
    limit = np.inf if double else flash_backward.FINITE  # 0 * infinity is no number
    scales = tuple(float(np.clip(x, -limit, limit)) for x in (problem.scale * LOG2E, problem.scale))
    options = semantics(problem)._replace(functions=slope_functions(problem, double))
    threads = numba.get_num_threads()
    given = Given._make((*rest, todo, *scales, options, nh, nkv, s, threads))
    starts = np.searchsorted(todo, np.arange(rest[0].shape[0] + 1) * length)
    query_pass(given, sinks.astype(np.float64), np.zeros(1, np.int64), gradients[0])
    key_pass(given, starts, np.zeros(1, np.int64), *gradients[1:])
