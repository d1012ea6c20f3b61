"""Vector registers as values in a kernel, so that a register tile can be written down line by line
in Python.

The product kernels build their tiles as LLVM code (`microkernels`). For study, a `Lanes` is a value
like a number: load it, multiply and add it, broadcast one of its lanes, store it. A `Lanes` may be
longer than a register of the machine: 64 float32 lanes are four AVX-512 registers, and LLVM splits
them. Operations take scalars in place of vectors and broadcast them.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic, models, register_model

from ...jit.memory import empty
from ..isa.vectors import F32, I32, I64, call, constant, data, load, shuffle, splat, store, vector

ROUND = 1.5 * 2.0**23  # x + ROUND - ROUND is x rounded to even, |x| < 2**22, on every CPU


def aligned(x: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy of x that starts `offset` bytes behind the start of a cache line.

    Loads of whole registers straddle two lines unless offset is 0; NumPy's arrays start 16 bytes
    behind a line as often as not.
    """
    out = empty((x.nbytes + offset,), np.uint8)[offset:].view(x.dtype).reshape(x.shape)
    out[:] = x
    return out


class Lanes(types.Type):
    """Numba type of n float32 values that are held in registers."""

    def __init__(self, n: int) -> None:
        self.n = n
        super().__init__(f"lanes({n})")


@register_model(Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, vector(F32, fe_type.n))


def _elementwise(build):
    """Codegen of build(b, *vectors); scalar arguments (float32) are broadcast."""

    def codegen(context, b, sig, args):
        vec = vector(F32, sig.return_type.n)
        full = [
            x if isinstance(t, Lanes) else splat(b, context.cast(b, x, t, types.float32), vec)
            for t, x in zip(sig.args, args, strict=True)
        ]
        return build(b, *full)

    return codegen


def _typed(build, *given):
    """(signature, codegen) where every argument is a number or Lanes of one length.

    None, which Numba reports, otherwise.
    """
    lanes = {t.n for t in given if isinstance(t, Lanes)}
    if len(lanes) == 1 and all(isinstance(t, (Lanes, types.Number)) for t in given):
        return Lanes(*lanes)(*given), _elementwise(build)
    return None


def _generic(b, name, *args):
    return call(b, f"llvm.{name}.v{args[0].type.count}f32", args[0].type, *args)


@intrinsic
def fma(typingctx, x, y, z):
    """x * y + z, rounded once."""
    return _typed(lambda b, u, v, w: _generic(b, "fma", u, v, w), x, y, z)


@intrinsic
def subtract(typingctx, x, y):
    return _typed(lambda b, u, v: b.fsub(u, v), x, y)


@intrinsic
def at_least(typingctx, x, bound):
    """The larger of x and bound."""
    return _typed(lambda b, u, v: b.select(b.fcmp_ordered("<", u, v), v, u), x, bound)


@intrinsic
def nearest(typingctx, x):
    """Nearest whole number, |x| < 2**22."""

    def build(b, u):
        magic = constant(u.type, ROUND)
        return b.fsub(b.fadd(u, magic), magic)

    return _typed(build, x)


@intrinsic
def floor(typingctx, x):
    return _typed(lambda b, u: _generic(b, "floor", u), x)


@intrinsic
def times_power(typingctx, y, n):
    """y * 2**n by adding n to the exponent: y in [1/2, 2), n whole, -125 to 126."""

    def build(b, u, v):
        ints = vector(I32, u.type.count)
        return b.bitcast(
            b.add(b.bitcast(u, ints), b.shl(b.fptosi(v, ints), constant(ints, 23))), u.type
        )

    return _typed(build, y, n)


@intrinsic
def lane(typingctx, x, i):
    """Lane i of a register as a scalar.

    Where it is broadcast again, LLVM shuffles from register to register.
    """

    def codegen(context, b, sig, args):
        return b.extract_element(args[0], context.cast(b, args[1], sig.args[1], types.int32))

    return types.float32(x, i), codegen


@intrinsic
def put(typingctx, value, x, i):
    """x[i:i + n] = value, i counted through the whole contiguous float32 array."""

    def codegen(context, b, sig, args):
        store(b, args[0], data(context, b, sig.args[1], args[1]), args[2], 4)
        return context.get_dummy_value()

    return types.void(value, x, types.intp), codegen


@intrinsic
def keep_in_memory(typingctx):
    """Forbids the compiler to carry a stored value past this point in a register.

    No instruction of its own.
    """

    def codegen(context, b, sig, args):
        b.fence("seq_cst", "singlethread")
        return context.get_dummy_value()

    return types.void(), codegen


@functools.cache
def make_load(n: int):
    """Intrinsic f(x, i) -> n lanes.

    x[i:i + n] of a contiguous float32 array, i counted through the whole array.
    """

    @intrinsic
    def load_lanes(typingctx, x, i):
        def codegen(context, b, sig, args):
            return load(b, data(context, b, sig.args[0], args[0]), args[1], vector(F32, n), 4)

        return Lanes(n)(x, types.intp), codegen

    return load_lanes


@functools.cache
def make_zeros(n: int):
    """Intrinsic f() -> n lanes of 0."""

    @intrinsic
    def zeros(typingctx):
        return Lanes(n)(), lambda context, b, sig, args: constant(vector(F32, n), 0.0)

    return zeros


@functools.cache
def make_load_block(rows: int, columns: int):
    """Intrinsic f(s, i, stride) -> rows * columns lanes.

    a block of an int32 matrix from element i on, row by row, as float32.
    """

    @intrinsic
    def load_block(typingctx, s, i, stride):
        def codegen(context, b, sig, args):
            base, vec = data(context, b, sig.args[0], args[0]), vector(I32, columns)
            parts = [
                load(
                    b, base, b.add(args[1], b.mul(args[2], I64(r))), I32 if columns == 1 else vec, 4
                )
                for r in range(rows)
            ]
            if columns == 1:
                block = ir.Constant(vector(I32, rows), ir.Undefined)
                for r, x in enumerate(parts):
                    block = b.insert_element(block, x, I32(r))
            else:
                while len(parts) > 1:
                    parts = [
                        shuffle(b, x, y, list(range(2 * x.type.count)))
                        for x, y in zip(parts[::2], parts[1::2], strict=True)
                    ]
                block = parts[0]
            return b.sitofp(block, vector(F32, rows * columns))

        return Lanes(rows * columns)(s, types.intp, types.intp), codegen

    return load_block
