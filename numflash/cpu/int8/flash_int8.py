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

Blocks at the edge of what is visible get hidden scores before the softmax. Softcap, ALiBi, bias and dense masks change the scores
before they are stored as int16 (`score_changes`), from which a row of ALiBi takes off the whole octaves that it is sure to lie
below. Where int16 does not hold a row (beyond 127 octaves, keys that are not finite), `relative_scores` rounds float32 scores
relative to the row's own octave; the bits are the same where both apply.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ... import fixedpoint as fx
from ...fixedpoint import ONE_Q16
from ...jit.compiler import bare, inline, kernel
from ...jit.memory import reinterpret, zeros
from ...jit.parallel import over_tasks
from ...tiling import KEY_BLOCK, tiling
from ..floats import float_tiles
from ..isa.amx_tiles import tile_state
from ..isa.isas import VECTOR_ISAS, lanes_of
from ..isa.vectors import next_task
from ..semantics import HIDDEN, UNSEEN, Dense, row_of, row_range, step_of
from . import wide_rows
from .blocks import score_block, value_block
from .score_changes import Changes, changes_from
from .softmax import HALF, add_sums, grow_rows, octave_rows, weigh_rows

F, I = np.float32, np.int32
HIDDEN_WIDE = F(-np.inf)  # float32 score of a key that is not seen
# Octaves for which int16 scores are exact: above, the maximum saturated; below, hidden scores would have a weight.
LOWEST, HIGHEST = -110, 127
ALL_HIDDEN = I(int(HIDDEN) >> 8)  # octave of hidden scores
FARTHEST = F(2.0**29)  # most that is taken off scores before they become int16: within fx.T_LIMIT
EDGE_ROWS = 12  # rows of P.V that stop at the same key where a block is cut off


class Room(NamedTuple):
    """What a worker needs for one query tile; the rows of floats, ints, flags and bounds are named in `run_tiles`."""

    q: np.ndarray  # (block_q, channels) first dot operand
    x: np.ndarray  # (block_q, KEY_BLOCK) int16 scores, Q8.8
    p: np.ndarray  # (block_q, KEY_BLOCK) weights
    wide: np.ndarray  # (block_q, KEY_BLOCK) float32 scores where int16 does not hold them
    o: np.ndarray  # (block_q, columns) float32
    sums: np.ndarray  # (block_q * lanes,) int32 partial sums of the weights
    octave_q8: np.ndarray  # (block_q,) int16
    floats: np.ndarray
    ints: np.ndarray
    flags: np.ndarray
    bounds: np.ndarray
    mask_end: np.ndarray  # (block_q * KEY_BLOCK,) uint8, for the last part of a mask's rows


@functools.cache
def make_attend(isa_name: str, pv: str):
    """The kernel of one instruction set, with P.V in integers (pv "int8") or with weights in Q16.16 and V in float32 ("fp32")."""
    isa = VECTOR_ISAS[isa_name]
    block_q = tiling(isa_name).block_q
    scores, values = score_block(isa_name), value_block(isa_name, pv)
    changed_scores, wide_scores = score_block(isa_name, True), score_block(isa_name, True, True)
    begin, end = tile_state(isa_name)
    vector_lanes, float_lanes, q_offset, step, columns_unit = (
        lanes_of(isa_name),
        isa.lanes,
        isa.q_offset,
        isa.step,
        isa.unit,
    )
    operand, unit_rows, edge_rows = (
        np.uint8 if isa.group == 4 else np.int16,
        isa.rows[-1],
        max(EDGE_ROWS, isa.rows[-1]),
    )
    octaves, weigh, unit = (
        octave_rows(isa_name),
        weigh_rows(isa_name, pv),
        F(1 if pv == "int8" else 1 / ONE_Q16),
    )
    weight: type[np.generic] = operand if pv == "int8" else np.float32
    row_top, row_narrow, any_bias = (
        make(float_lanes) for make in (wide_rows.row_top, wide_rows.row_narrow, wide_rows.any_bias)
    )
    any_byte = float_tiles.any_byte(wide_rows.FLOATS[float_lanes])

    @bare
    def hides(semantics, dense, b, h, row, first, n, live):
        """Whether the dense mask, or the bias by -inf, hides n keys from `first` on from all rows."""
        whole = n // float_lanes
        for i in range(live.size):
            if live[i]:
                seen = True
                if semantics.has_mask:
                    at = row_of(semantics.mask, b, h, row + i) + first
                    seen = any_byte(dense.mask, at, whole)
                    for j in range(whole * float_lanes, n):
                        seen |= dense.mask[at + j] != 0
                if seen and semantics.has_bias:
                    at = row_of(semantics.bias, b, h, row + i) + first
                    seen = any_bias(dense.bias, at, whole)
                    for j in range(whole * float_lanes, n):
                        seen |= dense.bias[at + j] != HIDDEN_WIDE
                if seen:
                    return False
        return True

    @bare
    def rows_hidden(semantics, dense, b, h, row, first, n, octave, live):
        """Rows with the lowest octave from which mask or bias hide the whole block become unseen; whether there are any."""
        any_hidden = False
        for i in range(live.size):
            if (
                live[i]
                and octave[i] == ALL_HIDDEN
                and hides(semantics, dense, b, h, row + i, first, n, live[i : i + 1])
            ):
                live[i], octave[i], any_hidden = 0, I(UNSEEN), True
        return any_hidden

    @bare
    def unit_range(first, columns, rows, real, lo, hi):
        """The rows that see some of these keys, in whole units.

        The bounds of the rows are non-decreasing, so the visible rows are contiguous.
        """
        i, end = 0, rows
        while i < end and hi[min(i + unit_rows, real) - 1] <= first:
            i += unit_rows
        while i < end and lo[end - unit_rows] >= first + columns:
            end -= unit_rows
        return i, end

    @bare
    def block_scores(q, stride, k, first, start, ck, cq, rows, columns, x, inside, real, lo, hi):
        """Scores of a block, at its edges half a block at a time and only of rows that see some of it."""
        part = columns if inside else HALF
        for a in range(0, columns, part):
            i, end = (0, rows) if inside else unit_range(first + a, part, rows, real, lo, hi)
            if i < end:
                scores(
                    q[i:end],
                    stride,
                    k,
                    first + a,
                    start,
                    ck,
                    cq[i:end],
                    end - i,
                    part,
                    x[i:end, a:],
                )

    @bare
    def changed_block(
        q,
        stride,
        k,
        first,
        start,
        ck,
        cq,
        rows,
        columns,
        x,
        inside,
        real,
        lo,
        hi,
        options,
        at_end,
        ending,
    ):
        """The same with options, those `at_end` where it is `ending`."""
        changes = at_end if ending else options
        part = columns if inside else HALF
        for a in range(0, columns, part):
            i, end = (0, rows) if inside else unit_range(first + a, part, rows, real, lo, hi)
            if i < end:
                changed_scores(
                    q[i:end],
                    stride,
                    k,
                    first + a,
                    start,
                    ck,
                    cq[i:end],
                    end - i,
                    part,
                    x[i:end, a:],
                    changes_from(changes, i),
                )

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
                a, b = (
                    np.int16(min(max(lo[i] - first, 0), KEY_BLOCK)),
                    np.int16(min(max(hi[i] - first, 0), KEY_BLOCK)),
                )
                for j in range(columns):
                    row[j] = row[j] if (np.int16(j) >= a) & (np.int16(j) < b) else HIDDEN

    @bare
    def wide_block(q, stride, k, first, start, ck, cq, rows, columns, x, options, at_end, ending):
        """All scores of a block as float32."""
        wide_scores(
            q, stride, k, first, start, ck, cq, rows, columns, x, at_end if ending else options
        )

    @bare
    def copy_end(changes, first, n, end):
        """Bias and mask of the n keys from `first` on, to where `end` has them."""
        for i in range(changes.last + 1):
            if changes.has_bias:
                at, to = (
                    changes.bias_at + i * changes.bias_step + first,
                    end.bias_at + i * end.bias_step + first,
                )
                for j in range(n):
                    end.bias[to + j] = changes.bias[at + j]
            if changes.has_mask:
                at, to = (
                    changes.mask_at + i * changes.mask_step + first,
                    end.mask_at + i * end.mask_step + first,
                )
                for j in range(n):
                    end.mask[to + j] = changes.mask[at + j]

    @bare
    def lower(changes, first, columns):
        """The base of each row: less than ALiBi takes off its nearest key of the block."""
        for i in range(changes.last + 1):
            away = max(first - changes.centre - i, changes.centre + i - (first + columns - 1), 0)
            off = min(max(F(changes.numbers[1] * F(away)), F(0)), FARTHEST)
            changes.base[i] = np.negative(I(I(off) & I(-256)))

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
                    base[i] = I(I(np.rint(min(max(best, -fx.T_LIMIT), fx.T_LIMIT))) + I(255)) >> I(
                        8
                    )
                    row_narrow(wide, at, columns // float_lanes, I(base[i] << I(8)), x, at)

    @bare
    def leave_int16(octave, rows):
        """Whether int16 scores do not hold one of the rows."""
        found = I(0)
        for i in range(rows):
            found |= I((octave[i] > HIGHEST) | ((octave[i] < LOWEST) & (octave[i] != UNSEEN)))
        return found != I(0)

    @bare
    def blank_rows(p, rows, columns, live, total):
        """Rows that see nothing of the block have weights 0."""
        for i in range(rows):
            if not live[i]:
                for j in range(columns):
                    p[i, j] = 0
                total[i] = I(0)

    @bare
    def run_tiles(
        q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out, room
    ):
        """Query tiles, as long as there are any."""
        n_heads, length, d = q.shape
        dv, stride = out.shape[2], room.q.shape[1]
        h_all, h_kv, _ = heads
        tiles = (length + block_q - 1) // block_q
        capped, has_dense = semantics.softcap > F(0), semantics.has_bias or semantics.has_mask
        changed = capped or has_dense or semantics.slopes.size > 1 or semantics.slopes[0, 0] != F(0)
        q_tile, x, p, wide, o, sums, octave_q8, floats, ints, flags, bounds, masks = room
        cq_tile, l, scale, shift, numbers = floats[0], floats[1], floats[2], floats[3], floats[4]
        m, octave, total, base, own = ints[0], ints[1], ints[2], ints[3], ints[4]
        live, spoiled, lo, hi, scale_bits = (
            flags[0],
            flags[1],
            bounds[0],
            bounds[1],
            reinterpret(scale, np.int32),
        )
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            masks,
            wide.reshape(wide.size),
        )
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            n, row = (
                task // tiles,
                (tiles - 1 - task % tiles) * block_q,
            )  # the longest causal tiles first
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            real = min(block_q, length - row)
            rows = (real + unit_rows - 1) // unit_rows * unit_rows
            k, v, start, ck = (
                keys.data[n_kv],
                values_packed[n_kv],
                keys.start[n_kv],
                keys.scale[n_kv],
            )
            for i in range(real):
                source, target = q[n, row + i], q_tile[i]
                for e in range(d):
                    target[e] = operand(np.int16(source[e]) + np.int16(q_offset))
                cq_tile[i] = cq[n, row + i]
                lo[i], hi[i] = row_range(semantics, b, row + i, s)
                l[i], m[i], spoiled[i], base[i] = F(0), I(UNSEEN), 0, I(0)
                if capped:
                    shift[i] = semantics.shift[b, h, row + i]
            centre, numbers[0] = row + semantics.diagonal[b], F(semantics.softcap * fx.CAP_UNIT)
            numbers[1] = (
                semantics.slopes[b, h] if semantics.slopes.size > 1 else semantics.slopes[0, 0]
            )
            sloped = numbers[1] != F(0)
            options = Changes(
                capped,
                sloped,
                semantics.has_bias,
                semantics.has_mask,
                shift,
                numbers,
                centre,
                base,
                dense.bias,
                row_of(semantics.bias, b, h, row),
                step_of(semantics.bias),
                dense.mask,
                row_of(semantics.mask, b, h, row),
                step_of(semantics.mask),
                real - 1,
            )
            # vectors may read beyond the last keys of bias and mask: here these stand in room for a whole block
            at = -(s // KEY_BLOCK * KEY_BLOCK)
            at_end = Changes(
                capped,
                sloped,
                semantics.has_bias,
                semantics.has_mask,
                shift,
                numbers,
                centre,
                base,
                dense.bias_end,
                at,
                KEY_BLOCK,
                dense.mask_end,
                at,
                KEY_BLOCK,
                real - 1,
            )
            o[:rows] = F(0)
            far, no_number = (
                False,
                False,
            )  # the last block left int16: this one is likely to; a query is not finite
            for i in range(real):
                no_number |= cq_tile[i] != cq_tile[i]
            first, stop, shared, shared_stop = (
                s,
                0,
                0,
                s,
            )  # keys that any row sees, keys that every row sees
            for i in range(real):
                shared, shared_stop = max(shared, lo[i]), min(shared_stop, hi[i])
                if hi[i] > lo[i]:
                    first, stop = min(first, lo[i]), max(stop, hi[i])
            for c in range(first // KEY_BLOCK * KEY_BLOCK, stop, KEY_BLOCK):
                columns = HALF if stop - c <= HALF else KEY_BLOCK
                inside = shared <= c and c + columns <= shared_stop
                for i in range(real):
                    live[i] = inside | ((lo[i] < c + columns) & (hi[i] > c) & (hi[i] > lo[i]))
                n_real = min(columns, s - c)
                if has_dense and hides(semantics, dense, b, h, row, c, n_real, live[:real]):
                    continue
                ending = has_dense and n_real < columns
                if ending:
                    copy_end(options, c, n_real, at_end)
                if sloped:
                    lower(options, c, columns)
                relative = (
                    far or no_number or semantics.extreme or keys.wide[n_kv, c // KEY_BLOCK] != 0
                )
                if not relative:
                    if changed:
                        changed_block(
                            q_tile,
                            stride,
                            k,
                            c,
                            start,
                            ck,
                            cq_tile,
                            rows,
                            columns,
                            x,
                            inside,
                            real,
                            lo,
                            hi,
                            options,
                            at_end,
                            ending,
                        )
                    else:
                        block_scores(
                            q_tile,
                            stride,
                            k,
                            c,
                            start,
                            ck,
                            cq_tile,
                            rows,
                            columns,
                            x,
                            inside,
                            real,
                            lo,
                            hi,
                        )
                    if not inside:
                        hide_edges(x, real, columns, c, lo, hi, live)
                    octaves(x, real, columns, octave, octave_q8)
                    if not inside:
                        for i in range(real):
                            octave[i] = octave[i] if live[i] else I(UNSEEN)
                    relative = leave_int16(octave, real)
                    if (
                        relative
                        and semantics.general
                        and rows_hidden(semantics, dense, b, h, row, c, n_real, octave, live[:real])
                    ):
                        inside, relative = False, leave_int16(octave, real)
                    if sloped:
                        for i in range(real):
                            octave[i] = (
                                octave[i] + (base[i] >> 8) if octave[i] != UNSEEN else octave[i]
                            )
                if relative:
                    inside = False
                    wide_block(
                        q_tile,
                        stride,
                        k,
                        c,
                        start,
                        ck,
                        cq_tile,
                        rows,
                        columns,
                        wide,
                        options,
                        at_end,
                        ending,
                    )
                    relative_scores(wide, c, columns, lo, hi, x, own, spoiled, live[:real])
                    for i in range(real):  # relative to its own octave, a row has octave 0
                        octave_q8[i] = 0
                        octave[i] = own[i] - (base[i] >> 8) if live[i] else I(UNSEEN)
                    far = leave_int16(octave, real)
                    for i in range(real):
                        octave[i] = own[i] if live[i] else I(UNSEEN)
                grow_rows(octave, real, m, l, scale, scale_bits, o)
                weigh(x, real, columns, octave_q8, scale, p, sums, total)
                if not inside:
                    blank_rows(p, real, columns, live, total)
                add_sums(total, real, unit, scale, l)
                block_values(p, v, c, columns, scale, total, rows, o, inside, real, hi)
            for i in range(real):
                if spoiled[i]:
                    l[i] = F(np.nan)
                result, unscaled, channel_scale, r = (
                    out[n, row + i],
                    o[i],
                    v_scale[n_kv],
                    F(1) / l[i],
                )
                if l[i] == F(0):
                    result[:] = F(0)
                else:
                    for t in range(dv):
                        result[t] = F(F(unscaled[t] * r) * channel_scale[t])
                m_out[n, row + i], l_out[n, row + i] = m[i], l[i]

    @inline
    def work(
        _, q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out
    ):
        """One worker."""
        lanes = vector_lanes()
        stride, unit_columns = (q.shape[2] + step - 1) // step * step, columns_unit * lanes
        width = (out.shape[2] + unit_columns - 1) // unit_columns * unit_columns
        begin()
        room = Room(
            zeros((block_q, stride), operand),
            zeros((block_q, KEY_BLOCK), np.int16),
            zeros((block_q, KEY_BLOCK), weight),
            zeros((block_q, KEY_BLOCK), np.float32),
            zeros((block_q, width), np.float32),
            zeros((block_q * lanes,), np.int32),
            zeros((block_q,), np.int16),
            zeros((5, block_q), np.float32),
            zeros((5, block_q), np.int32),
            zeros((2, block_q), np.uint8),
            zeros((2, block_q), np.int64),
            zeros((block_q * KEY_BLOCK,), np.uint8),
        )
        run_tiles(
            q,
            cq,
            keys,
            values_packed,
            v_scale,
            semantics,
            heads,
            s,
            counter,
            out,
            m_out,
            l_out,
            room,
        )
        end()

    @kernel
    def attend(
        q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out
    ):
        """All query tiles of all heads.

        q (N, L, D) int8; cq (N, L) float32; keys PackedKeys of Nkv heads; values_packed (Nkv, ...); v_scale (Nkv, Dv) float32;
        heads = (H, Hkv, workers); s keys; counter (1,) int64 zero; out (N, L, Dv), l_out (N, L) float32; m_out (N, L) int32.
        """
        over_tasks(
            work,
            heads[2],
            (q, cq, keys, values_packed, v_scale, semantics, heads, s, counter, out, m_out, l_out),
        )

    return attend
