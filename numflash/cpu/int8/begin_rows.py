"""Where the online softmax of a query tile begins: with the first keys of its sequence.

They are in no block, because attention looks at them more than at others, and are kept with more
bits. Their scores are float32, after all options; m, l and O begin with them.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inlined
from ...numerics import fixedpoint as fx
from ...numerics.fixedpoint import FIRST_KEYS
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, batch_of, call_tile
from ..semantics import UNSEEN, transform_row
from .first_keys import rows_together, score_rows, value_rows, weigh_first

F = np.float32
I = np.int32


@bare
def clear(first, stop, state):
    """The state of rows that have seen nothing."""
    for i in range(first, stop):
        state.l[i], state.m[i] = F(0), I(UNSEEN)
    state.o[first:stop] = F(0)


@functools.cache
def make_begin_rows(isa_name: str, pv: str):
    """f(q, job, semantics, x): the state of a tile after the first keys; x, a flat scratch."""
    first_scores, first_values = score_rows(isa_name), value_rows(isa_name)
    together = rows_together(isa_name)
    weigh_four, weigh_one = (weigh_first(rows, fx.WEIGHT_ONE[pv]) for rows in (4, 1))

    @inlined
    def first_row_scores(q, job, semantics, x):
        """Scores of the first keys, after all options, FIRST_KEYS for each row; -inf is hidden."""
        b, h, n, row = job.place
        tile, kv = job.tile, job.kv
        d, functions = q.shape[2], semantics.functions
        for i in range(0, tile.real, together):
            first_scores(
                q, (n * q.shape[1] + row + i) * d, d, min(together, tile.real - i), kv.first.keys,
                kv.number, kv.first.scale, tile.scale, i, x, i * FIRST_KEYS,
            )  # fmt: skip
        if functions.masked != 0:
            function = Function(functions.masked, functions.masked_frame)
            scores, corner = Rows(x, 0, FIRST_KEYS), Corner(batch_of(functions, b), h, row, 0)
            call_tile(function, scores, tile.real, tile.first_keys, corner, fx.LN2_Q8, fx.LOG2E_Q8)
        # bounds never fall from row to row: the last start and the first end speak for all rows
        all_seen = tile.start[tile.real - 1] == 0 and tile.hi[0] >= FIRST_KEYS
        if all_seen and tile.first_keys == FIRST_KEYS and not semantics.general:
            return
        for i in range(tile.real):
            start, stop = min(tile.start[i], tile.first_keys), min(tile.hi[i], tile.first_keys)
            seen = x[i * FIRST_KEYS : (i + 1) * FIRST_KEYS]
            if semantics.general and start < stop:
                transform_row(semantics, b, h, row + i, start, seen[start:stop])
            if start > 0 or stop < FIRST_KEYS:
                for j in range(FIRST_KEYS):
                    if j < start or j >= stop:
                        seen[j] = F(-np.inf)

    @inlined
    def begin_rows(q, job, semantics, x):
        tile, kv, state = job.tile, job.kv, job.state
        if tile.start[0] >= tile.first_keys or tile.hi[tile.real - 1] == 0:
            clear(0, tile.rows, state)
            return
        clear(tile.real, tile.rows, state)
        first_row_scores(q, job, semantics, x)
        o, width, fours = state.o.reshape(state.o.size), state.o.shape[1], tile.real // 4 * 4
        no_number = False
        for i in range(0, fours, 4):
            no_number |= weigh_four(x, i * FIRST_KEYS, state.m, i, state.l, i)
        for i in range(fours, tile.real):
            no_number |= weigh_one(x, i * FIRST_KEYS, state.m, i, state.l, i)
        for i in range(0, tile.real, together):
            first_values(
                x, i * FIRST_KEYS, min(together, tile.real - i), kv.first.values, kv.number, width, o,
                i * width,
            )  # fmt: skip
        if no_number:
            mark_spoiled(q, job, semantics, x)

    @bare(forceinline=False)
    def mark_spoiled(q, job, semantics, x):
        """The rows that have a score that is NaN."""
        first_row_scores(q, job, semantics, x)
        for i in range(job.tile.real * FIRST_KEYS):
            if x[i] != x[i]:
                job.state.spoiled[i // FIRST_KEYS] = 1

    return begin_rows
