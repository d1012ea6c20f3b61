"""Masks, biases and score functions on the rows of a transposed score tile: a row is one key."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, inlined, own
from ...numerics.fixedpoint import LN2, LOG2E
from ..floats import float_rows
from ..floats.float_isas import FLOAT_ISAS
from ..isa.operands import Packed, Rows
from ..isa.score_calls import Corner, Function, batch_of, call_slopes
from .operands import QUERIES

F = np.float32


class EdgeRows(NamedTuple):
    """Jitted functions of one instruction set.

    visible(options, b, key, s) : the first query that attends to a key, and the one after the last
    call_functions(options, sizes, head, key, tile, x, slope) : scores x of all keys of a tile as the
        functions leave them, and their slopes; only of keys and queries that exist
    change(options, head, key, tile, bounds, x, slope, mask, bias, at, called) : scores x[at:] of one key
        changed in the field's order, after functions if `called`, -inf beyond `bounds`; slope[at:]
        takes up that of softcap; mask and bias are the tile's, like x
    """

    visible: Any
    call_functions: Any
    change: Any


@own
def softcap_slope(x, cap):
    """What a capped score x changes by where the score does by 1."""
    t = F(x / cap)
    return F(1) - t * t


@functools.cache
def make_edge_rows(name: str) -> EdgeRows:
    """The functions of one instruction set."""
    lanes = FLOAT_ISAS[name].lanes
    softcap = float_rows.row_softcap(name)
    alibi = float_rows.row_alibi(name)
    add_bias = float_rows.row_bias(name)
    softcap_seen = float_rows.row_softcap(name, hidden=True)
    apply_mask = float_rows.row_mask(name)
    keep_span = float_rows.row_span(name)

    @bare
    def visible(options, b, key, s):
        if key >= min(s, options.key_lengths[b]):
            return 0, 0
        on_diagonal = key - options.diagonal[b]
        return max(0, on_diagonal - options.right), max(0, on_diagonal + options.left + 1)

    @inlined
    def call_functions(options, sizes, head, key, tile, x, slope):
        functions = options.functions
        first, i = key + tile.first, tile.query
        rows = min(sizes.keys, key + tile.stop) - first
        count = min(tile.columns, sizes.length - i)
        if rows > 0 and count > 0:
            function, at = Function(functions.masked, functions.masked_frame), tile.first * QUERIES
            corner = Corner(batch_of(functions, head.b), head.h, i, first)
            scores, slopes = Rows(x, at, QUERIES), Packed(slope, at)
            call_slopes(function, scores, slopes, rows, count, corner, F(LN2), F(LOG2E))

    @inlined
    def change(options, head, key, tile, bounds, x, slope, mask, bias, at, called):
        count, cap = tile.columns // lanes, options.softcap
        if cap > F(0):
            if called:
                softcap_seen(x, at, count, cap)
            else:
                softcap(x, at, count, cap)
            for c in range(at, at + tile.columns):
                factor = softcap_slope(x[c], cap)
                slope[c] = slope[c] * factor if called else factor
        if options.slopes.size > 0:
            slope_of_head = options.slopes[head.b, head.h]
            alibi(x, at, count, slope_of_head, key - options.diagonal[head.b] - tile.query)
        if options.has_bias:
            add_bias(x, at, count, bias, at)
        if options.has_mask:
            apply_mask(x, at, count, mask, at)
        first, stop = bounds
        inner = stop // lanes * lanes  # the columns of the vectors before the last one
        if first > 0:
            keep_span(x, at, (first + lanes - 1) // lanes, first, tile.columns)
        keep_span(x, at + inner, count - inner // lanes, 0, stop - inner)

    return EdgeRows(visible, call_functions, change)
