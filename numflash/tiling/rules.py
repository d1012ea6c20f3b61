"""Which sizes of a tiling can be changed, and to what: the rules of the register tile kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from numbers import Integral
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from .named import TILINGS
from .sizes import KEY_BLOCK, Tiling

MOST_ROWS = 1024  # of a query tile: a worker has scores of block_q x key_block three times
# rows of INT8 register tiles are a multiple of it: the last rows are computed by twos
UNIT_ROWS = 2
MOST_VECTORS = 4  # of a float register tile: its rows of scores are computed by 1 to 4 vectors
VECTOR_REGISTERS = {"avx2": 16, "avx_vnni": 16}  # 32 elsewhere
CHANGEABLE = ("mr", "nv", "block_q", "key_block")


def _refuse(t: Tiling, field: str, rule: str, allowed: str) -> ArgumentError:
    return ArgumentError(
        f"tiling {t.name!r}: {field} = {getattr(t, field)} breaks a rule: {rule}; allowed: {allowed}"
    )


def registers(t: Tiling) -> int:
    """Vector registers that a register tile takes.

    Its accumulators, one row of B, and a splat of A.
    """
    return t.accumulators + t.nv + 1


def _fixed_matrix_tile(t: Tiling, named: Tiling) -> None:
    for field in ("mr", "nv"):
        if getattr(t, field) != getattr(named, field):
            raise _refuse(
                t,
                field,
                "2 x 2 matrix tiles of 16 x 16 are all that AMX has registers for",
                f"{getattr(named, field)}",
            )


def _fit_registers(t: Tiling) -> None:
    most = VECTOR_REGISTERS.get(t.isa, 32)
    if registers(t) > most:
        raise ArgumentError(
            f"tiling {t.name!r}: mr x nv = {t.mr} x {t.nv} breaks a rule: {t.accumulators} accumulators, {t.nv} vectors "
            f"of B and one of A take {registers(t)} registers of {most}; allowed: mr * nv + nv + 1 <= {most}"
        )


def _legal_int8(t: Tiling, named: Tiling) -> None:
    if t.key_block != KEY_BLOCK:
        raise _refuse(
            t,
            "key_block",
            "softmax weights are rounded once per row and block of keys, so another block gives other bits",
            f"{KEY_BLOCK}",
        )
    if t.isa == "amx_int8":
        _fixed_matrix_tile(t, named)
        return
    if t.mr % UNIT_ROWS:
        raise _refuse(t, "mr", "the last rows of a tile are computed by twos", "an even number")
    panels = [n for n in (2, 4, 8, 16) if KEY_BLOCK // 2 % (n * t.lanes) == 0]
    if t.nv not in panels:
        raise _refuse(
            t,
            "nv",
            f"scores are narrowed two vectors at a time, and panels of nv * {t.lanes} keys fill half a block of 64",
            ", ".join(map(str, panels)),
        )
    _fit_registers(t)


def _legal_float(t: Tiling, named: Tiling) -> None:
    if t.isa == "amx_bf16":
        _fixed_matrix_tile(t, named)
    elif t.nv > MOST_VECTORS:
        raise _refuse(t, "nv", "a panel of keys is a few vectors wide", f"1 to {MOST_VECTORS}")
    else:
        _fit_registers(t)
    if t.key_block > MOST_ROWS:
        raise _refuse(t, "key_block", "the scores of a tile stay in cache", f"up to {MOST_ROWS}")


def legal(t: Tiling) -> Tiling:
    """The tiling itself, if a kernel can be made for it.

    Raises
    ------
    ArgumentError
        That names the size, the rule that it breaks, and what is allowed.
    UnsupportedError
        If the kernels of its instruction set have fixed sizes (CUDA, portable).
    """
    named = TILINGS.get(f"{t.isa}-{t.dtype}")
    if t.device != "cpu" or t.isa == "portable" or named is None:
        raise UnsupportedError(
            f"tiling {t.name!r}: its sizes are fixed; allowed: those of register tile kernels, "
            + ", ".join(sorted(changeable()))
        )
    if t.lanes != named.lanes:
        raise _refuse(t, "lanes", "a vector has as many as the CPU makes them", f"{named.lanes}")
    (_legal_int8 if t.dtype == "int8" else _legal_float)(t, named)
    unit = math.lcm(t.mr, UNIT_ROWS)
    if t.block_q % unit:
        raise _refuse(
            t, "block_q", "a query tile is whole register tiles high", f"multiples of {unit}"
        )
    if t.block_q > MOST_ROWS:
        raise _refuse(
            t, "block_q", "every worker has scores for a whole tile", f"up to {MOST_ROWS}"
        )
    return t


def changeable() -> list[str]:
    """Names of the tilings that `using` takes."""
    return [
        name
        for name, t in TILINGS.items()
        if t.device == "cpu" and t.isa != "portable" and name == f"{t.isa}-{t.dtype}"
    ]


def changed(named: Tiling, changes: dict[str, Any]) -> Tiling:
    """A named tiling with other sizes, checked."""
    for field, value in changes.items():
        if field not in CHANGEABLE:
            raise ArgumentError(
                f"{field}: not a size of a tiling; allowed: {', '.join(CHANGEABLE)}"
            )
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ArgumentError(f"{field}: got {value!r}; allowed: an integer")
    changes = {field: int(value) for field, value in changes.items()}
    if "mr" in changes and "block_q" not in changes:  # as near to the named rows as whole tiles are
        unit = math.lcm(max(1, changes["mr"]), UNIT_ROWS)
        changes = {**changes, "block_q": max(unit, named.block_q // unit * unit)}
    if named.dtype != "int8" and "nv" in changes and "key_block" not in changes:
        panel = max(1, changes["nv"]) * named.lanes
        changes = {**changes, "key_block": max(panel, named.key_block // panel * panel)}
    return legal(replace(named, **changes))
