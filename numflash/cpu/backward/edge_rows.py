"""Masks, biases and score functions on the rows of a transposed score tile: a row is one key."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import inline
from ..floats import float_rows
from ..floats.float_isas import FLOAT_ISAS, MR
from ..isa.score_calls import batch_of, call_slopes
from .operands import HIDDEN, QUERIES

F = np.float32
LN2 = np.log(2.0)
LOG2E = 1 / LN2
inlined = inline(forceinline=True)  # where options go in: a call would copy them all


class Dense(NamedTuple):
    """Mask and bias of `Options`, flat, and the slopes of the present key's scores."""

    mask: np.ndarray
    bias: np.ndarray
    slope: np.ndarray


class EdgeRows(NamedTuple):
    """Jitted functions of one instruction set.

    visible(options, b, key, s) : the first query that attends to a key, and the one after the last
    keys_seen(options, mask, head, key, tile) : near .. far of a tile without the keys at either
        end that the mask hides from all queries
    change(options, dense, head, key, tile, bounds, x, at) : scores x[at:] of one key changed in the
        field's order, -inf beyond `bounds`; dense.slope = the slope of softcap and score functions
    """

    visible: Any
    keys_seen: Any
    change: Any


@functools.cache
def make_edge_rows(name: str) -> EdgeRows:
    """The functions of one instruction set."""
    lanes = FLOAT_ISAS[name].lanes
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
        """Whether the mask lets any query of the tile attend to any of MR keys."""
        seen = False
        for r in range(key, key + MR):
            at = row_of(options.mask, head.b, head.h, tile.query, r)
            seen = seen or found(mask, at, tile.columns // lanes)
        return seen

    @inlined
    def keys_seen(options, mask, head, key, tile):
        near, far = tile.near, tile.far
        while near < far and not any_seen(options, mask, head, key + near, tile):
            near += MR
        while near < far and not any_seen(options, mask, head, key + far - MR, tile):
            far -= MR
        return near, far

    @inlined
    def call_user(options, slope, head, key, tile, x, at):
        """The user's functions on the scores of one key.

        A key or query that does not exist keeps slope 0.
        """
        functions = options.functions
        slope[: tile.columns] = F(0)
        length, s = options.sizes
        if key < s and tile.query < length:
            count = min(tile.columns, length - tile.query)
            user, frame = functions.masked, functions.masked_frame
            b, h, i = batch_of(functions, head.b), head.h, tile.query
            call_slopes(user, frame, x, at, slope, 0, 0, 1, count, b, h, i, key, F(LN2), F(LOG2E))

    @inlined
    def change(options, dense, head, key, tile, bounds, x, at):
        b, h, i = head.b, head.h, tile.query
        count, cap = tile.columns // lanes, options.softcap
        called = options.functions.masked != 0
        if called:
            call_user(options, dense.slope, head, key, tile, x, at)
        if cap > F(0):
            if called:
                softcap_seen(x, at, count, cap)
            else:
                softcap(x, at, count, cap)
            for c in range(tile.columns):
                t = F(x[at + c] / cap)
                factor = F(1) - t * t
                dense.slope[c] = dense.slope[c] * factor if called else factor
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

    return EdgeRows(visible, keys_seen, change)
