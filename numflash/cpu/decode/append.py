"""Appending tokens to a KV cache.

Quantise or copy, and write each token into its lane of the decode layout, O(D) per token.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import KEY_SCALE_LIMIT, ZERO_VALUE_SCALE
from ...numerics.quantize_kernels import INFINITE, LARGEST, MAGNITUDE, NO_SCALE, ROUND
from ...numerics.rotation import rotate_row
from ...tiling import KEY_BLOCK
from .tiles import Tile

F = np.float32
I = np.int32
NO_VALUE = F(ZERO_VALUE_SCALE)
SCALE_LIMIT = F(KEY_SCALE_LIMIT)
CODES = F(127)  # largest code of a key or value


@bare
def quantize_row(x, moved, out, scale_of_zeros, most):
    """One row rounded to whole numbers up to `most` (float32), `quantization.quantize` for 127.

    Returns its scale, NaN (and zeros) where x is not finite.

    x (D,) float32; moved (D,) float32 scratch; out at least D integers, zeros behind the row. A row
    of zeros has no scale of its own, but `scale_of_zeros`.
    """
    bits, moved_bits, top = x.view(np.int32), moved.view(np.int32), I(0)
    for d in range(x.size):
        moved_bits[d] = bits[d] & MAGNITUDE
        top = max(top, moved_bits[d])
    if top >= INFINITE:
        out[:] = 0
        return F(np.nan)
    moved_bits[0] = top
    largest = moved[0]
    usable = largest > NO_SCALE
    factor = most / largest if usable else F(0)
    for d in range(x.size):
        out[d] = I((F(x[d] * factor) + ROUND) - ROUND)
    out[x.size :] = 0
    return largest / most if usable else scale_of_zeros


@bare
def take_offset(key, offset, out):
    """out = key - offset (D,), cut at the largest float32; what is not finite stays so."""
    for e in range(key.size):
        x = F(key[e] - offset[e])
        out[e] = x if x != x or abs(key[e]) > LARGEST else min(max(x, -LARGEST), LARGEST)


@bare
def slot_of(position, sinks, ring):
    """The slot of a token; a division only where the ring has come round."""
    behind = position - sinks
    return position if behind < ring else sinks + behind % ring


@bare
def in_turn(body, count, args):
    """The same as `over_tasks`, on this thread."""
    for n in range(count):
        body(n, *args)


@functools.cache
def make_writers(tile: Tile):
    """write_key, write_value and write_scales: one token of a head into its page."""
    panel = tile.panel
    group = tile.group
    scales = tile.scales
    exact = tile.exact
    packed = tile.packed
    four_bits = packed == 2

    @bare
    def write_key_codes(row, page, slot, columns):
        """`write_key` of codes, two channels a byte."""
        inner = slot % KEY_BLOCK
        base = slot // KEY_BLOCK * (KEY_BLOCK * (row.size + columns) // packed + scales)
        lane = base + scales + inner // panel * panel * row.size // packed + inner % panel * group
        for e in range(0, row.size, 2 * group):
            for r in range(group):
                both = row[e + r] | row[e + group + r] << I(4)
                page[np.uintp(lane + e // 2 * panel + r)] = both

    @bare
    def write_value_codes(row, page, slot, channels, columns):
        """`write_value` of codes, in one half of their bytes."""
        inner = slot % KEY_BLOCK
        block = slot // KEY_BLOCK * (KEY_BLOCK * (channels + columns) // packed + scales)
        block += KEY_BLOCK * channels // packed + scales
        step = inner // group
        shift = I(step % 2 * 4)
        kept = I(0xF0) >> shift
        for c in range(0, columns, panel):
            width = min(panel, columns - c)
            base = block + c * KEY_BLOCK // packed + step // 2 * width * group + inner % group
            for e in range(min(width, row.size - c)):
                at = np.uintp(base + e * group)
                page[at] = (I(page[at]) & kept) | row[c + e] << shift

    @bare
    def write_key(row, page, slot, columns, added):
        """One token's channels, padded to whole groups, into its lane of the panel."""
        inner = slot % KEY_BLOCK
        if four_bits:
            write_key_codes(row, page, slot, columns)
            return
        base = slot // KEY_BLOCK * (KEY_BLOCK * (row.size + columns) + scales)
        lane = base + scales + inner // panel * panel * row.size + inner % panel * group
        for e in range(0, row.size, group):
            for r in range(group):
                page[np.uintp(lane + e * panel + r)] = row[e + r] + added

    @bare
    def write_value(row, page, slot, channels, columns, added):
        """One token's values into its byte lane of the block.

        Columns behind the row keep their zeros.
        """
        inner = slot % KEY_BLOCK
        if four_bits:
            write_value_codes(row, page, slot, channels, columns)
            return
        block = (
            slot // KEY_BLOCK * (KEY_BLOCK * (channels + columns) + scales)
            + KEY_BLOCK * channels
            + scales
        )
        for c in range(0, columns, panel):
            width = min(panel, columns - c)
            base = block + c * KEY_BLOCK + inner // group * width * group + inner % group
            for e in range(min(width, row.size - c)):
                page[np.uintp(base + e * group)] = row[c + e] + added

    @bare
    def write_scales(k_scale, v_scale, page, slot, channels, columns):
        """The scales of one token, before K and V of its block."""
        inner = slot % KEY_BLOCK
        base = slot // KEY_BLOCK * (KEY_BLOCK * (channels + columns) // packed + scales)
        both = page[base : base + scales].view(np.float32)
        both[inner] = k_scale
        if exact:
            both[KEY_BLOCK + inner] = v_scale

    return write_key, write_value, write_scales


def over_heads(append_head, parallel: bool):
    """append(key, value, counts, pages, table, lengths, sizes, offset, work) of integer storage.

    `append_head` for every sequence and KV head; then the lengths grow.
    """
    for_each = over_tasks if parallel else in_turn

    @bare
    def append_one(n, key, value, counts, pages, table, lengths, sizes, offset, work):
        b, g = n // key.shape[1], n % key.shape[1]
        append_head(
            key[b, g],
            value[b, g],
            counts[b],
            pages[:, g],
            table[b],
            lengths[b],
            sizes,
            offset[b, g],
            work[n],
        )

    @kernel
    def append(key, value, counts, pages, table, lengths, sizes, offset, work):
        for_each(
            append_one,
            key.shape[0] * key.shape[1],
            (key, value, counts, pages, table, lengths, sizes, offset, work),
        )
        for b in range(counts.size):
            lengths[b] += counts[b]

    return append


@functools.cache
def make_append_int8(tile: Tile, parallel: bool):
    """append(key, value, counts, pages, table, lengths, sizes, offset, work).

    key and value (B, Hkv, n, D) are float32.

    counts (B,) int64 are added to the lengths; pages, table, lengths: the arrays of `task_data.Store`,
    one by one, because a named tuple of them costs as much to pass as the append itself; sizes (6,)
    int64: sinks, ring, page size, columns, channels as stored, Dv; offset (B, Hkv, D) float32; work (B * Hkv, 4, max(D in
    whole groups, Dv)) float32 scratch. Rows of a tile with a `rotation` are rotated first.
    """
    write_key, write_value, write_scales = make_writers(tile)
    added = I(tile.q_offset)
    v_added = I(tile.v_offset)
    shared = tile.shared
    rotation = tile.rotation

    @bare
    def quantize_value(row, line, moved, out):
        """A row of values, rotated in `line` first where they are; returns its scale."""
        if rotation == 0:
            return quantize_row(row, moved, out, NO_VALUE, CODES)
        for e in range(row.size):
            line[e] = row[e]
        rotate_row(line[: row.size], rotation)
        return quantize_row(line[: row.size], moved, out, NO_VALUE, CODES)

    @bare
    def append_head(key, value, count, pages, table, length, sizes, shift, work):
        sinks, ring, page_size, columns = sizes[0], sizes[1], sizes[2], sizes[3]
        d, dv = key.shape[1], value.shape[1]
        moved, rest = work[0, : max(d, dv)], work[1, :d]
        k_row = work[2].view(np.int32)[: sizes[4]]
        v_row = work[3].view(np.int32)[:dv]
        for i in range(count):
            slot = slot_of(length + i, sinks, ring)
            page, inner = pages[table[slot // page_size]], slot % page_size
            take_offset(key[i], shift, rest)
            if rotation:
                rotate_row(rest, rotation)
            k_scale = quantize_row(rest, moved, k_row, F(1), CODES)
            if shared:
                v_scale = k_scale if np.any(k_row[: sizes[5]]) else NO_VALUE
            else:
                v_scale = quantize_value(value[i], work[1], moved, v_row)
            if v_scale != v_scale or k_scale != k_scale:
                k_scale, v_scale = F(np.nan), NO_VALUE
                k_row[:], v_row[:] = 0, 0
            write_key(k_row, page, inner, columns, added)
            if not shared:
                write_value(v_row, page, inner, k_row.size, columns, v_added)
            k_scale = min(k_scale, SCALE_LIMIT) if k_scale == k_scale else k_scale
            write_scales(k_scale, v_scale, page, inner, k_row.size, columns)

    return over_heads(append_head, parallel)


@functools.cache
def make_append_float(tile: Tile, parallel: bool):
    """append(key, value, counts, pages, table, lengths, sizes, zeros).

    As for INT8, but key and value have the storage's own type, float32 or the bits of 16-bit floats
    as uint16.

    zeros (max(D, Dv),) unsigned bits: what is stored for a token that is not finite.
    """
    write_key, write_value, write_scales = make_writers(tile)
    for_each = over_tasks if parallel else in_turn
    bits = np.uint32 if tile.dtype == "float32" else np.uint16
    exponent = {"float32": 0x7F800000, "bfloat16": 0x7F80, "float16": 0x7C00}[tile.dtype]
    shared = tile.shared

    @bare
    def finite(row):
        for e in range(row.size):  # noqa: SIM110
            if row[e] & exponent == exponent:
                return False
        return True

    @bare
    def append_head(key, value, count, pages, table, length, sizes, zeros):
        sinks, ring, page_size, columns = sizes[0], sizes[1], sizes[2], sizes[3]
        d, dv = key.shape[1], value.shape[1]
        for i in range(count):
            slot = slot_of(length + i, sinks, ring)
            page, inner = pages[table[slot // page_size]], slot % page_size
            good = finite(key[i]) and (shared or finite(value[i]))
            write_key(key[i] if good else zeros[:d], page, inner, columns, 0)
            if not shared:
                write_value(value[i] if good else zeros[:dv], page, inner, d, columns, 0)
            write_scales(F(1) if good else F(np.nan), F(1), page, inner, d, columns)

    @bare
    def append_one(n, key, value, counts, pages, table, lengths, sizes, zeros):
        b, g = n // key.shape[1], n % key.shape[1]
        append_head(
            key[b, g].view(bits),
            value[b, g].view(bits),
            counts[b],
            pages[:, g],
            table[b],
            lengths[b],
            sizes,
            zeros,
        )

    @kernel
    def append(key, value, counts, pages, table, lengths, sizes, zeros):
        for_each(
            append_one,
            key.shape[0] * key.shape[1],
            (key, value, counts, pages, table, lengths, sizes, zeros),
        )
        for b in range(counts.size):
            lengths[b] += counts[b]

    return append
