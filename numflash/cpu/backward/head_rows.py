"""Operands of the tiled gradient in the layout of its products, and its sums as results.

The right operand of a product is read by whole vectors: its rows are padded to those and begin on
cache lines. Q and dO are needed as rows and in panels, K and V as rows of one block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.parallel import over_tasks
from ..floats.float_isas import FLOAT_ISAS
from ..isa.transpose import transpose
from .operands import QUERIES

F = np.float32
CHUNK = 64  # rows of a result that one task adds up


class HeadRows(NamedTuple):
    """Jitted functions of one instruction set.

    prepare(x, skip, n, chunk, rows, packed) : rows chunk * QUERIES and on of head n of x (N, L, D),
        to `rows` (padded L, columns) and in panels to `packed`, flat; zeros beyond x and where
        `skip` (N, L) is true
    prepare_all(x, skip, rows, packed) : all rows of all heads, rows (N, ...), packed (N, ...)
    """

    prepare: Any
    prepare_all: Any


@bare
def is_skipped(skip, n, i):
    """Whether row i of head n is to be left out; `skip` (N, L) bool, or empty: none is."""
    return skip.size > 0 and skip[n, i]


@bare
def copy_rows(x, skip, n, first, count, rows, at):
    """rows[at : at + count] = x[n, first : first + count], zeros where x ends or `skip` is true."""
    length, d = x.shape[1], x.shape[2]
    for r in range(count):
        target, i = rows[at + r], first + r
        if i < length and not is_skipped(skip, n, i):
            source = x[n, i]
            for e in range(d):
                target[e] = source[e]
            for e in range(d, target.size):
                target[e] = F(0)
        else:
            for e in range(target.size):
                target[e] = F(0)


@bare
def store_rows(sums, count, factor, out, at):
    """out[at : at + count] = sums[:count] * factor, without the padding of the columns."""
    for r in range(count):
        source, target = sums[r], out[at + r]
        for e in range(target.size):
            target[e] = source[e] * factor


@functools.cache
def make_head_rows(name: str) -> HeadRows:
    """The functions of one instruction set."""
    isa = FLOAT_ISAS[name]
    panel, side = isa.panel, isa.square
    square = transpose(side)

    @bare
    def prepare(x, skip, n, chunk, rows, packed):
        high, columns = rows.shape
        first = chunk * QUERIES
        last = min(first + QUERIES, high)
        copy_rows(x, skip, n, first, last - first, rows, first)
        for p in range(first, last, panel):
            for c in range(0, panel, side):
                for e in range(0, columns, side):
                    source, target = (p + c) * columns + e, p * columns + e * panel + c
                    square(rows, source, columns, packed, target, panel)

    @bare
    def prepare_one(task, x, skip, rows, packed):
        chunks = (rows.shape[1] + QUERIES - 1) // QUERIES
        n = task // chunks
        prepare(x, skip, n, task % chunks, rows[n], packed[n])

    @kernel
    def prepare_all(x, skip, rows, packed):
        chunks = (rows.shape[1] + QUERIES - 1) // QUERIES
        over_tasks(prepare_one, rows.shape[0] * chunks, (x, skip, rows, packed))

    return HeadRows(prepare, prepare_all)


@bare
def _add_chunk(task, parts, factor, out):
    chunks = (out.shape[1] + CHUNK - 1) // CHUNK
    n, first = task // chunks, task % chunks * CHUNK
    for r in range(first, min(first + CHUNK, out.shape[1])):
        target, part = out[n, r], parts[n, 0, r]
        for e in range(target.size):
            target[e] = part[e]
        for p in range(1, parts.shape[1]):
            part = parts[n, p, r]
            for e in range(target.size):
                target[e] += part[e]
        for e in range(target.size):
            target[e] *= factor


@kernel
def add_parts(parts, factor, out):
    """out (N, rows, D) = the sum of parts (N, P, at least rows, at least D), in order, * factor."""
    chunks = (out.shape[1] + CHUNK - 1) // CHUNK
    over_tasks(_add_chunk, out.shape[0] * chunks, (parts, factor, out))
