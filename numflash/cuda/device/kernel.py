"""A loaded kernel and its launches: one parameter block per kernel and thread, filled in place, one
driver call.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..compile import Compiled
from .driver import check

_CTYPES: dict[str, Any] = {
    "int32": ctypes.c_int32,
    "uint32": ctypes.c_uint32,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "float32": ctypes.c_float,
    "float64": ctypes.c_double,
}


def words_of(parameter: str) -> tuple[str, ...]:
    """The words that a parameter is passed as.

    A Numba array is two pointers to its owner, size, item size, address, shape, strides.
    """
    return (
        ("int64",) * (5 + 2 * int(parameter[5:])) if parameter.startswith("array") else (parameter,)
    )


class Parameters:
    """A kernel's parameters as the driver reads them: `slots` are their numbers, one of ctypes' each."""

    def __init__(self, item: Compiled) -> None:
        self.slots: list[Any] = [_CTYPES[t](0) for p in item.parameters for t in words_of(p)]
        # with a null after the last, which marks their end for tools that read them
        kind = ctypes.c_void_p * (len(self.slots) + 1)
        self._pointers = kind(*map(ctypes.addressof, self.slots), None)
        self.address = ctypes.addressof(self._pointers)

    def fill(self, arguments: Sequence[Any]) -> None:
        """Device pointers and numbers."""
        for slot, value in zip(self.slots, arguments, strict=True):
            slot.value = value


class Kernel:
    """A cubin loaded into the current context.

    Call it with the grid, the stream's handle and one number per parameter (for an array those of
    `words_of`); `threads` and the dynamic shared memory are the compiled kernel's own. Thread-safe:
    each thread has its own parameter block.
    """

    def __init__(self, driver: Any, item: Compiled) -> None:
        self._driver, self.item = driver, item
        self._library = check(driver, driver.cuLibraryLoadData(item.code, [], [], 0, [], [], 0))
        kernel = check(driver, driver.cuLibraryGetKernel(self._library, item.name.encode()))
        self._function = check(driver, driver.cuKernelGetFunction(kernel))
        if item.shared_bytes > 48 * 1024:  # more than 48 KB needs an attribute of the function
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            check(driver, driver.cuFuncSetAttribute(self._function, attribute, item.shared_bytes))
        self._local = threading.local()

    def parameters(self) -> Parameters:
        """A parameter block of its own."""
        return Parameters(self.item)

    def __call__(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> None:
        """Launch with device pointers and numbers as arguments."""
        block = getattr(self._local, "block", None)
        if block is None:
            block = self._local.block = self.parameters()
        block.fill(arguments)
        self.launch(grid, stream, block)

    def bound(self, grid: tuple[int, int, int], stream: int, *arguments: Any) -> Callable[[], None]:
        """A function that launches with these arguments, in a parameter block of their own."""
        block = self.parameters()
        block.fill(arguments)
        return functools.partial(self.launch, grid, stream, block)

    def launch(self, grid: tuple[int, int, int], stream: int, block: Parameters) -> None:
        """Launch with the numbers of a parameter block, which are read before this returns."""
        item, d = self.item, self._driver
        if item.cluster == 1:
            launched = d.cuLaunchKernel(
                self._function,
                *grid,
                item.threads,
                1,
                1,
                item.shared_bytes,
                stream,
                block.address,
                0,
            )
        else:
            launched = d.cuLaunchKernelEx(
                self._config(grid, stream), self._function, block.address, 0
            )
        if launched[0]:
            check(d, launched)

    def _config(self, grid: tuple[int, int, int], stream: int) -> Any:
        """The configuration of a launch in clusters; this thread's last one, if it is the same."""
        last = getattr(self._local, "config", None)
        if last is not None and last[0] == (grid, stream):
            return last[1]
        d, config = self._driver, self._driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.item.threads, 1, 1
        config.sharedMemBytes, config.hStream = self.item.shared_bytes, d.CUstream(stream)
        cluster = d.CUlaunchAttribute()
        cluster.id = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        sizes = cluster.value.clusterDim
        sizes.x, sizes.y, sizes.z = self.item.cluster, 1, 1
        config.attrs, config.numAttrs = [cluster], 1
        self._local.config = (grid, stream), config
        return config
