"""Scratch memory of calls, which a thread keeps from one call to the next."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from . import guard
from .memory import LINE, empty

LARGEST_KEPT = 31 << 20
# Bytes of scratch memory that a thread keeps between calls, at most. The packed keys of 16 heads of 4096 x 192
# are 50 MB. With 16 MB kept, each call took fresh pages for them, which cost 6 % of its time with one query row
# on one thread and 26 % on two (AMD Zen 5, virtual machine).
KEPT = 64 << 20
MOST_BUILT = 16  # kinds of calls whose arrays are kept with a block of memory


@functools.cache
def keep(bits: int) -> None:
    """Let the C library keep 2**bits bytes that a call frees, for the next one.

    glibc gives the top of its heap back to the system once more is free than twice the largest
    block ever freed, and takes blocks larger than that straight from the system: the pages of
    several large arrays are zeroed again at each call, 0.5 ms per MB on a virtual machine. Freeing
    one block as large as all of them, which touches no memory, moves both limits (mallopt(3),
    M_MMAP_THRESHOLD; the most they move to is 32 MB).
    """
    np.empty(min(1 << bits, LARGEST_KEPT), np.uint8)


class Layout:
    """Places of arrays in one block of memory, each from a cache line on."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.sizes: dict[str, int] = {}

    def add(self, name: str, nbytes: int) -> int:
        """Where an array of so many bytes starts.

        Raises
        ------
        MemoryError
            No address reaches its end.
        """
        at, self.sizes[name] = self.nbytes, nbytes
        self.nbytes += -(-nbytes // LINE) * LINE
        if self.nbytes > sys.maxsize:  # kernels are given places as 64-bit integers
            raise MemoryError(
                f"{self.nbytes} bytes of scratch memory are more than can be addressed"
            )
        return at

    def add_all(self, **sizes: int) -> dict[str, int]:
        """Where arrays of so many bytes start, by name."""
        return {name: self.add(name, nbytes) for name, nbytes in sizes.items()}

    def guarded(self) -> list[np.ndarray]:
        """For `guard`: a buffer of its own for each array."""
        return [
            guard.array(name, (nbytes,), np.uint8, nbytes, fill=True)
            for name, nbytes in self.sizes.items()
        ]


class Places:
    """Arrays of one kernel in a block of memory, which equal calls share.

    Parameters
    ----------
    kinds : dtypes and shapes by name
    build : what a call takes of the arrays by name; kept with the block
    """

    def __init__(
        self,
        kinds: dict[str, tuple[Any, tuple[int, ...]]],
        build: Callable[[dict[str, np.ndarray]], Any],
    ) -> None:
        self.kinds, self.build, self.layout = kinds, build, Layout()
        self.starts = [
            self.layout.add(name, math.prod(shape) * np.dtype(dtype).itemsize)
            for name, (dtype, shape) in kinds.items()
        ]

    def of(self, block: np.ndarray) -> Any:
        """What `build` makes of the arrays in a block of bytes."""
        sizes = self.layout.sizes.values()
        parts = (
            self.layout.guarded()
            if guard.ON
            else [block[at : at + size] for at, size in zip(self.starts, sizes, strict=True)]
        )
        named = zip(self.kinds.items(), parts, strict=True)
        return self.build({n: x.view(dtype).reshape(shape) for (n, (dtype, shape)), x in named})


class Room:
    """A block of scratch memory, its address, and what was built in it."""

    def __init__(self, nbytes: int) -> None:
        self.array = empty((nbytes,), np.uint8, "scratch memory")
        self.nbytes, self.address = nbytes, self.array.ctypes.data
        self.built: dict[Places, Any] = {}
        self.buffers: list[np.ndarray] = []

    def __enter__(self) -> Room:
        return self

    def __exit__(self, *error: object) -> None:
        """Give the memory back to the thread."""
        scratch.give(self)

    def build(self, places: Places) -> Any:
        """What `places` makes of the block, made once."""
        found = self.built.get(places)
        if found is None or guard.ON:
            if len(self.built) >= MOST_BUILT:
                self.built.clear()
            found = self.built[places] = places.of(self.array)
        return found


class Scratch(threading.local):
    """Scratch memory of each thread that calls kernels.

    One block, which grows to what calls need, and stays if at most `KEPT`.
    """

    room: Room | None = None

    def take(self, nbytes: int) -> Room:
        """Memory that nobody else has until it is given back; what it holds is arbitrary."""
        # a call from a signal handler or a finaliser gets its own
        room, self.room = self.room, None
        return room if room is not None and room.nbytes >= nbytes else Room(nbytes)

    def give(self, room: Room) -> None:
        """Keep the block for the next call."""
        if room.nbytes <= KEPT and not guard.ON:
            self.room = room

    @contextlib.contextmanager
    def built(self, places: Places) -> Iterator[Any]:
        """What `places` makes of its arrays, on cache lines, until the end of the `with` block."""
        room = self.take(places.layout.nbytes)
        try:
            yield room.build(places)
        finally:
            self.give(room)


scratch = Scratch()


def placed(numbers: np.ndarray, places: slice, layout: Layout, room: Room) -> np.ndarray:
    """The numbers that a compiled call reads, whose `places` say where in a room the arrays of a layout
    are. For `guard` each array has a buffer of its own, anywhere in memory.
    """
    if not guard.ON:
        return numbers
    numbers, room.buffers = numbers.copy(), layout.guarded()
    numbers[places] = [x.ctypes.data - room.address for x in room.buffers]
    return numbers
