"""A function of a library's, replaced by another under every name that modules hold it by."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

LIBRARIES = ("torch.", "numpy.", "numba.", "llvmlite.", "scipy.", "sympy.")  # do not call it


class Rebinding:
    """While one block or more is entered, modules that hold `theirs` hold `ours`.

    theirs, ours : the functions
    home : the module that defines `theirs`; other modules of `LIBRARIES` are left as they are
    """

    def __init__(self, theirs: Callable[..., Any], ours: Callable[..., Any], home: Any) -> None:
        self.theirs, self._ours, self._home = theirs, ours, home
        self._lock = threading.RLock()  # a signal handler may call as well
        self._names: list[tuple[dict[str, Any], str]] = []  # those bound to ours now
        self._inside = 0

    def enter(self) -> None:
        """Bind the names, also those of modules that were imported since another block began."""
        with self._lock:
            self._inside += 1
            for path, module in list(sys.modules.items()):
                library = path.startswith(LIBRARIES) and module is not self._home
                names = getattr(module, "__dict__", None)
                if not library and isinstance(names, dict):
                    self._bind(names)

    def _bind(self, names: dict[str, Any]) -> None:
        for name in [n for n, x in list(names.items()) if x is self.theirs]:
            names[name] = self._ours
            self._names.append((names, name))

    def leave(self) -> None:
        """Bind them to the library's function again, where no other block is entered."""
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            for names, name in self._names:
                if names.get(name) is self._ours:
                    names[name] = self.theirs
            self._names.clear()
