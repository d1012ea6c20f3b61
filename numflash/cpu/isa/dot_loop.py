"""The product loop of every register tile.

`mr` rows times `nv` vectors of sums that stay in registers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from .operands import Rows
from .vectors import I32, I64, load, repeat

BESIDE = 3  # steps of dot products for each piece of other work between them


class Panel(NamedTuple):
    """B, packed: `stride` elements from step to step, or as many as the tile is wide."""

    base: Any
    first: Any
    stride: Any = None


def dot_loop(b, isa, dot, rows: Rows, panel: Panel, groups, init, nv, beside=None, unroll=1):
    """Sums of a tile, nv registers a row, over `groups` >= 1 steps; they begin with the list `init`.

    Yields the nv final values of each row. Elements of both are operands, 4 / group bytes each.

    The last step is outside the loop, row by row, so that what the caller does with a row runs
    beside the dot products of the next rows.

    beside : (count, emit); emit(n) for every n below `count` runs beside `BESIDE` steps, of which
        there must be enough
    unroll : steps of one turn of the loop
    """
    pb, b_off, b_stride = panel
    mr, width = len(init) // nv, 4 // isa.group  # rows, and bytes of an element

    def step(g, sums):
        row = b.add(
            b_off, b.mul(g, isa.elements(b, isa.group * nv) if b_stride is None else b_stride)
        )
        columns = [
            load(b, pb, b.add(row, isa.elements(b, isa.group * v)), isa.operand, width, 1)
            for v in range(nv)
        ]
        column = b.add(rows.first, b.mul(g, I64(isa.group)))
        for m in range(mr):
            word = load(b, rows.base, b.add(column, b.mul(rows.stride, I64(m))), I32, width, 1)
            x = b.bitcast(isa.splat(b, word, isa.vector(I32)), isa.operand)
            yield [dot(b, sums[m * nv + v], x, columns[v]) for v in range(nv)]

    def following(g, sums):
        return [x for row in step(g, sums) for x in row]

    def steps(n, sums):
        emit(n)
        for g in range(BESIDE):
            sums = following(b.add(b.mul(n, I64(BESIDE)), I64(g)), sums)
        return sums

    def turn(n, sums):
        for i in range(unroll):
            sums = following(b.add(b.mul(n, I64(unroll)), I64(i)), sums)
        return sums

    last = b.sub(groups, I64(1))
    first = I64(0)
    sums = init
    if beside:
        count, emit = beside
        first = b.mul(count, I64(BESIDE))
        sums = repeat(b, I64(0), count, sums, steps)
    if unroll > 1:
        turns = b.udiv(last, I64(unroll))
        sums = repeat(b, I64(0), turns, sums, turn)
        first = b.mul(turns, I64(unroll))
    yield from step(last, repeat(b, first, last, sums, following))
