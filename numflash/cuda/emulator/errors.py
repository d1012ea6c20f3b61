"""What the emulator raises: the fault of a handler, which does not know the place yet."""

from __future__ import annotations

from ...errors import EmulatorError

__all__ = ["EmulatorError", "Fault"]


class Fault(Exception):
    """Raised where the rule is broken.

    The machine adds the PTX line and the source line and raises `EmulatorError`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
