"""The INT8 attention in plain loops: no intrinsics, every CPU that LLVM supports.

Read this kernel first.

It is the fused algorithm of `flash_int8` without its register tiles, and produces the same bits.
Both products are dot products of two contiguous rows (`portable_products`): Q.K^T along the
channels, P.V along the keys of a block, for which V is stored transposed.

P is stored minus 128, so that both operands of P.V are signed (AArch64 without i8mm has no mixed
dot product, and LLVM makes no UDOT of a block of unsigned products on Neoverse); 128 times the sum
of V over the block is put back, exactly. With pv "int16" it is int16, and not shifted.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import array_at, fresh, uncleared, zeros
from ...jit.parallel import over_tasks
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK, tiling
from ..isa.isas import padded
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, all_empty, batch_of, call_tile
from ..isa.strided import row_at
from ..isa.vectors import next_task
from ..semantics import HIDDEN, UNSEEN, below_octave, narrow_row, row_range, transform_row
from .portable_products import MR, NR, fma, mac, product

F = np.float32
I = np.int32
U16 = np.uint16
BLOCK_Q = tiling("portable").block_q
P_OFFSET = 128
exp2_p8 = inline(fx.exp2_p8)
exp2_p16 = inline(fx.exp2_p16)


@inline
def score_block(q, k, ck, cq, x):
    """x[i, j] = (float32(q[i] . k[j]) * ck[j]) * cq[i].

    q (rows, D), k (keys, D) int8, x (rows, keys) float32 in Q8.8 units.
    """
    s = uncleared(x.shape, np.int32, "portable products")
    product(q, k, s)
    for i in range(q.shape[0]):
        sums, row = s[i], x[i]
        for j in range(row.size):
            row[j] = min(max(F(F(F(sums[j]) * ck[j]) * cq[i]), -fx.T_LIMIT), fx.T_LIMIT)


@inline
def score_first(q, k, ck, cq, x):
    """Scores x[i, j] of the sequence's first keys, as `score_block`.

    q (rows, D) int8, k (FIRST_KEYS, D) int16.
    """
    for i in range(q.shape[0]):
        row = q[i]
        for j in range(k.shape[0]):
            key, total = k[j], I(0)
            for d in range(row.size):
                total = mac(total, row[d], key[d])
            x[i, j] = min(max(F(F(F(total) * ck[j]) * cq[i]), -fx.T_LIMIT), fx.T_LIMIT)


@inline
def begin_row(x, v, one, o):
    """The state of a row after its first keys: (m, l, whether a score is NaN), and O.

    x : their scores, -inf where hidden;  v : their values, float32;  one : weight 1.0
    """
    top, spoiled = F(-np.inf), False
    for j in range(x.size):
        spoiled |= x[j] != x[j]
        top = max(top, x[j])
    if top == F(-np.inf) or spoiled:
        return I(UNSEEN), F(0), spoiled
    octave = I(I(np.rint(min(max(top, -fx.T_LIMIT), fx.T_LIMIT))) + I(255)) >> I(8)
    total, unit = I(0), F(one / fx.FIRST_ONE)
    for j in range(x.size):
        if x[j] > F(-np.inf):
            t = I(np.rint(min(max(x[j], -fx.T_LIMIT), fx.T_LIMIT)))
            weight = I(exp2_p16(U16(min((np.int64(octave) << 8) - t, 65535)))) >> I(4)
            total, scale, value = np.add(total, weight), F(F(weight) * unit), v[j]
            for e in range(o.size):
                o[e] = F(o[e] + F(scale * value[e]))
    return octave, F(F(total) * unit), False


@inline
def weight_p8(y):
    """round(255 * 2**(-y / 256)) - 128."""
    return np.int8(exp2_p8(U16(y)) ^ np.uint8(P_OFFSET))


@inline
def weight_w15(y):
    """32640 * 2**(-y / 256), the weight of pv "int16"."""
    return np.int16(exp2_p16(U16(y)) >> U16(1))


def weight_float(exp2):
    """f(y): a weight of 32 bits, exact in float32."""
    exp2 = inline(exp2)

    @inline
    def weight(y):
        return F(I(exp2(np.uint32(y))))

    return weight


def softmax_of(weight, offset=0):
    """f(x, top, p): the weights p = weight(top - x) of a row of int16 Q8.8 scores relative to `top`;
    returns the sum of p + offset.
    """

    @inline
    def softmax(x, top, p):
        total = I(offset * KEY_BLOCK)
        for j in range(x.size):
            p[j] = weight(np.subtract(top, I(x[j])))
        for j in range(x.size):
            total = np.add(total, I(p[j]))
        return total

    return softmax


softmax_row = softmax_of(weight_p8, P_OFFSET)


@inline
def value_block(p, v, scale, o):
    """o[i, t] += float32((p[i] + 128) . v[t]) * scale[i].

    p (rows, keys) int8 weights minus 128, v (Dv, keys) int8.
    """
    s = uncleared((p.shape[0], v.shape[0]), np.int32, "portable weighted values")
    start = uncleared((v.shape[0],), np.int32, "portable first values")
    for t in range(v.shape[0]):
        column, total = v[t], I(0)
        for j in range(column.size):
            total = np.add(total, I(column[j]))
        start[t] = np.multiply(I(P_OFFSET), total)
    product(p, v, s)
    for i in range(p.shape[0]):
        sums, row = s[i], o[i]
        for t in range(row.size):
            row[t] = fma(F(np.add(start[t], sums[t])), scale[i], row[t])


@inline
def value_block_w15(p, v, scale, o):
    """o[i, t] += float32(p[i] . v[t]) * scale[i].

    p (rows, keys) int16 weights, v (Dv, keys) int8.
    """
    s = uncleared((p.shape[0], v.shape[0]), np.int32, "portable weighted values")
    product(p, v, s)
    for i in range(p.shape[0]):
        sums, row = s[i], o[i]
        for t in range(row.size):
            row[t] = F(row[t] + F(F(sums[t]) * scale[i]))


def value_block_float(weight_unit):
    """f(p, v, scale, o): o[i] += sum over j of p[i, j] * weight_unit * scale[i] * v[j].

    p (rows, keys), v (keys, Dv) float32.
    """

    @inline
    def add_values(p, v, scale, o):
        for i in range(p.shape[0]):
            row, unit = o[i], F(scale[i] * weight_unit)
            for j in range(v.shape[0]):
                weight, source = F(p[i, j] * unit), v[j]
                for t in range(source.size):
                    row[t] = F(row[t] + F(weight * source[t]))

    return add_values


@inline
def merge_row(octave, top, total, m, l, o):
    """One row's block into its running state: (m, l, scale of the block).

    top : what the block's weights refer to, Q8.8, relative to a whole octave

    O shifts by whole octaves when the row's octave grows.
    """
    if octave > m:
        shrink = F(2.0) ** F(max(m - octave, -fx.MOST_BELOW))
        if l != F(0):
            for t in range(o.size):
                o[t] = o[t] * shrink
        m, l = octave, F(l * shrink)
    scale = F(2.0) ** F(max(octave - m, -fx.MOST_BELOW)) if octave != UNSEEN else F(0)
    scale = F(scale * below_octave(top))
    return m, F(l + F(total * scale)), scale


@bare
def transpose_block(task, v, out):
    n, block = task // out.shape[1], task % out.shape[1]
    target, first = out[n, block], block * KEY_BLOCK
    target[:] = 0
    for j in range(min(KEY_BLOCK, v.shape[1] - first)):
        source = v[n, first + j]
        for t in range(source.size):
            target[t, j] = source[t]


@kernel
def transpose_values(v, out):
    """out (N, blocks, columns, keys of a block) = v (N, S, Dv) int8 transposed.

    What does not exist holds 0.
    """
    over_tasks(transpose_block, out.shape[0] * out.shape[1], (v, out))


def pad_keys(x: np.ndarray) -> np.ndarray:
    """(N, S, ...) with zeros up to whole key blocks."""
    n, s = x.shape[:2]
    keys = padded(s, KEY_BLOCK)
    return (
        x if keys == s else np.concatenate([x, np.zeros((n, keys - s, *x.shape[2:]), x.dtype)], 1)
    )


def arrange_values(v: np.ndarray, bad: np.ndarray | None = None) -> np.ndarray:
    """V for `attend`: int8 (N, S, Dv) transposed by key block, or, with `bad`, float32 by key
    block.

    bad : (N, S) bool, rows of V to store as zeros; given for float32 only.
    """
    n, s, dv = v.shape
    blocks = padded(s, KEY_BLOCK) // KEY_BLOCK
    if bad is not None:
        return pad_keys(np.where(bad[..., None], F(0), v)).reshape(n, blocks, KEY_BLOCK, dv)
    out = fresh((n, blocks, padded(dv, NR), KEY_BLOCK), np.int8)
    transpose_values(v, out)
    return out


def float_steps(pv, exp2):
    unit = F(fx.SUM_UNIT[pv])
    return softmax_of(weight_float(exp2)), value_block_float(unit), np.float32, F(0), unit


# pv -> softmax of a row, P.V of a block, dtype and zero of the weights, unit of their sum
STEPS: dict[str, tuple] = {
    "int8": (softmax_row, value_block, np.int8, np.int8(-P_OFFSET), F(1)),
    "int16": (softmax_of(weight_w15), value_block_w15, np.int16, np.int16(0), F(1)),
    "bf16": float_steps("bf16", fx.exp2_bf16),
    "fp32": float_steps("fp32", fx.exp2_quadratic),
}


class Place(NamedTuple):
    """Where a query tile is: batch entry, head, first row and number of rows; n and n_kv count the
    heads of all batch entries.
    """

    b: int
    h: int
    n: int
    n_kv: int
    row: int
    rows: int


class Tile(NamedTuple):
    """A query tile, its scores and weights of a block of keys, and its running state."""

    q: np.ndarray  # (BLOCK_Q, D) int8
    cq: np.ndarray  # (BLOCK_Q,) float32
    x: np.ndarray  # (BLOCK_Q, KEY_BLOCK) float32 scores
    x16: np.ndarray  # the same, int16 relative to the row's octave
    p: np.ndarray  # (BLOCK_Q, KEY_BLOCK) weights
    scale: np.ndarray  # (BLOCK_Q,) float32: what brings the block to the running octave
    total: np.ndarray  # (BLOCK_Q,) int32 sums of the block's weights
    o: np.ndarray  # (BLOCK_Q, whole NR of Dv) float32 running output
    m: np.ndarray  # (BLOCK_Q,) int32 running octave
    l: np.ndarray  # (BLOCK_Q,) float32 running sum of weights
    spoiled: np.ndarray  # (BLOCK_Q,) uint8 whether a score was NaN


@inline
def new_tile(d, dv, weight):
    """Memory of a worker's tiles; P holds numbers of the type `weight`."""
    return Tile(
        zeros((BLOCK_Q, d), np.int8, "portable query tile"),
        zeros((BLOCK_Q,), np.float32, "portable query scales"),
        uncleared((BLOCK_Q, KEY_BLOCK), np.float32, "portable scores"),
        uncleared((BLOCK_Q, KEY_BLOCK), np.int16, "portable narrow scores"),
        zeros((BLOCK_Q, KEY_BLOCK), weight, "portable weights"),
        zeros((BLOCK_Q,), np.float32, "portable block scales"),
        zeros((BLOCK_Q,), np.int32, "portable sums of a block"),
        uncleared((BLOCK_Q, (dv + NR - 1) // NR * NR), np.float32, "portable output tile"),
        uncleared((BLOCK_Q,), np.int32, "portable octaves"),
        uncleared((BLOCK_Q,), np.float32, "portable sums"),
        zeros((BLOCK_Q,), np.uint8, "portable spoiled rows"),
    )


@inline
def call_functions(functions, place, x, first, keys):
    """Scores x of `keys` keys from `first` on, changed by a score function and hidden by a mask's."""
    if functions.masked != 0:
        corner = Corner(batch_of(functions, place.b), place.h, place.row, first)
        call_tile(
            Function(functions.masked, functions.masked_frame),
            Rows(x.reshape(x.size), 0, KEY_BLOCK),
            place.rows, keys, corner, fx.LN2_Q8, fx.LOG2E_Q8,
        )  # fmt: skip


@inline
def begin_rows(tile, place, operands, semantics, s, one):
    """Query rows into the tile, and their state after the sequence's first keys; `one` is weight 1.0."""
    first_keys, n_kv, row = operands.first, place.n_kv, place.row
    for i in range(place.rows):
        source, target = operands.q[place.n, row + i], tile.q[i]
        for e in range(target.size):
            target[e] = source[e]
        tile.cq[i] = operands.cq[place.n, row + i]
    tile.m[:], tile.l[:], tile.o[:], tile.spoiled[:] = I(UNSEEN), F(0), F(0), 0
    tile.total[:], tile.scale[:] = 0, F(0)
    count, q = first_keys.number, tile.q[: place.rows]
    if count == 0:
        return
    score_first(q, first_keys.keys[n_kv], first_keys.scale[n_kv], tile.cq, tile.x)
    call_functions(semantics.functions, place, tile.x, 0, min(count, s))
    for i in range(place.rows):
        lo, hi = row_range(semantics, place.b, row + i, s)
        first, stop = min(lo, count), min(hi, count)
        if first < stop:
            seen = tile.x[i, first:stop]
            if semantics.general:
                transform_row(semantics, place.b, place.h, row + i, first, seen)
            values = first_keys.values[n_kv, first:stop]
            tile.m[i], tile.l[i], bad = begin_row(seen, values, one, tile.o[i])
            if bad:
                tile.spoiled[i] = 1


@inline
def keys_seen(place, semantics, s, first_count):
    """The first key behind the sequence's first ones that some row attends to, and the one after
    the last.
    """
    first, stop = s, 0
    for i in range(place.rows):
        lo, hi = row_range(semantics, place.b, place.row + i, s)
        lo = max(lo, first_count)
        if hi > lo:
            first, stop = min(first, lo), max(stop, hi)
    return first, stop


@inline
def store_rows(tile, place, v_scale, results):
    """out = O / l * v_scale, and m and l of each row; a row without keys gives 0."""
    n, row = place.n, place.row
    start = row_at(results.out, n, row)
    for i in range(place.rows):
        l = F(np.nan) if tile.spoiled[i] else tile.l[i]
        result = array_at(start + i * results.out.row, (results.out.d,), F)
        unscaled, r = tile.o[i], F(1) / l
        if l == F(0):
            result[:] = F(0)
        else:
            for t in range(result.size):
                result[t] = F(F(unscaled[t] * r) * v_scale[place.n_kv, t])
        results.m[n, row + i], results.l[n, row + i] = tile.m[i], l


@functools.cache
def make_attend(pv: str):
    """The kernel with P.V in integers (pv "int8", "int16") or in float32 ("bf16", whose weights and
    V have 8 significant bits, and "fp32").
    """
    softmax, add_values, weight, zero, unit = STEPS[pv]
    one, step = fx.WEIGHT_ONE[pv], fx.REFERENCE_STEP[pv]

    @inline
    def block_rows(tile, place, semantics, s, first_count, c):
        """The softmax of a block: its scores become weights, and its sums go into the state."""
        for i in range(place.rows):
            lo, hi = row_range(semantics, place.b, place.row + i, s)
            first, stop = max(lo - c, first_count - c, 0), min(hi - c, KEY_BLOCK)
            octave, top, x16, p = I(UNSEEN), I(0), tile.x16[i], tile.p[i]
            if first < stop:
                seen = tile.x[i, first:stop]
                if semantics.general:
                    transform_row(semantics, place.b, place.h, place.row + i, c + first, seen)
                octave, top, bad = narrow_row(seen, x16[first:stop])
                if bad:
                    tile.spoiled[i] = 1
            if octave == UNSEEN:
                p[:], tile.total[i] = zero, I(0)
            else:
                x16[:first], x16[stop:] = HIDDEN, HIDDEN
                top = (top + I(step - 1)) & I(-step)
                tile.total[i] = softmax(x16, top, p)
            total = F(F(tile.total[i]) * unit)
            tile.m[i], tile.l[i], tile.scale[i] = merge_row(
                octave, top, total, tile.m[i], tile.l[i], tile.o[i]
            )

    @inline
    def work(_, operands, semantics, sizes, counter, results):
        """One worker: query tiles, as long as there are any. The outline: read it first."""
        (k, ck), v, first_count = operands.keys, operands.values, operands.first.number
        n_heads, length, d = operands.q.shape
        h_all, h_kv, s = sizes.heads, sizes.kv_heads, sizes.keys
        tile, tiles = new_tile(d, results.out.d, weight), (length + BLOCK_Q - 1) // BLOCK_Q
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            # the longest causal tiles first
            n, row = task // tiles, (tiles - 1 - task % tiles) * BLOCK_Q
            b, h = n // h_all, n % h_all
            n_kv, rows = b * h_kv + h * h_kv // h_all, min(BLOCK_Q, length - row)
            place, units = Place(b, h, n, n_kv, row, rows), (rows + MR - 1) // MR * MR
            begin_rows(tile, place, operands, semantics, s, one)
            first, stop = keys_seen(place, semantics, s, first_count)
            for c in range(first // KEY_BLOCK * KEY_BLOCK, stop, KEY_BLOCK):
                functions, end = semantics.functions, c + KEY_BLOCK
                if all_empty(functions, b, h, row, row + rows - 1, c, min(end, s)):
                    continue
                score_block(tile.q[:units], k[n_kv, c:end], ck[n_kv, c:end], tile.cq, tile.x)
                call_functions(functions, place, tile.x, c, min(KEY_BLOCK, s - c))
                block_rows(tile, place, semantics, s, first_count, c)
                add_values(tile.p[:units], v[n_kv, c // KEY_BLOCK], tile.scale, tile.o)
            store_rows(tile, place, operands.v_scale, results)

    @kernel
    def attend(operands, semantics, sizes, counter, results):
        """All query tiles of all heads: see `arguments`; counter (1,) int64 zero.

        Keys are (Nkv, padded keys, D) int8 and their scales (Nkv, padded keys) float32, NaN for a
        key that was not finite; values come from `arrange_values`.
        """
        over_tasks(work, sizes.workers, (operands, semantics, sizes, counter, results))

    return attend
