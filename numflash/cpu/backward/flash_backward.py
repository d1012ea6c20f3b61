"""The gradient of attention with register tiles: dQ, dK and dV, with recomputation.

FlashAttention 2, algorithm 2 (Dao 2023); `study.backward_plain` derives it and does the same in
plain loops. A worker owns a head, or every `splits`-th block of its keys. It computes each tile of
weights and score gradients once, transposed: keys are rows, so that LSE and D = rowsum(dO * O) are
stored along the lanes. The steps of a tile:

    S^T = K.Q^T * scale * log2(e),  dP^T = V.dO^T     products: `score_tile` on packed Q and dO
    softcap, ALiBi, bias, mask, score functions       only where asked for: `edge_rows`
    P^T = 2**(S^T - LSE),  dS^T = P^T * (dP^T - D)    `row_gradients`
    dS of the scores that a bias was added to         only where asked for: `store_scores`
    dV += P^T.dO,  dK += dS^T.Q                       `value_tile`
    dQ += dS.K                                        after dS^T is transposed in registers

Sums, softmax and options are float32. Of bfloat16 problems the operands of the five products are
bfloat16 where the processor multiplies those: Q, K, V and dO, which lose nothing, and the weights
and score gradients, which are rounded, as PyTorch's are.

dQ is the worker's own (one copy for each split, added up in order at the end), and so are dK and dV
(one copy for each query head of a group), so nothing is atomic and equal inputs give equal bits at
every thread count: the number of splits follows from the shape alone. FlashAttention 2 adds dQ
atomically, and in its deterministic mode keeps copies as well.

A worker that owns a whole head copies and packs its Q and dO itself, and its dQ stays in the
worker's caches until it is done. With splits all heads are prepared first.

All numbers are finite here: rows that float32 cannot hold take no part (`launch_backward` has
`backward_rows` do them), and keys that are not finite are masked: a row that attends to them is
such a row, or gives them weight 0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, inlined, separate
from ...jit.memory import array_at
from ...jit.parallel import over_tasks
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_rows import row_narrow, row_scale
from ..floats.float_tiles import score_tile, value_tile
from ..isa.amx_tiles import tile_state
from ..isa.score_calls import must_mask, trimmed
from ..isa.transpose import transpose
from ..isa.vectors import next_task
from .dense_tiles import make_dense_tiles
from .edge_rows import make_edge_rows
from .head_rows import add_parts, make_head_rows, store_rows
from .held import examine
from .operands import KEYS, QUERIES, Operands, Scratch
from .row_gradients import row_gradients

F = np.float32
counted = inline(forceinline=True)  # the same where arrays are returned or made, with their counts


class Head(NamedTuple):
    """Operands of query head h of batch b, number n of all; its KV head is n_kv of all."""

    b: int
    h: int
    n_kv: int
    hidden: np.ndarray
    q: np.ndarray
    q_packed: np.ndarray
    do: np.ndarray
    do_packed: np.ndarray
    lse: np.ndarray
    delta: np.ndarray
    dq: np.ndarray


class Tile(NamedTuple):
    """`columns` queries from `query` on, and rows `first` to `stop` of a block of keys."""

    query: int
    columns: int
    first: int
    stop: int


class Left(NamedTuple):
    """The left operand of a product: `rows` rows of a flat array, `stride` elements apart."""

    data: np.ndarray
    first: int
    stride: int
    rows: int


def keys_of_block(name: str) -> int:
    """Keys of a block: whole register tiles."""
    rows = FLOAT_ISAS[name].rows
    return KEYS // rows * rows


@functools.cache
def scaled_scores(name: str, nv: int):
    """`score_tile` of `nv` vectors with a factor, which matrix tiles leave out: they store plain sums."""
    if not name.startswith("amx"):
        return score_tile(name, nv, scaled=True)
    sums = score_tile(name, nv)

    @inline
    def plain(x, row, stride, packed, source, steps, factor, out, to, out_stride):
        sums(x, row, stride, packed, source, steps, out, to, out_stride)

    return plain


@functools.cache
def make_backward(name: str):
    """The kernel of one instruction set."""
    isa = FLOAT_ISAS[name]
    lanes, panel, unit, nv = isa.lanes, isa.panel, isa.unit, isa.nv
    mr, group = isa.rows, isa.group
    half = max(1, nv // 2) * lanes
    block_keys = keys_of_block(name)
    operand = F if group == 1 else np.uint16
    begin_tiles, end_tiles = tile_state(name)
    gradients, sloped_gradients = row_gradients(name), row_gradients(name, sloped=True)
    side = isa.square
    square = transpose(side)
    narrow = row_narrow(name) if group == 2 else None
    value1, value2, value4 = (value_tile(name, n) for n in (1, max(1, nv // 2), nv))
    visible, call_functions, change = make_edge_rows(name)
    take_tile, keys_seen = make_dense_tiles(name)
    prepare, prepare_all, take, pair = make_head_rows(name)
    matrix = name.startswith("amx")
    score1, score2, score4 = (scaled_scores(name, n) for n in (1, max(1, nv // 2), nv))
    scale = row_scale(name)

    @bare
    def widest(columns):
        """Columns of the widest register tile that so many fill."""
        return panel if columns >= panel else half if columns >= half else lanes

    @bare
    def add_product(left, b, at, steps, out, to):
        """out[to + i] += sum over `steps` of left[i] * b[at + step], by tiles of `mr` rows."""
        width = out.shape[1]
        stride = left.stride
        t = 0
        while t < width:  # a chunk of b's columns stays in L1 for all rows
            n = widest(width - t)
            source, step = at * width + t * group, width * group
            for i in range(0, left.rows, mr):
                where, target, count = left.first + i * stride, (to + i) * width + t, steps // group
                if n == panel:
                    value4(left.data, where, stride, b, source, step, count, out, target, width)
                elif n == half:
                    value2(left.data, where, stride, b, source, step, count, out, target, width)
                else:
                    value1(left.data, where, stride, b, source, step, count, out, target, width)
            t += n

    @bare
    def products(x, packed, factor, tile, out):
        """out = x.packed^T * factor: rows of a block of keys against the tile's queries."""
        width = x.shape[1]
        at = 0
        while at < tile.columns:
            n = widest(tile.columns - at)
            source = (tile.query + at) // panel * panel * width + at % panel * group
            for r in range(tile.first, tile.stop, mr):
                row, to, steps = r * width, r * QUERIES + at, width // group
                if n == panel:
                    score4(x, row, width, packed, source, steps, factor, out, to, QUERIES)
                elif n == half:
                    score2(x, row, width, packed, source, steps, factor, out, to, QUERIES)
                else:
                    score1(x, row, width, packed, source, steps, factor, out, to, QUERIES)
            at += n
        if matrix and factor != F(1):
            for r in range(tile.first, tile.stop):
                scale(out, r * QUERIES, tile.columns // lanes, factor)

    @bare
    def query_span(options, b, key, keys, length, s):
        """The queries that attend to any of `keys` keys from `key` on."""
        first, stop = length, 0
        for r in range(keys):
            lo, hi = visible(options, b, key + r, s)
            if lo < min(hi, length):
                first, stop = min(first, lo), max(stop, min(hi, length))
        return first, stop

    @inlined
    def tile_at(options, head, key, keys, query, length, s, work):
        """The tile of the queries from `query` on: without the keys of the block at either end
        that no query attends to; whether score functions change it. `work` has its mask or bias.
        """
        functions, b, h = options.functions, head.b, head.h
        columns = min(QUERIES, length - query)
        on_diagonal = query + options.diagonal[b] - key  # the row of the first query's own key
        end = min(s, options.key_lengths[b]) - key
        first = max(0, on_diagonal - options.left) // mr * mr
        stop = (min(end, on_diagonal + columns + options.right) + mr - 1) // mr * mr
        stop = min(keys, stop)
        if first < stop:
            tile = Tile(query, columns, first, stop)
            take_tile(options, (b, h), key, tile, work)
            first, stop = keys_seen(options, tile, work)
        last = query + columns - 1
        if functions.states.size > 0 and first < stop:
            seen, seen_stop = trimmed(
                functions, b, h, query, last, key + first, min(key + stop, s), 1
            )
            first, stop = (seen - key) // mr * mr, (seen_stop - key + mr - 1) // mr * mr
            first, stop = (first, min(keys, stop)) if seen < seen_stop else (0, 0)
        called = functions.masked != 0 and (
            functions.unmasked != 0
            or must_mask(functions, b, h, query, last, key + first, key + stop)
        )
        return Tile(query, columns, first, stop), called

    @inlined
    def weigh(options, head, key, tile, sizes, called, work):
        """Scores and dP to weights and score gradients, row by row.

        Slopes are in `transposed`, and after it the gradients before they were multiplied by these.
        """
        x, dp, slope, columns = work.scores, work.slopes, work.transposed, tile.columns
        mask, bias = work.mask, work.bias
        always, sloped = options.general or called, called or options.softcap > F(0)
        if called:
            call_functions(options, sizes, head, key, tile, x, slope)
        for r in range(tile.first, tile.stop):
            lo, hi = visible(options, head.b, key + r, sizes.keys)
            lo = min(max(lo - tile.query, 0), columns)
            hi = min(max(hi - tile.query, 0), columns)
            if always:  # a mask may hold NaN for keys that only queries behind the last would see
                hi = min(hi, max(0, sizes.length - tile.query))
                lo = min(lo, hi)
            if key + r < sizes.keys and head.hidden[key + r]:
                hi = lo
            changed = always or lo > 0 or hi < columns
            at = r * QUERIES
            if changed:
                change(options, head, key + r, tile, (lo, hi), x, slope, mask, bias, at, called)
            count, i = columns // lanes, tile.query
            lse, delta, p, ds = head.lse, head.delta, work.p, work.ds
            if sloped:
                sloped_gradients(x, dp, at, count, lse, delta, i, slope, p, ds)
            else:
                gradients(x, dp, at, count, lse, delta, i, slope, p, ds)

    @inlined
    def store_scores(x, turned, tile, key, out):
        """out (L, S) = the gradients x of the tile's scores, where there are queries and keys.

        turned : a row of x has the keys of a query, not the queries of a key
        """
        columns = min(tile.columns, out.shape[0] - tile.query)
        first, count = tile.first, min(tile.stop, out.shape[1] - key) - tile.first
        for i in range(columns):
            row = out[tile.query + i, key + first :]
            if turned:
                source = x[i * KEYS + first :]
                for r in range(count):
                    row[r] = source[r]
            else:
                source = x[first * QUERIES + i :]
                for r in range(count):
                    row[r] = source[r * QUERIES]

    @inlined
    def turn(tile, work):
        """dS^T of a tile as dS, the left operand of dQ."""
        columns, first = tile.columns, tile.first // side * side
        transposed, turned = work.transposed, work.ds_turned
        for r in range(first, tile.stop, side):
            for at in range(0, columns, side):
                square(work.slopes, r * QUERIES + at, QUERIES, transposed, at * KEYS + r, KEYS)
        if group == 2:
            count = (tile.stop - first + lanes - 1) // lanes
            for at in range(first, first + columns * KEYS, KEYS):
                narrow(transposed, at, turned, at, count)
        for x in range(columns * KEYS, (columns + -columns % mr) * KEYS):
            turned[x] = operand(0)  # rows beyond the length of the last register tile

    @inlined
    def add_gradients(head, tile, work):
        """What the weights and score gradients of a tile add to dV, dK and dQ."""
        i, first, rows, columns = tile.query, tile.first, tile.stop - tile.first, tile.columns
        at = first * QUERIES
        add_product(Left(work.p, at, QUERIES, rows), head.do, i, columns, work.dv, first)
        add_product(Left(work.ds, at, QUERIES, rows), head.q, i, columns, work.dk, first)
        turn(tile, work)
        turned = Left(work.ds_turned, first, KEYS, columns)
        add_product(turned, work.k_right, first, rows, head.dq, i)

    @counted
    def head_of(x, sizes, room, n, slot, split):
        """The operands of head n, prepared in `slot`, and dQ of one share of its keys."""
        b, h = n // sizes.heads, n % sizes.heads
        n_kv = b * sizes.kv_heads + h * sizes.kv_heads // sizes.heads
        return Head(
            b, h, n_kv, x.hidden[n_kv], room.q[slot], room.q_packed[slot], room.do[slot], room.do_packed[slot],
            x.lse[n], x.delta[n], room.dq[slot, split],
        )  # fmt: skip

    @inlined
    def take_block(x, n_kv, key, keys, work):
        """K and V of a block of keys; its gradients are 0 so far."""
        take(x.k, x.hidden, n_kv, key, keys, work.room, work.k)
        pair(work.k, keys, work.k_right)
        take(x.v, x.hidden, n_kv, key, keys, work.room, work.v)
        work.dk[:keys] = F(0)
        work.dv[:keys] = F(0)

    @counted
    def prepare_head(x, n, slot, room):
        """Q and dO of head n, by the worker that `slot` belongs to."""
        for chunk in range((x.q.length + QUERIES - 1) // QUERIES):
            prepare(x.q, x.skip, n, chunk, room.q[slot], room.q_packed[slot])
            prepare(x.do, x.skip, n, chunk, room.do[slot], room.do_packed[slot])

    if group == 1:

        @counted
        def part_of(scratch, worker):
            """One worker's part of `Scratch`. Until dS is there, slopes of score functions are in
            `transposed`; float32 operands of products are where they were computed.
            """
            scores, slopes = scratch.scores[worker], scratch.slopes[worker]
            turned, k = scratch.transposed[worker], scratch.k[worker]
            return Scratch(
                scores, slopes, turned, scores, slopes, turned, k, scratch.v[worker], k,
                scratch.room[worker], scratch.dk[worker], scratch.dv[worker],
                scratch.mask[worker], scratch.bias[worker],
            )  # fmt: skip

    else:

        @counted
        def part_of(scratch, worker):
            return Scratch(
                scratch.scores[worker], scratch.slopes[worker], scratch.transposed[worker],
                scratch.p[worker], scratch.ds[worker], scratch.ds_turned[worker],
                scratch.k[worker], scratch.v[worker], scratch.k_right[worker], scratch.room[worker],
                scratch.dk[worker], scratch.dv[worker], scratch.mask[worker], scratch.bias[worker],
            )  # fmt: skip

    @inline
    def of_groups(x, n, group):
        """A contiguous (B, H, S, D) of n heads in all as (B * Hkv, query heads that share keys, S, D)."""
        return array_at(x.start, (n // group, group, x.length, x.d), np.float32)

    @bare
    def any_true(x):
        """Whether one of an array of bool is true."""
        found = False
        for bit in x.reshape(x.size):
            found |= bit
        return found

    @inline(twice=True)
    def work_of(worker, x, factors, options, sizes, counter, scratch, room, out):
        """One worker: shares, as long as there are any."""
        s, splits = sizes.keys, sizes.splits
        n_heads, length = x.lse.shape[0], (x.q.length + unit - 1) // unit * unit
        work = part_of(scratch, worker)
        begin_tiles()
        wanted = out.scores.size > 0
        while True:
            task = next_task(counter)
            if task >= n_heads * splits:
                break
            n, split = task // splits, task % splits
            slot = worker if splits == 1 else n
            if splits == 1:
                prepare_head(x, n, slot, room)
            head = head_of(x, sizes, room, n, slot, split)
            head.dq[: length + mr] = F(0)
            # interleaved: causal shares are equal
            for key in range(split * block_keys, s, splits * block_keys):
                keys = min(block_keys, (s - key + mr - 1) // mr * mr)
                take_block(x, head.n_kv, key, keys, work)
                first, stop = query_span(options, head.b, key, keys, length, s)
                for query in range(first // QUERIES * QUERIES, stop, QUERIES):
                    tile, called = tile_at(options, head, key, keys, query, length, s, work)
                    if tile.first >= tile.stop:
                        continue
                    products(work.k, head.q_packed, factors.scores, tile, work.scores)
                    products(work.v, head.do_packed, F(1), tile, work.slopes)
                    weigh(options, head, key, tile, sizes, called, work)
                    sloped = called or options.softcap > F(0)
                    if wanted and sloped:
                        store_scores(work.transposed, False, tile, key, out.scores[n])
                    add_gradients(head, tile, work)
                    if wanted and not sloped:  # dS is in `transposed` by now
                        store_scores(work.transposed, True, tile, key, out.scores[n])
                store_rows(work.dk, min(keys, s - key), factors.dk, out.dk, n, key)
                store_rows(work.dv, min(keys, s - key), F(1), out.dv, n, key)
            if splits == 1:
                store_rows(head.dq, x.q.length, factors.dq, out.dq, n, 0)
        end_tiles()

    @separate
    def run(given, found, factors, options, sizes, counter, scratch, room, sums, out):
        """The gradients of all rows that float32 holds: whether it does not hold all.

        given Given; found Found, filled here; factors Factors; options Semantics; sizes Sizes;
        counter (1,) int64; scratch Scratch; room Prepared, which with splits has all heads; sums
        and out Gradients, written: `sums` is out, or where several query heads share keys has
        copies of dk and dv for each. Of their scores only those of tiles are written: zeros before.
        """
        examine(given, found)
        if sizes.splits > 1:
            prepare_all(given.q, found.skip, room.q, room.q_packed)
            prepare_all(given.do, found.skip, room.do, room.do_packed)
        x = Operands(
            given.q, given.k, given.v, given.do, found.skip, found.hidden, found.lse, found.delta
        )
        counter[0] = 0
        over_tasks(
            work_of, sizes.workers, (x, factors, options, sizes, counter, scratch, room, sums)
        )
        if sizes.splits > 1:
            add_parts(room.dq, factors.dq, out.dq)
        n, group = found.lse.shape[0], sizes.heads // sizes.kv_heads
        if group > 1:
            add_parts(of_groups(sums.dk, n, group), factors.dq, out.dk)
            add_parts(of_groups(sums.dv, n, group), F(1), out.dv)
        return any_true(found.skip)

    return run
