"""Attention of a few new tokens over a KV cache.

One pass over the keys of each KV head, in splits that are merged in order.

Flash-Decoding (Dao et al. 2023) on the layout of `tiles`. A task is one tile of query rows
of one KV head and one split of its key blocks; it leaves an unnormalised output, its octave or
maximum m and its sum l. The splits are merged in fixed order, and the division by the sum of the
weights comes last:

    out = sum_i(2**(m_i - m) o_i) / sum_i(2**(m_i - m) l_i)

In the INT8 pipeline every m is a whole octave, so nothing is rounded by the merge but the
additions; `reference.integer_decode` is the definition, split for split and bit for bit.

A cache whose values are in its keys is for many query rows of one KV head: a task is up to
`SHARED_ROWS` rows in several tiles, which share V of a block (`shared_values`), and K while it is in
the caches.

On the CPU FlashDecoding++'s unified maximum is in `study.split_decode` only: with a constant in
place of the maximum, and without the test for overflow that it then needs, float32 decode of 4096
keys is 0 to 1 % faster (Granite Rapids), because the maximum is a few instructions beside the
memory's time, and O is rescaled only after it has grown by eight octaves.

`decode.call` runs it, for `launch_decode`. Shapes and dtypes of the arrays are in `task_data`, the
layout of the cache in `tiles`. Scores are int32 Q8.8 over integer caches, float32 octaves over
others.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inline, inlined, separate
from ...jit.parallel import over_tasks
from ...numerics import fixedpoint as fx
from ...numerics.quantize_kernels import INFINITE, largest_bits
from ...numerics.rotation import rotate_row
from ..isa.amx_tiles import ROWS as MATRIX_ROWS
from ..isa.amx_tiles import tile_state
from ..isa.vectors import next_task
from .task_data import (
    AGAIN,
    Results,
    Sizes,
    rows_together,
)
from .tasks import make_attend, make_attend_together
from .tiles import Tile

F = np.float32


@functools.cache
def make_decode(tile: Tile, rows: int, changed: bool, parallel: bool):
    """The kernel for one storage, instruction set and number of rows of a query tile.

    changed : with the options of `changes`; the scratch is a `ChangedScratch` then.

    decode(q, c, store, scratch, sizes, out, m_out, l_out), see its docstring.
    """
    exact = tile.exact
    rotation = tile.rotation
    span = rows_together(tile, rows) // rows  # tiles of a task
    one = F(fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT if exact else 1)
    begin_tiles, end_tiles = tile_state(
        "amx" if tile.matrix else tile.isa, 2 * rows if exact else MATRIX_ROWS
    )
    attend_task = (make_attend_together if tile.shared else make_attend)(tile, rows, changed)

    @bare
    def merge_splits(s, base, splits, r):
        """Merge the splits of row r in their order into the first one's sums.

        Returns the row's maximum and its sum of weights.
        """
        top = s.m[base, r]
        for i in range(1, splits):
            top = max(top, s.m[base + i, r])
        sums, total = s.o[base, r], s.l[base, r]
        for i in range(splits):
            if splits > 1:
                share, part = F(2.0) ** F(max(s.m[base + i, r] - top, F(-126))), s.o[base + i, r]
                if i == 0:
                    total = F(total * share)
                    for e in range(sums.size):
                        sums[e] = F(sums[e] * share)
                else:
                    total = F(total + F(s.l[base + i, r] * share))
                    for e in range(sums.size):
                        sums[e] = F(sums[e] + F(part[e] * share))
        return top, total

    @inlined
    def finish(unit, q, store, s, sizes, results):
        """Merge the splits of one tile, and divide by the sum of the weights."""
        n_kv, all_rows = store.data.shape[1], q.shape[2]
        tiles = (all_rows + rows - 1) // rows
        row, n_head = unit % tiles * rows, unit // tiles
        b, g = n_head // n_kv, n_head % n_kv
        splits = sizes.splits
        base = unit * splits
        for r in range(min(rows, all_rows - row)):
            top, total = merge_splits(s, base, splits, r)
            result, sums = results.out[b, g, row + r], s.o[base, r]
            if total == F(0):
                result[:] = F(0)
            else:
                reciprocal = one / total
                for e in range(result.size):
                    result[e] = F(sums[e] * reciprocal)
                if rotation:
                    rotate_row(result, rotation)
                if not exact and total == total and largest_bits(result) >= INFINITE:
                    top = AGAIN
            if top == AGAIN:
                s.counter[1] = 1
            results.m[b, g, row + r], results.l[b, g, row + r] = top, total

    @inline
    def take_tasks(worker, q, c, store, s, sizes, results):
        """Tasks of one worker, as long as there are any."""
        splits = sizes.splits
        begin_tiles()
        tiles, together = (q.shape[2] + rows - 1) // rows, rows * span
        chunks = (q.shape[2] + together - 1) // together
        tasks = q.shape[0] * q.shape[1] * chunks * splits
        while True:
            task = next_task(s.counter)
            if task >= tasks:
                break
            attend_task(q, c, store, s, worker, task, sizes)
            if splits == 1:
                first = task // chunks * tiles + task % chunks * span
                stop = min(first + span, (task // chunks + 1) * tiles)
                for unit in range(first, stop):
                    finish(unit, q, store, s, sizes, results)
        end_tiles()

    @separate(no_cpython_wrapper=False)
    def decode(q, c, store, scratch, sizes, out, m_out, l_out):
        """All rows of all KV heads of all sequences.

        q (B, Hkv, rows, D) float32, the rows of a KV head being (query head of the group, new
        token); c float32 scale * log2(e), times 256 for INT8; sizes = (new tokens, splits, window,
        sinks, ring, page size, workers); out (B, Hkv, rows, Dv) float32; m_out, l_out (B, Hkv,
        rows) float32: the softmax state in octaves and its sum, l NaN where the row attended to a
        token that was not finite, m AGAIN where float32 does not hold the row's scores or sums.
        """
        units = q.shape[0] * q.shape[1] * ((q.shape[2] + rows - 1) // rows)
        queries, splits, window, sinks, ring, page_size, workers = sizes
        named = Sizes(queries, splits, window, sinks, ring, page_size, workers)
        results = Results(out, m_out, l_out)
        scratch.counter[0], scratch.counter[1] = 0, 0
        if parallel:
            over_tasks(take_tasks, workers, (q, c, store, scratch, named, results))
            if splits > 1:
                over_tasks(finish, units, (q, store, scratch, named, results))
        else:
            take_tasks(0, q, c, store, scratch, named, results)
            if splits > 1:
                for unit in range(units):
                    finish(unit, q, store, scratch, named, results)

    return decode
