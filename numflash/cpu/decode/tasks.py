"""One task of decode: the rows of one tile, or of several tiles together, over one split of the key
blocks.
"""

from __future__ import annotations

import functools

from ...jit.compiler import bare, inlined
from ...tiling import KEY_BLOCK
from ..isa.vectors import address
from .changes import Rows
from .shared_values import make_shared_values
from .slots import FIRST, STOP, coverage
from .task_data import Blocks, rows_together
from .tile_rows import make_tile_rows
from .tiles import Tile


@bare
def seen_by_some(query, first, n):
    """(whether some row attends to some of n slots from `first` on, whether every row to all of
    them).
    """
    some, every = False, True
    for r in range(query.real):
        any_slot, all_slots = coverage(query.edges[r], first, n)
        some |= any_slot
        every &= all_slots
    return some, every


@bare
def work_of(task, rows, all_rows, store, sizes):
    """What a task is: where its first row is (`Rows`), the number of its head among those of all
    sequences, its split, the slots that its sequence holds, and its first and last block of keys.

    Tasks are numbered by head, by groups of `rows` rows, by split.
    """
    queries, splits, _, sinks, ring, _, _ = sizes
    n_kv, groups = store.data.shape[1], (all_rows + rows - 1) // rows
    split, unit = task % splits, task // splits
    row, n_head = unit % groups * rows, unit // groups
    b, g = n_head // n_kv, n_head % n_kv
    length = store.lengths[b]
    slots = min(length, sinks + ring)
    blocks = (slots + KEY_BLOCK - 1) // KEY_BLOCK
    share = (blocks + splits - 1) // splits
    at = Rows(b, g, row, queries, length, sinks, ring)
    return at, n_head, split, slots, split * share, min((split + 1) * share, blocks)


@functools.cache
def make_attend(tile: Tile, rows: int, changed: bool):
    """attend(q, c, store, s, w, task, sizes) of a cache that stores values."""
    packed = tile.packed
    group = tile.group
    scales = tile.scales
    _, begin, take, leave = make_tile_rows(tile, rows, changed)

    @inlined
    def attend(q, c, store, s, w, task, sizes):
        """One task: its part of the keys for its rows, into s.o, s.m and s.l of the task."""
        _, _, window, _, _, page_size, _ = sizes
        all_rows = q.shape[2]
        at, _, _, slots, block, stop = work_of(task, rows, all_rows, store, sizes)
        query = begin(q, c, w, 0, s, at, window, min(rows, all_rows - at.row))
        edges = query.edges
        every_from, every_to = edges[0, FIRST], edges[0, STOP]  # slots that every row attends to
        for r in range(1, query.real):
            every_from = max(every_from, edges[r, FIRST])
            every_to = min(every_to, edges[r, STOP])
        step = KEY_BLOCK * (query.words.shape[2] * group + query.o.shape[1]) // packed + scales
        while block < stop:
            first, count = block * KEY_BLOCK, 1
            n, slot = min(KEY_BLOCK, slots - first), first % page_size
            seen = inside = first >= every_from and first + n <= every_to
            if inside:  # as many whole blocks as are contiguous in memory
                whole = min(stop, every_to // KEY_BLOCK) - block
                count = max(1, min(whole, (page_size - slot) // KEY_BLOCK))
            else:
                seen, inside = seen_by_some(query, first, n)
            if seen:
                page = store.data[store.table[at.b, first // page_size], at.g]
                take(Blocks(page, slot // KEY_BLOCK * step, step, count, n, first, inside), query)
            block += count
        leave(query, s, task, slots)

    return attend


@functools.cache
def make_attend_together(tile: Tile, rows: int, changed: bool):
    """attend_together(q, c, store, s, w, task, sizes) of a cache whose values are in its keys."""
    group = tile.group
    scales = tile.scales
    size = tile.size
    span = rows_together(tile, rows) // rows  # tiles of a task
    make_values = make_shared_values(tile)
    buffers, begin, take, leave = make_tile_rows(tile, rows, changed)

    @bare
    def tile_of(all_rows, t, at):
        """Tile t of the rows of a task, and how many rows are in it."""
        first = at.row + t * rows
        own = Rows(at.b, at.g, first, at.queries, at.length, at.sinks, at.ring)
        return own, min(rows, all_rows - first)

    @bare
    def attend_together(q, c, store, s, w, task, sizes):
        """One task of a cache of latents: `attend` for several tiles, block by block.

        V of a block is made from its keys by the first tile that attends to some of them.
        """
        _, splits, window, _, _, page_size, _ = sizes
        all_rows = q.shape[2]
        all_tiles = (all_rows + rows - 1) // rows
        at, n_head, split, slots, start, stop = work_of(task, rows * span, all_rows, store, sizes)
        tiles = min(span, all_tiles - at.row // rows)
        for t in range(tiles):
            own, real = tile_of(all_rows, t, at)
            begin(q, c, w, t, s, own, window, real)
        channels, columns = s.q.shape[3] * group, s.sums.shape[2]
        step = KEY_BLOCK * channels + scales
        made_at = address(s.sums[w, rows * span :])
        for block in range(start, stop):
            first = block * KEY_BLOCK
            n, base = min(KEY_BLOCK, slots - first), first % page_size // KEY_BLOCK * step
            page, made = store.data[store.table[at.b, first // page_size], at.g], False
            for t in range(tiles):
                own, real = tile_of(all_rows, t, at)
                query = buffers(s, w, t, own, real)
                seen, inside = seen_by_some(query, first, n)
                if seen and not made:
                    make_values(address(page) + base * size, n, channels, made_at, columns)
                    made = True
                if seen:
                    take(Blocks(page, base, step, 1, n, first, inside), query)
        for t in range(tiles):
            own, real = tile_of(all_rows, t, at)
            number = (n_head * all_tiles + at.row // rows + t) * splits + split
            leave(buffers(s, w, t, own, real), s, number, slots)

    return attend_together
