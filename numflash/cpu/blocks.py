"""The two products of the INT8 kernel on a whole block: all rows of a query tile with one key block.

Register tiles as in the A64FX documents, tallest first, smaller ones for the last rows and columns; on AMX, matrix tiles.
"""
from __future__ import annotations

import functools

from .._jit import inline
from ..tiling import KEY_BLOCK
from . import amx, float_tiles, wide_rows
from .isas import VECTOR_ISAS, lanes_of
from .microkernels import ROWS, changed_tile, score_tile, value_tile


@functools.cache
def score_block(isa_name: str, changed: bool = False, wide: bool = False):
    """f(q, stride, k, first, start, ck, cq, rows, columns, x): x[rows, columns] for keys first .. first + columns.

    Scores are int16 Q8.8. `changed`: one more argument, `score_changes.Changes`; with `wide`, float32 before rounding.
    """
    if isa_name == "amx_int8":
        return amx.score_block(changed, wide)
    group, nv, lanes = VECTOR_ISAS[isa_name].group, VECTOR_ISAS[isa_name].nv, lanes_of(isa_name)
    tile6, tile4, tile2 = (changed_tile(isa_name, m, wide) if changed else score_tile(isa_name, m) for m in ROWS)

    @inline
    def scores(q, stride, k, first, start, ck, cq, rows, columns, x, *changes):
        groups, panel = stride // group, nv * lanes()
        for c in range(0, columns, panel):
            key, i = first + c, 0
            while i + 6 <= rows:
                tile6(q, i * stride, stride, k, key * stride, groups, start, ck, key, cq, i, x,
                      i * KEY_BLOCK + c, KEY_BLOCK, *changes)
                i += 6
            if rows - i == 4:
                tile4(q, i * stride, stride, k, key * stride, groups, start, ck, key, cq, i, x,
                      i * KEY_BLOCK + c, KEY_BLOCK, *changes)
            elif rows - i == 2:
                tile2(q, i * stride, stride, k, key * stride, groups, start, ck, key, cq, i, x,
                      i * KEY_BLOCK + c, KEY_BLOCK, *changes)
    return scores


@functools.cache
def value_block(isa_name: str, pv: str):
    """f(p, v, first, columns, scale, total, rows, o): o[rows] += P.V for keys first .. first + columns."""
    if pv == "fp32":
        return _float_value_block(isa_name)
    if isa_name == "amx_int8":
        return amx.value_block()
    isa, vector_lanes = VECTOR_ISAS[isa_name], lanes_of(isa_name)
    group, nv, nv_half = isa.group, isa.nv, max(1, isa.nv // 2)
    tile6, tile4, tile2 = (value_tile(isa_name, m, nv) for m in ROWS)
    half6, one6 = value_tile(isa_name, 6, nv_half), value_tile(isa_name, 6, 1)

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        width, lanes, groups = o.shape[1], vector_lanes(), columns // group
        t = 0
        while t + nv * lanes <= width:
            place, i = (first * width + t * KEY_BLOCK), 0
            while i + 6 <= rows:
                tile6(p, i * KEY_BLOCK, KEY_BLOCK, v, place, groups, scale, total, i, o, i * width + t, width)
                i += 6
            if rows - i == 4:
                tile4(p, i * KEY_BLOCK, KEY_BLOCK, v, place, groups, scale, total, i, o, i * width + t, width)
            elif rows - i == 2:
                tile2(p, i * KEY_BLOCK, KEY_BLOCK, v, place, groups, scale, total, i, o, i * width + t, width)
            t += nv * lanes
        if nv_half > 1 and t + nv_half * lanes <= width:
            place = first * width + t * KEY_BLOCK
            for i in range(0, rows, 6):
                half6(p, i * KEY_BLOCK, KEY_BLOCK, v, place, groups, scale, total, i, o, i * width + t, width)
            t += nv_half * lanes
        if t < width:
            place = first * width + t * KEY_BLOCK
            for i in range(0, rows, 6):
                one6(p, i * KEY_BLOCK, KEY_BLOCK, v, place, groups, scale, total, i, o, i * width + t, width)
    return values


def _float_value_block(isa_name: str):
    """The same in float32; V stands in rows as wide as O."""
    isa = VECTOR_ISAS[isa_name]
    nv, lanes = isa.nv, isa.lanes
    tile6, one6 = (float_tiles.value_tile(wide_rows.FLOATS[lanes], n) for n in (nv, 1))

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        width = o.shape[1]
        t = 0
        while t + nv * lanes <= width:
            for i in range(0, rows, 6):
                tile6(p, i * KEY_BLOCK, KEY_BLOCK, v, first * width + t, width, columns, o, i * width + t, width)
            t += nv * lanes
        while t < width:
            for i in range(0, rows, 6):
                one6(p, i * KEY_BLOCK, KEY_BLOCK, v, first * width + t, width, columns, o, i * width + t, width)
            t += lanes
    return values
