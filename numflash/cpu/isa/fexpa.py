"""exp2 by FEXPA, SVE's table instruction.

Float variants beside the fixed-point ones of `numflash.numerics.fixedpoint`.

FEXPA puts bits 13:6 of a word into the exponent of a float32 and looks bits 5:0 up in a table of
the 64 fractions of 2**(i/64): 2**x from x in steps of 1/64 and nothing more. `exp2 + FMLA
benchmark`, "Implementation Results", calls the step alone "Perfect"; its error is up to 1.08 %, or
0.54 % where x is rounded to the nearest step. A quadratic in what is left brings float32's
accuracy.

The NumPy functions are the exact model (operation by operation, as rounded by the machine),
`exponential` and `exp2_row` are the SVE code. float32 attention on SVE uses "fexpa-quadratic"; INT8
kernels use the integer exp2, whose bits are the same on every device.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit import target
from .vectors import F32, I32, I64, Scalable, call, data
from .vectors_arm import SVE

F = np.float32
# Arm manual, FPExpCoefficient
TABLE = np.rint((np.exp2(np.arange(64) / 64) - 1) * 2**23).astype(np.int32)
STEPS = F(1.5 * 2**17)  # x + STEPS has a last bit of 1/64
BIAS = F(127)  # of a float32 exponent; 127 * 64 steps
LOWEST = F(-127)  # exponent field 0 and fraction 0: 2**x is 0 from here on, as it is for -inf
LN2 = F(0.6931472)
HALF_LN2_SQUARED = F(0.2402265)


def fexpa(word):
    """The instruction: float32 from the low 14 bits of int32 words."""
    return ((((word >> 6) & 255) << 23) | TABLE[word & 63]).astype(np.int32).view(F)


def truncated(x):
    """2**x for float32 x <= 0, x cut down to a step of 1/64.

    The variant "fast" of the exp2 benchmark (docs/sources.md).
    """
    steps = np.floor((np.maximum(x, LOWEST) + BIAS) * F(64)).astype(np.int32)
    return fexpa(steps)


def rounded(x):
    """2**x for float32 x <= 0, x rounded to the nearest step of 1/64: one addition and FEXPA."""
    return fexpa((np.maximum(x, LOWEST) + (STEPS + BIAS)).view(np.int32))


def quadratic(x):
    """2**x for float32 x <= 0.

    The nearest step, times 1 + r (ln 2 + r ln(2)**2 / 2) of the rest |r| <= 1/128.
    """
    x = np.maximum(x, LOWEST)
    z = x + (STEPS + BIAS)
    r = x - (z - (STEPS + BIAS))
    step = fexpa(z.view(np.int32))

    def fma(a, b, c):  # exact in float64 up to its own rounding, then rounded once more
        return (a.astype(np.float64) * b + c).astype(F)

    return fma(step * r, fma(r, HALF_LN2_SQUARED, LN2), step)


# name -> (model, worst relative error over an octave, as tests/aarch64/test_fexpa.py measures it)
EXP2_FLOAT = {
    "fexpa-truncated": (truncated, 0.0108),
    "fexpa": (rounded, 0.0055),
    "fexpa-quadratic": (quadratic, 1.4e-7),
}


def exponential(b, isa, x, name: str = "fexpa-quadratic"):
    """2**x of scalable float32 vectors, x <= 127, by a variant of `EXP2_FLOAT`.

    -inf gives 0; NaN stays NaN in "fexpa-quadratic".
    """
    f32s, i32s = isa.vector(F32), isa.vector(I32)

    def number(value):
        return isa.fill(b, f32s, float(value))

    def fexpa_of(words):
        return call(b, "llvm.aarch64.sve.fexpa.x.nxv4f32", f32s, words)

    x = isa.generic(b, "maximum", x, number(LOWEST))
    if name == "fexpa-truncated":
        return fexpa_of(b.fptosi(b.fmul(b.fadd(x, number(BIAS)), number(64)), i32s))
    z = b.fadd(x, number(STEPS + BIAS))
    step = fexpa_of(b.bitcast(z, i32s))
    if name == "fexpa":
        return step
    r = b.fsub(x, b.fsub(z, number(STEPS + BIAS)))
    slope = isa.generic(b, "fma", r, number(HALF_LN2_SQUARED), number(LN2))
    return isa.generic(b, "fma", b.fmul(step, r), slope, step)


@functools.cache
def exp2_row(name: str):
    """Intrinsic f(x, y, n).

    y[:n] = 2**x[:n] for float32 arrays, x <= 0 and no NaN, by a variant of `EXP2_FLOAT`.
    """
    isa = SVE
    f32s = isa.vector(F32)
    mask = Scalable(ir.IntType(1), isa.lanes)

    @intrinsic
    def row(typingctx, x, y, n):
        sig = types.void(x, y, n)

        def codegen(context, b, sig, a):
            target.guard("sve", context.codegen())
            px, py = (
                b.bitcast(data(context, b, sig.args[i], a[i]), F32.as_pointer()) for i in range(2)
            )

            entry = b.block
            loop = b.append_basic_block("row")
            done = b.append_basic_block("row.end")
            b.cbranch(b.icmp_signed(">", a[2], I64(0)), loop, done)
            b.position_at_end(loop)
            j = b.phi(I64)
            here = call(b, "llvm.aarch64.sve.whilelt.nxv4i1.i64", mask, j, a[2])
            v = call(b, "llvm.aarch64.sve.ld1.nxv4f32", f32s, here, b.gep(px, [j]))
            call(
                b,
                "llvm.aarch64.sve.st1.nxv4f32",
                ir.VoidType(),
                exponential(b, isa, v, name),
                here,
                b.gep(py, [j]),
            )
            following = b.add(j, isa.elements(b, 1))
            j.add_incoming(I64(0), entry)
            j.add_incoming(following, loop)
            b.cbranch(b.icmp_signed("<", following, a[2]), loop, done)
            b.position_at_end(done)
            return context.get_dummy_value()

        return sig, codegen

    return row
