"""Packed operands: K and V laid out so that a register tile reads them in one straight line.

K, per head: [panel][channel group][key in panel][channels of the group], `panel` keys side by side. The keys of a panel stand in
`Isa.key_order`, so that narrowing two int32 vectors to int16 brings the scores out in natural order without a shuffle.
V, per head: [key block][column chunk][key group][column][keys of the group]; chunks of nv * lanes columns, then narrower ones.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from .._jit import inline, kernel
from ..memory import LINE, empty, reinterpret, zeros
from ..parallel import over_tasks
from ..tiling import KEY_BLOCK
from .isas import VECTOR_ISAS, running_lanes
from .transpose import transpose

SQUARE = 8                                       # words transposed at a time; every panel is a multiple of it


class PackedKeys(NamedTuple):
    """K of all KV heads, N of them, `padded` keys each (a multiple of the key block).

    data : (N, padded * channels) int8 or int16;  start : (N, padded) int32 first value of each key's sums
    scale : (N, padded) float32, NaN for a key that was not finite;  wide : (N, blocks) uint8, 1 where a block holds such a key
    """

    data: np.ndarray
    start: np.ndarray
    scale: np.ndarray
    wide: np.ndarray


def padded(n: int, unit: int) -> int:
    return -(-n // unit) * unit


@functools.cache
def _pack_keys(panel: int, group: int, offset: int):
    operand, square = np.int8 if group == 4 else np.int16, transpose(SQUARE)

    @inline
    def pack_panel(task, k, scale, order, groups, panels, data, start, packed_scale, wide):
        length, d = k.shape[1:]
        n, p = task // panels, task % panels
        rows = zeros((panel, groups * group), operand)
        first = p * panel
        for c in range(panel):
            j = first + order[c]
            total, s = np.int32(0), np.float32(0)
            if j < length:
                source, row = k[n, j], rows[c]
                for e in range(d):
                    row[e] = source[e]
                    total = np.int32(total + np.int32(source[e]))   # P5
                s = scale[n, j]
                if s != s:
                    wide[n, first // KEY_BLOCK] = 1
            start[n, first + c] = np.int32(-offset * total)
            packed_scale[n, first + c] = s
        words = reinterpret(rows, np.int32)                         # one word is one group of channels
        out = reinterpret(data[n, first * groups * group:(first + panel) * groups * group], np.int32)
        whole = groups // SQUARE * SQUARE
        for c in range(0, panel, SQUARE):
            for g in range(0, whole, SQUARE):
                square(words, c * groups + g, groups, out, g * panel + c, panel)
        for g in range(whole, groups):
            for c in range(panel):
                out[g * panel + c] = words[c, g]

    @kernel
    def pack_keys(k, scale, order, data, start, packed_scale, wide):
        groups, panels = data.shape[1] // start.shape[1] // group, start.shape[1] // panel
        over_tasks(pack_panel, k.shape[0] * panels, (k, scale, order, groups, panels, data, start, packed_scale, wide))
    return pack_keys


@functools.cache
def _pack_values(chunk: int, lanes: int, group: int, offset: int):
    @inline
    def pack_block(task, v, blocks, columns, data):
        length, dv = v.shape[1:]
        n, block = task // blocks, task % blocks
        rows = zeros((group, columns), np.int8)
        base = block * KEY_BLOCK * columns
        for g in range(KEY_BLOCK // group):
            j = block * KEY_BLOCK + g * group
            for r in range(group):
                if j + r < length:
                    row, source = rows[r], v[n, j + r]
                    for c in range(dv):
                        row[c] = np.int8(np.int16(source[c]) + np.int16(offset))
                else:
                    rows[r, :] = 0
            t = 0
            while t < columns:
                width = min(chunk, columns - t)
                if width < chunk and width >= 2 * lanes:
                    width = 2 * lanes
                elif width < chunk:
                    width = lanes
                place = base + t * KEY_BLOCK + g * width * group
                out = data[n, place:place + width * group]
                if group == 4:
                    r0, r1, r2, r3 = rows[0, t:t + width], rows[1, t:t + width], rows[2, t:t + width], rows[3, t:t + width]
                    for c in range(width):
                        out[4 * c], out[4 * c + 1], out[4 * c + 2], out[4 * c + 3] = r0[c], r1[c], r2[c], r3[c]
                else:
                    r0, r1 = rows[0, t:t + width], rows[1, t:t + width]
                    for c in range(width):
                        out[2 * c], out[2 * c + 1] = r0[c], r1[c]
                t += width

    @kernel
    def pack_values(v, data, columns):
        blocks = data.shape[1] // (KEY_BLOCK * columns)
        over_tasks(pack_block, v.shape[0] * blocks, (v, blocks, columns, data))
    return pack_values


@functools.cache
def _key_order(isa_name: str, lanes: int) -> np.ndarray:
    return VECTOR_ISAS[isa_name].key_order(lanes)


def pack_keys(isa_name: str, k: np.ndarray, scale: np.ndarray, lanes: int | None = None) -> PackedKeys:
    """Pack k (N, S, D) int8 with one scale per key (N, S), for vectors of `lanes` int32 (None: of this machine)."""
    isa, lanes = VECTOR_ISAS[isa_name], lanes or running_lanes(isa_name)
    n, s, d = k.shape
    keys, channels = padded(s, KEY_BLOCK), padded(d, isa.step)
    packed = PackedKeys(empty((n, keys * channels), np.int8 if isa.group == 4 else np.int16), empty((n, keys), np.int32),
                        empty((n, keys), np.float32), np.zeros((n, keys // KEY_BLOCK), np.uint8))
    _pack_keys(isa.nv * lanes, isa.group, isa.q_offset)(k, scale, _key_order(isa_name, lanes), *packed)
    return packed


def pack_values(isa_name: str, v: np.ndarray, lanes: int | None = None) -> np.ndarray:
    """Pack v (N, S, Dv) int8, plus the offset of the instruction set: (N, padded keys * columns)."""
    isa, lanes = VECTOR_ISAS[isa_name], lanes or running_lanes(isa_name)
    n, s, dv = v.shape
    columns = padded(dv, isa.unit * lanes)
    data = empty((n, padded(s, KEY_BLOCK) * columns), np.int8 if isa.group == 4 else np.int16)
    _pack_values(isa.nv * lanes, lanes, isa.group, isa.v_offset)(v, data, columns)
    return data


def float_rows(isa_name: str, v: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """v (N, S, Dv) float32 as (N, padded keys * columns), rows of whole vectors; padding and `bad` (N, S) rows are zeros."""
    n, s, dv = v.shape
    keys, columns = padded(s, KEY_BLOCK), padded(dv, VECTOR_ISAS[isa_name].unit * running_lanes(isa_name))
    if (keys, columns) == (s, dv) and not bad.any() and v.ctypes.data % LINE == 0:
        return v.reshape(n, -1)
    out = empty((n, keys, columns), np.float32)
    out[:, s:], out[:, :, dv:] = 0, 0
    out[:, :s, :dv] = v
    out[:, :s][bad] = 0
    return out.reshape(n, -1)
