"""What launches read that comes from the host and changes little (lengths, slopes, tensor maps).

Copies on a device, kept.

One copy per content, found by a key, made from pinned memory. What recorded launches hold (lengths,
slopes) is there before they are enqueued and stays as long as they do. The others (tensor maps,
which change with the addresses) are copied asynchronously, on the stream of the launch that needs
them first; launches on other streams wait for them on the device. Copies that a captured graph reads
are never freed and never change.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from ...errors import DriverError
from .driver import Uncaptured, check

# bytes of a piece of the arena, and of its smallest slot
CHUNK = 1 << 18
SMALLEST = 128
KEPT = 256  # copies that no graph reads and nothing holds; beyond, the older half goes


@dataclass
class Copy:
    """A content on the device, in a slot of `size` bytes at `address`, staged at `pinned`.

    Complete once `event` has passed.
    """

    address: int
    pinned: int
    size: int
    event: Any
    ready: bool = False  # the copy is known to be done
    captured: bool = False  # a graph reads it
    holders: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)


class Constants:
    """The copies on one device. Every method is called with the device's context current."""

    def __init__(self, driver: Any) -> None:
        self._driver, self._lock = driver, threading.Lock()
        self._copies: OrderedDict[Hashable, Copy] = OrderedDict()
        self._free: dict[int, list[tuple[int, int]]] = {}  # size of a slot -> (address, pinned)
        self._events: list[Any] = []
        self._own_stream: Any = None

    def address(
        self, key: Hashable, content: Callable[[], bytes], stream: int, captured: bool
    ) -> int:
        """Where launches on `stream` find a content, which `key` identifies and `content()` makes.

        `captured` says that these launches are recorded into a graph.
        """
        with self._lock:
            copy = self._copies.get(key)
            if copy is None:
                copy = self._copies[key] = self._made(content(), stream, captured)
            elif not copy.ready:
                self._order(copy, stream, captured)
            self._copies.move_to_end(key)
            copy.captured |= captured
            return copy.address

    def hold(self, content: bytes, holder: Any) -> Copy:
        """The copy of a content, complete, which stays as long as `holder` lives."""
        with self._lock:
            copy = self._copies.get(content)
            if copy is None:
                self._drop_old()
                copy = self._copies[content] = self._made(content, 0, at_once=True)
            copy.holders.add(holder)
            return copy

    def _order(self, copy: Copy, stream: int, captured: bool) -> None:
        """Launches on `stream` come after the copy."""
        d = self._driver
        with Uncaptured(d):
            if captured:  # a graph cannot wait for what was enqueued before it
                check(d, d.cuEventSynchronize(copy.event))
            copy.ready = captured or d.cuEventQuery(copy.event)[0] == d.CUresult.CUDA_SUCCESS
        if not copy.ready:
            check(d, d.cuStreamWaitEvent(stream, copy.event, 0))

    def _made(self, content: bytes, stream: int, at_once: bool) -> Copy:
        """A new copy, enqueued on `stream`; at once, and by a stream of its own, if `at_once`."""
        d = self._driver
        size = max(SMALLEST, 1 << (len(content) - 1).bit_length())
        if not at_once:
            self._drop_old()
        with Uncaptured(d):
            address, pinned = self._slot(size)
            event = self._events.pop() if self._events else self._new_event()
        copy = Copy(address, pinned, size, event)
        ctypes.memmove(pinned, content, len(content))
        if at_once:  # done before the launch, of which it is no part
            with Uncaptured(d):
                self._own_stream = self._own_stream or check(
                    d, d.cuStreamCreate(d.CUstream_flags.CU_STREAM_NON_BLOCKING)
                )
                own = self._own_stream
                check(d, d.cuMemcpyHtoDAsync(address, pinned, len(content), own))
                check(d, d.cuStreamSynchronize(own))
            copy.ready = True
        else:
            check(d, d.cuMemcpyHtoDAsync(address, pinned, len(content), stream))
            check(d, d.cuEventRecord(event, stream))
        return copy

    def _new_event(self) -> Any:
        d = self._driver
        return check(d, d.cuEventCreate(d.CUevent_flags.CU_EVENT_DISABLE_TIMING))

    def _slot(self, size: int) -> tuple[int, int]:
        """A free slot on the device and its twin in pinned memory."""
        d = self._driver
        free = self._free.setdefault(size, [])
        if not free:
            nbytes = max(CHUNK, size)
            address = int(check(d, d.cuMemAlloc(nbytes)))
            pinned = int(check(d, d.cuMemHostAlloc(nbytes, 0)))
            free += [(address + at, pinned + at) for at in range(0, nbytes, size)]
        return free.pop()

    def _drop_old(self) -> None:
        """Give back the slots of the older half of what no graph reads and nothing holds, once there
        is too much of it and the device is done.
        """
        if len(self._copies) < KEPT:
            return
        d = self._driver
        droppable = [
            key for key, copy in self._copies.items() if not copy.captured and not copy.holders
        ]
        if len(droppable) < KEPT:
            return
        try:
            with Uncaptured(d):
                check(d, d.cuCtxSynchronize())  # kernels may still read them
        except DriverError:  # another stream is being captured: nothing can be waited for now
            return
        for key in droppable[: KEPT // 2]:
            copy = self._copies.pop(key)
            self._free[copy.size].append((copy.address, copy.pinned))
            self._events.append(copy.event)
