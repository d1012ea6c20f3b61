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

import numpy as np

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import fresh, uncleared, zeros
from ...jit.parallel import over_tasks
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK, tiling
from ..isa.isas import padded
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, all_empty, batch_of, call_tile
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
def softmax_row(x, top, p):
    """p + 128 = round(255 * 2**((x - top) / 256)), the weights of int16 Q8.8 scores relative to
    `top`; returns their sum.
    """
    total = I(P_OFFSET * KEY_BLOCK)
    for j in range(x.size):
        p[j] = np.int8(exp2_p8(U16(np.subtract(top, I(x[j])))) ^ np.uint8(P_OFFSET))
    for j in range(x.size):
        total = np.add(total, I(p[j]))
    return total


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
def softmax_row_w15(x, top, p):
    """p = 32640 * 2**((x - top) / 256), the weights of pv "int16"; returns their sum."""
    total = I(0)
    for j in range(x.size):
        p[j] = np.int16(exp2_p16(U16(np.subtract(top, I(x[j])))) >> U16(1))
    for j in range(x.size):
        total = np.add(total, I(p[j]))
    return total


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


def softmax_row_float(exp2):
    """f(x, top, p): weights p = exp2(top - x), exact in float32; returns their sum."""
    exp2 = inline(exp2)

    @inline
    def softmax(x, top, p):
        total = I(0)
        for j in range(x.size):
            p[j] = F(I(exp2(np.uint32(np.subtract(top, I(x[j]))))))
        for j in range(x.size):
            total = np.add(total, I(p[j]))
        return total

    return softmax


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
        shrink = F(2.0) ** F(max(m - octave, -126))
        if l != F(0):
            for t in range(o.size):
                o[t] = o[t] * shrink
        m, l = octave, F(l * shrink)
    scale = F(2.0) ** F(max(octave - m, -126)) if octave != UNSEEN else F(0)
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
    return softmax_row_float(exp2), value_block_float(unit), np.float32, F(0), unit


# pv -> softmax of a row, P.V of a block, dtype and zero of the weights, unit of their sum
STEPS: dict[str, tuple] = {
    "int8": (softmax_row, value_block, np.int8, np.int8(-P_OFFSET), F(1)),
    "int16": (softmax_row_w15, value_block_w15, np.int16, np.int16(0), F(1)),
    "bf16": float_steps("bf16", fx.exp2_bf16),
    "fp32": float_steps("fp32", fx.exp2_quadratic),
}


@functools.cache
def make_attend(pv: str):
    """The kernel with P.V in integers (pv "int8", "int16") or in float32 ("bf16", whose weights and
    V have 8 significant bits, and "fp32").
    """
    softmax, add_values, weight, zero, unit = STEPS[pv]
    one, step = fx.WEIGHT_ONE[pv], fx.REFERENCE_STEP[pv]

    @inline
    def work(_, operands, semantics, sizes, counter, results):
        """One worker: query tiles, as long as there are any.

        One long function: this is the kernel to read first, from top to bottom.
        """
        q, cq, (k, ck), v, first_keys, v_scale = operands
        out, m_out, l_out = results
        n_heads, length, d = q.shape
        h_all, h_kv, s = sizes.heads, sizes.kv_heads, sizes.keys
        first_count = first_keys.number
        tiles, width = (length + BLOCK_Q - 1) // BLOCK_Q, (out.shape[2] + NR - 1) // NR * NR
        q_tile = zeros((BLOCK_Q, d), np.int8, "portable query tile")
        cq_tile = zeros((BLOCK_Q,), np.float32, "portable query scales")
        x = uncleared((BLOCK_Q, KEY_BLOCK), np.float32, "portable scores")
        x16 = uncleared((BLOCK_Q, KEY_BLOCK), np.int16, "portable narrow scores")
        p = zeros((BLOCK_Q, KEY_BLOCK), weight, "portable weights")
        o = uncleared((BLOCK_Q, width), np.float32, "portable output tile")
        m = uncleared((BLOCK_Q,), np.int32, "portable octaves")
        l = uncleared((BLOCK_Q,), np.float32, "portable sums")
        scale = zeros((BLOCK_Q,), np.float32, "portable block scales")
        total = zeros((BLOCK_Q,), np.int32, "portable sums of a block")
        spoiled = zeros((BLOCK_Q,), np.uint8, "portable spoiled rows")
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            # the longest causal tiles first
            n = task // tiles
            row = (tiles - 1 - task % tiles) * BLOCK_Q
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            rows = min(BLOCK_Q, length - row)
            block = (rows + MR - 1) // MR * MR
            for i in range(rows):
                source, target = q[n, row + i], q_tile[i]
                for e in range(target.size):
                    target[e] = source[e]
                cq_tile[i] = cq[n, row + i]
            m[:], l[:], spoiled[:], total[:], scale[:] = I(UNSEEN), F(0), 0, 0, F(0)
            o[:] = F(0)
            functions, last = semantics.functions, row + rows - 1
            if first_count > 0:
                score_first(
                    q_tile[:rows], first_keys.keys[n_kv], first_keys.scale[n_kv], cq_tile, x
                )
                if functions.masked != 0:
                    corner = Corner(batch_of(functions, b), h, row, 0)
                    call_tile(
                        Function(functions.masked, functions.masked_frame),
                        Rows(x.reshape(x.size), 0, KEY_BLOCK),
                        rows, min(first_count, s), corner, fx.LN2_Q8, fx.LOG2E_Q8,
                    )  # fmt: skip
                for i in range(rows):
                    lo, hi = row_range(semantics, b, row + i, s)
                    a, z = min(lo, first_count), min(hi, first_count)
                    if a < z:
                        seen = x[i, a:z]
                        if semantics.general:
                            transform_row(semantics, b, h, row + i, a, seen)
                        m[i], l[i], bad = begin_row(seen, first_keys.values[n_kv, a:z], one, o[i])
                        if bad:
                            spoiled[i] = 1
            first, stop = s, 0
            for i in range(rows):
                lo, hi = row_range(semantics, b, row + i, s)
                lo = max(lo, first_count)
                if hi > lo:
                    first, stop = min(first, lo), max(stop, hi)
            for c in range(first // KEY_BLOCK * KEY_BLOCK, stop, KEY_BLOCK):
                if all_empty(functions, b, h, row, last, c, min(c + KEY_BLOCK, s)):
                    continue
                score_block(
                    q_tile[:block],
                    k[n_kv, c : c + KEY_BLOCK],
                    ck[n_kv, c : c + KEY_BLOCK],
                    cq_tile,
                    x,
                )
                if functions.masked != 0:
                    corner = Corner(batch_of(functions, b), h, row, c)
                    call_tile(
                        Function(functions.masked, functions.masked_frame),
                        Rows(x.reshape(x.size), 0, KEY_BLOCK),
                        rows, min(KEY_BLOCK, s - c), corner, fx.LN2_Q8, fx.LOG2E_Q8,
                    )  # fmt: skip
                for i in range(rows):
                    lo, hi = row_range(semantics, b, row + i, s)
                    a, z = max(lo - c, first_count - c, 0), min(hi - c, KEY_BLOCK)
                    octave, top = I(UNSEEN), I(0)
                    if a < z:
                        if semantics.general:
                            transform_row(semantics, b, h, row + i, c + a, x[i, a:z])
                        octave, top, bad = narrow_row(x[i, a:z], x16[i, a:z])
                        if bad:
                            spoiled[i] = 1
                    if octave == UNSEEN:
                        p[i], total[i] = zero, I(0)
                    else:
                        x16[i, :a], x16[i, z:] = HIDDEN, HIDDEN
                        top = (top + I(step - 1)) & I(-step)
                        total[i] = softmax(x16[i], top, p[i])
                    m[i], l[i], scale[i] = merge_row(
                        octave, top, F(F(total[i]) * unit), m[i], l[i], o[i]
                    )
                add_values(p[:block], v[n_kv, c // KEY_BLOCK], scale, o)
            for i in range(rows):
                if spoiled[i]:
                    l[i] = F(np.nan)
                result, r = out[n, row + i], F(1) / l[i]
                if l[i] == F(0):
                    result[:] = F(0)
                else:
                    for t in range(result.size):
                        result[t] = F(F(o[i, t] * r) * v_scale[n_kv, t])
                m_out[n, row + i], l_out[n, row + i] = m[i], l[i]

    @kernel
    def attend(operands, semantics, sizes, counter, results):
        """All query tiles of all heads: see `arguments`; counter (1,) int64 zero.

        Keys are (Nkv, padded keys, D) int8 and their scales (Nkv, padded keys) float32, NaN for a
        key that was not finite; values come from `arrange_values`.
        """
        over_tasks(work, sizes.workers, (operands, semantics, sizes, counter, results))

    return attend
