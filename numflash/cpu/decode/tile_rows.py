"""The query rows of one tile of a task: how they begin, and what they leave."""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inlined
from ...numerics.rotation import rotate_row
from ...tiling import KEY_BLOCK
from ..isa.vectors import address
from .changes import attends_to_some
from .float_blocks import make_floats
from .integer_blocks import make_integers
from .slots import coverage, row_edges
from .task_data import Query, places_of, rows_together
from .tiles import Tile

F = np.float32


@functools.cache
def make_tile_rows(tile: Tile, rows: int, changed: bool):
    """(buffers, begin, take, leave) of tiles of `rows` rows, see their docstrings.

    take(blocks, query) adds key blocks (`task_data.Blocks`) to the sums of the rows.
    """
    exact = tile.exact
    rotation = tile.rotation
    group = tile.group
    scales = tile.scales
    size = tile.size
    shared = tile.shared
    span = rows_together(tile, rows) // rows  # tiles of a task
    most, m_at, l_at, start_at, cq_at, sums_at = places_of(tile, rows)
    lanes, lane_sums = tile.lanes, shared and not exact  # a vector of sums for each row
    prepare, take, nothing = (make_integers if exact else make_floats)(tile, rows, changed)

    @inlined
    def buffers(s, w, t, at, real):
        """The rows of tile t of a task of worker w, as `begin` has left them."""
        n = w * span + t
        values = 0
        if shared:  # the address of a block whose V would be where the task's is
            channels = s.q.shape[3] * group
            values = address(s.sums[w, rows * span :]) - (scales + KEY_BLOCK * channels) * size
        o = s.sums[w, t * rows : (t + 1) * rows]
        return Query(s.q[n], s.work[n], s.edges[n], s.spoiled[n], o, real, at, s, values)

    @inlined
    def begin(q, c, w, t, s, at, window, real):
        """Prepare the rows of a task's tile in the buffers of worker w.

        These are the operands, the keys that each row attends to, and the empty state.
        """
        query = buffers(s, w, t, at, real)
        words, edges, spoiled, work, o = (
            query.words,
            query.edges,
            query.spoiled,
            query.work,
            query.o,
        )
        start, codes = work[rows, start_at : start_at + most], s.line[w, 1].view(np.int32)
        state = work[rows].view(np.float32)
        m, l = state[m_at : m_at + most], state[l_at : l_at + most]
        cq = state[cq_at : cq_at + most]
        o[:], m[:], l[:], spoiled[:] = F(0), nothing, F(0), 0
        if lane_sums:
            work[sums_at : sums_at + (rows * lanes + KEY_BLOCK - 1) // KEY_BLOCK] = 0
        for r in range(real, rows):
            words[r] = 0
            start[r], cq[r], work[r] = 0, F(0), 0
        for r in range(real):
            row = q[at.b, at.g, at.row + r]
            if rotation:
                rotated = s.line[w, 2]
                for e in range(row.size):
                    rotated[e] = row[e]
                rotate_row(rotated, rotation)
                row = rotated
            start[r], cq[r] = prepare(row, c, words[r], s.line[w, 0], codes, spoiled, r)
            position = at.length - at.queries + (at.row + r) % at.queries
            row_edges(position, window, at.sinks, at.ring, edges[r])
        return query

    @bare
    def attends(query, r, slots, total):
        """Whether row r attends to a token; functions and masks hide tokens that its edges do not."""
        if changed and query.options.function != 0:
            return total != F(0)
        if changed and query.options.mask.size > 0:
            return attends_to_some(query.edges[r], slots, query.options, query.rows, r)
        return coverage(query.edges[r], 0, slots)[0]

    @inlined
    def leave(query, s, task, slots):
        """The sums and the state of the rows become the task's."""
        state = query.work[rows].view(np.float32)
        m, l = state[m_at : m_at + most], state[l_at : l_at + most]
        if lane_sums:
            sums = query.work[sums_at:].view(np.float32).reshape(-1)
            for r in range(query.real):
                for e in range(lanes):
                    l[r] = F(l[r] + sums[r * lanes + e])
        for r in range(query.real):
            if query.spoiled[r] and attends(query, r, slots, l[r]):
                l[r] = F(np.nan)
            s.m[task, r], s.l[task, r] = m[r], l[r]
            own, part = query.o[r], s.o[task, r]
            for e in range(own.size):
                part[e] = own[e]

    return buffers, begin, take, leave
