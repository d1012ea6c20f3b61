"""From the operands of a problem to the tiled gradient.

Shares of the work, scratch memory by name, and the sums of copies.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.scratch import Places, scratch
from ...jit.threads import count
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
    workers = count()
    splits = max(1, min(-(-TASKS // n), -(-s // flash_backward.keys_of_block(isa))))
    factor, scale = (
        F(min(max(x, -FINITE), FINITE)) for x in (problem.scale * LOG2E, problem.scale)
    )
    with scratch.built(_places(isa, problem.shape, workers, splits)) as (own, room, copies):
        stored = copies or (dk, dv)
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
            own,
            room,
            Gradients(dq, *stored),
        )
        if splits > 1:
            add_parts(room.dq, scale, dq)
        if group > 1:
            for part, by, whole in zip(stored, (scale, F(1)), (dk, dv), strict=True):
                add_parts(part.reshape(-1, group, *part.shape[1:]), by, whole)


class Memory(NamedTuple):
    """Scratch memory of a call."""

    own: Scratch
    prepared: Prepared
    copies: tuple[np.ndarray, ...]  # dK and dV of each query head, where several share keys


@functools.lru_cache(64)
def _places(isa: str, shape: tuple[int, ...], workers: int, splits: int) -> Places:
    """Where the arrays of `Memory` are, for a problem's shape."""
    nb, nh, nkv, length, s, d, dv = shape
    n, copied = nb * nh, nh > nkv
    kinds = _scratch_kinds(isa, (d, dv), workers)
    kinds |= _prepared_kinds(isa, (length, d, dv), workers if splits == 1 else n, splits)
    if copied:
        kinds |= {"copies of dk": (F, (n, s, d)), "copies of dv": (F, (n, s, dv))}

    def build(arrays: dict[str, np.ndarray]) -> Memory:
        named = dict(zip(kinds, arrays.values(), strict=True))
        room = Prepared._make(named[name] for name in Prepared._fields)
        copies = (named["copies of dk"], named["copies of dv"]) if copied else ()
        return Memory(_scratch_of(named), room, copies)

    return Places({f"backward {name}": kind for name, kind in kinds.items()}, build)


def _columns(isa: str, sizes: tuple[int, int]) -> tuple[int, int]:
    """Columns of Q and K, and of V and dO: whole vectors, and whole steps of products."""
    unit = max(FLOAT_ISAS[isa].lanes, FLOAT_ISAS[isa].step)
    return padded(sizes[0], unit), padded(sizes[1], unit)


def _operand(isa: str) -> Any:
    """The dtype of an instruction set's operands; bfloat16 as bits."""
    return F if FLOAT_ISAS[isa].group == 1 else np.uint16


def _scratch_kinds(isa: str, sizes: tuple[int, int], workers: int) -> Kinds:
    """The arrays of `Scratch`; float32 has no memory of its own for some."""
    operand, (wide, columns) = _operand(isa), _columns(isa, sizes)
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


def _prepared_kinds(isa: str, sizes: tuple[int, int, int], slots: int, splits: int) -> Kinds:
    """The arrays of `Prepared`, for so many heads at a time; sizes: L, D, Dv."""
    operand, (wide, columns) = _operand(isa), _columns(isa, sizes[1:])
    high = padded(sizes[0], FLOAT_ISAS[isa].panel)
    return {
        "q": (operand, (slots, high, wide)),
        "q_packed": (operand, (slots, high * wide)),
        "do": (operand, (slots, high, columns)),
        "do_packed": (operand, (slots, high * columns)),
        "dq": (F, (slots, splits, high + FLOAT_ISAS[isa].rows, wide)),
    }


def _scratch_of(named: dict[str, np.ndarray]) -> Scratch:
    """`Scratch` of arrays by name; empty ones where there is none."""
    none = dict.fromkeys(Scratch._fields, named["scores"][:, :0])
    none["k_right"] = named["k"][:, :0]
    return Scratch._make(named.get(name, none[name]) for name in Scratch._fields)
