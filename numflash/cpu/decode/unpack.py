"""Taking tokens out of a KV cache again.

From the decode layout to rows of float32, for attention of a long prompt over a cache.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.parallel import over_tasks
from ...numerics.rotation import rotate_row
from ...tiling import KEY_BLOCK
from .append import in_turn
from .tiles import Tile

F = np.float32
I = np.int32


@functools.cache
def make_unpack(tile: Tile, parallel: bool):
    """unpack(data, pages, sizes, offset, key, value).

    The first tokens of one sequence, in slot order.

    data, pages : of `task_data.Store`, its page numbers for this sequence
    sizes : (4,) int64: page size, columns, tokens, channels of K as stored
    offset : (Hkv, D) float32, added to integer keys; the keys of a rotated cache are rotated back
        first
    key, value : (Hkv, tokens or more, D) and (Hkv, ..., Dv) float32, written; NaN where a token was
        not finite
    """
    group = tile.group
    panel = tile.panel
    scales = tile.scales
    exact = tile.exact
    shared = tile.shared
    four_bits = tile.packed == 2
    rotation = tile.rotation
    for_each = over_tasks if parallel else in_turn
    packed = tile.packed
    shift = 16 if tile.dtype == "bfloat16" else 0
    q_wraps = tile.q_offset > 0
    v_wraps = tile.v_offset > 0

    @bare
    def code(x, wraps):
        """The number that was stored as x, with 128 added where it wraps."""
        return (I(x) & I(255)) - I(128) if wraps else I(x)

    @bare
    def number(x, high):
        """The number whose code is in one half of x."""
        return ((I(x) >> I(4 if high else 0)) & I(15)) * I(2) - I(15)

    @bare
    def read_key_codes(page, lane, scale, out):
        for e in range(out.size):
            word = e // group
            x = page[np.uintp(lane + word // 2 * group * panel + e % group)]
            out[e] = F(F(number(x, word % 2)) * scale)

    @bare
    def read_value_codes(page, block, inner, columns, scale, out):
        step = inner // group
        for c in range(0, out.size, panel):
            width = min(panel, columns - c)
            base = block + c * KEY_BLOCK // 2 + step // 2 * width * group + inner % group
            for e in range(min(width, out.size - c)):
                x = page[np.uintp(base + e * group)]
                out[c + e] = F(F(number(x, step % 2)) * scale)

    @bare
    def read_key(page, lane, scale, out):
        bits = out.view(np.int32)
        for first in range(0, out.size, group):
            for e in range(first, min(first + group, out.size)):
                x = page[np.uintp(lane + first * panel + e - first)]
                if exact:
                    out[e] = F(F(code(x, q_wraps)) * scale)
                else:
                    bits[e] = I(x) << I(shift)

    @bare
    def read_value(page, block, inner, columns, scale, out):
        bits = out.view(np.int32)
        for c in range(0, out.size, panel):
            width = min(panel, columns - c)
            base = block + c * KEY_BLOCK + inner // group * width * group + inner % group
            for e in range(min(width, out.size - c)):
                x = page[np.uintp(base + e * group)]
                if exact:
                    out[c + e] = F(F(code(x, v_wraps)) * scale)
                else:
                    bits[c + e] = I(x) << I(shift)

    @bare
    def unpack_head(g, data, pages, sizes, offset, key, value):
        page_size, columns, channels = sizes[0], sizes[1], sizes[3]
        step = KEY_BLOCK * (channels + columns) // packed + scales
        for slot in range(sizes[2]):
            page, at = data[pages[slot // page_size], g], slot % page_size
            inner, base = at % KEY_BLOCK, at // KEY_BLOCK * step
            factors = page[base : base + scales].view(np.float32)
            scale = factors[inner]
            if scale != scale:
                key[g, slot, :] = F(np.nan)
                value[g, slot, :] = F(np.nan)
                continue
            lane = base + scales + inner // panel * panel * channels // packed
            lane += inner % panel * group
            v_scale = factors[KEY_BLOCK + inner] if exact else F(1)
            block = base + scales + KEY_BLOCK * channels // packed
            if four_bits:
                read_key_codes(page, lane, scale, key[g, slot])
                read_value_codes(page, block, inner, columns, v_scale, value[g, slot])
            else:
                read_key(page, lane, scale, key[g, slot])
                if shared:
                    read_key(page, lane, v_scale, value[g, slot])
                else:
                    read_value(page, block, inner, columns, v_scale, value[g, slot])
            if rotation:
                rotate_row(key[g, slot], rotation)
                rotate_row(value[g, slot], rotation)
            if exact:
                for e in range(key.shape[2]):
                    key[g, slot, e] = F(key[g, slot, e] + offset[g, e])

    @kernel
    def unpack(data, pages, sizes, offset, key, value):
        for_each(unpack_head, key.shape[0], (data, pages, sizes, offset, key, value))

    return unpack
