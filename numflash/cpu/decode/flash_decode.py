"""Attention of a few new tokens over a KV cache.

One pass over the keys of each KV head, in splits that are merged in order.

Flash-Decoding (Dao et al. 2023) on the layout of `decode_tiles`. A task is one tile of query rows
of one KV head and one split of its key blocks; it leaves an unnormalised output, its octave or
maximum m and its sum l. The splits are merged in fixed order, and the division by the sum of the
weights comes last:

    out = sum_i(2**(m_i - m) o_i) / sum_i(2**(m_i - m) l_i)

In the INT8 pipeline every m is a whole octave, so nothing is rounded by the merge but the
additions; `reference.integer_decode` is the definition, split for split and bit for bit.

FlashDecoding++'s unified maximum is in `study.split_decode` only: with a constant in place of the
maximum, and without the test for overflow that it then needs, float32 decode of 4096 keys is 0 to 1
% faster (Granite Rapids), because the maximum is a few instructions beside the memory's time, and O
is rescaled only after it has grown by eight octaves.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ... import fixedpoint as fx
from ...jit.compiler import bare, inline, kernel
from ...jit.parallel import over_tasks
from ...tiling import KEY_BLOCK
from ..floats.float_tiles import row_exp, row_max
from ..isa.amx_tiles import tile_state
from ..isa.vectors import address, apart, next_task
from . import matrix_tiles
from .append import quantize_row
from .changes import (
    Rows,
    attends_to_bad,
    change_floats,
    change_ints,
    hide_masked,
    row_options,
)
from .functions import LN2, LOG2E, apply_functions, apply_to_integers
from .slots import coverage, hide, row_edges, sees_bad
from .softmax import octave_rows, shrink_rows, value_ratios, weigh_rows
from .tiles import CQ, HIDDEN, LOW_BITS, ROWS, START, L, M, Tile, score_tile, value_tile

F = np.float32
I = np.int32
INFINITE = I(0x7F800000)
MAGNITUDE = I(0x7FFFFFFF)
ROUND = F(1.5 * 2.0**23)
UNSEEN = F(fx.MIN_OCTAVE)
NOTHING = F(-3e38)  # maximum of a float row that has seen no key
HUGE = I(0x7C000000)  # bits of 2**121: float32 does not hold sums of such scores
AGAIN = F(np.inf)  # maximum of a float row that is to be done again in float64
GROWTH = F(8)  # octaves that a float maximum may grow before O is rescaled
FLOAT_VECTORS = {16: "avx512", 8: "avx2", 4: "neon"}


class Store(NamedTuple):
    """The cache: pages of keys and values, see `decode_tiles` for the layout inside a page and
    head.

    data : (pages, Hkv, elements): scales, K and V block by block; the scale of a key is NaN where
        the token was not finite
    table : (B, pages of a sequence) int32, the page of each `page size` slots;  lengths : (B,)
        int64 tokens
    """

    data: np.ndarray
    table: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return self.data.nbytes


class Scratch(NamedTuple):
    """Buffers of W workers and T tasks (query tile x split), allocated once; `rows` of a tile.

    q (W, rows, planes, words) int32; work (W, 32, 128) int32, see `decode_tiles`; sums (W, 64,
    columns) float32, the output of a task; line (W, 2, D) float32; edges (W, rows, 5) int64;
    spoiled (W, rows) uint8; o (T, rows, columns), m, l (T, 8) float32; counter (2,) int64: the next
    task, and whether any row is to be done again
    """

    q: np.ndarray
    work: np.ndarray
    sums: np.ndarray
    line: np.ndarray
    edges: np.ndarray
    spoiled: np.ndarray
    o: np.ndarray
    m: np.ndarray
    l: np.ndarray
    counter: np.ndarray


class Query(NamedTuple):
    """The query rows of one task: `real` of them, in the buffers of its worker.

    `options` are the scratch with `changes`.
    """

    words: np.ndarray  # (rows, planes, words) int32 operands of the products
    work: (
        np.ndarray
    )  # (16, 128) int32 scores, then weights, then the state of each row: see `tiles`
    edges: np.ndarray  # (rows, 5) int64 slots that a row attends to: see `slots`
    spoiled: np.ndarray  # (rows,) uint8 whether a row attends to a token that is not finite
    o: np.ndarray  # (rows, columns) float32 sums
    real: int
    rows: Rows
    options: NamedTuple


class Blocks(NamedTuple):
    """Key blocks side by side in the elements `data` of one head of a page.

    The first begins at element `base`, the next `step` elements further. Each has `n` slots, the
    first of them is slot `first` of the sequence. More than one only where every row attends to all
    of them: then `inside` is true.
    """

    data: np.ndarray
    base: int
    step: int
    count: int  # type: ignore[assignment]  # a field; tuple has a method of that name
    n: int
    first: int
    inside: bool


@bare
def largest_bits(x):
    """Bits of the largest magnitude of floats: ordered like the floats, NaN above all."""
    bits, top = x.view(np.int32), I(0)
    for j in range(bits.size):
        top = max(top, I(bits[j] & MAGNITUDE))
    return top


@functools.cache
def _make_block(tile: Tile, rows: int):
    """The two products of one key block, block_scores and block_values.

    They take addresses, see `score_tile` and `value_tile`.
    """
    score = score_tile(tile, rows)
    nv = tile.width(rows)
    value = value_tile(tile, rows, nv)
    value_one = value_tile(tile, rows, 1)
    lanes = tile.lanes
    panel = tile.panel
    group = tile.group
    size = tile.size
    scales = tile.scales
    span = nv * lanes

    @bare(forceinline=True)
    def block_scores(place, n, q, words, work):
        """work[:, :n] = scores of the first n keys of the block at `place`."""
        keys = place + scales * size
        for j in range(0, n, span):
            score(
                q,
                words,
                keys + (j // panel * panel * words + j % panel) * group * size,
                place,
                j,
                work,
            )

    @bare(forceinline=True)
    def block_values(place, n, words, work, o, columns):
        """o += P.V of the first n keys of the block at `place`."""
        values = place + (scales + KEY_BLOCK * words * group) * size
        steps = (n + group - 1) // group
        for c in range(0, columns, panel):
            width = min(panel, columns - c)
            x = 0
            while x + span <= width:
                value(
                    work,
                    values + (c * KEY_BLOCK + x * group) * size,
                    width * group,
                    steps,
                    o,
                    c + x,
                    columns,
                )
                x += span
            while x < width:
                value_one(
                    work,
                    values + (c * KEY_BLOCK + x * group) * size,
                    width * group,
                    steps,
                    o,
                    c + x,
                    columns,
                )
                x += lanes

    return block_scores, block_values


@functools.cache
def _make_matrix_block(tile: Tile, rows: int):
    """`_make_block` on the matrix tiles; a block's memory is there whole, whatever `n` is."""
    score = matrix_tiles.matrix_scores(tile, rows)
    value_two = matrix_tiles.matrix_values(tile, rows, 8)
    value = matrix_tiles.matrix_values(tile, rows, 4)
    value_one = matrix_tiles.matrix_values(tile, rows, 1)
    panel, lanes, scales = tile.panel, tile.lanes, tile.scales

    @bare(forceinline=True)
    def block_scores(place, n, q, words, work):
        """work[:, :n] = scores of the first n keys of the block at `place`."""
        score(q, words, place + scales, place, n, work)

    @bare(forceinline=True)
    def block_values(place, n, words, work, o, columns):
        """o += P.V of the block at `place`; weights beyond the first n keys are 0."""
        values = place + scales + KEY_BLOCK * words * 4
        whole = columns // panel * panel
        pairs = columns // (2 * panel) * 2 * panel
        for c in range(0, pairs, 2 * panel):
            value_two(work, values + c * KEY_BLOCK, panel * 4, o, c, columns)
        for c in range(pairs, whole, panel):
            value(work, values + c * KEY_BLOCK, panel * 4, o, c, columns)
        for c in range(whole, columns, lanes):
            base = values + whole * KEY_BLOCK + (c - whole) * 4
            value_one(work, base, (columns - whole) * 4, o, c, columns)

    return block_scores, block_values


@functools.cache
def _make_int8(tile: Tile, rows: int, changed: bool):
    block_scores, block_values = (_make_matrix_block if tile.matrix else _make_block)(tile, rows)
    ratios, octaves, shrink, weigh = (
        make(tile, rows) for make in (value_ratios, octave_rows, shrink_rows, weigh_rows)
    )
    q_offset = tile.q_offset
    two_planes = tile.planes == 2
    word = {4: np.int8, 2: np.int16, 1: np.int32}[tile.group]
    half = I(1 << LOW_BITS - 1)

    @bare
    def prepare(q, c, words, line, codes, spoiled, r):
        """Quantise one query row into words; returns (first value of its sums, its scale)."""
        whole, out = codes[: q.size], words.view(word)
        s = quantize_row(q, line, whole, F(1), F(fx.QUERY_ONE))
        out[:] = 0
        if s != s:
            spoiled[r] = 1
            return I(0), F(0)
        total = I(0)
        for e in range(whole.size):
            x = whole[e]
            total = np.add(total, x)
            if two_planes:
                high = np.right_shift(np.add(x, half), I(LOW_BITS))
                out[0, e] = high
                out[1, e] = np.subtract(x, np.left_shift(high, I(LOW_BITS)))
            else:
                out[0, e] = x
        return np.multiply(I(-q_offset), total), min(F(s * c), F(2.0**100))

    @bare(forceinline=True)
    def score_block(place, n, q, words, work):
        """Scores of the first n keys; (whether a token is not finite, the unit of the weights)."""
        some_bad, v_max = ratios(place, n, work)
        block_scores(place, n, q, words, work)
        return some_bad, F(v_max * F(fx.VALUE_UNIT))

    @bare(forceinline=True)
    def weigh_block(place, n, words, work, o, columns, unit):
        """From scores to sums."""
        if octaves(work):
            shrink(work, o, columns)
        weigh(work, unit)
        block_values(place, n, words, work, o, columns)

    @bare(forceinline=False)
    def take_whole(place, blocks, step, q, words, work, o, columns):
        """Whole blocks, `step` bytes apart, that every row attends to.

        Whether a token is not finite.

        A function of its own, of nothing but addresses and sizes: they stay in registers.
        """
        apart()
        bad = False
        for _ in range(blocks):
            some_bad, unit = score_block(place, KEY_BLOCK, q, words, work)
            weigh_block(place, KEY_BLOCK, words, work, o, columns, unit)
            bad |= some_bad
            place += step
        return bad

    @bare(forceinline=True)
    def take(blocks, query):
        """Add key blocks to the sums of the query rows."""
        words, columns, n = query.words.shape[2], query.o.shape[1], blocks.n
        place, work_at = address(blocks.data) + blocks.base, address(query.work)
        q_at, o_at = address(query.words), address(query.o)
        if blocks.inside and n == KEY_BLOCK:
            step = blocks.step
            if take_whole(place, blocks.count, step, q_at, words, work_at, o_at, columns):
                query.spoiled[: query.real] = 1
            return
        some_bad, unit = score_block(place, n, q_at, words, work_at)
        k_scale = blocks.data[blocks.base : blocks.base + n * 4].view(np.float32)
        for r in range(query.real):
            edges, row = query.edges[r], query.work[r]
            if some_bad and sees_bad(edges, blocks.first, k_scale):
                query.spoiled[r] = 1
            row[n:] = HIDDEN
            hide(edges, blocks.first, n, row, I(HIDDEN))
        weigh_block(place, n, words, work_at, o_at, columns, unit)

    @bare(forceinline=True)
    def take_changed(blocks, query):
        """`take` with the options of `changes`, block by block."""
        words, columns, n = query.words.shape[2], query.o.shape[1], blocks.n
        q_at, work_at, o_at = address(query.words), address(query.work), address(query.o)
        s, at = query.options, query.rows
        for i in range(blocks.count):
            base, first = blocks.base + i * blocks.step, blocks.first + i * KEY_BLOCK
            place = address(blocks.data) + base
            some_bad, unit = score_block(place, n, q_at, words, work_at)
            k_scale = blocks.data[base : base + n * 4].view(np.float32)
            for r in range(query.real):
                edges, row = query.edges[r], query.work[r]
                row[n:] = HIDDEN
                if s.function != 0:
                    if apply_to_integers(query.work, r, n, first, k_scale, some_bad, query, HIDDEN):
                        query.spoiled[r] = 1
                    continue
                if some_bad and attends_to_bad(edges, first, k_scale, s, at, r):
                    query.spoiled[r] = 1
                change_ints(row[:n], HIDDEN, first, at, row_options(s, at, r))
                hide(edges, first, n, row, I(HIDDEN))
                hide_masked(row[:n], I(HIDDEN), first, s, at, r)
            weigh_block(place, n, words, work_at, o_at, columns, unit)

    return prepare, take_changed if changed else take, UNSEEN


@functools.cache
def _make_float(tile: Tile, rows: int, changed: bool):
    block_scores, block_values = _make_block(tile, rows)
    vectors = FLOAT_VECTORS[tile.lanes]
    top_of = row_max(vectors)
    weights = row_exp(vectors)
    lanes = tile.lanes
    count = KEY_BLOCK // tile.lanes
    scales = tile.scales

    @bare
    def prepare(q, c, words, line, codes, spoiled, r):
        """Copy one query row; its scale is c."""
        bits = q.view(np.int32)
        for e in range(bits.size):
            words[0, e] = bits[e]
        if largest_bits(q) >= INFINITE:
            spoiled[r] = 1
            words[:] = 0
        return I(0), c

    @bare(forceinline=True)
    def grow(r, top, m, l, o):
        """The running maximum of row r becomes `top`: its sums shrink."""
        if l[r] != F(0):
            shrink, row = F(2.0) ** F(max(m[r] - top, F(-150))), o[r]
            for e in range(row.size):
                row[e] = row[e] * shrink
            l[r] = l[r] * shrink
        m[r] = top

    @bare(forceinline=True)
    def take_block(blocks, query, base, first):
        """Add one key block, which begins at element `base` and at slot `first`."""
        n, words, s, at = blocks.n, query.words.shape[2], query.options, query.rows
        k_scale, t = blocks.data[base : base + scales].view(np.float32), query.work.view(np.float32)
        place, work_at = address(k_scale), address(t)
        sums, m, l = t[rows, :lanes], t[rows, M : M + ROWS], t[rows, L : L + ROWS]
        # before the products: memory is read in one straight line
        some_bad = largest_bits(k_scale[:n]) > INFINITE
        block_scores(place, n, address(query.words), words, work_at)
        for r in range(query.real):
            row, edges = t[r], query.edges[r]
            if largest_bits(row[:n]) > HUGE and (blocks.inside or coverage(edges, first, n)[0]):
                m[r] = AGAIN
            if n < KEY_BLOCK:
                row[n:] = F(-np.inf)
            if changed and s.function != 0:
                largest = apply_functions(t, r, n, first, k_scale, some_bad, query, LN2, LOG2E)
                if largest > INFINITE:
                    query.spoiled[r] = 1
                elif largest > HUGE:
                    m[r] = AGAIN
            elif changed:
                if some_bad and attends_to_bad(edges, first, k_scale[:n], s, at, r):
                    query.spoiled[r] = 1
                change_floats(row[:n], first, at, row_options(s, at, r))
                hide_masked(row[:n], F(-np.inf), first, s, at, r)
            elif some_bad and sees_bad(edges, first, k_scale[:n]):
                query.spoiled[r] = 1
            if not blocks.inside:
                hide(edges, first, n, row, F(-np.inf))
            top = top_of(t, r * KEY_BLOCK, count)
            if top == F(-np.inf) or m[r] == AGAIN:
                row[:] = F(0)
                continue
            if top > m[r] + GROWTH:
                grow(r, top, m, l, query.o)
            sums[:lanes] = F(0)
            weights(t, r * KEY_BLOCK, count, m[r], t, r * KEY_BLOCK, sums, 0)
            total = l[r]
            for e in range(lanes):
                total = F(total + sums[e])
            l[r] = total
        block_values(place, n, words, work_at, address(query.o), query.o.shape[1])

    @bare(forceinline=True)
    def take(blocks, query):
        """Add key blocks to the sums of the query rows."""
        for i in range(blocks.count):
            base, first = blocks.base + i * blocks.step, blocks.first + i * KEY_BLOCK
            take_block(blocks, query, base, first)

    return prepare, take, NOTHING


@functools.cache
def make_decode(tile: Tile, rows: int, changed: bool, parallel: bool):
    """The kernel for one storage, instruction set and number of rows of a query tile.

    changed : with the options of `changes`; the scratch is a `ChangedScratch` then.

    decode(q, c, store, scratch, sizes, out, m_out, l_out), see its own words.
    """
    exact = tile.dtype == "int8"
    group = tile.group
    scales = tile.scales
    one = F(fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT if exact else 1)
    begin_tiles, end_tiles = tile_state("amx" if tile.matrix else tile.isa, 2 * rows)
    prepare, take, nothing = (_make_int8 if exact else _make_float)(tile, rows, changed)

    @bare
    def begin(q, c, w, s, at, window, real):
        """The rows of a task in the buffers of worker w.

        Operands, what each attends to, and the empty state.
        """
        words, edges, spoiled, work = s.q[w], s.edges[w], s.spoiled[w], s.work[w]
        o = s.sums[w, :rows]
        start, codes = work[rows, START : START + ROWS], s.line[w, 1].view(np.int32)
        state = work[rows].view(np.float32)
        cq, m, l = state[CQ : CQ + ROWS], state[M : M + ROWS], state[L : L + ROWS]
        o[:], m[:], l[:], spoiled[:] = F(0), nothing, F(0), 0
        for r in range(real, rows):
            words[r] = 0
            start[r], cq[r], work[r] = 0, F(0), 0
        for r in range(real):
            row = q[at.b, at.g, at.row + r]
            start[r], cq[r] = prepare(row, c, words[r], s.line[w, 0], codes, spoiled, r)
            position = at.length - at.queries + (at.row + r) % at.queries
            row_edges(position, window, at.sinks, at.ring, edges[r])
        return Query(words, work, edges, spoiled, o, real, at, s)

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
    def attend(q, c, store, s, w, task, sizes):
        """One task: its part of the keys for its rows, into s.o, s.m and s.l of the task."""
        queries, splits, window, sinks, ring, page_size, _ = sizes
        n_kv, all_rows = store.data.shape[1], q.shape[2]
        tiles = (all_rows + rows - 1) // rows
        split, unit = task % splits, task // splits
        row, n_head = unit % tiles * rows, unit // tiles
        b, g = n_head // n_kv, n_head % n_kv
        length = store.lengths[b]
        slots = min(length, sinks + ring)
        blocks = (slots + KEY_BLOCK - 1) // KEY_BLOCK
        share = (blocks + splits - 1) // splits
        at = Rows(b, g, row, queries, length, sinks, ring)
        query = begin(q, c, w, s, at, window, min(rows, all_rows - row))
        edges = query.edges
        every_from, every_to = edges[0, 1], edges[0, 2]  # slots that every row attends to
        for r in range(1, query.real):
            every_from, every_to = max(every_from, edges[r, 1]), min(every_to, edges[r, 2])
        block, stop = split * share, min((split + 1) * share, blocks)
        step = KEY_BLOCK * (query.words.shape[2] * group + query.o.shape[1]) + scales
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
                page = store.data[store.table[b, first // page_size], g]
                take(Blocks(page, slot // KEY_BLOCK * step, step, count, n, first, inside), query)
            block += count
        leave(query, s, task, slots)

    @bare
    def attends(query, r, slots, total):
        """Whether row r attends to a token; functions hide tokens that its edges do not."""
        if changed and query.options.function != 0:
            return total != F(0)
        return coverage(query.edges[r], 0, slots)[0]

    @bare
    def leave(query, s, task, slots):
        """The sums and the state of the rows become the task's."""
        state = query.work[rows].view(np.float32)
        m, l = state[M : M + ROWS], state[L : L + ROWS]
        for r in range(query.real):
            if query.spoiled[r] and attends(query, r, slots, l[r]):
                l[r] = F(np.nan)
            s.m[task, r], s.l[task, r] = m[r], l[r]
            own, part = query.o[r], s.o[task, r]
            for e in range(own.size):
                part[e] = own[e]

    @bare
    def merge_splits(s, base, splits, r):
        """The splits of row r in their order, into the first one's sums.

        Its maximum and its sum of weights.
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

    @bare
    def finish(unit, q, store, s, sizes, out, m_out, l_out):
        """Merge the splits of one tile, and divide by the sum of the weights."""
        n_kv, all_rows = store.data.shape[1], q.shape[2]
        tiles = (all_rows + rows - 1) // rows
        row, n_head = unit % tiles * rows, unit // tiles
        b, g = n_head // n_kv, n_head % n_kv
        base = unit * sizes[1]
        for r in range(min(rows, all_rows - row)):
            top, total = merge_splits(s, base, sizes[1], r)
            result, sums = out[b, g, row + r], s.o[base, r]
            if total == F(0):
                result[:] = F(0)
            else:
                reciprocal = one / total
                for e in range(result.size):
                    result[e] = F(sums[e] * reciprocal)
                if not exact and total == total and largest_bits(result) >= INFINITE:
                    top = AGAIN
            if top == AGAIN:
                s.counter[1] = 1
            m_out[b, g, row + r], l_out[b, g, row + r] = top, total

    @inline
    def take_tasks(worker, q, c, store, s, sizes, out, m_out, l_out):
        """Tasks of one worker, as long as there are any."""
        splits = sizes[1]
        begin_tiles()
        tasks = q.shape[0] * q.shape[1] * ((q.shape[2] + rows - 1) // rows) * splits
        while True:
            task = next_task(s.counter)
            if task >= tasks:
                break
            attend(q, c, store, s, worker, task, sizes)
            if splits == 1:
                finish(task, q, store, s, sizes, out, m_out, l_out)
        end_tiles()

    @kernel
    def decode(q, c, store, scratch, sizes, out, m_out, l_out):
        """All rows of all KV heads of all sequences.

        q (B, Hkv, rows, D) float32, the rows of a KV head being (query head of the group, new
        token); c float32 scale * log2(e), times 256 for INT8; sizes = (new tokens, splits, window,
        sinks, ring, page size, workers); out (B, Hkv, rows, Dv) float32; m_out, l_out (B, Hkv,
        rows) float32: the softmax state in octaves and its sum, l NaN where the row attended to a
        token that was not finite, m AGAIN where float32 does not hold the row's scores or sums.
        """
        units = q.shape[0] * q.shape[1] * ((q.shape[2] + rows - 1) // rows)
        scratch.counter[0], scratch.counter[1] = 0, 0
        if parallel:
            over_tasks(take_tasks, sizes[6], (q, c, store, scratch, sizes, out, m_out, l_out))
            if sizes[1] > 1:
                over_tasks(finish, units, (q, store, scratch, sizes, out, m_out, l_out))
        else:
            take_tasks(0, q, c, store, scratch, sizes, out, m_out, l_out)
            if sizes[1] > 1:
                for unit in range(units):
                    finish(unit, q, store, scratch, sizes, out, m_out, l_out)

    return decode
