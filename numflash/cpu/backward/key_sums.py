"""What the rows of queries add to the gradients of a few keys, summed in registers."""

from __future__ import annotations

import functools

from numba import types
from numba.extending import intrinsic

from ..floats.float_isas import FLOAT_ISAS
from ..isa.vectors import F32, I64, load_at, pointer, pointer_at, repeat, store_at


def keys_at_a_time(name: str) -> int:
    """Keys whose sums of four vectors each are in registers."""
    return 4 if FLOAT_ISAS[name].lanes == 16 else 2


@functools.cache
def key_sums(name: str, width: int):
    """Intrinsic f(p, p_stride, rows, x, x_stride, count, factor, out, out_stride): out[j] = factor *
    sum over the rows r of p[r, j] * x[r].

    p, x, out : addresses of float32 rows of weights, of `width` vectors of columns, and of the results;
        strides in bytes
    count : keys that there are, of at most `keys_at_a_time`; the last of them stands for the others
    """
    isa = FLOAT_ISAS[name]
    places = [I64(4 * isa.lanes * c) for c in range(width)]

    @intrinsic
    def sums(typingctx, p, p_stride, rows, x, x_stride, count, factor, out, out_stride):
        def codegen(context, b, sig, a):
            pp, px, po = (pointer(b, a[n]) for n in (0, 3, 7))
            last = b.sub(a[5], I64(1))
            keys = [
                b.select(b.icmp_signed("<", I64(j), last), I64(j), last)
                for j in range(keys_at_a_time(name))
            ]
            weights = [pointer_at(b, pp, b.mul(j, I64(4))) for j in keys]

            def add(r, state):
                row, at = pointer_at(b, px, b.mul(r, a[4])), b.mul(r, a[1])
                values = [load_at(b, row, isa.floats, place) for place in places]
                new = []
                for j, weight in enumerate(weights):
                    y = isa.splat(b, load_at(b, weight, F32, at), isa.floats)
                    new += [isa.fma(b, y, x, state[j * width + c]) for c, x in enumerate(values)]
                return new

            nothing = [isa.fill(b, isa.floats, 0.0)] * (len(keys) * width)
            done = repeat(b, I64(0), a[2], nothing, add)
            factor = isa.splat(b, a[6], isa.floats)
            for n, total in enumerate(done):
                target = pointer_at(b, po, b.mul(a[8], keys[n // width]))
                store_at(b, b.fmul(total, factor), target, places[n % width])
            return context.get_dummy_value()

        return types.void(p, p_stride, rows, x, x_stride, count, factor, out, out_stride), codegen

    return sums
