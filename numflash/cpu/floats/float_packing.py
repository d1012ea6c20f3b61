"""Packed operands of the floating-point kernels.

K, per head: [panel][word][key in panel], words of 32 bits: one float32, or two bfloat16 channels
(the pair of one dot product). V, per head: [key][column] float32, in place where it is contiguous and
its rows are whole vectors; bfloat16 as [key pair][column][2 keys]. Columns are padded to whole vectors with zeros. Keys
that no row can see are not packed: as far as a tile of scores reads beyond the last key, it gets that
key again.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, separate
from ...jit.memory import array_at, reinterpret
from ...jit.parallel import over_tasks
from ..isa.strided import row_at
from ..isa.transpose import transpose
from .float_isas import FLOAT_ISAS

F = np.float32
U = np.uint32
INFINITY = U(0x7F800000)
MANY_ROWS = 384  # so many queries pay for moving V to cache lines: fewer vectors of it are split
ROWS = 32  # of packed V that a task writes
LARGEST = 2.0**120  # scores and their sums stay below


@bare
def largest(words, group):
    """Bits of the largest finite magnitude in a row of words; infinity and NaN do not count."""
    top = U(0)
    for e in range(words.size):
        if group == 1:
            x = U(words[e] & U(0x7FFFFFFF))
            top = max(top, x if x < INFINITY else U(0))
        else:
            x, y = U(words[e] & U(0x7FFF0000)), U(U(words[e] << U(16)) & U(0x7FFF0000))
            top = max(top, max(x if x < INFINITY else U(0), y if y < INFINITY else U(0)))
    return top


@functools.cache
def make_pack_keys(side: int, panel: int, unit: int, group: int):
    """pack_panel(k, n, p, stop, words, out) -> bits of the largest magnitude: panel p of head n.

    A panel has `panel` keys, transposed by squares of `side` words, which hold `group` numbers each; what
    follows the last key's `unit` is not written. out (panels * words * panel,) uint32 is the head's.
    """
    square, last_square = transpose(side), transpose(side, partial=True)

    @bare
    def largest_of(k, n, first, count):
        """`largest` of keys `first` to first + count - 1; contiguous rows are one long row."""
        whole = k.row == k.d * 4
        rows, words = (1, count * k.d) if whole else (count, k.d)
        top, start = U(0), row_at(k, n, first)
        for r in range(rows):
            top = max(top, largest(array_at(start + r * k.row, (words,), U), group))
        return top

    @bare
    def pack_panel(k, n, p, stop, words, out):
        first, real, stride = p * panel, k.d, k.row // 4
        count = max(0, min(panel, stop - first))
        start, target = row_at(k, n, first), first * words
        source = array_at(start, (count * real,), U)
        whole, columns = count // side * side, real // side * side
        end = (count + unit - 1) // unit * unit
        for c in range(0, whole, side):
            for e in range(0, columns, side):
                square(source, c * stride + e, stride, out, target + e * panel + c, panel)
        for c in range(whole, end, side):
            for e in range(0, columns, side):
                at, to = c * stride + e, target + e * panel + c
                last_square(source, at, stride, out, to, panel, count - 1 - c)
        for r in range(end if columns < real else 0):
            row = array_at(start + min(r, count - 1) * k.row, (real,), U)
            for e in range(columns, real):
                out[target + e * panel + r] = row[e]
        out[target + real * panel : target + words * panel] = U(0)
        return largest_of(k, n, first, count)

    return pack_panel


@bare
def pack_columns(v, n, first, stop, out):
    """Rows `first` to first + ROWS - 1 of head n, 32-bit words -> out (keys, columns), padded with zeros."""
    start = row_at(v, n, 0)
    for j in range(first, min(first + ROWS, out.shape[0])):
        row, real = out[j], v.d if j < stop else 0
        source = array_at(start + j * v.row, (real,), U)
        for t in range(real):
            row[t] = source[t]
        for t in range(real, row.size):
            row[t] = U(0)


@bare
def pack_pairs(v, n, first, stop, out):
    """Pairs `first` to first + ROWS - 1 of 16-bit rows of head n -> out (pairs, columns) uint32, padded with
    zeros.
    """
    start = row_at(v, n, 0)
    for p in range(first, min(first + ROWS, out.shape[0])):
        row, real = out[p], v.d if 2 * p < stop else 0
        low = array_at(start + 2 * p * v.row, (real,), np.uint16)
        if 2 * p + 1 < stop:
            high = array_at(start + (2 * p + 1) * v.row, (real,), np.uint16)
            for t in range(real):
                row[t] = U(U(low[t]) | U(U(high[t]) << U(16)))
        else:
            for t in range(real):
                row[t] = U(low[t])
        for t in range(real, row.size):
            row[t] = U(0)


@bare
def _pack_pairs_of(task, v, stops, out):
    parts = (out.shape[1] + ROWS - 1) // ROWS
    n = task // parts
    pack_pairs(v, n, task % parts * ROWS, stops[n // v.heads], out[n])


@separate(no_cpython_wrapper=False)
def pack_heads_in_pairs(v, stops, out):
    """`pack_pairs` of all heads: v (B, Hkv, S, Dv) uint16 -> out (B * Hkv, pairs, columns) uint32."""
    parts = (out.shape[1] + ROWS - 1) // ROWS
    over_tasks(_pack_pairs_of, out.shape[0] * parts, (v, stops, out))


@functools.cache
def make_packing(name: str):
    """(pack_head, pack_all) for register tiles of `name`.

    pack_head(x, sizes, n, slot) : K, and V unless that is read in place, of KV head n to `slot`
    pack_all(x, sizes) : all KV heads, each to the slot of its number, on all threads
    """
    isa = FLOAT_ISAS[name]
    panel = isa.panel
    pack_panel = make_pack_keys(isa.square, panel, isa.unit, isa.group)
    pack_rows = pack_columns if isa.group == 1 else pack_pairs

    @bare
    def pack_keys(x, n, slot, p):
        words = reinterpret(x.keys, U)[slot]
        magnitudes = x.magnitudes[slot]
        row = words.size // (magnitudes.size * panel)
        stop = x.stops[n // x.k.heads]
        magnitudes[p] = pack_panel(x.k, n, p, stop, row, words)

    @bare
    def pack_values(x, sizes, n, slot, part):
        words = reinterpret(x.values, U)[slot]
        rows = words.reshape(words.size // sizes.value_row, sizes.value_row)
        pack_rows(x.v, n, part * ROWS, x.stops[n // x.v.heads], rows)

    @bare
    def value_parts(x, sizes):
        """Tasks that pack V of a head; none where it is read in place."""
        if sizes.in_place:
            return 0
        rows = reinterpret(x.values, U).shape[1] // sizes.value_row
        return (rows + ROWS - 1) // ROWS

    @bare
    def set_limit(x, slot):
        """The largest |q| whose scores with the keys of a slot stay finite."""
        top, magnitudes = F(0), reinterpret(x.magnitudes, F)[slot]
        for p in range(magnitudes.size):
            top = max(top, magnitudes[p])
        x.limits[slot] = F(LARGEST / (np.float64(top) * x.terms))

    @bare
    def pack_head(x, sizes, n, slot):
        for p in range(x.magnitudes.shape[1]):
            pack_keys(x, n, slot, p)
        for part in range(value_parts(x, sizes)):
            pack_values(x, sizes, n, slot, part)
        set_limit(x, slot)

    @bare
    def pack_part(task, x, sizes):
        """One panel of K, or a part of V, of some head."""
        panels = x.magnitudes.shape[1]
        parts = panels + value_parts(x, sizes)
        n, part = task // parts, task % parts
        if part < panels:
            pack_keys(x, n, n, part)
        else:
            pack_values(x, sizes, n, n, part - panels)

    @separate
    def pack_all(x, sizes):
        heads, panels = x.magnitudes.shape
        over_tasks(pack_part, heads * (panels + value_parts(x, sizes)), (x, sizes))
        for n in range(heads):
            set_limit(x, n)

    return pack_head, pack_all
