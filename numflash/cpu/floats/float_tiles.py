"""Register tiles of the floating-point kernels, written once for every vector length.

Contract (A rows of operands, B packed or in place, `steps` steps of `group` products each):

* `score_tile`: x[rows, nv * lanes] = A.B, float32; the factor of the scores comes with the softmax.
* `value_tile`: o[rows, nv * lanes] += A.B, float32.

Everything but the bfloat16 dot product is plain LLVM IR on vectors, so the same source serves
AVX-512, AVX2, NEON and SVE. Row operations are in `float_rows`, the vectors of each instruction set
in `float_isas`.
"""

from __future__ import annotations

import functools

from numba import types
from numba.extending import intrinsic

from ..isa.dot_loop import Panel, dot_loop
from ..isa.operands import Rows
from ..isa.vectors import (
    I64,
    data,
    load,
    store,
)
from . import amx_bfloat16
from .float_isas import FLOAT_ISAS


@functools.cache
def score_tile(name: str, nv: int, scaled: bool = False):
    """Intrinsic f(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride).

    `k` in panels of the full width.

    `scaled` (of vectors only): f(..., steps, c, x, x_off, x_stride), x = (A.B) * c.
    """
    isa = FLOAT_ISAS[name]
    if name == "amx_bf16":
        return amx_bfloat16.score_tile(isa, nv)

    def codegen(context, b, sig, a):
        end = len(a)
        pq, pk, px = (data(context, b, sig.args[n], a[n]) for n in (0, 3, end - 3))
        zero = [isa.fill(b, isa.floats, 0.0)] * (isa.rows * nv)
        c = isa.splat(b, a[6], isa.floats) if scaled else None
        panel = Panel(pk, a[4], isa.elements(b, isa.nv * isa.group))
        rows = dot_loop(
            b, isa, isa.dot, Rows(pq, a[1], a[2]), panel, a[5], zero, nv, unroll=isa.turn
        )
        for m, acc in enumerate(rows):
            for n in range(nv):
                where = b.add(b.add(a[end - 2], b.mul(a[end - 1], I64(m))), isa.elements(b, n))
                store(b, b.fmul(acc[n], c) if scaled else acc[n], px, where, 4)
        return context.get_dummy_value()

    @intrinsic
    def tile(typingctx, q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride):
        return types.void(q, q_off, q_stride, k, k_off, steps, x, x_off, x_stride), codegen

    @intrinsic
    def scaled_tile(typingctx, q, q_off, q_stride, k, k_off, steps, c, x, x_off, x_stride):
        return types.void(q, q_off, q_stride, k, k_off, steps, c, x, x_off, x_stride), codegen

    return scaled_tile if scaled else tile


@functools.cache
def value_tile(name: str, nv: int):
    """Intrinsic f(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride)."""
    isa = FLOAT_ISAS[name]
    if name == "amx_bf16":
        return amx_bfloat16.value_tile(isa, nv)

    @intrinsic
    def tile(typingctx, p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride):
        sig = types.void(p, p_off, p_stride, v, v_off, v_stride, steps, o, o_off, o_stride)

        def codegen(context, b, sig, a):
            pp, pv, po = (data(context, b, sig.args[n], a[n]) for n in (0, 3, 7))
            where = [
                b.add(b.add(a[8], b.mul(a[9], I64(m))), isa.elements(b, n))
                for m in range(isa.rows)
                for n in range(nv)
            ]
            first = [load(b, po, w, isa.floats, 4) for w in where]
            for m, acc in enumerate(
                dot_loop(
                    b,
                    isa,
                    isa.dot,
                    Rows(pp, a[1], a[2]),
                    Panel(pv, a[4], a[5]),
                    a[6],
                    first,
                    nv,
                    unroll=isa.turn,
                )
            ):
                for n in range(nv):
                    store(b, acc[n], po, where[m * nv + n], 4)
            return context.get_dummy_value()

        return sig, codegen

    return tile
