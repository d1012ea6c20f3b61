"""Memory that stays on a card between launches, and launches on it.

Or the same in host memory for the emulator.

A buffer is a NumPy array. On a card its data pointer is a device address (see `arrays`): shapes,
strides and views are computed as for any array, and nothing on the host reads through it.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from ...errors import DriverError, UnsupportedError
from ...interop.arguments import EMULATED_DEFAULT
from ...interop.arrays import ArrayInterface
from ..compile import compiled
from ..emulator import Report, emulate
from .device import Device, current_device
from .driver import NOT_HERE, Uncaptured, check


class Emulated:
    """The emulator as a card: buffers are host memory, every launch leaves a report.

    Attributes
    ----------
    reports : of the launches so far
    uploaded : bytes that went from the host to the card
    """

    def __init__(self, arch: str = EMULATED_DEFAULT) -> None:
        self.arch, self.multiprocessors = arch, 8
        self.reports: list[Report] = []
        self.uploaded = 0

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A buffer of zeros."""
        return np.zeros(shape, dtype)

    def upload(self, to: np.ndarray, x: np.ndarray) -> None:
        """Host array to a buffer of its shape and dtype."""
        self.uploaded += x.nbytes
        to[...] = x

    def wait_for_copies(self) -> None:
        """Wait for what `upload` was given to be read."""

    def send(self, to: np.ndarray, x: np.ndarray) -> None:
        """A pinned array to a buffer, in the order of the kernels."""
        self.upload(to, x)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A host array that copies in the kernels' order read or write."""
        return np.zeros(shape, dtype)

    def fetch(self, x: np.ndarray, to: np.ndarray) -> None:
        """A contiguous part of a buffer to a host array."""
        to[...] = x

    def download(self, x: np.ndarray) -> np.ndarray:
        """A contiguous part of a buffer on the host."""
        return x.copy()

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Between buffers."""
        to[...] = source

    def run(
        self,
        factory: Callable,
        constants: dict[str, Any],
        blocks: tuple[int, int, int],
        args: tuple[Any, ...],
    ) -> None:
        """Launch a kernel.

        `args` holds buffers, passed as their addresses, numbers, and tuples of these.
        """
        self.reports.append(
            emulate(compiled(factory, self.arch, "ptx", **constants), blocks, None, list(args))
        )

    def prepared(
        self,
        factory: Callable,
        constants: dict[str, Any],
        blocks: tuple[int, int, int],
        args: tuple[Any, ...],
    ) -> Callable[[], None]:
        """The launch, to be repeated."""
        return lambda: self.run(factory, constants, blocks, args)

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """`work` itself, to be run again."""
        return work

    def synchronise(self) -> None:
        """Wait for everything enqueued."""


class Card:
    """The card of the thread's current context, or the first one, with buffers and two streams of
    its own.

    One stream is for copies to it, one for kernels, after "Detailed Processing Flow" of the T4
    architecture (docs/sources.md). A step's query and token, which its kernels wait for, go in the
    kernels' stream (`send`).

    The streams wait for each other by events, on the card: kernels for the copies made before them,
    copies for the kernels before them, which may still be reading the buffers. The host waits only
    in `synchronise` and `download`.
    """

    def __init__(self) -> None:
        try:
            self.device = current_device()
        except UnsupportedError as error:
            raise UnsupportedError(
                f"device: got 'cuda', which cannot be used here ({str(error).removeprefix(NOT_HERE)})"
            ) from error
        d = self.device.driver
        self.arch, self.multiprocessors = self.device.arch, self.device.multiprocessors
        flag = d.CUstream_flags.CU_STREAM_NON_BLOCKING
        timing = d.CUevent_flags.CU_EVENT_DISABLE_TIMING
        with self.device.active():
            self.stream, self.copies = (int(check(d, d.cuStreamCreate(flag))) for _ in range(2))
            self._copied, self._computed = (check(d, d.cuEventCreate(timing)) for _ in range(2))
        self._uploading = self._computing = self._rehearsing = False
        weakref.finalize(self, _each, d.cuStreamDestroy, (self.stream, self.copies))
        weakref.finalize(self, _each, d.cuEventDestroy, (self._copied, self._computed))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A buffer of zeros; it goes back when the array and its views are gone."""
        d = self.device.driver
        nbytes = max(16, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        with self.device.active(), Uncaptured(d):
            address = int(check(d, d.cuMemAlloc(nbytes)))
            check(d, d.cuMemsetD8Async(address, 0, nbytes, self.stream))
            check(d, d.cuStreamSynchronize(self.stream))  # the copies' stream may write it next
        memory = ArrayInterface(address, shape, None, np.dtype(dtype).str)
        weakref.finalize(memory, self.device.release, address)
        return np.asarray(memory)

    def pinned(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """A host array that copies in a graph may read and write while the host does something
        else.
        """
        d = self.device.driver
        nbytes = max(16, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        with self.device.active(), Uncaptured(d):
            address = int(check(d, d.cuMemHostAlloc(nbytes, 0)))
        memory = (ctypes.c_ubyte * nbytes).from_address(address)
        weakref.finalize(memory, _free_pinned, self.device, address)
        return np.frombuffer(memory, dtype, int(np.prod(shape))).reshape(shape)

    def upload(self, to: np.ndarray, x: np.ndarray) -> None:
        """Enqueue a copy of a host array to a buffer of its shape and dtype.

        x may change afterwards, unless it is pinned: then after `wait_for_copies`.
        """
        if self._rehearsing:
            return
        d = self.device.driver
        source = np.ascontiguousarray(x)
        with self.device.active():
            if self._computing:
                check(d, d.cuEventRecord(self._computed, self.stream))
                check(d, d.cuStreamWaitEvent(self.copies, self._computed, 0))
            check(
                d,
                d.cuMemcpyHtoDAsync(to.ctypes.data, source.ctypes.data, x.nbytes, self.copies),
            )
        self._computing, self._uploading = False, True

    def wait_for_copies(self) -> None:
        """Wait for the copies of `upload`: the driver reads pinned memory whenever it gets there."""
        d = self.device.driver
        with self.device.active(), Uncaptured(d):
            check(d, d.cuStreamSynchronize(self.copies))

    def send(self, to: np.ndarray, x: np.ndarray) -> None:
        """Enqueue a copy of a pinned array to a buffer, in the kernels' stream: what is small and
        needed at once waits for no other stream.
        """
        if self._rehearsing:
            return
        d = self.device.driver
        with self.device.active():
            self._after_copies()
            check(d, d.cuMemcpyHtoDAsync(to.ctypes.data, x.ctypes.data, x.nbytes, self.stream))

    def _after_copies(self) -> None:
        if self._uploading:
            d = self.device.driver
            check(d, d.cuEventRecord(self._copied, self.copies))
            check(d, d.cuStreamWaitEvent(self.stream, self._copied, 0))
            self._uploading = False
        self._computing = True

    def fetch(self, x: np.ndarray, to: np.ndarray) -> None:
        """Enqueue a copy of a contiguous part of a buffer to a host array, which holds it after
        `synchronise`.
        """
        if self._rehearsing:
            return
        d = self.device.driver
        with self.device.active():
            self._after_copies()
            check(d, d.cuMemcpyDtoHAsync(to.ctypes.data, x.ctypes.data, x.nbytes, self.stream))

    def download(self, x: np.ndarray) -> np.ndarray:
        """A contiguous part of a buffer on the host, after everything launched."""
        to = np.empty(x.shape, x.dtype)
        self.fetch(x, to)
        self.synchronise()
        return to

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Between buffers."""
        d = self.device.driver
        with self.device.active():
            self._after_copies()
            check(
                d,
                d.cuMemcpyDtoDAsync(to.ctypes.data, source.ctypes.data, source.nbytes, self.stream),
            )

    def run(
        self,
        factory: Callable,
        constants: dict[str, Any],
        blocks: tuple[int, int, int],
        args: tuple[Any, ...],
    ) -> None:
        """Enqueue a kernel.

        `args` holds buffers, passed as their addresses, numbers, and tuples of these.
        """
        self.prepared(factory, constants, blocks, args)()

    def prepared(
        self,
        factory: Callable,
        constants: dict[str, Any],
        blocks: tuple[int, int, int],
        args: tuple[Any, ...],
    ) -> Callable[[], None]:
        """A function that enqueues the kernel, which is loaded, and does nothing else again.

        It holds no buffer: its caller does.
        """
        kernel = self.device.kernel(compiled(factory, self.arch, "cubin", **constants))
        flat = [x for group in args for x in (group if isinstance(group, tuple) else (group,))]
        numbers = (x.ctypes.data if isinstance(x, np.ndarray) else x for x in flat)
        bound = kernel.bound(blocks, self.stream, *numbers)

        def launch() -> None:
            if not self._rehearsing:
                with self.device.active():
                    self._after_copies()
                    bound()

        return launch

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """What `work` enqueues, as one CUDA graph.

        A function that launches it again, with the same buffers and pinned arrays.

        Kernels are loaded before the capture, in which the driver allows no loading.
        """
        d = self.device.driver
        self._rehearsing = True
        try:
            work()
        finally:
            self._rehearsing = False
        self.synchronise()
        with self.device.active():
            whole = self._captured(work)

        def replay() -> None:
            with self.device.active():
                self._after_copies()
                check(d, d.cuGraphLaunch(whole, self.stream))

        weakref.finalize(replay, d.cuGraphExecDestroy, whole)
        return replay

    def _captured(self, work: Callable[[], None]) -> Any:
        """The executable graph of what `work` enqueues."""
        d = self.device.driver
        mode = d.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        check(d, d.cuStreamBeginCapture(self.stream, mode))
        # the first copy waits for an event, so its stream is captured too
        self._uploading, self._computing = False, True
        try:
            work()
            self._after_copies()
        except BaseException:
            d.cuStreamEndCapture(self.stream)
            raise
        graph = check(d, d.cuStreamEndCapture(self.stream))
        whole = check(d, d.cuGraphInstantiate(graph, 0))
        check(d, d.cuGraphDestroy(graph))
        return whole

    def synchronise(self) -> None:
        """Wait for everything enqueued."""
        d = self.device.driver
        with self.device.active(), Uncaptured(d):
            if self._uploading:  # else the kernels' stream has waited for them
                check(d, d.cuStreamSynchronize(self.copies))
            check(d, d.cuStreamSynchronize(self.stream))
        self._uploading = self._computing = False


def _free_pinned(device: Device, address: int) -> None:
    """As `Device.release`."""
    with contextlib.suppress(DriverError), device.active(), Uncaptured(device.driver):
        device.driver.cuMemFreeHost(address)


def _each(release: Callable[[Any], Any], handles: tuple[Any, ...]) -> None:
    for handle in handles:
        release(handle)
