"""The two products of the INT8 kernel on a whole block.

All rows of a query tile with one key block.

Register tiles as in the A64FX summary (docs/sources.md), tallest first, smaller ones for the last
rows and columns; on AMX, matrix tiles.
"""

from __future__ import annotations

import functools

from ...jit.compiler import inline
from ...numerics.fixedpoint import FLOAT_VALUES
from ...tiling import KEY_BLOCK
from ..floats import float_tiles
from ..isa.dot_loop import BESIDE
from ..isa.isas import VECTOR_ISAS, lanes_of, weight_planes
from ..isa.operands import Packed, Part, Rows, Scales, Waiting
from . import amx, wide_rows
from .microkernels import (
    WAITING_ROWS,
    finish,
    score_tile,
    value_tile,
    waiting_room,
    waiting_tile,
)


@functools.cache
def score_block(isa_name: str, changed: bool = False, wide: bool = False):
    """f(queries: Queries, keys: KeyRange, x): scores x of these rows and keys.

    Scores are int16 Q8.8, with `wide` float32 before rounding. `changed`: one more argument,
    `score_changes.Changes`.
    """
    if isa_name == "amx_int8":
        return amx.score_block(changed, wide)
    if changed:
        return _changed_score_block(isa_name, wide)
    group = VECTOR_ISAS[isa_name].group
    nv = VECTOR_ISAS[isa_name].nv
    lanes = lanes_of(isa_name)
    mr, mr2, _ = VECTOR_ISAS[isa_name].rows
    tile6, tile4, tile2 = (score_tile(isa_name, m, wide) for m in VECTOR_ISAS[isa_name].rows)

    @inline
    def scores(queries, keys, x):
        q, stride, cq, rows = queries
        k, start, ck, first, columns = keys
        groups, panel = stride // group, nv * lanes()
        for c in range(0, columns, panel):
            key, i = first + c, 0
            right = Packed(k, key * stride)
            while i + mr <= rows:
                row, to = Rows(q, i * stride, stride), Rows(x, i * KEY_BLOCK + c, KEY_BLOCK)
                tile6(row, right, groups, Scales(start, ck, key, cq, i), to)
                i += mr
            while rows - i >= mr2:
                row, to = Rows(q, i * stride, stride), Rows(x, i * KEY_BLOCK + c, KEY_BLOCK)
                tile4(row, right, groups, Scales(start, ck, key, cq, i), to)
                i += mr2
            if rows - i == 2:
                row, to = Rows(q, i * stride, stride), Rows(x, i * KEY_BLOCK + c, KEY_BLOCK)
                tile2(row, right, groups, Scales(start, ck, key, cq, i), to)

    return scores


def _changed_score_block(isa_name: str, wide: bool):
    """The same with options.

    Each tile is stored in L1, and its options are applied beside the dot products of the next one;
    with wide scores, after its own products.
    """
    group = VECTOR_ISAS[isa_name].group
    nv = VECTOR_ISAS[isa_name].nv
    lanes = lanes_of(isa_name)
    room_of = waiting_room(isa_name)
    tile4, tile2 = (waiting_tile(isa_name, m, not wide) for m in WAITING_ROWS)
    change = finish(isa_name, wide)

    @inline
    def scores(queries, keys, x, changes):
        q, stride, cq, rows = queries
        k, start, ck, first, columns = keys
        room, number, groups, panel = room_of(), 0, stride // group, nv * lanes()
        kept, i_old, c_old = 0, 0, 0  # rows of the tile that waits, and where it belongs
        for c in range(0, columns, panel):
            key, i = first + c, 0
            right = Packed(k, key * stride)
            while i < rows:
                row, scales = Rows(q, i * stride, stride), Scales(start, ck, key, cq, i)
                old, key_old = Rows(x, i_old * KEY_BLOCK + c_old, KEY_BLOCK), first + c_old
                beside, new = min(kept, (groups - 1) // BESIDE), min(4, rows - i)
                here, part = Waiting(room, number), Part(beside, i_old, key_old)
                if new == 4:
                    tile4(row, right, groups, scales, here, old, changes, part)
                else:
                    tile2(row, right, groups, scales, here, old, changes, part)
                if beside < kept:
                    part = Part(kept, i_old, key_old)
                    change(Waiting(room, number + 1), old, changes, beside, part)
                kept, i_old, c_old, i, number = new, i, c, i + new, number + 1
        old = Rows(x, i_old * KEY_BLOCK + c_old, KEY_BLOCK)
        change(Waiting(room, number + 1), old, changes, 0, Part(kept, i_old, first + c_old))

    @inline
    def wide_scores(queries, keys, x, changes):
        q, stride, cq, rows = queries
        k, start, ck, first, columns = keys
        room, groups, panel = room_of(), stride // group, nv * lanes()
        for c in range(0, columns, panel):
            key, i = first + c, 0
            right = Packed(k, key * stride)
            while i < rows:
                row, scales = Rows(q, i * stride, stride), Scales(start, ck, key, cq, i)
                new = min(4, rows - i)
                if new == 4:
                    tile4(row, right, groups, scales, Waiting(room, 0))
                else:
                    tile2(row, right, groups, scales, Waiting(room, 0))
                to = Rows(x, i * KEY_BLOCK + c, KEY_BLOCK)
                change(Waiting(room, 0), to, changes, 0, Part(new, i, key))
                i += new

    return wide_scores if wide else scores


def value_rows(isa_name: str, pv: str) -> int:
    """Rows that `value_block` takes at a time.

    It also writes the rows up to the next multiple of them.

    Parts of a block of rows must therefore begin at multiples of this number, and buffers must hold
    whole multiples.
    """
    if pv in FLOAT_VALUES:
        return wide_rows.floats_of(isa_name, pv).rows
    return VECTOR_ISAS[isa_name].rows[0]


@functools.cache
def value_block(isa_name: str, pv: str):
    """f(p, v, first, columns, scale, total, rows, o): o[rows] += P.V.

    For keys first to first + columns - 1.
    """
    if pv in FLOAT_VALUES:
        return _float_value_block(isa_name, pv)
    planes = weight_planes(isa_name, pv)
    if isa_name == "amx_int8":
        return amx.value_block(planes)
    isa = VECTOR_ISAS[isa_name]
    size = planes * KEY_BLOCK  # of a row of P
    vector_lanes = lanes_of(isa_name)
    group = isa.group
    nv = isa.nv
    nv_half = max(1, isa.nv // 2)
    mr, mr2, _ = isa.rows
    tile6, tile4, tile2 = (value_tile(isa_name, m, nv, planes) for m in isa.rows)
    half6 = value_tile(isa_name, mr, nv_half, planes)
    one6 = value_tile(isa_name, mr, 1, planes)

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        width, lanes, groups = o.shape[1], vector_lanes(), columns // group
        t = 0
        while t + nv * lanes <= width:
            values_at, i = Packed(v, first * width + t * KEY_BLOCK), 0
            while i + mr <= rows:
                row, to = Rows(p, i * size, size), Rows(o, i * width + t, width)
                tile6(row, values_at, groups, scale, total, i, to)
                i += mr
            while rows - i >= mr2:
                row, to = Rows(p, i * size, size), Rows(o, i * width + t, width)
                tile4(row, values_at, groups, scale, total, i, to)
                i += mr2
            if rows - i == 2:
                row, to = Rows(p, i * size, size), Rows(o, i * width + t, width)
                tile2(row, values_at, groups, scale, total, i, to)
            t += nv * lanes
        if nv_half > 1 and t + nv_half * lanes <= width:
            values_at = Packed(v, first * width + t * KEY_BLOCK)
            for i in range(0, rows, mr):
                row, to = Rows(p, i * size, size), Rows(o, i * width + t, width)
                half6(row, values_at, groups, scale, total, i, to)
            t += nv_half * lanes
        if t < width:
            values_at = Packed(v, first * width + t * KEY_BLOCK)
            for i in range(0, rows, mr):
                row, to = Rows(p, i * size, size), Rows(o, i * width + t, width)
                one6(row, values_at, groups, scale, total, i, to)

    return values


def _float_value_block(isa_name: str, pv: str):
    """The same in floats; V is stored in rows as wide as O, of keys or of pairs of bfloat16 keys."""
    floats = wide_rows.floats_of(isa_name, pv)
    mr, group, nv = floats.rows, floats.group, VECTOR_ISAS[isa_name].nv
    vector_lanes = lanes_of(isa_name)
    tile, one = (float_tiles.value_tile(floats.name, n) for n in (nv, 1))

    @inline
    def values(p, v, first, columns, scale, total, rows, o):
        width, lanes, steps = o.shape[1], vector_lanes(), columns // group
        row, at, t = width * group, first * width, 0
        while t + nv * lanes <= width:
            for i in range(0, rows, mr):
                to = i * width + t
                tile(p, i * KEY_BLOCK, KEY_BLOCK, v, at + t * group, row, steps, o, to, width)
            t += nv * lanes
        while t < width:
            for i in range(0, rows, mr):
                to = i * width + t
                one(p, i * KEY_BLOCK, KEY_BLOCK, v, at + t * group, row, steps, o, to, width)
            t += lanes

    return values
