"""Blocks of keys that a dense mask, or a bias of -inf, hides from rows altogether."""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare
from ..floats import float_rows
from ..isa.isas import VECTOR_ISAS
from ..semantics import UNSEEN, row_of
from . import wide_rows
from .wide_scores import HIDDEN_WIDE

I = np.int32


@functools.cache
def make_hides(isa_name: str):
    """f(job, semantics, block, first, stop): whether mask or bias hide the block from all those of
    the tile's rows first .. stop that see some of it.
    """
    float_lanes = VECTOR_ISAS[isa_name].lanes
    any_bias = wide_rows.any_bias(float_lanes)
    any_byte = float_rows.any_byte(wide_rows.FLOATS[float_lanes])

    @bare
    def hides(job, semantics, block, first, stop):
        b, h, _, row = job.place
        dense, begin = job.dense, block.begin
        n = block.first + block.real - begin
        whole = n // float_lanes
        for i in range(first, stop):
            if job.tile.live[i]:
                seen = True
                if semantics.has_mask:
                    at = row_of(semantics.mask, b, h, row + i) + begin
                    seen = any_byte(dense.mask, at, whole)
                    for j in range(whole * float_lanes, n):
                        seen |= dense.mask[at + j] != 0
                if seen and semantics.has_bias:
                    at = row_of(semantics.bias, b, h, row + i) + begin
                    seen = any_bias(dense.bias, at, whole)
                    for j in range(whole * float_lanes, n):
                        seen |= dense.bias[at + j] != HIDDEN_WIDE
                if seen:
                    return False
        return True

    return hides


@functools.cache
def make_drop_hidden(isa_name: str):
    """f(job, semantics, block, lowest): mark rows as unseen where mask or bias hide the whole
    block; whether any is.

    Only rows with the octave `lowest`, that of hidden scores, can be such.
    """
    hides = make_hides(isa_name)

    @bare
    def drop_hidden(job, semantics, block, lowest):
        live, octave, found = job.tile.live, job.state.octave, False
        for i in range(job.tile.real):
            if live[i] and octave[i] == lowest and hides(job, semantics, block, i, i + 1):
                live[i], octave[i], found = 0, I(UNSEEN), True
        return found

    return drop_hidden
