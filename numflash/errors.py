"""The exceptions that numflash raises on purpose.

Each message names the argument, what came and what is allowed.
"""

from __future__ import annotations


class NumflashError(Exception):
    """Base of every error raised on purpose."""


class ArgumentError(NumflashError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(NumflashError, TypeError):
    """An argument has a type or dtype that is not allowed."""


class UnsupportedError(NumflashError, RuntimeError):
    """The request is valid, but this machine, target or implementation cannot serve it."""


class DriverError(UnsupportedError):
    """The CUDA driver refused a call; the message has its words."""


class CacheFullError(NumflashError, RuntimeError):
    """A KV cache has no room for the tokens to append."""


class StateError(NumflashError, RuntimeError):
    """A method of `DecodeEngine` was called in a state that does not allow it."""


class GuardError(NumflashError, RuntimeError):
    """NUMFLASH_GUARD=1 found a kernel that wrote beyond a buffer, or read what nobody wrote.

    This is a fault of numflash, not of the caller.
    """


class EmulatorError(NumflashError, RuntimeError):
    """A CUDA kernel broke a rule of the machine in the emulator.

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
