"""The online softmax of the INT8 kernel on a whole block of rows.

Octaves, weights, and the running state (m, l, O).
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inline
from ...numerics.fixedpoint import FLOAT_VALUES
from ...tiling import KEY_BLOCK
from ..isa.isas import lanes_of, weight_planes
from .float_weights import row_weights_bf16, row_weights_float
from .softmax_vectors import block_octaves, block_totals, row_weights
from .wide_rows import floats_of

F = np.float32
I = np.int32
HALF = KEY_BLOCK // 2  # the last key block may be half as wide


@functools.cache
def octave_rows(isa_name: str):
    """f(x, rows, columns, octave, octave_q8).

    The block's own octave of every row, 8 rows at a time.
    """
    octaves_half = block_octaves(isa_name, HALF)
    octaves_whole = block_octaves(isa_name, KEY_BLOCK)

    @inline
    def run(x, rows, columns, octave, octave_q8):
        for i in range(0, rows, 8):
            if columns == HALF:
                octaves_half(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
            else:
                octaves_whole(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)

    return run


@functools.cache
def weigh_rows(isa_name: str, pv: str):
    """f(x, rows, columns, octave_q8, scale, p, sums, total).

    Weights P of every row, and their sums.

    P is integers relative to the block's octave, or with pv "bf16" and "fp32" floats times `scale`.
    """
    vector_lanes = lanes_of(isa_name)
    totals = block_totals(isa_name)
    width = weight_planes(isa_name, pv) * KEY_BLOCK
    if pv not in FLOAT_VALUES:
        half, whole = (row_weights(isa_name, keys, pv) for keys in (HALF, KEY_BLOCK))
    elif floats_of(isa_name, pv).group == 1:
        half, whole = (row_weights_float(isa_name, keys, pv) for keys in (HALF, KEY_BLOCK))
    else:
        half, whole = (row_weights_bf16(isa_name, keys) for keys in (HALF, KEY_BLOCK))

    if pv not in FLOAT_VALUES:

        @inline
        def weigh(i, lanes, x, columns, octave_q8, scale, p, sums):
            if columns == HALF:
                half(x, i * KEY_BLOCK, octave_q8, i, p, i * width, sums, i * lanes)
            else:
                whole(x, i * KEY_BLOCK, octave_q8, i, p, i * width, sums, i * lanes)
    else:

        @inline
        def weigh(i, lanes, x, columns, octave_q8, scale, p, sums):
            if columns == HALF:
                half(x, i * KEY_BLOCK, octave_q8, i, scale, p, i * KEY_BLOCK, sums, i * lanes)
            else:
                whole(x, i * KEY_BLOCK, octave_q8, i, scale, p, i * KEY_BLOCK, sums, i * lanes)

    @inline
    def run(x, rows, columns, octave_q8, scale, p, sums, total):
        lanes = vector_lanes()
        for i in range(rows):
            weigh(i, lanes, x, columns, octave_q8, scale, p, sums)
        for i in range(0, rows, 8):
            totals(sums, total, i)

    return run


@inline
def grow_rows(octave, rows, m, l, scale, scale_bits, o):
    """Running octave m = max(m, octave): O and l shift by whole octaves, exactly.

    `scale` becomes 2**(octave - m), by its bits.
    """
    grown = I(0)
    for i in range(rows):
        grown |= I(octave[i] > m[i])
    if grown:
        for i in range(rows):
            shift = min(np.subtract(octave[i], m[i]), I(126))  # np.subtract stays in int32
            scale_bits[i] = np.left_shift(np.subtract(I(127), shift), I(23))
        for i in range(rows):
            if octave[i] > m[i]:
                if l[i] != F(0):
                    shrink, row = scale[i], o[i]
                    for t in range(row.size):
                        row[t] = row[t] * shrink
                    l[i] = l[i] * shrink
                m[i] = octave[i]
    for i in range(rows):
        below = min(np.subtract(m[i], octave[i]), I(126))
        scale_bits[i] = np.left_shift(np.subtract(I(127), below), I(23))


@inline
def add_sums(total, rows, unit, scale, l):
    """Running sums l grow by the weights of a block, in units of `unit`."""
    for i in range(rows):
        l[i] = F(l[i] + F(F(F(total[i]) * unit) * scale[i]))
