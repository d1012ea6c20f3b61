"""Decode over an INT8 or INT4 cache on tensor cores.

New tokens against one split of one KV head's keys, with the CPU cache's bits.

`reference.integer_decode` is the definition: query and weights have 15 bits, in two planes of
bytes, so the tensor cores multiply twice; scores and sums of a key block of 128 are exact integers,
each value's scale is folded into its weight, and every float operation between them is rounded
once. How the four warps of a block share the work: `decode_pieces`. The values are stored
transposed (channel after channel), because the second product needs four consecutive keys in a
register. INT4 differs in how bytes become fragments (`decode_codes`), in what a product is divided
by, and in the query, which has 8 bits in one plane.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_changes import Changes, extended, make_changes
from .decode_codes import NUMBER_BITS, make_key_fragments, make_value_fragments
from .decode_pieces import (
    THREADS,
    WARPS,
    Pages,
    Results,
    make_load_channels,
    make_load_keys,
    make_load_scales,
    make_query_rows,
    make_store,
)
from .decode_task import (
    Rows,
    make_attends,
    make_find_lane,
    make_find_rows,
    make_find_task,
    make_layout,
    make_position,
)
from .int8_softmax import (
    MASKED_SCORE,
    MIN_OCTAVE,
    T_LIMIT,
    octave_of,
    power,
    quad_imax,
    quad_isum,
)
from .int8_weights import weight_p16

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
BAD = 1 << 24  # in a sum of weights: a token was seen that was not finite
VALUE_UNIT = f32(fx.VALUE_UNIT)
NAN = f32(math.nan)
LOW_BITS = 7  # of a query or a weight in its low plane
P_ROW = 2 * KEY_BLOCK  # bytes of a row of weights: the high plane, then the low one
SCALES = 2 * 4 * KEY_BLOCK  # bytes of the scales of a tile's keys, then of its values

# pointers: q (B, Hkv, rows, D) float32, k, v, scales, table, lengths, out, m, l
# bytes: of a page over all heads and of one head in it: of K, then of V, then of the scales
# sizes: new tokens, rows, KV heads, splits, D, Dv, bytes of a stored key, rows of bytes of stored
# values, pages of a sequence in the table, log2 of the slots of a page, window, sinks, ring
# factors: scale * log2(e) * 256
# with options more pointers: shift (B, Hkv, rows), slopes (Hkv, rows) float32, mask (B, L, L)
# int32, 0 for none; and more factors: the cap and its reciprocal
SIGNATURE = types.void(
    types.UniTuple(u64, 9), types.UniTuple(i64, 6), types.UniTuple(i32, 13), types.UniTuple(f32, 1)
)


class State(NamedTuple):
    """The online softmax of a thread's rows: local arrays."""

    m: Any  # int32: the octave of the largest score
    l: Any
    alpha: Any  # what the sums so far are multiplied by
    weight: Any  # what a block's own sums are multiplied by
    bad: Any  # int32: BAD where a row attends to a token of the block that is not finite


def make_multiply_keys(d: int, row_tiles: int, packed: bool, turing: bool) -> Any:
    """multiply_keys(s, at: Lane): S = Q . K^T of a warp's 32 keys, exact."""
    k_steps, n_s, q_planes = d // 32, 16 * row_tiles, 1 if packed else 2
    q_size = 16 * row_tiles * d
    divide = NUMBER_BITS if packed else 0
    key_fragments = make_key_fragments(d, packed)
    mma = ptx.mma_turing_s8 if turing else ptx.mma_s8

    @device_function
    def multiply_keys(s, at):
        high = cuda.local.array(n_s, i32)
        qf = cuda.local.array(4, u32)
        kb = cuda.local.array(4, u32)
        codes = cuda.local.array(8, u32)
        for i in range(n_s):
            s[i], high[i] = i32(0), i32(0)
        for step in range(k_steps):
            for n in range(2):
                key_fragments(kb, codes, at.k, at.k_chunk, step, n)
                for t in range(row_tiles):
                    at_q = at.q + u32(16 * t * d) + ((at.q_chunk ^ u32(2 * step)) << u32(4))
                    if q_planes == 2:
                        ptx.ldmatrix(qf, 0, at_q)
                        mma(high, 16 * t + 8 * n, qf, 0, kb, 0)
                        mma(high, 16 * t + 8 * n + 4, qf, 0, kb, 2)
                    ptx.ldmatrix(qf, 0, at_q + u32((q_planes - 1) * q_size))
                    mma(s, 16 * t + 8 * n, qf, 0, kb, 0)
                    mma(s, 16 * t + 8 * n + 4, qf, 0, kb, 2)
        for i in range(n_s):
            s[i] = i32((s[i] + (high[i] << LOW_BITS)) >> divide)

    return multiply_keys


@device_function
def rounded(x):
    """A score in Q8.8, within what the weights take."""
    return ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT))


def make_score_rows(row_tiles: int, ring: bool, changed: bool, changes: Changes) -> Any:
    """score_rows(s, bad, rows, scales, maxima, start, task, tokens, options, warp, lane).

    t = round((float32(S) * ck) * cq) in Q8.8, except masked keys; the largest of each row over
    this warp's keys to `maxima`.
    """
    n_rows, tile_rows = 2 * row_tiles, 16 * row_tiles
    position_of, attends = make_position(ring), make_attends(ring, changes.allowed)
    changed_score = changes.score
    new_is_whole = 0 if changed else 1  # a mask may hide the first new token too

    @device_function
    def score_rows(s, bad, rows, scales, maxima, start, task, tokens, options, warp, lane):
        two = cuda.local.array(2, f32)
        whole = not ring and start + KEY_BLOCK <= min(task.stop, rows.first + new_is_whole)
        for i in range(n_rows):
            largest, spoiled = i32(MASKED_SCORE), i32(0)
            for n in range(4):
                key = 32 * warp + 8 * n + 2 * (lane & 3)
                ptx.load_shared_f32_v2(two, 0, scales + u32(key * 4))
                for e in range(2):
                    at_s = 16 * (i >> 1) + 4 * n + 2 * (i & 1) + e
                    j = start + key + e
                    position = position_of(j, tokens)
                    seen = whole or attends(i, j, position, rows, task, tokens, options.mask)
                    x = ptx.mul(ptx.mul(ptx.to_float(s[at_s]), two[e]), rows.factor[i])
                    t = i32(MASKED_SCORE)
                    if seen and x == x:
                        t = rounded(x)
                        if changed:
                            away = rows.position[i] - position
                            x = ptx.to_float(t)
                            t = rounded(
                                changed_score(x, rows.shift[i], rows.slope[i], away, options)
                            )
                    elif seen:
                        spoiled = i32(BAD)
                    s[at_s] = t
                    largest = ptx.imax(largest, t)
            bad[i] = spoiled
            largest = quad_imax(largest)
            if lane & 3 == 0:
                place = warp * tile_rows + (lane >> 2) + 8 * i
                ptx.store_shared(maxima + u32(place * 4), u32(largest))

    return score_rows


@device_function
def share_values(ratio, scales, left, warp, lane):
    """The largest scale of a value in a block of `left` keys, and to `ratio` this thread's keys'
    shares of it.
    """
    two = cuda.local.array(2, f32)
    largest = f32(0)
    for n in range(4):
        if lane + 32 * n < left:
            at = scales + u32((KEY_BLOCK + lane + 32 * n) * 4)
            largest = ptx.fmax(largest, ptx.load_shared_f32(at))
    for n in range(5):
        largest = ptx.fmax(largest, ptx.shuffle_xor(largest, u32(1 << n)))
    # infinite for a block of zeros in 4 bits: its shares are NaN, which the conversion makes 0
    per_unit = ptx.div(f32(65536), largest)
    for n in range(4):
        key = KEY_BLOCK + 32 * warp + 8 * n + 2 * (lane & 3)
        ptx.load_shared_f32_v2(two, 0, scales + u32(key * 4))
        for e in range(2):
            ratio[2 * n + e] = ptx.umin(u32(ptx.to_int(ptx.mul(two[e], per_unit))), u32(65535))
    return largest


def make_weigh(row_tiles: int) -> Any:
    """weigh(s, state, ratio, memory, warp, lane).

    The block's octave, weights at that octave and their sums to shared memory, and the whole
    octaves by which the sums so far shrink.
    """
    n_rows, tile_rows = 2 * row_tiles, 16 * row_tiles

    @device_function
    def weigh(s, state, ratio, memory, warp, lane):
        for i in range(n_rows):
            r = (lane >> 2) + 8 * i
            largest = i32(MASKED_SCORE)
            for w in range(WARPS):
                at = memory.maxima + u32((w * tile_rows + r) * 4)
                largest = ptx.imax(largest, ptx.load_shared_s32(at))
            octave = octave_of(largest)
            total = state.bad[i]
            for n in range(4):
                pair, pair_low = u32(0), u32(0)
                for e in range(2):
                    t = s[16 * (i >> 1) + 4 * n + 2 * (i & 1) + e]
                    if t != MASKED_SCORE:
                        x = weight_p16(t, octave)
                        total = i32(total + i32(x >> u32(2)))
                        w = u32(x * ratio[2 * n + e]) >> u32(17)
                        pair |= (w >> u32(LOW_BITS)) << u32(8 * e)
                        pair_low |= (w & u32((1 << LOW_BITS) - 1)) << u32(8 * e)
                chunk = u32((2 * warp + (n >> 1)) ^ (r & 7))
                at_p = memory.p + u32(r * P_ROW) + u32(8 * (n & 1) + 2 * (lane & 3))
                ptx.store_shared_u16(at_p + (chunk << u32(4)), pair)
                ptx.store_shared_u16(at_p + u32(KEY_BLOCK) + (chunk << u32(4)), pair_low)
            total = quad_isum(total)
            if lane & 3 == 0:
                ptx.store_shared(memory.sums + u32((warp * tile_rows + r) * 4), u32(total))
            new = ptx.imax(state.m[i], octave)
            state.alpha[i] = power(i32(new - state.m[i]))
            state.weight[i] = f32(0) if largest == MASKED_SCORE else power(i32(new - octave))
            state.m[i] = new

    return weigh


def make_add_sums(row_tiles: int) -> Any:
    """add_sums(state, sums, unit, lane): l with the block's sums; its weights in units of `unit`."""
    n_rows, tile_rows = 2 * row_tiles, 16 * row_tiles

    @device_function
    def add_sums(state, sums, unit, lane):
        for i in range(n_rows):
            r = (lane >> 2) + 8 * i
            total = i32(0)
            for w in range(WARPS):
                total = i32(total + ptx.load_shared_s32(sums + u32((w * tile_rows + r) * 4)))
            state.l[i] = ptx.add(
                ptx.mul(state.l[i], state.alpha[i]),
                ptx.mul(ptx.to_float(i32(total & (BAD - 1))), state.weight[i]),
            )
            if total >= BAD:
                state.l[i] = NAN  # and stays so
            state.weight[i] = ptx.mul(state.weight[i], unit)

    return add_sums


def make_add_values(dv: int, row_tiles: int, packed: bool, turing: bool) -> Any:
    """add_values(o, state, at: Lane, tile, warp, lane).

    O = O * alpha + (P . V) * weight for this warp's channels: the product exact, each float
    operation rounded once.
    """
    value_tiles, divide = dv // 8 // WARPS, NUMBER_BITS if packed else 0
    value_fragments = make_value_fragments(value_tiles, KEY_BLOCK, packed)
    mma = ptx.mma_turing_u8s8 if turing else ptx.mma_u8s8

    @device_function
    def add_values(o, state, at, tile, warp, lane):
        p = cuda.local.array(32, u32)
        acc = cuda.local.array(8, i32)
        vb = cuda.local.array(4, u32)
        codes = cuda.local.array(8, u32)
        for t in range(row_tiles):
            for step in range(8):
                at_p = at.p + u32(16 * t * P_ROW + KEY_BLOCK * (step >> 2))
                ptx.ldmatrix(p, 4 * step, at_p + ((at.p_chunk ^ u32(2 * (step & 3))) << u32(4)))
            for n in range(value_tiles):
                for e in range(8):
                    acc[e] = i32(0)
                for half in range(2):  # 64 keys
                    value_fragments(vb, codes, tile, warp, n, half, lane)
                    for plane in range(2):
                        at_w = 16 * plane + 8 * half
                        mma(acc, 4 * plane, p, at_w, vb, 0)
                        mma(acc, 4 * plane, p, at_w + 4, vb, 2)
                at_o = 4 * (t * value_tiles + n)
                for e in range(4):
                    i = 2 * t + (e >> 1)
                    both = i32(((acc[e] << LOW_BITS) + acc[4 + e]) >> divide)
                    o[at_o + e] = ptx.add(
                        ptx.mul(o[at_o + e], state.alpha[i]),
                        ptx.mul(ptx.to_float(both), state.weight[i]),
                    )

    return add_values


def decode_int8(
    d: int,
    dv: int,
    row_tiles: int = 1,
    direct: bool = True,
    paged: bool = False,
    ring: bool = False,
    changed: bool = False,
    packed: bool = False,
    turing: bool = False,
) -> Source:
    """The kernel for padded head sizes d (64, 128, 256: whole swizzles) and dv (a multiple of 32, of
    64 for INT4).

    Parameters
    ----------
    row_tiles : tiles of 16 query rows that a block takes
    direct : one split: `out` is (B, Hkv, rows, Dv) float32, divided; else the partial outputs of
        all tasks for `decode_combine`
    paged : sequences take pages from a pool, by the table; else sequence b has page b
    ring : the cache is a ring with a window and sinks
    changed : with soft cap, ALiBi and a mask of the new tokens, see `decode_changes`
    packed : an INT4 cache, two codes a byte
    turing : sm_75, without cp.async and with k16 products
    """
    value_tiles, tile_rows, n_rows = dv // 8 // WARPS, 16 * row_tiles, 2 * row_tiles
    n_s, n_o = 16 * row_tiles, 4 * value_tiles * row_tiles
    per_byte, q_planes = (2, 1) if packed else (1, 2)
    k_bytes, v_rows, later = d // per_byte, dv // per_byte, not turing
    load_k = make_load_keys(KEY_BLOCK, k_bytes, paged, later)
    load_v = make_load_channels(v_rows, KEY_BLOCK, paged, later)
    load_scales = make_load_scales(KEY_BLOCK, paged, later)
    changes = make_changes(changed, 9, 1)
    options_of = changes.unpack
    find_task = make_find_task(tile_rows, paged, ring)
    query_rows = make_query_rows(d, q_planes)(tile_rows)
    find_rows = make_find_rows(n_rows, changes.row)
    find_lane = make_find_lane(d, k_bytes, P_ROW, 32)
    multiply_keys = make_multiply_keys(d, row_tiles, packed, turing)
    score_rows = make_score_rows(row_tiles, ring, changed, changes)
    weigh, add_sums = make_weigh(row_tiles), make_add_sums(row_tiles)
    add_values = make_add_values(dv, row_tiles, packed, turing)
    store = make_store(row_tiles, value_tiles, direct, fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT)
    layout, shared_bytes = make_layout(
        q_planes * tile_rows * d,
        KEY_BLOCK * k_bytes,
        v_rows * KEY_BLOCK,
        tile_rows * P_ROW,
        2 * SCALES,
        tile_rows,
    )
    wait_all, wait_but_one = ptx.cp_async_wait[0], ptx.cp_async_wait[1]

    def decode(pointers, bytes_of, sizes, factors):
        q, k, v, scale_at, tables, lengths, out, m_out, l_out = pointers[:9]
        options = options_of(pointers, factors)
        queries, row_count, _, _, channels, columns = sizes[:6]
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        shared = cuda.shared.array(0, u32)
        memory = layout(ptx.shared_address(shared))
        task, keys, values, tokens = find_task(k, v, tables, lengths, bytes_of, sizes)
        s_page, s_head = bytes_of[4:]
        scales = Pages(
            scale_at + u64(task.kv_head) * u64(s_head),
            u64(s_page),
            keys.table,
            keys.shift,
            u64(s_head) >> u64(1),
        )
        if task.start < task.stop:
            load_k(memory.k, keys, task.start, task.stop, thread)
            load_scales(memory.scales, scales, task.start, task.stop, thread)
            if not turing:
                ptx.cp_async_commit()
        query_rows(memory, q, task, row_count, channels, factors[0], warp, lane)
        cuda.syncthreads()

        rows = Rows(
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, i32),
            cuda.local.array(n_rows, i32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            queries,
            tokens.length - queries,
        )
        find_rows(rows, memory.factors, task, tokens, row_count, options, lane)
        state = State(
            cuda.local.array(n_rows, i32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, f32),
            cuda.local.array(n_rows, i32),
        )
        s = cuda.local.array(n_s, i32)  # scores of 32 keys
        o = cuda.local.array(n_o, f32)
        ratio = cuda.local.array(8, u32)
        top = cuda.local.array(n_rows, f32)
        for i in range(n_rows):
            state.m[i], state.l[i] = i32(MIN_OCTAVE), f32(0)
        for i in range(n_o):
            o[i] = f32(0)
        at = find_lane(memory, lane, warp)
        start, stage = task.start, i32(0)
        while start < task.stop:
            if not turing:
                wait_all()
            # the keys are there, and everyone is done with the last values and weights
            cuda.syncthreads()
            load_v(memory.v, values, start, task.stop, thread)
            if not turing:
                ptx.cp_async_commit()
            here = memory.scales + u32(stage * SCALES)
            multiply_keys(s, at)
            score_rows(
                s, state.bad, rows, here, memory.maxima, start, task, tokens, options, warp, lane
            )

            cuda.syncthreads()  # everyone is done with these keys, and the maxima are there
            stage ^= 1
            if start + KEY_BLOCK < task.stop:
                load_k(memory.k, keys, start + KEY_BLOCK, task.stop, thread)
                ahead = memory.scales + u32(stage * SCALES)
                load_scales(ahead, scales, start + KEY_BLOCK, task.stop, thread)
            if not turing:
                ptx.cp_async_commit()
            largest = share_values(ratio, here, task.stop - start, warp, lane)
            weigh(s, state, ratio, memory, warp, lane)
            if not turing:
                wait_but_one()
            cuda.syncthreads()  # values, weights and their sums are there
            add_sums(state, memory.sums, ptx.mul(largest, VALUE_UNIT), lane)
            add_values(o, state, at, memory.v, warp, lane)
            start += KEY_BLOCK

        for i in range(n_rows):
            top[i] = ptx.to_float(state.m[i])
        # addresses of results are computed here, not kept in registers during the loop
        head, first_row = ptx.fresh(task.head), ptx.fresh(task.first_row)
        results = Results(out, m_out, l_out, task.number, head, first_row, row_count, columns)
        store(results, o, top, state.l, warp, lane)

    return Source(decode, extended(SIGNATURE) if changed else SIGNATURE, THREADS, shared_bytes)
