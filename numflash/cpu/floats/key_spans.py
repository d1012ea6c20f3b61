"""Which keys of a block a group of query rows computes: not those that none of its rows sees."""

from __future__ import annotations

import functools

from ...jit.compiler import inlined
from ..isa.score_calls import has_holes, trimmed
from ..semantics import row_of, step_of
from . import float_rows
from .float_isas import FLOAT_ISAS


@functools.cache
def make_group_spans(name: str, key_block: int):
    """group_spans(semantics, dense, state, tile, block, s), with register tiles of `name`."""
    isa = FLOAT_ISAS[name]
    lanes, panel, mr, step, unit = isa.lanes, isa.panel, isa.rows, isa.step, isa.unit
    found = float_rows.any_byte(name)

    @inlined
    def panel_seen(mask, at, step, rows, n):
        """Whether the dense mask lets any of the rows, from mask[at] on and `step` apart, attend to
        any of n keys.
        """
        for _ in range(rows):
            if found(mask, at, n // lanes):
                return True
            for j in range(at + n // lanes * lanes, at + n):
                if mask[j]:
                    return True
            at += step
        return False

    @inlined
    def panels_seen(semantics, dense, tile, g, rows, first, stop):
        """first .. stop without the panels at either end that the dense mask hides from all rows."""
        mask, step = dense.mask, step_of(semantics.mask)
        at = row_of(semantics.mask, tile.b, tile.h, tile.row + g)
        while first < stop:
            after = min(stop, first // panel * panel + panel)
            if panel_seen(mask, at + first, step, rows, after - first):
                break
            first = after
        while first < stop:
            before = max(first, (stop - 1) // panel * panel)
            if panel_seen(mask, at + before, step, rows, stop - before):
                break
            stop = before
        return first, stop

    @inlined
    def union(state, g, rows, s):
        """The keys that any of a group's rows attends to."""
        first, stop = s, 0
        for i in range(g, g + rows):
            if state.hi[i] > state.lo[i]:
                first, stop = min(first, state.lo[i]), max(stop, state.hi[i])
        return first, stop

    @inlined
    def group_spans(semantics, dense, state, tile, block, s):
        """The keys of a block that each group computes, into first, stop and skip of `state`.

        Register tiles multiply whole units of keys, so that `first` is rounded down. Of the keys
        before the first one that is seen, whole steps of the product with V are left out of that
        product: `skip`. A part of a step is in it, with weights of 0.
        """
        functions = semantics.functions
        for g in range(0, tile.real, mr):
            rows = min(mr, tile.real - g)
            seen, seen_stop = union(state, g, rows, s)
            first, stop = max(seen // unit * unit, block), min(seen_stop, block + key_block)
            if functions.states.size > 0 and first < stop:
                b, h, row, last = tile.b, tile.h, tile.row + g, tile.row + g + rows - 1
                if has_holes(functions, b, h, row, last):
                    first, stop = trimmed(functions, b, h, row, last, first, stop, unit)
            if semantics.has_mask:
                first, stop = panels_seen(semantics, dense, tile, g, rows, first, stop)
            state.first[g // mr] = first
            state.stop[g // mr] = stop
            state.skip[g // mr] = max(seen - first, 0) // step * step

    return group_spans
