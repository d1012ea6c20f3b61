"""CUDA kernels written in Python.

Compiled offline, launched through cuda-bindings, or run in the PTX emulator.
"""

from __future__ import annotations

from typing import Any


def emulate(*args: Any, **kwargs: Any) -> Any:
    """Run a kernel in the PTX emulator: see `numflash.cuda.emulator.emulate`."""
    from .emulator import emulate as run

    return run(*args, **kwargs)


__all__ = ["emulate"]
