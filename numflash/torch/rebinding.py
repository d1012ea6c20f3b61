"""A function of a library's, replaced by another under every name that modules hold it by, also as
`torch.compile` has made it.
"""

from __future__ import annotations

import operator
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any

LIBRARIES = ("torch.", "numpy.", "numba.", "llvmlite.", "scipy.", "sympy.")  # do not call it


@dataclass
class _Listing:
    """What a block has found, kept for the next one: to look at all names of all modules takes many ms.

    modules : all of them
    spaces : the names of those that are looked through;  sizes : how many each had, -1 before
    found : those that may hold the function, by the address of the module's
    """

    modules: list[Any]
    spaces: list[dict[str, Any]]
    sizes: list[int]
    found: dict[int, tuple[dict[str, Any], frozenset[str]]]

    def is_of(self, modules: list[Any]) -> bool:
        """Whether these are the modules."""
        return len(modules) == len(self.modules) and all(map(operator.is_, modules, self.modules))


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
        self._listing = _Listing([], [], [], {})

    def enter(self) -> None:
        """Bind the names, also those of modules that were imported since another block began."""
        with self._lock:
            self._inside += 1
            for names, found in self._look():
                for name in found:
                    self._bind(names, name)

    def _look(self) -> list[tuple[dict[str, Any], frozenset[str]]]:
        """Names that may hold the function: looked for in modules that have others than in the last block,
        and in the main module, whose names are assigned to as people work.
        """
        modules = [self._home] if self._at_home else list(sys.modules.values())
        listing = self._listing
        if not listing.is_of(modules):
            self._listing = listing = self._listed(listing)
        sizes = list(map(len, listing.spaces))
        if sizes != listing.sizes:
            for names, size, before in zip(listing.spaces, sizes, listing.sizes, strict=True):
                if size != before:
                    self._look_in(names, listing)
            listing.sizes = sizes
        if not self._at_home:
            self._look_in(getattr(sys.modules.get("__main__"), "__dict__", {}), listing)
        return list(listing.found.values())

    def _listed(self, before: _Listing) -> _Listing:
        """The modules that there are now, with what is known of them."""
        items = [("", self._home)] if self._at_home else list(sys.modules.items())
        spaces = {}
        for path, module in items:
            names = getattr(module, "__dict__", None)
            library = path.startswith(LIBRARIES) and module is not self._home
            if not library and isinstance(names, dict):
                spaces[id(names)] = names
        known = dict(zip(map(id, before.spaces), before.sizes, strict=True))
        return _Listing(
            [module for _, module in items],
            list(spaces.values()),
            [known.get(n, -1) for n in spaces],
            {n: x for n, x in before.found.items() if n in spaces},
        )

    def _look_in(self, names: dict[str, Any], listing: _Listing) -> None:
        found = frozenset(name for name, x in list(names.items()) if self._is_theirs(x))
        if found:
            _, known = listing.found.get(id(names), (names, frozenset()))
            listing.found[id(names)] = names, known | found

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
