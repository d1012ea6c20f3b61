"""The exceptions that numflash raises on purpose.

Each message names the argument, what came and what is allowed.
"""


class NumflashError(Exception):
    """Base of every error raised on purpose."""


class ArgumentError(NumflashError, ValueError):
    """An argument has a value that is not allowed."""


class ArgumentTypeError(NumflashError, TypeError):
    """An argument has a type or dtype that is not allowed."""


class UnsupportedError(NumflashError, RuntimeError):
    """The request is valid, but this machine, target or implementation cannot serve it."""


class CacheFullError(NumflashError, RuntimeError):
    """A KV cache has no room for the tokens to append."""


class GuardError(NumflashError, RuntimeError):
    """NUMFLASH_GUARD=1 found a kernel that wrote beyond a buffer, or read what nobody wrote.

    This is a fault of numflash, not of the caller.
    """
