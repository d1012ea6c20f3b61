"""Masks, biases and score functions on the rows of a transposed score tile: a row is one key."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import inline, own
from ...numerics.fixedpoint import LN2, LOG2E
from ..floats import float_rows
from ..floats.float_isas import FLOAT_ISAS
from ..isa.operands import Packed, Rows
from ..isa.score_calls import Corner, Function, batch_of, call_slopes
from .operands import HIDDEN, QUERIES

F = np.float32
inlined = inline(forceinline=True)  # where options go in: a call would copy them all


class Dense(NamedTuple):
    """Mask and bias of `Options`, flat."""

    mask: np.ndarray
    bias: np.ndarray


class EdgeRows(NamedTuple):
    """Jitted functions of one instruction set.

    visible(options, b, key, s) : the first query that attends to a key, and the one after the last
    keys_seen(options, mask, head, key, tile) : first .. stop of a tile without the keys at either
        end that the mask hides from all queries
    call_functions(options, head, key, tile, x, slope) : scores x of all keys of a tile as the
        functions leave them, and their slopes; only of keys and queries that exist
    change(options, dense, head, key, tile, bounds, x, slope, at, called) : scores x[at:] of one key
        changed in the field's order, after functions if `called`, -inf beyond `bounds`; slope[at:]
        takes up that of softcap
    """

    visible: Any
    keys_seen: Any
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
    lanes, mr = FLOAT_ISAS[name].lanes, FLOAT_ISAS[name].rows
    softcap = float_rows.row_softcap(name)
    alibi = float_rows.row_alibi(name)
    add_bias = float_rows.row_bias(name)
    softcap_seen = float_rows.row_softcap(name, hidden=True)
    apply_mask = float_rows.row_mask(name)
    found = float_rows.any_byte(name)

    @inline
    def visible(options, b, key, s):
        if key >= min(s, options.key_lengths[b]):
            return 0, 0
        on_diagonal = key - options.diagonal[b]
        return max(0, on_diagonal - options.right), max(0, on_diagonal + options.left + 1)

    @inline
    def row_of(x, b, h, i, key):
        """Offset of a flat mask's or bias's values for a key and the queries from i on."""
        nb, nh, blocks, s, _ = x.shape
        head = min(b, nb - 1) * nh + min(h, nh - 1)
        return ((head * blocks + min(i // QUERIES, blocks - 1)) * s + min(key, s - 1)) * QUERIES

    @inlined
    def any_seen(options, mask, head, key, tile):
        """Whether the mask lets any query of the tile attend to any of `mr` keys."""
        seen = False
        for r in range(key, key + mr):
            at = row_of(options.mask, head.b, head.h, tile.query, r)
            seen = seen or found(mask, at, tile.columns // lanes)
        return seen

    @inlined
    def keys_seen(options, mask, head, key, tile):
        first, stop = tile.first, tile.stop
        while first < stop and not any_seen(options, mask, head, key + first, tile):
            first += mr
        while first < stop and not any_seen(options, mask, head, key + stop - mr, tile):
            stop -= mr
        return first, stop

    @inlined
    def call_functions(options, head, key, tile, x, slope):
        functions = options.functions
        length, s = options.sizes
        first, i = key + tile.first, tile.query
        rows, count = min(s, key + tile.stop) - first, min(tile.columns, length - i)
        if rows > 0 and count > 0:
            function, at = Function(functions.masked, functions.masked_frame), tile.first * QUERIES
            corner = Corner(batch_of(functions, head.b), head.h, i, first)
            scores, slopes = Rows(x, at, QUERIES), Packed(slope, at)
            call_slopes(function, scores, slopes, rows, count, corner, F(LN2), F(LOG2E))

    @inlined
    def change(options, dense, head, key, tile, bounds, x, slope, at, called):
        b, h, i = head.b, head.h, tile.query
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
            alibi(x, at, count, options.slopes[b, h], key - options.diagonal[b] - i)
        if dense.bias.size > 0:
            add_bias(x, at, count, dense.bias, row_of(options.bias, b, h, i, key))
        if dense.mask.size > 0:
            apply_mask(x, at, count, dense.mask, row_of(options.mask, b, h, i, key))
        for c in range(at, at + bounds[0]):
            x[c] = HIDDEN
        for c in range(at + bounds[1], at + tile.columns):
            x[c] = HIDDEN

    return EdgeRows(visible, keys_seen, call_functions, change)
