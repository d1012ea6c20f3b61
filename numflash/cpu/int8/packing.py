"""Packed operands: K and V laid out so that a register tile reads them in one straight line.

K, per head: [panel][channel group][key in panel][channels of the group], `panel` keys side by side.
The keys of a panel are in `Isa.key_order`, so that narrowing two int32 vectors to int16 brings
the scores out in natural order without a shuffle. V, per head: [key block][column chunk][key
group][column][keys of the group]; chunks of nv * lanes columns, then narrower ones.

For matrix tiles (`Isa.tiled`) the innermost unit is a tile of 1 KB, 16 groups x 16 columns x 4: a
contiguous right operand. 32 columns are stored together, as two tiles for each step of 64
channels or keys. K: [32 keys][step][2][16 groups][16 keys][4], V: [key block][32
columns][step][2][16 groups][16 columns][4]. The keys of a group of V are `Isa.value_order` apart,
so that weights are packed without a shuffle.

Here K and V are int8 already. `quantize` packs them from floats, with the same two functions:
`panel_packer` and `block_interleaver`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, separate
from ...jit.memory import LINE, empty, reinterpret, uncleared, zeros
from ...jit.parallel import over_tasks
from ...tiling import KEY_BLOCK
from ..floats.float_packing import pack_heads_in_pairs
from ..isa.isas import VECTOR_ISAS, padded, running_lanes
from ..isa.strided import rows_of, strided
from ..isa.transpose import first_values, interleave, transpose

SQUARE = 8  # words transposed at a time; every panel is a multiple of it
# columns, and groups, of a matrix tile; columns of two of them
TILE = 16
SIDE = 32
TASK_KEYS = 4 * KEY_BLOCK  # keys that one task packs


class PackedKeys(NamedTuple):
    """K of all KV heads, N of them, `padded` keys each (a multiple of the key block).

    data : (N, padded * channels) int8 or int16;  start : (N, padded) int32 first value of each
        key's sums
    scale : (N, padded) float32, NaN for a key that was not finite;  wide : (N, blocks) uint8, 1
        where a block holds such a key
    """

    data: np.ndarray
    start: np.ndarray
    scale: np.ndarray
    wide: np.ndarray


@functools.cache
def panel_packer(name: str, lanes: int):
    """f(words, base, groups, data, start, n, first).

    Panel `first` of head n, from rows of `groups` words.

    words : int32; the row of the panel's first key begins at word `base`;  data, start : as in
        `PackedKeys`
    """
    isa = VECTOR_ISAS[name]
    panel = isa.nv * lanes
    order = isa.key_order(lanes)
    beside = tuple(order[:SQUARE].tolist())  # the keys of every square, from its first one on
    square = transpose(SQUARE, beside)
    offset = isa.q_offset
    tiled = isa.tiled
    start_of = offset and first_values(name)
    spacing = TILE if tiled else panel

    @bare
    def place(c, g, groups):
        """The word of a panel that holds group g of its column c."""
        if tiled:
            tile = g // TILE * 2 + c % SIDE // TILE
            return c // SIDE * SIDE * groups + tile * TILE * TILE + g % TILE * TILE + c % TILE
        return g * panel + c

    @bare
    def pack(words, base, groups, data, start, n, first):
        keys = start.shape[1]
        out, to = reinterpret(data, np.int32), (n * keys + first) * groups
        flat = out.reshape(out.size)
        whole = groups // SQUARE * SQUARE
        for c in range(0, panel, SQUARE):
            for g in range(0, whole, SQUARE):
                source = base + order[c] * groups + g
                square(words, source, groups, flat, to + place(c, g, groups), spacing)
        for c in range(panel):
            for g in range(whole, groups):
                flat[to + place(c, g, groups)] = words[base + order[c] * groups + g]
        if offset:
            start_of(flat, 4 * to, groups, start, n * keys + first)
        else:
            for c in range(first, first + panel):
                start[n, c] = 0

    return pack


@functools.cache
def block_interleaver(name: str, lanes: int):
    """f(v, base, stride, columns, data, n, block).

    One key block of head n, from int8 rows `stride` apart, the first at `base`.
    """
    isa = VECTOR_ISAS[name]
    group = isa.group
    tiled = isa.tiled
    chunk = SIDE if tiled else isa.nv * lanes
    interleaved = interleave(lanes, group, isa.v_offset, isa.value_order)

    @bare
    def chunk_width(left):
        """Columns of the next chunk: whole, then two vectors, then one."""
        if left >= chunk:
            return chunk
        return 2 * lanes if left >= 2 * lanes else lanes

    @bare
    def first_key(g):
        """The first key of group g of a block."""
        return g // TILE * 4 * TILE + g % TILE * 2 if tiled else g * group

    @bare
    def place(g, c, width):
        """Where group g of column c of a chunk begins."""
        if tiled:
            return (g // TILE * 2 + c // TILE) * 4 * TILE * TILE + g % TILE * 4 * TILE
        return (g * width + c) * group

    @bare
    def interleave_block(v, base, stride, columns, data, n, block):
        out = n * data.shape[1] + block * KEY_BLOCK * columns
        for g in range(KEY_BLOCK // group):
            t, row = 0, base + first_key(g) * stride
            while t < columns:
                width = chunk_width(columns - t)
                for c in range(0, width, lanes):
                    to = out + t * KEY_BLOCK + place(g, c, width)
                    interleaved(v, row + t + c, stride, data, to)
                t += width

    return interleave_block


@bare
def copy_rows(x, n, first, count, stride, rows):
    """`count` rows of head n from row `first` on to rows `stride` apart; what x lacks is 0."""
    length, d = x.shape[1:]
    rows[:] = 0
    for c in range(min(count, length - first)):
        source, row = x[n, first + c], rows[c * stride : (c + 1) * stride]
        for e in range(d):
            row[e] = source[e]


@functools.cache
def key_rows_packer(name: str, lanes: int):
    """f(n, slot, first, stop, k, words, scale, rows, keys): panels of keys `first` to stop - 1 of head n to a
    slot of `keys`.

    words : K as int32, or nothing;  scale : (N, S) float32
    rows : `operand` numbers of a panel of keys, zeros where a row is padded
    """
    isa = VECTOR_ISAS[name]
    panel = isa.nv * lanes
    group = isa.group
    order = isa.key_order(lanes)
    pack_panel = panel_packer(name, lanes)

    @bare
    def pack_scales(scale, n, slot, first, keys):
        length = scale.shape[1]
        for c in range(panel):
            j = first + order[c]
            keys.scale[slot, first + c] = scale[n, j] if j < length else np.float32(0)
            if keys.scale[slot, first + c] != keys.scale[slot, first + c]:
                keys.wide[slot, first // KEY_BLOCK] = 1

    @bare
    def pack_rows(n, slot, first, stop, k, words, scale, rows, keys):
        length, groups = k.shape[1], rows.size // (panel * group)
        for p in range(first, stop, panel):
            if words.size and p + panel <= length:  # straight from K: its rows are whole words
                at = (n * length + p) * groups
                pack_panel(words, at, groups, keys.data, keys.start, slot, p)
            else:
                copy_rows(k, n, p, panel, groups * group, rows)
                pack_panel(reinterpret(rows, np.int32), 0, groups, keys.data, keys.start, slot, p)
            pack_scales(scale, n, slot, p, keys)

    return pack_rows


@functools.cache
def panel_room(name: str, lanes: int):
    """f(keys): memory for a panel of keys, zeros."""
    isa = VECTOR_ISAS[name]
    panel = isa.nv * lanes
    operand = np.int8 if isa.group == 4 else np.int16

    @inline
    def room(keys):
        channels = keys.data.shape[1] // keys.start.shape[1]
        return zeros((panel * channels,), operand, "keys of a panel")

    return room


@functools.cache
def key_packer(name: str, lanes: int):
    """f(k, words, scale, keys): `pack_keys` into `keys`; words : K as int32, or nothing."""
    pack_rows, room = key_rows_packer(name, lanes), panel_room(name, lanes)

    @inline
    def task(number, k, words, scale, tasks, keys):
        n, first = number // tasks, number % tasks * TASK_KEYS
        stop = min(first + TASK_KEYS, keys.start.shape[1])
        pack_rows(n, n, first, stop, k, words, scale, room(keys), keys)

    @separate(no_cpython_wrapper=False)
    def pack_keys(k, words, scale, keys):
        tasks = (keys.start.shape[1] + TASK_KEYS - 1) // TASK_KEYS
        over_tasks(task, k.shape[0] * tasks, (k, words, scale, tasks, keys))

    return pack_keys


@functools.cache
def value_block_packer(name: str, lanes: int):
    """f(n, slot, block, v, rows, columns, data): a block of keys of head n to a slot of `data`.

    rows : (KEY_BLOCK * columns,) int8, anything
    """
    interleave_block = block_interleaver(name, lanes)

    @bare
    def pack_block(n, slot, block, v, rows, columns, data):
        length, dv = v.shape[1:]
        first = block * KEY_BLOCK
        if dv == columns and first + KEY_BLOCK <= length:
            flat = v.reshape(v.size)
            interleave_block(flat, (n * length + first) * dv, dv, columns, data, slot, block)
        else:
            copy_rows(v, n, first, KEY_BLOCK, columns, rows)
            interleave_block(rows, 0, columns, columns, data, slot, block)

    return pack_block


@functools.cache
def value_packer(name: str, lanes: int):
    """f(v, data, columns): `pack_values` into `data`."""
    pack_block = value_block_packer(name, lanes)

    @inline
    def task(number, v, tasks, columns, data):
        n, first = number // tasks, number % tasks * (TASK_KEYS // KEY_BLOCK)
        rows = uncleared((KEY_BLOCK * columns,), np.int8, "values of a block of keys")
        blocks = data.shape[1] // (KEY_BLOCK * columns)
        for block in range(first, min(first + TASK_KEYS // KEY_BLOCK, blocks)):
            pack_block(n, n, block, v, rows, columns, data)

    @separate(no_cpython_wrapper=False)
    def pack_values(v, data, columns):
        tasks = (data.shape[1] // columns + TASK_KEYS - 1) // TASK_KEYS
        over_tasks(task, v.shape[0] * tasks, (v, tasks, columns, data))

    return pack_values


def empty_keys(isa_name: str, n: int, s: int, d: int) -> PackedKeys:
    """Room for s keys of d channels of n heads."""
    isa = VECTOR_ISAS[isa_name]
    keys = padded(s, KEY_BLOCK)
    channels = padded(d, isa.step)
    return PackedKeys(
        empty((n, keys * channels), np.int8 if isa.group == 4 else np.int16),
        empty((n, keys), np.int32),
        empty((n, keys), np.float32),
        np.zeros((n, keys // KEY_BLOCK), np.uint8),
    )


def empty_values(isa_name: str, n: int, s: int, dv: int, lanes: int) -> np.ndarray:
    """Room for s values of dv channels of n heads: (n, padded keys * columns)."""
    isa = VECTOR_ISAS[isa_name]
    size = padded(s, KEY_BLOCK) * padded(dv, isa.unit * lanes)
    return empty((n, size), np.int8 if isa.group == 4 else np.int16)


def pack_keys(
    isa_name: str, k: np.ndarray, scale: np.ndarray, lanes: int | None = None
) -> PackedKeys:
    """Pack k (N, S, D) int8 with one scale per key (N, S), for vectors of `lanes`
    int32, those of this machine unless given.
    """
    isa = VECTOR_ISAS[isa_name]
    lanes = lanes or running_lanes(isa_name)
    n, s, d = k.shape
    packed = empty_keys(isa_name, n, s, d)
    whole = isa.group == 4 and d % isa.step == 0
    words = k.reshape(-1).view(np.int32) if whole else np.empty(0, np.int32)
    key_packer(isa_name, lanes)(k, words, scale, packed)
    return packed


def pack_values(isa_name: str, v: np.ndarray, lanes: int | None = None) -> np.ndarray:
    """Pack v (N, S, Dv) int8, plus the offset of the instruction set.

    (N, padded keys * columns).
    """
    lanes = lanes or running_lanes(isa_name)
    n, s, dv = v.shape
    data = empty_values(isa_name, n, s, dv, lanes)
    value_packer(isa_name, lanes)(v, data, data.shape[1] // padded(s, KEY_BLOCK))
    return data


def bfloat16_pairs(isa_name: str, v: np.ndarray) -> np.ndarray:
    """v (N, S, Dv) bfloat16 bits as (N, padded keys * columns), in pairs of keys: (keys / 2, columns,
    2), as the float kernels pack them. Padding is zeros.
    """
    n, s, dv = v.shape
    columns = padded(dv, VECTOR_ISAS[isa_name].unit * running_lanes(isa_name))
    out = empty((n, padded(s, KEY_BLOCK) // 2, columns), np.uint32)
    pack_heads_in_pairs(strided(rows_of(v[:, None], v.dtype)), np.full(n, s), out)
    return out.view(np.uint16).reshape(n, -1)


def float_rows(isa_name: str, v: np.ndarray, bad: np.ndarray) -> np.ndarray:
    """v (N, S, Dv) float32 as (N, padded keys * columns), rows of whole vectors.

    Padding and `bad` (N, S) rows are zeros.
    """
    n, s, dv = v.shape
    keys = padded(s, KEY_BLOCK)
    columns = padded(dv, VECTOR_ISAS[isa_name].unit * running_lanes(isa_name))
    if (keys, columns) == (s, dv) and not bad.any() and v.ctypes.data % LINE == 0:
        return v.reshape(n, -1)
    out = empty((n, keys, columns), np.float32)
    out[:, s:], out[:, :, dv:] = 0, 0
    out[:, :s, :dv] = v
    out[:, :s][bad] = 0
    return out.reshape(n, -1)
