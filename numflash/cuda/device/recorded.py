"""Launches that are recorded once and enqueued again on operands that lie elsewhere.

The arrays of such a `Launch` represent no memory: their addresses say of which operand they are a
part, and where in it. Shapes, strides, views and alignment are those of any array.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..instructions.tensormap import TensorMap
from .constants import Constants
from .driver import Encoder, encode
from .operands import Launch

ALIGNMENT = 16  # bytes: nothing that a launch depends on is finer
SHIFT = 56  # above all addresses


def place(operand: int, address: int = 0) -> int:
    """Where to record an array: the start of an operand, whose number is 1 or more, as it is aligned
    at this address.
    """
    return operand << SHIFT | address % ALIGNMENT


def base(address: int) -> int:
    """What the operand at this address is enqueued with."""
    return address - address % ALIGNMENT


def _found(x: np.ndarray) -> tuple[int, int]:
    """The operand that an array is a part of (0: none, it lies where it says), and where."""
    operand = x.ctypes.data >> SHIFT
    return operand, x.ctypes.data - (operand << SHIFT)


class _Maps:
    """The tensor maps of one argument, whose bytes depend on the addresses."""

    def __init__(self, driver: Any, maps: Sequence[TensorMap]) -> None:
        self._encoders = [Encoder(driver, m) for m in maps]
        self._places = [_found(m.array) for m in maps]
        described = [
            (m.array.dtype.str, m.array.shape, m.array.strides, m.box, m.swizzle) for m in maps
        ]
        self._form = repr(described).encode()  # bytes keep their hash

    def at(self, bases: Sequence[int]) -> tuple[Any, Callable[[], bytes]]:
        """What identifies their bytes with these operands, and what makes them."""
        addresses = tuple(bases[operand] + offset for operand, offset in self._places)

        def encoded() -> bytes:
            return encode(self._encoders, addresses).tobytes()

        return (self._form, addresses), encoded


class Recorded:
    """A launch of a loaded kernel, to be enqueued any number of times, by several threads at once.

    It keeps the contents of the launch's host arrays, and no array.

    Parameters
    ----------
    driver : the bindings
    kernel : `device.Kernel`
    grid : of its blocks
    launch : whose arrays on the card are recorded at `place`
    """

    def __init__(
        self, driver: Any, kernel: Any, grid: tuple[int, int, int], launch: Launch
    ) -> None:
        self.kernel, self.grid = kernel, grid
        self._numbers: list[Any] = []
        self._pointers: list[tuple[int, int, int]] = []  # number of the argument, operand, offset
        self._contents: list[tuple[int, bytes, Callable[[], bytes]]] = []
        self._maps: list[tuple[int, _Maps]] = []
        for n, x in enumerate(launch.flat()):
            plain = not isinstance(x, (list, np.ndarray))
            self._numbers.append(x if plain else 0)
            if isinstance(x, list):
                self._maps.append((n, _Maps(driver, x)))
            elif id(x) in launch.resident:
                self._pointers.append((n, *_found(x)))
            elif not plain:
                content = x.tobytes()
                self._contents.append((n, content, functools.partial(bytes, content)))

    def enqueue(
        self, constants: Constants, bases: Sequence[int], stream: int, captured: bool
    ) -> None:
        """Launch on operands: `bases` by their numbers, the first one 0.

        constants : what is small and comes from the host
        captured : launches on the stream are recorded into a graph
        """
        numbers = self._numbers.copy()
        for n, operand, offset in self._pointers:
            numbers[n] = bases[operand] + offset
        for n, content, make in self._contents:
            numbers[n] = constants.address(content, make, stream, captured)
        for n, maps in self._maps:
            numbers[n] = constants.address(*maps.at(bases), stream, captured)
        self.kernel(self.grid, stream, *numbers)
