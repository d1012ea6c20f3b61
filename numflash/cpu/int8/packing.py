"""Packed operands: K and V laid out so that a register tile reads them in one straight line.

K, per head: [panel][channel group][key in panel][channels of the group], `panel` keys side by side. The keys of a panel stand in
`Isa.key_order`, so that narrowing two int32 vectors to int16 brings the scores out in natural order without a shuffle.
V, per head: [key block][column chunk][key group][column][keys of the group]; chunks of nv * lanes columns, then narrower ones.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import inline, kernel
from ...jit.memory import LINE, empty, reinterpret, zeros
from ...jit.parallel import over_tasks
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, padded, running_lanes
from ..isa.transpose import first_values, transpose, weave

SQUARE = 8  # words transposed at a time; every panel is a multiple of it


class PackedKeys(NamedTuple):
    """K of all KV heads, N of them, `padded` keys each (a multiple of the key block).

    data : (N, padded * channels) int8 or int16;  start : (N, padded) int32 first value of each key's sums
    scale : (N, padded) float32, NaN for a key that was not finite;  wide : (N, blocks) uint8, 1 where a block holds such a key
    """

    data: np.ndarray
    start: np.ndarray
    scale: np.ndarray
    wide: np.ndarray


@functools.cache
def _pack_keys(name: str, lanes: int):
    isa = VECTOR_ISAS[name]
    panel, group, order = isa.nv * lanes, isa.group, isa.key_order(lanes)
    beside = tuple(order[:SQUARE].tolist())  # the keys of every square, from its first one on
    operand, offset, start_of = (
        np.int8 if group == 4 else np.int16,
        isa.q_offset,
        isa.q_offset and first_values(name),
    )
    square = transpose(SQUARE, beside)

    @inline
    def pack_panel(task, k, words, scale, groups, panels, data, start, packed_scale, wide):
        length, d = k.shape[1:]
        n, p = task // panels, task % panels
        first, size = p * panel, groups * group
        source, base = (
            words,
            (n * length + first) * groups,
        )  # straight from K, where its rows are whole words
        if not words.size or first + panel > length:
            rows = zeros((panel * size,), operand)
            for c in range(min(panel, length - first)):
                for e in range(d):
                    rows[c * size + e] = k[n, first + c, e]
            source, base = reinterpret(rows, np.int32), 0
        out = reinterpret(data[n, first * size : (first + panel) * size], np.int32)
        whole = groups // SQUARE * SQUARE
        for c in range(0, panel, SQUARE):
            for g in range(0, whole, SQUARE):
                square(source, base + order[c] * groups + g, groups, out, g * panel + c, panel)
        for c in range(panel):
            for g in range(whole, groups):
                out[g * panel + c] = source[base + order[c] * groups + g]
        for c in range(panel):
            j = first + order[c]
            packed_scale[n, first + c] = scale[n, j] if j < length else np.float32(0)
        for c in range(first, first + panel):
            if packed_scale[n, c] != packed_scale[n, c]:
                wide[n, first // KEY_BLOCK] = 1
        if offset:
            start_of(out, 0, groups, start, n * start.shape[1] + first)
        else:
            start[n, first : first + panel] = 0

    @kernel
    def pack_keys(k, words, scale, data, start, packed_scale, wide):
        groups, panels = data.shape[1] // start.shape[1] // group, start.shape[1] // panel
        over_tasks(
            pack_panel,
            k.shape[0] * panels,
            (k, words, scale, groups, panels, data, start, packed_scale, wide),
        )

    return pack_keys


@functools.cache
def _pack_values(name: str, lanes: int):
    isa = VECTOR_ISAS[name]
    chunk, group, woven = isa.nv * lanes, isa.group, weave(lanes, isa.group, isa.v_offset)

    @inline
    def pack_block(task, v, blocks, columns, data):
        length, dv = v.shape[1:]
        n, block = task // blocks, task % blocks
        rows = zeros((group, columns), np.int8)  # keys and columns that V lacks are zeros
        out = data[n, block * KEY_BLOCK * columns : (block + 1) * KEY_BLOCK * columns]
        for g in range(KEY_BLOCK // group):
            j = block * KEY_BLOCK + g * group
            whole = dv == columns and j + group <= length
            if not whole:
                for r in range(group):
                    for c in range(dv):
                        rows[r, c] = v[n, j + r, c] if j + r < length else 0
            t = 0
            while t < columns:
                width = min(chunk, columns - t)
                if width < chunk and width >= 2 * lanes:
                    width = 2 * lanes
                elif width < chunk:
                    width = lanes
                place = t * KEY_BLOCK + g * width * group
                for c in range(0, width, lanes):
                    if whole:
                        woven(v, (n * length + j) * dv + t + c, dv, out, place + c * group)
                    else:
                        woven(rows, t + c, columns, out, place + c * group)
                t += width

    @kernel
    def pack_values(v, data, columns):
        blocks = data.shape[1] // (KEY_BLOCK * columns)
        over_tasks(pack_block, v.shape[0] * blocks, (v, blocks, columns, data))

    return pack_values


def pack_keys(
    isa_name: str, k: np.ndarray, scale: np.ndarray, lanes: int | None = None
) -> PackedKeys:
    """Pack k (N, S, D) int8 with one scale per key (N, S), for vectors of `lanes` int32 (None: of this machine)."""
    isa, lanes = VECTOR_ISAS[isa_name], lanes or running_lanes(isa_name)
    n, s, d = k.shape
    keys, channels = padded(s, KEY_BLOCK), padded(d, isa.step)
    packed = PackedKeys(
        empty((n, keys * channels), np.int8 if isa.group == 4 else np.int16),
        empty((n, keys), np.int32),
        empty((n, keys), np.float32),
        np.zeros((n, keys // KEY_BLOCK), np.uint8),
    )
    words = (
        k.reshape(-1).view(np.int32) if isa.group == 4 and channels == d else np.empty(0, np.int32)
    )
    _pack_keys(isa_name, lanes)(k, words, scale, *packed)
    return packed


def pack_values(isa_name: str, v: np.ndarray, lanes: int | None = None) -> np.ndarray:
    """Pack v (N, S, Dv) int8, plus the offset of the instruction set: (N, padded keys * columns)."""
    isa, lanes = VECTOR_ISAS[isa_name], lanes or running_lanes(isa_name)
    n, s, dv = v.shape
    columns = padded(dv, isa.unit * lanes)
    data = empty((n, padded(s, KEY_BLOCK) * columns), np.int8 if isa.group == 4 else np.int16)
    _pack_values(isa_name, lanes)(v, data, columns)
    return data


def float_rows(isa_name: str, v: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """v (N, S, Dv) float32 as (N, padded keys * columns), rows of whole vectors; padding and `bad` (N, S) rows are zeros."""
    n, s, dv = v.shape
    keys, columns = (
        padded(s, KEY_BLOCK),
        padded(dv, VECTOR_ISAS[isa_name].unit * running_lanes(isa_name)),
    )
    if (keys, columns) == (s, dv) and not bad.any() and v.ctypes.data % LINE == 0:
        return v.reshape(n, -1)
    out = empty((n, keys, columns), np.float32)
    out[:, s:], out[:, :, dv:] = 0, 0
    out[:, :s, :dv] = v
    out[:, :s][bad] = 0
    return out.reshape(n, -1)
