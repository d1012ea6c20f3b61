"""LLVM IR of a tile function: rows of scores changed and masked in place, a vector at a time.

tile(frame, x, slope, stride, rows, count, b, h, q, k, scale, unit), the C function:

    frame   what `Program.frame` gives
    x       scores in the caller's units, `rows` rows of `count`, `stride` apart; becomes
            score_mod(x * scale) * unit, -inf where the mask hides
    slope   the same for d score_mod / d score, only of gradient tiles
    b, h    batch entry and head
    q, k    the first query and key

Along a row run the keys, in gradient tiles the queries. What depends on neither is computed once,
what depends on the row only once per row. The last values of a row, fewer than a vector, are read
and written under a mask: nothing outside of a row or an array is touched.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..cpu.isa.score_calls import function_type
from .graph import Node
from .lanes import F32, F64, I1, I32, I64, Lanes
from .operations import cast, operation
from .program import Program
from .tile_memory import ONCE, PER_ROW, PER_VALUE, Form, Memory

__all__ = ["Form", "TileWriter", "emit"]


def emit(module: ir.Module, name: str, program: Program, form: Form) -> None:
    """Add the tile function `name` to a module.

    Roots of the program: score, slope, mask, or None for what it does not have.
    """
    function = ir.Function(module, function_type(F64 if form.double else F32), name)
    for pointer in function.args[:3]:
        pointer.add_attribute("noalias")
    function.attributes.add("nounwind")
    TileWriter(program, form, function).write()


class TileWriter(Memory):
    """Values of a program's nodes while its function is written."""

    def __init__(self, program: Program, form: Form, function: ir.Function) -> None:
        self.program, self.form = program, form
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        names = (
            "frame",
            "x",
            "slope",
            "stride",
            "rows",
            "count",
            "b",
            "h",
            "q",
            "k",
            "scale",
            "unit",
        )
        self.args = dict(zip(names, function.args, strict=True))
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

    def write(self) -> None:
        b = self.b
        args = self.args
        self._tables()
        self._compute(ONCE)
        with cgutils.for_range(b, args["rows"], intp=I64) as row:
            first = b.add(args[self.row_index], row.index)
            self.row = self._index(first)
            self._compute(PER_ROW)
            start = b.mul(row.index, args["stride"])
            whole = b.sdiv(args["count"], I64(self.form.lanes))
            with cgutils.for_range(b, whole, intp=I64) as turn:
                self._vector(start, b.mul(turn.index, I64(self.form.lanes)), None)
            if self.form.lanes > 1:
                done = b.mul(whole, I64(self.form.lanes))
                rest = b.sub(args["count"], done)
                with b.if_then(b.icmp_signed(">", rest, I64(0))):
                    lanes = ir.Constant(
                        ir.VectorType(I32, self.form.lanes), list(range(self.form.lanes))
                    )
                    self._vector(
                        start, done, b.icmp_signed("<", lanes, self.many.splat(b.trunc(rest, I32)))
                    )
        b.ret_void()

    def _compute(self, level: int) -> None:
        for x in self.program.nodes:
            if self.level(x) == level:
                self.values[x.number] = self._value(x)

    def _vector(self, start: Any, column: Any, mask: Any) -> None:
        """One vector of a row, in which only the lanes of `mask` exist."""
        b = self.b
        many = self.many
        self.mask, self.column = mask, column
        at = b.add(start, column)
        pointer = b.gep(self.args["x"], [at])
        self.raw = self._read(pointer)
        self._compute(PER_VALUE)
        score, slope, seen = self.program.roots_by_name
        unit = many.splat(self.args["unit"])
        x = many.mul(self.raw, many.splat(self.args["scale"])) if score is None else self.get(score)
        x = b.fmul(x, unit)
        if seen is not None:
            x = b.select(self.get(seen), x, many.number(-math.inf))
        self._store(x, pointer)
        if self.form.gradient:
            d = many.number(1.0) if slope is None else self.get(slope)
            if seen is not None:
                d = b.select(self.get(seen), d, many.number(0.0))
            self._store(d, b.gep(self.args["slope"], [at]))

    def _value(self, x: Node) -> Any:
        scalar = self.level(x) < PER_VALUE
        lanes = self.one if scalar else self.many
        if x.op in ("b", "h"):
            return self._index(self.args[x.op])
        if x.op == self.row_index:
            return self.row
        if x.op == self.lane_index:
            first = self._index(self.b.add(self.args[x.op], self.column))
            steps = list(range(self.form.lanes))
            return self.b.add(
                lanes.splat(first), ir.Constant(lanes.of(self.whole), steps if lanes.n > 1 else 0)
            )
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
        if x.op == "div" and not scalar and self.level(x.args[1]) < PER_VALUE and "score" in x.uses:
            divisor = self.values[x.args[1].number]
            return lanes.mul(args[0], lanes.splat(self.b.fdiv(self.one.number(1.0), divisor)))
        return operation(lanes, x, args)

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
