"""Weights and score gradients of a row of a tile, from its scores."""

from __future__ import annotations

import functools

from numba import types
from numba.extending import intrinsic

from ..floats.float_exp2 import exp2
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_rows import for_vectors, narrow
from ..isa.vectors import data, load, store


@functools.cache
def row_gradients(name: str, sloped: bool = False, of_row: bool = False):
    """Intrinsic f(x, dp, off, count, lse, delta, at, slope, p, ds).

    p = 2**(x - lse[at:]), at most 1, dp = p * (dp - delta[at:]), if `sloped` times slope[off:],
    which may be anything where p becomes 0 and is overwritten with dp without it; ds = dp. p and ds
    are operands of products: float32 and the memory of x and dp, or bfloat16.

    of_row : lse and delta are numbers, of one query whose keys are side by side, and `at` is not used
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def gradients(typingctx, x, dp, off, count, lse, delta, at, slope, p, ds):
        def codegen(context, b, sig, a):
            px, pd, ps, to_p, to_ds = (data(context, b, sig.args[n], a[n]) for n in (0, 1, 7, 8, 9))
            if of_row:
                both = [isa.splat(b, a[n], isa.floats) for n in (4, 5)]
            else:
                places = [data(context, b, sig.args[n], a[n]) for n in (4, 5)]

            def body(n, state):
                here = b.add(a[2], n)
                there = b.add(a[6], n)
                lse, delta = both if of_row else [load(b, x, there, isa.floats, 4) for x in places]
                x = b.fsub(load(b, px, here, isa.floats, 4), lse)
                zero = isa.fill(b, isa.floats, 0.0)
                p = exp2(b, isa, isa.choose(b, ">", x, zero, zero, x))
                ds = b.fmul(p, b.fsub(load(b, pd, here, isa.floats, 4), delta))
                if sloped:
                    slope = load(b, ps, here, isa.floats, 4)
                    store(b, ds, ps, here, 4)
                    ds = b.fmul(ds, slope)
                    ds = isa.choose(b, "==", p, zero, zero, ds)
                store(b, ds, pd, here, 4)
                if isa.group == 1:
                    store(b, p, to_p, here, 4)
                else:
                    store(b, narrow(b, isa, p), to_p, here, 2)
                    store(b, narrow(b, isa, ds), to_ds, here, 2)
                return []

            for_vectors(b, a[3], isa.lanes, [], body)
            return context.get_dummy_value()

        return types.void(x, dp, off, count, lse, delta, at, slope, p, ds), codegen

    return gradients
