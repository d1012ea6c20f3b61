"""The tilings that `using` puts in the place of the named ones."""

from __future__ import annotations

from contextvars import ContextVar

from .sizes import Tiling

# (isa, dtype) -> tiling, in this thread of execution
CHOSEN: ContextVar[dict[tuple[str, str], Tiling]] = ContextVar("numflash tilings", default={})  # noqa: B039
