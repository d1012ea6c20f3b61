"""The x86 instruction sets: AMX, AVX-512 VNNI, AVX-VNNI and AVX2."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import llvmlite.binding as llvm
import llvmlite.ir as ir
import numpy as np

from .vectors import I16, I32, Isa, call, fold_tree, shuffle


@dataclass(frozen=True)
class X86(Isa):
    """Vectors of 256 or 512 bits. vpdpbusd is unsigned x signed, hence Q + 128.

    AVX2 multiplies int16 instead, exactly.
    """

    interleave = 4  # lanes that vpackssdw takes in turn from each of its operands

    def key_order(self, lanes: int) -> np.ndarray:
        column = np.arange(self.nv * lanes)
        vec = column // lanes
        lane = column % lanes
        w = self.interleave
        return vec // 2 * 2 * lanes + lane // w * 2 * w + vec % 2 * w + lane % w

    def fold_rows(self, b: ir.IRBuilder, rows: list, operation: str):
        if operation == "add":
            return fold_tree(b, rows, b.add)
        return fold_tree(b, rows, functools.partial(self.generic, b, operation))

    def score_dot(self, b: ir.IRBuilder, acc, q, k):
        if self.group == 2:
            return b.add(acc, call(b, "llvm.x86.avx2.pmadd.wd", acc.type, q, k))
        if llvm.llvm_version_info < (21,):  # operands were declared as int32 lanes up to LLVM 20
            q = b.bitcast(q, acc.type)
            k = b.bitcast(k, acc.type)
        return call(b, f"llvm.x86.avx512.vpdpbusd.{32 * self.lanes}", acc.type, acc, q, k)

    def pair_dot(self, b: ir.IRBuilder, acc, x, y):
        name = "avx512.pmaddw.d.512" if self.lanes == 16 else "avx2.pmadd.wd"
        return b.add(acc, call(b, f"llvm.x86.{name}", acc.type, x, y))

    def value_dot(self, b: ir.IRBuilder, acc, p, v):
        return self.score_dot(b, acc, p, v)

    def to_int16(self, b: ir.IRBuilder, x, y, base=None):
        i32s = self.vector(I32)
        if self.lanes == 16:
            x, y = (
                call(
                    b,
                    "llvm.x86.avx512.mask.cvtps2dq.512",
                    i32s,
                    v,
                    self.fill(b, i32s, 0),
                    I16(-1),
                    I32(4),
                )
                for v in (x, y)
            )
        else:
            x, y = (call(b, "llvm.x86.avx.cvt.ps2dq.256", i32s, v) for v in (x, y))
        if base is not None:
            x = b.sub(x, base)
            y = b.sub(y, base)
        return call(
            b,
            f"llvm.x86.{'avx512.packssdw.512' if self.lanes == 16 else 'avx2.packssdw'}",
            self.vector(I16, 2),
            x,
            y,
        )

    def in_order(self, b: ir.IRBuilder, x, y):
        lanes = self.lanes
        w = self.interleave
        order = [
            key // (2 * w) * w + key % w + (lanes if key % (2 * w) >= w else 0)
            for key in range(2 * lanes)
        ]
        return shuffle(b, x, y, order[:lanes]), shuffle(b, x, y, order[lanes:])

    def packed(self, b: ir.IRBuilder, x, y):
        lanes = self.lanes
        w = self.interleave
        order = [lane // w * 2 * w + lane % w for lane in range(lanes)]
        return shuffle(b, x, y, order), shuffle(b, x, y, [key + w for key in order])

    def multiply_high(self, b: ir.IRBuilder, x, y):
        """By name: LLVM takes the pattern apart where shifts or narrower parts of it follow."""
        name = "avx512.pmulhu.w.512" if self.lanes == 16 else "avx2.pmulhu.w"
        return call(b, f"llvm.x86.{name}", x.type, x, y)

    def shift_right(self, b: ir.IRBuilder, x, n):
        if self.lanes == 16:
            return call(b, "llvm.x86.avx512.psrlv.w.512", x.type, x, n)
        zero = self.fill(b, n.type, 0)
        small = b.icmp_unsigned("<", n, self.fill(b, n.type, 16))
        return b.select(small, b.lshr(x, b.select(small, n, zero)), zero)


@dataclass(frozen=True)
class Amx(X86):
    """The vectors of AVX-512 with AMX's matrix tiles.

    A right operand is packed tile by tile, 1 KB each.
    """

    tiled = True
    # keys of a group, from its first one on: see `high_bytes`
    value_order: ClassVar[tuple[int, ...]] = (0, 32, 1, 33)

    def high_bytes(self, b: ir.IRBuilder, x, y):
        """The high bytes of x and y in turn, not side by side: a shift and a blend.

        V is packed in the same order.
        """
        high = b.and_(y, self.fill(b, y.type, -256))
        return b.bitcast(b.or_(b.lshr(x, self.fill(b, x.type, 8)), high), self.operand)


AMX_INT8 = Amx("amx_int8", 16, 4, 4, 0, rows=(32,), step=64, unit=4)
AVX512_VNNI = X86("avx512_vnni", 16, 4, 4, 128)
AVX_VNNI = X86("avx_vnni", 8, 4, 2, 128)
AVX2 = X86("avx2", 8, 2, 2, 0)
