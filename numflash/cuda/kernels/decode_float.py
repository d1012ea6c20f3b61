"""Decode over a float16 or bfloat16 cache on tensor cores.

New tokens against one split of one KV head's keys, sm_75 on.

Flash-Decoding (Dao et al. 2023), with the query heads of a group packed into the rows of the tile:
the 14 blocks of the T4 architecture for 14 heads on 2 KV heads would read each key seven times
(`Decode architecture`, "Split-K Parallelism"). How the four warps of a block share the work:
`decode_pieces`. K and V have one buffer each; the next keys are being copied while the weights are
multiplied with the values, the next values while the next scores are made, so memory never idles
for the whole tile.

`unified`: FlashDecoding++'s constant in place of the running maximum (Hong et al. 2023, section 3).
No maximum crosses between the warps and nothing is rescaled; a block whose rows leave the range in
which the weights are exact does its split once more with the running maximum.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_changes import Changes, extended, make_changes
from .decode_pieces import (
    NOTHING,
    THREADS,
    WARPS,
    make_find_results,
    make_finish,
    make_load_keys,
    make_query_rows,
    store_state,
)
from .decode_task import (
    Rows,
    make_attends,
    make_find_rows,
    make_find_task,
    make_layout,
    make_position,
)
from .softmax import NEG_INF, quad_max, quad_sum
from .tiles import left_row, make_first_chunk, make_waits, right_row, swizzle_of

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
BLOCK_K = 64  # keys of a tile: 16 per warp
P_ROW = 2 * BLOCK_K  # bytes of a row of weights
HUGE = f32(2.0**121)  # float32 does not hold sums of such scores
# octaves around the constant that float16 weights hold with 11 bits
UNIFIED_ABOVE = f32(15)
UNIFIED_BELOW = f32(10)
NAN = f32(math.nan)

# pointers: q (B, Hkv, rows, D) float32, k, v, table, lengths, out, m, l
# bytes: of a page over all heads and of one head in it: of K, then of V
# sizes: new tokens, rows, KV heads, splits, D, Dv, bytes of a stored key, of a stored value, pages
# of a sequence in the table, log2 of the slots of a page, window, sinks, ring
# factors: scale * log2(e), the unified maximum in octaves
# with options more pointers and factors: as in `decode_int8`
SIGNATURE = types.void(
    types.UniTuple(u64, 8), types.UniTuple(i64, 4), types.UniTuple(i32, 13), types.UniTuple(f32, 2)
)


class State(NamedTuple):
    """The online softmax of a thread's rows: local arrays."""

    m: Any  # the maximum that weights are relative to
    l: Any
    alpha: Any  # what the sums so far are multiplied by
    top: Any  # the largest score so far, where `m` is the unified maximum


class Work(NamedTuple):
    """What a thread multiplies: local arrays."""

    q: Any  # fragments of the rows
    s: Any  # scores of 16 keys
    o: Any  # the output so far
    factor: Any  # of the scores, for each row


class Lane(NamedTuple):
    """Where a lane reads its part of fragments with ldmatrix.

    The address of a row, and the place of its first chunk of 16 bytes: the column enters by XOR
    with an even chunk number.
    """

    q: Any
    q_chunk: Any
    k: Any
    k_chunk: Any
    p: Any
    p_chunk: Any


@device_function
def row_of(lane, i):
    """The i-th of a lane's rows."""
    return (lane >> 2) + 8 * i


def make_find_lane(row_bytes: int) -> Any:
    """find_lane(memory, lane, warp) -> Lane, from the bytes of a query and a key."""
    q_chunk, k_chunk = make_first_chunk(row_bytes)
    p_chunk, _ = make_first_chunk(P_ROW)

    @device_function
    def find_lane(memory, lane, warp):
        row, key = left_row(lane), right_row(lane)
        return Lane(
            memory.q + u32(row * row_bytes),
            q_chunk(lane, row),
            memory.k + u32((16 * warp + key) * row_bytes),
            k_chunk(lane, key),
            memory.p + u32(row * P_ROW),
            p_chunk(lane, row),
        )

    return find_lane


def make_multiply_keys(d: int, row_tiles: int, keep: bool, mma: Any) -> tuple[Any, Any]:
    """(load_queries, multiply_keys): S = Q . K^T of a warp's 16 keys.

    load_queries(qf, at: Lane), multiply_keys(s, qf, at): `qf` holds all fragments of the rows if
    they are to be kept in registers, else it is room for one.
    """
    k_steps, n_s, row_bytes = d // 16, 8 * row_tiles, 2 * d

    @device_function
    def load_queries(qf, at):
        if keep:
            for step in range(k_steps):
                ptx.ldmatrix(qf, 4 * step, at.q + ((at.q_chunk ^ u32(2 * step)) << u32(4)))

    @device_function
    def multiply_keys(s, qf, at):
        kb = cuda.local.array(4, u32)
        for i in range(n_s):
            s[i] = f32(0)
        for step in range(k_steps):
            ptx.ldmatrix(kb, 0, at.k + ((at.k_chunk ^ u32(2 * step)) << u32(4)))
            for t in range(row_tiles):
                qi = 4 * step if keep else 0
                if not keep:
                    at_q = at.q + u32(16 * t * row_bytes)
                    ptx.ldmatrix(qf, 0, at_q + ((at.q_chunk ^ u32(2 * step)) << u32(4)))
                mma(s, 8 * t, qf, qi, kb, 0)
                mma(s, 8 * t + 4, qf, qi, kb, 2)

    return load_queries, multiply_keys


def make_score_rows(row_tiles: int, ring: bool, changed: bool, changes: Changes) -> Any:
    """score_rows(s, state, factor, constant, rows, maxima, start, task, tokens, options, warp, lane).

    Scores in octaves, masked keys -inf, what float32 does not hold NaN; the largest of each row
    over this warp's keys to `maxima`, or with a `constant` maximum to `state.top`.
    """
    n_rows, tile_rows = 2 * row_tiles, 16 * row_tiles
    position_of, attends = make_position(ring), make_attends(ring, changes.allowed)
    changed_score = changes.score
    new_is_whole = 0 if changed else 1  # a mask may hide the first new token too

    @device_function
    def score_rows(
        s, state, factor, constant, rows, maxima, start, task, tokens, options, warp, lane
    ):
        whole = not ring and start + BLOCK_K <= min(task.stop, rows.first + new_is_whole)
        for i in range(n_rows):
            largest = NOTHING
            for n in range(2):
                for e in range(2):
                    at_s = 8 * (i >> 1) + 4 * n + 2 * (i & 1) + e
                    j = start + 16 * warp + 8 * n + 2 * (lane & 3) + e
                    x = s[at_s] * factor[i]
                    fits = abs(x) < HUGE
                    position = position_of(j, tokens)
                    away = rows.first + rows.token[i] - position
                    x = changed_score(x, rows.shift[i], rows.slope[i], away, options)
                    if not fits:
                        x = NAN
                    if not whole and not attends(i, j, position, rows, task, tokens, options.mask):
                        x = NEG_INF
                    s[at_s] = x
                    largest = ptx.fmax(largest, x)
            if constant:
                state.top[i] = ptx.fmax(state.top[i], largest)
            else:
                largest = quad_max(largest)
                if lane & 3 == 0:
                    place = warp * tile_rows + (lane >> 2) + 8 * i
                    ptx.store_shared_f32(maxima + u32(place * 4), largest)

    return score_rows


def make_weigh(row_tiles: int, pack: Any) -> Any:
    """weigh(s, state, constant, memory, warp, lane): weights and their sums to shared memory."""
    n_rows, tile_rows = 2 * row_tiles, 16 * row_tiles

    @device_function
    def weigh(s, state, constant, memory, warp, lane):
        for i in range(n_rows):
            r = (lane >> 2) + 8 * i
            state.alpha[i] = f32(1)
            if not constant:
                largest = state.m[i]
                for w in range(WARPS):
                    at = memory.maxima + u32((w * tile_rows + r) * 4)
                    largest = ptx.fmax(largest, ptx.load_shared_f32(at))
                state.alpha[i] = ptx.ex2(state.m[i] - largest)
                state.m[i] = largest
            total = f32(0)
            for n in range(2):
                at_s = 8 * (i >> 1) + 4 * n + 2 * (i & 1)
                p0, p1 = ptx.ex2(s[at_s] - state.m[i]), ptx.ex2(s[at_s + 1] - state.m[i])
                total += p0 + p1
                chunk = u32((2 * warp + n) ^ (r & 7))
                at_p = memory.p + u32(r * P_ROW) + (chunk << u32(4)) + u32(4 * (lane & 3))
                ptx.store_shared(at_p, pack(p0, p1))
            total = quad_sum(total)
            if lane & 3 == 0:
                ptx.store_shared_f32(memory.sums + u32((warp * tile_rows + r) * 4), total)

    return weigh


def make_add_values(dv: int, row_tiles: int, mma: Any) -> Any:
    """add_values(o, state, at: Lane, memory, warp, lane).

    l = l * alpha + the sum of P, O = O * alpha + P . V for this warp's channels.
    """
    n_rows, n_p, tile_rows = 2 * row_tiles, 8 * row_tiles, 16 * row_tiles
    value_tiles, row_bytes = dv // 8 // WARPS, 2 * dv
    shift, xor = swizzle_of(row_bytes)

    @device_function
    def add_values(o, state, at, memory, warp, lane):
        p = cuda.local.array(n_p, u32)
        vb = cuda.local.array(4, u32)
        for i in range(n_rows):
            total = f32(0)
            for w in range(WARPS):
                place = w * tile_rows + (lane >> 2) + 8 * i
                total += ptx.load_shared_f32(memory.sums + u32(place * 4))
            state.l[i] = state.l[i] * state.alpha[i] + total
        for t in range(row_tiles):
            for n in range(value_tiles):
                for e in range(4):
                    o[4 * (t * value_tiles + n) + e] *= state.alpha[2 * t + (e >> 1)]
        for half in range(2):  # 32 keys
            for t in range(row_tiles):
                for step in range(2):
                    at_p = at.p + u32(16 * t * P_ROW)
                    chunk = at.p_chunk ^ u32(4 * half + 2 * step)
                    ptx.ldmatrix(p, 8 * t + 4 * step, at_p + (chunk << u32(4)))
            row = 32 * half + lane
            at_v = memory.v + u32(row * row_bytes)
            for n in range(value_tiles):
                chunk = u32((warp * value_tiles + n) ^ ((row >> shift) & xor))
                ptx.ldmatrix_trans(vb, 0, at_v + (chunk << u32(4)))
                for t in range(row_tiles):
                    for step in range(2):
                        mma(o, 4 * (t * value_tiles + n), p, 8 * t + 4 * step, vb, 2 * step)

    return add_values


def make_overflows(n_rows: int) -> Any:
    """overflows(top, phi, maxima, warp, lane): whether a row of the block that attends to a key has
    its largest beyond what weights relative to phi hold.
    """

    @device_function
    def overflows(top, phi, maxima, warp, lane):
        bad = f32(0)
        for i in range(n_rows):
            largest = quad_max(top[i])
            if largest > phi + UNIFIED_ABOVE or (
                largest > NOTHING and largest < phi - UNIFIED_BELOW
            ):
                bad = f32(1)
        for n in range(3):  # over the eight rows of the warp's lanes; quads agree
            bad = ptx.fmax(bad, ptx.shuffle_xor(bad, u32(4 << n)))
        if lane == 0:
            ptx.store_shared_f32(maxima + u32(warp * 4), bad)
        cuda.syncthreads()
        found = False
        for w in range(WARPS):
            found = found or ptx.load_shared_f32(maxima + u32(w * 4)) != f32(0)
        return found

    return overflows


def make_store(row_tiles: int, value_tiles: int, direct: bool) -> Any:
    """store(to: Results, o, m, l, warp, lane).

    A block's results as the threads hold them.
    """
    n_rows = 2 * row_tiles
    reciprocal_of, store_value = make_finish(direct, 1.0)

    @device_function
    def store(to, o, m, l, warp, lane):
        for i in range(n_rows):
            r = row_of(lane, i)
            if warp == 0 and lane & 3 == 0:
                store_state(to, r, m[i], l[i])
            reciprocal = reciprocal_of(l[i])
            for n in range(value_tiles):
                for e in range(2):
                    c = 8 * (warp * value_tiles + n) + 2 * (lane & 3) + e
                    x = o[4 * ((i >> 1) * value_tiles + n) + 2 * (i & 1) + e]
                    store_value(to, r, c, x, reciprocal)

    return store


def decode_float(
    d: int,
    dv: int,
    row_tiles: int = 1,
    dtype: str = "float16",
    direct: bool = True,
    paged: bool = False,
    ring: bool = False,
    unified: bool = False,
    turing: bool = False,
    changed: bool = False,
) -> Source:
    """The kernel for padded head sizes d and dv, multiples of 32.

    Parameters
    ----------
    row_tiles : tiles of 16 query rows that a block takes
    direct : one split: `out` is (B, Hkv, rows, Dv) float32, divided; else the partial outputs of
        all tasks for `decode_combine`
    paged : sequences take pages from a pool, by the table; else sequence b has page b
    ring : the cache is a ring with a window and sinks
    turing : sm_75, without cp.async and with k8 products
    changed : with soft cap, ALiBi and a mask of the new tokens, see `decode_changes`
    """
    value_tiles, tile_rows, n_rows = dv // 8 // WARPS, 16 * row_tiles, 2 * row_tiles
    n_s, n_o = 8 * row_tiles, 4 * value_tiles * row_tiles
    d_bytes, dv_bytes = d * 2, dv * 2
    keep_q = row_tiles == 1 and d <= 128  # Q's fragments stay in registers where there is room
    n_qf = d // 4 if keep_q else 4
    mma, pack = ptx.products(dtype, turing)
    load_k, load_v = (make_load_keys(BLOCK_K, n, paged, not turing) for n in (d_bytes, dv_bytes))
    changes = make_changes(changed, 8, 2)
    options_of = changes.unpack
    find_task = make_find_task(tile_rows, paged, ring)
    query_rows = make_query_rows(d, 0, pack)(tile_rows)
    find_rows = make_find_rows(n_rows, row_of, changes.row)
    find_lane = make_find_lane(d_bytes)
    load_queries, multiply_keys = make_multiply_keys(d, row_tiles, keep_q, mma)
    score_rows = make_score_rows(row_tiles, ring, changed, changes)
    weigh, add_values = make_weigh(row_tiles, pack), make_add_values(dv, row_tiles, mma)
    overflows = make_overflows(n_rows)
    find_results = make_find_results(direct, tile_rows, dv)
    store = make_store(row_tiles, value_tiles, direct)
    layout, shared_bytes = make_layout(
        tile_rows * d_bytes, BLOCK_K * d_bytes, BLOCK_K * dv_bytes, tile_rows * P_ROW, 0, tile_rows
    )
    commit, wait_all, wait_but_one = make_waits(not turing)

    @device_function
    def find_factors(factor, memory, lane):
        for i in range(n_rows):
            factor[i] = ptx.load_shared_f32(memory.factors + u32(row_of(lane, i) * 4))

    @device_function
    def begin(o, state, top):
        """No key has been seen; `top` is what weights are relative to at first."""
        for i in range(n_o):
            o[i] = f32(0)
        for i in range(n_rows):
            state.m[i], state.l[i], state.top[i] = top, f32(0), NOTHING

    @device_function
    def add_tile(
        work, state, at, memory, pages, start, constant, rows, task, tokens, options, thread
    ):
        """The online softmax's step: a tile of keys, from `start` on, into l and O of the rows.

        The next keys are under way when it ends. `pages` are those of keys and of values; `constant`
        as for `score_rows`.
        """
        (keys, values), lane, warp = pages, thread & 31, thread >> 5
        wait_all()
        # the keys are there, and everyone is done with the last values and weights
        cuda.syncthreads()
        load_v(memory.v, values, start, task.stop, thread)
        commit()
        multiply_keys(work.s, work.q, at)
        score_rows(
            work.s, state, work.factor, constant, rows, memory.maxima, start, task, tokens, options,
            warp, lane,
        )  # fmt: skip
        cuda.syncthreads()  # everyone is done with these keys
        if start + BLOCK_K < task.stop:
            load_k(memory.k, keys, start + BLOCK_K, task.stop, thread)
        commit()
        weigh(work.s, state, constant, memory, warp, lane)
        wait_but_one()
        cuda.syncthreads()  # values and weights are there
        add_values(work.o, state, at, memory, warp, lane)

    def decode(pointers, bytes_of, sizes, factors):
        q, k, v, tables, lengths, out, m_out, l_out = pointers[:8]
        options = options_of(pointers, factors)
        queries, row_count, _, _, channels, columns = sizes[:6]
        scale, phi = factors[:2]
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        shared = cuda.shared.array(0, u32)
        memory = layout(ptx.shared_address(shared))
        task, keys, values, tokens = find_task(k, v, tables, lengths, bytes_of, sizes)
        if task.start < task.stop:
            load_k(memory.k, keys, task.start, task.stop, thread)
            commit()
        query_rows(memory, q, task, row_count, channels, scale, warp, lane)
        cuda.syncthreads()

        rows = Rows(
            cuda.local.array(n_rows, i32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            queries,
            i32(tokens.length - queries),
        )
        find_rows(rows, task, tokens, row_count, options, lane)
        factor = cuda.local.array(n_rows, f32)
        find_factors(factor, memory, lane)
        state = State(
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
        )
        s, o = cuda.local.array(n_s, f32), cuda.local.array(n_o, f32)
        work = Work(cuda.local.array(n_qf, u32), s, o, factor)
        at, pages = find_lane(memory, lane, warp), (keys, values)
        load_queries(work.q, at)
        constant = unified  # whether this pass takes phi for the maximum
        again = True
        while again:
            again = False
            begin(o, state, phi if constant else NOTHING)
            start = task.start
            while start < task.stop:
                add_tile(
                    work, state, at, memory, pages, start, constant, rows, task, tokens, options,
                    thread,
                )  # fmt: skip
                start += BLOCK_K
            if constant:
                constant = False
                again = overflows(state.top, phi, memory.maxima, warp, lane)
                if again:
                    load_k(memory.k, keys, task.start, task.stop, thread)
                    commit()

        results = find_results(out, m_out, l_out, task, row_count, columns)
        store(results, o, state.m, state.l, warp, lane)

    # three blocks to a multiprocessor keep more bytes on their way; with wider heads the registers
    # would spill
    blocks = 3 if row_tiles == 1 and max(d, dv) <= 64 and not unified else 1
    return Source(
        decode,
        extended(SIGNATURE) if changed else SIGNATURE,
        THREADS,
        shared_bytes,
        blocks=blocks,
    )
