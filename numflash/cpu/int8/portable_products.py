"""A.B^T of int8 in plain loops: every element is a dot product of two contiguous rows.

That is the one form that LLVM turns into the machine's integer dot instructions by itself (SDOT and
UDOT on AArch64, vpmaddwd on x86). On AArch64 a 4 x 4 block of such products shares its operands in
registers. On x86 LLVM multiplies pairs only where no operand is shared, and unrolls where the
length is a constant: there the products are taken one by one, of lengths that are constants.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import inline
from ..isa.isas import shares_operands
from ..isa.vectors import F32, call

I = np.int32
MR = NR = 4  # register block: 16 sums


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z of float32, rounded once."""

    def codegen(context, b, sig, args):
        return call(b, "llvm.fma.f32", F32, *args)

    kind = types.float32
    return kind(kind, kind, kind), codegen


@inline
def mac(s, a, b):
    """s + a * b in int32: written with NumPy's functions, because the operators widen to int64."""
    return np.add(s, np.multiply(I(a), I(b)))


@inline
def dot_block(a, b, out):
    """out[i, j] = a[i] . b[j] in int32 for a block of MR x NR contiguous rows."""
    a0, a1, a2, a3 = a[0], a[1], a[2], a[3]
    b0, b1, b2, b3 = b[0], b[1], b[2], b[3]
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = I(0)
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = I(0)
    for d in range(a0.size):
        s00 = mac(s00, a0[d], b0[d])
        s01 = mac(s01, a0[d], b1[d])
        s02 = mac(s02, a0[d], b2[d])
        s03 = mac(s03, a0[d], b3[d])
        s10 = mac(s10, a1[d], b0[d])
        s11 = mac(s11, a1[d], b1[d])
        s12 = mac(s12, a1[d], b2[d])
        s13 = mac(s13, a1[d], b3[d])
        s20 = mac(s20, a2[d], b0[d])
        s21 = mac(s21, a2[d], b1[d])
        s22 = mac(s22, a2[d], b2[d])
        s23 = mac(s23, a2[d], b3[d])
        s30 = mac(s30, a3[d], b0[d])
        s31 = mac(s31, a3[d], b1[d])
        s32 = mac(s32, a3[d], b2[d])
        s33 = mac(s33, a3[d], b3[d])
    out[0, 0], out[0, 1], out[0, 2], out[0, 3] = s00, s01, s02, s03
    out[1, 0], out[1, 1], out[1, 2], out[1, 3] = s10, s11, s12, s13
    out[2, 0], out[2, 1], out[2, 2], out[2, 3] = s20, s21, s22, s23
    out[3, 0], out[3, 1], out[3, 2], out[3, 3] = s30, s31, s32, s33


def dot_rows(length: int):
    """f(a, b, out): out[i, j] = a[i] . b[j] in int32, one product at a time.

    length : bytes of a row, a constant; 0 for any length
    """

    @inline
    def dots(a, b, out):
        for i in range(a.shape[0]):
            row, sums = a[i], out[i]
            for j in range(sums.size):
                other, total = b[j], I(0)
                for d in range(length or row.size):
                    total = mac(total, row[d], other[d])
                sums[j] = total

    return dots


dots_any = dot_rows(0)
dots_64 = dot_rows(64)
dots_128 = dot_rows(128)


@inline
def product(a, b, out):
    """out = A.B^T in int32: a (m, n), b (k, n) int8, m and k multiples of MR and NR, out (m, k)."""
    if shares_operands():
        for j in range(0, b.shape[0], NR):
            for i in range(0, a.shape[0], MR):
                dot_block(a[i : i + MR], b[j : j + NR], out[i : i + MR, j : j + NR])
    elif a.shape[1] == 128:
        dots_128(a, b, out)
    elif a.shape[1] == 64:
        dots_64(a, b, out)
    else:
        dots_any(a, b, out)
