"""Decode over an INT8 or INT4 cache on tensor cores.

New tokens against one split of one KV head's keys, with the CPU cache's bits.

`reference.integer_decode` is the definition: the query has 14 bits and a sign, weights have 15
bits, both in two planes of bytes, so the tensor cores multiply twice; scores and sums of a key
block of 128 are exact integers, each value's scale is folded into its weight, and every float
operation between them is rounded once. How the four warps of a block share the work:
`decode_pieces`; what a lane holds: `decode_columns`. The values are stored transposed (channel
after channel), because the second product needs four consecutive keys in a register. INT4 differs
in how bytes become fragments (`decode_codes`), in what a product is divided by, and in the query,
which has 8 bits in one plane.
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
from .decode_columns import (
    COLUMNS,
    GROUP,
    P_GROUP,
    column_tiles,
    first_key,
    make_add_values,
    make_find_lane,
    make_multiply_keys,
    make_store,
    row_max,
    row_of,
    row_sum,
)
from .decode_pieces import (
    THREADS,
    WARPS,
    Pages,
    make_find_results,
    make_load_channels,
    make_load_keys,
    make_load_scales,
    make_query_rows,
)
from .decode_task import (
    Rows,
    make_attends,
    make_find_rows,
    make_find_task,
    make_layout,
    make_position,
)
from .int8_softmax import MASKED_SCORE, MIN_OCTAVE, T_LIMIT, octave_of, power
from .int8_weights import weight_p16
from .tiles import make_waits

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
BAD = 1 << 24  # in a sum of weights: a token was seen that was not finite
VALUE_UNIT = f32(fx.VALUE_UNIT)
NAN = f32(math.nan)
RESIDENT = {4: 5, 8: 4, 16: 3, 32: 2}  # blocks of so many rows that registers are divided among
SCALES = 2 * 4 * KEY_BLOCK  # bytes of the scales of a tile's keys, then of its values
# of prmt: the high halves of two words; of four halves the high bytes, the low ones
HIGH_HALVES, HIGH_BYTES, LOW_BYTES = u32(0x7632), u32(0x7531), u32(0x6420)
TWICE_LOW = u32(0xFEFEFEFE)  # of four bytes: 7 bits, in their upper places

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


class Work(NamedTuple):
    """What a thread multiplies: local arrays."""

    q: Any  # fragments of the rows
    s: Any  # scores of four keys
    o: Any  # the output so far
    ratio: Any  # of the four keys' values, shares of the largest scale


@device_function
def rounded(x):
    """A score in Q8.8, within what the weights take."""
    return ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT))


def make_score_rows(groups: int, ring: bool, changed: bool, changes: Changes) -> Any:
    """score_rows(s, rows, scales, memory, start, task, tokens, options, warp, lane) -> bad.

    t = round((float32(S) * ck) * cq) in Q8.8, except masked keys; the largest of each row over
    this warp's keys to `memory.maxima`. A lane without masked keys and NaN is done after the
    rounding. Bit i of `bad`: the row of group i attends to a token that is not finite.
    """
    position_of, attends = make_position(ring), make_attends(ring, changes.allowed)
    changed_score = changes.score
    new_is_whole = 0 if changed else 1  # a mask may hide the first new token too

    @device_function
    def finish(x, seen, position, i, rows, options):
        """t of a score, and whether a token that is seen is not finite."""
        t, spoiled = i32(MASKED_SCORE), i32(0)
        if seen and x == x:
            t = rounded(x)
            if changed:
                away = i32(i32(rows.first + rows.token[i]) - position)
                x = changed_score(ptx.to_float(t), rows.shift[i], rows.slope[i], away, options)
                t = rounded(x)
        elif seen:
            spoiled = i32(1)
        return t, spoiled

    @device_function
    def score_rows(s, rows, scales, memory, start, task, tokens, options, warp, lane):
        four = cuda.local.array(4, u32)
        x = cuda.local.array(4, f32)
        key, bad = first_key(lane, warp), i32(0)
        ptx.load_shared_v4(four, 0, scales + u32(key * 4))
        whole = not ring and start + KEY_BLOCK <= min(task.stop, rows.first + new_is_whole)
        for i in range(groups):
            factor = ptx.load_shared_f32(memory.factors + u32(row_of(lane, i) * 4))
            numbers = f32(0)
            for j in range(4):
                x[j] = ptx.mul(ptx.mul(ptx.to_float(s[4 * i + j]), ptx.from_bits(four[j])), factor)
                numbers = ptx.add(numbers, x[j])  # NaN if one is
                s[4 * i + j] = rounded(x[j])
            if changed or not whole or numbers != numbers:
                for j in range(4):
                    slot = i32(start + key + j)
                    position = position_of(slot, tokens)
                    seen = whole or attends(i, slot, position, rows, task, tokens, options.mask)
                    s[4 * i + j], spoiled = finish(x[j], seen, position, i, rows, options)
                    bad = i32(bad | i32(spoiled << i))
            largest = row_max(
                ptx.imax(ptx.imax(s[4 * i], s[4 * i + 1]), ptx.imax(s[4 * i + 2], s[4 * i + 3]))
            )
            if lane < GROUP:
                place = row_of(lane, i) * WARPS + warp
                ptx.store_shared(memory.maxima + u32(place * 4), u32(largest))
        return bad

    return score_rows


@device_function
def share_values(ratio, scales, left, warp, lane):
    """The largest scale of a value in a block of `left` keys, and to `ratio` this lane's keys'
    shares of it.
    """
    four = cuda.local.array(4, u32)
    ptx.load_shared_v4(four, 0, scales + u32((KEY_BLOCK + 4 * lane) * 4))
    largest = f32(0)
    for n in range(4):
        if i32(4 * lane + n) < left:
            largest = ptx.fmax(largest, ptx.from_bits(four[n]))
    for n in range(5):
        largest = ptx.fmax(largest, ptx.shuffle_xor(largest, u32(1 << n)))
    # infinite for a block of zeros in 4 bits: its shares are NaN, which the conversion makes 0
    per_unit = ptx.div(f32(65536), largest)
    ptx.load_shared_v4(four, 0, scales + u32((KEY_BLOCK + first_key(lane, warp)) * 4))
    for n in range(4):
        share = ptx.to_int(ptx.mul(ptx.from_bits(four[n]), per_unit))
        ratio[n] = ptx.umin(u32(share), u32(65535))
    return largest


def make_weigh(groups: int) -> Any:
    """weigh(s, bad, state, ratio, memory, warp, lane).

    `bad` is `score_rows`'s. The block's octave, weights at that octave and their sums to shared memory, and the whole
    octaves by which the sums so far shrink. A masked key has weight 0.
    """

    @device_function
    def weigh(s, bad, state, ratio, memory, warp, lane):
        four = cuda.local.array(4, u32)
        chunk = i32(2 * warp + (lane >> 4))
        for i in range(groups):
            r = row_of(lane, i)
            ptx.load_shared_v4(four, 0, memory.maxima + u32(r * WARPS * 4))
            largest = ptx.imax(
                ptx.imax(i32(four[0]), i32(four[1])), ptx.imax(i32(four[2]), i32(four[3]))
            )
            octave = octave_of(largest)
            total = i32(i32((bad >> i) & 1) * BAD)
            for j in range(4):
                x = weight_p16(s[4 * i + j], octave)
                total = i32(total + i32(x >> u32(2)))
                four[j] = u32(x * ratio[j])  # of 32 bits the upper 15 are the weight
            front = ptx.prmt(four[0], four[1], HIGH_HALVES)
            back = ptx.prmt(four[2], four[3], HIGH_HALVES)
            column = 2 * (lane & 3)
            at_p = memory.p + u32(i * P_GROUP + column * KEY_BLOCK + 4 * ((lane >> 2) & 3))
            ptx.store_shared(at_p + u32((chunk ^ column) << 4), ptx.prmt(front, back, HIGH_BYTES))
            ptx.store_shared(
                at_p + u32(KEY_BLOCK + ((chunk ^ (column + 1)) << 4)),
                ptx.prmt(front, back, LOW_BYTES) & TWICE_LOW,
            )
            total = row_sum(total)
            if lane < GROUP:
                ptx.store_shared(memory.sums + u32((r * WARPS + warp) * 4), u32(total))
            new = ptx.imax(state.m[i], octave)
            state.alpha[i] = power(i32(new - state.m[i]))
            state.weight[i] = f32(0) if largest == MASKED_SCORE else power(i32(new - octave))
            state.m[i] = new

    return weigh


def make_add_sums(groups: int) -> Any:
    """add_sums(state, sums, unit, lane): l with the block's sums; its weights in units of `unit`."""

    @device_function
    def add_sums(state, sums, unit, lane):
        four = cuda.local.array(4, u32)
        for i in range(groups):
            ptx.load_shared_v4(four, 0, sums + u32(row_of(lane, i) * WARPS * 4))
            total = u32(four[0] + four[1]) + u32(four[2] + four[3])
            state.l[i] = ptx.add(
                ptx.mul(state.l[i], state.alpha[i]),
                ptx.mul(ptx.to_float(i32(total & u32(BAD - 1))), state.weight[i]),
            )
            if total >= u32(BAD):
                state.l[i] = NAN  # and stays so
            state.weight[i] = ptx.mul(state.weight[i], unit)

    return add_sums


def resident_blocks(d: int, dv: int, tile_rows: int) -> int:
    """Blocks without options that a multiprocessor is to hold, as far as registers go."""
    return RESIDENT[tile_rows] - (1 if max(d, dv) > 128 else 0)


def decode_int8(
    d: int,
    dv: int,
    tile_rows: int = 4,
    direct: bool = True,
    paged: bool = False,
    ring: bool = False,
    changed: bool = False,
    packed: bool = False,
    turing: bool = False,
) -> Source:
    """The kernel for padded head sizes d and dv (64, 128, 256: whole swizzles, whole tiles of
    channels for each warp).

    Parameters
    ----------
    tile_rows : query rows that a block takes: 4, 8, 16 or 32
    direct : one split: `out` is (B, Hkv, rows, Dv) float32, divided; else the partial outputs of
        all tasks for `decode_combine`
    paged : sequences take pages from a pool, by the table; else sequence b has page b
    ring : the cache is a ring with a window and sinks
    changed : with soft cap, ALiBi and a mask of the new tokens, see `decode_changes`
    packed : an INT4 cache, two codes a byte
    turing : sm_75, without cp.async and with k16 products
    """
    groups, value_tiles = tile_rows // GROUP, dv // 16 // WARPS
    per_byte, q_planes = (2, 1) if packed else (1, 2)
    k_bytes, v_rows, later = d // per_byte, dv // per_byte, not turing
    load_k = make_load_keys(KEY_BLOCK, k_bytes, paged, later, fours=True)
    load_v = make_load_channels(v_rows, KEY_BLOCK, paged, later)
    load_scales = make_load_scales(KEY_BLOCK, paged, later)
    changes = make_changes(changed, 9, 1)
    options_of = changes.unpack
    find_task = make_find_task(tile_rows, paged, ring)
    query_rows = make_query_rows(d, q_planes)(tile_rows)
    find_rows = make_find_rows(groups, row_of, changes.row)
    find_lane = make_find_lane(d, k_bytes, v_rows // WARPS, packed)
    load_queries, multiply_keys, n_qf = make_multiply_keys(d, groups, packed, turing)
    score_rows = make_score_rows(groups, ring, changed, changes)
    weigh, add_sums = make_weigh(groups), make_add_sums(groups)
    add_values = make_add_values(value_tiles, groups, packed, turing)
    find_results = make_find_results(direct, tile_rows, dv)
    store = make_store(value_tiles, groups, direct, fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT)
    layout, shared_bytes = make_layout(
        column_tiles(groups, packed) * COLUMNS * d,
        KEY_BLOCK * k_bytes,
        v_rows * KEY_BLOCK,
        groups * P_GROUP,
        2 * SCALES,
        tile_rows,
    )
    n_s, n_o = 4 * groups, 2 * value_tiles * groups
    commit, wait_all, wait_but_one = make_waits(not turing)

    @device_function
    def find_scales(at, keys, task, bytes_of):
        """The pages of the scales at address `at`, in the order of those of `keys`."""
        page, head = bytes_of[4:]
        start = at + u64(task.kv_head) * u64(head)
        return Pages(start, u64(page), keys.table, keys.shift, u64(head) >> u64(1))

    @device_function
    def load_keys(memory, stage, pages, start, task, thread):
        """Copies the tile of keys from `start` on, and the scales of its keys and values."""
        keys, _, scales = pages
        load_k(memory.k, keys, start, task.stop, thread)
        load_scales(memory.scales + u32(stage * SCALES), scales, start, task.stop, thread)

    @device_function
    def begin(o, state):
        """No key has been seen."""
        for i in range(groups):
            state.m[i], state.l[i] = i32(MIN_OCTAVE), f32(0)
        for i in range(n_o):
            o[i] = f32(0)

    @device_function
    def add_tile(work, state, at, memory, pages, start, stage, rows, task, tokens, options, thread):
        """The online softmax's step: a tile of keys, from `start` on, into l and O of the rows.

        The next keys are under way when it ends. `pages` are those of keys, values and scales, `stage`
        is which of two places has this tile's scales.
        """
        lane, warp = thread & 31, thread >> 5
        wait_all()
        # the keys are there, and everyone is done with the last values and weights
        cuda.syncthreads()
        load_v(memory.v, pages[1], start, task.stop, thread)
        commit()
        here = memory.scales + u32(stage * SCALES)
        multiply_keys(work.s, work.q, at)
        bad = score_rows(work.s, rows, here, memory, start, task, tokens, options, warp, lane)
        largest = share_values(work.ratio, here, i32(task.stop - start), warp, lane)

        cuda.syncthreads()  # everyone is done with these keys, and the maxima are there
        if start + KEY_BLOCK < task.stop:
            load_keys(memory, stage ^ 1, pages, i32(start + KEY_BLOCK), task, thread)
        commit()
        weigh(work.s, bad, state, work.ratio, memory, warp, lane)
        wait_but_one()
        cuda.syncthreads()  # values, weights and their sums are there
        add_sums(state, memory.sums, ptx.mul(largest, VALUE_UNIT), lane)
        add_values(work.o, state.alpha, state.weight, at)

    def decode(pointers, bytes_of, sizes, factors):
        q, k, v, scale_at, tables, lengths, out, m_out, l_out = pointers[:9]
        options = options_of(pointers, factors)
        queries, row_count, _, _, channels, columns = sizes[:6]
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        shared = cuda.shared.array(0, u32)
        memory = layout(ptx.shared_address(shared))
        task, keys, values, tokens = find_task(k, v, tables, lengths, bytes_of, sizes)
        pages = keys, values, find_scales(scale_at, keys, task, bytes_of)
        if task.start < task.stop:
            load_keys(memory, i32(0), pages, task.start, task, thread)
            commit()
        query_rows(memory, q, task, row_count, channels, factors[0], warp, lane)
        cuda.syncthreads()

        rows = Rows(
            cuda.local.array(groups, i32),
            cuda.local.array(groups, f32),
            cuda.local.array(groups, f32),
            queries,
            i32(tokens.length - queries),
        )
        find_rows(rows, task, tokens, row_count, options, lane)
        state = State(
            cuda.local.array(groups, i32),
            cuda.local.array(groups, f32),
            cuda.local.array(groups, f32),
            cuda.local.array(groups, f32),
        )
        s, o = cuda.local.array(n_s, i32), cuda.local.array(n_o, f32)
        work = Work(cuda.local.array(n_qf, u32), s, o, cuda.local.array(4, u32))
        top = cuda.local.array(groups, f32)
        begin(o, state)
        at = find_lane(memory, lane, warp)
        load_queries(work.q, at)
        start, stage = task.start, i32(0)
        while start < task.stop:
            add_tile(
                work, state, at, memory, pages, start, stage, rows, task, tokens, options, thread
            )
            stage ^= 1
            start = i32(start + KEY_BLOCK)

        for i in range(groups):
            top[i] = ptx.to_float(state.m[i])
        results = find_results(out, m_out, l_out, task, row_count, columns)
        store(results, o, top, state.l, warp, lane)

    blocks = resident_blocks(d, dv, tile_rows)
    if changed:
        return Source(decode, extended(SIGNATURE), THREADS, shared_bytes, blocks=blocks - 1)
    return Source(decode, SIGNATURE, THREADS, shared_bytes, blocks=blocks)
