"""From the operands of a problem to the tiled gradient.

Shares of the work, scratch memory by name, and the sums of copies.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ...jit.scratch import scratch
from ...numerics.fixedpoint import LOG2E
from ...validation import Problem
from ..floats.float_isas import FLOAT_ISAS
from ..isa.isas import padded
from . import flash_backward
from .head_rows import add_parts, make_head_rows
from .held import Found
from .operands import (
    KEYS,
    QUERIES,
    Factors,
    Gradients,
    Operands,
    Prepared,
    Scratch,
    Sizes,
    options_of,
)

F = np.float32
TASKS = 16  # shares that a problem is cut into, at least, where it has so many key blocks
FINITE = float(np.finfo(F).max)
Kinds = dict[str, tuple[Any, tuple[int, ...]]]  # names, dtypes and shapes of arrays


def run(
    problem: Problem,
    isa: str,
    operands: tuple[np.ndarray, ...],
    found: Found,
    gradients: tuple[np.ndarray, ...],
) -> None:
    """dQ, dK and dV of all rows that float32 holds, by the kernel of `isa`.

    operands q (N, L, D), k (Nkv, S, D), v (Nkv, S, Dv), do (N, L, Dv) float32, contiguous; found as
    `held.examine` finds it; gradients as q, k and v, written.
    """
    _, nh, nkv, _, s, _, _ = problem.shape
    q, k, v, do = operands
    dq, dk, dv = gradients
    n, group = q.shape[0], nh // nkv
    workers = numba.get_num_threads()
    splits = max(1, min(-(-TASKS // n), -(-s // flash_backward.keys_of_block(isa))))
    factor, scale = (
        F(min(max(x, -FINITE), FINITE)) for x in (problem.scale * LOG2E, problem.scale)
    )
    kinds = (
        _scratch_kinds(problem, isa, workers)
        | _prepared_kinds(problem, isa, workers if splits == 1 else n, splits)
        | (_copy_kinds(problem, n) if group > 1 else {})
    )
    with scratch.arrays({f"backward {name}": kind for name, kind in kinds.items()}) as arrays:
        named = dict(zip(kinds, arrays, strict=True))
        room = Prepared._make(named[name] for name in Prepared._fields)
        stored = (named["copies of dk"], named["copies of dv"]) if group > 1 else (dk, dv)
        skip = found.held[:, :0] if found.held.all() else ~found.held
        if splits > 1:
            prepare_all = make_head_rows(isa).prepare_all
            prepare_all(q, skip, room.q, room.q_packed)
            prepare_all(do, skip, room.do, room.do_packed)
        flash_backward.make_backward(isa)(
            Operands(q, k, v, do, skip, found.lse, found.delta),
            Factors(factor, scale, F(1) if group > 1 else scale),
            options_of(problem, found.hidden),
            Sizes(nh, nkv, s, splits, workers),
            np.zeros(1, np.int64),
            _scratch_of(named),
            room,
            Gradients(dq, *stored),
        )
        if splits > 1:
            add_parts(room.dq, scale, dq)
        if group > 1:
            for part, by, whole in zip(stored, (scale, F(1)), (dk, dv), strict=True):
                add_parts(part.reshape(-1, group, *part.shape[1:]), by, whole)


def _columns(problem: Problem, isa: str) -> tuple[int, int]:
    """Columns of Q and K, and of V and dO: whole vectors, and whole steps of products."""
    unit = max(FLOAT_ISAS[isa].lanes, FLOAT_ISAS[isa].step)
    return padded(problem.shape[5], unit), padded(problem.shape[6], unit)


def _operand(isa: str) -> Any:
    """The dtype of an instruction set's operands; bfloat16 as bits."""
    return F if FLOAT_ISAS[isa].group == 1 else np.uint16


def _scratch_kinds(problem: Problem, isa: str, workers: int) -> Kinds:
    """The arrays of `Scratch`; float32 has no memory of its own for some."""
    operand, (wide, columns) = _operand(isa), _columns(problem, isa)
    tile = workers, KEYS * QUERIES
    turned = workers, (QUERIES + FLOAT_ISAS[isa].rows) * KEYS
    of_keys, of_values = (workers, KEYS, wide), (workers, KEYS, columns)
    kinds: Kinds = {
        "scores": (F, tile),
        "slopes": (F, tile),
        "transposed": (F, turned),
        "k": (operand, of_keys),
        "v": (operand, of_values),
        "dk": (F, of_keys),
        "dv": (F, of_values),
    }
    if FLOAT_ISAS[isa].group == 2:
        kinds |= {
            "p": (operand, tile),
            "ds": (operand, tile),
            "ds_turned": (operand, turned),
            "k_right": (operand, of_keys),
            "room": (F, (workers, KEYS * max(wide, columns))),
        }
    return kinds


def _prepared_kinds(problem: Problem, isa: str, slots: int, splits: int) -> Kinds:
    """The arrays of `Prepared`, for so many heads at a time."""
    operand, (wide, columns) = _operand(isa), _columns(problem, isa)
    high = padded(problem.shape[3], FLOAT_ISAS[isa].panel)
    return {
        "q": (operand, (slots, high, wide)),
        "q_packed": (operand, (slots, high * wide)),
        "do": (operand, (slots, high, columns)),
        "do_packed": (operand, (slots, high * columns)),
        "dq": (F, (slots, splits, high + FLOAT_ISAS[isa].rows, wide)),
    }


def _copy_kinds(problem: Problem, n: int) -> Kinds:
    """dK and dV of each of n query heads, where several share keys."""
    _, _, _, _, s, d, dv = problem.shape
    return {"copies of dk": (F, (n, s, d)), "copies of dv": (F, (n, s, dv))}


def _scratch_of(named: dict[str, np.ndarray]) -> Scratch:
    """`Scratch` of arrays by name; empty ones where there is none."""
    none = dict.fromkeys(Scratch._fields, named["scores"][:, :0])
    none["k_right"] = named["k"][:, :0]
    return Scratch._make(named.get(name, none[name]) for name in Scratch._fields)
