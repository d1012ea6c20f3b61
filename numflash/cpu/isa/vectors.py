"""LLVM vector operations for the register tiles: what every instruction set has in common.

An `Isa` describes an instruction set by data (lanes, layout of the packed operands) and a few
operations; `vectors_x86` and `vectors_arm` are the only places that name instructions of one CPU.
Micro-kernels and softmax are written once against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I8 = ir.IntType(8)
I16 = ir.IntType(16)
I32 = ir.IntType(32)
I64 = ir.IntType(64)
F32 = ir.FloatType()


def vector(element: ir.Type, lanes: int) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def constant(vec: ir.VectorType, value) -> ir.Constant:
    return ir.Constant(vec, [value] * vec.count)


def signed16(n: int) -> int:
    """The int16 that has the bits of n, 0 to 65535: as constants of vectors are written."""
    return n if n < 32768 else n - 65536


def call(b: ir.IRBuilder, name: str, result: ir.Type, *args):
    fn = cgutils.get_or_insert_function(
        b.module, ir.FunctionType(result, [a.type for a in args]), name
    )
    return b.call(fn, list(args))


def splat(b: ir.IRBuilder, x, vec: ir.VectorType):
    undef = ir.Constant(vec, ir.Undefined)
    return b.shuffle_vector(
        b.insert_element(undef, x, I32(0)), undef, constant(vector(I32, vec.count), 0)
    )


def shuffle(b: ir.IRBuilder, x, y, lanes: list[int]):
    return b.shuffle_vector(x, y, ir.Constant(vector(I32, len(lanes)), lanes))


def data(context, b: ir.IRBuilder, array_type, array):
    """Pointer to the first byte of a Numba array, or to the byte at an address."""
    if isinstance(array_type, types.Integer):
        return b.inttoptr(array, I8.as_pointer())
    return b.bitcast(context.make_array(array_type)(context, b, array).data, I8.as_pointer())


def at(b: ir.IRBuilder, base, index, ty: ir.Type, size: int):
    """Pointer to `ty` at element `index` of a base pointer, elements of `size` bytes."""
    return b.bitcast(b.gep(base, [b.mul(index, I64(size))]), ty.as_pointer())


def load(b: ir.IRBuilder, base, index, ty: ir.Type, size: int, align: int | None = None):
    x = b.load(at(b, base, index, ty, size))
    x.align = align or size
    return x


def in_order(x):
    """A load as it is, that stays behind such loads before it."""
    x.opname = "load volatile"
    return x


def store(b: ir.IRBuilder, x, base, index, size: int) -> None:
    b.store(x, at(b, base, index, x.type, size)).align = size


def pointer_at(b: ir.IRBuilder, base, offset):
    """The pointer `offset` bytes behind `base`; offset is a number or an IR value."""
    return b.gep(base, [offset if not isinstance(offset, int) else I64(offset)])


def load_at(b: ir.IRBuilder, base, ty: ir.Type, offset, align: int = 4):
    """The value of type `ty` that is stored `offset` bytes behind `base`."""
    x = b.load(b.bitcast(pointer_at(b, base, offset), ty.as_pointer()))
    x.align = align
    return x


def store_at(b: ir.IRBuilder, x, base, offset, align: int = 4) -> None:
    """Store x `offset` bytes behind `base`."""
    b.store(x, b.bitcast(pointer_at(b, base, offset), x.type.as_pointer())).align = align


def prefetch(b: ir.IRBuilder, address, locality: int = 2) -> None:
    """Prefetch the cache line at `address`, for reading.

    Locality 3 brings it into all levels, 2 into the second one.
    """
    call(b, "llvm.prefetch.p0", ir.VoidType(), address, I32(0), I32(locality), I32(1))


@intrinsic
def prefetch_line(typingctx, place):
    """f(address): prefetch the cache line there into all levels."""

    def codegen(context, b, sig, a):
        prefetch(b, pointer(b, a[0]), 3)
        return context.get_dummy_value()

    return types.void(types.intp), codegen


def prefetch_once(b: ir.IRBuilder, address) -> None:
    """Prefetch the cache line at `address` into the second level, for reading once.

    PLDL2STRM on AArch64; x86 has no such hint of the second level: PREFETCHNTA.
    """
    if "aarch64" in b.module.triple:
        call(b, "llvm.aarch64.prefetch", ir.VoidType(), address, I32(0), I32(1), I32(1), I32(1))
    else:
        prefetch(b, address, 0)


def repeat(b: ir.IRBuilder, first, stop, state: list, body) -> list:
    """`for n in range(first, stop)`: body(n, state) -> state; the state after the last one.

    The state stays in registers.
    """
    entry = b.block
    loop = b.append_basic_block("repeat")
    done = b.append_basic_block("repeat.end")
    b.cbranch(b.icmp_signed("<", first, stop), loop, done)
    b.position_at_end(loop)
    n = b.phi(I64)
    now = [b.phi(x.type) for x in state]
    new = body(n, now)
    following = b.add(n, I64(1))
    end = b.block
    b.cbranch(b.icmp_signed("<", following, stop), loop, done)
    b.position_at_end(done)
    final = [b.phi(x.type) for x in state]
    for phi, x, y in zip(
        [n, *now, *final], [first, *state, *state], [following, *new, *new], strict=True
    ):
        phi.add_incoming(x, entry)
        phi.add_incoming(y, end)
    return final


def fold_tree(b: ir.IRBuilder, rows: list, combine):
    """<n x element>: each of n vectors reduced to one value by combine(x, y), by a transposing tree.

    Two vectors become one that holds half as many lanes of each, until the n rows are side by side,
    then the blocks of n are combined. About 4 instructions a row, where reducing row by row takes 9.
    Vectors have n lanes at least, both powers of two.
    """
    lanes = rows[0].type.count
    unit = len(rows)
    part = unit // 2
    while part:
        low = [j for j in range(lanes) if j % (2 * part) < part]
        high = [j + part for j in low]
        low, high = (
            _by_block(side + [lanes + j for j in side], lanes, unit) for side in (low, high)
        )
        rows = [
            combine(shuffle(b, x, y, low), shuffle(b, x, y, high))
            for x, y in zip(rows[::2], rows[1::2], strict=True)
        ]
        part //= 2
    (x,) = rows
    while lanes > unit:
        lanes //= 2
        x = combine(*(shuffle(b, x, x, list(range(n, n + lanes))) for n in (0, lanes)))
    return x


def _by_block(chosen: list[int], lanes: int, unit: int) -> list[int]:
    """Chosen lanes of two vectors, first all of one, then all of the other, as halves of every
    block of `unit` lanes.
    """
    half = unit // 2
    return [
        n
        for k in range(0, lanes // 2, half)
        for n in chosen[k : k + half] + chosen[lanes // 2 + k : lanes // 2 + k + half]
    ]


def clamp(b: ir.IRBuilder, x, limit: float):
    """A vector of float32 cut at +-limit; NaN stays NaN."""
    for sign, test in ((1.0, ">"), (-1.0, "<")):
        bound = constant(x.type, sign * limit)
        x = b.select(b.fcmp_ordered(test, x, bound), bound, x)
    return x


class Scalable(ir.Type):
    """<vscale x count x element>: `count` elements for every 128 bits of the machine's vectors."""

    def __init__(self, element: ir.Type, count: int) -> None:
        self.element, self.count = element, count

    def _to_string(self) -> str:
        return f"<vscale x {self.count} x {self.element}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Scalable) and (self.element, self.count) == (
            other.element,
            other.count,
        )

    def __hash__(self) -> int:
        return hash((Scalable, self.count))


def compare(b: ir.IRBuilder, kind: str, test: str, x, y):
    """`kind` (fcmp_ordered, fcmp_unordered, icmp_signed, icmp_unsigned) of two vectors, per lane."""
    found = getattr(b, kind)(test, x, y)
    if isinstance(x.type, Scalable):  # llvmlite treats an unknown type as a scalar
        found.type = Scalable(ir.IntType(1), x.type.count)
    return found


@dataclass(frozen=True)
class Vectors:
    """Vectors of one length, and what LLVM can do with them on every CPU.

    Attributes
    ----------
    lanes : 32-bit lanes; of the shortest vector where the length is known only when the code runs
        (`scalable`)
    """

    name: str
    lanes: int

    scalable = False

    def vector(self, element: ir.Type, per_lane: int = 1) -> ir.Type:
        """Vector type of `per_lane` elements for every int32 lane."""
        return vector(element, per_lane * self.lanes)

    def suffix(self, ty: ir.Type) -> str:
        """`ty` as LLVM writes it in the name of an intrinsic."""
        return f"v{ty.count}{'f32' if ty.element == F32 else ty.element}"

    def elements(self, b: ir.IRBuilder, n: int):
        """n * lanes as an IR value: an offset of n vectors in int32 elements."""
        return I64(n * self.lanes)

    def fill(self, b: ir.IRBuilder, ty: ir.Type, value):
        """A constant in every lane."""
        return constant(ty, value)

    def splat(self, b: ir.IRBuilder, x, ty: ir.Type):
        """A scalar in every lane."""
        return splat(b, x, ty)

    def choose(self, b: ir.IRBuilder, test: str, x, y, yes, no):
        """yes where the comparison of float vectors holds, no elsewhere and where one is NaN."""
        return b.select(compare(b, "fcmp_ordered", test, x, y), yes, no)

    def index(self, b: ir.IRBuilder):
        """int32: 0, 1, 2, ... in the lanes."""
        return ir.Constant(self.vector(I32), list(range(self.lanes)))

    def generic(self, b: ir.IRBuilder, name: str, *args):
        """llvm.<name>.<type> on vectors of one type."""
        return call(b, f"llvm.{name}.{self.suffix(args[0].type)}", args[0].type, *args)

    def reduce(self, b: ir.IRBuilder, name: str, x, element: ir.Type):
        """llvm.vector.reduce.<name>"""
        return call(b, f"llvm.vector.reduce.{name}.{self.suffix(x.type)}", element, x)


@dataclass(frozen=True)
class Isa(Vectors):
    """One instruction set for INT8 register tiles.

    Attributes
    ----------
    group : products that one dot instruction adds into a lane: 4 bytes, or 2 int16
    nv : vectors side by side in a register tile of scores
    rows : rows of the register tiles, the tallest first; a block of rows is filled up to a multiple
        of the last
    step : the channels of Q and K are filled up to a multiple of it
    unit : the columns of V and O are filled up to a multiple of so many vectors
    q_offset : added to Q before the dot product, taken out by the value that each key's sum starts
        from
    v_offset : added to V before the dot product, taken out by the value that each row's sum starts
        from
    tiled : K and V are packed as matrix tiles: see `int8.packing`
    value_order : keys of a group of V, from its first one on, where they are not consecutive
    """

    tiled = False
    value_order: ClassVar[tuple[int, ...]] = ()

    group: int
    nv: int
    q_offset: int
    v_offset: int = 0
    rows: tuple[int, ...] = (6, 4, 2)
    step: int = 0
    unit: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", self.step or self.group)

    @property
    def operand(self) -> ir.Type:
        """Type of a dot operand."""
        return self.vector(I8, 4) if self.group == 4 else self.vector(I16, 2)

    def key_order(self, lanes: int) -> np.ndarray:
        """(panel,) int64: the key in each column of a packed panel."""
        return np.arange(self.nv * lanes)

    def fold_rows(self, b: ir.IRBuilder, rows: list, operation: str):
        """<8 x element> (fixed): each of 8 vectors reduced to one value by "smax" or "add"."""
        element = rows[0].type.element
        folded = ir.Constant(vector(element, 8), ir.Undefined)
        for i, row in enumerate(rows):
            folded = b.insert_element(folded, self.reduce(b, operation, row, element), I32(i))
        return folded

    def high_bytes(self, b: ir.IRBuilder, x, y):
        """The high bytes of two int16 vectors side by side."""
        odd = [2 * j + 1 for j in range(4 * self.lanes)]
        return shuffle(b, b.bitcast(x, self.operand), b.bitcast(y, self.operand), odd)

    def multiply_high(self, b: ir.IRBuilder, x, y):
        """uint16: the high half of x * y; LLVM recognises the pattern (vpmulhuw, umull)."""
        wide = self.vector(I32, 2)
        product = b.mul(b.zext(x, wide), b.zext(y, wide))
        return b.trunc(b.lshr(product, self.fill(b, wide, 16)), x.type)

    def score_dot(self, b: ir.IRBuilder, acc, q, k) -> Any:
        """acc[lane] + sum over the group of q * k, in int32; q with its offset."""
        raise NotImplementedError

    def value_dot(self, b: ir.IRBuilder, acc, p, v) -> Any:
        """acc[lane] + sum over the group of p * v, in int32; p unsigned, v with its offset."""
        raise NotImplementedError

    def pair_dot(self, b: ir.IRBuilder, acc, x, y) -> Any:
        """acc, `lanes` int32, plus products of int16 in some order: of vectors twice as long."""
        n = acc.type.count
        for half in (list(range(n)), list(range(n, 2 * n))):
            left, right = (b.sext(shuffle(b, v, v, half), acc.type) for v in (x, y))
            acc = b.add(acc, b.mul(left, right))
        return acc

    def to_int16(self, b: ir.IRBuilder, x, y, base=None) -> Any:
        """Two float32 vectors to one of int16, rounded to even, saturating, so that scores in
        `key_order` come out in order.

        base : int32 vector, taken off between rounding and saturating
        """
        raise NotImplementedError

    def where_set(self, b: ir.IRBuilder, flags, yes, no) -> Any:
        """yes in the lanes where the byte of `flags` is not 0, no elsewhere."""
        return b.select(b.icmp_unsigned("!=", flags, self.fill(b, flags.type, 0)), yes, no)

    def in_order(self, b: ir.IRBuilder, x, y) -> tuple[Any, Any]:
        """Two vectors of a panel in `key_order`, brought to the order of the keys."""
        return x, y

    def packed(self, b: ir.IRBuilder, x, y) -> tuple[Any, Any]:
        """Two vectors in the order of the keys, brought to that of a panel."""
        return x, y

    def columns(self, b: ir.IRBuilder, v: int) -> Any:
        """int32: the keys of a panel that are in the lanes of its vector `v`, from its first key
        on.
        """
        return ir.Constant(
            self.vector(I32),
            self.key_order(self.lanes)[v * self.lanes : (v + 1) * self.lanes].tolist(),
        )

    def clamp(self, b: ir.IRBuilder, x, limit: float) -> Any:
        """float32 cut at +-limit; NaN stays NaN."""
        return clamp(b, x, limit)

    def shift_right(self, b: ir.IRBuilder, x, n) -> Any:
        """uint16 x >> n per lane, n up to 255; 16 or more gives 0."""
        raise NotImplementedError


def pointer(b: ir.IRBuilder, address):
    """An address as a pointer to bytes."""
    return b.inttoptr(address, I8.as_pointer())


@intrinsic
def address(typingctx, x):
    """f(x): the address of an array's first element.

    It takes one register, where a Numba array takes eight, and a slice of it eight more.
    """

    def codegen(context, b, sig, args):
        return b.ptrtoint(data(context, b, sig.args[0], args[0]), I64)

    return types.intp(x), codegen


@intrinsic
def apart(typingctx):
    """f(): the function that calls it is inlined nowhere, so that its registers are its own."""

    def codegen(context, b, sig, args):
        b.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def next_task(typingctx, counter):
    """Take the next number from a shared counter (int64 array, its first element).

    Dynamic scheduling on any threading layer.

    Atomic, so that no task is computed twice. No test of the forward kernels can fail on this: two
    workers with one number would write the same values twice.
    """

    def codegen(context, b, sig, args):
        pointer = b.bitcast(data(context, b, sig.args[0], args[0]), I64.as_pointer())
        return b.atomic_rmw("add", pointer, I64(1), "monotonic")

    return types.intp(counter), codegen
