"""Decode's bfloat16 products on the matrix tiles of AMX, for caches whose values are in their keys.

Such a cache stores keys as pairs of channels, [panel][pair][key in panel][2]: AMX's right operand,
as prefill packs it (`floats.float_packing`), and values made from them are [chunk][pair of
keys][column in chunk][2] likewise. So these are prefill's register tiles, 32 query rows at a time.
Query and weights are rounded to bfloat16; sums are float32.
"""

from __future__ import annotations

import functools

from ...jit.compiler import inlined
from ...tiling import KEY_BLOCK
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_tiles import score_tile, value_tile
from .tiles import Tile

NAME = "amx_bf16"
ROWS = FLOAT_ISAS[NAME].rows
STEP = FLOAT_ISAS[NAME].step  # channels, and keys, of a product
LANES = FLOAT_ISAS[NAME].lanes
SUMS_ROW = ROWS + 1  # rows of `work`: scores, the state, vectors of sums, weights as operands
WEIGHTS_ROW = SUMS_ROW + ROWS * LANES // KEY_BLOCK
SCRATCH_ROWS = WEIGHTS_ROW + ROWS // 2


@functools.cache
def make_matrix_block(tile: Tile):
    """The two products of one key block, as `products.make_block` has them."""
    panel, lanes = tile.panel, tile.lanes
    before = tile.scales * tile.size
    score = score_tile(NAME, panel // lanes)
    value, value_one = value_tile(NAME, panel // lanes), value_tile(NAME, 1)

    @inlined
    def block_scores(place, n, q, words, work):
        """work[:, :n] = scores of the first n keys of the block at `place`, without their factor."""
        keys = place + before
        for j in range(0, n, panel):
            score(q, 0, 2 * words, keys + 4 * words * j, 0, words, work, j, KEY_BLOCK)

    @inlined
    def block_values(place, n, words, work, o, columns):
        """o += P.V of the first n keys of the block at `place`; weights beyond them are 0."""
        values = place + before + KEY_BLOCK * words * 4
        weights = work + WEIGHTS_ROW * KEY_BLOCK * 4
        pairs = (n + STEP - 1) // STEP * (STEP // 2)
        whole = columns // panel * panel
        for c in range(0, whole, panel):
            at = values + 2 * KEY_BLOCK * c
            value(weights, 0, KEY_BLOCK, at, 0, 2 * panel, pairs, o, c, columns)
        width = columns - whole
        for c in range(whole, columns, lanes):
            at = values + 2 * KEY_BLOCK * whole + 4 * (c - whole)
            value_one(weights, 0, KEY_BLOCK, at, 0, 2 * width, pairs, o, c, columns)

    return block_scores, block_values
