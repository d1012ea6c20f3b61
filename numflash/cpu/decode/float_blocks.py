"""What a float cache's key blocks add to the sums of a tile of query rows."""

from __future__ import annotations

import functools

import numpy as np

from ...interop.halves import bfloat16_of
from ...jit.compiler import bare, inlined
from ...numerics.quantize_kernels import INFINITE, largest_bits
from ...tiling import KEY_BLOCK
from ..floats.float_exp2 import GROWTH
from ..floats.float_rows import row_exp, row_leaves, row_max, row_scale, row_total, row_weights
from ..isa.score_calls import HUGE
from ..isa.vectors import address
from . import matrix_floats
from .changes import attends_to_bad, change_floats, hide_masked, row_options
from .functions import LN2, LOG2E, after_functions, call_functions, no_nan, suffice
from .products import make_block
from .slots import coverage, hide, sees_bad
from .task_data import AGAIN, NOTHING, places_of
from .tiles import Tile

F = np.float32
I = np.int32
LOWEST = F(-(2.0**121))


@functools.cache
def make_floats(tile: Tile, rows: int, changed: bool):
    """(prepare, take, maximum of a row without keys) of float storage, for tiles of `rows` rows.

    prepare(q, c, words, line, codes, spoiled, r) puts a query row into the tile, take(blocks, query)
    adds key blocks to the sums; `changed`: options or functions may change the scores.
    """
    matrix = tile.matrix
    block_scores, block_values = (
        matrix_floats.make_matrix_block(tile) if matrix else make_block(tile, rows)
    )
    vectors = tile.float_vectors
    top_of, total_of = row_max(vectors), row_total(vectors)
    weights = row_exp(matrix_floats.NAME if matrix else vectors)
    multiply, leaves = row_scale(vectors), row_leaves(vectors)
    weigh = row_weights(matrix_floats.NAME if matrix else vectors)
    places = places_of(tile, rows)
    m_at, l_at, cq_at, sums_at = places.m, places.l, places.cq, places.sums
    most, weights_row = places.most, matrix_floats.WEIGHTS_ROW if matrix else 0
    lanes = tile.lanes
    count = KEY_BLOCK // tile.lanes
    scales = tile.scales
    shared = tile.shared

    @bare
    def prepare(q, c, words, line, codes, spoiled, r):
        """Copy one query row; its scale is c."""
        bits = q.view(np.int32)
        if matrix:
            halves = words.reshape(words.size).view(np.uint16)
            for e in range(bits.size):
                halves[e] = bfloat16_of(np.uint32(bits[e]))
            halves[bits.size :] = 0
        else:
            flat = words.reshape(words.size)
            for e in range(bits.size):
                flat[e] = bits[e]
            flat[bits.size :] = 0
        if largest_bits(q) >= INFINITE:
            spoiled[r] = 1
            words[:] = 0
        return I(0), c

    @inlined
    def no_weights(work, r):
        """All weights of row r are 0."""
        if matrix:
            first = r % 2 * (KEY_BLOCK // 2)
            work[weights_row + r // 2, first : first + KEY_BLOCK // 2] = 0
        else:
            work[r] = 0

    @inlined
    def grow(r, top, m, l, o, lane_sums):
        """The running maximum of row r becomes `top`: its sums shrink."""
        if shared:
            if m[r] != NOTHING:
                shrink, row = F(2.0) ** F(max(m[r] - top, F(-150))), o[r]
                for e in range(row.size):
                    row[e] = row[e] * shrink
                for e in range(lanes):
                    lane_sums[r * lanes + e] = lane_sums[r * lanes + e] * shrink
        elif l[r] != F(0):
            shrink, row = F(2.0) ** F(max(m[r] - top, F(-150))), o[r]
            for e in range(row.size):
                row[e] = row[e] * shrink
            l[r] = l[r] * shrink
        m[r] = top

    @bare
    def scale_row(blocks, query, first, r):
        """Scores of row r as they leave the products: scaled, and none beyond the last key."""
        n, t = blocks.n, query.work.view(np.float32)
        m, row = t[rows, m_at : m_at + most], t[r]
        if matrix:
            multiply(t, r * KEY_BLOCK, (n + lanes - 1) // lanes, t[rows, cq_at + r])
        seen = blocks.inside or coverage(query.edges[r], first, n)[0]
        if largest_bits(row[:n]) > HUGE and seen:
            m[r] = AGAIN
        if n < KEY_BLOCK:
            row[n:] = F(-np.inf)

    @inlined
    def follow_functions(blocks, query, first, r, found, m):
        """What is left to do to row r after the functions, which have `found` (`call_functions`)."""
        x = query.work.view(np.float32)[r, : blocks.n]
        bad, huge = (found >> r & 1) != 0, (found >> (32 + r) & 1) != 0
        if not suffice(blocks, query):
            largest = after_functions(x, first, query, r, blocks.inside)
            bad, huge = largest > INFINITE, largest > HUGE
        elif bad:
            no_nan(x)
        if bad:
            query.spoiled[r] = 1
        elif huge:
            m[r] = AGAIN

    @bare
    def soften_row(blocks, query, base, first, some_bad, found, r):
        """Scores of row r to weights, with all that can happen to them."""
        n, s, at = blocks.n, query.options, query.rows
        k_scale, t = blocks.data[base : base + scales].view(np.float32), query.work.view(np.float32)
        m, l = t[rows, m_at : m_at + most], t[rows, l_at : l_at + most]
        operands = address(query.work) + weights_row * KEY_BLOCK * 4
        sums = t[sums_at:].reshape(t[sums_at:].size)
        row, edges = t[r], query.edges[r]
        if changed and s.function != 0:
            follow_functions(blocks, query, first, r, found, m)
        elif changed:
            if some_bad and attends_to_bad(edges, first, k_scale[:n], s, at, r):
                query.spoiled[r] = 1
            change_floats(row[:n], first, at, row_options(s, at, r))
            hide_masked(row[:n], F(-np.inf), first, s, at, r)
        elif some_bad and sees_bad(edges, first, k_scale[:n]):
            query.spoiled[r] = 1
        if not blocks.inside:
            hide(edges, first, n, row, F(-np.inf))
        top = top_of(t, r * KEY_BLOCK, count)
        if top == F(-np.inf) or m[r] == AGAIN:
            no_weights(query.work, r)
            return
        if top > m[r] + GROWTH:
            grow(r, top, m, l, query.o, sums)
        if shared:
            weights(t, r * KEY_BLOCK, count, m[r], operands, r * KEY_BLOCK, sums, r * lanes)
            return
        sums[:lanes] = F(0)
        weights(t, r * KEY_BLOCK, count, m[r], operands, r * KEY_BLOCK, sums, 0)
        l[r] = F(l[r] + total_of(sums, 0))

    @inlined
    def take_block(blocks, query, base, first):
        """Add one key block, which begins at element `base` and at slot `first`."""
        n, words = blocks.n, query.words.shape[2]
        k_scale, t = blocks.data[base : base + scales].view(np.float32), query.work.view(np.float32)
        place, work_at = address(k_scale), address(t)
        m = t[rows, m_at : m_at + most]
        operands = work_at + weights_row * KEY_BLOCK * 4
        # before the products: memory is read in one straight line
        some_bad = largest_bits(k_scale[:n]) > INFINITE
        block_scores(place, n, address(query.words), words, work_at)
        quick = shared and not changed and blocks.inside and n == KEY_BLOCK and not some_bad
        lane_sums, found = work_at + sums_at * KEY_BLOCK * 4, 0
        if changed:
            for r in range(query.real):
                scale_row(blocks, query, first, r)
            if query.options.function != 0:
                found = call_functions(work_at, place, n, first, query, 0, LN2, LOG2E)
        for r in range(query.real):
            if quick:
                at_r, c = r * KEY_BLOCK, t[rows, cq_at + r] if matrix else F(1)
                if not leaves(work_at, at_r, count, c, LOWEST, F(m[r] + GROWTH)):
                    weigh(work_at, at_r, count, c, m[r], operands, at_r, lane_sums, r * lanes)
                    continue
            if not changed:
                scale_row(blocks, query, first, r)
            soften_row(blocks, query, base, first, some_bad, found, r)
        of_values = query.values if shared else place
        block_values(of_values, n, words, work_at, address(query.o), query.o.shape[1])

    @inlined
    def take(blocks, query):
        """Add key blocks to the sums of the query rows."""
        for i in range(blocks.count):
            base, first = blocks.base + i * blocks.step, blocks.first + i * KEY_BLOCK
            take_block(blocks, query, base, first)

    return prepare, take, NOTHING
