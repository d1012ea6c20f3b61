"""Operands of the tiled gradient in the layout of its products, and its sums as results.

The left operand of a product is read row by row, the right one by whole vectors: its rows are
padded to those and begin on cache lines, and of bfloat16 two rows are interleaved, which vdpbf16ps
and tdpbf16ps multiply and add at once. Q and dO are needed as right operands and in panels, K as a
left and a right operand of one block, V as a left one.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, inline
from ...jit.memory import array_at, reinterpret, uncleared
from ...jit.parallel import over_tasks
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_rows import row_narrow
from ..isa.strided import row_at
from ..isa.transpose import transpose
from .operands import QUERIES

F = np.float32
CHUNK = 64  # rows of a result that one task adds up


class HeadRows(NamedTuple):
    """Jitted functions of one instruction set. Operands are float32, or bfloat16 bits in uint16.

    prepare(x, skip, n, chunk, right, packed) : rows chunk * QUERIES and on of head n of x (B, H, L, D)
        float32, `Strided`, as a right operand to `right` (padded L, columns) and in panels to `packed`, flat;
        zeros where `skip` (N, L) is true and beyond x, to the end of a tile of scores
    prepare_all(x, skip, right, packed) : all rows of all heads, right (N, ...), packed (N, ...)
    take(x, skip, n, first, count, room, left) : `count` rows of head n from `first` on as a left
        operand; room, flat float32, is overwritten
    pair(left, count, right) : the left operand of an even number of rows as a right one
    """

    prepare: Any
    prepare_all: Any
    take: Any
    pair: Any


@bare
def is_skipped(skip, n, i):
    """Whether row i of head n is to be left out; `skip` (N, L) bool, or empty: none is."""
    return skip.size > 0 and skip[n, i]


@bare
def copy_rows(x, skip, n, first, count, rows, at):
    """rows[at : at + count] = rows `first` and on of head n of x, zeros where x ends or `skip` is true."""
    length, start = x.length, row_at(x, n, first)
    for r in range(count):
        target, i = rows[at + r], first + r
        if i < length and not is_skipped(skip, n, i):
            source = array_at(start + r * x.row, (x.d,), np.float32)
            for e in range(x.d):
                target[e] = source[e]
            for e in range(x.d, target.size):
                target[e] = F(0)
        else:
            for e in range(target.size):
                target[e] = F(0)


@bare
def store_rows(sums, count, factor, out, n, at):
    """Rows `at` and on of head n of out = sums[:count] * factor, without the padding of the columns."""
    start = row_at(out, n, at)
    for r in range(count):
        source, target = sums[r], array_at(start + r * out.row, (out.d,), np.float32)
        for e in range(target.size):
            target[e] = source[e] * factor


@bare
def _take_floats(x, skip, n, first, count, room, left):
    copy_rows(x, skip, n, first, count, left, 0)


@bare
def _keep(left, count, right):
    """Nothing: float32 is one operand on either side, and `right` is the memory of `left`."""


@bare
def _interleave(left, count, right):
    """right[r : r + 2] = rows r and r + 1 of left, their elements in turns."""
    for r in range(0, count, 2):
        a, b, pairs = left[r], left[r + 1], reinterpret(right[r : r + 2], np.uint32)
        half = a.size // 2
        for e in range(half):
            pairs[0, e] = np.uint32(a[e]) | np.uint32(b[e]) << np.uint32(16)
        for e in range(half):
            pairs[1, e] = np.uint32(a[half + e]) | np.uint32(b[half + e]) << np.uint32(16)


@functools.cache
def make_head_rows(name: str) -> HeadRows:
    """The functions of one instruction set."""
    isa = FLOAT_ISAS[name]
    panel, side, group, lanes, unit = isa.panel, isa.square, isa.group, isa.lanes, isa.unit
    square = transpose(side)
    take, pair = _take_floats, _keep
    if group == 2:
        narrow = row_narrow(name)
        pair = _interleave

        @bare
        def take(x, skip, n, first, count, room, left):
            numbers = count * left.shape[1]
            copy_rows(x, skip, n, first, count, room[:numbers].reshape(count, left.shape[1]), 0)
            narrow(room, 0, left, 0, numbers // lanes)

    @inline
    def prepare(x, skip, n, chunk, right, packed):
        columns, first = right.shape[1], chunk * QUERIES
        count = min(QUERIES, (x.length + unit - 1) // unit * unit - first)
        right = right[first : first + count]
        left = right
        if group == 2:
            left = uncleared((QUERIES, columns), right.dtype, "rows as left operands")[:count]
        room = uncleared((QUERIES * columns if group == 2 else 0,), F, "rows as floats")
        take(x, skip, n, first, count, room, left)
        pair(left, count, right)
        words = columns // group
        whole = words // side * side
        for p in range(0, count, panel):
            to = (first + p) * words
            rows = min(panel, count - p)
            for c in range(0, rows, side):
                for e in range(0, whole, side):
                    source = (p + c) * words + e
                    square(left, source, words, packed, to + e * panel + c, panel)
            for c in range(rows):
                row = left[p + c]
                for e in range(whole * group, columns):
                    place = (to + e // group * panel + c) * group + e % group
                    packed[place] = row[e]

    @inline
    def prepare_one(task, x, skip, right, packed):
        chunks = (right.shape[1] + QUERIES - 1) // QUERIES
        n = task // chunks
        prepare(x, skip, n, task % chunks, right[n], packed[n])

    @inline
    def prepare_all(x, skip, right, packed):
        chunks = (right.shape[1] + QUERIES - 1) // QUERIES
        over_tasks(prepare_one, right.shape[0] * chunks, (x, skip, right, packed))

    return HeadRows(prepare, prepare_all, take, pair)


@bare
def _add_chunk(task, parts, factor, out):
    chunks = (out.length + CHUNK - 1) // CHUNK
    n, first = task // chunks, task % chunks * CHUNK
    start = row_at(out, n, 0)
    for r in range(first, min(first + CHUNK, out.length)):
        target, part = array_at(start + r * out.row, (out.d,), np.float32), parts[n, 0, r]
        for e in range(target.size):
            target[e] = part[e]
        for p in range(1, parts.shape[1]):
            part = parts[n, p, r]
            for e in range(target.size):
                target[e] += part[e]
        for e in range(target.size):
            target[e] *= factor


@inline
def add_parts(parts, factor, out):
    """out (B, H, rows, D) = the sum of parts (B * H, P, at least rows, at least D), in order, * factor."""
    chunks = (out.length + CHUNK - 1) // CHUNK
    over_tasks(_add_chunk, parts.shape[0] * chunks, (parts, factor, out))
