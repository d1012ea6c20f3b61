"""A tile of a mask or bias, transposed like the scores of the tiled gradient: a row is one key."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, inlined
from ..floats.float_isas import FLOAT_ISAS
from ..isa.transpose import transpose
from ..isa.vectors import I8
from ..semantics import row_of, step_of
from .operands import HIDDEN, KEYS, QUERIES

UNSEEN = np.uint8(0)  # of a mask
BYTES = 16  # rows and columns of a square of a mask


class DenseTiles(NamedTuple):
    """Jitted functions of one instruction set. `at` is the batch entry and query head of a tile; of the
    mask and bias of `semantics` one is empty, or both.

    take_tile(semantics, at, key, tile, work) : what mask or bias holds for the tile in
        work.mask or work.bias, (KEYS, QUERIES) flat; keys behind the last one are hidden, queries
        behind the last one see what it sees
    keys_seen(semantics, tile, work) : first .. stop of the tile without the keys at either end that no
        query of it attends to
    """

    take_tile: Any
    keys_seen: Any


def _transposed_tile(square, side: int, hidden):
    """take(x, at, key, tile, out): a tile of x (B, H, L, S), whose first three sizes may be 1, by squares
    of `side` keys and queries, `square` of `transpose`.
    """

    @inlined
    def take(x, at, key, tile, out):
        flat, s, step = x.reshape(x.size), x.shape[3], step_of(x)
        start = row_of(x, at[0], at[1], tile.query) + key
        last = x.shape[2] - 1 - tile.query  # 0 or below where all rows are one, whose step is 0
        first, stop = tile.first // side * side, (tile.stop + side - 1) // side * side
        whole = first + max(0, min(stop, s - key) - first) // side * side
        for c in range(0, tile.columns, side):
            row = min(c, last)
            for r in range(first, whole, side):
                source, target = start + row * step + r, r * QUERIES + c
                square(flat, source, step, out, target, QUERIES, last - row)
        for r in range(whole, tile.stop):  # rows of x end within a square
            for c in range(tile.columns):
                there = flat[start + min(c, last) * step + r] if key + r < s else hidden
                out[r * QUERIES + c] = there

    return take


@functools.cache
def make_dense_tiles(name: str) -> DenseTiles:
    """The functions of one instruction set."""
    rows, side = FLOAT_ISAS[name].rows, FLOAT_ISAS[name].square
    assert KEYS % side == KEYS % BYTES == 0  # squares behind the last key of a tile have room
    bytes_ = transpose(BYTES, partial=True, element=I8)
    take_mask = _transposed_tile(bytes_, BYTES, UNSEEN)
    take_bias = _transposed_tile(transpose(side, partial=True), side, HIDDEN)

    @inlined
    def take_tile(semantics, at, key, tile, work):
        if semantics.has_mask:
            take_mask(semantics.mask, at, key, tile, work.mask)
        if semantics.has_bias:
            take_bias(semantics.bias, at, key, tile, work.bias)

    @bare
    def any_seen(x, r, columns, hidden):
        """Whether any of the keys of a register tile from r on is seen by any query."""
        seen = False
        for key in range(r, r + rows):
            row = x[key * QUERIES : key * QUERIES + columns]
            for c in range(columns):
                seen |= row[c] != hidden
        return seen

    @bare
    def span(x, first, stop, columns, hidden):
        while first < stop and not any_seen(x, first, columns, hidden):
            first += rows
        while first < stop and not any_seen(x, stop - rows, columns, hidden):
            stop -= rows
        return first, stop

    @inlined
    def keys_seen(semantics, tile, work):
        if semantics.has_mask:
            return span(work.mask, tile.first, tile.stop, tile.columns, UNSEEN)
        if semantics.has_bias:
            return span(work.bias, tile.first, tile.stop, tile.columns, HIDDEN)
        return tile.first, tile.stop

    return DenseTiles(take_tile, keys_seen)
