"""The fused INT8 attention.

Integer Q.K^T, fixed-point online softmax and integer P.V, one query tile at a time.

The plan is that of the A64FX summary (docs/sources.md), with the integer pipeline of
`reference.integer_model`, whose bits it produces. One source for every instruction set: the
register tiles come from `microkernels`. Per query tile of `block_q` rows:

    first    the sequence's first keys, taken out of their block: m, l and O begin with them (begin_rows)
    for every key block that a row can see:
        scores   S = Q.K^T in int32 registers -> log2 scores, int16 Q8.8            (narrow_scores)
        softmax  own octave of each row and block, weights P uint8 and their sum     (octaves, weigh)
        merge    running octave m and sum l; O shifts by whole octaves when m grows  (grow_rows, add_sums)
        values   O += P.V in int32 registers, added to float32 O                     (add_values)
    out = O / l * v_scale                                                            (store_rows)

Blocks at the edge of what is visible get hidden scores before the softmax. Softcap, ALiBi, bias and
dense masks change the scores before they are stored as int16 (`score_changes`), from which a row of
ALiBi subtracts the whole octaves that are a lower bound of its distance. Score and mask functions
change them in float32 (`function_scores`). Where int16 does not hold a row (beyond 127 octaves,
keys that are not finite), `wide_scores` rounds float32 scores relative to the row's own octave; the
bits are the same where both apply. On AMX, blocks without options go through `amx_stream`, which
runs the same steps of many blocks side by side.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from ... import fixedpoint as fx
from ...fixedpoint import FIRST_KEYS, ONE_Q16
from ...jit.compiler import bare, inline, separate
from ...jit.memory import reinterpret, uncleared, zeros
from ...jit.parallel import over_tasks
from ...tiling import KEY_BLOCK, tiling
from ..floats import float_rows
from ..isa.amx_tiles import BLOCK, tile_state
from ..isa.isas import VECTOR_ISAS, lanes_of, padded
from ..isa.score_calls import all_empty, batch_of, call_tile
from ..isa.vectors import next_task
from ..semantics import UNSEEN, Dense, row_of, row_range, step_of, transform_row
from . import amx_stream, wide_rows
from .amx_stream import Kept, extend_rows, restore_rows, stream_blocks, stream_stop
from .blocks import score_block, value_block, value_rows
from .first_keys import FirstKeys, score_row, value_row, weigh_first
from .function_scores import LN2_Q8, call_rows, drop_rows, function_block, function_for
from .rows import (
    State,
    Tile,
    blank_rows,
    block_at,
    copy_end,
    hide_edges,
    hide_first,
    key_span,
    lower_base,
    mark_live,
    padded_changes,
    query_nonfinite,
    store_rows,
    unit_range,
    unsee,
)
from .score_changes import Changes, changes_from
from .softmax import HALF, add_sums, grow_rows, octave_rows, weigh_rows

F = np.float32
I = np.int32
HIDDEN_WIDE = F(-np.inf)  # float32 score of a key that is not seen
# Octaves for which int16 scores are exact: above, the maximum saturated; below, hidden scores would
# have a weight.
LOWEST = -110
HIGHEST = 127
ALL_HIDDEN = I(int(fx.MASKED) >> 8)  # octave of hidden scores
EDGE_ROWS = 12  # rows of P.V that stop at the same key where a block is cut off


class Scratch(NamedTuple):
    """What a worker needs for one query tile."""

    q: np.ndarray  # (block_q, channels) operands of Q.K^T
    x: np.ndarray  # (block_q, KEY_BLOCK) int16 scores, Q8.8
    p: np.ndarray  # (block_q, KEY_BLOCK) weights
    wide: np.ndarray  # (block_q, KEY_BLOCK) float32 scores where int16 does not hold them
    o: np.ndarray  # (block_q, columns) float32
    sums: np.ndarray  # (block_q * lanes,) int32 partial sums of the weights
    octave_q8: np.ndarray  # (block_q,) int16
    # (5, block_q) float32: scale of the scores, l, scale of the weights, shift of softcap, numbers
    floats: np.ndarray
    ints: np.ndarray  # (5, block_q) int32: m, octave, total, base, own
    flags: np.ndarray  # (2, block_q) uint8: live, spoiled
    bounds: np.ndarray  # (3, block_q) int64: lo, hi, start
    mask_end: np.ndarray  # (block_q * KEY_BLOCK,) uint8, for the last part of a mask's rows
    turns: np.ndarray  # int64, what `amx_stream` does one after the other
    stream: np.ndarray  # uint8, its scratch
    kept: Kept


class Operands(NamedTuple):
    """One KV head, packed."""

    keys: np.ndarray
    start: np.ndarray  # int32 that a key's sums begin with
    scale: np.ndarray  # float32 scale of each key; NaN where it is not finite
    wide: np.ndarray  # per block, whether int16 may not hold its scores
    values: np.ndarray
    first: FirstKeys  # of all heads
    head: int


def query_rows(isa_name: str, pv: str, block_q: int = 0) -> int:
    """Rows of a query tile: the tiling's, in whole units of both products' register tiles."""
    rows = block_q or tiling(isa_name).block_q
    unit = math.lcm(value_rows(isa_name, pv), VECTOR_ISAS[isa_name].rows[-1])
    return max(unit, rows - rows % unit)


@functools.cache
def make_attend(isa_name: str, pv: str, block_q: int = 0):
    """The kernel of one instruction set, with P.V in integers (pv "int8") or with weights in Q16.16
    and V in float32 ("fp32"); query tiles as in its tiling, or of about `block_q` rows.
    """
    isa = VECTOR_ISAS[isa_name]
    block_q = query_rows(isa_name, pv, block_q)
    plain_scores = score_block(isa_name)
    changed_scores = score_block(isa_name, True)
    float_scores = score_block(isa_name, True, True)
    function_scores = function_block(isa_name)
    values = value_block(isa_name, pv)
    octaves = octave_rows(isa_name)
    weigh = weigh_rows(isa_name, pv)
    first_scores, first_values = score_row(isa_name), value_row(isa_name)
    weigh_four, weigh_one = weigh_first(4), weigh_first(1)
    begin, end = tile_state(isa_name)
    vector_lanes = lanes_of(isa_name)
    float_lanes = isa.lanes
    q_offset = isa.q_offset
    step = isa.step
    columns_unit = isa.unit
    operand = np.uint8 if isa.group == 4 else np.int16
    weight: type[np.generic] = operand if pv == "int8" else np.float32
    unit = F(1 if pv == "int8" else 1 / ONE_Q16)  # of a weight, in the sum l
    unit_rows = isa.rows[-1]
    edge_rows = padded(EDGE_ROWS, value_rows(isa_name, pv))
    row_top = wide_rows.row_top(float_lanes)
    row_narrow = wide_rows.row_narrow(float_lanes)
    any_bias = wide_rows.any_bias(float_lanes)
    any_byte = float_rows.any_byte(wide_rows.FLOATS[float_lanes])
    streams = isa.tiled and pv == "int8"
    turns_shape = amx_stream.table_shape() if streams else (1, 1)
    stream_size = amx_stream.scratch_size() if streams else 0
    stream_row = 4 * BLOCK if streams else 0  # and bytes for each column of O

    @bare
    def hides(semantics, dense, b, h, row, block, live):
        """Whether the dense mask, or the bias by -inf, hides the block from all rows."""
        first, n = block.begin, block.first + block.real - block.begin
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
    def drop_hidden(semantics, dense, b, h, row, block, octave, live):
        """Mark rows as unseen where mask or bias hide the whole block; returns whether any is.

        Only rows with the lowest octave can be such.
        """
        found = False
        for i in range(live.size):
            if live[i] and octave[i] == ALL_HIDDEN:
                one = live[i : i + 1]
                if hides(semantics, dense, b, h, row + i, block, one):
                    live[i], octave[i], found = 0, I(UNSEEN), True
        return found

    @bare
    def leave_int16(octave, rows):
        """Whether int16 scores do not hold one of the rows."""
        found = I(0)
        for i in range(rows):
            found |= I((octave[i] > HIGHEST) | ((octave[i] < LOWEST) & (octave[i] != UNSEEN)))
        return found != I(0)

    @bare
    def narrow_scores(tile, kv, block, x, changed, changes):
        """Scores of a block as int16, at its edges half a block at a time and only of rows that see
        some of it.
        """
        stride = tile.q.shape[1]
        part = block.columns if block.inside else HALF
        for a in range(0, block.columns, part):
            first, i, stop = block.first + a, 0, tile.rows
            if not block.inside:
                i, stop = unit_range(tile, first, part, unit_rows)
            if i < stop:
                q, scale, to = tile.q[i:stop], tile.scale[i:stop], x[i:stop, a:]
                n = stop - i
                if changed:
                    here = changes_from(changes, i)
                    changed_scores(
                        q, stride, kv.keys, first, kv.start, kv.scale, scale, n, part, to, here
                    )
                else:
                    plain_scores(q, stride, kv.keys, first, kv.start, kv.scale, scale, n, part, to)
        if not block.inside:
            hide_edges(x, tile, block)
        elif block.first < block.begin:
            hide_first(x, tile, block)

    @bare
    def wide_scores(tile, kv, block, wide, changes, called, x, state):
        """The same by way of float32, as int16 relative to each row's own octave.

        Returns whether a score left the range of int16.
        """
        real, columns = tile.real, block.columns
        float_scores(
            tile.q,
            tile.q.shape[1],
            kv.keys,
            block.first,
            kv.start,
            kv.scale,
            tile.scale,
            tile.rows,
            columns,
            wide,
            changes,
        )
        call_rows(called, wide.reshape(wide.size), real, block)
        narrow_wide(wide, tile, block, x, state)
        for i in range(real):  # relative to its own octave, a row has octave 0
            state.octave_q8[i] = 0
            state.octave[i] = state.own[i] - (state.base[i] >> 8) if tile.live[i] else I(UNSEEN)
        overflowed = leave_int16(state.octave, real)
        for i in range(real):
            state.octave[i] = state.own[i] if tile.live[i] else I(UNSEEN)
        return overflowed

    @bare
    def narrow_wide(wide, tile, block, x, state):
        """Float32 scores to int16 relative to each row's octave `own`.

        Rows without a number are spoiled and unseen.
        """
        whole = block.columns // float_lanes
        for i in range(tile.real):
            if tile.live[i]:
                at = i * KEY_BLOCK
                for j in range(tile.lo[i] - block.first):
                    wide[i, j] = HIDDEN_WIDE
                for j in range(tile.hi[i] - block.first, block.columns):
                    wide[i, j] = HIDDEN_WIDE
                best, bad = row_top(wide, at, whole)
                if bad or best == HIDDEN_WIDE:
                    tile.live[i], state.own[i] = 0, I(UNSEEN)
                    if bad:
                        state.spoiled[i] = 1
                else:
                    top = I(np.rint(min(max(best, -fx.T_LIMIT), fx.T_LIMIT)))
                    state.own[i] = I(top + I(255)) >> I(8)
                    row_narrow(wide, at, whole, I(state.own[i] << I(8)), x, at)

    @bare
    def add_values(p, kv, tile, block, inside, state):
        """O += P.V of a block, at its edges a few rows at a time and only up to the last key that
        they see: beyond it P is 0.
        """
        part = tile.rows if inside else edge_rows
        for i in range(0, tile.rows, part):
            stop, seen = min(i + part, tile.rows), block.columns
            if not inside:
                last = tile.hi[min(stop, tile.real) - 1] - block.first
                seen = min(seen, (last + step - 1) // step * step)
            if seen > 0:
                scale, total = state.scale[i:stop], state.total[i:stop]
                values(
                    p[i:stop], kv.values, block.first, seen, scale, total, stop - i, state.o[i:stop]
                )

    @bare
    def clear(first, stop, state):
        """The state of rows that have seen nothing."""
        for i in range(first, stop):
            state.l[i], state.m[i] = F(0), I(UNSEEN)
        state.o[first:stop] = F(0)

    @bare(forceinline=True)
    def first_row_scores(q, kv, semantics, place, tile, x):
        """Scores of the first keys, after all options, FIRST_KEYS for each row; -inf is hidden."""
        b, h, n, row = place
        d, functions = q.shape[2], semantics.functions
        for i in range(tile.real):
            first_scores(
                q, (n * q.shape[1] + row + i) * d, d, kv.first.keys, kv.head, kv.first.scale,
                tile.scale[i], x, i * FIRST_KEYS,
            )  # fmt: skip
        if functions.masked != 0:
            call_tile(
                functions.masked, functions.masked_frame, x, 0, FIRST_KEYS, tile.real,
                tile.first_keys, batch_of(functions, b), h, row, 0, LN2_Q8, fx.LOG2E_Q8,
            )  # fmt: skip
        for i in range(tile.real):
            start, stop = min(tile.start[i], tile.first_keys), min(tile.hi[i], tile.first_keys)
            seen = x[i * FIRST_KEYS : (i + 1) * FIRST_KEYS]
            if semantics.general and start < stop:
                transform_row(semantics, b, h, row + i, start, seen[start:stop])
            if start > 0 or stop < FIRST_KEYS:
                for j in range(FIRST_KEYS):
                    if j < start or j >= stop:
                        seen[j] = HIDDEN_WIDE

    @bare(forceinline=True)
    def begin_rows(q, kv, semantics, place, tile, state, x):
        """The state of a tile after the first keys; x, a flat scratch."""
        if tile.start[0] >= tile.first_keys or tile.hi[tile.real - 1] == 0:
            clear(0, tile.rows, state)
            return
        clear(tile.real, tile.rows, state)
        first_row_scores(q, kv, semantics, place, tile, x)
        o, width, fours = state.o.reshape(state.o.size), state.o.shape[1], tile.real // 4 * 4
        no_number = False
        for i in range(0, fours, 4):
            no_number |= weigh_four(x, i * FIRST_KEYS, state.m, i, state.l, i)
        for i in range(fours, tile.real):
            no_number |= weigh_one(x, i * FIRST_KEYS, state.m, i, state.l, i)
        for i in range(tile.real):
            first_values(x, i * FIRST_KEYS, kv.first.values, kv.head, width, o, i * width)
        if no_number:
            mark_spoiled(q, kv, semantics, place, tile, state, x)

    @bare(forceinline=False)
    def mark_spoiled(q, kv, semantics, place, tile, state, x):
        """The rows that have a score that is NaN."""
        first_row_scores(q, kv, semantics, place, tile, x)
        for i in range(tile.real * FIRST_KEYS):
            if x[i] != x[i]:
                state.spoiled[i // FIRST_KEYS] = 1

    @bare
    def load_rows(q, cq, semantics, b, n, row, s, tile, state):
        """The rows of a tile as operands, and the keys each of them attends to."""
        for i in range(tile.real):
            source, target = q[n, row + i], tile.q[i]
            for e in range(source.size):
                target[e] = operand(np.int16(source[e]) + np.int16(q_offset))
            tile.scale[i] = cq[n, row + i]
            tile.start[i], tile.hi[i] = row_range(semantics, b, row + i, s)
            tile.lo[i] = max(tile.start[i], tile.first_keys)
            state.spoiled[i] = 0
            state.base[i] = I(0)
        for i in range(tile.real, tile.rows):  # computed by the stream, stored by nobody
            tile.scale[i] = F(0)
            tile.lo[i], tile.hi[i] = tile.lo[tile.real - 1], tile.hi[tile.real - 1]

    @bare
    def tile_changes(semantics, dense, b, h, row, last, shift, numbers, base):
        """The options of a tile's scores: see `score_changes`."""
        capped = semantics.softcap > F(0)
        if capped:
            for i in range(last + 1):
                shift[i] = semantics.shift[b, h, row + i]
        numbers[0] = F(semantics.softcap * fx.CAP_UNIT)
        numbers[1] = semantics.slopes[b, h] if semantics.slopes.size > 1 else semantics.slopes[0, 0]
        return Changes(
            capped,
            numbers[1] != F(0),
            semantics.has_bias,
            semantics.has_mask,
            shift,
            numbers,
            row + semantics.diagonal[b],
            base,
            dense.bias,
            row_of(semantics.bias, b, h, row),
            step_of(semantics.bias),
            dense.mask,
            row_of(semantics.mask, b, h, row),
            step_of(semantics.mask),
            last,
        )

    @bare
    def run_tiles(
        q,
        cq,
        keys,
        values_packed,
        first_keys,
        v_scale,
        semantics,
        heads,
        s,
        counter,
        out,
        m_out,
        l_out,
        scratch,
    ):
        """Query tiles, as long as there are any."""
        n_heads, length, _ = q.shape
        h_all, h_kv, _, stream = heads
        tiles, first_count = (length + block_q - 1) // block_q, min(first_keys.number, s)
        has_dense = semantics.has_bias or semantics.has_mask
        has_slopes = semantics.slopes.size > 1 or semantics.slopes[0, 0] != F(0)
        changed = semantics.softcap > F(0) or has_dense or has_slopes
        x, p, wide = scratch.x, scratch.p, scratch.wide
        flat_wide = wide.reshape(wide.size)
        q_scale = scratch.floats[0]
        l = scratch.floats[1]
        scale = scratch.floats[2]
        shift = scratch.floats[3]
        numbers = scratch.floats[4]
        m = scratch.ints[0]
        octave = scratch.ints[1]
        total = scratch.ints[2]
        base = scratch.ints[3]
        own = scratch.ints[4]
        live, spoiled = scratch.flags[0], scratch.flags[1]
        lo, hi, start = scratch.bounds[0], scratch.bounds[1], scratch.bounds[2]
        scale_bits = reinterpret(scale, np.int32)
        state = State(
            m, l, scratch.o, octave, scratch.octave_q8, base, own, total, scale, scale_bits, spoiled
        )
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            scratch.mask_end,
            flat_wide,
        )
        # vectors may read beyond the last keys of bias and mask: `copy_end` puts these where a
        # whole block fits
        end_at = -(s // KEY_BLOCK * KEY_BLOCK)
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            n = task // tiles
            row = (tiles - 1 - task % tiles) * block_q  # the longest causal tiles first
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            real = min(block_q, length - row)
            rows = (real + unit_rows - 1) // unit_rows * unit_rows
            tile = Tile(scratch.q, q_scale, lo, hi, start, live, rows, real, first_count)
            kv = Operands(
                keys.data[n_kv],
                keys.start[n_kv],
                keys.scale[n_kv],
                keys.wide[n_kv],
                values_packed[n_kv],
                first_keys,
                n_kv,
            )
            place = (b, h, n, row)
            load_rows(q, cq, semantics, b, n, row, s, tile, state)
            options = tile_changes(semantics, dense, b, h, row, real - 1, shift, numbers, base)
            options_end = padded_changes(options, dense.bias_end, dense.mask_end, end_at)
            span = key_span(tile, s)
            always_wide = semantics.extreme or query_nonfinite(tile)
            overflowed = False  # the last block left int16: this one is likely to
            begin_at = span.first // KEY_BLOCK * KEY_BLOCK
            functions = semantics.functions
            plain = functions.masked == 0
            streaming = streams and stream != 0 and plain and not (changed or always_wide)
            following, starting, extended, extended_stop = begin_at, True, 0, 0
            while starting or following < span.stop:
                # The start is a turn of this loop, because it happens again where the stream gives up:
                # one call of `begin_rows`, whose code is inlined, serves both.
                if starting:
                    begin_rows(q, kv, semantics, place, tile, state, flat_wide)
                    if streams and streaming:
                        extended, extended_stop = extend_rows(tile, span, state, scratch.kept)
                    starting = False
                    continue
                first = following
                stop = stream_stop(tile, kv, first, span.stop) if streaming else first
                if stop > first:
                    following = stop
                    streaming = stream_blocks(
                        stream, scratch.turns, scratch.stream, tile, kv, state, first, stop
                    )
                    if not streaming:  # scores left int16: again from the start, block by block
                        restore_rows(tile, state, scratch.kept, extended, extended_stop)
                        extended_stop = extended
                        following, starting = begin_at, True
                    continue
                following = first + KEY_BLOCK
                block = block_at(span, first, s, tile.first_keys)
                last = row + real - 1
                if all_empty(functions, b, h, row, last, first, first + block.real):
                    continue
                called = function_for(functions, b, h, row, last, block)
                mark_live(tile, block)
                rows_live = live[:real]
                if has_dense and hides(semantics, dense, b, h, row, block, rows_live):
                    continue
                changes = options
                if has_dense and block.real < block.columns:
                    copy_end(options, block, options_end)
                    changes = options_end
                if options.has_slope:
                    lower_base(options, block)
                inside = block.inside
                is_wide = always_wide or overflowed or kv.wide[first // KEY_BLOCK] != 0
                dropped = False  # rows of which a function hides the block
                if not is_wide:
                    if called.address != 0:
                        function_scores(tile, kv, block, called, wide, x)
                    else:
                        narrow_scores(tile, kv, block, x, changed, changes)
                    octaves(x, real, block.columns, octave, state.octave_q8)
                    if not inside:
                        unsee(tile, octave)
                    is_wide = leave_int16(octave, real)
                    if is_wide and called.address != 0:
                        dropped = drop_rows(tile, octave, ALL_HIDDEN, I(UNSEEN))
                        is_wide = leave_int16(octave, real)
                    if (
                        is_wide
                        and semantics.general
                        and drop_hidden(semantics, dense, b, h, row, block, octave, rows_live)
                    ):
                        inside, is_wide = False, leave_int16(octave, real)
                    if options.has_slope:
                        for i in range(real):
                            octave[i] += (base[i] >> 8) if octave[i] != UNSEEN else I(0)
                blanks = not inside or is_wide or dropped
                if is_wide:
                    inside = inside and called.address != 0
                    overflowed = wide_scores(tile, kv, block, wide, changes, called, x, state)
                grow_rows(octave, real, m, l, scale, scale_bits, state.o)
                weigh(x, real, block.columns, state.octave_q8, scale, p, scratch.sums, total)
                if blanks:
                    blank_rows(p, tile, block.columns, total)
                add_sums(total, real, unit, scale, l)
                add_values(p, kv, tile, block, inside, state)
            if streams:
                restore_rows(tile, state, scratch.kept, extended, extended_stop)
            store_rows(tile, state, n, row, v_scale[n_kv], out, m_out, l_out)

    @inline
    def work(
        _, q, cq, keys, values_packed, first_keys, v_scale, semantics, heads, s, counter, out, m_out, l_out
    ):  # fmt: skip
        """One worker."""
        lanes = vector_lanes()
        stride, unit_columns = (q.shape[2] + step - 1) // step * step, columns_unit * lanes
        width = (out.shape[2] + unit_columns - 1) // unit_columns * unit_columns
        begin()
        scratch = Scratch(
            zeros((block_q, stride), operand, "INT8 query tile"),
            uncleared((block_q, KEY_BLOCK), np.int16, "INT8 scores"),
            uncleared((block_q, KEY_BLOCK), weight, "INT8 weights"),
            uncleared((block_q, KEY_BLOCK), np.float32, "INT8 wide scores"),
            uncleared((block_q, width), np.float32, "INT8 output tile"),
            uncleared((block_q * lanes,), np.int32, "INT8 sums of weights"),
            uncleared((block_q,), np.int16, "INT8 octaves"),
            uncleared((5, block_q), np.float32, "INT8 float state of rows"),
            uncleared((5, block_q), np.int32, "INT8 integer state of rows"),
            uncleared((2, block_q), np.uint8, "INT8 flags of rows"),
            uncleared((3, block_q), np.int64, "INT8 bounds of rows"),
            uncleared((block_q * KEY_BLOCK,), np.uint8, "INT8 last part of the mask"),
            uncleared(turns_shape, np.int64, "INT8 turns of the AMX stream"),
            uncleared((stream_size + stream_row * width,), np.uint8, "INT8 scratch of the stream"),
            Kept(
                uncleared((FIRST_KEYS,), np.int32, "INT8 kept octaves"),
                uncleared((FIRST_KEYS,), np.float32, "INT8 kept sums"),
                uncleared((FIRST_KEYS,), np.int64, "INT8 kept bounds"),
                uncleared((FIRST_KEYS,), np.uint8, "INT8 kept flags"),
                uncleared((FIRST_KEYS, width if streams else 0), np.float32, "INT8 kept rows"),
            ),
        )
        run_tiles(
            q,
            cq,
            keys,
            values_packed,
            first_keys,
            v_scale,
            semantics,
            heads,
            s,
            counter,
            out,
            m_out,
            l_out,
            scratch,
        )
        end()

    @separate(no_cpython_wrapper=False)
    def attend(
        q, cq, keys, values_packed, first_keys, v_scale, semantics, heads, s, counter, out, m_out, l_out
    ):  # fmt: skip
        """All query tiles of all heads.

        q (N, L, D) int8; cq (N, L) float32; keys PackedKeys of Nkv heads; values_packed (Nkv, ...);
        first_keys FirstKeys; v_scale (Nkv, Dv) float32; heads = (H, Hkv, workers, address of the AMX stream or 0); s
        keys; counter (1,) int64 zero; out (N, L, Dv), l_out (N, L) float32; m_out (N, L) int32.
        """
        over_tasks(
            work,
            heads[2],
            (
                q,
                cq,
                keys,
                values_packed,
                first_keys,
                v_scale,
                semantics,
                heads,
                s,
                counter,
                out,
                m_out,
                l_out,
            ),
        )

    return attend
