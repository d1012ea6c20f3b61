"""The first keys of a sequence, a few rows of queries at a time, in front of the key blocks.

Often one of them takes most of a row's weight (an "attention sink"). In a block with it the other
keys would share few levels of the 8-bit weights, and the rounding of its own key and value would be
the error of the row. So the first `FIRST_KEYS` keys are taken out of their block: with keys and
values of 13 bits (`QuantizedTensor.low`) and weights of 12 they make the state that the blocks find.

    scores   S = q.k, int8 times int16, exact in int32; x = S * key scale * query scale    (score_rows)
    weights  own octave, w = 2**(x - octave) in 12 bits, and their sum                      (weigh_first)
    values   o = w.v in float32: products are exact, sums are rounded in the order of keys (value_rows)

There are so few of these that neither tiles nor packed operands pay: Q is read as it came.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import FINER, FIRST_KEYS
from ..isa.isas import VECTOR_ISAS
from ..isa.vectors import (
    F32,
    I8,
    I16,
    I32,
    I64,
    Isa,
    call,
    clamp,
    constant,
    data,
    fold_tree,
    load,
    repeat,
    shuffle,
    store,
    vector,
)
from ..semantics import UNSEEN

F = np.float32
FLOATS = vector(F32, FIRST_KEYS)
NO_SCORE = -(1 << 31)  # of a key that is not seen: below every score


class FirstKeys(NamedTuple):
    """The first keys of every sequence, for Nkv KV heads; what a sequence lacks is 0.

    keys : (Nkv, FIRST_KEYS, D) int16 in 1 / FINER of an INT8 step
    scale : (Nkv, FIRST_KEYS) float32 of these, NaN for a key that was not finite
    values : (Nkv, FIRST_KEYS, columns of O) float32 in INT8 steps
    number : how many of these are first keys, `Problem.first_keys`; the blocks have the rest
    """

    keys: np.ndarray
    scale: np.ndarray
    values: np.ndarray
    number: int


def first_keys(
    k: np.ndarray,
    v: np.ndarray,
    scale: np.ndarray,
    columns: int,
    count: int = FIRST_KEYS,
) -> FirstKeys:
    """From the first keys k (N, up to 4, D) and values v (N, up to 4, Dv) as
    `QuantizedTensor.finer_rows` has them, and the scales (N, S) of keys; `count` is
    `FirstKeys.number`.
    """
    n, there, d = k.shape
    found = FirstKeys(
        np.zeros((n, FIRST_KEYS, d), np.int16),
        np.zeros((n, FIRST_KEYS), F),
        np.zeros((n, FIRST_KEYS, columns), F),
        count,
    )
    found.keys[:, :there] = k
    found.scale[:, :there] = scale[:, :there] * F(1 / FINER)
    found.values[:, :there, : v.shape[2]] = v * F(1 / FINER)
    return found


def no_first_keys(n: int, columns: int) -> FirstKeys:
    """What kernels with pv "bf16" and "fp32" take: they have no use for them."""
    return FirstKeys(
        np.zeros((n, FIRST_KEYS, 0), np.int16),
        np.zeros((n, FIRST_KEYS), F),
        np.zeros((n, FIRST_KEYS, columns), F),
        0,
    )


def rows_together(isa_name: str) -> int:
    """Rows of queries that share each load of a first key or value: their 4 sums each, 4 keys and
    the queries are in registers, of which AVX2 has 16.
    """
    return 2 if VECTOR_ISAS[isa_name].lanes == 8 else 4


def _rows(b: ir.IRBuilder, first, step, count, rows: int) -> list:
    """Where `rows` rows begin, `step` apart; those from `count` on are the last one again."""
    last = b.sub(count, I64(1))
    found = [b.select(b.icmp_signed("<", I64(r), last), I64(r), last) for r in range(rows)]
    return [b.add(first, b.mul(step, row)) for row in found]


def _dots(b: ir.IRBuilder, isa: Isa, q, k, rows, d) -> list:
    """int32 of the queries in `rows` (d int8 from there on) times each of the keys k (d int16 each):
    FIRST_KEYS lanes of each row, as many rows in a vector as it has lanes for.
    """
    wide = 2 * isa.lanes
    bytes_, words = vector(I8, wide), vector(I16, wide)
    keys = [b.mul(d, I64(j)) for j in range(FIRST_KEYS)]

    def add(n, state):
        at = b.mul(n, I64(wide))
        known = [load(b, k, b.add(key, at), words, 2) for key in keys]
        queries = [b.sext(load(b, q, b.add(row, at), bytes_, 1), words) for row in rows]
        pairs = [(query, key) for query in queries for key in known]
        return [isa.pair_dot(b, acc, *pair) for acc, pair in zip(state, pairs, strict=True)]

    whole = b.sdiv(d, I64(wide))
    none = constant(vector(I32, isa.lanes), 0)
    state = repeat(b, I64(0), whole, [none] * (FIRST_KEYS * len(rows)), add)
    lanes = min(isa.lanes, len(state))
    totals = [fold_tree(b, state[n : n + lanes], b.add) for n in range(0, len(state), lanes)]

    def add_one(n, state):
        found = list(state)
        for r, row in enumerate(rows):
            query = b.sext(load(b, q, b.add(row, n), I8, 1), I32)
            for j, key in enumerate(keys):
                which, lane = divmod(r * FIRST_KEYS + j, lanes)
                product = b.mul(query, b.sext(load(b, k, b.add(key, n), I16, 2), I32))
                new = b.add(b.extract_element(found[which], I32(lane)), product)
                found[which] = b.insert_element(found[which], new, I32(lane))
        return found

    return repeat(b, b.mul(whole, I64(wide)), d, totals, add_one)


@functools.cache
def score_rows(isa_name: str):
    """Intrinsic f(q, row, d, count, keys, head, scale, cq, i, x, at): scores x[at ...] of up to
    `rows_together` queries with the first keys, Q8.8 or in units of a softcap.

    q : int8, the first query's d elements from `row` on;  keys, scale : of `FirstKeys`, of head
        `head`;  cq : factors of the queries, from element i on
    """
    isa = VECTOR_ISAS[isa_name]
    together = rows_together(isa_name)

    @intrinsic
    def score(typingctx, q, row, d, count, keys, head, scale, cq, i, x, at):
        def codegen(context, b, sig, args):
            pq, pk, ps, pc, px = (data(context, b, sig.args[n], args[n]) for n in (0, 4, 6, 7, 9))
            first = b.mul(args[5], I64(FIRST_KEYS))
            keys_at = b.gep(pk, [b.mul(b.mul(first, args[2]), I64(2))])
            key_scales = load(b, ps, first, FLOATS, 4)
            rows = _rows(b, args[1], args[2], args[3], together)
            for n, dots in enumerate(_dots(b, isa, pq, keys_at, rows, args[2])):
                lanes, done = dots.type.count, n * dots.type.count // FIRST_KEYS
                floats, all_rows = vector(F32, lanes), lanes // FIRST_KEYS
                s = b.sitofp(dots, floats)
                s = b.fmul(
                    s, shuffle(b, key_scales, key_scales, list(range(FIRST_KEYS)) * all_rows)
                )
                own = load(b, pc, b.add(args[8], I64(done)), vector(F32, all_rows), 4)
                of_lane = [lane // FIRST_KEYS for lane in range(lanes)]
                s = clamp(b, b.fmul(s, shuffle(b, own, own, of_lane)), float(fx.T_LIMIT))
                store(b, s, px, b.add(args[10], I64(done * FIRST_KEYS)), 4)
            return context.get_dummy_value()

        place = types.int64
        kinds = q, place, place, place, keys, place, scale, cq, place, x, place
        return types.void(*kinds), codegen

    return score


def _weights(b: ir.IRBuilder, y):
    """`fixedpoint.exp2_p12` of distances below the octave, up to 65535."""
    number = functools.partial(constant, y.type)
    f = b.and_(b.shl(y, number(8)), number(0xFFFF))
    g = b.lshr(b.mul(f, number(int(fx.P_B))), number(16))
    h = b.lshr(b.mul(f, b.sub(number(int(fx.P_A)), g)), number(16))
    shift = _lanewise(b, "umin", b.lshr(y, number(8)), number(15))
    return b.lshr(b.lshr(b.sub(number(fx.P_WIDE), h), shift), number(4))


def _lanewise(b: ir.IRBuilder, name: str, x, y):
    return call(b, f"llvm.{name}.v{x.type.count}i32", x.type, x, y)


def _fold_rows(b: ir.IRBuilder, x, combine):
    """Every FIRST_KEYS lanes combined: the result in each of them."""
    for distance in (1, 2):
        x = combine(x, shuffle(b, x, x, [lane ^ distance for lane in range(x.type.count)]))
    return x


@functools.cache
def weigh_first(rows: int, one: int):
    """Intrinsic f(x, at, m, m_at, l, l_at) -> whether a score is NaN.

    The scores x[at ...] of `rows` rows, FIRST_KEYS of each, -inf where hidden, become weights; 1.0
    is `one`, as in the blocks. Octaves go to m[m_at ...], sums of the weights to l[l_at ...].
    """
    lanes = rows * FIRST_KEYS
    floats, ints = vector(F32, lanes), vector(I32, lanes)
    first_lanes = list(range(0, lanes, FIRST_KEYS))
    unit = one / fx.FIRST_ONE

    @intrinsic
    def weigh(typingctx, x, at, m, m_at, l, l_at):
        def codegen(context, b, sig, args):
            px, pm, pl = (data(context, b, sig.args[n], args[n]) for n in (0, 2, 4))
            y = load(b, px, args[1], floats, 4)
            no_number = b.fcmp_unordered("uno", y, y)
            # NaN is hidden, too: such a row has no result anyway
            seen = b.fcmp_ordered("one", y, constant(floats, float("-inf")))
            y = clamp(b, b.select(seen, y, constant(floats, 0.0)), float(fx.T_LIMIT))
            t = b.fptosi(call(b, f"llvm.roundeven.v{lanes}f32", floats, y), ints)
            t = b.select(seen, t, constant(ints, NO_SCORE))
            top = _fold_rows(b, t, functools.partial(_lanewise, b, "smax"))
            octave = b.ashr(b.add(top, constant(ints, 255)), constant(ints, 8))
            furthest = constant(ints, 65535)
            distance = b.sub(b.shl(octave, constant(ints, 8)), t)
            distance = b.select(seen, _lanewise(b, "umin", distance, furthest), furthest)
            weights = _weights(b, distance)
            store(b, b.fmul(b.sitofp(weights, floats), constant(floats, unit)), px, args[1], 4)
            none = b.icmp_signed("==", top, constant(ints, NO_SCORE))
            octave = b.select(none, constant(ints, UNSEEN), octave)
            store(b, shuffle(b, octave, octave, first_lanes), pm, args[3], 4)
            total = b.fmul(b.sitofp(_fold_rows(b, weights, b.add), floats), constant(floats, unit))
            store(b, shuffle(b, total, total, first_lanes), pl, args[5], 4)
            return call(b, f"llvm.vector.reduce.or.v{lanes}i1", ir.IntType(1), no_number)

        place = types.int64
        return types.boolean(x, place, m, place, l, place), codegen

    return weigh


@functools.cache
def value_rows(isa_name: str):
    """Intrinsic f(w, w_at, count, values, head, width, o, at): rows o[at ...] of `width` columns = the
    weights w[w_at ...] times the values of head `head`, for up to `rows_together` rows.
    """
    isa = VECTOR_ISAS[isa_name]
    floats = isa.vector(F32)
    together = rows_together(isa_name)

    @intrinsic
    def run(typingctx, w, w_at, count, values, head, width, o, at):
        def codegen(context, b, sig, args):
            pw, pv, po = (data(context, b, sig.args[n], args[n]) for n in (0, 3, 6))
            width, first = args[5], b.mul(args[4], I64(FIRST_KEYS))
            weights = [
                [
                    isa.splat(b, load(b, pw, b.add(row, I64(j)), F32, 4), floats)
                    for j in range(FIRST_KEYS)
                ]
                for row in _rows(b, args[1], I64(FIRST_KEYS), args[2], together)
            ]
            outs = _rows(b, args[7], width, args[2], together)
            rows = [b.mul(b.add(first, I64(j)), width) for j in range(FIRST_KEYS)]
            step = isa.elements(b, 1)
            with cgutils.for_range_slice(b, I64(0), width, step, I64) as (t, _):
                known = [load(b, pv, b.add(row, t), floats, 4) for row in rows]
                for own, out in zip(weights, outs, strict=True):
                    acc = isa.fill(b, floats, 0.0)
                    for weight, value in zip(own, known, strict=True):
                        acc = isa.generic(b, "fma", weight, value, acc)
                    store(b, acc, po, b.add(out, t), 4)
            return context.get_dummy_value()

        place = types.int64
        kinds = w, place, place, values, place, place, o, place
        return types.void(*kinds), codegen

    return run
