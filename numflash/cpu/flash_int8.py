"""The fused INT8 attention: integer Q.K^T, fixed-point online softmax and integer P.V, one query tile at a time.

This is the A64FX document's kernel (Fused FlashAttention V2, "Algorithm Flow") with the integer pipeline of
`reference.integer_model`, whose bits it produces. One source for every instruction set: the register tiles come from
`microkernels`. Per query tile of `block_q` rows:

    for every key block that a row can see:
        scores   S = Q.K^T in int32 registers -> log2 scores, int16 Q8.8           (score_block)
        softmax  own octave of each row and block, weights P uint8 and their sum    (octave_rows, weigh_rows)
        merge    running octave m and sum l; O shifts by whole octaves when m grows (grow_rows)
        values   O += P.V in int32 registers, added to float32 O                    (value_block)
    out = O / l * v_scale

Blocks at the edge of what is visible get hidden scores before the softmax, and so do keys that a dense mask hides. Bias, softcap
and ALiBi change float32 scores of the block (`wide_scores`), which are then rounded to the same int16. Where int16 does not hold a
row (beyond 127 octaves, keys that are not finite), `relative_scores` rounds relative to the row's own octave; the bits are the
same where both apply.
"""
from __future__ import annotations

import functools

import numpy as np
from numba import prange

from .. import fixedpoint as fx
from .._jit import bare, kernel, separate
from ..fixedpoint import ONE_Q16
from ..memory import reinterpret, zeros
from ..tiling import KEY_BLOCK, tiling
from . import float_tiles, wide_rows
from .amx import tile_state
from .blocks import score_block, value_block
from .isas import VECTOR_ISAS, lanes_of
from .scores import HIDDEN, UNSEEN, Dense, row_of, row_range, step_of
from .softmax import HALF, add_sums, grow_rows, octave_rows, weigh_rows
from .vectors import next_task

F, I = np.float32, np.int32
HIDDEN_WIDE = F(-np.inf)                         # float32 score of a key that is not seen
# Octaves for which int16 scores are exact: above, the maximum saturated; below, hidden scores would have a weight.
LOWEST, HIGHEST = -110, 127
ALL_HIDDEN = I(int(HIDDEN) >> 8)                 # octave of hidden scores
EDGE_ROWS = 12                                   # rows of P.V that stop at the same key where a block is cut off


@functools.cache
def make_attend(isa_name: str, pv: str):
    """The kernel of one instruction set, with P.V in integers (pv "int8") or with weights in Q16.16 and V in float32 ("fp32")."""
    isa = VECTOR_ISAS[isa_name]
    block_q = tiling(isa_name).block_q
    scores, float_scores, values = score_block(isa_name), score_block(isa_name, True), value_block(isa_name, pv)
    begin, end = tile_state(isa_name)
    vector_lanes, float_lanes, q_offset, step, columns_unit = lanes_of(isa_name), isa.lanes, isa.q_offset, isa.step, isa.unit
    operand, unit_rows, edge_rows = np.uint8 if isa.group == 4 else np.int16, isa.rows[-1], max(EDGE_ROWS, isa.rows[-1])
    octaves, weigh, unit = octave_rows(isa_name), weigh_rows(isa_name, pv), F(1 if pv == "int8" else 1 / ONE_Q16)
    weight: type[np.generic] = operand if pv == "int8" else np.float32
    softcap, alibi, add_bias = wide_rows.row_softcap(float_lanes), wide_rows.row_alibi(float_lanes), wide_rows.row_bias(float_lanes)
    row_top, row_narrow = wide_rows.row_top(float_lanes), wide_rows.row_narrow(float_lanes)
    row_short, mask_row, mask_lanes = wide_rows.row_short(float_lanes), wide_rows.row_mask(2 * float_lanes), 2 * float_lanes
    apply_mask, found = float_tiles.row_mask(wide_rows.FLOATS[float_lanes]), float_tiles.any_byte(wide_rows.FLOATS[float_lanes])

    @bare
    def change_rows(semantics, dense, b, h, row, first, n, x, live):
        """Softcap, ALiBi, bias and mask of the first n scores of all rows, as `scores.transform_row` does it.

        All rows in one call: the options are many words, which every call would copy.
        """
        count, whole, rest = (n + float_lanes - 1) // float_lanes, n // float_lanes, n % float_lanes
        cap, shift, slopes = semantics.softcap, semantics.shift, semantics.slopes
        slope = slopes[b, h] if slopes.size > 1 else slopes[0, 0]
        has_bias, bias, bias_end = semantics.has_bias, dense.bias, dense.bias_end
        has_mask, mask, mask_end = semantics.has_mask, dense.mask, dense.mask_end
        bias_at, bias_step = row_of(semantics.bias, b, h, row) + first, step_of(semantics.bias)
        mask_at, mask_step = row_of(semantics.mask, b, h, row) + first, step_of(semantics.mask)
        centre = row + semantics.diagonal[b] - first
        for i in range(live.size):
            at = i * KEY_BLOCK
            tail = at + whole * float_lanes
            if live[i]:
                if cap > F(0):
                    softcap(x, at, count, cap, shift[b, h, row + i])
                if slope != F(0):
                    alibi(x, at, count, slope, centre + i)
                if has_bias:
                    add_bias(x, at, whole, bias, bias_at)
                    if rest:
                        for j in range(rest):
                            bias_end[j] = bias[bias_at + whole * float_lanes + j]
                        add_bias(x, tail, 1, bias_end, 0)
                if has_mask:
                    apply_mask(x, at, whole, mask, mask_at)
                    if rest:
                        for j in range(rest):
                            mask_end[j] = mask[mask_at + whole * float_lanes + j]
                        apply_mask(x, tail, 1, mask_end, 0)
            bias_at += bias_step
            mask_at += mask_step

    @bare
    def mask_rows(semantics, dense, b, h, row, first, n, x, live):
        """Scores of keys that the dense mask hides: weight 0."""
        whole, rest = n // mask_lanes, n % mask_lanes
        mask, mask_end = dense.mask, dense.mask_end
        at, step = row_of(semantics.mask, b, h, row) + first, step_of(semantics.mask)
        for i in range(live.size):
            if live[i]:
                mask_row(x, i * KEY_BLOCK, whole, mask, at)
                if rest:
                    for j in range(rest):
                        mask_end[j] = mask[at + whole * mask_lanes + j]
                    mask_row(x, i * KEY_BLOCK + whole * mask_lanes, 1, mask_end, 0)
            at += step

    @bare
    def mask_hides(semantics, dense, b, h, row, first, n, live):
        """Whether the dense mask hides n keys from `first` on from all rows."""
        for i in range(live.size):
            at = row_of(semantics.mask, b, h, row + i) + first
            whole = n // float_lanes
            if live[i]:
                if found(dense.mask, at, whole):
                    return False
                for j in range(whole * float_lanes, n):
                    if dense.mask[at + j]:
                        return False
        return True

    @bare
    def rows_hidden(semantics, dense, b, h, row, first, n, changed, wide, octave, live):
        """Rows with the lowest octave from which mask or bias hide the whole block are not live; whether there are any."""
        any_hidden = False
        for i in range(live.size):
            if live[i] and octave[i] == ALL_HIDDEN:
                if changed:
                    best, bad = row_top(wide, i * KEY_BLOCK, (n + float_lanes - 1) // float_lanes)
                    seen = bad or best != HIDDEN_WIDE
                else:
                    seen = not mask_hides(semantics, dense, b, h, row + i, first, n, live[i:i + 1])
                if not seen:
                    live[i], any_hidden = 0, True
        return any_hidden

    @bare
    def block_scores(q, stride, k, first, start, ck, cq, rows, columns, x, inside, real, lo, hi):
        """Scores of a block, at its edges half a block at a time and only of rows that see some of it.

        The bounds lo and hi never fall from a row to the next, so these rows stand together.
        """
        part = columns if inside else HALF
        for a in range(0, columns, part):
            i, end = 0, rows
            if not inside:
                while i < end and hi[min(i + unit_rows, real) - 1] <= first + a:
                    i += unit_rows
                while i < end and lo[end - unit_rows] >= first + a + part:
                    end -= unit_rows
            if i < end:
                scores(q[i:end], stride, k, first + a, start, ck, cq[i:end], end - i, part, x[i:end, a:])

    @bare
    def block_values(p, v, first, columns, scale, total, rows, o, inside, real, hi):
        """P.V of a block, at its edges a few rows at a time and only up to the last key that they see: beyond it P is 0."""
        part = rows if inside else edge_rows
        for i in range(0, rows, part):
            end, seen = min(i + part, rows), columns
            if not inside:
                seen = min(seen, (hi[min(end, real) - 1] - first + step - 1) // step * step)
            if seen > 0:
                values(p[i:end], v, first, seen, scale[i:end], total[i:end], end - i, o[i:end])

    @bare
    def hide_edges(x, rows, columns, first, lo, hi, live):
        """Scores of keys that a row does not see: weight 0. Every score is looked at, in vectors of int16."""
        for i in range(rows):
            if live[i]:
                row = x[i]
                a, b = np.int16(min(max(lo[i] - first, 0), KEY_BLOCK)), np.int16(min(max(hi[i] - first, 0), KEY_BLOCK))
                for j in range(columns):
                    row[j] = row[j] if (np.int16(j) >= a) & (np.int16(j) < b) else HIDDEN

    @bare
    def wide_scores(q, stride, k, first, start, ck, cq, rows, columns, wide, live, b, h, row, s, semantics, dense):
        """Scores of the block as float32, transformed and masked."""
        float_scores(q, stride, k, first, start, ck, cq, rows, columns, wide)
        if semantics.general:
            change_rows(semantics, dense, b, h, row, first, min(columns, s - first), wide, live)

    @bare
    def relative_scores(wide, first, columns, lo, hi, x, base, spoiled, live):
        """The same as int16 relative to each row's octave `base`."""
        for i in range(live.size):
            if live[i]:
                at = i * KEY_BLOCK
                for j in range(lo[i] - first):
                    wide[i, j] = HIDDEN_WIDE
                for j in range(hi[i] - first, columns):
                    wide[i, j] = HIDDEN_WIDE
                best, bad = row_top(wide, at, columns // float_lanes)
                if bad or best == HIDDEN_WIDE:
                    live[i], base[i] = 0, I(UNSEEN)
                    if bad:
                        spoiled[i] = 1
                else:
                    base[i] = I(I(np.rint(min(max(best, -fx.T_LIMIT), fx.T_LIMIT))) + I(255)) >> I(8)
                    row_narrow(wide, at, columns // float_lanes, I(base[i] << I(8)), x, at)

    @bare
    def blank_rows(p, rows, columns, live, total):
        """Rows that see nothing of the block have weights 0."""
        for i in range(rows):
            if not live[i]:
                for j in range(columns):
                    p[i, j] = 0
                total[i] = I(0)

    @separate
    def work(q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out):
        """One worker: query tiles, as long as there are any."""
        n_heads, length, d = q.shape
        dv = out.shape[2]
        h_all, h_kv, _ = heads
        stride = (d + step - 1) // step * step
        lanes = vector_lanes()
        width = (dv + columns_unit * lanes - 1) // (columns_unit * lanes) * (columns_unit * lanes)
        tiles = (length + block_q - 1) // block_q
        changed = semantics.has_bias or semantics.softcap > F(0) or semantics.slopes.size > 1 or semantics.slopes[0, 0] != F(0)
        begin()
        q_tile, x = zeros((block_q, stride), operand), zeros((block_q, KEY_BLOCK), np.int16)
        p, wide = zeros((block_q, KEY_BLOCK), weight), zeros((block_q, KEY_BLOCK), np.float32)
        o, sums, octave_q8 = zeros((block_q, width), np.float32), zeros((block_q * lanes,), np.int32), zeros((block_q,), np.int16)
        floats, ints = zeros((3, block_q), np.float32), zeros((4, block_q), np.int32)
        cq_tile, l, scale, m, octave, total, base = floats[0], floats[1], floats[2], ints[0], ints[1], ints[2], ints[3]
        scale_bits, flags, bounds = reinterpret(scale, np.int32), zeros((2, block_q), np.uint8), zeros((2, block_q), np.int64)
        live, spoiled, lo, hi = flags[0], flags[1], bounds[0], bounds[1]
        dense = Dense(semantics.mask.reshape(semantics.mask.size), semantics.bias.reshape(semantics.bias.size),
                      zeros((mask_lanes,), np.uint8), zeros((float_lanes,), np.float32))
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            n, row = task // tiles, (tiles - 1 - task % tiles) * block_q        # the longest causal tiles first
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            real = min(block_q, length - row)
            rows = (real + unit_rows - 1) // unit_rows * unit_rows
            k, v, start, ck = keys.data[n_kv], values_packed[n_kv], keys.start[n_kv], keys.scale[n_kv]
            for i in range(real):
                source, target = q[n, row + i], q_tile[i]
                for e in range(d):
                    target[e] = operand(np.int16(source[e]) + np.int16(q_offset))
                cq_tile[i] = cq[n, row + i]
                lo[i], hi[i] = row_range(semantics, b, row + i, s)
                l[i], m[i], spoiled[i] = F(0), I(UNSEEN), 0
            o[:rows] = F(0)
            first, stop, shared, shared_stop = s, 0, 0, s           # keys that any row sees, keys that every row sees
            for i in range(real):
                shared, shared_stop = max(shared, lo[i]), min(shared_stop, hi[i])
                if hi[i] > lo[i]:
                    first, stop = min(first, lo[i]), max(stop, hi[i])
            for c in range(first // KEY_BLOCK * KEY_BLOCK, stop, KEY_BLOCK):
                columns = HALF if stop - c <= HALF else KEY_BLOCK
                inside = shared <= c and c + columns <= shared_stop
                for i in range(real):
                    live[i] = inside | ((lo[i] < c + columns) & (hi[i] > c) & (hi[i] > lo[i]))
                if semantics.has_mask and mask_hides(semantics, dense, b, h, row, c, min(columns, s - c), live[:real]):
                    continue
                n_real = min(columns, s - c)
                relative = semantics.extreme or keys.wide[n_kv, c // KEY_BLOCK] != 0
                as_floats = changed or relative
                if as_floats:
                    wide_scores(q_tile, stride, k, c, start, ck, cq_tile, rows, columns, wide, live[:real], b, h, row, s,
                                semantics, dense)
                if not relative:
                    if as_floats:
                        for i in range(real):
                            row_short(wide, i * KEY_BLOCK, columns // float_lanes, x, i * KEY_BLOCK)
                    else:
                        block_scores(q_tile, stride, k, c, start, ck, cq_tile, rows, columns, x, inside, real, lo, hi)
                        if semantics.has_mask:
                            mask_rows(semantics, dense, b, h, row, c, n_real, x, live[:real])
                    if not inside:
                        hide_edges(x, real, columns, c, lo, hi, live)
                    octaves(x, real, columns, octave, octave_q8)
                    if semantics.general and rows_hidden(semantics, dense, b, h, row, c, n_real, changed, wide, octave,
                                                         live[:real]):
                        inside = False
                    if not inside:
                        for i in range(real):
                            octave[i] = octave[i] if live[i] else I(UNSEEN)
                    beyond = I(0)
                    for i in range(real):
                        beyond |= I((octave[i] > HIGHEST) | ((octave[i] < LOWEST) & (octave[i] != UNSEEN)))
                    relative = beyond != I(0)
                    if relative and not as_floats:
                        wide_scores(q_tile, stride, k, c, start, ck, cq_tile, rows, columns, wide, live[:real], b, h, row, s,
                                    semantics, dense)
                if relative:
                    inside = False
                    relative_scores(wide, c, columns, lo, hi, x, base, spoiled, live[:real])
                    octaves(x, real, columns, octave, octave_q8)
                    for i in range(real):
                        octave[i] = base[i] if live[i] else I(UNSEEN)
                grow_rows(octave, real, m, l, scale, scale_bits, o)
                weigh(x, real, columns, octave_q8, scale, p, sums, total)
                if not inside:
                    blank_rows(p, real, columns, live, total)
                add_sums(total, real, unit, scale, l)
                block_values(p, v, c, columns, scale, total, rows, o, inside, real, hi)
            for i in range(real):
                if spoiled[i]:
                    l[i] = F(np.nan)
                result, unscaled = out[n, row + i], o[i]
                r = F(1) / l[i]
                for t in range(dv):
                    result[t] = F(0) if l[i] == F(0) else F(F(unscaled[t] * r) * v_scale[n_kv, t])
                m_out[n, row + i], l_out[n, row + i] = m[i], l[i]
        end()

    @kernel(parallel=True)
    def attend(q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out):
        """All query tiles of all heads.

        q (N, L, D) int8; cq (N, L) float32; keys PackedKeys of Nkv heads; values_packed (Nkv, ...); v_scale (Nkv, Dv) float32;
        heads = (H, Hkv, workers); s keys; counter (1,) int64 zero; out (N, L, Dv), l_out (N, L) float32; m_out (N, L) int32.
        """
        for _ in prange(heads[2]):
            work(q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out)
    return attend
