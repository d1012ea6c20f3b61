"""What options make of INT8 scores while these are still in registers: softcap, ALiBi and bias, between scale and rounding.

The arithmetic of `scores.transform_row`, to the bit: no multiply-add is fused, every operation rounds once, as in the integer
model. Where scores become int16, what is below them all is hidden either way; with `wide` they stay float32 and only -inf is.

A dense bias is asked for a key block ahead: its rows lie too far apart for the hardware to foresee the next one.
"""
from __future__ import annotations

from typing import NamedTuple

import llvmlite.ir as ir
import numpy as np

from .. import fixedpoint as fx
from .._jit import bare
from ..tiling import KEY_BLOCK
from .vectors import F32, I32, I64, data, load, prefetch


class Changes(NamedTuple):
    """The options of a query tile; rows are counted from its first one, keys from the first of all.

    cap, slope : float32, Q8.8 units, 0 where there is none;  shift : (rows,) float32, added to scores in units of the cap
    centre : the key at distance 0 from row 0
    bias : flat float32, natural units; `place` is the element of row 0 and key 0, rows are `step` apart; `last` is the last row
    """

    cap: float
    shift: np.ndarray
    slope: float
    centre: int
    has_bias: bool
    bias: np.ndarray
    place: int
    step: int
    last: int


@bare
def changes_from(changes, i):
    """The same, with rows counted from row i."""
    return Changes(changes.cap, changes.shift[i:], changes.slope, changes.centre + i, changes.has_bias, changes.bias,
                   changes.place + i * changes.step, changes.step, changes.last - i)


def changer(context, b, isa, changes_type, changes, wide: bool):
    """f(scores, row, key) -> scores: emits the options of one row of a panel, whose first key is `key`.

    scores : the vectors of the panel, float32, in the panel's order
    """
    floats, ints = isa.vector(F32), isa.vector(I32)
    field = {name: b.extract_value(changes, n) for n, name in enumerate(Changes._fields)}
    types = dict(zip(Changes._fields, changes_type.types, strict=True))
    shifts, biases = (data(context, b, types[name], field[name]) for name in ("shift", "bias"))

    def number(value):
        return isa.fill(b, floats, float(value))

    def capped(scores, row, key):
        shift = isa.splat(b, load(b, shifts, row, F32, 4), floats)
        cap = isa.splat(b, b.fmul(field["cap"], F32(float(fx.CAP_UNIT))), floats)
        return softcap(b, isa, [b.fadd(x, shift) for x in scores], cap)

    def sloped(scores, row, key):
        slope = isa.splat(b, field["slope"], floats)
        ahead = isa.splat(b, b.trunc(b.sub(b.add(field["centre"], row), key), I32), ints)
        away = [b.sub(ahead, isa.columns(b, v)) for v in range(len(scores))]
        away = [isa.generic(b, "smax", x, b.sub(isa.fill(b, ints, 0), x)) for x in away]
        return [limited(b.fsub(x, b.fmul(slope, b.sitofp(n, floats)))) for x, n in zip(scores, away, strict=True)]

    def biased(scores, row, key):
        row = b.select(b.icmp_signed("<", row, field["last"]), row, field["last"])
        start, bias = b.add(b.add(field["place"], b.mul(field["step"], row)), key), []
        for v in range(len(scores)):
            where = b.add(start, isa.elements(b, v))
            prefetch(b, b.gep(biases, [b.mul(b.add(where, I64(KEY_BLOCK)), I64(4))]))
            bias.append(load(b, biases, where, floats, 4))
        bias = [y for v in range(0, len(bias), 2) for y in isa.packed(b, *bias[v:v + 2])]
        return [add_bias(x, y) for x, y in zip(scores, bias, strict=True)]

    def add_bias(x, y):
        changed = b.fadd(x, b.fmul(y, number(fx.LOG2E_Q8)))
        if not wide:
            return limited(changed)
        changed = isa.choose(b, "<", changed, number(fx.LOWEST), number(fx.LOWEST), changed)
        return isa.choose(b, "==", y, number(-np.inf), number(-np.inf), changed)            # which hides even a NaN

    def limited(x):
        """What int16 will be: above 32767, and where it is NaN, 32767; neither must pass for a hidden key."""
        return x if wide else isa.choose(b, "<", x, number(32767), x, number(32767))

    def change(scores, row, key):
        if wide:
            scores = [isa.clamp(b, x, float(fx.T_LIMIT)) for x in scores]
        scores = _where(b, b.fcmp_ordered(">", field["cap"], F32(0.0)), scores, lambda x: capped(x, row, key))
        scores = _where(b, b.fcmp_ordered("!=", field["slope"], F32(0.0)), scores, lambda x: sloped(x, row, key))
        has_bias = b.icmp_unsigned("!=", field["has_bias"], ir.Constant(field["has_bias"].type, 0))
        return _where(b, has_bias, scores, lambda x: biased(x, row, key))
    return change


def softcap(b, isa, x, cap):
    """`fixedpoint.softcap` of a vector, `cap` times CAP_UNIT."""
    def number(value):
        return isa.fill(b, isa.vector(F32), float(value))

    def each(op, xs, ys):
        return [op(x, y) for x, y in zip(xs, ys, strict=True)]

    def plus(xs, value):
        return [b.fadd(x, number(value)) for x in xs]

    x = [isa.clamp(b, v, float(fx.CAP_LIMIT)) for v in x]
    z = each(b.fmul, x, x)
    p, q = plus(z, fx.CAP_P1), plus(z, fx.CAP_Q2)
    x, p, q = [b.fmul(v, cap) for v in x], each(b.fmul, p, z), each(b.fmul, q, z)
    p, q = plus(p, fx.CAP_P0), plus(q, fx.CAP_Q1)
    p, q = each(b.fmul, x, p), each(b.fmul, q, z)
    return each(b.fdiv, p, plus(q, fx.CAP_Q0))


def _where(b, test, vectors, change):
    """change(vectors) if the test holds, else the vectors as they are: a branch."""
    entry, then, done = b.block, b.append_basic_block("change"), b.append_basic_block("change.end")
    b.cbranch(test, then, done)
    b.position_at_end(then)
    changed, end = change(vectors), b.block
    b.branch(done)
    b.position_at_end(done)
    phis = [b.phi(x.type) for x in vectors]
    for phi, old, new in zip(phis, vectors, changed, strict=True):
        phi.add_incoming(old, entry)
        phi.add_incoming(new, end)
    return phis
