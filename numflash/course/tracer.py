"""The memory accesses of a kernel: its own source, run by the interpreter on arrays that count.

`trace` runs the Python function behind a compiled kernel. Every load and store of an element is
counted by array and by cache line, and goes through a model of a cache: fully associative, least
recently used, write-back. The source decides what is counted: a compiler may keep a value in a
register where the source reads it twice. Lines that come from far away it cannot save.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from types import CellType, FunctionType
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher

from ..errors import ArgumentError


@dataclass(frozen=True)
class Traffic:
    """What went to and from one array.

    loads, stores : elements;  lines : different cache lines touched;  misses : lines that came from
        memory, some more than once
    write_backs : changed lines that went back to memory, counting those still in the cache at the
        end
    """

    loads: int
    stores: int
    lines: int
    misses: int
    write_backs: int


@dataclass(frozen=True)
class Report:
    """One run under the tracer.

    arrays : by argument name;  line, cache : bytes
    events : (accesses, 4) int64, in order: index of the array in `arrays`, its line, 1 for a store,
        1 for a miss
    """

    arrays: dict[str, Traffic]
    line: int
    cache: int
    events: np.ndarray

    @property
    def total(self) -> Traffic:
        """The sum over all arrays."""
        every = list(self.arrays.values())
        return Traffic(
            *(
                sum(getattr(x, name) for x in every)
                for name in ("loads", "stores", "lines", "misses", "write_backs")
            )
        )

    def bytes_of(self, name: str) -> int:
        """Bytes of one array between the cache and memory, both ways.

        0 if the kernel has no such array.
        """
        return (
            (self.arrays[name].misses + self.arrays[name].write_backs) * self.line
            if name in self.arrays
            else 0
        )

    @property
    def moved(self) -> int:
        """Bytes between the cache and memory, both ways."""
        return sum(map(self.bytes_of, self.arrays))

    def __str__(self) -> str:
        rows = [
            f"{'':10} {'loads':>9} {'stores':>9} {'lines':>7} {'from memory':>12} {'to memory':>10}"
        ]
        rows += [
            f"{name:10} {x.loads:9,} {x.stores:9,} {x.lines:7,} {x.misses * self.line:10,} B {x.write_backs * self.line:8,} B"
            for name, x in [*self.arrays.items(), ("all", self.total)]
        ]
        return "\n".join([*rows, f"lines of {self.line} bytes, {self.cache:,} bytes of cache"])


class _Memory:
    """The log of all accesses, and the cache."""

    def __init__(self, line: int, cache: int) -> None:
        self.line, self.capacity = line, cache // line
        self.held: OrderedDict[tuple[int, int], bool] = (
            OrderedDict()
        )  # (array, line) -> changed; the oldest first
        self.events: list[tuple[int, int, int, int]] = []
        self.write_backs: dict[int, int] = {}

    def access(self, array: int, byte: int, store: bool) -> None:
        place = array, byte // self.line
        miss = place not in self.held
        if not miss:
            self.held[place] |= store
            self.held.move_to_end(place)
        else:
            if len(self.held) >= self.capacity:
                self.leave(*self.held.popitem(last=False))
            self.held[place] = store
        self.events.append((*place, store, miss))

    def leave(self, place: tuple[int, int], changed: bool) -> None:
        if changed:
            self.write_backs[place[0]] = self.write_backs.get(place[0], 0) + 1


class Traced:
    """An array that reports every element read or written to a `_Memory`.

    Slices are views that report too.
    """

    def __init__(self, array: np.ndarray, place: np.ndarray, number: int, memory: _Memory) -> None:
        self._array, self._place, self._number, self._memory = array, place, number, memory
        self.shape, self.size, self.ndim, self.dtype = (
            array.shape,
            array.size,
            array.ndim,
            array.dtype,
        )

    def __len__(self) -> int:
        return len(self._array)

    def _access(self, index: Any, store: bool) -> None:
        for byte in self._place[index].ravel():
            self._memory.access(self._number, int(byte), store)

    def __getitem__(self, index: Any) -> Any:
        found = self._array[index]
        if isinstance(found, np.ndarray):
            return Traced(found, self._place[index], self._number, self._memory)
        self._access(index, False)
        return found

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(value, Traced):
            value._access(..., False)
            value = value._array
        self._array[index] = value
        self._access(index, True)

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray:
        raise ArgumentError(
            "trace: got NumPy arithmetic on a whole array; allowed: kernels that work element by element"
        )


def _interpreted(function: Any, known: dict[Any, Any]) -> Any:
    """The Python function behind a compiled one, calling Python functions only."""
    if isinstance(function, (tuple, list)):
        return type(function)(_interpreted(x, known) for x in function)
    if not isinstance(function, Dispatcher):
        return function
    if function not in known:
        source = function.py_func
        scope = dict(source.__globals__)
        known[function] = FunctionType(
            source.__code__,
            scope,
            source.__name__,
            source.__defaults__,
            tuple(
                CellType(_interpreted(cell.cell_contents, known))
                for cell in source.__closure__ or ()
            ),
        )
        scope.update(
            {
                name: _interpreted(scope[name], known)
                for name in source.__code__.co_names
                if name in scope
            }
        )
    return known[function]


def trace(kernel: Callable, *arguments: Any, cache: int = 32768, line: int = 64) -> Report:
    """Run the source of `kernel` on `arguments` and count its memory accesses.

    Parameters
    ----------
    kernel : a function compiled by Numba; what it calls runs in the interpreter too
    arguments : as the kernel takes them; arrays are written as the kernel would
    cache, line : bytes; each array starts on a line of its own

    Raises
    ------
    ArgumentError
        `kernel` is not compiled by Numba, `cache` holds no line, or an array is not contiguous.
    """
    if not isinstance(kernel, Dispatcher):
        raise ArgumentError(
            f"kernel: got {type(kernel).__name__}; allowed: a function compiled by Numba"
        )
    if line < 1 or cache < line:
        raise ArgumentError(
            f"cache, line: got {cache} and {line} bytes; allowed: at least one line of at least a byte"
        )
    names = list(inspect.signature(kernel.py_func).parameters)
    memory = _Memory(line, cache)
    given = list(arguments)
    arrays: dict[str, int] = {}
    for n, x in enumerate(arguments):
        if isinstance(x, np.ndarray):
            if not x.flags.c_contiguous:
                raise ArgumentError(
                    f"{names[n]}: got an array that is not contiguous; allowed: C order, as the kernels take it"
                )
            place = np.arange(x.size, dtype=np.int64).reshape(x.shape) * x.itemsize
            given[n] = Traced(x, place, len(arrays), memory)
            arrays[names[n]] = len(arrays)
    with np.errstate(all="ignore"):  # as the compiled kernel: -inf - -inf says nothing
        _interpreted(kernel, {})(*given)
    for held, changed in memory.held.items():
        memory.leave(held, changed)
    events = np.array(memory.events, np.int64).reshape(-1, 4)
    counted = {}
    for name, n in arrays.items():
        mine = events[events[:, 0] == n]
        stores = int(mine[:, 2].sum())
        misses = int(mine[:, 3].sum())
        counted[name] = Traffic(
            len(mine) - stores,
            stores,
            np.unique(mine[:, 1]).size,
            misses,
            memory.write_backs.get(n, 0),
        )
    return Report(counted, line, cache, events)
