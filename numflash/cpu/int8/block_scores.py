"""Scores of one block of keys, and the top and octave of each row: Q.K^T with everything that changes it.

int16 from registers where it holds them; where it does not, once more by `wide_scores`.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inlined
from ...numerics import fixedpoint as fx
from ..isa.isas import VECTOR_ISAS
from ..isa.operands import KeyRange, Queries
from ..semantics import UNSEEN
from .blocks import score_block
from .function_scores import drop_rows, follow_base, function_block
from .hidden_blocks import make_drop_hidden
from .rows import copy_end, hide_edges, hide_first, lower_base, unit_range, unsee
from .score_changes import changes_from
from .softmax import HALF, top_rows
from .wide_scores import leave_int16, make_wide_scores

I = np.int32
ALL_HIDDEN = I(int(fx.MASKED) >> 8)  # octave of hidden scores


@functools.cache
def make_narrow_scores(isa_name: str):
    """f(job, block, changes, x): scores of a block as int16, at its edges half a block at a time
    and only of rows that see some of it.
    """
    unit_rows = VECTOR_ISAS[isa_name].rows[-1]
    plain_scores = score_block(isa_name)
    changed_scores = score_block(isa_name, True)

    @bare
    def narrow_scores(job, block, changes, x):
        tile, kv = job.tile, job.kv
        stride = tile.q.shape[1]
        part = block.columns if block.inside else HALF
        for a in range(0, block.columns, part):
            first, i, stop = block.first + a, 0, tile.rows
            if not block.inside:
                i, stop = unit_range(tile, first, part, unit_rows)
            if i < stop:
                queries = Queries(tile.q[i:stop], stride, tile.scale[i:stop], stop - i)
                keys, to = KeyRange(kv.keys, kv.start, kv.scale, first, part), x[i:stop, a:]
                if job.changed:
                    here = changes_from(changes, i)
                    changed_scores(queries, keys, to, here)
                else:
                    plain_scores(queries, keys, to)
        if not block.inside:
            hide_edges(x, tile, block)
        elif block.first < block.begin:
            hide_first(x, tile, block)

    return narrow_scores


@functools.cache
def make_block_scores(isa_name: str, pv: str):
    """f(job, semantics, block, called, wide, scratch): scores x of a block, `state.octave` and `state.top`.

    wide : whether int16 will not hold them, as far as is known

    Returns (inside, unused, left): whether each row uses every key of the block, whether some row may
    use none of them, and whether scores left int16. A block goes one of these ways:

    * Its scores fit int16, the usual case: from registers to int16 (`narrow_scores`, with functions
      `function_block`). Where rows see a part of the block, the other scores are hidden afterwards.
    * Some row's scores look as if they did not fit, but all that is hidden from it is the whole block,
      by a function or a mask (`drop_unseen`): such rows become unseen, the other rows stay as they are.
    * They do not fit: computed once more, in float32 relative to each row's own top (`wide_scores`).
    """
    narrow_scores = make_narrow_scores(isa_name)
    wide_scores = make_wide_scores(isa_name, pv)
    function_scores = function_block(isa_name)
    drop_hidden = make_drop_hidden(isa_name)
    tops = top_rows(isa_name, pv)

    @inlined
    def changes_of(job, block):
        """The options of this block's scores."""
        changes = job.options
        if job.has_dense and block.real < block.columns:
            copy_end(changes, block, job.options_end)
            changes = job.options_end
        if changes.has_slope:
            lower_base(changes, block)
        return changes

    @inlined
    def drop_unseen(job, semantics, block, called):
        """Marks rows as unseen whose whole block is hidden: their octave looks as if int16 did not
        hold the scores. Returns whether a function, and whether mask or bias, hid one.
        """
        by_function, by_mask = False, False
        if called.address != 0:
            by_function = drop_rows(job.tile, job.state.octave, ALL_HIDDEN, I(UNSEEN))
        if semantics.general and leave_int16(job.state.octave, job.tile.real):
            by_mask = drop_hidden(job, semantics, block, ALL_HIDDEN)
        return by_function, by_mask

    @inlined
    def block_scores(job, semantics, block, called, wide, scratch):
        tile, state, x = job.tile, job.state, scratch.x
        octave, real = state.octave, tile.real
        changes = changes_of(job, block)
        inside, dropped, left = block.inside, False, False
        if not wide:
            if called.address != 0:
                function_scores(tile, job.kv, block, called, scratch.wide, x, state.base)
            else:
                narrow_scores(job, block, changes, x)
            tops(x, real, block.columns, octave, state.top)
            if not inside:
                unsee(tile, octave)
            wide = leave_int16(octave, real)
            if wide:
                dropped, masked = drop_unseen(job, semantics, block, called)
                inside = inside and not masked
                wide = leave_int16(octave, real)
            if changes.has_slope or called.address != 0:
                for i in range(real):
                    octave[i] += (state.base[i] >> 8) if octave[i] != UNSEEN else I(0)
        unused = not inside or wide or dropped
        if wide:
            inside = inside and called.address != 0
            left = wide_scores(job, block, changes, called, scratch)
        if called.address != 0:
            follow_base(octave, real, state.base)
        return inside, unused, left

    return block_scores
