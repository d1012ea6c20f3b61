"""Vectors (or scalars) of LLVM IR as the generated tiles use them, and float32 functions on them.

Only generic LLVM operations: the same text serves every CPU. Errors of the functions, relative or
absolute where the result is near 0: below 3e-7 (3.4e-7 on processors without fused
multiply-add); sin and cos up to arguments of 1e5. In float64 the
functions are those of the C library, one value at a time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from ..cpu.floats.float_exp2 import EXP2

I1, I8, I16, I32, I64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
F32 = ir.FloatType()
F64 = ir.DoubleType()
CONTRACT = ("contract",)
LOG2E = 1 / math.log(2)
LN2 = math.log(2)
TOWARDS_ZERO = 11  # a rounding of AVX-512
LARGEST = 2.0**128 * (1 - 2.0**-20)  # of what is divided by a number and multiplied by it again
# 1.5 * 2**23: adding it rounds a float32 below 2**22 to an integer, ties to even
MAGIC = 12582912.0
PI_PARTS = (
    3.140625,
    9.65118408203125e-4,
    2.5351816930e-6,
)  # its first 8 bits, the next 8, the rest
# (sin(r) / r - 1) / r**2 up to half a turn in powers of r * r, minimax in relative error: 6.1e-9
SIN = (-1.66666595e-1, 8.33306584e-3, -1.98095709e-4, 2.60570570e-6)
ATANH = (2 / 3, 2 / 5, 2 / 7, 0.2222222)
TANH_END = 8.0  # tanh is 1 - 2.3e-7 here
# numerator and denominator on [-8, 8] in powers of x * x, minimax in relative error: 6.5e-9
TANH_ABOVE = (1.0, 0.13444495526919362, 3.571595110776665e-3, 2.1894613774489523e-5,
              1.5230349973014136e-8)  # fmt: skip
TANH_BELOW = (1.0, 0.46777822845430256, 2.616443185523265e-2, 3.411287245699677e-4,
              8.522419138292254e-7)  # fmt: skip
ERF_FAR = (0.254829592, -0.284496736, 1.421413741, -1.453152027, 1.061405429)
ERF_NEAR = tuple(
    2 / math.sqrt(math.pi) * c for c in (1, -1 / 3, 1 / 10, -1 / 42, 1 / 216, -1 / 1320)
)


@dataclass
class Lanes:
    """Operations on `n` values at a time (scalars where n is 1).

    real : F32 or F64
    whole : type of integers, I32 or I64
    """

    b: ir.IRBuilder
    real: ir.Type
    whole: ir.Type
    n: int

    def of(self, element: ir.Type) -> ir.Type:
        """The type of n elements."""
        return element if self.n == 1 else ir.VectorType(element, self.n)

    def fill(self, element: ir.Type, value: Any) -> ir.Constant:
        return ir.Constant(self.of(element), value if self.n == 1 else [value] * self.n)

    def number(self, value: float) -> ir.Constant:
        return self.fill(self.real, value)

    def integer(self, value: int) -> ir.Constant:
        return self.fill(self.whole, value)

    def splat(self, x: Any) -> Any:
        """A scalar in every lane."""
        if self.n == 1:
            return x
        if isinstance(x, ir.Constant):
            return self.fill(x.type, x.constant)
        undefined = ir.Constant(self.of(x.type), ir.Undefined)
        first = self.b.insert_element(undefined, x, I32(0))
        return self.b.shuffle_vector(
            first, undefined, ir.Constant(ir.VectorType(I32, self.n), [0] * self.n)
        )

    def intrinsic(self, name: str, *args: Any) -> Any:
        """llvm.<name> of values of one type, result of the same type."""
        element = "f32" if self.real == F32 else "f64"
        suffix = element if self.n == 1 else f"v{self.n}{element}"
        kind = ir.FunctionType(args[0].type, [x.type for x in args])
        return self.b.call(
            cgutils.get_or_insert_function(self.b.module, kind, f"llvm.{name}.{suffix}"), args
        )

    def library(self, name: str, *args: Any) -> Any:
        """A function of the C library; float64, one value at a time."""
        kind = ir.FunctionType(F64, [F64] * len(args))
        return self.b.call(cgutils.get_or_insert_function(self.b.module, kind, name), args)

    def add(self, x: Any, y: Any) -> Any:
        return self.b.fadd(x, y, flags=CONTRACT)

    def sub(self, x: Any, y: Any) -> Any:
        return self.b.fsub(x, y, flags=CONTRACT)

    def mul(self, x: Any, y: Any) -> Any:
        return self.b.fmul(x, y, flags=CONTRACT)

    def times(self, x: Any, value: float) -> Any:
        return self.mul(x, self.number(value))

    def times_in_range(self, x: Any, unit: Any) -> Any:
        """x times a scalar from 1 up, in float32, where no finite x below 0 becomes -inf.

        AVX-512 rounds towards zero for it, as CUDA's kernels do.
        """
        b, units = self.b, self.splat(unit)
        if self.n == 16:
            of = self.of(F32)
            kind = ir.FunctionType(of, [of, of, I32])
            multiply = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512.mul.ps.512")
            return b.call(multiply, [x, units, I32(TOWARDS_ZERO)])
        lowest = self.splat(b.fdiv(F32(-LARGEST), unit))
        near = b.select(b.fcmp_ordered("<", x, lowest), lowest, x)
        hidden = b.fcmp_ordered("==", x, self.number(-math.inf))
        return b.fmul(b.select(hidden, x, near), units)

    def polynomial(self, coefficients: Sequence[float], x: Any) -> Any:
        """c0 + c1 * x + c2 * x**2 + ..."""
        y = self.number(coefficients[-1])
        for c in coefficients[-2::-1]:
            y = self.add(self.mul(y, x), self.number(c))
        return y

    def quotient(self, x: Any, y: Any) -> Any:
        """x / y of a y that is neither 0 nor subnormal nor infinite, up to its last bit.

        AVX-512 divides 16 values in as many cycles: there, by an estimate of 1 / y of 14 bits, and
        what it leaves of x once more.
        """
        if self.n != 16:
            return self.b.fdiv(x, y)
        of = self.of(F32)
        kind = ir.FunctionType(of, [of, of, I16])
        estimate = cgutils.get_or_insert_function(
            self.b.module, kind, "llvm.x86.avx512.rcp14.ps.512"
        )
        near = self.b.call(estimate, [y, ir.Constant(of, None), I16(-1)])
        found = self.b.fmul(x, near)
        return self.add(found, self.mul(near, self.sub(x, self.mul(y, found))))

    def magnitude(self, x: Any) -> Any:
        return self.intrinsic("fabs", x)

    def at_least(self, x: Any, bound: float) -> Any:
        """max(x, bound); NaN stays."""
        return self.b.select(self.b.fcmp_ordered("<", x, self.number(bound)), self.number(bound), x)

    def at_most(self, x: Any, bound: float) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, self.number(bound)), self.number(bound), x)

    def extreme(self, x: Any, y: Any, test: str = "<") -> Any:
        """min(x, y) of floats, or max with test ">"; NaN if either is."""
        b = self.b
        found = b.select(b.fcmp_ordered(test, x, y), x, y)
        return b.select(b.fcmp_unordered("uno", x, x), x, found)

    def to_integer(self, x: Any) -> Any:
        """int32, towards zero; the nearest one where x is beyond, 0 for NaN."""
        x = self.b.select(self.b.fcmp_ordered("ord", x, x), x, self.number(0.0))
        x = self.at_most(self.at_least(x, -(2.0**31)), 2.0**31 - (128 if self.real == F32 else 1))
        return self.b.fptosi(x, self.of(I32))

    # float32 functions
    def nearest(self, x: Any) -> Any:
        magic = self.number(MAGIC)
        return self.b.fsub(self.b.fadd(x, magic), magic)

    def bits(self, x: Any) -> Any:
        return self.b.bitcast(x, self.of(I32))

    def floats(self, x: Any) -> Any:
        return self.b.bitcast(x, self.of(F32))

    def power_of_two(self, n: Any) -> Any:
        """2**n of an int32 between -126 and 127."""
        return self.floats(self.b.shl(self.b.add(n, self.fill(I32, 127)), self.fill(I32, 23)))

    def scaled(self, y: Any, n: Any) -> Any:
        """y * 2**n for n between -252 and 254, in two steps."""
        half = self.b.ashr(n, self.fill(I32, 1))
        rest = self.b.sub(n, half)
        return self.b.fmul(self.b.fmul(y, self.power_of_two(half)), self.power_of_two(rest))

    def exp2(self, x: Any) -> Any:
        x = self.at_most(self.at_least(x, -152.0), 129.0)
        k = self.nearest(x)
        return self.scaled(self.polynomial(EXP2, self.b.fsub(x, k)), self.to_integer(k))

    def exp(self, x: Any) -> Any:
        x = self.at_most(self.at_least(x, -105.0), 89.0)
        k = self.nearest(self.times(x, LOG2E))
        r = self.sub(self.sub(x, self.times(k, 0.693359375)), self.times(k, -2.12194440e-4))
        return self.scaled(self.polynomial(EXP2, self.times(r, LOG2E)), self.to_integer(k))

    def log(self, x: Any) -> Any:
        b = self.b
        tiny = b.fcmp_ordered("<", x, self.number(2.0**-126))
        grown = b.select(tiny, b.fmul(x, self.number(2.0**23)), x)
        k = b.ashr(b.sub(self.bits(grown), self.fill(I32, 0x3F3504F3)), self.fill(I32, 23))
        m = self.floats(b.sub(self.bits(grown), b.shl(k, self.fill(I32, 23))))
        k = b.sitofp(b.sub(k, b.select(tiny, self.fill(I32, 23), self.fill(I32, 0))), self.of(F32))
        z = self.quotient(b.fsub(m, self.number(1.0)), b.fadd(m, self.number(1.0)))
        w = self.mul(z, z)
        y = self.add(self.times(z, 2.0), self.mul(self.mul(z, w), self.polynomial(ATANH, w)))
        y = self.add(self.times(k, 0.693359375), self.add(self.times(k, -2.12194440e-4), y))
        y = b.select(b.fcmp_ordered("==", x, self.number(0.0)), self.number(-math.inf), y)
        y = b.select(b.fcmp_ordered("==", x, self.number(math.inf)), x, y)
        return b.select(b.fcmp_unordered("<", x, self.number(0.0)), self.number(math.nan), y)

    def log2(self, x: Any) -> Any:
        return self.times(self.log(x), LOG2E)

    def tanh(self, x: Any) -> Any:
        """x * P(x * x) / Q(x * x): fewer instructions than by way of exp, and never beyond 1."""
        x = self.at_most(self.at_least(x, -TANH_END), TANH_END)
        z = self.mul(x, x)
        above = self.mul(x, self.polynomial(TANH_ABOVE, z))
        return self.quotient(above, self.polynomial(TANH_BELOW, z))

    def sigmoid(self, x: Any) -> Any:
        one = self.number(1.0)
        return self.b.fdiv(one, self.b.fadd(one, self.exp(self.b.fneg(x))))

    def turn(self, x: Any, quarter: int) -> Any:
        """sin(x + quarter * pi / 2) of quarter 0 or 1.

        x less the nearest half turns, and one polynomial: an odd number of them changes its sign.
        """
        b, magic, before = self.b, self.number(MAGIC), self.number(quarter / 2)
        found = b.fadd(self.add(self.times(x, 1 / math.pi), before), magic)
        turns = b.fsub(b.fsub(found, magic), before)
        r = x
        for part in PI_PARTS:
            r = self.sub(r, self.times(turns, part))
        z = self.mul(r, r)
        y = self.add(r, self.mul(self.mul(r, z), self.polynomial(SIN, z)))
        y = self.at_most(self.at_least(y, -1.0), 1.0)
        sign = b.shl(self.bits(found), self.fill(I32, 31))
        return self.floats(b.xor(self.bits(y), sign))

    def sin(self, x: Any) -> Any:
        return self.turn(x, 0)

    def cos(self, x: Any) -> Any:
        return self.turn(x, 1)

    def erf(self, x: Any) -> Any:
        b = self.b
        a = self.magnitude(x)
        w = self.mul(x, x)
        t = b.fdiv(self.number(1.0), self.add(self.times(a, 0.3275911), self.number(1.0)))
        far = self.mul(self.mul(t, self.polynomial(ERF_FAR, t)), self.exp(b.fneg(w)))
        far = self.intrinsic("copysign", b.fsub(self.number(1.0), far), x)
        near = self.mul(x, self.polynomial(ERF_NEAR, w))
        found = b.select(b.fcmp_ordered("<", a, self.number(0.5)), near, far)
        return b.select(
            b.fcmp_ordered("==", a, self.number(math.inf)),
            self.intrinsic("copysign", self.number(1.0), x),
            found,
        )

    def rsqrt(self, x: Any) -> Any:
        return self.b.fdiv(self.number(1.0), self.intrinsic("sqrt", x))

    def pow(self, x: Any, y: Any) -> Any:
        """x ** y; NaN for a negative x unless y is a whole number."""
        b = self.b
        zero = self.number(0.0)
        size = self.exp2(self.mul(y, self.log2(self.magnitude(x))))
        even = self.times(self.intrinsic("floor", self.times(y, 0.5)), 2.0)
        signed = b.select(b.fcmp_ordered("==", even, y), size, b.fneg(size))
        is_whole = b.fcmp_ordered("==", self.intrinsic("floor", y), y)
        signed = b.select(is_whole, signed, self.number(math.nan))
        found = b.select(b.fcmp_ordered("<", x, zero), signed, size)
        one = b.or_(b.fcmp_ordered("==", y, zero), b.fcmp_ordered("==", x, self.number(1.0)))
        return b.select(one, self.number(1.0), found)

    def function(self, name: str) -> Callable[..., Any]:
        """The function of an operation on floats, by the operation's name."""
        if name in ("sqrt", "floor", "ceil", "trunc"):
            return lambda x: self.intrinsic(name, x)
        if name == "round":
            return lambda x: self.intrinsic("rint", x)
        if self.real == F32 or name == "rsqrt":
            return getattr(self, name)
        if name == "sigmoid":
            one = self.number(1.0)
            return lambda x: self.b.fdiv(one, self.b.fadd(one, self.library("exp", self.b.fneg(x))))
        return lambda *args: self.library(name, *args)
