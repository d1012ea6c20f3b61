"""Memory that stays on a card between launches, and launches on it; or the same in host memory for the emulator.

A buffer is a NumPy array. On a card its data pointer is a device address (see `arrays`): shapes, strides and views are computed as
for any array, and nothing on the host reads through it.
"""
from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from . import launch
from .arrays import _Memory
from .compile import compiled
from .emulator import Report, emulate

Argument = Any


class Emulated:
    """The emulator as a card: buffers are host memory, every launch leaves a report.

    Attributes
    ----------
    reports : of the launches so far
    uploaded, downloaded : bytes that crossed between host and card
    """

    def __init__(self) -> None:
        self.arch, self.multiprocessors = launch.EMULATED_ARCH, 8
        self.reports: list[Report] = []
        self.uploaded = self.downloaded = 0

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A buffer of zeros."""
        return np.zeros(shape, dtype)

    def upload(self, to: np.ndarray, x: np.ndarray) -> None:
        """Host array to a buffer of its shape and dtype."""
        self.uploaded += x.nbytes
        to[...] = x

    def download(self, x: np.ndarray, to: np.ndarray | None = None) -> np.ndarray:
        """A contiguous part of a buffer to the host."""
        self.downloaded += x.nbytes
        if to is None:
            return x.copy()
        to[...] = x
        return to

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Between buffers."""
        to[...] = source

    def run(self, factory: Callable, constants: dict[str, Any], blocks: tuple[int, int, int], args: tuple[Argument, ...]) -> None:
        """Launch a kernel; `args` holds buffers, which stand for their addresses, numbers, and tuples of these."""
        self.reports.append(emulate(compiled(factory, self.arch, "ptx", **constants), blocks, None, list(args)))

    def synchronise(self) -> None:
        """Wait for everything launched."""

    def close(self) -> None:
        """Release the buffers."""


class Card:
    """The first card, with buffers and a stream of its own."""

    def __init__(self) -> None:
        try:
            self.device = launch.current_device()
        except UnsupportedError as error:
            raise UnsupportedError(f"device: got 'cuda', which cannot be used here ({error})") from error
        d = self.device.driver
        self.arch, self.multiprocessors = self.device.arch, self.device.multiprocessors
        self.device.use()
        self.stream = int(launch.check(d, d.cuStreamCreate(d.CUstream_flags.CU_STREAM_NON_BLOCKING)))
        self._addresses: list[int] = []
        self._release = weakref.finalize(self, _release, d, self._addresses, self.stream)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A buffer of zeros."""
        d = self.device.driver
        self.device.use()
        nbytes = max(16, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        address = int(launch.check(d, d.cuMemAlloc(nbytes)))
        self._addresses.append(address)
        launch.check(d, d.cuMemsetD8Async(address, 0, nbytes, self.stream))
        steps = tuple(int(n) * np.dtype(dtype).itemsize for n in np.cumprod((1, *shape[:0:-1]))[::-1])
        return np.asarray(_Memory(address, shape, steps, np.dtype(dtype).str))

    def upload(self, to: np.ndarray, x: np.ndarray) -> None:
        """Host array to a buffer of its shape and dtype; x may change afterwards."""
        d = self.device.driver
        self.device.use()
        launch.check(d, d.cuMemcpyHtoDAsync(to.ctypes.data, np.ascontiguousarray(x).ctypes.data, x.nbytes, self.stream))

    def download(self, x: np.ndarray, to: np.ndarray | None = None) -> np.ndarray:
        """A contiguous part of a buffer to the host, after everything launched."""
        d = self.device.driver
        self.device.use()
        to = np.empty(x.shape, x.dtype) if to is None else to
        launch.check(d, d.cuMemcpyDtoHAsync(to.ctypes.data, x.ctypes.data, x.nbytes, self.stream))
        self.synchronise()
        return to

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Between buffers."""
        d = self.device.driver
        self.device.use()
        launch.check(d, d.cuMemcpyDtoDAsync(to.ctypes.data, source.ctypes.data, source.nbytes, self.stream))

    def run(self, factory: Callable, constants: dict[str, Any], blocks: tuple[int, int, int], args: tuple[Argument, ...]) -> None:
        """Enqueue a kernel; `args` holds buffers, which stand for their addresses, numbers, and tuples of these."""
        kernel = self.device.kernel(compiled(factory, self.arch, "cubin", **constants))
        flat = [x for group in args for x in (group if isinstance(group, tuple) else (group,))]
        kernel(blocks, self.stream, *(x.ctypes.data if isinstance(x, np.ndarray) else x for x in flat))

    def synchronise(self) -> None:
        """Wait for everything launched."""
        d = self.device.driver
        launch.check(d, d.cuStreamSynchronize(self.stream))

    def close(self) -> None:
        """Release the buffers, and the stream."""
        self._release()


def _release(driver: Any, addresses: list[int], stream: int) -> None:
    driver.cuStreamSynchronize(stream)
    for address in addresses:
        driver.cuMemFree(address)
    addresses.clear()
    driver.cuStreamDestroy(stream)
