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
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..cpu.isa.score_calls import function_type
from .graph import COMPARISONS, Node
from .lanes import F32, F64, I1, I8, I32, I64, Lanes
from .program import Program, Table

TESTS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
LOGIC = {"and": "and_", "or": "or_", "xor": "xor"}
BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
         "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8}  # fmt: skip
ONCE = 0
PER_ROW = 1
PER_VALUE = 2


@dataclass(frozen=True)
class Form:
    """Which tile function of a program.

    double : scores are float64
    lanes : values of a vector
    gradient : rows are keys, and the slope is written too
    """

    double: bool
    lanes: int
    gradient: bool = False


def emit(module: ir.Module, name: str, program: Program, form: Form) -> None:
    """Add the tile function `name` to a module.

    Roots of the program: score, slope, mask, or None for what it does not have.
    """
    function = ir.Function(module, function_type(F64 if form.double else F32), name)
    for pointer in function.args[:3]:
        pointer.add_attribute("noalias")
    function.attributes.add("nounwind")
    _Tile(program, form, function).write()


class _Tile:
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

    def level(self, x: Node) -> int:
        if "score" in x.uses or self.lane_index in x.uses:
            return PER_VALUE
        return PER_ROW if self.row_index in x.uses else ONCE

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

    def _index(self, x: Any) -> Any:
        return x if self.whole == I64 else self.b.trunc(x, I32)

    def _tables(self) -> None:
        """Addresses, sizes and strides of the captured arrays."""
        self.base, self.sizes, self.strides = {}, {}, {}
        for number, table in self.program.tables.items():
            self.base[number] = self.b.inttoptr(self._frame(table.at), I8.as_pointer())
            places = [table.at + 1 + 2 * axis for axis in range(table.dimensions)]
            self.sizes[number] = [self._frame(at) for at in places]
            self.strides[number] = [self._frame(at + 1) for at in places]

    def _frame(self, at: int) -> Any:
        pointer = self.b.bitcast(self.args["frame"], I64.as_pointer())
        return self.b.load(self.b.gep(pointer, [I64(at)]), align=8)

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

    def get(self, x: Node) -> Any:
        """A node's value in every lane."""
        value = self.values[x.number]
        return self.many.splat(value) if self.level(x) < PER_VALUE else value

    # memory
    def _read(self, pointer: Any) -> Any:
        """Consecutive elements from a pointer on."""
        element = pointer.type.pointee
        if self.form.lanes == 1:
            return self.b.load(pointer)
        kind = self.many.of(element)
        wide = self.b.bitcast(pointer, kind.as_pointer())
        if self.mask is None:
            return self.b.load(wide, align=_size(element))
        return self._call(
            "masked.load", kind, wide, I32(_size(element)), self.mask, ir.Constant(kind, None)
        )

    def _store(self, x: Any, pointer: Any) -> None:
        if self.form.lanes == 1:
            self.b.store(x, pointer)
            return
        wide = self.b.bitcast(pointer, x.type.as_pointer())
        if self.mask is None:
            self.b.store(x, wide, align=_size(x.type.element))
        else:
            self._call(
                "masked.store", ir.VoidType(), x, wide, I32(_size(x.type.element)), self.mask
            )

    def _gather(self, pointers: Any, element: ir.Type) -> Any:
        kind = self.many.of(element)
        mask = self.many.fill(I1, 1) if self.mask is None else self.mask
        return self._call(
            "masked.gather", kind, pointers, I32(_size(element)), mask, ir.Constant(kind, None)
        )

    def _call(self, name: str, result: ir.Type, *args: Any) -> Any:
        """llvm.<name> with the suffix of its vector of values and of its pointers."""
        values = next(
            x.type
            for x in (*args, _Typed(result))
            if isinstance(x.type, ir.VectorType) and x.type.element != I1
        )
        if name == "masked.gather":
            values = result
        suffix = f"v{values.count}{_letter(values.element)}"
        pointers = f"v{values.count}p0" if name == "masked.gather" else "p0"
        kind = ir.FunctionType(result, [x.type for x in args])
        found = cgutils.get_or_insert_function(
            self.b.module, kind, f"llvm.{name}.{suffix}.{pointers}"
        )
        return self.b.call(found, args)

    # nodes
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
            return self._cast(lanes, x.kind, x.args[0].kind, args[0])
        if x.op == "div" and not scalar and self.level(x.args[1]) < PER_VALUE and "score" in x.uses:
            divisor = self.values[x.args[1].number]
            return lanes.mul(args[0], lanes.splat(self.b.fdiv(self.one.number(1.0), divisor)))
        return self._operation(lanes, x, args)

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

    def _cast(self, lanes: Lanes, kind: str, source: str, x: Any) -> Any:
        b = self.b
        if kind == "b":
            if source == "i":
                return b.icmp_signed("!=", x, lanes.integer(0))
            return b.fcmp_unordered("!=", x, lanes.number(0.0))
        if source == "b":
            yes, no = (
                (lanes.integer(1), lanes.integer(0))
                if kind == "i"
                else (lanes.number(1.0), lanes.number(0.0))
            )
            return b.select(x, yes, no)
        if kind == "f":
            return b.sitofp(x, lanes.of(self.real))
        x = lanes.to_integer(x)
        return x if self.whole == I32 else b.sext(x, lanes.of(I64))

    def _operation(self, lanes: Lanes, x: Node, args: list[Any]) -> Any:
        b = self.b
        op = x.op
        if op in COMPARISONS:
            if x.args[0].kind == "f":
                compare = b.fcmp_unordered if op == "ne" else b.fcmp_ordered
            else:
                compare = b.icmp_unsigned if x.args[0].kind == "b" else b.icmp_signed
            return compare(TESTS[op], *args)
        if op in LOGIC:
            return getattr(b, LOGIC[op])(*args)
        if op == "not":
            return b.not_(args[0])
        return self._integers(lanes, x, args) if x.kind == "i" else self._floats(lanes, x, args)

    def _floats(self, lanes: Lanes, x: Node, args: list[Any]) -> Any:
        b = self.b
        op = x.op
        if op in ("add", "sub", "mul", "div"):
            plain = {"add": b.fadd, "sub": b.fsub, "mul": b.fmul, "div": b.fdiv}[op]
            return plain(*args, flags=("contract",) if "score" in x.uses else ())
        if op == "neg":
            return b.fneg(args[0])
        if op == "abs":
            return lanes.magnitude(args[0])
        if op in ("min", "max"):
            return lanes.extreme(args[0], args[1], "<" if op == "min" else ">")
        if op in ("floordiv", "mod"):
            whole = lanes.intrinsic("floor", b.fdiv(*args))
            return whole if op == "floordiv" else b.fsub(args[0], b.fmul(whole, args[1]))
        return lanes.function(op)(*args)

    def _integers(self, lanes: Lanes, x: Node, args: list[Any]) -> Any:
        b = self.b
        op = x.op
        if op in ("add", "sub", "mul"):
            return getattr(b, op)(*args)
        if op == "neg":
            return b.neg(args[0])
        if op == "abs":
            return b.select(b.icmp_signed("<", args[0], lanes.integer(0)), b.neg(args[0]), args[0])
        if op in ("min", "max"):
            return b.select(b.icmp_signed("<" if op == "min" else ">", *args), *args)
        if op in ("shl", "shr"):
            amount = b.and_(args[1], lanes.integer(31))
            return b.shl(args[0], amount) if op == "shl" else b.ashr(args[0], amount)
        return self._divide(lanes, op, args[0], args[1], x.args[1])

    def _divide(self, lanes: Lanes, op: str, x: Any, y: Any, divisor: Node) -> Any:
        """`//` and `%` that round down; by 0 they give 0."""
        b = self.b
        value = divisor.data if divisor.op == "const" else 0
        if value > 0 and value & (value - 1) == 0:
            bits = value.bit_length() - 1
            return (
                b.ashr(x, lanes.integer(bits))
                if op == "floordiv"
                else b.and_(x, lanes.integer(value - 1))
            )
        zero = lanes.integer(0)
        one = lanes.integer(1)
        by_zero = b.icmp_signed("==", y, zero)
        by_minus = b.icmp_signed("==", y, lanes.integer(-1))  # the smallest number / -1 would trap
        safe = y if value > 0 else b.select(b.or_(by_zero, by_minus), one, y)
        quotient = b.sdiv(x, safe)
        rest = b.sub(x, b.mul(quotient, safe))
        signs = b.icmp_signed("<", b.xor(rest, safe), zero)
        down = b.and_(signs, b.icmp_signed("!=", rest, zero))
        if op == "mod":
            found = b.select(down, b.add(rest, safe), rest)
            return found if value > 0 else b.select(b.or_(by_zero, by_minus), zero, found)
        found = b.select(down, b.sub(quotient, one), quotient)
        return found if value > 0 else b.select(by_zero, zero, b.select(by_minus, b.neg(x), found))

    # captured arrays
    def _load(self, x: Node, scalar: bool) -> Any:
        table = self.program.tables[x.data]
        element = _element(table.dtype)
        base = self.b.bitcast(self.base[x.data], element.as_pointer())
        if scalar or self.form.lanes == 1:
            at = self._scalar_offset(x, table, range(len(x.args)), self.values)
            lanes = self.one if scalar else self.many
            return self._converted(
                lanes, table.dtype, self.b.load(self.b.gep(base, [at]), align=_size(element))
            )
        return self._converted(self.many, table.dtype, self._load_vector(x, table, base, element))

    def _load_vector(self, x: Node, table: Table, base: Any, element: ir.Type) -> Any:
        b = self.b
        moving = [axis for axis, y in enumerate(x.args) if self.level(y) == PER_VALUE]
        still = [axis for axis in range(len(x.args)) if axis not in moving]
        start = b.gep(base, [self._scalar_offset(x, table, still, self.values)])
        last = len(x.args) - 1
        if moving == [last] and table.dense and self.program.bounds[x.number, last].certain:
            way = self._direction(x.args[last])
            if way == 1:
                return self._read(b.gep(start, [self._first_lane(x.args[last])]))
            if way == -1 and self.mask is None:
                n = self.form.lanes
                lowest = b.sub(self._first_lane(x.args[last]), I64(n - 1))
                found = self._read(b.gep(start, [lowest]))
                order = ir.Constant(ir.VectorType(I32, n), list(range(n))[::-1])
                return b.shuffle_vector(found, ir.Constant(found.type, ir.Undefined), order)
        offset = None
        for axis in moving:
            index = self._inside(
                self.many, self.get(x.args[axis]), x, axis, self.sizes[x.data][axis]
            )
            index = self._offset_type(index, table)
            if not (axis == last and table.dense):
                stride = self.strides[x.data][axis]
                index = b.mul(
                    index, self.many.splat(stride if not table.small else b.trunc(stride, I32))
                )
            offset = index if offset is None else b.add(offset, index)
        return self._gather(self._pointers(start, offset), element)

    def _pointers(self, start: Any, offset: Any) -> Any:
        """A vector of pointers: start + offset in elements (llvmlite's gep takes no vectors)."""
        b = self.b
        n = self.form.lanes
        element = start.type.pointee
        address = b.ptrtoint(start, I64)
        wide = b.sext(offset, ir.VectorType(I64, n)) if offset.type.element != I64 else offset
        places = b.add(self.many.splat(address), b.mul(wide, self.many.fill(I64, _size(element))))
        return b.inttoptr(places, ir.VectorType(element.as_pointer(), n))

    def _offset_type(self, index: Any, table: Table) -> Any:
        wanted = I32 if table.small else I64
        element = index.type.element
        if element == wanted:
            return index
        target = ir.VectorType(wanted, self.form.lanes)
        return self.b.trunc(index, target) if wanted == I32 else self.b.sext(index, target)

    def _scalar_offset(self, x: Node, table: Table, axes: Any, values: dict[int, Any]) -> Any:
        """Elements from the array's first one, by the indices of some axes."""
        total: Any = I64(0)
        for axis in axes:
            index = self._inside(
                self.one, values[x.args[axis].number], x, axis, self.sizes[x.data][axis]
            )
            index = index if index.type == I64 else self.b.sext(index, I64)
            total = self.b.add(total, self.b.mul(index, self.strides[x.data][axis]))
        return total

    def _inside(self, lanes: Lanes, index: Any, x: Node, axis: int, size: Any) -> Any:
        """An index from 0 to size - 1.

        Negative ones count from the end, what is outside is clamped.
        """
        b = self.b
        bounds = self.program.bounds[x.number, axis]
        if bounds.certain:
            return index
        size = lanes.splat(self._index(size))
        zero = lanes.integer(0)
        if bounds.wrap:
            index = b.select(b.icmp_signed("<", index, zero), b.add(index, size), index)
        if bounds.low:
            index = b.select(b.icmp_signed("<", index, zero), zero, index)
        if bounds.high:
            top = b.sub(size, lanes.integer(1))
            index = b.select(b.icmp_signed(">", index, top), top, index)
        return index

    def _direction(self, x: Node) -> int:
        """By how much an index grows from lane to lane.

        1 or -1, 0 if it is not known to be one of them.
        """
        if x.op == self.lane_index:
            return 1
        if x.op in ("add", "sub"):
            left, right = (self.level(y) == PER_VALUE for y in x.args)
            if left and not right:
                return self._direction(x.args[0])
            if right and not left:
                return self._direction(x.args[1]) * (1 if x.op == "add" else -1)
        return 0

    def _first_lane(self, x: Node) -> Any:
        return self._signed64(self.b.extract_element(self.values[x.number], I32(0)))

    def _signed64(self, x: Any) -> Any:
        return x if x.type == I64 else self.b.sext(x, I64)

    def _converted(self, lanes: Lanes, dtype: str, x: Any) -> Any:
        """An array's elements as the kind of value that they are."""
        b = self.b
        if dtype == "bool":
            return b.icmp_unsigned("!=", x, lanes.fill(I8, 0))
        if dtype.startswith(("int", "uint")):
            target = self.whole
            source = 8 * BYTES[dtype]
            if source == target.width:
                return x
            if source > target.width:
                return b.trunc(x, lanes.of(target))
            return (b.zext if dtype[0] == "u" else b.sext)(x, lanes.of(target))
        if dtype == "float16":
            x = _half(lanes, x)
        elif dtype == "bfloat16":
            x = b.bitcast(b.shl(b.zext(x, lanes.of(I32)), lanes.fill(I32, 16)), lanes.of(F32))
        if dtype == "float64":
            return x if self.real == F64 else b.fptrunc(x, lanes.of(F32))
        return x if self.real == F32 else b.fpext(x, lanes.of(F64))


class _Typed:
    def __init__(self, kind: ir.Type) -> None:
        self.type = kind


def _element(dtype: str) -> ir.Type:
    return {"float32": F32, "float64": F64}.get(dtype) or ir.IntType(8 * BYTES[dtype])


def _size(element: ir.Type) -> int:
    return {F32: 4, F64: 8}.get(element) or element.width // 8


def _letter(element: ir.Type) -> str:
    return {F32: "f32", F64: "f64"}.get(element) or f"i{element.width}"


def _half(lanes: Lanes, x: Any) -> Any:
    """float16 bits as float32 without an instruction for it.

    Shifted, and brought to scale by 2**112.
    """
    b = lanes.b
    x = b.zext(x, lanes.of(I32))
    shifted = b.shl(b.and_(x, lanes.fill(I32, 0x7FFF)), lanes.fill(I32, 13))
    special = b.icmp_unsigned(">=", shifted, lanes.fill(I32, 0x7C00 << 13))
    size = b.fmul(b.bitcast(shifted, lanes.of(F32)), lanes.fill(F32, 2.0**112))
    size = b.bitcast(size, lanes.of(I32))
    size = b.select(special, b.or_(size, lanes.fill(I32, 0x7F800000)), size)
    sign = b.shl(b.and_(x, lanes.fill(I32, 0x8000)), lanes.fill(I32, 16))
    return b.bitcast(b.or_(size, sign), lanes.of(F32))
