"""The device arrays of one call, and the NumPy arrays that represent them.

The data pointer of such an array says which operand it is (`recorded.place`): views, shapes and
strides are computed as for any array, and nothing ever reads through it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import ArgumentTypeError
from ...interop.arrays import ArrayInterface
from ...interop.device_tensors import ALIGNMENT
from ..device import Device, device_at
from ..device.recorded import base, place
from .libraries import Numba, Seen, refused, seen

DTYPES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Remote:
    """A device array: `array` represents it, `dtype` is its own."""

    array: np.ndarray
    dtype: str


def representing(
    operand: int, shape: Sequence[int], dtype: str, strides: Any = None, address: int = 0
) -> np.ndarray:
    """The array that represents the operand of this number, from 1 on; contiguous without strides."""
    stored = np.dtype("uint16" if dtype == "bfloat16" else dtype).str
    steps = None if strides is None else tuple(int(n) for n in strides)
    sizes = tuple(int(n) for n in shape)
    return np.asarray(ArrayInterface(place(operand, address), sizes, steps, stored))


class Operands:
    """The device arrays of a call by the names of its arguments; None where there is none.

    Attributes
    ----------
    given : the arrays as they came;  seen : the same as `libraries.seen` describes them
    """

    def __init__(self, names: tuple[str, ...], given: Sequence[Any]) -> None:
        self.names, self.given = names, given
        self.seen: list[Seen | None] = list(map(seen, names, given))

    def take(self, name: str, dtypes: tuple[str, ...] = DTYPES) -> Remote:
        """Describe one; raises for what is not on a card, a library or dtype that is not served."""
        n = self.names.index(name)
        found = self.seen[n]
        if found is None:
            raise refused(name, self.given[n])
        shape, strides, dtype = found.library.describe(found.form)
        if dtype not in dtypes:
            raise ArgumentTypeError(
                f"{name}: got dtype {dtype}; allowed on a card: {', '.join(dtypes)}"
            )
        return Remote(representing(n + 1, shape, dtype, strides, found.address), dtype)

    def device(self) -> Device:
        """The card that they are on; raises ArgumentError for several."""
        named = zip(self.names, self.seen, strict=True)
        return device_at([(n, x.address) for n, x in named if x is not None and 0 not in x.form[0]])

    def bases(self) -> list[int]:
        """Where they lie, as `Recorded.enqueue` takes it."""
        return [0, *(0 if x is None else base(x.address) for x in self.seen)]

    def empty(self, operand: int, shape: tuple[int, ...], dtype: str) -> tuple[Any, int]:
        """Another array of the kind and on the device of an operand, by its number, and where it is."""
        library = self._library(operand)
        made = library.empty(self.given[operand - 1], shape, dtype)
        return made, library.look(made)[0]

    def streams(self) -> list[int]:
        """The caller's, for kernels that read the first operand; then those that it is to wait for:
        an array of Numba has its own, another library a current one.
        """
        first = self._library(1)
        found = [int(first.stream(self.given[0]))]
        for x, given in zip(self.seen[1:], self.given[1:], strict=True):
            if x is not None and (x.library is not first or first is Numba):
                found.append(int(x.library.stream(given)))
        return list(dict.fromkeys(found))

    def _library(self, operand: int) -> Any:
        found = self.seen[operand - 1]
        assert found is not None
        return found.library

    def forms(self) -> tuple[Any, ...] | None:
        """Libraries, shapes, strides, dtypes and alignment; None if one is not on a card."""
        forms = []
        for x, given in zip(self.seen, self.given, strict=True):
            if x is None and given is not None:
                return None
            forms.append(None if x is None else (x.library, x.form, x.address % ALIGNMENT))
        return self.names, *forms
