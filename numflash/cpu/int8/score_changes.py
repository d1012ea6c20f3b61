"""The options of INT8 scores that are stored in L1.

Softcap, ALiBi, bias and mask, between scale and rounding.

The arithmetic of `semantics.transform_row`, to the bit: no multiply-add is fused, every operation
rounds once, as in the integer model. Where scores become int16, what is below them all is hidden
either way; with `wide` they stay float32 and only -inf is.

Dense biases and masks are prefetched one key block ahead: their rows are too far apart for the
hardware prefetcher.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import llvmlite.ir as ir
import numpy as np

from ...jit.compiler import bare
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..isa.vectors import F32, I8, I32, I64, data, load, prefetch, store


class Changes(NamedTuple):
    """The options of a query tile; rows are counted from its first one, keys from the first of all.

    shift : (rows,) float32, added to scores in units of the cap
    numbers : (2,) float32: the cap in Q8.8 times CAP_UNIT, the slope in Q8.8
    centre : the key at distance 0 from row 0
    base : (rows,) int32 Q8.8, whole octaves from -2**29 to 0: taken off the rounded scores of a
        row, so that int16 holds them
    bias : flat float32, natural units; `bias_at` is the element of row 0 and key 0, rows are
        `bias_step` apart
    mask : flat uint8, 0 where a key is hidden, likewise
    last : the last row of bias and mask
    """

    has_cap: bool
    has_slope: bool
    has_bias: bool
    has_mask: bool
    shift: np.ndarray
    numbers: np.ndarray
    centre: int
    base: np.ndarray
    bias: np.ndarray
    bias_at: int
    bias_step: int
    mask: np.ndarray
    mask_at: int
    mask_step: int
    last: int


@bare
def changes_from(changes, i):
    """The same, with rows counted from row i."""
    return Changes(
        changes.has_cap,
        changes.has_slope,
        changes.has_bias,
        changes.has_mask,
        changes.shift[i:],
        changes.numbers,
        changes.centre + i,
        changes.base[i:],
        changes.bias,
        changes.bias_at + i * changes.bias_step,
        changes.bias_step,
        changes.mask,
        changes.mask_at + i * changes.mask_step,
        changes.mask_step,
        changes.last - i,
    )


def changer(context, b, isa, changes_type, changes, wide: bool):
    """f(scores, row, key, x, where).

    Emits the options of vectors of a row, whose first key is `key`, and stores them.

    scores : pairs of vectors of float32, in the order of a panel;  x, where : a pointer, and the
        element to store from

    Factors are loaded anew for every row, and options are flags: values kept in registers are taken
    from the dot products beside.
    """
    floats = isa.vector(F32)
    ints = isa.vector(I32)
    field = {name: b.extract_value(changes, n) for n, name in enumerate(Changes._fields)}
    types = dict(zip(Changes._fields, changes_type.types, strict=True))
    shifts, numbers, bases, biases, masks = (
        data(context, b, types[name], field[name])
        for name in ("shift", "numbers", "base", "bias", "mask")
    )

    def number(value):
        return isa.fill(b, floats, float(value))

    def factor(n):
        return isa.splat(b, load(b, numbers, I64(n), F32, 4), floats)

    def capped(scores, row, key):
        shift = isa.splat(b, load(b, shifts, row, F32, 4), floats)
        cap = factor(0)
        return softcap(b, isa, [b.fadd(x, shift) for x in scores], cap)

    def sloped(scores, row, key):
        slope = factor(1)
        ahead = isa.splat(b, b.trunc(b.sub(b.add(field["centre"], row), key), I32), ints)
        away = [b.sub(ahead, isa.columns(b, v)) for v in range(len(scores))]
        away = [isa.generic(b, "smax", x, b.sub(isa.fill(b, ints, 0), x)) for x in away]
        return [
            b.fsub(x, b.fmul(slope, b.sitofp(n, floats))) for x, n in zip(scores, away, strict=True)
        ]

    def dense(name, row, key):
        """Element of the bias or mask at this row and key."""
        row = b.select(b.icmp_signed("<", row, field["last"]), row, field["last"])
        return b.add(b.add(field[name + "_at"], b.mul(field[name + "_step"], row)), key)

    def biased(scores, row, key):
        start = dense("bias", row, key)
        bias = []
        for v in range(len(scores)):
            where = b.add(start, isa.elements(b, v))
            prefetch(b, b.gep(biases, [b.mul(b.add(where, I64(KEY_BLOCK)), I64(4))]))
            bias.append(load(b, biases, where, floats, 4))
        bias = [y for v in range(0, len(bias), 2) for y in isa.packed(b, *bias[v : v + 2])]
        return [add_bias(x, y) for x, y in zip(scores, bias, strict=True)]

    def add_bias(x, y):
        changed = b.fadd(x, b.fmul(y, number(fx.LOG2E_Q8)))
        if not wide:
            return changed
        changed = isa.choose(b, "<", changed, number(fx.LOWEST), number(fx.LOWEST), changed)
        # a bias of -inf hides even a NaN
        return isa.choose(b, "==", y, number(-np.inf), number(-np.inf), changed)

    def masked(scores, row, key):
        """Scores in the order of the keys, of type int16 or float32."""
        start = dense("mask", row, key)
        per_lane = 1 if wide else 2
        prefetch(b, b.gep(masks, [b.add(start, I64(KEY_BLOCK))]))
        hidden = isa.fill(b, scores[0].type, -np.inf if wide else fx.MASKED)
        places = (b.add(start, isa.elements(b, per_lane * v)) for v in range(len(scores)))
        return [
            isa.where_set(b, load(b, masks, place, isa.vector(I8, per_lane), 1), x, hidden)
            for place, x in zip(places, scores, strict=True)
        ]

    def limited(scores, row, key):
        """The score limited to 32767, which a NaN becomes too.

        The next step rounds to int16, where neither may be mistaken for a hidden key.
        """
        return [isa.choose(b, "<", x, number(32767), x, number(32767)) for x in scores]

    def change(scores, row, key, x, where):
        if wide:
            scores = [isa.clamp(b, x, float(fx.T_LIMIT)) for x in scores]
        scores = changed(scores, field["has_cap"], capped, row, key)
        scores = changed(scores, field["has_slope"], sloped, row, key)
        scores = changed(scores, field["has_bias"], biased, row, key)
        if not wide:
            scores = changed(
                scores, b.or_(field["has_slope"], field["has_bias"]), limited, row, key
            )
        pairs = [scores[v : v + 2] for v in range(0, len(scores), 2)]
        base = None
        if wide:
            scores = [y for pair in pairs for y in isa.in_order(b, *pair)]
        else:
            base = isa.splat(b, load(b, bases, row, I32, 4), ints)
            scores = [isa.to_int16(b, *pair, base) for pair in pairs]
        for v, y in enumerate(changed(scores, field["has_mask"], masked, row, key)):
            size = 1 if wide else 2
            store(b, y, x, b.add(where, isa.elements(b, size * v)), 4 // size)

    def changed(scores, there, change, row, key):
        there = b.icmp_unsigned("!=", there, ir.Constant(there.type, 0))
        return _where(b, there, scores, functools.partial(change, row=row, key=key))

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
    p = plus(z, fx.CAP_P1)
    q = plus(z, fx.CAP_Q2)
    x = [b.fmul(v, cap) for v in x]
    p = each(b.fmul, p, z)
    q = each(b.fmul, q, z)
    p = plus(p, fx.CAP_P0)
    q = plus(q, fx.CAP_Q1)
    p = each(b.fmul, x, p)
    q = each(b.fmul, q, z)
    return each(b.fdiv, p, plus(q, fx.CAP_Q0))


def _where(b, test, vectors, change):
    """change(vectors) if the test holds, else the vectors as they are: a branch."""
    entry = b.block
    then = b.append_basic_block("change")
    done = b.append_basic_block("change.end")
    b.cbranch(test, then, done)
    b.position_at_end(then)
    changed = change(vectors)
    end = b.block
    b.branch(done)
    b.position_at_end(done)
    phis = [b.phi(x.type) for x in vectors]
    for phi, old, new in zip(phis, vectors, changed, strict=True):
        phi.add_incoming(old, entry)
        phi.add_incoming(new, end)
    return phis
