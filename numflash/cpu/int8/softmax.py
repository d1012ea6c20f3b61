"""The online softmax of the INT8 kernel on a whole block of rows.

Tops, weights, and the running state (m, l, O).
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inline
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..isa.isas import lanes_of, weight_planes
from .float_weights import row_weights_bf16, row_weights_float
from .softmax_vectors import block_scales, block_tops, block_totals, row_weights
from .wide_rows import floats_of

F = np.float32
I = np.int32
HALF = KEY_BLOCK // 2  # the last key block may be half as wide


@functools.cache
def top_rows(isa_name: str, pv: str):
    """f(x, rows, columns, octave, top).

    The block's own top and octave of every row, 8 rows at a time.
    """
    step = fx.REFERENCE_STEP[pv]
    half, whole = (block_tops(isa_name, keys, step) for keys in (HALF, KEY_BLOCK))

    @inline
    def run(x, rows, columns, octave, top):
        for i in range(0, rows, 8):
            if columns == HALF:
                half(x, i * KEY_BLOCK, KEY_BLOCK, octave, top, i)
            else:
                whole(x, i * KEY_BLOCK, KEY_BLOCK, octave, top, i)

    return run


@functools.cache
def weigh_rows(isa_name: str, pv: str):
    """f(x, rows, columns, top, scale, p, sums, total).

    Weights P of every row, and their sums.

    P is integers relative to the block's top, or with pv "bf16" and "fp32" floats times `scale`.
    """
    vector_lanes = lanes_of(isa_name)
    totals = block_totals(isa_name)
    width = weight_planes(isa_name, pv) * KEY_BLOCK
    if pv not in fx.FLOAT_VALUES:
        half, whole = (row_weights(isa_name, keys, pv) for keys in (HALF, KEY_BLOCK))
    elif floats_of(isa_name, pv).group == 1:
        half, whole = (row_weights_float(isa_name, keys, pv) for keys in (HALF, KEY_BLOCK))
    else:
        half, whole = (row_weights_bf16(isa_name, keys) for keys in (HALF, KEY_BLOCK))

    if pv not in fx.FLOAT_VALUES:

        @inline
        def weigh(i, lanes, x, columns, top, scale, p, sums):
            if columns == HALF:
                half(x, i * KEY_BLOCK, top, i, p, i * width, sums, i * lanes)
            else:
                whole(x, i * KEY_BLOCK, top, i, p, i * width, sums, i * lanes)
    else:

        @inline
        def weigh(i, lanes, x, columns, top, scale, p, sums):
            if columns == HALF:
                half(x, i * KEY_BLOCK, top, i, scale, p, i * KEY_BLOCK, sums, i * lanes)
            else:
                whole(x, i * KEY_BLOCK, top, i, scale, p, i * KEY_BLOCK, sums, i * lanes)

    @inline
    def run(x, rows, columns, top, scale, p, sums, total):
        lanes = vector_lanes()
        for i in range(rows):
            weigh(i, lanes, x, columns, top, scale, p, sums)
        for i in range(0, rows, 8):
            totals(sums, total, i)

    return run


@inline
def grow_rows(octave, top, rows, m, l, scale, o):
    """Running octave m = max(m, octave): O and l shift by whole octaves, exactly.

    `scale` becomes 2**(top - m).
    """
    grown = I(0)
    for i in range(rows):
        grown |= I(octave[i] > m[i])
    if grown:
        for i in range(rows):
            if octave[i] > m[i]:
                if l[i] != F(0):
                    grows = np.subtract(octave[i], m[i])  # np.subtract stays in int32
                    grows = min(grows, I(fx.MOST_BELOW))
                    shrink, row = I(np.left_shift(np.subtract(I(127), grows), I(23))).view(F), o[i]
                    for t in range(row.size):
                        row[t] = row[t] * shrink
                    l[i] = l[i] * shrink
                m[i] = octave[i]
    for i in range(0, rows, 8):
        block_scales(octave, top, m, scale, i)


@inline
def add_sums(total, rows, unit, scale, l):
    """Running sums l grow by the weights of a block, in units of `unit`."""
    for i in range(rows):
        l[i] = F(l[i] + F(F(F(total[i]) * unit) * scale[i]))
