"""The fused floating-point attention: register tiles, online softmax in base 2, float32 sums, one query tile at a time.

FlashAttention 2 (Dao 2023, algorithm 1) on one core. Per query tile of `block_q` rows and key block, for each six rows:

    scores   s = (Q.K^T) * scale * log2(e)                              (score_tile)
    change   softcap, ALiBi, bias, mask, edges of what a row sees       (change_rows, only where asked for)
    softmax  running maximum m, p = 2**(s - m), running sum l           (row_max, row_exp)
    values   O += P.V                                                   (value_tile)
    out = O / l, lse = (m + log2(l)) * ln 2

The maximum is followed only when it grows by more than 8 octaves: p stays below 2**8, and O is hardly ever rescaled. Keys that no
row of six can see are neither multiplied nor read, and under a dense mask whole panels that it hides are left out.

What float32 cannot hold (scores that overflow, NaN or infinity in a hidden value, a row of biases near the lowest float) is
noticed per row, by the largest magnitudes or by the result itself, and done again by `flash_rows` in float64.
"""
from __future__ import annotations

import functools

import numpy as np
from numba import prange

from .._jit import inline, kernel
from ..tiling import tiling
from . import float_tiles as tiles
from .float_packing import largest
from .float_tiles import FLOAT_ISAS, MR
from .scores import Dense, row_of, row_range
from .vectors import next_task

F = np.float32
HIDDEN = F(-np.inf)
GROWTH = F(8)                                    # octaves that the maximum may grow before O is rescaled
LOWEST = F(-1e37)                                # a row whose maximum lies below is done again
LN2 = np.log(2.0)


@functools.cache
def make_attend(name: str, precision: str):
    """The kernel of one target: attend(q, keys, limits, values, columns, c, semantics, heads, s, counter, out, lse, redo)."""
    isa = FLOAT_ISAS[name]
    block_q, key_block = tiling(name, precision).block_q, tiling(name, precision).key_block
    lanes, group, panel, nv = isa.lanes, isa.group, isa.panel, isa.nv
    score1, score2, score3, score4 = (tiles.score_tile(name, min(n, nv)) for n in (1, 2, 3, 4))
    value1, value2, value4 = (tiles.value_tile(name, n) for n in (1, max(1, nv // 2), nv))
    half = max(1, nv // 2) * lanes
    top_of, exceeds, weights, softcap = tiles.row_max(name), tiles.row_exceeds(name), tiles.row_exp(name), tiles.row_softcap(name)
    alibi, add_bias, apply_mask, found = tiles.row_alibi(name), tiles.row_bias(name), tiles.row_mask(name), tiles.any_byte(name)
    operand = np.float32 if group == 1 else np.uint16

    @inline
    def scores(q, q_off, stride, k, first, stop, c, x):
        """x[:, j - first] = (Q.K^T) * c of six rows for keys first .. stop, whole vectors; `first` a multiple of lanes."""
        j = first
        while j < stop:
            column = j % panel
            n = min((panel - column) // lanes, (stop - j + lanes - 1) // lanes)
            at = (j - column) * stride + column * group
            if n == nv:
                score4(q, q_off, stride, k, at, stride // group, c, x, j - first, key_block)
            elif n == 3:
                score3(q, q_off, stride, k, at, stride // group, c, x, j - first, key_block)
            elif n == 2:
                score2(q, q_off, stride, k, at, stride // group, c, x, j - first, key_block)
            else:
                score1(q, q_off, stride, k, at, stride // group, c, x, j - first, key_block)
            j += n * lanes

    @inline
    def change_row(semantics, b, h, i, first, n, x, x_off, dense):
        """Softcap, ALiBi, bias and mask of one row, in the field's order, on n keys from `first`."""
        count, whole, rest = (n + lanes - 1) // lanes, n // lanes, n % lanes
        tail = x_off + whole * lanes
        if semantics.softcap > F(0):
            softcap(x, x_off, count, semantics.softcap)
        if semantics.slopes.size > 0:
            alibi(x, x_off, count, semantics.slopes[b, h], i + semantics.diagonal[b] - first)
        if semantics.has_bias:
            bias, at = dense.bias, row_of(semantics.bias, b, h, i) + first
            add_bias(x, x_off, whole, bias, at)
            if rest:
                for j in range(rest):
                    dense.bias_end[j] = bias[at + whole * lanes + j]
                add_bias(x, tail, 1, dense.bias_end, 0)
        if semantics.has_mask:
            mask, at = dense.mask, row_of(semantics.mask, b, h, i) + first
            apply_mask(x, x_off, whole, mask, at)
            if rest:
                for j in range(rest):
                    dense.mask_end[j] = mask[at + whole * lanes + j]
                apply_mask(x, tail, 1, dense.mask_end, 0)

    @inline
    def panel_seen(semantics, dense, b, h, row, rows, first, n):
        """Whether the dense mask lets any of the rows see any of n keys from `first`."""
        for i in range(row, row + rows):
            at = row_of(semantics.mask, b, h, i) + first
            if found(dense.mask, at, n // lanes):
                return True
            for j in range(at + n // lanes * lanes, at + n):
                if dense.mask[j]:
                    return True
        return False

    @inline
    def values(p, start, stop, v, first, columns, o, o_off):
        """O += P.V of six rows, P's columns start .. stop, P's column 0 being key `first`."""
        steps, t = (stop - start + group - 1) // group, 0
        base, stride = (first + start) * columns, columns * group
        while t + panel <= columns:
            value4(p, start, key_block, v, base + t * group, stride, steps, o, o_off + t, columns)
            t += panel
        if nv > 1 and t + half <= columns:
            value2(p, start, key_block, v, base + t * group, stride, steps, o, o_off + t, columns)
            t += half
        if t < columns:
            value1(p, start, key_block, v, base + t * group, stride, steps, o, o_off + t, columns)

    @inline
    def grow_row(x, at, count, m, l, o, i):
        """Follow the maximum of a row, and bring its sums to it; a NaN beside hidden scores only becomes the maximum."""
        top = top_of(x, at, count)
        if top == HIDDEN:
            for j in range(at, at + count * lanes):
                if x[j] != x[j]:
                    top = F(np.nan)
        if m[i] != HIDDEN:
            shrink, row, sums = F(np.exp2(F(m[i] - top))), o[i], l[i]
            for t in range(row.size):
                row[t] = row[t] * shrink
            for t in range(lanes):
                sums[t] = sums[t] * shrink
        m[i] = top

    @inline
    def edge_row(semantics, b, h, i, r, first, stop, lo, hi, x, p, m, l, o, row, dense):
        """Scores and weights of one row that does not see all keys of first .. stop as they are."""
        at, count = r * key_block, (stop - first + lanes - 1) // lanes
        end = at + count * lanes
        a, z = max(lo[i] - first, 0), min(hi[i], stop) - first
        if z > a:
            if semantics.general:
                change_row(semantics, b, h, row + i, first, stop - first, x, at, dense)
            x[at:at + a] = HIDDEN
            x[at + z:end] = HIDDEN
            if exceeds(x, at, count, F(m[i] + GROWTH)):
                grow_row(x, at, count, m, l, o, i)
        if z <= a or m[i] == HIDDEN:
            p[at:end] = operand(0)
        else:
            weights(x, at, count, m[i], p, at, l, i * lanes)

    @kernel(parallel=True)
    def attend(q, keys, limits, values_packed, columns, c, semantics, heads, s, counter, out, lse, redo):
        """All query tiles of all heads.

        q (N, L, D) operands; keys, values_packed (Nkv, ...) packed; limits (Nkv,) float32 largest |q| without overflow;
        columns of a row of V; c float32 scale * log2(e); heads = (H, Hkv, workers); counter (1,) int64 zero;
        out (N, L, Dv), lse (N, L) float32; redo (N, L) uint8, 1 for a row that float32 cannot hold.
        """
        n_heads, length, d = q.shape
        dv = out.shape[2]
        h_all, h_kv, workers = heads
        stride = (d + group - 1) // group * group
        tiles = (length + block_q - 1) // block_q
        shifted = semantics.has_bias or semantics.slopes.size > 0
        for _ in prange(workers):
            q_tile, x = np.zeros((block_q, stride), operand), np.zeros(MR * key_block, np.float32)
            p = x if group == 1 else np.zeros(MR * key_block, operand)
            o, l, m = np.empty((block_q, columns), F), np.empty((block_q, lanes), F), np.empty(block_q, F)
            lo, hi, worst = np.empty(block_q, np.int64), np.empty(block_q, np.int64), np.empty(block_q, np.uint32)
            dense = Dense(semantics.mask.reshape(semantics.mask.size), semantics.bias.reshape(semantics.bias.size),
                          np.zeros(lanes, np.uint8), np.zeros(lanes, np.float32))
            while True:
                task = next_task(counter)
                if task >= n_heads * tiles:
                    break
                n, row = task // tiles, (tiles - 1 - task % tiles) * block_q        # the longest causal tiles first
                b, h = n // h_all, n % h_all
                n_kv = b * h_kv + h * h_kv // h_all
                real = min(block_q, length - row)
                k, v = keys[n_kv], values_packed[n_kv]
                first, stop = s, 0
                for i in range(real):
                    q_tile[i, :d] = q[n, row + i]
                    lo[i], hi[i] = row_range(semantics, b, row + i, s)
                    m[i] = HIDDEN
                    worst[i] = largest(q_tile[i].view(np.uint32), group, np.uint32(0))
                    if hi[i] > lo[i]:
                        first, stop = min(first, lo[i]), max(stop, hi[i])
                q_tile[real:] = operand(0)
                o[:], l[:] = F(0), F(0)
                for block in range(first // key_block * key_block, stop, key_block):
                    for g in range(0, real, MR):
                        rows = min(MR, real - g)
                        left, right, most, least = s, 0, 0, s               # keys that any row sees, and that all rows see
                        for i in range(g, g + rows):
                            most, least = max(most, lo[i]), min(least, hi[i])
                            if hi[i] > lo[i]:
                                left, right = min(left, lo[i]), max(right, hi[i])
                        j, end = max(left // lanes * lanes, block), min(right, block + key_block)
                        while j < end:
                            z = end
                            if semantics.has_mask:
                                z = min(end, j // panel * panel + panel)
                                if not panel_seen(semantics, dense, b, h, row + g, rows, j, z - j):
                                    j = z
                                    continue
                                while z < end and panel_seen(semantics, dense, b, h, row + g, rows, z, min(end - z, panel)):
                                    z = min(end, z + panel)
                            scores(q_tile, g * stride, stride, k, j, z, c, x)
                            if semantics.general or most > j or least < z or (z - j) % lanes:
                                for r in range(rows):
                                    edge_row(semantics, b, h, g + r, r, j, z, lo, hi, x, p, m, l, o, row, dense)
                            else:
                                for r in range(rows):
                                    i, at, count = g + r, r * key_block, (z - j) // lanes
                                    if exceeds(x, at, count, F(m[i] + GROWTH)):
                                        grow_row(x, at, count, m, l, o, i)
                                    weights(x, at, count, m[i], p, at, l, i * lanes)
                            start = max(left - j, 0) // group * group
                            values(p, start, z - j, v, j, columns, o, g * columns)
                            j = z
                for i in range(real):
                    result, sums, bits = out[n, row + i], o[i], np.uint32(0)
                    total = F(0)
                    for t in range(lanes):
                        total = total + l[i, t]
                    r = F(0) if total == F(0) else F(1) / total
                    for t in range(dv):
                        result[t] = sums[t] * r
                    words = result.view(np.uint32)
                    for t in range(dv):
                        bits = max(bits, np.uint32(words[t] & np.uint32(0x7FFFFFFF)))
                    lse[n, row + i] = F((m[i] + np.log2(np.float64(total))) * LN2) if total != F(0) else HIDDEN
                    held = m[i] > LOWEST or (m[i] == HIDDEN and not shifted)
                    held &= worst[i:i + 1].view(np.float32)[0] <= limits[n_kv]
                    redo[n, row + i] = hi[i] > lo[i] and not (held and bits < np.uint32(0x7F800000))
    return attend
