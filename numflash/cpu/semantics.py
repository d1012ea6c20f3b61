"""What an attention problem does to the scores of one query row.

Which keys it attends to and how they are transformed.

Plain scalar loops, shared by the register-tile kernels and the portable one, in the order of the
field: scale, softcap, ALiBi, bias, mask. Scores are float32 in Q8.8 units here (256 per octave);
every operation rounds once, so that all kernels agree with `reference.transform` to the bit.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..interop.arrays import address
from ..jit.compiler import bare, inline, own
from ..jit.memory import array_at
from ..numerics import fixedpoint as fx

F = np.float32
I = np.int32
HIDDEN = np.int16(fx.MASKED)  # int16 score of a key that is not seen: weight 0
UNSEEN = fx.MIN_OCTAVE  # octave of a row that attends to no key of a block


class ScoreTiles(NamedTuple):
    """The functions of a problem; an address is 0 where no function is given.

    unmasked, masked : address and frame of the functions for blocks that all rows see, and for
        others
    states : (B or 1, H or 1, blocks of L, blocks of S) uint8, empty where every block is masked
    spans : (B or 1, H or 1, blocks of L, 5) int64 first key and end of the blocks that are not
        empty, then of the longest run of full ones, and whether there are empty ones between
    rows, keys : of a block
    batch : (B,) int64 the batch entry that functions see for each of the problem's; empty if the
        same
    """

    unmasked: int
    unmasked_frame: int
    masked: int
    masked_frame: int
    states: np.ndarray
    spans: np.ndarray
    rows: int
    keys: int
    batch: np.ndarray


NO_STATES = np.zeros((0, 0, 0, 0), np.uint8)
NO_SPANS = np.zeros((0, 0, 0, 0), np.int64)
NO_TILES = ScoreTiles(0, 0, 0, 0, NO_STATES, NO_SPANS, 1, 1, np.zeros(0, np.int64))


@inline
def no_tiles(address):
    """`NO_TILES` in compiled code, its empty arrays at an address."""
    return ScoreTiles(
        np.int64(0),
        np.int64(0),
        np.int64(0),
        np.int64(0),
        array_at(address, (0, 0, 0, 0), np.uint8),
        array_at(address, (0, 0, 0, 0), np.int64),
        np.int64(1),
        np.int64(1),
        array_at(address, (0,), np.int64),
    )


class Semantics(NamedTuple):
    """Which keys a row attends to and how its scores change.

    Arrays are empty where an option is off; INT8's shift and slopes then hold one 0.

    left, right, diagonal, key_lengths : as in `validation.Problem`, with NO_LIMIT for None
    general : masks, bias, softcap or slopes are to be looked at
    extreme : INT8 scores may be too large to be rounded to int16 at once
    functions : score and mask functions, called before everything else happens to the scores
    """

    left: int
    right: int
    diagonal: np.ndarray  # (B,) int64
    key_lengths: np.ndarray  # (B,) int64
    general: bool
    mask: np.ndarray  # (B, H, L, S) uint8, contiguous; the first three sizes may be 1
    bias: np.ndarray  # the same in float32
    has_mask: bool
    has_bias: bool
    softcap: float  # float32, Q8.8 units (INT8; float kernels: log2), 0 = none
    # (B, H, L) float32, in units of the softcap: what smoothing took from each score
    shift: np.ndarray
    slopes: np.ndarray  # (B, H) float32, Q8.8 units (INT8; float kernels: log2)
    extreme: bool = False
    functions: ScoreTiles = NO_TILES


class OptionNumbers(NamedTuple):
    """`Semantics` as a compiled call reads it from an int64 array, in this order, without softcap.

    First come the `array_numbers`, which differ from one equal call to the next.
    """

    general: int
    mask_batch: int
    mask_heads: int
    mask_rows: int  # 0: no mask
    mask_keys: int
    bias_batch: int
    bias_heads: int
    bias_rows: int  # 0: no bias
    bias_keys: int
    slope_batch: int
    slope_heads: int
    diagonal: int  # from here on addresses
    key_lengths: int
    mask: int
    bias: int
    slopes: int
    left: int  # from here on what equal calls share
    right: int
    shift_batch: int
    shift_heads: int
    shift_rows: int
    batch: int
    unmasked: int  # from here on score and mask functions, see `ScoreTiles`
    unmasked_frame: int
    masked: int
    masked_frame: int
    states_batch: int
    states_heads: int
    states_rows: int
    states_keys: int
    spans_batch: int
    spans_heads: int
    spans_rows: int
    spans_ends: int
    tile_rows: int
    tile_keys: int
    mapped: int  # entries of `batch_map`
    states: int  # from here on addresses
    spans: int
    batch_map: int
    shift: int


OPTION_NUMBERS = len(OptionNumbers._fields)
ARRAY_NUMBERS = OptionNumbers._fields.index("left")


class KernelArrays(NamedTuple):
    """The fields of `Semantics` that masks, lengths and slopes decide."""

    general: bool
    diagonal: np.ndarray
    key_lengths: np.ndarray
    mask: np.ndarray
    bias: np.ndarray
    slopes: np.ndarray


def array_numbers(options: KernelArrays | Semantics) -> tuple[int, ...]:
    """Sizes and addresses of masks, lengths and slopes.

    The arrays are contiguous, and must stay alive while the numbers are used.
    """
    return (
        options.general,
        *options.mask.shape,
        *options.bias.shape,
        *options.slopes.shape,
        address(options.diagonal),
        address(options.key_lengths),
        address(options.mask),
        address(options.bias),
        address(options.slopes),
    )


def option_numbers(options: Semantics) -> tuple[int, ...]:
    """`OptionNumbers`, of arrays as of `array_numbers`."""
    functions = options.functions
    return (
        *array_numbers(options),
        options.left,
        options.right,
        *options.shift.shape,
        options.diagonal.size,
        *functions[:4],
        *functions.states.shape,
        *functions.spans.shape,
        functions.rows,
        functions.keys,
        functions.batch.size,
        address(functions.states),
        address(functions.spans),
        address(functions.batch),
        address(options.shift),
    )


@bare
def functions_at(o):
    """The `ScoreTiles` of `OptionNumbers`."""
    states = (o.states_batch, o.states_heads, o.states_rows, o.states_keys)
    spans = (o.spans_batch, o.spans_heads, o.spans_rows, o.spans_ends)
    return ScoreTiles(
        o.unmasked,
        o.unmasked_frame,
        o.masked,
        o.masked_frame,
        array_at(o.states, states, np.uint8),
        array_at(o.spans, spans, np.int64),
        o.tile_rows,
        o.tile_keys,
        array_at(o.batch_map, (o.mapped,), np.int64),
    )


@bare
def semantics_at(o, softcap, extreme):
    """The `Semantics` of `OptionNumbers`."""
    return Semantics(
        o.left,
        o.right,
        array_at(o.diagonal, (o.batch,), np.int64),
        array_at(o.key_lengths, (o.batch,), np.int64),
        o.general != 0 or extreme,
        array_at(o.mask, (o.mask_batch, o.mask_heads, o.mask_rows, o.mask_keys), np.uint8),
        array_at(o.bias, (o.bias_batch, o.bias_heads, o.bias_rows, o.bias_keys), np.float32),
        o.mask_rows != 0,
        o.bias_rows != 0,
        F(softcap),
        array_at(o.shift, (o.shift_batch, o.shift_heads, o.shift_rows), np.float32),
        array_at(o.slopes, (o.slope_batch, o.slope_heads), np.float32),
        extreme,
        functions_at(o),
    )


class Dense(NamedTuple):
    """A worker's flat views of dense mask and bias, and room for the last part of a row."""

    mask: np.ndarray
    bias: np.ndarray
    mask_end: np.ndarray
    bias_end: np.ndarray


softcap = inline(fx.softcap)


@own
def _keys_around(centre, left, right, count):
    """First visible key of a row and the key after the last one; the first `count` keys exist."""
    first, stop = max(0, centre - left), min(count, centre + right + 1)
    return first, max(first, stop)


@own
def row_range(semantics, b, i, s):
    """First visible key of row i and the key after the last one."""
    count = min(semantics.key_lengths[b], s)
    return _keys_around(i + semantics.diagonal[b], semantics.left, semantics.right, count)


@own
def row_ranges(semantics, b, i, s, firsts, stops):
    """`row_range` of row i and those after it, as many as `firsts` has.

    What all rows share is read once, in front of the loop, which LLVM then makes vectors of.
    """
    left, right, count = semantics.left, semantics.right, min(semantics.key_lengths[b], s)
    centre = i + semantics.diagonal[b]
    for r in range(firsts.size):
        firsts[r], stops[r] = _keys_around(centre + r, left, right, count)


@own
def seen_range(semantics, b, h, i, s):
    """`row_range` within the blocks of keys that are not empty for row i of head h."""
    first, stop = row_range(semantics, b, i, s)
    spans = semantics.functions.spans
    if spans.size > 0:
        nb, nh, blocks, _ = spans.shape
        b, h, block = min(b, nb - 1), min(h, nh - 1), min(i // semantics.functions.rows, blocks - 1)
        first, stop = max(first, spans[b, h, block, 0]), min(stop, spans[b, h, block, 1])
    return first, max(first, stop)


@own
def seen_ranges(semantics, b, h, i, s, firsts, stops):
    """`seen_range` of row i and those after it, as many as `firsts` has."""
    row_ranges(semantics, b, i, s, firsts, stops)
    if semantics.functions.spans.size > 0:
        for r in range(firsts.size):
            firsts[r], stops[r] = seen_range(semantics, b, h, i + r, s)
    for r in range(firsts.size):
        stops[r] = max(firsts[r], stops[r])


@own
def row_of(x, b, h, i):
    """Offset of a row in a (B, H, L, S) array whose first three sizes may be 1, flat."""
    nb, nh, length, s = x.shape
    return ((min(b, nb - 1) * nh + min(h, nh - 1)) * length + min(i, length - 1)) * s


@own
def step_of(x):
    """Elements from one row of a (B, H, L, S) array to the next, 0 where all rows are one."""
    return x.shape[3] if x.shape[2] > 1 else 0


@own
def transform_row(semantics, b, h, i, first, x):
    """Softcap, ALiBi, bias and mask on the float32 scores of one row from key `first` on, in the
    field's order.

    Scores come in Q8.8 units, with softcap in units of it.
    """
    if semantics.softcap > F(0):
        cap, shift = F(semantics.softcap), semantics.shift[b, h, i]
        for j in range(x.size):
            x[j] = softcap(F(x[j] + shift), cap)
    if semantics.slopes.size > 1 or semantics.slopes[0, 0] != F(0):
        slope, centre = semantics.slopes[b, h], i + semantics.diagonal[b] - first
        for j in range(x.size):
            x[j] = F(x[j] - F(slope * F(abs(centre - j))))
    if semantics.has_bias:
        at = row_of(semantics.bias, b, h, i) + first
        bias = semantics.bias.reshape(semantics.bias.size)[at : at + x.size]
        for j in range(x.size):
            changed = F(x[j] + F(bias[j] * fx.LOG2E_Q8))
            changed = fx.LOWEST if changed < fx.LOWEST else changed  # NaN stays
            x[j] = changed if bias[j] != F(-np.inf) else F(-np.inf)
    if semantics.has_mask:
        at = row_of(semantics.mask, b, h, i) + first
        mask = semantics.mask.reshape(semantics.mask.size)[at : at + x.size]
        for j in range(x.size):
            x[j] = x[j] if mask[j] else F(-np.inf)


@own
def below_octave(top):
    """`fixedpoint.below_octave` in selections, which become instructions on vectors of rows.

    `top` is a Q8.8 number of whole eighths of an octave, 0 or below: top >> 5 counts the eighths, since
    an octave is 256. Their three bits stand for a half, a quarter and an eighth of an octave, whose
    powers of two are multiplied: -96 is 3 eighths, 2**-(1/4) * 2**-(1/8).
    """
    n = -(top >> 5)
    half = fx.HALF_OCTAVE if n & 4 else F(1)
    quarter = fx.QUARTER_OCTAVE if n & 2 else F(1)
    return F(F(half * quarter) * (fx.EIGHTH_OCTAVE if n & 1 else F(1)))


@own
def narrow_row(x, out):
    """Q8.8 float32 scores to int16 relative to the row's own octave: (octave, the largest, any NaN).

    -inf is hidden. An octave is one unit of log2, 256 in Q8.8. The row's octave is the whole one at or
    above its largest score, so that what is stored is 0 or below and 2**(stored / 256) is at most 1.
    Scores of 700 and 300 (2**2.73 and 2**1.17): the octave is 3, `base` is 768, and -68 and -468 are
    stored. What lies more than 127 octaves below is hidden as well.
    """
    top, spoiled = F(-np.inf), False
    for j in range(x.size):
        spoiled |= x[j] != x[j]
        top = max(top, x[j])
    if top == F(-np.inf) or spoiled:
        out[: x.size] = HIDDEN
        return I(UNSEEN), I(0), spoiled
    largest = I(np.rint(min(max(top, -fx.T_LIMIT), fx.T_LIMIT)))
    octave = I(largest + I(255)) >> I(8)
    base = I(octave << I(8))
    for j in range(x.size):
        t = I(np.rint(min(max(x[j], -fx.T_LIMIT), fx.T_LIMIT)))
        t = max(I(t - base), I(HIDDEN))
        out[j] = HIDDEN if x[j] == F(-np.inf) else np.int16(t)
    return octave, I(largest - base), False
