"""CUDA kernels written in Python, and one launcher for each job.

`launch_float`, `launch_int8`, `launch_decode`, `launch_backward`.

Kernels are compiled offline (`compile`) and launched through cuda-bindings (`device`) or run in the
PTX emulator. May import: `validation`, `numerics`, `interop`, `tiling`, `jit`, `errors`; never `cpu` or
the oracle.
"""

from __future__ import annotations

from typing import Any


def emulate(*args: Any, **kwargs: Any) -> Any:
    """Run a kernel in the PTX emulator: see `numflash.cuda.emulator.emulate`."""
    from .emulator import emulate as run

    return run(*args, **kwargs)


__all__ = ["emulate"]
