"""Another tiling than the named one, for a block of code.

    with numflash.tiling.using(block_q=96) as t:
        numflash.attention(q, k, v, precision="int8")

Kernels are compiled for their register tile, so another one is another instruction set to them: its
name carries the tile (`"avx512_vnni:8x2"`), and everything that is made for that name (packing,
products, the fused kernel) has its sizes. `legal` has the rules; INT8 results have the same bits
under every tiling that it lets pass.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from numbers import Integral
from pathlib import Path
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from ..jit.system import user_cache
from ..jit.whole import write_whole
from .named import TILINGS
from .sizes import KEY_BLOCK, Tiling

MOST_ROWS = 1024  # of a query tile: a worker has scores of block_q x key_block three times
# rows of INT8 register tiles are a multiple of it: the last rows are computed by twos
UNIT_ROWS = 2
MOST_VECTORS = 4  # of a float register tile: its rows of scores are computed by 1 to 4 vectors
VECTOR_REGISTERS = {"avx2": 16, "avx_vnni": 16}  # 32 elsewhere
CHANGEABLE = ("mr", "nv", "block_q", "key_block")

# (isa, dtype) -> the tiling that replaces the named one in this thread of execution
CHOSEN: ContextVar[dict[tuple[str, str], Tiling]] = ContextVar("numflash tilings", default={})  # noqa: B039


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


@contextmanager
def using(isa: str | Tiling | None = None, dtype: str = "int8", **changes: int) -> Iterator[Tiling]:
    """Calls in this block of code use another tiling.

    Parameters
    ----------
    isa : str, Tiling or None
        Instruction set, None for the one that this machine's INT8 kernels use; or a whole tiling.
    dtype : "int8", "float32" or "bfloat16"
        The operands of the kernels that change.
    changes : mr, nv, block_q, key_block
        New sizes. `mr` x `nv` vectors is the register tile, `block_q` the query rows of a tile;
        `key_block`, the keys of a block, can change in float kernels only. Of a new register tile
        they follow as near to the named sizes as whole tiles are.

    Yields the tiling. Only calls of this thread (and of this `contextvars` context) change, and the
    first one compiles its kernel. INT8 results keep their bits; float results change by rounding.

    Raises
    ------
    ArgumentError
        If no kernel can be made for it, with the rule that it breaks.
    UnsupportedError
        If the kernels have fixed sizes.
    """
    if isinstance(isa, Tiling):
        t = changed(isa, changes)
    else:
        if isa is None:
            from ..jit.target import ISAS, available

            if dtype != "int8":
                raise ArgumentError(
                    f"isa: needed with dtype {dtype!r}; allowed: as in {changeable()}"
                )
            isa = available(ISAS)[0]
        name = isa if isinstance(isa, str) and isa in TILINGS else f"{isa}-{dtype}"
        if name not in TILINGS:
            raise ArgumentError(f"tiling: got {name!r}; allowed: {', '.join(changeable())}")
        t = changed(TILINGS[name], changes)
    token = CHOSEN.set({**CHOSEN.get(), (t.isa, t.dtype): t})
    try:
        yield t
    finally:
        CHOSEN.reset(token)


def file_of_choices() -> Path:
    """Where `numflash tune` keeps this user's tilings: NUMFLASH_TILINGS, or a file in ~/.cache."""
    named = os.environ.get("NUMFLASH_TILINGS")
    return Path(named) if named else user_cache() / "numflash" / "tilings.json"


def _nested(x: Any, depth: int) -> bool:
    """Whether x is a dict of dicts, so many of them below it."""
    return isinstance(x, dict) and (not depth or all(_nested(y, depth - 1) for y in x.values()))


def _contents(file: Path) -> dict[str, dict[str, dict[str, int]]]:
    """CPU name -> tiling name -> sizes that differ from the named ones."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        if not _nested(found, 2):
            raise ValueError
    except OSError:
        return {}
    except ValueError:
        raise ArgumentError(
            f"{file}: not a file of tilings; allowed: as numflash tune writes it, or no file"
        ) from None
    return found


@functools.cache
def saved() -> dict[str, Tiling]:
    """Tilings kept for this machine by name, from `file_of_choices`; read once, and checked."""
    from ..jit.target import cpu_name

    file = file_of_choices()
    chosen = _contents(file).get(cpu_name(), {})
    for name in chosen:
        if name not in changeable():
            raise ArgumentError(f"{file}: no tiling {name!r}; allowed: {changeable()}")
    try:
        return {name: changed(TILINGS[name], sizes) for name, sizes in chosen.items()}
    except ArgumentError as error:
        raise ArgumentError(f"{file}: {error}, or no file") from None


def save(t: Tiling) -> Path:
    """Keep a tiling for this machine; the named one is forgotten instead. Returns the file."""
    from ..jit.target import cpu_name
    from .store import forget_plans

    name, file = f"{t.isa}-{t.dtype}", file_of_choices()
    everything = _contents(file)
    mine = everything.setdefault(cpu_name(), {})
    mine[name] = {
        x: getattr(t, x) for x in CHANGEABLE if getattr(t, x) != getattr(TILINGS[name], x)
    }
    if not mine[name]:
        del mine[name]
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, (json.dumps(everything, indent=1) + "\n").encode())
    except OSError as error:
        raise ArgumentError(
            f"{file}: cannot be written: {error.strerror}; allowed: another NUMFLASH_TILINGS"
        ) from None
    saved.cache_clear()
    forget_plans()
    return file


def in_use(isa: str, dtype: str = "int8") -> Tiling:
    """The tiling that the next call takes.

    `using`'s, this machine's (`saved`), or the named one.
    """
    return (
        CHOSEN.get().get((isa, dtype)) or saved().get(f"{isa}-{dtype}") or TILINGS[f"{isa}-{dtype}"]
    )


def _with_tile(t: Tiling, named: Tiling) -> str:
    """An instruction set as kernels call it: with the register tile where that is not the named one's."""
    return t.isa if (t.mr, t.nv) == (named.mr, named.nv) else f"{t.isa}:{t.mr}x{t.nv}"


def chosen_float(isa: str, dtype: str) -> tuple[str, tuple[int, ...], int]:
    """For the float kernels of an instruction set: its name with the register tile in use,
    (key_block,) where that or the tile is not the named tiling's, and block_q.
    """
    t, named = in_use(isa, dtype), TILINGS[f"{isa}-{dtype}"]
    name = _with_tile(t, named)
    same = name == isa and t.key_block == named.key_block
    return name, () if same else (t.key_block,), t.block_q


def chosen(isa: str) -> tuple[str, tuple[int, ...]]:
    """For the INT8 kernels of an instruction set: its name with the register tile in use, and
    (block_q,) where that is not the named tiling's.
    """
    if isa == "portable":
        return isa, ()
    t, named = in_use(isa), TILINGS[f"{isa}-int8"]
    if t is named:
        return isa, ()
    name = _with_tile(t, named)
    return name, () if name == isa and t.block_q == named.block_q else (t.block_q,)
