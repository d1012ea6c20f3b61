"""The only import of numba-cuda, and every private name of it that numflash uses
(tests/cuda/test_compile.py is the canary).

A second front end should be a matter of this file and `instructions`: docs/pitfalls.md, "The future of
numba.cuda".
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from ...errors import UnsupportedError

_absent: Exception | None = None
try:
    import numba.cuda.dispatcher as _dispatcher
    import numba_cuda
    from cuda.bindings import nvjitlink as _nvjitlink
    from cuda.bindings import nvvm as _nvvm
    from numba import cuda
    from numba.cuda import types
    from numba.cuda.compiler import compile_cuda, kernel_fixup
    from numba.cuda.cudadrv import driver as _driver
    from numba.cuda.cudadrv import nvvm
    from numba.cuda.extending import intrinsic
    from numba.cuda.typing import signature
# No compiler, or one that does not go with this Numba, which raises what it likes: the kernels'
# modules can be imported, and ready cubins of them launched.
except Exception as error:
    from numba import types
    from numba.core.typing import signature

    _absent = error
    numba_cuda = None
    cuda = None

    def intrinsic(function: Any) -> Any:
        """The function itself: nothing is compiled."""
        return function


__all__ = [
    "cuda",
    "device_function",
    "intrinsic",
    "library_version",
    "numba_cuda_version",
    "signature",
    "to_cubin",
    "to_linked_ptx",
    "to_ptx",
    "types",
]

_numpy: Any = np
numba_cuda_version: str = numba_cuda.__version__ if numba_cuda else "none"


def _need_compiler() -> None:
    if _absent is not None:
        raise UnsupportedError(
            f"numflash.cuda needs the compiler wheels, in versions that go together: pip install 'numflash[cuda]' "
            f"({type(_absent).__name__}: {_absent})"
        ) from _absent


def library_version(wheel: str) -> str:
    """The version that a compiler library itself reports.

    The library of a CUDA toolkit where the wheel is not installed.
    """
    _need_compiler()
    library = {"nvidia-nvvm": _nvvm, "nvidia-nvjitlink": _nvjitlink}.get(wheel)
    if library is None:
        return "none"
    return "toolkit " + ".".join(str(n) for n in library.version())


def device_function(function: Any) -> Any:
    """A function that kernels call and that is always compiled into them.

    Fragments passed to it stay in registers.
    """
    return cuda.jit(device=True, forceinline=True)(function) if cuda else function


class _OfflineDevice:
    """Answers device functions, which ask the driver for a compute capability when they are
    compiled.
    """

    def __init__(self, cc: tuple) -> None:
        self.compute_capability = cc[:2]


@contextlib.contextmanager
def _offline(cc: tuple) -> Iterator[None]:
    real = _dispatcher.get_current_device
    shim = not hasattr(np, "row_stack")
    _dispatcher.get_current_device = lambda: _OfflineDevice(cc)
    if shim:
        _numpy.row_stack = np.vstack  # numba-cuda uses a name that NumPy 2.5 has dropped
    try:
        yield
    finally:
        _dispatcher.get_current_device = real
        if shim:
            del _numpy.row_stack


def missing_labels(ptx: str) -> set[str]:
    """Labels that are branched to and not defined."""
    return set(re.findall(r"\bbra(?:\.uni)?\s+(\$\w+);", ptx)) - set(
        re.findall(r"^(\$\w+):", ptx, re.M)
    )


def to_ptx(function: Any, sig: Any, cc: tuple, launch_bounds: tuple, fastmath: bool) -> str:
    """PTX text with `.loc` lines; cc (9, 0, "a") selects sm_90a. Needs no driver.

    NVVM 13.5 with line numbers leaves out the label of a block that other blocks fall through to
    and a branch leads to as well, or refuses the kernel (one in twenty, either way): then the text
    is made without line numbers.
    """

    def text(lines: bool) -> str:
        return cuda.compile_ptx(
            function, sig, cc=cc, launch_bounds=launch_bounds, lineinfo=lines, fastmath=fastmath
        )[0]

    _need_compiler()
    with _offline(cc):
        with contextlib.suppress(_nvvm.nvvmError):
            found = text(True)
            if not missing_labels(found):
                return found
        return text(False)


@contextlib.contextmanager
def _linker_logs() -> Iterator[list[str]]:
    """What the linker of numba-cuda says while kernels are linked."""
    logs: list[str] = []
    close = _driver._Linker.close

    def noted(linker: Any) -> None:
        logs.append(linker.linker.get_info_log() or "")
        close(linker)

    _driver._Linker.close = noted
    try:
        yield logs
    finally:
        _driver._Linker.close = close


def remarks_of(log: str) -> tuple[str, ...]:
    """The numbers of ptxas's remarks in a log: "C7517" says that it has added a wait."""
    return tuple(sorted(set(re.findall(r"\((C\d{4})\)", log))))


def _library(
    function: Any,
    sig: Any,
    cc: tuple,
    launch_bounds: tuple,
    fastmath: bool,
    max_registers: int | None,
) -> tuple[str, Any]:
    """Entry name and numba-cuda's library of a kernel, as LTO-IR."""
    result = compile_cuda(
        function,
        types.void,
        sig.args,
        fastmath=fastmath,
        cc=cc[:2],
        lto=True,
        max_registers=max_registers,
        nvvm_options={"fastmath": fastmath, "opt": 3},
    )
    library = result.library
    name = result.fndesc.llvm_func_name
    kernel = library.get_function(name)
    library._entry_name = name
    kernel_fixup(kernel, False)
    nvvm.set_launch_bounds(kernel, launch_bounds)
    return name, library


def to_cubin(
    function: Any,
    sig: Any,
    cc: tuple,
    launch_bounds: tuple,
    fastmath: bool,
    max_registers: int | None,
) -> tuple[str, bytes, tuple[str, ...]]:
    """Entry name, cubin and the numbers of ptxas's remarks, through LTO-IR.

    Linking PTX instead drops setmaxnreg and spills.

    Needs no driver.

    For Blackwell the PTX of sm_80 is assembled: its own optimiser leaves loops over fragments in
    place, and so the fragments in memory (a stack of 256 bytes where sm_80's PTX needs none). None
    of the kernels uses more than sm_80 has there.
    """
    _need_compiler()
    if cc[0] >= 10:
        return _assembled(to_ptx(function, sig, (8, 0), launch_bounds, fastmath), cc, max_registers)
    with _offline(cc), _linker_logs() as logs:
        name, library = _library(function, sig, cc, launch_bounds, fastmath, max_registers)
        code = bytes(library.get_cubin(cc=cc).code)
        return name, code, remarks_of("\n".join(logs))


def to_linked_ptx(function: Any, sig: Any, cc: tuple, launch_bounds: tuple, fastmath: bool) -> str:
    """PTX text after link-time optimisation: what the linker hands to ptxas for `to_cubin`.

    It has no line numbers, so the emulator runs `to_ptx`; tests compare the two. Needs no driver.
    """
    _need_compiler()
    if cc[0] >= 10:
        return to_ptx(function, sig, (8, 0), launch_bounds, fastmath)
    with _offline(cc):
        return _library(function, sig, cc, launch_bounds, fastmath, None)[1].get_lto_ptx(cc=cc)


def _assembled(
    ptx: str, cc: tuple, max_registers: int | None
) -> tuple[str, bytes, tuple[str, ...]]:
    """Entry name, cubin and remarks of a PTX text."""
    options = [
        f"-arch=sm_{cc[0]}{cc[1]}",
        *([f"-maxrregcount={max_registers}"] if max_registers else []),
    ]
    handle = _nvjitlink.create(len(options), options)
    try:
        data = ptx.encode() + b"\0"
        _nvjitlink.add_data(handle, _nvjitlink.InputType.PTX, data, len(data), "kernel")
        _nvjitlink.complete(handle)
        cubin = bytearray(_nvjitlink.get_linked_cubin_size(handle))
        _nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(_nvjitlink.get_info_log_size(handle))
        _nvjitlink.get_info_log(handle, log)
    finally:
        _nvjitlink.destroy(handle)
    name = ptx.split(".entry", 1)[1].split("(", 1)[0].strip()
    return name, bytes(cubin), remarks_of(log.decode(errors="replace"))
