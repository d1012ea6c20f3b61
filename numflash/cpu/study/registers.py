"""Vector registers as values in a kernel, so that a register tile can be written down line by line
in Python.

The product kernels build their tiles as LLVM code (`microkernels`). For study, a `Lanes` is a value
like a number: load it, multiply and add it, broadcast one of its lanes, store it. A `Lanes` may be
longer than a register of the machine: 64 float32 lanes are four AVX-512 registers, and LLVM splits
them. Operations take scalars in place of vectors and broadcast them.

On SVE, LLVM keeps vectors of a fixed length in the first 128 bits of the registers, unless it knows
how long they are: a kernel that begins with `whole_registers()` says so.
"""

from __future__ import annotations

import functools

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic, models, register_model

from ...jit import target
from ...jit.memory import empty
from ..isa.fexpa import exponential
from ..isa.vectors import F32, I32, I64, call, constant, data, load, shuffle, splat, store, vector
from ..isa.vectors_arm import SVE

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
    """(signature, codegen) where every argument is a number or Lanes of one length, else None.

    Numba reports None as a type error.
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

    def build(b, u, v):
        if "aarch64" in b.module.triple:  # one instruction; of SVE, the selection below is five
            return _generic(b, "maximum", u, v)
        return b.select(b.fcmp_ordered("<", u, v), v, u)

    return _typed(build, x, bound)


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


@functools.cache
def make_fexpa(name: str):
    """Intrinsic f(x) -> 2**x by SVE's FEXPA, a variant of `isa.fexpa.EXP2_FLOAT`."""

    @intrinsic
    def fexpa(typingctx, x):
        def codegen(context, b, sig, args):
            target.guard("sve", context.codegen())
            count = sig.args[0].n
            width = min(count, max(4, target.vector_bits(context.codegen()) // 32))
            parts = []
            for first in range(0, count, width):
                part = shuffle(b, args[0], args[0], list(range(first, first + width)))
                whole = ir.Constant(SVE.vector(F32), ir.Undefined)
                whole = call(
                    b, f"llvm.vector.insert.nxv4f32.v{width}f32", whole.type, whole, part, I64(0)
                )
                found = exponential(b, SVE, whole, name)
                name_back = f"llvm.vector.extract.v{width}f32.nxv4f32"
                parts.append(call(b, name_back, vector(F32, width), found, I64(0)))
            return joined(b, parts)

        return x(x), codegen

    return fexpa


def joined(b, parts):
    """Vectors of one length (a power of 2 of them) as one."""
    while len(parts) > 1:
        parts = [
            shuffle(b, x, y, list(range(2 * x.type.count)))
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
    return parts[0]


@intrinsic
def whole_registers(typingctx):
    """f(): LLVM may put the `Lanes` of this function into whole registers of SVE.

    It says how long they are, and that nobody inlines the function, which would lose it: the code
    is for that length alone. No-op on machines without longer vectors than NEON's.
    """

    def codegen(context, b, sig, args):
        bits = target.vector_bits(context.codegen())
        if bits > 128:
            b.function.attributes.add("noinline")
            known = f"vscale_range({bits // 128},{bits // 128})"
            set.add(b.function.attributes, known)  # llvmlite knows no such attribute
        return context.get_dummy_value()

    return types.void(), codegen


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

    A block of an int32 matrix from element i on, row by row, as float32.
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
                block = joined(b, parts)
            return b.sitofp(block, vector(F32, rows * columns))

        return Lanes(rows * columns)(s, types.intp, types.intp), codegen

    return load_block
