"""One row of INT8 scores outside the fast path, whole vectors at a time.

Wide scores are float32 in Q8.8 units.
"""

from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit import target
from ...numerics import fixedpoint as fx
from ..floats.float_exp2 import whole
from ..floats.float_isas import FLOAT_ISAS, FloatIsa, fold, larger
from ..floats.float_rows import for_vectors
from ..isa.isas import VECTOR_ISAS
from ..isa.vectors import I16, I32, call, clamp, constant, data, load, splat, store, vector

I1 = ir.IntType(1)
# float vectors of as many lanes as those of an INT8 instruction set
FLOATS = {16: "avx512", 8: "avx2", 4: "neon"}
# the bfloat16 tiles beside an INT8 instruction set, for CPUs that have both
BFLOATS = {"amx_int8": "amx_bf16", "avx512_vnni": "avx512_bf16"}
HIDDEN = float("-inf")


def floats_of(isa_name: str, pv: str) -> FloatIsa:
    """What multiplies the float weights and values of pv "bf16" and "fp32".

    Without bfloat16 instructions, float32 vectors multiply the numbers of pv "bf16".
    """
    name = BFLOATS.get(isa_name.partition(":")[0])
    if pv == "bf16" and name in target.available(target.BFLOAT16_ISAS):
        return FLOAT_ISAS[name]
    return FLOAT_ISAS[values_of(VECTOR_ISAS[isa_name])]


def values_of(isa) -> str:
    """The float vectors for P.V in float32 beside an INT8 instruction set.

    Scalable ones with SVE, else vectors of the same length.
    """
    return "sve" if isa.scalable else FLOATS[isa.lanes]


def _rounded(b, isa, x):
    """float32 to the nearest int32, ties to even; x within range, NaN becomes 0."""
    return whole(b, isa, call(b, f"llvm.roundeven.v{isa.lanes}f32", isa.floats, x))


@functools.cache
def row_top(lanes: int):
    """Intrinsic f(x, x_off, count) -> (largest score, any NaN)."""
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def top(typingctx, x, x_off, count):
        sig = types.Tuple((types.float32, types.boolean))(x, x_off, count)

        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])

            def body(at, state):
                y = load(b, px, b.add(a[1], at), isa.floats, 4)
                return [
                    larger(b, state[0], y),
                    b.or_(state[1], b.zext(b.fcmp_unordered("uno", y, y), vector(I32, lanes))),
                ]

            best, nan = for_vectors(
                b,
                a[2],
                lanes,
                [constant(isa.floats, HIDDEN), constant(vector(I32, lanes), 0)],
                body,
            )
            spoiled = b.icmp_unsigned("!=", fold(b, nan, lambda b, x, y: b.or_(x, y)), I32(0))
            return context.make_tuple(b, sig.return_type, [fold(b, best, larger), spoiled])

        return sig, codegen

    return top


@functools.cache
def row_narrow(lanes: int):
    """Intrinsic f(x, x_off, count, base, out, out_off).

    out int16 = round(x) - base, at least -32768, which -inf becomes too.
    """
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def narrow(typingctx, x, x_off, count, base, out, out_off):
        sig = types.void(x, x_off, count, base, out, out_off)

        def codegen(context, b, sig, a):
            px = data(context, b, sig.args[0], a[0])
            po = data(context, b, sig.args[4], a[4])
            ints = vector(I32, lanes)
            base = splat(b, a[3], ints)
            lowest = constant(ints, fx.MASKED)

            def body(at, state):
                y = load(b, px, b.add(a[1], at), isa.floats, 4)
                t = b.sub(_rounded(b, isa, clamp(b, y, float(fx.T_LIMIT))), base)
                t = b.select(b.icmp_signed("<", t, lowest), lowest, t)
                t = b.select(b.fcmp_ordered("==", y, constant(isa.floats, HIDDEN)), lowest, t)
                store(b, b.trunc(t, vector(I16, lanes)), po, b.add(a[5], at), 2)
                return []

            for_vectors(b, a[2], lanes, [], body)
            return context.get_dummy_value()

        return sig, codegen

    return narrow


@functools.cache
def any_bias(lanes: int):
    """Intrinsic f(bias, off, count) -> whether any of `count` vectors of a float32 bias is not
    -inf.
    """
    isa = FLOAT_ISAS[FLOATS[lanes]]

    @intrinsic
    def found(typingctx, bias, off, count):
        def codegen(context, b, sig, a):
            pb = data(context, b, sig.args[0], a[0])

            def body(at, state):
                y = load(b, pb, b.add(a[1], at), isa.floats, 4)
                return [b.or_(state[0], b.fcmp_unordered("!=", y, constant(isa.floats, HIDDEN)))]

            (seen,) = for_vectors(b, a[2], lanes, [constant(vector(I1, lanes), 0)], body)
            whole = ir.IntType(lanes)
            return b.icmp_unsigned("!=", b.bitcast(seen, whole), ir.Constant(whole, 0))

        return types.boolean(bias, off, count), codegen

    return found
