"""Launches that are recorded once and enqueued again on operands that lie elsewhere.

The arrays of such a `Launch` represent no memory: their addresses say of which operand they are a
part, and where in it. Shapes, strides, views and alignment are those of any array.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...interop.device_tensors import ALIGNMENT
from ..instructions.tensormap import TensorMap
from .constants import Constants, Copy
from .driver import Encoder, encode
from .operands import Launch

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

    It holds copies on the device of the launch's host arrays, and no array. Made with the device's
    context current.

    Parameters
    ----------
    device : `Device`
    constants : its copies of what is small and comes from the host
    kernel : `device.Kernel`
    launch : whose arrays on the card are recorded at `place`
    """

    def __init__(self, device: Any, constants: Constants, kernel: Any, launch: Launch) -> None:
        self.kernel, self.grid = kernel, launch.blocks(device.multiprocessors)
        self._constants, self._local = constants, threading.local()
        self._numbers: list[Any] = []
        self._pointers: list[tuple[int, int, int]] = []  # number of the argument, operand, offset
        self._held: list[Copy] = []
        self._maps: list[tuple[int, _Maps]] = []
        for n, x in enumerate(launch.flat(device.multiprocessors)):
            number = 0
            if isinstance(x, list):
                self._maps.append((n, _Maps(device.driver, x)))
            elif id(x) in launch.resident:
                self._pointers.append((n, *_found(x)))
            elif isinstance(x, np.ndarray):
                self._held.append(constants.hold(x.tobytes(), self))
                number = self._held[-1].address
            else:
                number = x
            self._numbers.append(number)

    def _block(self) -> Any:
        """The parameters of a thread: what is the same in every launch is written once."""
        block = self._local.block = self.kernel.parameters()
        block.fill(self._numbers)
        return block

    def enqueue(self, bases: Sequence[int], stream: int, captured: bool) -> None:
        """Launch on operands: `bases` by their numbers, the first one 0.

        captured : launches on the stream are recorded into a graph
        """
        block = getattr(self._local, "block", None) or self._block()
        slots = block.slots
        for n, operand, offset in self._pointers:
            slots[n].value = bases[operand] + offset
        for n, maps in self._maps:
            slots[n].value = self._constants.address(*maps.at(bases), stream, captured)
        if captured:
            for copy in self._held:
                copy.captured = True
        self.kernel.launch(self.grid, stream, block)
