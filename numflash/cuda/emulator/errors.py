"""What the emulator raises, and the fault that handlers raise before the place is known."""

from __future__ import annotations

from ...errors import NumflashError


class Fault(Exception):
    """Raised where the rule is broken.

    The machine adds the PTX line and the source line and raises `EmulatorError`.
    """

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class EmulatorError(NumflashError, RuntimeError):
    """A kernel broke a rule of the machine.

    Attributes
    ----------
    kind : str
        "out-of-bounds", "misaligned", "uninitialised", "pending" (read before the wait that makes
        it valid), "race", "divergent", "deadlock", "protocol" (a barrier, tensor map or group used
        against its rules) or "unsupported".
    ptx_line : int
        Line in the PTX text.
    source : tuple (file, line) or None
        Line of the kernel in Python.
    """

    def __init__(
        self, kind: str, message: str, ptx_line: int, ptx: str, source: tuple[str, int] | None
    ) -> None:
        place = f"\n  PTX line {ptx_line}: {ptx}"
        if source:
            place += f"\n  source {source[0]}:{source[1]}"
        super().__init__(f"{kind}: {message}{place}")
        self.kind, self.ptx_line, self.source = kind, ptx_line, source
