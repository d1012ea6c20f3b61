"""The AArch64 instruction sets.

NEON with the dot product extension, and SVE at any vector length up to 512 bits.

Both have SDOT (signed x signed, for Q.K^T) and UDOT (unsigned x unsigned, for P.V with V + 128);
the A64FX has no mixed one. SVE code is written in scalable types and is right at every vector
length; llvmlite has no such type, but prints what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.ir as ir

from .vectors import F32, I8, I16, I32, I64, Isa, Scalable, Vectors, call, compare, shuffle

ALL = 31  # ptrue pattern
LANES = 4  # 32-bit lanes of 128 bits
ROUND = 1.5 * 2.0**23  # x + ROUND holds x rounded to even in its low bits, |x| < 2**22


@dataclass(frozen=True)
class Neon(Isa):
    """128-bit vectors, ASIMD dot product (Neoverse, Graviton 2 and later; not A64FX)."""

    def score_dot(self, b: ir.IRBuilder, acc, q, k):
        return call(b, "llvm.aarch64.neon.sdot.v4i32.v16i8", acc.type, acc, q, k)

    def value_dot(self, b: ir.IRBuilder, acc, p, v):
        return call(b, "llvm.aarch64.neon.udot.v4i32.v16i8", acc.type, acc, p, v)

    def fold_rows(self, b: ir.IRBuilder, rows: list, operation: str):
        """A tree of pairwise operations: one instruction for every two vectors."""
        pairwise = {"smax": "smaxp", "add": "addp"}[operation]
        while len(rows) > 1 and len(rows) * rows[0].type.count > 8:
            name = f"llvm.aarch64.neon.{pairwise}.{self.suffix(rows[0].type)}"
            rows = [call(b, name, x.type, x, y) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        return rows[0] if len(rows) == 1 else shuffle(b, rows[0], rows[1], list(range(8)))

    def to_int16(self, b: ir.IRBuilder, x, y, base=None):
        i32s = self.vector(I32)
        i16s = ir.VectorType(I16, 4)
        x, y = (call(b, "llvm.aarch64.neon.fcvtns.v4i32.v4f32", i32s, v) for v in (x, y))
        if base is not None:
            x = b.sub(x, base)
            y = b.sub(y, base)
        x, y = (call(b, "llvm.aarch64.neon.sqxtn.v4i16", i16s, v) for v in (x, y))
        return shuffle(b, x, y, list(range(8)))

    def clamp(self, b: ir.IRBuilder, x, limit: float):
        x = self.generic(b, "minimum", x, self.fill(b, x.type, limit))
        return self.generic(b, "maximum", x, self.fill(b, x.type, -limit))

    def shift_right(self, b: ir.IRBuilder, x, n):
        n = self.generic(b, "umin", n, self.fill(b, n.type, 16))
        return call(b, "llvm.aarch64.neon.ushl.v8i16", x.type, x, b.sub(self.fill(b, n.type, 0), n))


class ScalableVectors(Vectors):
    """Vectors whose length is known when the code runs: `LANES` for every 128 bits."""

    scalable = True

    def vector(self, element: ir.Type, per_lane: int = 1) -> ir.Type:
        return Scalable(element, per_lane * LANES)

    def suffix(self, ty: ir.Type) -> str:
        return "nx" + super().suffix(ty)

    def index(self, b: ir.IRBuilder):
        return call(b, "llvm.aarch64.sve.index.nxv4i32", self.vector(I32), I32(0), I32(1))

    def elements(self, b: ir.IRBuilder, n: int):
        return b.mul(call(b, "llvm.vscale.i64", I64), I64(n * LANES))

    def fill(self, b: ir.IRBuilder, ty: ir.Type, value):
        return self.splat(b, ty.element(value), ty)

    def splat(self, b: ir.IRBuilder, x, ty: ir.Type):
        return call(b, f"llvm.aarch64.sve.dup.x.{self.suffix(ty)}", ty, x)


@dataclass(frozen=True)
class Sve(ScalableVectors, Neon):
    """Scalable vectors, base SVE only: what the A64FX has."""

    def columns(self, b: ir.IRBuilder, v: int):
        first = b.trunc(self.elements(b, v), I32)
        return call(b, "llvm.aarch64.sve.index.nxv4i32", self.vector(I32), first, I32(1))

    def where_set(self, b: ir.IRBuilder, flags, yes, no):
        wide = self.vector(I32 if yes.type.element == F32 else I16, yes.type.count // self.lanes)
        found = compare(b, "icmp_unsigned", "!=", b.zext(flags, wide), self.fill(b, wide, 0))
        return b.select(found, yes, no)

    def fold_rows(self, b: ir.IRBuilder, rows: list, operation: str):
        """Pairwise operations from UZP1 and UZP2 (base SVE has none).

        SMAXV and UADDV take 8 micro-operations for every row.
        """

        def pairwise(x, y):
            even, odd = (
                call(b, f"llvm.aarch64.sve.{half}.{self.suffix(x.type)}", x.type, x, y)
                for half in ("uzp1", "uzp2")
            )
            return b.add(even, odd) if operation == "add" else self.generic(b, operation, even, odd)

        shortest = rows[0].type.count  # lanes of the shortest vector: that many rows share one
        while 8 // len(rows) < shortest:
            rows = [pairwise(x, y) for x, y in zip(rows[::2], rows[1::2], strict=True)]
        vscale = call(b, "llvm.vscale.i64", I64)
        # what is left of each row: as many lanes as the vectors are longer, up to 4
        for length in (1, 2):
            longer = b.icmp_unsigned(">", vscale, I64(length))
            rows = [b.select(longer, pairwise(x, x), x) for x in rows]
        fixed = ir.VectorType(rows[0].type.element, shortest)
        rows = [
            call(
                b,
                f"llvm.vector.extract.{Isa.suffix(self, fixed)}.{self.suffix(x.type)}",
                fixed,
                x,
                I64(0),
            )
            for x in rows
        ]
        return rows[0] if len(rows) == 1 else shuffle(b, rows[0], rows[1], list(range(8)))

    def _predicated(self, b: ir.IRBuilder, name: str, x, y):
        mask = Scalable(ir.IntType(1), x.type.count)
        every = call(b, f"llvm.aarch64.sve.ptrue.nxv{mask.count}i1", mask, I32(ALL))
        return call(b, f"llvm.aarch64.sve.{name}.{self.suffix(x.type)}", x.type, every, x, y)

    def score_dot(self, b: ir.IRBuilder, acc, q, k):
        return call(b, "llvm.aarch64.sve.sdot.nxv4i32", acc.type, acc, q, k)

    def value_dot(self, b: ir.IRBuilder, acc, p, v):
        return call(b, "llvm.aarch64.sve.udot.nxv4i32", acc.type, acc, p, v)

    def to_int16(self, b: ir.IRBuilder, x, y, base=None):
        """Cut to int16 in float, then the low halves of x + ROUND.

        Base SVE has no saturating narrowing.

        The difference of a whole score and a whole base is exact wherever int16 holds it.
        """
        halves = self.vector(I16, 2)
        for_all = lambda value: self.fill(b, self.vector(F32), value)  # noqa: E731
        low = []
        for v in (x, y):
            if base is not None:
                v = b.fsub(self.generic(b, "roundeven", v), b.sitofp(base, self.vector(F32)))
            v = self.generic(
                b, "maximum", self.generic(b, "minimum", v, for_all(32767.0)), for_all(-32768.0)
            )
            low.append(b.bitcast(b.fadd(v, for_all(ROUND)), halves))
        return call(b, "llvm.aarch64.sve.uzp1.nxv8i16", halves, *low)

    def high_bytes(self, b: ir.IRBuilder, x, y):
        x, y = (b.bitcast(v, self.vector(I8, 4)) for v in (x, y))
        return call(b, "llvm.aarch64.sve.uzp2.nxv16i8", x.type, x, y)

    def multiply_high(self, b: ir.IRBuilder, x, y):
        return self._predicated(b, "umulh", x, y)

    def shift_right(self, b: ir.IRBuilder, x, n):
        return self._predicated(b, "lsr", x, n)


@dataclass(frozen=True)
class Sve128(Neon):
    """128-bit vectors whose dot products are SVE's, in the first 128 bits of its registers.

    For a CPU that lacks NEON's dot products (A64FX).
    """

    def _dot(self, b: ir.IRBuilder, name: str, *operands):
        def scalable(x):
            ty = Scalable(x.type.element, x.type.count)
            suffix = self.suffix(x.type)
            return call(
                b,
                f"llvm.vector.insert.nx{suffix}.{suffix}",
                ty,
                ir.Constant(ty, ir.Undefined),
                x,
                I64(0),
            )

        total = call(
            b, f"llvm.aarch64.sve.{name}.nxv4i32", Scalable(I32, 4), *map(scalable, operands)
        )
        return call(b, "llvm.vector.extract.v4i32.nxv4i32", operands[0].type, total, I64(0))

    def score_dot(self, b: ir.IRBuilder, acc, q, k):
        return self._dot(b, "sdot", acc, q, k)

    def value_dot(self, b: ir.IRBuilder, acc, p, v):
        return self._dot(b, "udot", acc, p, v)


NEON_DOT = Neon("neon_dot", 4, 4, 4, 0, 128)
SVE_128 = Sve128("sve", 4, 4, 4, 0, 128)
SVE = Sve("sve", 4, 4, 4, 0, 128)
