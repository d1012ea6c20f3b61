"""From scores to weights, for the rows of one register tile: options, softmax, functions of the user."""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inlined
from ...numerics.fixedpoint import LN2, LOG2E
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, batch_of, call_tile, full_run
from ..semantics import row_of, step_of
from . import float_rows
from .float_exp2 import FLOOR, GROWTH
from .float_isas import FLOAT_ISAS

F = np.float32
HIDDEN = F(-np.inf)
# From so many octaves on a row's scores are multiplied by their factor before they become weights.
# There a rounded product, as the maximum is one, is whole octaves away from the exact one inside a
# multiply-add, and the weight of the largest score would be 0 or infinite instead of 1.
COARSE = F(2.0**24)


@functools.cache
def make_group_weights(name: str, key_block: int):
    """group_weights(semantics, dense, tile, group, c, state), with register tiles of `name`."""
    isa = FLOAT_ISAS[name]
    lanes, unit = isa.lanes, isa.unit
    apart = key_block + isa.spare  # elements from row to row of scores and weights
    operand = np.float32 if isa.group == 1 else np.uint16
    top_of = float_rows.row_max(name)
    exceeds = float_rows.row_exceeds(name)
    weights = float_rows.row_weights(name)
    scale = float_rows.row_scale(name)
    softcap = float_rows.row_softcap(name)
    softcap_seen = float_rows.row_softcap(name, hidden=True)
    alibi = float_rows.row_alibi(name)
    add_bias = float_rows.row_bias(name)
    apply_mask = float_rows.row_mask(name)
    keep_span = float_rows.row_span(name)

    @inlined
    def grow_row(state, i, at, count, factor):
        """Raise the maximum of row i to that of its scores x[at:] * factor, and rescale its sums.

        The maximum is in octaves (units of log2), as the exponent of the weights is; `factor` takes
        scores there. A NaN beside hidden scores only becomes the maximum.
        """
        x, m = state.x, state.m
        top = top_of(x, at, count)
        if top == HIDDEN:
            for j in range(at, at + count * lanes):
                if x[j] != x[j]:
                    top = F(np.nan)
        top = F(top * factor)
        if m[i] != HIDDEN:
            below, row, sums = F(m[i] - top), state.o[i], state.l[i]
            shrink = F(0) if below < F(FLOOR) else F(np.exp2(below))
            for t in range(row.size):
                row[t] = row[t] * shrink
            for t in range(lanes):
                sums[t] = sums[t] * shrink
        m[i] = top

    @inlined
    def weigh_row(state, i, at, count, factor):
        """Scores x[at:] of row i to weights p = 2**(x * factor - maximum), and their sum to l.

        factor > 0 : what a score is multiplied by to be in octaves; 1 where options have done so
        """
        x, m = state.x, state.m
        if m[i] == HIDDEN or exceeds(x, at, count, factor, F(m[i] + GROWTH)):
            grow_row(state, i, at, count, factor)
            if not abs(m[i]) < COARSE:
                scale(x, at, count, factor)
                factor = F(1)
        if m[i] == HIDDEN:
            for j in range(at, at + count * lanes):
                state.p[j] = operand(0)
        else:
            weights(x, at, count, factor, m[i], state.p, at, state.l, i * lanes)

    @inlined
    def edge_rows(semantics, dense, tile, group, c, state):
        """Weights of a group's rows that options change or that attend to a part of its keys.

        Softcap, ALiBi, bias and mask in the field's order. What the last vector of a row takes of the
        next row is hidden afterwards.
        """
        first = group.first
        n = group.stop - first
        count, whole, rest = (n + unit - 1) // unit * (unit // lanes), n // lanes, n % lanes
        some = (n + lanes - 1) // lanes
        x, b, h, row = state.x, tile.b, tile.h, tile.row
        cap, slope = semantics.softcap, F(0)
        if semantics.slopes.size > 0:
            slope = semantics.slopes[b, h]
        bias, bias_end, mask, mask_end = dense.bias, dense.bias_end, dense.mask, dense.mask_end
        bias_at = row_of(semantics.bias, b, h, row + group.g) + first
        mask_at = row_of(semantics.mask, b, h, row + group.g) + first
        bias_step, mask_step = step_of(semantics.bias), step_of(semantics.mask)
        centre = row + semantics.diagonal[b] - first
        early = cap > F(0) or slope != F(0) or semantics.has_bias or not c > F(0)
        for i in range(group.g, group.g + group.rows):
            at = i * apart + first - group.block
            tail, end = at + whole * lanes, at + count * lanes
            seen, seen_stop = max(state.lo[i] - first, 0), min(state.hi[i], group.stop) - first
            if seen_stop > seen:
                factor = c
                if early:
                    scale(x, at, count, c)
                    factor = F(1)
                if cap > F(0):
                    if semantics.functions.masked != 0:
                        softcap_seen(x, at, some, cap)
                    else:
                        softcap(x, at, some, cap)
                if slope != F(0):
                    alibi(x, at, some, slope, centre + i)
                if semantics.has_bias:
                    fits = bias_at + some * lanes <= bias.size
                    add_bias(x, at, some if fits else whole, bias, bias_at)
                    if not fits:
                        for j in range(rest):
                            bias_end[j] = bias[bias_at + whole * lanes + j]
                        add_bias(x, tail, 1, bias_end, 0)
                if semantics.has_mask:
                    fits = mask_at + some * lanes <= mask.size
                    apply_mask(x, at, some if fits else whole, mask, mask_at)
                    if not fits:
                        for j in range(rest):
                            mask_end[j] = mask[mask_at + whole * lanes + j]
                        apply_mask(x, tail, 1, mask_end, 0)
                inner = seen_stop // lanes * lanes  # the columns of the vectors before the last one
                if seen > 0:
                    keep_span(x, at, (seen + lanes - 1) // lanes, seen, end - at)
                keep_span(x, at + inner, count - inner // lanes, 0, seen_stop - inner)
                weigh_row(state, i, at, count, factor)
            else:
                for j in range(at, end):
                    state.p[j] = operand(0)
            bias_at, mask_at = bias_at + bias_step, mask_at + mask_step

    @inlined
    def call_functions(semantics, tile, group, c, x):
        """The user's functions on a group's scores; the factor that they leave the scores with.

        A run of keys that all rows see is left to the function without the mask, if there is one.
        """
        functions, b, h = semantics.functions, tile.b, tile.h
        row, rows = tile.row + group.g, group.rows
        masked, unmasked = Function(functions.masked, functions.masked_frame), functions.unmasked
        batch, at = batch_of(functions, b), group.g * apart - group.block
        full, full_stop = full_run(functions, b, h, row, row + rows - 1, group.first, group.stop)
        scale, unit, factor = F(c * F(LN2)), F(LOG2E), F(1)
        if unmasked == 0 and c > F(0):  # the mask leaves the units of the scores as they are
            scale, unit, factor = F(1), F(1), c
        elif unmasked == 0:
            full = full_stop = group.first
        elif full < full_stop:
            alone, corner = (
                Function(unmasked, functions.unmasked_frame),
                Corner(batch, h, row, full),
            )
            call_tile(alone, Rows(x, at + full, apart), rows, full_stop - full, corner, scale, unit)
        for key, stop in ((group.first, full), (full_stop, group.stop)):
            if key < stop:
                corner = Corner(batch, h, row, key)
                call_tile(masked, Rows(x, at + key, apart), rows, stop - key, corner, scale, unit)
        return factor

    @inlined
    def group_weights(semantics, dense, tile, group, c, state):
        """Scores of a group to weights p, whose sums are added to l."""
        shared, shared_stop = 0, group.stop  # the keys that all rows of the group attend to
        for i in range(group.g, group.g + group.rows):
            shared, shared_stop = max(shared, state.lo[i]), min(shared_stop, state.hi[i])
        factor = c
        if semantics.functions.masked != 0:
            factor = call_functions(semantics, tile, group, c, state.x)
        partial = shared > group.first or shared_stop < group.stop
        changed = semantics.general or not factor > F(0)
        if changed or partial or (group.stop - group.first) % unit:
            edge_rows(semantics, dense, tile, group, factor, state)
        else:
            count = (group.stop - group.first) // lanes
            for i in range(group.g, group.g + group.rows):
                weigh_row(state, i, i * apart + group.first - group.block, count, factor)

    return group_weights
