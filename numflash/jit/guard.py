"""NUMFLASH_GUARD=1: detect overruns and reads of unwritten memory in the kernels' buffers.

Every scratch and output buffer of the CPU kernels is watched.

A buffer is then placed between canaries, is filled with signalling values first, and a call is made
twice with two fillings:

* a canary that has changed afterwards: something was written beyond the buffer's ends;
* results of the two calls that differ: something was read that nobody wrote, within a buffer or
  beyond its ends. Which buffer it was is found by calling again, with one filling changed at a
  time.

Either raises `GuardError` with the buffer's name. Without the variable nothing of this is compiled
or called. Guarded calls run one at a time: the guard is not for measuring speed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import llvmlite.binding as llvm
import numpy as np

from ..errors import GuardError

ON = os.environ.get("NUMFLASH_GUARD", "") not in ("", "0")
SYMBOL = "numflash_guard_allocate"  # what guarded kernels call for memory
MARGIN = 1 << 16  # bytes of canaries on either side
LINE = 64  # bytes of a cache line
# A signalling NaN and -6e18 as float32 and, by their upper halves, as bfloat16; large integers of
# both signs.
FILLINGS = (np.uint32(0x7FA1A1A1), np.uint32(0xDEB2B2B2))
Place = tuple[str, bool]  # (name of a buffer, True within it and False beyond its ends)


def pattern(number: int, size: int) -> np.ndarray:
    """`size` bytes of a filling (`np.resize` would join an array for each of its words)."""
    return np.full(-(-size // 4), FILLINGS[number], np.uint32).view(np.uint8)[:size]


class Room:
    """One buffer: its memory, and the canaries around it."""

    def __init__(self, name: str, size: int, fill: bool, different: Callable[[Place], int]) -> None:
        self.name, self.size, self.fill = name, size, fill
        self.memory = np.empty(size + 2 * MARGIN + LINE, np.uint8)
        first = MARGIN - (self.memory.ctypes.data + MARGIN) % LINE + LINE
        self.first, self.stop = first, first + size
        self.refill(different)

    @property
    def address(self) -> int:
        """Where the buffer itself begins."""
        return self.memory.ctypes.data + self.first

    def refill(self, different: Callable[[Place], int]) -> None:
        """Fill the memory beyond the buffer's ends, and the buffer itself if it is not one that
        starts as zeros.
        """
        beyond = different((self.name, False))
        self.front = pattern(beyond, self.first)
        self.back = pattern(beyond, self.memory.size - self.stop)
        self.memory[: self.first], self.memory[self.stop :] = self.front, self.back
        if self.fill:
            self.memory[self.first : self.stop] = pattern(different((self.name, True)), self.size)
        else:
            self.memory[self.first : self.stop] = 0

    def damage(self) -> Iterator[str]:
        """What has happened to the canaries, if anything."""
        for what, now, then in (
            ("before its start", self.memory[: self.first], self.front),
            ("behind its end", self.memory[self.stop :], self.back),
        ):
            changed = np.flatnonzero(now != then)
            if changed.size:
                at = changed[0] if what.startswith("behind") else self.first - changed[-1]
                yield f"{self.name}: written {what}, from byte {int(at)} on ({changed.size} bytes)"


def check(rooms: Iterable[Room]) -> None:
    """Raise if a canary of any of them has changed."""
    found = [damage for room in rooms for damage in room.damage()]
    if found:
        raise GuardError("; ".join(found))


@dataclass
class Session:
    """One guarded call: its buffers, and which places hold the second filling."""

    different: Callable[[Place], int]
    rooms: list[Room] = field(default_factory=list)


_lock = threading.RLock()
_session: Session | None = None
_kept: weakref.WeakValueDictionary[int, Room] = weakref.WeakValueDictionary()
_loose: deque[Room] = deque(maxlen=512)  # of kernels that are called in no session


def first_filling(_: Place) -> int:
    """The first filling everywhere."""
    return 0


def second_filling(_: Place) -> int:
    """The second filling everywhere."""
    return 1


def caller(depth: int = 2) -> str:
    """The function and line that allocate a buffer, for its name."""
    frame = sys._getframe(depth)
    file = os.path.basename(frame.f_code.co_filename)
    return f"{frame.f_code.co_name} ({file}, line {frame.f_lineno})"


def buffer(name: str, size: int, fill: bool) -> Room:
    """A new buffer; of the present call, else one that is kept as long as its array."""
    room = Room(name, size, fill, first_filling if _session is None else _session.different)
    if _session is None:
        _kept[id(room)] = room
    else:
        _session.rooms.append(room)
    return room


class _Owner(np.ndarray):
    """Memory that keeps its room alive."""

    room: Room


def array(name: str, shape: tuple[int, ...], dtype: Any, size: int, fill: bool) -> np.ndarray:
    """A guarded array."""
    room = buffer(f"{name}: {np.dtype(dtype)} {tuple(shape)}", size, fill)
    owner = room.memory.view(_Owner)
    owner.room = room
    return np.ndarray(shape, dtype, owner, room.first)


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_int)
def _allocate(size: int, name: bytes, fill: int) -> int:
    with _rooms:
        room = buffer(name.decode(), size, bool(fill))
        if _session is None:
            _loose.append(room)
        return room.address


_rooms = threading.Lock()
if ON:
    llvm.add_symbol(SYMBOL, ctypes.cast(_allocate, ctypes.c_void_p).value)


@contextmanager
def _filled(different: Callable[[Place], int]) -> Iterator[Session]:
    """A session; its canaries and those of kept buffers are checked at its end."""
    global _session
    _session = session = Session(different)
    kept = list(_kept.values())
    try:
        for room in kept:
            if room.fill:
                room.refill(different)
        yield session
    finally:
        _session = None
    check((*session.rooms, *kept))


def _bits(results: Any) -> list[bytes]:
    if isinstance(results, np.ndarray):
        return [results.tobytes()]
    if isinstance(results, (tuple, list)):
        return [x for result in results for x in _bits(result)]
    return [repr(results).encode()]


def _found(call: Callable[[], Any], want: list[bytes], places: list[Place]) -> GuardError:
    """The error for results that depend on a filling."""
    for place in places:
        with _filled(lambda at, place=place: int(at == place)):  # type: ignore[misc]
            changed = _bits(call()) != want
        if changed:
            how = "read before it was written" if place[1] else "read beyond its ends"
            return GuardError(
                f"{place[0]}: {how}, or never written and returned: the result depends on it"
            )
    return GuardError(
        f"a result changes from call to call, and none of {len(places)} buffers alone is why"
    )


def guarded(function: Callable, results: Callable[..., Any] | None = None) -> Callable:
    """`function` under guard where the guard is on, else itself.

    It must give the same results when it is called again.

    results : f(*args) -> arrays, the results of a function that writes them and returns None
    """
    if not ON:
        return function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _lock:
            if _session is not None:
                return function(*args, **options)
            given = options.pop("results", None) if results is None else None

            def once() -> Any:
                returned = function(*args, **options)
                return returned if results is None else results(*args, **options)

            with _filled(second_filling) as session:
                want = _bits(once())
            with _filled(first_filling):
                found = once()
            bits = _bits(found)
            if bits != want:
                names = dict.fromkeys(
                    [room.name for room in session.rooms]
                    + [room.name for room in _kept.values() if room.fill]
                )
                raise _found(
                    once, bits, [(name, within) for name in names for within in (True, False)]
                )
            if given is not None:
                for x, to in zip(found, given, strict=True):
                    if x is not None:
                        to[...] = x
                return given
            return found if results is None else None

    return call


def writes(results: Callable[..., Any]) -> Callable[[Callable], Callable]:
    """`guarded` for functions that write what `results` gives and return None."""
    return lambda function: guarded(function, results)


def checked(function: Callable) -> Callable:
    """`function`, after which canaries are checked, where the guard is on.

    For calls that cannot be made twice.
    """
    if not ON:
        return function

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with _lock:
            found = function(*args, **options)
            check(list(_kept.values()))
            return found

    return call
