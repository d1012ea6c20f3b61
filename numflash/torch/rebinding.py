"""A function of a library's, replaced by another under every name that modules hold it by, also as
`torch.compile` has made it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

LIBRARIES = ("torch.", "numpy.", "numba.", "llvmlite.", "scipy.", "sympy.")  # do not call it


class Rebinding:
    """While one block or more is entered, modules that hold `theirs` hold ours.

    theirs : the function
    ours : makes of it, or of what `torch.compile` has made of it, the function in its place
    home : the module that defines `theirs`; other modules of `LIBRARIES` are left as they are
    at_home : whether callers look it up there, and no other module has to be looked through
    """

    def __init__(
        self,
        theirs: Callable[..., Any],
        ours: Callable[..., Any],
        home: Any,
        *,
        at_home: bool = False,
    ) -> None:
        self.theirs, self._ours, self._home, self._at_home = theirs, ours, home, at_home
        self._lock = threading.RLock()  # a signal handler may call as well
        # names that are bound to ours now, what they held, and what they hold
        self._names: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._inside = 0
        # by a module's path: its names' address and number, and those that may hold `theirs`. To look at
        # all names of all modules takes 7 ms.
        self._seen: dict[str, tuple[tuple[int, int], set[str]]] = {}

    def enter(self) -> None:
        """Bind the names, also those of modules that were imported since another block began."""
        with self._lock:
            self._inside += 1
            modules = [("", self._home)] if self._at_home else list(sys.modules.items())
            for path, module in modules:
                names = getattr(module, "__dict__", None)
                library = path.startswith(LIBRARIES) and module is not self._home
                if not library and isinstance(names, dict):
                    for name in self._candidates(path, names):
                        self._bind(names, name)

    def _candidates(self, path: str, names: dict[str, Any]) -> set[str]:
        """The names of a module that may hold the function: looked for where there are others than in
        the last block, and in the main module, whose names are assigned to as people work.
        """
        form = id(names), len(names)
        known, found = self._seen.get(path, ((0, 0), set[str]()))
        if known != form or path == "__main__":
            found = found | {name for name, x in list(names.items()) if self._is_theirs(x)}
            self._seen[path] = form, found
        return found

    def _is_theirs(self, x: Any) -> bool:
        """Whether x is the function, or what `torch.compile` has made of it."""
        if x is self.theirs:
            return True
        made = x.__dict__.get("_torchdynamo_orig_callable") if type(x) is FunctionType else None
        return made is self.theirs

    def _bind(self, names: dict[str, Any], name: str) -> None:
        x = names.get(name)
        if self._is_theirs(x):
            names[name] = ours = self._ours(x)
            self._names.append((names, name, x, ours))

    def leave(self) -> None:
        """Bind them to what they held again, where no other block is entered."""
        with self._lock:
            self._inside -= 1
            if self._inside:
                return
            for names, name, theirs, ours in self._names:
                if names.get(name) is ours:
                    names[name] = theirs
            self._names.clear()
