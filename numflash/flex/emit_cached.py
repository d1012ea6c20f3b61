"""LLVM IR of the tile functions that decoding calls: the scores of a KV head's query rows and a block
of cached keys, changed and masked in place.

tile(frame, x, shift, scales, rows, count, rounded, b, h, q, k, scale, unit), the C function:

    frame    what `Program.frame` gives
    x        scores in the caller's units, `rows` rows of `count`, KEY_BLOCK apart: float32, over a
             cache of integers int32; becomes score_mod(x * scale) * unit, -inf where the mask hides
    shift    over integers: float32 for each row, added to its scores
    scales   float32 for each key; a key whose scale is NaN was not finite, and its scores are NaN
    rounded  over integers: whether x becomes int32 again, HIDDEN where it is -inf, and up to
             T_LIMIT of either sign (NaN: any number); else it becomes float32
    b, h, q, k  batch entry, first query head, position of the queries, first key

It returns, in bits, which of up to 32 rows have a score that is NaN (bits 0 to 31), and over floats
which have one beyond 2**121 or NaN (bits 32 to 63).

Along a row run the keys, rows are query heads. What depends on keys but not on heads or scores is
computed once for all rows, and kept on the stack.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..cpu.isa.score_calls import HIDDEN, HUGE, cached_function_type
from ..numerics.fixedpoint import T_LIMIT
from ..numerics.quantize_kernels import INFINITE, MAGNITUDE
from ..tiling import KEY_BLOCK
from .emit import TileWriter
from .graph import Node
from .lanes import F32, I1, I16, I32, I64
from .program import Program
from .tile_memory import ONCE, PER_KEY, PER_ROW, PER_VALUE, Form

MOST_KEPT = 64  # nodes whose values are kept, 512 bytes each; of more nothing is


def emit(module: ir.Module, name: str, program: Program, form: Form) -> None:
    """Add the tile function `name` to a module."""
    function = ir.Function(module, cached_function_type(), name)
    for pointer in function.args[:4]:
        pointer.add_attribute("noalias")
    function.attributes.add("nounwind")
    CachedWriter(program, form, function).write()


class CachedWriter(TileWriter):
    """Values of a program's nodes while a tile function of decoding is written."""

    NAMES = (
        "frame", "x", "shift", "scales", "rows", "count", "rounded", "b", "h", "q", "k", "scale", "unit",
    )  # fmt: skip

    def __init__(self, program: Program, form: Form, function: ir.Function) -> None:
        super().__init__(program, form, function)
        self.lane_index, self.row_index = "k", "h"
        self.over_integers = form.cached == "integers"
        self.shares = True
        self.kept = self._kept()
        if len(self.kept) > MOST_KEPT:
            self.shares, self.kept = False, []
        self.places: dict[int, Any] = {}  # on the stack, of the values of `kept`

    def level(self, x: Node) -> int:
        if "score" in x.uses:
            return PER_VALUE
        if self.lane_index in x.uses:
            shared = self.shares and self.row_index not in x.uses
            return PER_KEY if shared else PER_VALUE
        return PER_ROW if self.row_index in x.uses else ONCE

    def _kept(self) -> list[Node]:
        """What has one value for a key that is read for every row."""
        score, _, seen = self.program.roots_by_name
        nodes = self.program.nodes
        needed = {y.number for x in nodes if self.level(x) == PER_VALUE for y in x.args}
        needed |= {x.number for x in (score, seen) if x is not None}
        return [x for x in nodes if x.number in needed and self.level(x) == PER_KEY]

    def write(self) -> None:
        b, args = self.b, self.args
        self._tables()
        self._compute(ONCE)
        vectors = I32(KEY_BLOCK // self.form.lanes)
        for x in self.kept:
            self.places[x.number] = cgutils.alloca_once(b, self._kept_type(x), vectors)
        self.not_finite = cgutils.alloca_once(b, self.many.of(I32), vectors)
        kind = self.many.of(I1 if self.over_integers else I32)
        self.found = cgutils.alloca_once(b, kind)
        result = cgutils.alloca_once_value(b, I64(0))
        self._over_vectors(self._keep_vector)
        with cgutils.for_range(b, args["rows"], intp=I64) as row:
            self.row = self._index(b.add(args["h"], row.index))
            self._compute(PER_ROW)
            self.start = b.mul(row.index, I64(KEY_BLOCK))
            if self.over_integers:
                self.shift = b.load(b.gep(args["shift"], [row.index]))
            b.store(ir.Constant(kind, None), self.found)
            self._over_vectors(self._change_vector)
            bit = b.shl(I64(1), row.index)
            b.store(b.or_(b.load(result), self._of_row(bit)), result)
        b.ret(b.load(result))

    # values of keys, for all rows
    def _kept_type(self, x: Node) -> ir.Type:
        """Conditions are kept as int32 of all bits: there is no other vector of them in memory."""
        return self.many.of({"b": I32, "i": self.whole, "f": self.real}[x.kind])

    def _place(self, kept: Any) -> Any:
        """Where a value of the present vector is kept."""
        return self.b.gep(kept, [self.b.sdiv(self.column, I64(self.form.lanes))])

    def _keep_vector(self) -> None:
        """Compute and keep what a vector of keys has for all rows."""
        b, many = self.b, self.many
        self._compute(PER_KEY)
        for x in self.kept:
            value = self.get(x)
            value = b.sext(value, many.of(I32)) if x.kind == "b" else value
            b.store(value, self._place(self.places[x.number]))
        scales = self._read(b.gep(self.args["scales"], [self.column]))
        bad = b.sext(b.fcmp_unordered("uno", scales, scales), many.of(I32))
        b.store(bad, self._place(self.not_finite))

    def _take_kept(self) -> None:
        b = self.b
        for x in self.kept:
            value = b.load(self._place(self.places[x.number]))
            if x.kind == "b":
                value = b.icmp_signed("<", value, self.many.fill(I32, 0))
            self.values[x.number] = value

    # scores
    def _change_vector(self) -> None:
        """One vector of a row's scores."""
        b, many = self.b, self.many
        pointer = b.gep(self.args["x"], [b.add(self.start, self.column)])
        raw = self._read(b.bitcast(pointer, I32.as_pointer()))
        if self.over_integers:
            raw = many.bits(b.fadd(b.sitofp(raw, many.of(F32)), many.splat(self.shift)))
        # with all bits set a number is NaN
        self.raw = many.floats(b.or_(raw, b.load(self._place(self.not_finite))))
        self._take_kept()
        self._compute(PER_VALUE)
        x = self._unless_hidden(self._changed(), many.number(-math.inf))
        if not self.over_integers:
            self._note(self._magnitudes(x))
            self._store(x, pointer)
            return
        self._note(b.fcmp_unordered("uno", x, x))
        with b.if_else(b.icmp_signed("!=", self.args["rounded"], I64(0))) as (rounded, unrounded):
            with rounded:
                self._store(self._integers(x), b.bitcast(pointer, I32.as_pointer()))
            with unrounded:
                self._store(x, pointer)

    def _magnitudes(self, x: Any) -> Any:
        """Bits of |x|, which are in the order of the numbers, NaN above all; 0 of -inf, which hides."""
        hidden = self.b.fcmp_ordered("==", x, self.many.number(-math.inf))
        bits = self.b.and_(self.many.bits(x), self.many.fill(I32, int(MAGNITUDE)))
        return self.b.select(hidden, self.many.fill(I32, 0), bits)

    def _integers(self, x: Any) -> Any:
        """int32, ties to even."""
        b, many = self.b, self.many
        most = many.number(float(T_LIMIT))
        near = many.at_least(b.select(b.fcmp_ordered("<", x, most), x, most), -float(T_LIMIT))
        hidden = b.fcmp_ordered("==", x, many.number(-math.inf))
        return b.select(hidden, many.fill(I32, HIDDEN), self._nearest(near))

    def _nearest(self, x: Any) -> Any:
        """float32 to int32, by one instruction of x86."""
        b, ints = self.b, self.many.of(I32)
        name, more = {
            16: ("llvm.x86.avx512.mask.cvtps2dq.512", [self.many.fill(I32, 0), I16(-1), I32(4)]),
            8: ("llvm.x86.avx.cvt.ps2dq.256", []),
        }.get(self.form.lanes, ("", []))
        if not name:
            return b.fptosi(self.many.intrinsic("rint", x), ints)
        kind = ir.FunctionType(ints, [y.type for y in (x, *more)])
        return b.call(cgutils.get_or_insert_function(b.module, kind, name), [x, *more])

    def _note(self, x: Any) -> None:
        """Remember what a row has met: whether a score is NaN, or the largest magnitude.

        Lanes that do not exist are left out.
        """
        b = self.b
        if self.mask is not None:
            x = b.select(self.mask, x, ir.Constant(x.type, None))
        before = b.load(self.found)
        both = b.or_(before, x) if self.over_integers else self._vectors("smax", x.type, before, x)
        b.store(both, self.found)

    def _vectors(self, name: str, result: ir.Type, *args: Any) -> Any:
        """llvm.<name> of vectors of integers."""
        kind = ir.FunctionType(result, [x.type for x in args])
        name = f"llvm.{name}.v{self.form.lanes}{args[0].type.element}"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def _of_row(self, bit: Any) -> Any:
        """The bits of a row in the result."""
        b, none, found = self.b, I64(0), self.b.load(self.found)
        if self.over_integers:
            return b.select(self._vectors("vector.reduce.or", I1, found), bit, none)
        top = self._vectors("vector.reduce.smax", I32, found)
        bad = b.select(b.icmp_signed(">", top, I32(int(INFINITE))), bit, none)
        huge = b.select(b.icmp_signed(">", top, I32(int(HUGE))), b.shl(bit, I64(32)), none)
        return b.or_(bad, huge)
