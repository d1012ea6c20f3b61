"""A graph in the form that is compiled: a list of instructions and the frame that they read.

Its text does not depend on the contents or sizes of captured arrays, nor on most constants.

The frame is an int64 array: for each captured array its address, then size and stride (elements)
of each dimension; then the constants, floats as the bits of a float64.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from .graph import INDICES, Graph, Node, reachable
from .intervals import INT32, UNBOUNDED, Interval, Intervals, roughly

STEPS = ("floordiv", "mod", "shl", "shr")  # whose right operand is part of the code
LITERALS = (0, 1, -1, 2, 0.5, math.inf, -math.inf)
HUGE = 2.0**100  # larger floats may be infinite in a kernel's units: it has other code for them
MOST_READ = 1 << 18  # elements of an array whose contents may be looked at before every call


@dataclass(frozen=True)
class Table:
    """How a captured array is read.

    number : in the graph
    dtype : its NumPy dtype's name
    dimensions : how many
    dense : its last dimension is contiguous
    small : offsets fit 31 bits
    at : its place in the frame
    """

    number: int
    dtype: str
    dimensions: int
    dense: bool
    small: bool
    at: int


@dataclass(frozen=True)
class Bounds:
    """What is not certain about an index: below 0, below -size, at or above size."""

    wrap: bool
    low: bool
    high: bool

    @property
    def certain(self) -> bool:
        return not (self.wrap or self.low or self.high)


class Program:
    """Nodes in order, what they read from the frame, and the text that identifies the code.

    Parameters
    ----------
    score, slope, mask : the values to compute, None where there is none to
    shape : (B, H, L, S): ranges of the indices; proves indices and 32-bit integers safe

    Attributes
    ----------
    assumed : by the number of an array, bounds of its contents on which 32-bit integers rely; None
        where integers have 64 bits (`wide`)
    """

    def __init__(
        self,
        graph: Graph,
        score: Node | None,
        slope: Node | None,
        mask: Node | None,
        shape: tuple[int, int, int, int],
    ) -> None:
        self.graph, self.roots_by_name = graph, (score, slope, mask)
        roots = tuple(x for x in self.roots_by_name if x is not None)
        self.nodes = reachable(roots)
        self.arrays = [self._array(x) for x in graph.arrays]
        self.tables: dict[int, Table] = {}
        self.parameters: dict[int, int] = {}
        at = 0
        for x in self.nodes:
            if x.op == "load" and x.data not in self.tables:
                self.tables[x.data] = _table(x.data, self.arrays[x.data], at)
                at += 1 + 2 * self.arrays[x.data].ndim
        literals = {x.args[1].number for x in self.nodes if x.op in STEPS}
        for x in self.nodes:
            if (
                x.op == "const"
                and x.kind != "b"
                and x.number not in literals
                and not _literal(x.data)
            ):
                self.parameters[x.number] = at
                at += 1
        self.size = at
        ranges = {
            name: Interval(0.0, max(0.0, n - 1.0)) for name, n in zip(INDICES, shape, strict=True)
        }
        proof = Intervals(graph, ranges, assumed={})
        self.assumed = self._narrow(proof)
        self.wide = self.assumed is None
        self.bounds = self._index_bounds(proof)
        self.places = {x.number: n for n, x in enumerate(self.nodes)}
        ends = " ".join(
            "-" if x is None else str(self.places[x.number]) for x in self.roots_by_name
        )
        self.text = "\n".join([f"wide {self.wide}", *map(self._line, self.nodes), f"roots {ends}"])

    def _array(self, x: np.ndarray) -> np.ndarray:
        """A captured array as the code reads it."""
        return readable(x)

    def _narrow(self, proof: Intervals) -> dict[int, Interval] | None:
        """What is assumed of arrays for integers of 32 bits; None where they may need more."""
        if any(n >= INT32 for number in self.tables for n in self.arrays[number].shape):
            return None  # a negative index counts from an end that 32 bits do not hold
        whole = [x for x in self.nodes if x.kind == "i"]
        if not whole:
            return {}
        proof.of(*whole)
        if not proof.overflow:
            return {}
        arrays = {x.data: self.graph.arrays[x.data] for x in reachable(whole) if x.op == "load"}
        assumed = {n: roughly(x) for n, x in arrays.items() if x.size <= MOST_READ}
        second = Intervals(self.graph, proof.ranges, assumed)
        second.of(*whole)
        return None if second.overflow else assumed

    def _index_bounds(self, proof: Intervals) -> dict[tuple[int, int], Bounds]:
        """Of each index of each load; what arrays contain is not relied on."""
        found = {}
        for x in self.nodes:
            if x.op != "load":
                continue
            for axis, (y, size) in enumerate(zip(x.args, self.arrays[x.data].shape, strict=True)):
                low, high, _ = proof.of(y)
                low = float(np.min(low))
                high = float(np.max(high))
                if high >= UNBOUNDED or low <= -UNBOUNDED:
                    found[x.number, axis] = Bounds(True, True, True)
                else:
                    found[x.number, axis] = Bounds(low < 0, low < -size, high >= size)
        return found

    def _line(self, x: Node) -> str:
        args = " ".join(str(self.places[y.number]) for y in x.args)
        more: Any = ""
        if x.op == "const":
            at = self.parameters.get(x.number)
            more = f"frame {at}" if at is not None else repr(x.data)
        elif x.op == "load":
            indices = [self.bounds[x.number, axis] for axis in range(len(x.args))]
            more = f"{self.tables[x.data]} {indices}"
        return f"{x.op} {x.kind} {args} {more}"

    def frame(self) -> np.ndarray:
        """The frame as the arrays and constants are now."""
        frame = np.zeros(max(1, self.size), np.int64)
        for number, table in self.tables.items():
            array = self.arrays[number]
            frame[table.at] = array.__array_interface__["data"][0]
            for axis in range(array.ndim):
                frame[table.at + 1 + 2 * axis] = array.shape[axis]
                frame[table.at + 2 + 2 * axis] = array.strides[axis] // array.itemsize
        for number, at in self.parameters.items():
            value = self.graph.nodes[number].data
            frame[at] = np.float64(value).view(np.int64) if isinstance(value, float) else value
        return frame


def _literal(value: Any) -> bool:
    """Whether a constant is part of the code, which depends on it, or is better with it."""
    return value in LITERALS or value != value or abs(value) > HUGE


def readable(array: np.ndarray) -> np.ndarray:
    """The array, or a copy where its elements cannot be addressed in place."""
    native = array.dtype.isnative and all(stride % array.itemsize == 0 for stride in array.strides)
    aligned = array.__array_interface__["data"][0] % array.itemsize == 0
    if array.dtype.kind == "f" and array.itemsize > 8:
        return array.astype(np.float64)
    return array if native and aligned else np.array(array.astype(array.dtype.newbyteorder("=")))


def _table(number: int, array: np.ndarray, at: int) -> Table:
    reach = sum(
        abs(stride) // array.itemsize * (n - 1)
        for stride, n in zip(array.strides, array.shape, strict=True)
    )
    dense = array.ndim > 0 and (array.strides[-1] == array.itemsize or array.shape[-1] == 1)
    return Table(number, array.dtype.name, array.ndim, dense, reach < 1 << 30, at)
