"""One tile of query rows against one block of keys.

What is known of both, and which scores each row may use.

A tile holds `real` rows of the problem, padded to `rows`: whole register tiles. Row i attends to
the keys lo[i] <= j < hi[i]; both bounds are non-decreasing, so the rows that see a key are
contiguous.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare
from ...jit.memory import array_at
from ...tiling import KEY_BLOCK
from ..isa.strided import row_at
from ..semantics import HIDDEN, UNSEEN
from .score_changes import Changes
from .softmax import HALF
from .softmax_vectors import result_row

F = np.float32
I = np.int32
FARTHEST = F(2.0**27)  # most that is taken off scores before they become int16: within fx.T_LIMIT
# octaves for which int16 scores are exact: above, the maximum saturated; below, hidden scores would
# have a weight
LOWEST = -110
HIGHEST = 127
MOST_OCTAVES = 2**15  # of `State.base`


class Tile(NamedTuple):
    """The query rows of one tile."""

    q: np.ndarray  # (block_q, channels) operands of the dot products
    # (block_q,) float32 factor of a row's scores; NaN where the query is not finite
    scale: np.ndarray
    # (block_q,) int64 first key that a row attends to, in the blocks: the first keys of the sequence
    # are in none, but with pv "bf16" and "fp32"
    lo: np.ndarray
    hi: np.ndarray  # (block_q,) int64 the key after the last one it attends to
    start: np.ndarray  # (block_q,) int64 first key that a row attends to
    live: np.ndarray  # (block_q,) uint8 whether a row attends to a key of the present block
    rows: int
    real: int
    first_keys: int  # the sequence's first keys, which are in no block


class State(NamedTuple):
    """The online softmax of a tile: m, l and o over the blocks so far.

    The rest is of the present block.
    """

    m: np.ndarray  # (block_q,) int32 running maximum, whole octaves
    l: np.ndarray  # (block_q,) float32 running sum of the weights
    o: np.ndarray  # (block_q, columns) float32 running output
    octave: np.ndarray  # (block_q,) int32 the block's own maximum in whole octaves, or UNSEEN
    top: np.ndarray  # (block_q,) int16 Q8.8 what its weights refer to, relative to `base`
    # (block_q,) int32 Q8.8, whole octaves: what is taken off a block's scores, so that int16 holds
    # them: of ALiBi a bound, of functions the octave of the block before
    base: np.ndarray
    own: np.ndarray  # (block_q,) int32 octave of wide scores
    total: np.ndarray  # (block_q,) int32 sum of the block's weights
    scale: np.ndarray  # (block_q,) float32 2**(top - m)
    spoiled: np.ndarray  # (block_q,) uint8 whether a row had a score that is NaN


class Span(NamedTuple):
    """Keys of a tile: some row attends to `first` to `stop`, every row to `shared` to
    `shared_stop`.
    """

    first: int
    stop: int
    shared: int
    shared_stop: int


class Block(NamedTuple):
    """A block of keys: `columns` of them from `first` on, of which `real` exist.

    Those in front of `begin` are the sequence's first keys and not in it. `inside` if every row
    attends to all others.
    """

    first: int
    columns: int
    real: int
    begin: int
    inside: bool


@bare
def key_span(tile, s):
    """The keys that some row of the tile attends to, and those that every row attends to."""
    first, stop, shared, shared_stop = s, 0, 0, s
    for i in range(tile.real):
        shared, shared_stop = max(shared, tile.lo[i]), min(shared_stop, tile.hi[i])
        if tile.hi[i] > tile.lo[i]:
            first, stop = min(first, tile.lo[i]), max(stop, tile.hi[i])
    return Span(first, stop, shared, shared_stop)


@bare
def block_at(span, first, s, first_count):
    """The block of keys from `first` on; the last one may be half as wide.

    first_count : the sequence's first keys, which are in no block
    """
    columns = HALF if span.stop - first <= HALF else KEY_BLOCK
    inside = span.shared <= max(first, first_count) and first + columns <= span.shared_stop
    real = min(columns, s - first)
    return Block(first, columns, real, min(max(first, first_count), first + real), inside)


@bare
def mark_live(tile, block):
    """Which rows see some key of the block."""
    lo, hi, stop = tile.lo, tile.hi, block.first + block.columns
    for i in range(tile.real):
        tile.live[i] = block.inside | ((lo[i] < stop) & (hi[i] > block.first) & (hi[i] > lo[i]))


@bare
def unit_range(tile, first, columns, unit_rows):
    """The rows that see some of `columns` keys from `first` on, in whole units of a register tile."""
    i, end = 0, tile.rows
    while i < end and tile.hi[min(i + unit_rows, tile.real) - 1] <= first:
        i += unit_rows
    while i < end and tile.lo[end - unit_rows] >= first + columns:
        end -= unit_rows
    return i, end


@bare
def hide_edges(x, tile, block):
    """Scores of keys that a row does not see: weight 0.

    Every score is looked at, in vectors of int16.
    """
    for i in range(tile.real):
        if tile.live[i]:
            row = x[i]
            first = np.int16(min(max(tile.lo[i] - block.first, 0), KEY_BLOCK))
            stop = np.int16(min(max(tile.hi[i] - block.first, 0), KEY_BLOCK))
            for j in range(block.columns):
                row[j] = row[j] if (np.int16(j) >= first) & (np.int16(j) < stop) else HIDDEN


@bare
def hide_first(x, tile, block):
    """Scores of the sequence's first keys: weight 0."""
    for i in range(tile.real):
        for j in range(block.begin - block.first):
            x[i, j] = HIDDEN


@bare
def unsee(tile, octave):
    """Rows that see nothing of the block have no octave in it."""
    for i in range(tile.real):
        octave[i] = octave[i] if tile.live[i] else I(UNSEEN)


@bare
def blank_rows(p, tile, total):
    """Rows that see nothing of the block have weights 0."""
    for i in range(tile.real):
        if not tile.live[i]:
            for j in range(p.shape[1]):
                p[i, j] = 0
            total[i] = I(0)


@bare
def copy_end(changes, block, end):
    """Bias and mask of the last keys, to where `end` has them.

    Vectors may read a whole block there.
    """
    first = block.first
    for i in range(changes.last + 1):
        if changes.has_bias:
            at = changes.bias_at + i * changes.bias_step + first
            to = end.bias_at + i * end.bias_step + first
            for j in range(block.real):
                end.bias[to + j] = changes.bias[at + j]
        if changes.has_mask:
            at = changes.mask_at + i * changes.mask_step + first
            to = end.mask_at + i * end.mask_step + first
            for j in range(block.real):
                end.mask[to + j] = changes.mask[at + j]


@bare
def lower_base(changes, block):
    """Lower the base of each row by what ALiBi takes off its nearest key of the block.

    In whole octaves.
    """
    last = block.first + block.columns - 1
    for i in range(changes.last + 1):
        away = max(block.first - changes.centre - i, changes.centre + i - last, 0)
        off = min(max(F(changes.numbers[1] * F(away)), F(0)), FARTHEST)
        changes.base[i] = np.negative(I(I(off) & I(-256)))


@bare
def padded_changes(changes, bias, mask, at):
    """The same options for the last keys, whose bias and mask `copy_end` puts into `bias` and
    `mask` at offset `at`.
    """
    return Changes(
        changes.has_cap,
        changes.has_slope,
        changes.has_bias,
        changes.has_mask,
        changes.shift,
        changes.numbers,
        changes.centre,
        changes.base,
        bias,
        at,
        KEY_BLOCK,
        mask,
        at,
        KEY_BLOCK,
        changes.last,
    )


@functools.cache
def make_store_rows(isa_name: str):
    """f(tile, state, place, v_scale, results): out = O / l * v_scale, and m and l of each row.

    A row without keys, whose O is 0, gives 0.
    """
    scale_row = result_row(isa_name)

    @bare
    def store_rows(tile, state, place, v_scale, results):
        n, row = place.n, place.row
        width, columns = results.out.d, state.o.shape[1]
        start = row_at(results.out, n, row)
        for i in range(tile.real):
            l = F(np.nan) if state.spoiled[i] else state.l[i]
            reciprocal = F(0) if l == F(0) else F(F(1) / l)
            out = array_at(start + i * results.out.row, (width,), F)
            scale_row(state.o, i * columns, v_scale, reciprocal, out, 0, width)
            results.m[n, row + i], results.l[n, row + i] = state.m[i], l

    return store_rows


@bare
def query_nonfinite(tile):
    """Whether some query row is not finite: its scale is NaN."""
    found = False
    for i in range(tile.real):
        found |= tile.scale[i] != tile.scale[i]
    return found
