"""When two functions are the same to a tracer: of one code, naming equal numbers and the same objects.

A lambda in a loop is a new function every time; its code and what its cells hold are not new.
"""

from __future__ import annotations

import types
from typing import Any

import numpy as np

EMPTY = types.CellType()  # of a name that is bound later
PLAIN = (int, bool, str, types.NoneType)


def identity(value: Any, held: list[Any]) -> Any:
    """A key that two values share only if a tracer cannot tell them apart.

    Numbers and strings are the same if they are equal, floats bit for bit. Functions are if they
    share code and globals, and if what their cells and defaults hold is the same. All else is by
    its address, and appended to `held`: the key is good as long as that list lives. What a function
    finds in its globals is not in the key.
    """
    if type(value) is types.FunctionType:
        return _of_function(value, held)
    if type(value) in PLAIN:
        return type(value), value
    if type(value) is float:
        return float, value.hex()
    if isinstance(value, (np.number, np.bool_)):
        return value.dtype, value.tobytes()
    held.append(value)
    return id(value)


def same(x: Any, y: Any) -> bool:
    """Whether two values are the same to a tracer."""
    held: list[Any] = []
    return identity(x, held) == identity(y, held)


def _of_function(f: types.FunctionType, held: list[Any]) -> Any:
    code, names = f.__code__, f.__globals__
    known = id(code), id(names)
    cells, defaults, named = f.__closure__, f.__defaults__, f.__kwdefaults__
    if not (cells or defaults or named or f.__dict__):
        held += code, names
        return known
    if any(x is f for x in held):  # it names itself
        return id(f)
    held += code, names, f
    captured = [x != EMPTY and identity(x.cell_contents, held) for x in cells or ()]
    given = [identity(x, held) for x in defaults or ()]
    options = [
        (name, identity(x, held)) for name, x in [*(named or {}).items(), *f.__dict__.items()]
    ]
    return known, tuple(captured), tuple(given), tuple(options)
