"""Interval arithmetic over a graph: bounds of every value while the indices run through ranges.

The bounds are conservative. Floats are computed here in float64 and in kernels in float32, so each
operation widens its bounds by more than float32 and the kernels' functions can be wrong. A value
that may be NaN carries a flag, and a comparison of it is open. Integers that may leave 32 bits are
unbounded, and `overflow` says that the kernels must compute in 64 bits.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from .evaluate import element
from .graph import COMPARISONS, INDICES, OPERATIONS, ROUNDINGS, Graph, Node, reachable

INFINITE = np.inf
INT32 = 2.0**31
UNBOUNDED = 2.0**63
LARGEST = float(np.finfo(np.float32).max)
MONOTONE = ("exp", "exp2", "tanh", "sigmoid", "erf")
WIDER = {"round": (2.5e-7, 1e-37), "function": (8e-6, 4e-6)}  # relative, absolute


class Interval(NamedTuple):
    """Bounds of a value, arrays that broadcast; booleans as 0 and 1; whether it may be NaN."""

    low: Any
    high: Any
    nan: bool = False

    @property
    def point(self) -> bool:
        return self.low is self.high or np.array_equal(self.low, self.high)


class Axis(NamedTuple):
    """An index that runs through consecutive blocks.

    Their first values, the end, the array axis.
    """

    starts: np.ndarray
    stop: int
    axis: int


class Intervals:
    """Bounds of the values of a graph.

    Parameters
    ----------
    ranges : Interval of each index by name
    assumed : dict of an array's number to Interval, or None
        Bounds of what captured arrays contain, of others only their dtypes: contents may change.
        None: the contents of now.
    axes : dict of name to Axis
        Where an index runs in blocks of `ranges`; makes bounds of array[q] those of each block.
    """

    def __init__(
        self,
        graph: Graph,
        ranges: dict[str, Interval],
        assumed: dict[int, Interval] | None = None,
        axes: dict[str, Axis] | None = None,
    ) -> None:
        self.graph, self.ranges, self.assumed, self.axes = graph, ranges, assumed, axes or {}
        self.known: dict[int, Interval] = {}
        self.overflow = False

    def of(self, *roots: Node) -> Interval:
        """The bounds of nodes: those of the last one."""
        with np.errstate(all="ignore"):
            for x in reachable(roots):
                if x.number not in self.known:
                    self.known[x.number] = self._settle(x, self._bounds(x))
        return self.known[roots[-1].number]

    def _settle(self, x: Node, found: Interval) -> Interval:
        """Integers within 32 bits or unbounded, floats without NaN as a bound."""
        low, high, nan = found
        if x.kind == "i":
            if not (np.min(low) >= -INT32 and np.max(high) < INT32):
                self.overflow = True
                return Interval(-UNBOUNDED, UNBOUNDED)
        elif x.kind == "f" and (np.isnan(low).any() or np.isnan(high).any()):
            return Interval(-INFINITE, INFINITE, True)
        return Interval(low, high, nan)

    def _bounds(self, x: Node) -> Interval:
        if x.op in INDICES:
            return self.ranges[x.op]
        if x.op == "score":
            return Interval(-INFINITE, INFINITE, True)
        if x.op == "const":
            value = np.float64(np.float32(x.data)) if x.kind == "f" else np.float64(x.data)
            return Interval(value, value, bool(np.isnan(value)))
        if x.op == "load":
            return self._load(x)
        operands = [self.known[y.number] for y in x.args]
        if x.op == "cast":
            return self._cast(x, operands[0])
        if x.op == "where":
            return self._where(*operands)
        if x.op in COMPARISONS:
            return self._compare(x.op, *operands)
        rule = getattr(self, f"_{x.kind}_{x.op}", None)
        found = rule(*operands) if rule else _unknown(x.kind)
        if x.kind != "f":
            return found
        return self._rounded(x, found, operands)

    def _rounded(self, x: Node, found: Interval, operands: list[Interval]) -> Interval:
        low, high, _ = found
        nan = any(y.nan for y in operands) or found.nan
        if x.op in ("neg", "abs", "min", "max", "detach", *ROUNDINGS):
            return Interval(low, high, nan)
        if x.op not in MONOTONE:
            nan = nan or not all(
                np.isfinite(y.low).all() and np.isfinite(y.high).all() for y in operands
            )
        exact = x.op in ("add", "sub", "mul", "div")
        relative, absolute = WIDER["round" if exact else "function"]
        low = low - np.abs(low) * relative - absolute
        high = high + np.abs(high) * relative + absolute
        if np.min(low) < -LARGEST or np.max(high) > LARGEST:  # infinite in kernels
            return _unknown("f")
        return Interval(low, high, nan)

    def _load(self, x: Node) -> Interval:
        array = self.graph.arrays[x.data]
        index = [self.known[y.number] for y in x.args]
        if self.assumed is not None:
            return self.assumed.get(x.data) or _any_of(array.dtype)
        if array.dtype.kind not in "biuf":
            array = array.astype(np.float32)
        nan = array.dtype.kind == "f" and bool(np.isnan(array).any())
        if nan:
            return Interval(-INFINITE, INFINITE, True)
        if all(y.point for y in index):
            at = [np.asarray(y.low).astype(np.int64) for y in index]
            value = _exact(element(array, at))
            return Interval(value, value)
        for place, y in enumerate(x.args):
            others = [z for n, z in enumerate(index) if n != place]
            if (
                y.op in self.axes
                and all(z.point for z in others)
                and array.shape[place] >= self.axes[y.op].stop
            ):
                return self._blocks_of(array, place, self.axes[y.op], index)
        return Interval(_exact(array.min()), _exact(array.max()))

    def _blocks_of(
        self, array: np.ndarray, place: int, axis: Axis, index: list[Interval]
    ) -> Interval:
        """Bounds within each block of one index, where all others are known."""
        array = np.moveaxis(array, place, -1)[..., : axis.stop]
        shape = [1] * 4
        shape[axis.axis] = len(axis.starts)
        at = [np.asarray(y.low).astype(np.int64) for n, y in enumerate(index) if n != place]
        block = np.arange(len(axis.starts)).reshape(shape)
        if array.dtype.kind == "b":
            array = array.view(np.uint8)
        low = element(np.minimum.reduceat(array, axis.starts, -1), [*at, block])
        high = element(np.maximum.reduceat(array, axis.starts, -1), [*at, block])
        return Interval(_exact(low), _exact(high))

    def _cast(self, x: Node, y: Interval) -> Interval:
        if x.kind == "b":
            sure = (y.low > 0) | (y.high < 0)
            return Interval(sure * 1.0, ((y.low != 0) | (y.high != 0) | y.nan) * 1.0)
        if x.kind == "i" and x.args[0].kind == "f":
            # what is beyond becomes the last float32 below 2**31 in kernels
            low = np.clip(np.trunc(y.low), -INT32, INT32 - 128)
            high = np.clip(np.trunc(y.high), -INT32, INT32 - 1)
            return (
                Interval(np.minimum(low, 0), np.maximum(high, 0)) if y.nan else Interval(low, high)
            )
        if x.kind == "f":
            relative = WIDER["round"][0]
            return Interval(y.low - np.abs(y.low) * relative, y.high + np.abs(y.high) * relative)
        return y

    def _where(self, condition: Interval, x: Interval, y: Interval) -> Interval:
        low = np.where(
            condition.low >= 1,
            x.low,
            np.where(condition.high <= 0, y.low, np.minimum(x.low, y.low)),
        )
        high = np.where(
            condition.low >= 1,
            x.high,
            np.where(condition.high <= 0, y.high, np.maximum(x.high, y.high)),
        )
        return Interval(low, high, x.nan or y.nan)

    def _compare(self, op: str, x: Interval, y: Interval) -> Interval:
        if x.nan or y.nan:
            return Interval(0.0, 1.0)
        if op in ("gt", "ge"):
            x, y, op = y, x, {"gt": "lt", "ge": "le"}[op]
        if op == "lt":
            return Interval((x.high < y.low) * 1.0, (x.low < y.high) * 1.0)
        if op == "le":
            return Interval((x.high <= y.low) * 1.0, (x.low <= y.high) * 1.0)
        sure = ((x.low == x.high) & (y.low == y.high) & (x.low == y.low)) * 1.0
        may = ((x.low <= y.high) & (y.low <= x.high)) * 1.0
        return Interval(sure, may) if op == "eq" else Interval(1 - may, 1 - sure)

    def _min(self, x: Interval, y: Interval) -> Interval:
        return Interval(np.minimum(x.low, y.low), np.minimum(x.high, y.high))

    def _max(self, x: Interval, y: Interval) -> Interval:
        return Interval(np.maximum(x.low, y.low), np.maximum(x.high, y.high))

    # booleans are the numbers 0 and 1
    _b_and, _b_or = _min, _max

    def _b_not(self, x: Interval) -> Interval:
        return Interval(1 - x.high, 1 - x.low)

    def _b_xor(self, x: Interval, y: Interval) -> Interval:
        return self._b_and(self._b_or(x, y), self._b_not(self._b_and(x, y)))

    # arithmetic of both kinds
    def _add(self, x: Interval, y: Interval) -> Interval:
        return Interval(x.low + y.low, x.high + y.high)

    def _sub(self, x: Interval, y: Interval) -> Interval:
        return Interval(x.low - y.high, x.high - y.low)

    def _mul(self, x: Interval, y: Interval) -> Interval:
        return _corners(np.multiply, x, y)

    def _neg(self, x: Interval) -> Interval:
        return Interval(-x.high, -x.low)

    def _abs(self, x: Interval) -> Interval:
        low = np.abs(x.low)
        high = np.abs(x.high)
        inside = (x.low <= 0) & (x.high >= 0)
        return Interval(np.where(inside, 0, np.minimum(low, high)), np.maximum(low, high))

    def _f_detach(self, x: Interval) -> Interval:
        return x

    _i_add = _f_add = _add
    _i_sub = _f_sub = _sub
    _i_mul = _f_mul = _mul
    _i_neg = _f_neg = _neg
    _i_abs = _f_abs = _abs
    _i_min = _f_min = _min
    _i_max = _f_max = _max

    # integers
    def _i_floordiv(self, x: Interval, y: Interval) -> Interval:
        if not (np.all(y.low > 0) or np.all(y.high < 0)):
            most = np.maximum(np.abs(x.low), np.abs(x.high))
            return Interval(-most, most)
        return _corners(np.floor_divide, x, y)

    def _i_mod(self, x: Interval, y: Interval) -> Interval:
        if not np.all(y.low > 0):
            most = np.maximum(np.abs(y.low), np.abs(y.high))
            return Interval(-most, most)
        if not y.point:
            return Interval(0.0, y.high - 1)
        same = np.floor_divide(x.low, y.low) == np.floor_divide(x.high, y.low)
        return Interval(
            np.where(same, np.mod(x.low, y.low), 0.0),
            np.where(same, np.mod(x.high, y.low), y.low - 1),
        )

    def _i_shl(self, x: Interval, y: Interval) -> Interval:
        if not (np.all(y.low >= 0) and np.all(y.high < 64)):
            return _unknown("i")
        return _corners(lambda u, n: u * np.exp2(n), x, y)

    def _i_shr(self, x: Interval, y: Interval) -> Interval:
        if not (np.all(y.low >= 0) and np.all(y.high < 64)):
            most = np.maximum(np.abs(x.low), np.abs(x.high))
            return Interval(-most, most)
        return _corners(lambda u, n: np.floor(u / np.exp2(n)), x, y)

    def _i_and(self, x: Interval, y: Interval) -> Interval:
        tops = [z.high for z in (x, y) if np.all(z.low >= 0)]
        if not tops:
            return _span(x, y)
        return Interval(0.0, tops[0] if len(tops) == 1 else np.minimum(*tops))

    def _i_or(self, x: Interval, y: Interval) -> Interval:
        return _span(x, y)

    _i_xor = _i_or

    def _i_not(self, x: Interval) -> Interval:
        return Interval(-x.high - 1, -x.low - 1)

    # floats
    def _f_div(self, x: Interval, y: Interval) -> Interval:
        if not (np.all(y.low > 0) or np.all(y.high < 0)):
            return _unknown("f")
        return _corners(np.divide, x, y)

    def _rising(self, op: str, x: Interval) -> Interval:
        return Interval(OPERATIONS[op][1](x.low), OPERATIONS[op][1](x.high))

    def _f_sin(self, x: Interval) -> Interval:
        return Interval(-1.0, 1.0)

    _f_cos = _f_sin

    def _f_sqrt(self, x: Interval) -> Interval:
        return self._rising("sqrt", x) if np.all(x.low >= 0) else _unknown("f")

    def _f_log(self, x: Interval) -> Interval:
        return self._rising("log", x) if np.all(x.low > 0) else _unknown("f")

    def _f_log2(self, x: Interval) -> Interval:
        return self._rising("log2", x) if np.all(x.low > 0) else _unknown("f")

    def _f_rsqrt(self, x: Interval) -> Interval:
        if not np.all(x.low > 0):
            return _unknown("f")
        return Interval(1 / np.sqrt(x.high), 1 / np.sqrt(x.low))


def _rising_rule(op: str) -> Any:
    return lambda self, x: self._rising(op, x)


for _op in (*MONOTONE, *ROUNDINGS):
    setattr(Intervals, f"_f_{_op}", _rising_rule(_op))


def roughly(array: np.ndarray) -> Interval:
    """Bounds of an array's contents, up to powers of two, so that they hold after small changes."""
    low, high = _extent(array)
    if not (np.isfinite(low) and np.isfinite(high)):
        return Interval(-INFINITE, INFINITE, True)
    return Interval(-_power(-low), max(0.0, _power(high) - 1))


def within(array: np.ndarray, bounds: Interval) -> bool:
    """Whether an array's contents keep to bounds."""
    if bounds.nan:
        return True
    low, high = _extent(array)
    return bool(bounds.low <= low and high <= bounds.high)


def _extent(array: np.ndarray) -> tuple[float, float]:
    """The smallest and the largest element, NaN if one is."""
    array = array if array.dtype.kind in "biuf" else array.astype(np.float32)
    return float(array.min()), float(array.max())


def _power(x: float) -> float:
    """The power of two above x, 0 of what is not above 0."""
    return 2.0 ** math.ceil(x).bit_length() if x > 0 else 0.0


def _exact(x: Any) -> Any:
    """As float64; a float64 table is read as float32 by kernels."""
    x = np.asarray(x)
    return x.astype(np.float32).astype(np.float64) if x.dtype.kind == "f" else x.astype(np.float64)


def _any_of(dtype: np.dtype) -> Interval:
    if dtype.kind == "b":
        return Interval(0.0, 1.0)
    if dtype.kind in "iu":
        return Interval(float(np.iinfo(dtype).min), float(np.iinfo(dtype).max))
    return Interval(-INFINITE, INFINITE, True)


def _unknown(kind: str) -> Interval:
    if kind == "b":
        return Interval(0.0, 1.0)
    return Interval(-UNBOUNDED, UNBOUNDED) if kind == "i" else Interval(-INFINITE, INFINITE, True)


def _corners(f: Any, x: Interval, y: Interval) -> Interval:
    found = [f(u, v) for u in (x.low, x.high) for v in (y.low, y.high)]
    low = found[0]
    high = found[0]
    for z in found[1:]:
        low = np.minimum(low, z)
        high = np.maximum(high, z)
    return Interval(low, high)


def _span(x: Interval, y: Interval) -> Interval:
    """Of a bitwise operation: as many bits as the operands have."""
    most = max(float(np.max(np.maximum(np.abs(z.low), np.abs(z.high)))) for z in (x, y))
    top = np.exp2(np.ceil(np.log2(most + 1)))
    return Interval(0.0 if np.all(x.low >= 0) and np.all(y.low >= 0) else -top, top - 1)
