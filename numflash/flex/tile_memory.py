"""How a tile function reads memory: scores of a row, and captured arrays by computed indices.

Nothing outside of a row or an array is touched: the last vector of a row is read and written under
a mask, and an index that is not certain to be inside is brought there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from .graph import Node
from .lanes import F32, F64, I1, I8, I32, I64, Lanes
from .program import Program, Table

BYTES = {"bool": 1, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2,
         "int32": 4, "uint32": 4, "float32": 4, "int64": 8, "uint64": 8, "float64": 8}  # fmt: skip
# A permutation of a vector of int32, by lanes; x86 has one.
PERMUTE = {16: "llvm.x86.avx512.permvar.si.512", 8: "llvm.x86.avx2.permd"}
# How often a node is computed; from PER_KEY on in vectors.
ONCE = 0
PER_ROW = 1
PER_KEY = 2  # once for all rows, where these are query heads at one position
PER_VALUE = 3


@dataclass(frozen=True)
class Form:
    """Which tile function of a program.

    double : scores are float64
    lanes : values of a vector
    gradient : rows are keys, and the slope is written too
    cached : of decoding (`emit_cached`), over "floats" or "integers"; else ""
    """

    double: bool
    lanes: int
    gradient: bool = False
    cached: str = ""


class Memory:
    """A program's memory while its function is written; `emit.TileWriter` adds the values.

    b : the IR builder
    args : arguments of the function by name
    one, many : scalars, and the vectors along a row
    values : of the nodes so far, by number
    mask : the lanes that exist, None for all
    column : of the present vector's first value
    lane_index, row_index : names of the indices along a row and across rows
    """

    program: Program
    form: Form
    b: Any
    args: dict[str, Any]
    real: ir.Type
    whole: ir.Type
    one: Lanes
    many: Lanes
    lane_index: str
    row_index: str
    values: dict[int, Any]
    mask: Any
    column: Any

    def level(self, x: Node) -> int:
        if "score" in x.uses or self.lane_index in x.uses:
            return PER_VALUE
        return PER_ROW if self.row_index in x.uses else ONCE

    def scalar(self, x: Node) -> bool:
        """Whether a node has one value for all lanes."""
        return self.level(x) <= PER_ROW

    def get(self, x: Node) -> Any:
        """A node's value in every lane."""
        value = self.values[x.number]
        return self.many.splat(value) if self.scalar(x) else value

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

    # scores
    def _read(self, pointer: Any, there: Any = None) -> Any:
        """Consecutive elements from a pointer on; the lanes that are `there`, or exist."""
        element = pointer.type.pointee
        if self.form.lanes == 1:
            return self.b.load(pointer)
        kind = self.many.of(element)
        wide = self.b.bitcast(pointer, kind.as_pointer())
        there = self.mask if there is None else there
        if there is None:
            return self.b.load(wide, align=size_of(element))
        return self._call(
            "masked.load", kind, wide, I32(size_of(element)), there, ir.Constant(kind, None)
        )

    def _store(self, x: Any, pointer: Any) -> None:
        if self.form.lanes == 1:
            self.b.store(x, pointer)
            return
        wide = self.b.bitcast(pointer, x.type.as_pointer())
        if self.mask is None:
            self.b.store(x, wide, align=size_of(x.type.element))
        else:
            self._call(
                "masked.store", ir.VoidType(), x, wide, I32(size_of(x.type.element)), self.mask
            )

    def _gather(self, pointers: Any, element: ir.Type) -> Any:
        kind = self.many.of(element)
        mask = self.many.fill(I1, 1) if self.mask is None else self.mask
        return self._call(
            "masked.gather", kind, pointers, I32(size_of(element)), mask, ir.Constant(kind, None)
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

    # captured arrays
    def _load(self, x: Node, scalar: bool) -> Any:
        table = self.program.tables[x.data]
        element = element_of(table.dtype)
        base = self.b.bitcast(self.base[x.data], element.as_pointer())
        if scalar or self.form.lanes == 1:
            at = self._scalar_offset(x, range(len(x.args)))
            lanes = self.one if scalar else self.many
            return self._converted(
                lanes, table.dtype, self.b.load(self.b.gep(base, [at]), align=size_of(element))
            )
        return self._converted(self.many, table.dtype, self._load_vector(x, table, base, element))

    def _load_vector(self, x: Node, table: Table, base: Any, element: ir.Type) -> Any:
        b = self.b
        moving = [axis for axis, y in enumerate(x.args) if not self.scalar(y)]
        still = [axis for axis in range(len(x.args)) if axis not in moving]
        start = b.gep(base, [self._scalar_offset(x, still)])
        last = len(x.args) - 1
        way = self._direction(x.args[last]) if moving == [last] and table.dense else 0
        if way == 1 or (way == -1 and self.mask is None):
            return self._load_run(x, table, start, way)
        return self._load_any(x, table, start, moving)

    def _load_any(self, x: Node, table: Table, start: Any, moving: list[int]) -> Any:
        """Elements at indices in any order."""
        alone = moving == [len(x.args) - 1] and table.dense
        four_bytes = size_of(start.type.pointee) == 4 and self.whole == I32
        if alone and four_bytes and self.mask is None and self.form.lanes in PERMUTE:
            return self._load_near(x, table, start)
        return self._load_scattered(x, table, start, moving)

    def _load_run(self, x: Node, table: Table, start: Any, way: int) -> Any:
        """Elements that lie side by side, in the order of the lanes (way 1) or against it (-1)."""
        b, n, last = self.b, self.form.lanes, len(x.args) - 1
        first = self._first_lane(x.args[last])
        lowest = first if way == 1 else b.sub(first, I64(n - 1))

        def run() -> Any:
            found = self._read(b.gep(start, [lowest]))
            if way == 1:
                return found
            order = ir.Constant(ir.VectorType(I32, n), list(range(n))[::-1])
            return b.shuffle_vector(found, ir.Constant(found.type, ir.Undefined), order)

        if self.program.bounds[x.number, last].certain:
            return run()
        # an index may leave the array somewhere, but hardly in this vector
        beyond = b.sub(self.sizes[x.data][last], I64(n - 1))
        inside = b.and_(b.icmp_signed(">=", lowest, I64(0)), b.icmp_signed("<", lowest, beyond))
        return self._either(inside, run, lambda: self._load_any(x, table, start, [last]))

    def _load_near(self, x: Node, table: Table, start: Any) -> Any:
        """Elements of four bytes that often lie near each other: of distances, buckets, short arrays.

        Where one vector holds them all, it is read and permuted, in a third of a gather's time.
        """
        b, n, last = self.b, self.form.lanes, len(x.args) - 1
        size = self.sizes[x.data][last]
        index = self._inside(self.many, self.get(x.args[last]), x, last, size)
        ends = [self._signed64(b.extract_element(index, I32(i))) for i in (0, n - 1)]
        lowest = self._smaller(self._smaller(*ends), b.sub(size, I64(n)))
        lowest = b.select(b.icmp_signed("<", lowest, I64(0)), I64(0), lowest)
        place = b.sub(index, self.many.splat(b.trunc(lowest, I32)))
        short = self._smaller(size, I64(n))  # the whole of a short array
        near = b.bitcast(b.icmp_unsigned("<", place, self.many.fill(I32, n)), ir.IntType(n))

        def permuted() -> Any:
            lanes = ir.Constant(place.type, list(range(n)))
            there = b.icmp_signed("<", lanes, self.many.splat(b.trunc(short, I32)))
            found = self._read(b.gep(start, [lowest]), there)
            kind = ir.FunctionType(place.type, [place.type] * 2)
            permute = cgutils.get_or_insert_function(b.module, kind, PERMUTE[n])
            words = b.call(permute, [b.bitcast(found, place.type), place])
            return b.bitcast(words, found.type)

        every = b.icmp_signed("==", near, ir.Constant(near.type, -1))
        return self._either(every, permuted, lambda: self._load_scattered(x, table, start, [last]))

    def _smaller(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", x, y), x, y)

    def _either(self, test: Any, yes: Callable[[], Any], no: Callable[[], Any]) -> Any:
        """yes() where the scalar test holds, else no(): a branch."""
        b, found = self.b, []
        with b.if_else(test, likely=True) as ways:
            for way, value in zip(ways, (yes, no), strict=True):
                with way:
                    found.append((value(), b.block))
        phi = b.phi(found[0][0].type)
        for value, block in found:
            phi.add_incoming(value, block)
        return phi

    def _load_scattered(self, x: Node, table: Table, start: Any, moving: list[int]) -> Any:
        """Elements by an address for each lane, from indices that are brought inside."""
        b, last = self.b, len(x.args) - 1
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
        return self._gather(self._pointers(start, offset), start.type.pointee)

    def _pointers(self, start: Any, offset: Any) -> Any:
        """A vector of pointers: start + offset in elements (llvmlite's gep takes no vectors)."""
        b = self.b
        n = self.form.lanes
        element = start.type.pointee
        address = b.ptrtoint(start, I64)
        wide = b.sext(offset, ir.VectorType(I64, n)) if offset.type.element != I64 else offset
        places = b.add(self.many.splat(address), b.mul(wide, self.many.fill(I64, size_of(element))))
        return b.inttoptr(places, ir.VectorType(element.as_pointer(), n))

    def _offset_type(self, index: Any, table: Table) -> Any:
        wanted = I32 if table.small else I64
        element = index.type.element
        if element == wanted:
            return index
        target = ir.VectorType(wanted, self.form.lanes)
        return self.b.trunc(index, target) if wanted == I32 else self.b.sext(index, target)

    def _scalar_offset(self, x: Node, axes: Iterable[int]) -> Any:
        """Elements from the array's first one, by the indices of some axes."""
        total: Any = I64(0)
        for axis in axes:
            index = self._inside(
                self.one, self.values[x.args[axis].number], x, axis, self.sizes[x.data][axis]
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
            left, right = (not self.scalar(y) for y in x.args)
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


def element_of(dtype: str) -> ir.Type:
    """The LLVM type of an array's elements; integers of their bits for what LLVM has no type for."""
    return {"float32": F32, "float64": F64}.get(dtype) or ir.IntType(8 * BYTES[dtype])


def size_of(element: ir.Type) -> int:
    """Bytes of an element."""
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
