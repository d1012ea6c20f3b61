"""LLVM IR of a tile function: rows of scores changed and masked in place, a vector at a time.

tile(frame, x, slope, base, stride, rows, count, b, h, q, k, scale, unit), the C function:

    frame   what `Program.frame` gives
    x       scores in the caller's units, `rows` rows of `count`, `stride` apart; becomes
            score_mod(x * scale) * unit, -inf where the mask hides
    slope   the same for d score_mod / d score of gradient tiles; else null, or int16 with the same
            stride: the changed scores rounded, while x stays as it is
    base    null, or int32 for each row, up to 2**23, a multiple of 256: taken off before int16
    b, h    batch entry and head
    q, k    the first query and key

Along a row run the keys, in gradient tiles the queries. What depends on neither is computed once,
what depends on the row only once per row. The last values of a row, fewer than a vector, are read
and written under a mask: nothing outside of a row or an array is touched.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from ..cpu.isa.score_calls import function_type
from .graph import INDICES, Node
from .lanes import F32, F64, I1, I16, I32, I64, MAGIC, Lanes
from .operations import cast, operation
from .program import HUGE, Program
from .tile_memory import ONCE, PER_ROW, PER_VALUE, Form, Memory

LOWEST = -32768


def emit(module: ir.Module, name: str, program: Program, form: Form) -> None:
    """Add the tile function `name` to a module.

    Roots of the program: score, slope, mask, or None for what it does not have.
    """
    function = ir.Function(module, function_type(F64 if form.double else F32), name)
    for pointer in function.args[:4]:
        pointer.add_attribute("noalias")
    function.attributes.add("nounwind")
    TileWriter(program, form, function).write()


class TileWriter(Memory):
    """Values of a program's nodes while its function is written."""

    NAMES: tuple[str, ...] = (
        "frame", "x", "slope", "base", "stride", "rows", "count", "b", "h", "q", "k", "scale", "unit",
    )  # fmt: skip

    def __init__(self, program: Program, form: Form, function: ir.Function) -> None:
        self.program, self.form = program, form
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.args = dict(zip(self.NAMES, function.args, strict=True))
        for name, x in self.args.items():
            x.name = name
        self.real = F64 if form.double else F32
        self.whole = I64 if program.wide else I32
        self.one = Lanes(self.b, self.real, self.whole, 1)
        self.many = Lanes(self.b, self.real, self.whole, form.lanes)
        self.lane_index, self.row_index = ("q", "k") if form.gradient else ("k", "q")
        self.values: dict[int, Any] = {}
        self.pieces: dict[int, tuple[Any, list[Any]]] = {}
        self.mask: Any = None  # of the lanes that exist, in the last vector of a row

    def _may_be_huge(self, x: Node) -> bool:
        """Whether a node may bring finite numbers that are infinite in the caller's units."""
        if x.op == "load":
            return x.kind == "f" and self.program.graph.arrays[x.data].dtype != np.float16
        return x.op == "const" and x.kind == "f" and HUGE < abs(x.data) < math.inf

    def _may_hide(self, x: Node) -> bool:
        """Whether a node is written to hide scores: -inf, or an array's elements, which may be."""
        if x.op == "load":
            return x.kind == "f" and self.level(x) == PER_VALUE
        return x.op == "const" and x.kind == "f" and math.isinf(x.data)

    def write(self) -> None:
        b = self.b
        args = self.args
        self.integers = b.bitcast(args["slope"], I16.as_pointer())
        self.rounds = b.icmp_unsigned("!=", self.integers, ir.Constant(self.integers.type, None))
        self.hides = any(self._may_hide(x) for x in self.program.nodes)
        self._tables()
        self._compute(ONCE)
        zero = cgutils.alloca_once_value(b, I32(0))
        none = b.icmp_unsigned("==", args["base"], ir.Constant(zero.type, None))
        self.bases = b.select(none, zero, args["base"])
        self.base_step = b.select(none, I64(0), I64(1))
        with cgutils.for_range(b, args["rows"], intp=I64) as row:
            first = b.add(args[self.row_index], row.index)
            self.row = self._index(first)
            self._compute(PER_ROW)
            if not (self.form.double or self.form.gradient):
                self._begin_row(row.index)
            start = b.mul(row.index, args["stride"])
            self._over_vectors(functools.partial(self._vector, start))
        b.ret_void()

    def _over_vectors(self, body: Callable[[], None]) -> None:
        """body() for every vector of a row, the last one under a mask where it is not whole."""
        b, lanes, count = self.b, self.form.lanes, self.args["count"]
        whole = b.sdiv(count, I64(lanes))
        with cgutils.for_range(b, whole, intp=I64) as turn:
            self.column, self.mask = b.mul(turn.index, I64(lanes)), None
            body()
        if lanes == 1:
            return
        self.column = b.mul(whole, I64(lanes))
        rest = b.sub(count, self.column)
        with b.if_then(b.icmp_signed(">", rest, I64(0))):
            places = ir.Constant(ir.VectorType(I32, lanes), list(range(lanes)))
            self.mask = b.icmp_signed("<", places, self.many.splat(b.trunc(rest, I32)))
            body()

    def _compute(self, level: int) -> None:
        for x in self.program.nodes:
            if self.level(x) == level:
                self.values[x.number] = self._value(x)

    def _vector(self, start: Any) -> None:
        """One vector of a row, in which only the lanes of the mask exist."""
        b = self.b
        many = self.many
        at = b.add(start, self.column)
        pointer = b.gep(self.args["x"], [at])
        self.raw = self._read(pointer)
        self._compute(PER_VALUE)
        x, slope = self._changed(), self.program.roots_by_name[1]
        if self.form.gradient:
            self._store(self._unless_hidden(x, many.number(-math.inf)), pointer)
            d = many.number(1.0) if slope is None else self.get(slope)
            self._store(self._unless_hidden(d, many.number(0.0)), b.gep(self.args["slope"], [at]))
        elif self.form.double:
            self._store(self._unless_hidden(x, many.number(-math.inf)), pointer)
        else:
            with b.if_else(self.rounds) as (rounded, unrounded):
                with rounded:
                    hidden = many.fill(I16, LOWEST)
                    found = self._unless_hidden(self._rounded(x), hidden)
                    self._store(found, b.gep(self.integers, [at]))
                with unrounded:
                    self._store(self._unless_hidden(x, many.number(-math.inf)), pointer)

    def _changed(self) -> Any:
        """The score as the score function leaves it, in the caller's units."""
        score, unit = self.program.roots_by_name[0], self.args["unit"]
        if score is None:
            return self.many.mul(self.raw, self.many.splat(self.one.mul(self.args["scale"], unit)))
        if self.form.double or not any(map(self._may_be_huge, self.program.nodes)):
            return self._times(score, unit)
        # -inf would hide a key that a finite score, as `torch.finfo(torch.float32).min`, does not hide
        return self.many.times_in_range(self.get(score), unit)

    def _unless_hidden(self, x: Any, hidden: Any) -> Any:
        seen = self.program.roots_by_name[2]
        return x if seen is None else self.b.select(self.get(seen), x, hidden)

    def _begin_row(self, row: Any) -> None:
        """What int16 holds of this row, and the number whose sum has the integer in its last bits."""
        b, one = self.b, self.one
        found = b.load(b.gep(self.bases, [b.mul(row, self.base_step)]))
        base = b.sitofp(found, F32)
        self.range = (
            b.fadd(base, one.number(-1.0 - LOWEST)),
            b.fadd(base, one.number(1.0 + LOWEST)),
            b.fsub(one.number(MAGIC), base),
        )

    def _rounded(self, x: Any) -> Any:
        """int16, the lowest of which is kept for -inf; NaN, like what is too large, is the highest.

        Only where -inf is likely is it looked for: a row of it alone is done again in float32 then.
        """
        b, many = self.b, self.many
        top, bottom, magic = map(many.splat, self.range)
        y = b.select(b.fcmp_ordered("<", x, top), x, top)
        y = b.select(b.fcmp_ordered("<", y, bottom), bottom, y)
        n = b.trunc(many.bits(b.fadd(y, magic)), many.of(I16))
        if not self.hides:
            return n
        hidden = b.fcmp_ordered("==", x, many.number(-math.inf))
        return b.select(hidden, many.fill(I16, LOWEST), n)

    def _value(self, x: Node) -> Any:
        scalar = self.scalar(x)
        lanes = self.one if scalar else self.many
        if x.op == self.row_index:
            return self.row
        if x.op == self.lane_index:
            first = self._index(self.b.add(self.args[x.op], self.column))
            steps = list(range(self.form.lanes))
            return self.b.add(
                lanes.splat(first), ir.Constant(lanes.of(self.whole), steps if lanes.n > 1 else 0)
            )
        if x.op in INDICES:
            return self._index(self.args[x.op])
        if x.op == "score":
            return lanes.mul(self.raw, lanes.splat(self.args["scale"]))
        if x.op == "const":
            return self._constant(x)
        if x.op == "load":
            return self._load(x, scalar)
        args = [self.values[y.number] if scalar else self.get(y) for y in x.args]
        if x.op == "where":
            return self.b.select(*args)
        if x.op == "cast":
            return cast(lanes, x.kind, x.args[0].kind, args[0])
        if not scalar and self._multiplied(x) is not None:
            return self._times(x)
        return operation(lanes, x, args)

    def _multiplied(self, x: Node) -> Node | None:
        """The operand of a product of a score and what is no vector, or of such a quotient."""
        if x.kind != "f" or x.op not in ("mul", "div") or "score" not in x.uses:
            return None
        if self.scalar(x.args[1]):
            return x.args[0]
        return x.args[1] if x.op == "mul" and self.scalar(x.args[0]) else None

    def _times(self, x: Node, *factors: Any) -> Any:
        """A node's value times scalars, with as few products of vectors as possible.

        Scalars are multiplied with each other first (of `scale` and `unit`, about 1 together, no
        other factor makes an infinity), and go into a sum with one operand that takes them for
        nothing.
        """
        b, one, many = self.b, self.one, self.many
        if self.scalar(x):
            return many.splat(functools.reduce(one.mul, factors, self.values[x.number]))
        operand = self._multiplied(x)
        if operand is not None:
            other = self.values[x.args[1 if operand is x.args[0] else 0].number]
            other = other if x.op == "mul" else b.fdiv(one.number(1.0), other)
            return self._times(operand, *factors, other)
        in_sum = x.op in ("add", "sub") and x.kind == "f" and self.level(x) == PER_VALUE
        if in_sum and any(map(self._takes_factor, x.args)):
            return getattr(many, x.op)(*(self._times(y, *factors) for y in x.args))
        if x.op == "score":
            return many.mul(
                self.raw, many.splat(functools.reduce(one.mul, factors, self.args["scale"]))
            )
        return many.mul(self.values[x.number], many.splat(functools.reduce(one.mul, factors)))

    def _takes_factor(self, x: Node) -> bool:
        """Whether a scalar factor of a node costs no product of vectors."""
        free = self.scalar(x) or x.op == "score" or self._multiplied(x) is not None
        in_sum = x.op in ("add", "sub") and self.level(x) == PER_VALUE
        return free or (in_sum and all(map(self._takes_factor, x.args)))

    def _constant(self, x: Node) -> Any:
        at = self.program.parameters.get(x.number)
        if at is None:
            kinds = {"b": I1, "i": self.whole, "f": self.real}
            return ir.Constant(kinds[x.kind], int(x.data) if x.kind != "f" else x.data)
        bits = self._frame(at)
        if x.kind == "i":
            return self._index(bits)
        value = self.b.bitcast(bits, F64)
        return value if self.real == F64 else self.b.fptrunc(value, F32)
