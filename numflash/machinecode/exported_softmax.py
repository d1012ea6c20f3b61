# ruff: noqa: ANN001, ANN202 (arguments of compiled functions)
"""The softmax of a block of scores for C: what stands between the two products of a tile."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..cpu.floats import float_rows
from ..cpu.floats.float_isas import FLOAT_ISAS
from ..cpu.int8.softmax_vectors import block_tops, block_totals, row_weights
from ..cpu.isa.isas import VECTOR_ISAS, lanes_of
from ..jit.memory import array_at
from ..numerics import fixedpoint as fx
from ..tiling import KEY_BLOCK
from .exported import Export, Parameter

F = np.float32
ROWS = 8
VECTORS = 5  # of a row of the float32 example


def _integer(isa_name: str) -> Any:
    octaves, weights = block_tops(isa_name, KEY_BLOCK), row_weights(isa_name, KEY_BLOCK)
    totals, vector_lanes = block_totals(isa_name), lanes_of(isa_name)
    weight = np.uint8 if VECTOR_ISAS[isa_name].group == 4 else np.int16

    @njit(error_model="numpy")
    def softmax(x, octave, p, total):
        width = vector_lanes()
        xs, ps = (
            array_at(x, (ROWS * KEY_BLOCK,), np.int16),
            array_at(p, (ROWS * KEY_BLOCK,), weight),
        )
        found, sums = np.empty(ROWS, np.int16), np.empty(ROWS * width, np.int32)
        sums[:] = np.int32(0)
        octaves(xs, 0, KEY_BLOCK, array_at(octave, (ROWS,), np.int32), found, 0)
        for i in range(ROWS):
            weights(xs, i * KEY_BLOCK, found, i, ps, i * KEY_BLOCK, sums, i * width)
        totals(sums, array_at(total, (ROWS,), np.int32), 0)

    return softmax


def _integer_example(isa_name: str, lanes: int) -> list[Any]:
    x = np.random.default_rng(8).normal(0, 600, (ROWS, KEY_BLOCK)).round().astype(np.int16)
    x[1], x[2, 5:] = 0, fx.MASKED
    octave = ((x.max(1).astype(np.int32) + 255) >> 8).astype(np.int32)
    p = fx.exp2_p8((octave[:, None] * 256 - x.astype(np.int32)).astype(np.uint16))
    weight = np.uint8 if VECTOR_ISAS[isa_name].group == 4 else np.int16
    return [x, octave, p.astype(weight), p.sum(1, dtype=np.int32)]


def _floats(isa_name: str) -> Any:
    row_max, row_exp = float_rows.row_max(isa_name), float_rows.row_weights(isa_name)
    width = FLOAT_ISAS[isa_name].lanes

    @njit(error_model="numpy")
    def softmax(x, rows, vectors, c, m, p, l):
        count = vectors * width
        xs, ps = array_at(x, (rows * count,), np.float32), array_at(p, (rows * count,), np.float32)
        ms, ls = array_at(m, (rows,), np.float32), array_at(l, (rows,), np.float32)
        factor, sums = array_at(c, (1,), np.float32)[0], np.empty(width, np.float32)
        for i in range(rows):
            ms[i] = np.float32(row_max(xs, i * count, vectors) * factor)
            sums[:] = np.float32(0)
            row_exp(xs, i * count, vectors, factor, ms[i], ps, i * count, sums, 0)
            total = np.float32(0)
            for j in range(width):
                total += sums[j]
            ls[i] = total

    return softmax


def _floats_example(isa_name: str, lanes: int) -> list[Any]:
    x = np.random.default_rng(9).normal(0, 3, (5, VECTORS * FLOAT_ISAS[isa_name].lanes)).astype(F)
    x[:, -3:] = -np.inf
    c = np.array([1 / np.log(2)], F)
    m = (x.max(1) * c).astype(F)
    p = np.exp2(x * c.astype(np.float64) - m[:, None])
    return [x, len(x), VECTORS, c, m, p.astype(F), p.sum(1).astype(F)]


P = Parameter
EXPORTS = {
    "int8-softmax": Export(
        "8 rows of 128 int16 scores: their octaves, 8-bit weights and the sums of these",
        _integer,
        (
            P("const int16_t *", "x", "[8][128] in units of 1/256 octave; -32768 gives weight 0"),
            P("int32_t *", "octave", "[8]: the whole octave at or above each row's maximum", True),
            P("{weight} *", "p", "[8][128]: 2**(x / 256 - octave), 255 being 1.0", True),
            P("int32_t *", "total", "[8]: sums of each row of p", True),
        ),
        _integer_example,
    ),
    "float32-softmax": Export(
        "rows of scores: maximum, 2**(x * c - maximum), and the sums of these",
        _floats,
        (
            P(
                "const float *",
                "x",
                "[rows][vectors of {lanes}], none NaN; -inf gives weight 0 and fills the last vector",
            ),
            P("int64_t", "rows", ""),
            P("int64_t", "vectors", "of {lanes} scores in a row, 1 or more"),
            P("const float *", "c", "1: above 0; log2(e) for the softmax of x"),
            P("float *", "m", "[rows]: maxima times c", True),
            P("float *", "p", "as x", True),
            P("float *", "l", "[rows]: sums of p", True),
        ),
        _floats_example,
        True,
        2e-6,
        lambda isa, lanes: {"lanes": FLOAT_ISAS[isa].lanes},
    ),
}
