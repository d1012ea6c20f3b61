"""Squares of 32-bit words transposed in registers: what packing of keys is made of."""
from __future__ import annotations

import functools

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from .vectors import I32, data, load, shuffle, store, vector


@functools.cache
def transpose(lanes: int):
    """Intrinsic f(x, x_off, x_stride, out, out_off, out_stride): a square of lanes x lanes words, in registers."""
    @intrinsic
    def square(typingctx, x, x_off, x_stride, out, out_off, out_stride):
        def codegen(context, b, sig, a):
            px, po = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[3], a[3])
            words = vector(I32, lanes)
            rows = [load(b, px, b.add(a[1], b.mul(a[2], ir.Constant(a[2].type, r))), words, 4) for r in range(lanes)]
            step = lanes // 2
            while step:                                                 # swap the off-diagonal quarters, ever smaller
                low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
                high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
                for r in range(lanes):
                    if not r & step:
                        x, y = rows[r], rows[r + step]
                        rows[r], rows[r + step] = shuffle(b, x, y, low), shuffle(b, x, y, high)
                step //= 2
            for r, x in enumerate(rows):
                store(b, x, po, b.add(a[4], b.mul(a[5], ir.Constant(a[5].type, r))), 4)
            return context.get_dummy_value()
        return types.void(x, x_off, x_stride, out, out_off, out_stride), codegen
    return square
