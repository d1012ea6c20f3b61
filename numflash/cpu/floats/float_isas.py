"""Vectors of each instruction set for the floating-point kernels: lanes, register tiles, operands."""

from __future__ import annotations

from dataclasses import dataclass, replace

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import cgutils

from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    Vectors,
    call,
    compare,
    shuffle,
    vector,
)
from ..isa.vectors_arm import ScalableVectors

MR = 6  # rows of the register tiles of vectors


def larger(b, x, bound):
    """max(x, bound) that keeps a NaN in x."""
    return b.select(compare(b, "fcmp_ordered", "<", x, bound), bound, x)


def fold(b, x, combine):
    """All lanes of a vector combined into one scalar, halves first."""
    while x.type.count > 1:
        half = x.type.count // 2
        x = combine(
            b, shuffle(b, x, x, list(range(half))), shuffle(b, x, x, list(range(half, 2 * half)))
        )
    return b.extract_element(x, I32(0))


@dataclass(frozen=True)
class FloatIsa(Vectors):
    """Vectors of one target.

    Attributes
    ----------
    lanes : float32 sums of a vector
    nv : vectors side by side in a register tile, at most
    group : products per lane and instruction: 1 float32, or 2 bfloat16 (vdpbf16ps)
    rows : rows of a register tile
    step : products that a tile takes at a time; channels are padded to whole steps, and so are the
        keys that P.V takes
    turn : steps of one turn of the product loop. Address arithmetic of one step a turn takes 1 of 12 cycles
        from the ports that multiply (Intel, 512-bit vectors); with NEON four steps spill sums
    unit : keys that a tile of scores is wide at least
    spare : elements after each row of scores and of weights, and half as many words after each row of
        V and of O. The rows of a matrix tile would else share few sets of the L1 cache, since they
        are a multiple of 512 bytes apart.
    """

    nv: int
    group: int = 1
    rows: int = MR
    step: int = 0
    unit: int = 0
    spare: int = 0
    turn: int = 4

    def __post_init__(self) -> None:
        object.__setattr__(self, "step", self.step or self.group)
        object.__setattr__(self, "unit", self.unit or self.lanes)

    @property
    def operand(self) -> ir.Type:
        return self.floats if self.group == 1 else vector(I16, 2 * self.lanes)

    @property
    def panel(self) -> int:
        """Keys of one packed panel of K."""
        return self.nv * self.lanes

    @property
    def square(self) -> int:
        """Rows and columns that packing transposes at a time."""
        return self.lanes

    @property
    def floats(self) -> ir.Type:
        return self.vector(F32)

    def dot(self, b, acc, x, y):
        """acc[lane] + the sum over the group of x * y."""
        if self.group == 1:
            return self.fma(b, x, y, acc)
        pairs = vector(I32, self.lanes) if NO_BFLOAT else vector(BF16, 2 * self.lanes)
        x, y = (b.bitcast(z, pairs) for z in (x, y))
        return call(b, f"llvm.x86.avx512bf16.dpbf16ps.{32 * self.lanes}", self.floats, acc, x, y)

    def fma(self, b, x, y, z):
        return self.generic(b, "fma", x, y, z)

    def top(self, b, x):
        """float32: the largest lane of a vector without NaN."""
        return fold(b, x, larger)

    def total(self, b, x):
        """float32: the sum of the lanes of a vector, by pairs of halves."""
        return fold(b, x, ir.IRBuilder.fadd)

    def any_set(self, b, x):
        """Whether any lane of a vector of truth values or bytes is not 0."""
        bits = ir.IntType(x.type.count * x.type.element.width)
        return b.icmp_unsigned("!=", b.bitcast(x, bits), ir.Constant(bits, 0))


@dataclass(frozen=True)
class SveFloats(ScalableVectors, FloatIsa):
    """SVE's scalable vectors, of `lanes` lanes where `length_known`.

    Packing and buffers are laid out for that length, so a machine with another one must not run the
    code (`jit.target` lets none). `"sve"`, whose length is read when the code runs, serves the INT8
    kernel, which has its own layout: its `value_tile` alone.
    """

    length_known: bool = True

    @property
    def square(self) -> int:
        return 4  # a NEON register

    def elements(self, b, n: int):
        return I64(n * self.lanes) if self.length_known else super().elements(b, n)

    def top(self, b, x):
        return self.reduce(b, "fmax", x, F32)

    def total(self, b, x):
        add = cgutils.get_or_insert_function(
            b.module,
            ir.FunctionType(F32, [F32, x.type]),
            f"llvm.vector.reduce.fadd.{self.suffix(x.type)}",
        )
        return b.call(add, [F32(0), x], fastmath=("reassoc",))  # else one lane after the other

    def any_set(self, b, x):
        element = x.type.element
        found = call(b, f"llvm.vector.reduce.or.nxv{x.type.count}{element}", element, x)
        return b.icmp_unsigned("!=", found, ir.Constant(element, 0))


class _BFloat16(ir.Type):
    """LLVM's `bfloat`, which llvmlite does not name."""

    def __str__(self) -> str:
        return "bfloat"

    def __hash__(self) -> int:
        return hash(_BFloat16)


BF16 = _BFloat16()
# the instructions were declared for integers: int32 lanes of pairs, int16 lanes
NO_BFLOAT = llvm.llvm_version_info < (16,)


class _Isas(dict[str, FloatIsa]):
    """The instruction sets, and with another register tile as `tiling.chosen` names them."""

    def __missing__(self, name: str) -> FloatIsa:
        """`"avx512:8x3"`: tiles of 8 rows and 3 vectors."""
        isa, _, tile = name.partition(":")
        if not tile:
            raise KeyError(name)
        rows, nv = map(int, tile.split("x"))
        return replace(self[isa], nv=nv, rows=rows)


FLOAT_ISAS: dict[str, FloatIsa] = _Isas(
    {
        isa.name: isa
        for isa in (
            FloatIsa("amx_bf16", 16, 4, 2, rows=32, step=32, unit=32, spare=32),
            FloatIsa("avx512_bf16", 16, 4, 2),
            FloatIsa("avx512", 16, 4),
            FloatIsa("avx2", 8, 2),
            SveFloats("sve512", 16, 4),
            SveFloats("sve256", 8, 4),
            SveFloats("sve", 4, 4, length_known=False),
            FloatIsa("neon", 4, 4, turn=1),
        )
    }
)
