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
from ...jit.memory import array_at
from ...jit.parallel import over_tasks
from ..isa.strided import row_at
from ..isa.transpose import transpose

U = np.uint32
INFINITY = U(0x7F800000)
ROWS = 32  # of packed V that a task writes
MANY_ROWS = 2048  # so many queries pay for moving V to cache lines: fewer vectors of it are split


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
    """pack_keys(k, stops, sizes, out, most): panels of `panel` keys, transposed by squares of `side`
    words, which hold `group` numbers each; what follows the last key's `unit` is not written.
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
    def pack_panel(task, k, stops, words, out, most):
        n, p = task // most.shape[1], task % most.shape[1]
        first, real, stride = p * panel, k.d, k.row // 4
        count = max(0, min(panel, stops[n // k.heads] - first))
        start, target = row_at(k, n, first), task * panel * words
        source = array_at(start, (count * real,), U)
        most[n, p] = largest_of(k, n, first, count)
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

    @separate(no_cpython_wrapper=False)
    def pack_keys(k, stops, words, out, most):
        """k (B, Hkv, S, up to `words`) uint32 -> out (N * panels * words * panel,), padded with zeros; most
        (N, panels) bits.

        N = B * Hkv; stops (B,) keys of each batch that can be seen.
        """
        over_tasks(pack_panel, most.size, (k, stops, words, out, most))

    return pack_keys


@bare
def _pack_columns(task, v, stops, out):
    keys = out.shape[1]
    parts = (keys + ROWS - 1) // ROWS
    n, first = task // parts, task % parts * ROWS
    start, stop = row_at(v, n, 0), stops[n // v.heads]
    for j in range(first, min(first + ROWS, keys)):
        row, real = out[n, j], v.d if j < stop else 0
        source = array_at(start + j * v.row, (real,), U)
        for t in range(real):
            row[t] = source[t]
        for t in range(real, row.size):
            row[t] = U(0)


@separate(no_cpython_wrapper=False)
def pack_columns(v, stops, out):
    """v (B, Hkv, S, Dv) 32-bit words -> out (B * Hkv, keys, columns), padded with zeros."""
    over_tasks(_pack_columns, out.shape[0] * ((out.shape[1] + ROWS - 1) // ROWS), (v, stops, out))


@bare
def _pack_pairs(task, v, stops, out):
    pairs = out.shape[1]
    parts = (pairs + ROWS - 1) // ROWS
    n, first = task // parts, task % parts * ROWS
    start, stop = row_at(v, n, 0), stops[n // v.heads]
    for p in range(first, min(first + ROWS, pairs)):
        row, real = out[n, p], v.d if 2 * p < stop else 0
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


@separate(no_cpython_wrapper=False)
def pack_pairs(v, stops, out):
    """v (B, Hkv, S, Dv) uint16 -> out (B * Hkv, pairs, columns) uint32, padded with zeros."""
    over_tasks(_pack_pairs, out.shape[0] * ((out.shape[1] + ROWS - 1) // ROWS), (v, stops, out))
