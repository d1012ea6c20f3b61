"""What an integer cache's key blocks add to the sums of a tile of query rows: INT8, and INT4."""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inlined
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import LN2_Q8, LOG2E_Q8
from ...numerics.quantize_kernels import INFINITE
from ...tiling import KEY_BLOCK
from ..isa.score_calls import HIDDEN
from ..isa.vectors import address, apart, prefetch_line
from .append import quantize_row
from .changes import attends_to_bad, change_floats, hide_masked, row_options
from .functions import after_functions, call_functions, row_conversions, suffice
from .products import make_block, make_matrix_block
from .row_changes import make_change_row
from .slots import hide, sees_bad
from .softmax import octave_rows, shrink_rows, value_ratios, weigh_rows
from .task_data import UNSEEN
from .tiles import LOW_BITS, Tile

F = np.float32
I = np.int32
# Cache lines of the next keys and values that are prefetched before options change the scores of a
# row: the memory would be idle during that time. With 4 rows of 64 channels and 8192 keys on Intel's AMX a function that
# adds a constant costs a call 8 % instead of 24 %, a soft cap 18 % instead of 40 %. Into the second
# level only, the same lines save half as much.
LINES = 32
LARGEST_SCALE = F(2.0**100)  # of a query, as `numerics.scores.LIMIT`


@functools.cache
def make_integers(tile: Tile, rows: int, changed: bool):
    """(prepare, take, maximum of a row without keys) of integer storage: as `make_floats`."""
    block_scores, block_values = (make_matrix_block if tile.matrix else make_block)(tile, rows)
    ratios, octaves, shrink, weigh = (
        make(tile, rows) for make in (value_ratios, octave_rows, shrink_rows, weigh_rows)
    )
    to_floats, to_integers = row_conversions(tile)
    change_row = make_change_row(tile)
    ahead = tile.ahead
    scales, packed, size, group = tile.scales, tile.packed, tile.size, tile.group
    q_offset = tile.q_offset
    two_planes = tile.planes == 2 and packed == 1
    last = tile.query_planes - 1  # where a query that is not split goes; AMX takes a low plane last
    most = F(fx.QUERY_ONE if packed == 1 else fx.CODE_QUERY_ONE)
    shared = tile.shared
    word = {4: np.int8, 2: np.int16, 1: np.int32}[tile.group]
    half = I(1 << LOW_BITS - 1)

    @bare
    def prepare(q, c, words, line, codes, spoiled, r):
        """Quantise one query row into words; returns (first value of its sums, its scale)."""
        whole, out = codes[: q.size], words.view(word)
        s = quantize_row(q, line, whole, F(1), most)
        out[:] = 0
        if s != s:
            spoiled[r] = 1
            return I(0), F(0)
        total = I(0)
        for e in range(whole.size):
            x = whole[e]
            total = np.add(total, x)
            if two_planes:
                high = np.right_shift(np.add(x, half), I(LOW_BITS))
                out[0, e] = high
                out[1, e] = np.subtract(x, np.left_shift(high, I(LOW_BITS)))
            else:
                out[last, e] = x
        limited = max(
            min(F(s * c), LARGEST_SCALE), -LARGEST_SCALE
        )  # no product with an int32 is NaN
        return np.multiply(I(-q_offset), total), limited

    @inlined
    def score_block(place, n, q, words, work):
        """Scores of the first n keys; (whether a token is not finite, the unit of the weights)."""
        some_bad, v_max = ratios(place, n, work)
        block_scores(place, n, q, words, work)
        return some_bad, F(v_max * F(fx.VALUE_UNIT))

    @inlined
    def weigh_block(place, n, words, work, o, columns, unit):
        """From scores to sums."""
        if octaves(work):
            shrink(work, o, columns)
        weigh(work, unit)
        block_values(place, n, words, work, o, columns)

    @bare(forceinline=False)
    def take_whole(place, blocks, step, q, words, work, o, columns, values):
        """Take whole blocks, `step` bytes apart, that every row attends to.

        Returns whether a token is not finite.

        A function of its own, of nothing but addresses and sizes: they stay in registers.
        """
        apart()
        bad = False
        for _ in range(blocks):
            some_bad, unit = score_block(place, KEY_BLOCK, q, words, work)
            of_values = values if shared else place
            weigh_block(of_values, KEY_BLOCK, words, work, o, columns, unit)
            bad |= some_bad
            place += step
        return bad

    @inlined
    def take(blocks, query):
        """Add key blocks to the sums of the query rows."""
        words, columns, n = query.words.shape[2], query.o.shape[1], blocks.n
        place, work_at = address(blocks.data) + blocks.base, address(query.work)
        q_at, o_at = address(query.words), address(query.o)
        if blocks.inside and n == KEY_BLOCK:
            step, count, values = blocks.step, blocks.count, query.values
            if take_whole(place, count, step, q_at, words, work_at, o_at, columns, values):
                query.spoiled[: query.real] = 1
            return
        some_bad, unit = score_block(place, n, q_at, words, work_at)
        k_scale = blocks.data[blocks.base : blocks.base + n * 4].view(np.float32)
        for r in range(query.real):
            edges, row = query.edges[r], query.work[r]
            if some_bad and sees_bad(edges, blocks.first, k_scale):
                query.spoiled[r] = 1
            row[n:] = HIDDEN
            hide(edges, blocks.first, n, row, I(HIDDEN))
        of_values = query.values if shared else place
        weigh_block(of_values, n, words, work_at, o_at, columns, unit)

    @inlined
    def ask_for_next(place, words, r):
        """Prefetch row r's part of the cache lines behind the keys of a block."""
        if ahead > 0:
            following = place + (scales + KEY_BLOCK * words * group // packed) * size + ahead
            for line in range(r * LINES, (r + 1) * LINES):
                prefetch_line(following + 64 * line)

    @inlined
    def call_on_whole(place, first, query):
        """The functions on a whole block that every row attends to."""
        work = address(query.work)
        bad = call_functions(work, place, KEY_BLOCK, first, query, 1, LN2_Q8, LOG2E_Q8)
        if bad != 0:
            for r in range(query.real):
                query.spoiled[r] |= bad >> r & 1

    @inlined
    def takes_whole(blocks, query):
        """Whether `take_whole_changed` may take these blocks: functions or options, not both."""
        s, at = query.options, query.rows
        whole = blocks.n == KEY_BLOCK
        if s.function != 0:
            return whole and suffice(blocks, query)
        in_turn = at.length <= at.sinks + at.ring
        options = s.cap[0] > F(0) or s.slopes.size > 0
        return whole and blocks.inside and in_turn and s.mask.size == 0 and options

    @inlined
    def take_whole_changed(blocks, query):
        """`take_changed` of whole blocks whose scores functions change, or soft cap and ALiBi."""
        words, columns = query.words.shape[2], query.o.shape[1]
        place = address(blocks.data) + blocks.base
        q_at, work_at, o_at = address(query.words), address(query.work), address(query.o)
        s, at = query.options, query.rows
        for i in range(blocks.count):
            some_bad, unit = score_block(place, KEY_BLOCK, q_at, words, work_at)
            token = blocks.first + i * KEY_BLOCK
            for r in range(query.real):
                ask_for_next(place, words, r)
                if s.function == 0:
                    change_row(work_at, r, row_options(s, at, r), token)
                    if some_bad:
                        query.spoiled[r] = 1
            if s.function != 0:
                call_on_whole(place, token, query)
            of_values = query.values if shared else place
            weigh_block(of_values, KEY_BLOCK, words, work_at, o_at, columns, unit)
            place += blocks.step

    @inlined
    def change_any(r, n, first, k_scale, some_bad, query, inside):
        """Row r of a block with all that can happen to its scores, after the functions."""
        s, at, work_at = query.options, query.rows, address(query.work)
        edges, row = query.edges[r], query.work[r]
        x = row.view(np.float32)
        if s.function != 0:
            if after_functions(x[:n], first, query, r, inside) > INFINITE:
                query.spoiled[r] = 1
            x[n:] = F(-np.inf)
            to_integers(work_at, r)
            return
        if some_bad and attends_to_bad(edges, first, k_scale, s, at, r):
            query.spoiled[r] = 1
        if s.cap[0] > F(0) or s.slopes.size > 0:
            to_floats(work_at, r)
            change_floats(x[:n], first, at, row_options(s, at, r))
            to_integers(work_at, r)
        row[n:] = HIDDEN
        hide(edges, first, n, row, I(HIDDEN))
        hide_masked(row[:n], I(HIDDEN), first, s, at, r)

    @inlined
    def take_changed(blocks, query):
        """`take` with the options of `changes`, block by block."""
        words, columns, n = query.words.shape[2], query.o.shape[1], blocks.n
        q_at, work_at, o_at = address(query.words), address(query.work), address(query.o)
        if takes_whole(blocks, query):
            take_whole_changed(blocks, query)
            return
        for i in range(blocks.count):
            base, first = blocks.base + i * blocks.step, blocks.first + i * KEY_BLOCK
            place = address(blocks.data) + base
            some_bad, unit = score_block(place, n, q_at, words, work_at)
            k_scale = blocks.data[base : base + n * 4].view(np.float32)
            if query.options.function != 0:
                call_functions(work_at, place, n, first, query, 0, LN2_Q8, LOG2E_Q8)
            for r in range(query.real):
                ask_for_next(place, words, r)
                change_any(r, n, first, k_scale, some_bad, query, blocks.inside)
            of_values = query.values if shared else place
            weigh_block(of_values, n, words, work_at, o_at, columns, unit)

    return prepare, take_changed if changed else take, UNSEEN
