"""Names of kernels that are closures: equal in every process, and different for different ones."""

from __future__ import annotations

import hashlib
import re
import types
from collections.abc import Callable
from typing import Any

import numpy as np


def shown_name(function: Any) -> str:
    """Module and name of a kernel; a factory's has a digest of its constants at the end."""
    name = re.sub(r"\.[0-9a-f]{16}$", "", function.__qualname__).rsplit(".", 1)[-1]
    return f"{function.__module__.removeprefix('numflash.')}.{name}"


def shown(options: dict[str, Any]) -> str:
    """JIT options as text that is equal in every process."""
    return repr(sorted((k, sorted(v) if isinstance(v, set) else v) for k, v in options.items()))


EMPTY = types.CellType()  # of a name that is not bound yet


def salt(value: Any) -> str:
    """A closure value as text that is equal in every process (pickling a dispatcher is not)."""
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(map(salt, value)) + ")"
    # a dispatcher's or an intrinsic's own function
    function = getattr(value, "py_func", getattr(value, "_defn", value))
    if hasattr(function, "_named"):  # its name says it all
        return function.__qualname__ + shown(getattr(value, "targetoptions", {}))
    if callable(function):
        cells = getattr(function, "__closure__", None) or ()
        inner = ",".join(salt(cell.cell_contents) for cell in cells if cell != EMPTY)
        name = getattr(function, "__qualname__", type(function).__name__)
        return f"{getattr(function, '__module__', '')}.{name}[{inner}]{shown(getattr(value, 'targetoptions', {}))}"
    if isinstance(value, np.ndarray):  # repr leaves out the middle of a long one
        return f"{value.dtype.str}{value.shape}{hashlib.sha256(value.tobytes()).hexdigest()}"
    return repr(value)


def named(function: Callable) -> Callable:
    """Name a closure after all that it closes over.

    Numba distinguishes the closures of a factory by a counter that starts at zero in every process.
    Two of them, compiled in different processes and loaded from the cache into a third, would share
    a symbol, and one would run the other's code.
    """
    if function.__closure__ and not hasattr(function, "_named"):
        function.__qualname__ += "." + hashlib.sha256(salt(function).encode()).hexdigest()[:16]
        function._named = True  # type: ignore[attr-defined]
    return function
