"""The two products of one key block: scores Q.K^T, and sums of weights times values."""

from __future__ import annotations

import functools

from ...jit.compiler import inlined
from ...tiling import KEY_BLOCK
from . import matrix_tiles
from .register_tiles import score_tile, value_tile
from .tiles import Tile


@functools.cache
def make_block(tile: Tile, rows: int):
    """The two products of one key block, block_scores and block_values.

    They take addresses, see `score_tile` and `value_tile`.
    """
    score = score_tile(tile, rows)
    nv = tile.width(rows)
    value = value_tile(tile, rows, nv)
    value_one = value_tile(tile, rows, 1)
    lanes = tile.lanes
    panel = tile.panel
    group = tile.group
    size = tile.size
    scales = tile.scales
    packed = tile.packed
    pace = group * packed  # keys of an iteration of P.V's loop
    span = nv * lanes

    @inlined
    def block_scores(place, n, q, words, work):
        """work[:, :n] = scores of the first n keys of the block at `place`."""
        keys = place + scales * size
        for j in range(0, n, span):
            score(
                q,
                words,
                keys + (j // panel * panel * words // packed + j % panel) * group * size,
                place,
                j,
                work,
            )

    @inlined
    def block_values(place, n, words, work, o, columns):
        """o += P.V of the first n keys of the block at `place`."""
        values = place + (scales + KEY_BLOCK * words * group // packed) * size
        steps = (n + pace - 1) // pace * packed
        for c in range(0, columns, panel):
            width = min(panel, columns - c)
            x = 0
            while x + span <= width:
                value(
                    work,
                    values + (c * KEY_BLOCK // packed + x * group) * size,
                    width * group,
                    steps,
                    o,
                    c + x,
                    columns,
                )
                x += span
            while x < width:
                value_one(
                    work,
                    values + (c * KEY_BLOCK // packed + x * group) * size,
                    width * group,
                    steps,
                    o,
                    c + x,
                    columns,
                )
                x += lanes

    return block_scores, block_values


@functools.cache
def make_matrix_block(tile: Tile, rows: int):
    """`make_block` on the matrix tiles; a block's memory is there whole, whatever `n` is."""
    score = matrix_tiles.matrix_scores(tile, rows)
    value_two = matrix_tiles.matrix_values(tile, rows, 8)
    value = matrix_tiles.matrix_values(tile, rows, 4)
    value_one = matrix_tiles.matrix_values(tile, rows, 1)
    panel, lanes, scales = tile.panel, tile.lanes, tile.scales
    packed = tile.packed

    @inlined
    def block_scores(place, n, q, words, work):
        """work[:, :n] = scores of the first n keys of the block at `place`."""
        score(q, words, place + scales, place, n, work)

    @inlined
    def block_values(place, n, words, work, o, columns):
        """o += P.V of the block at `place`; weights beyond the first n keys are 0."""
        values = place + scales + KEY_BLOCK * words * 4 // packed
        whole = columns // panel * panel
        pairs = columns // (2 * panel) * 2 * panel
        for c in range(0, pairs, 2 * panel):
            value_two(work, values + c * KEY_BLOCK // packed, panel * 4, o, c, columns)
        for c in range(pairs, whole, panel):
            value(work, values + c * KEY_BLOCK // packed, panel * 4, o, c, columns)
        for c in range(whole, columns, lanes):
            base = values + whole * KEY_BLOCK // packed + (c - whole) * 4
            value_one(work, base, (columns - whole) * 4, o, c, columns)

    return block_scores, block_values
