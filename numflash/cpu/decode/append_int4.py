"""Appending tokens to an INT4 cache.

Their rows are rotated and rounded to codes of 4 bits, as `int4.quantize` defines it.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare
from ...numerics.fixedpoint import CODE_ONE, CODE_STEPS
from ...numerics.rotation import WHOLE, rotate_row
from .append import SCALE_LIMIT, make_writers, over_heads, quantize_row, slot_of, take_offset
from .tiles import Tile

F = np.float32
I = np.int32


@bare
def _code(x, steps):
    """The code of x, a whole number up to CODE_ONE; `steps` codes are the length of 65536."""
    code = np.add(np.right_shift(np.multiply(x, steps), I(16)), I(8))
    return min(max(code, I(0)), I(15))


@bare
def _fit(row, steps):
    """(row . numbers, numbers . numbers) of the numbers 2 c - 15 of a row's codes."""
    product, square = I(0), I(0)
    for e in range(row.size):
        n = np.subtract(np.multiply(_code(row[e], I(steps)), I(2)), I(15))
        product = np.add(product, np.multiply(row[e], n))
        square = np.add(square, np.multiply(n, n))
    return F(product), F(square)


@bare
def quantize_codes(x, moved, out):
    """A row x (D,) float32, rotated in place, as codes in the first D of `out` (int32).

    Returns its scale, 0 for a row of zeros, NaN (and any codes) where x is not finite. moved (D,)
    float32 is scratch; `out` gets zeros behind the row.
    """
    rotate_row(x, WHOLE)
    unit = quantize_row(x, moved, out, F(0), F(CODE_ONE))
    row = out[: x.size]
    best, gain, scale = I(CODE_STEPS[0]), F(-1), F(0)
    for steps in CODE_STEPS:
        product, square = _fit(row, steps)
        won = F(F(product * product) / square)
        if won > gain:
            best, gain, scale = I(steps), won, F(product / square)
    for e in range(row.size):
        row[e] = _code(row[e], best)
    return F(unit * scale)


@functools.cache
def make_append_int4(tile: Tile, parallel: bool):
    """append(key, value, counts, pages, table, lengths, sizes, offset, work), as for INT8.

    Rows are rotated and rounded to codes.
    """
    write_key, write_value, write_scales = make_writers(tile)
    unit = tile.unit

    @bare
    def append_head(key, value, count, pages, table, length, sizes, shift, work):
        sinks, ring, page_size, columns = sizes[0], sizes[1], sizes[2], sizes[3]
        d, dv = key.shape[1], value.shape[1]
        moved, rest = work[0, : max(d, dv)], work[1]
        k_row = work[2].view(np.int32)[: (d + unit - 1) // unit * unit]
        v_row = work[3].view(np.int32)[:dv]
        for i in range(count):
            slot = slot_of(length + i, sinks, ring)
            page, inner = pages[table[slot // page_size]], slot % page_size
            take_offset(key[i], shift, rest)
            k_scale = quantize_codes(rest[:d], moved, k_row)
            for e in range(dv):
                rest[e] = value[i, e]
            v_scale = quantize_codes(rest[:dv], moved, v_row)
            if v_scale != v_scale or k_scale != k_scale:
                k_scale, v_scale = F(np.nan), F(0)
                k_row[:], v_row[:] = 0, 0
            write_key(k_row, page, inner, columns, 0)
            write_value(v_row, page, inner, k_row.size, columns, 0)
            k_scale = min(k_scale, SCALE_LIMIT) if k_scale == k_scale else k_scale
            write_scales(k_scale, v_scale, page, inner, k_row.size, columns)

    return over_heads(append_head, parallel)
