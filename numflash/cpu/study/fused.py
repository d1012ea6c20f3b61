"""The fused INT8 kernel with switches.

Each improvement that the A64FX summary (docs/sources.md) proposes is a switch.

    exp2      "plain": the loop as it is written, for the compiler;
              "vectors": its vectors written out (microkernels)
    pv        "fp32": weights Q16.16 as float32 times float32 V, the summary's kernel;
              "bf16": two 16-bit products per lane;
              "int8": weights in eight bits and the integer dot product

Prefetching (the next key block is asked for while this one is computed), threads, causal skipping
and grouped heads are arguments. The loops are those of `flash_int8` without its masks and its wide
path: scores must stay within +-110 octaves, which the random data of the measurements does. With pv
"int8" the bits are those of `reference.integer_model` with `plain=True`.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from ...jit.compiler import inline, kernel
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK, tiling
from ..floats import float_rows, float_tiles
from ..floats.float_isas import FLOAT_ISAS
from ..int8 import wide_rows
from ..int8.float_weights import row_weights_float
from ..int8.microkernels import score_tile, value_tile
from ..int8.softmax_vectors import block_tops, block_totals, row_weights
from ..isa import vectors
from ..isa.isas import VECTOR_ISAS, lanes_of
from ..isa.operands import Packed, Rows, Scales
from ..isa.vectors import F32, data, load, next_task, store, vector
from ..semantics import HIDDEN, UNSEEN

F, I = np.float32, np.int32
LINE = 64  # bytes
HALF_WIDTH = "avx512_bf16"
exp2_p8, exp2_q16 = inline(fx.exp2_p8), inline(fx.exp2_quadratic)


@intrinsic
def prefetch(typingctx, x, off):
    """Prefetch the cache line of element `off` of x, for reading, into all levels."""

    def codegen(context, b, sig, args):
        size = context.get_abi_sizeof(context.get_data_type(sig.args[0].dtype))
        place = b.gep(data(context, b, sig.args[0], args[0]), [b.mul(args[1], args[1].type(size))])
        vectors.prefetch(b, place, 3)
        return context.get_dummy_value()

    return types.void(x, off), codegen


@intrinsic
def narrow_row(typingctx, x, off, count, p):
    """p[off:] = x[off:] in bfloat16, `count` vectors of 16, ties to even."""
    isa = FLOAT_ISAS[HALF_WIDTH]

    def codegen(context, b, sig, a):
        px, pp = data(context, b, sig.args[0], a[0]), data(context, b, sig.args[3], a[3])

        def body(n, state):
            here = b.add(a[1], n)
            store(
                b,
                float_rows.narrow(b, isa, load(b, px, here, vector(F32, isa.lanes), 4)),
                pp,
                here,
                2,
            )
            return []

        float_rows.for_vectors(b, a[2], isa.lanes, [], body)
        return context.get_dummy_value()

    return types.void(x, off, count, p), codegen


@functools.cache
def make_fused(isa_name: str, exp2: str = "vectors", pv: str = "int8"):
    """The kernel with these switches, see `run`'s own words."""
    isa, block_q = VECTOR_ISAS[isa_name], tiling(isa_name).block_q
    score = score_tile(isa_name, 6)
    octaves = block_tops(isa_name, KEY_BLOCK)
    totals = block_totals(isa_name)
    exact_row = row_weights(isa_name, KEY_BLOCK)
    wide_row = row_weights_float(isa_name, KEY_BLOCK, "fp32")
    integer, half_width, plain = pv == "int8", pv == "bf16", exp2 == "plain"
    group, nv, vector_lanes = isa.group, isa.nv, lanes_of(isa_name)
    operand = np.uint8 if group == 4 else np.int16
    weight = operand if integer else np.float32
    floats = HALF_WIDTH if half_width else wide_rows.values_of(isa)
    nv_half, pair = max(1, nv // 2), 2 if half_width else 1
    value, value_half, value_one = (
        value_tile(isa_name, 6, n) if integer else float_tiles.value_tile(floats, n)
        for n in (nv, nv_half, 1)
    )
    unit = F(1) if integer else F(1 / fx.ONE_Q16)

    @inline
    def plain_row(x, octave_q8, scale, p):
        """The weights of one row as `fixedpoint` writes them; returns their sum."""
        total = I(0)
        if integer:
            for j in range(x.size):
                p[j] = exp2_p8(np.uint16(np.int16(octave_q8 - x[j])))
            for j in range(x.size):
                total = np.add(total, I(p[j]))
        else:
            factor = F(scale * unit)
            for j in range(x.size):
                w = I(exp2_q16(np.uint32(np.uint16(np.int16(octave_q8 - x[j])))))
                p[j] = F(F(w) * factor)
                total = np.add(total, w)
        return total

    @inline
    def fetch(k, v, first, stride, width):
        """The key block that starts at key `first`."""
        if first * stride < k.size:
            for at in range(first * stride, (first + KEY_BLOCK) * stride, LINE // k.itemsize):
                prefetch(k, at)
            for at in range(
                first * width, min((first + KEY_BLOCK) * width, v.size), LINE // v.itemsize
            ):
                prefetch(v, at)

    @inline
    def scores(tile, factor, k, start, ck, c, x):
        """x = Q.K^T of the key block from key c on, int16 log2 scores."""
        stride, panel = tile.shape[1], nv * vector_lanes()
        for j in range(0, KEY_BLOCK, panel):
            for i in range(0, block_q, 6):
                queries, keys_at = Rows(tile, i * stride, stride), Packed(k, (c + j) * stride)
                scales, to = Scales(start, ck, c + j, factor, i), i * KEY_BLOCK + j
                score(queries, keys_at, stride // group, scales, Rows(x, to, KEY_BLOCK))

    @inline
    def hide(x, c, row, causal, s):
        """Scores of keys that a row does not see."""
        for i in range(block_q):
            seen = min(s, row + i + 1) if causal else s
            if seen < c + KEY_BLOCK:
                x[i, max(seen - c, 0) :] = HIDDEN

    @inline
    def grow(x, c, row, causal, s, octave, octave_q8, m, l, o, scale):
        """The block's octaves; m = max(m, octave), O and l shift with it; scale = 2**(octave - m)."""
        bits = scale.view(I)
        for i in range(0, block_q, 8):
            octaves(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
        for i in range(block_q):
            seen = row + i + 1 if causal else s
            if seen <= c:  # nothing of the block: its octave must not count
                octave[i], octave_q8[i] = m[i], np.int16(0)
            if octave[i] > m[i]:
                if l[i] != F(0):
                    shrink, line = F(2.0) ** F(max(m[i] - octave[i], -fx.MOST_BELOW)), o[i]
                    for t in range(line.size):
                        line[t] = line[t] * shrink
                    l[i] = l[i] * shrink
                m[i] = octave[i]
            below = min(np.subtract(m[i], octave[i]), I(fx.MOST_BELOW))
            bits[i] = np.left_shift(np.subtract(I(127), below), I(23))

    @inline
    def weigh(x, octave_q8, scale, p, sums, total, l):
        """p = the weights of a block, and their sums to l."""
        for i in range(block_q):
            at, to = i * KEY_BLOCK, i * vector_lanes()
            if plain:
                total[i] = plain_row(x[i], octave_q8[i], scale[i], p[i])
            elif integer:
                exact_row(x, at, octave_q8, i, p, at, sums, to)
            else:
                wide_row(x, at, octave_q8, i, scale, p, at, sums, to)
        if not plain:
            for i in range(0, block_q, 8):
                totals(sums, total, i)
        for i in range(block_q):
            l[i] = F(l[i] + F(F(F(total[i]) * unit) * scale[i]))

    if integer:

        @inline
        def multiply(tile, p, v, c, t, columns, scale, total, o, i):
            """O += P.V of one register tile: six rows from row i on, columns from t on."""
            rows, column = Rows(p, i * KEY_BLOCK, KEY_BLOCK), Packed(v, c * columns + t * KEY_BLOCK)
            to = Rows(o, i * columns + t, columns)
            tile(rows, column, KEY_BLOCK // group, scale, total, i, to)
    else:

        @inline
        def multiply(tile, p, v, c, t, columns, scale, total, o, i):
            place, step, to = c * columns + t * pair, columns * pair, i * columns + t
            tile(p, i * KEY_BLOCK, KEY_BLOCK, v, place, step, KEY_BLOCK // pair, o, to, columns)

    @inline
    def add_values(p, v, c, columns, scale, total, o):
        """O += P.V of a block: whole panels of columns, then a half, then single vectors."""
        lanes, t = vector_lanes(), 0
        panel, half = nv * lanes, nv_half * lanes
        while t < columns:
            if t + panel <= columns:
                for i in range(0, block_q, 6):
                    multiply(value, p, v, c, t, columns, scale, total, o, i)
                t += panel
            elif nv_half > 1 and t + half <= columns:
                for i in range(0, block_q, 6):
                    multiply(value_half, p, v, c, t, columns, scale, total, o, i)
                t += half
            else:
                for i in range(0, block_q, 6):
                    multiply(value_one, p, v, c, t, columns, scale, total, o, i)
                t += lanes

    @inline
    def store_rows(n, row, m, l, o, out, m_out, l_out):
        """out = O / l, and m and l, of the rows that exist."""
        for i in range(min(block_q, out.shape[1] - row)):
            r, result, line = F(1) / l[i] if l[i] != F(0) else F(0), out[n, row + i], o[i]
            for t in range(result.size):
                result[t] = F(line[t] * r)
            m_out[n, row + i], l_out[n, row + i] = m[i], l[i]

    @kernel(parallel=True)
    def run(
        q, cq, keys, values, columns, group_heads, causal, ahead, s, workers, counter,
        out, m_out, l_out,
    ):  # fmt: skip
        """Attention of N heads, K and V of N / group_heads.

        A worker takes query tiles, the longest causal ones first.

        q (N, padded L, channels) first dot operand, cq (N, padded L) float32, keys PackedKeys,
        values (Nkv, ...) packed for `pv`, columns of a packed row of V, ahead: prefetch, s keys,
        counter (1,) int64 zero; out (N, L, Dv), l_out (N, L) float32, m_out (N, L) int32.
        """
        n_heads, length, _ = out.shape
        stride, all_keys = q.shape[2], keys.start.shape[1]
        tiles = (length + block_q - 1) // block_q
        for _ in prange(workers):
            x, p = np.zeros((block_q, KEY_BLOCK), np.int16), np.zeros((block_q, KEY_BLOCK), weight)
            operands = np.zeros((block_q, KEY_BLOCK), np.uint16) if half_width else p
            o, m, l = np.zeros((block_q, columns), F), np.zeros(block_q, I), np.zeros(block_q, F)
            octave, octave_q8 = np.zeros(block_q, I), np.zeros(block_q, np.int16)
            scale, total = np.ones(block_q, F), np.zeros(block_q, I)
            sums = np.zeros(block_q * vector_lanes(), I)
            while True:
                task = next_task(counter)
                if task >= n_heads * tiles:
                    break
                n, row = task // tiles, (tiles - 1 - task % tiles) * block_q
                n_key = n // group_heads
                tile, factor = q[n, row : row + block_q], cq[n, row : row + block_q]
                k, start, ck = keys.data[n_key], keys.start[n_key], keys.scale[n_key]
                v = values[n_key]
                m[:], l[:], o[:] = I(UNSEEN), F(0), F(0)
                for c in range(0, min(all_keys, row + block_q) if causal else all_keys, KEY_BLOCK):
                    if ahead:
                        fetch(k, v, c + KEY_BLOCK, stride, columns)
                    scores(tile, factor, k, start, ck, c, x)
                    hide(x, c, row, causal, s)
                    grow(x, c, row, causal, s, octave, octave_q8, m, l, o, scale)
                    weigh(x, octave_q8, scale, p, sums, total, l)
                    if half_width:
                        narrow_row(p, 0, p.size // 16, operands)
                    add_values(operands, v, c, columns, scale, total, o)
                store_rows(n, row, m, l, o, out, m_out, l_out)

    return run
