"""The tilings that `numflash tune` has found for this machine, kept in a file."""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..jit.system import user_cache
from ..jit.whole import write_whole
from .named import TILINGS
from .plan_cache import forget_plans
from .rules import CHANGEABLE, changeable, changed
from .sizes import Tiling


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
    except (ValueError, RecursionError):  # also of brackets in brackets in brackets
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
            f"{file}: cannot be written: {error.strerror}; allowed: another file, by NUMFLASH_TILINGS "
            "(numflash tune --dry-run needs none)"
        ) from None
    saved.cache_clear()
    forget_plans()
    return file
