"""Scores that int16 does not hold: float32, then rounded relative to each row's own octave.

The bits are those of `block_scores` where both apply.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS
from ..isa.operands import KeyRange, Queries
from ..semantics import UNSEEN
from . import wide_rows
from .blocks import score_block
from .function_scores import call_rows
from .rows import HIGHEST, LOWEST

F = np.float32
I = np.int32
HIDDEN_WIDE = F(-np.inf)  # float32 score of a key that is not seen


@bare
def leave_int16(octave, rows):
    """Whether int16 scores do not hold one of the rows."""
    found = I(0)
    for i in range(rows):
        found |= I((octave[i] > HIGHEST) | ((octave[i] < LOWEST) & (octave[i] != UNSEEN)))
    return found != I(0)


@functools.cache
def make_wide_scores(isa_name: str, pv: str):
    """f(job, block, changes, called, scratch): int16 scores of a block by way of float32.

    Returns whether a score left the range of int16.
    """
    float_lanes = VECTOR_ISAS[isa_name].lanes
    float_scores = score_block(isa_name, True, True)
    row_top = wide_rows.row_top(float_lanes)
    row_narrow = wide_rows.row_narrow(float_lanes)
    step = fx.REFERENCE_STEP[pv]

    @bare
    def wide_scores(job, block, changes, called, scratch):
        tile, kv, state, wide = job.tile, job.kv, job.state, scratch.wide
        real = tile.real
        queries = Queries(tile.q, tile.q.shape[1], tile.scale, tile.rows)
        keys = KeyRange(kv.keys, kv.start, kv.scale, block.first, block.columns)
        float_scores(queries, keys, wide, changes)
        call_rows(called, wide.reshape(wide.size), real, block)
        narrow_wide(wide, tile, block, scratch.x, state)
        for i in range(real):
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
                    base = I(state.own[i] << I(8))
                    state.top[i] = I((top + I(step - 1)) & I(-step)) - base
                    row_narrow(wide, at, whole, base, x, at)

    return wide_scores
