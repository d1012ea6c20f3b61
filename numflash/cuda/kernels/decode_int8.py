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

from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .decode_changes import extended, make_changes
from .decode_codes import NUMBER_BITS, make_key_fragments, make_value_fragments
from .decode_pieces import (
    THREADS,
    WARPS,
    Pages,
    Results,
    Tokens,
    make_load_channels,
    make_load_keys,
    make_load_scales,
    make_part_of,
    make_query_rows,
    make_store,
    remainder,
    visible,
)
from .int8_softmax import MASKED_SCORE, MIN_OCTAVE, T_LIMIT, power
from .int8_weights import weight_p16
from .pieces import swizzle_of

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
BAD = 1 << 24  # in a sum of weights: a token was seen that was not finite
VALUE_UNIT = f32(fx.VALUE_UNIT)
NAN = f32(math.nan)
LOW_BITS = 7  # of a query or a weight in its low plane
P_ROW = 2 * KEY_BLOCK  # bytes of a row of weights: the high plane, then the low one

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
    block_k = KEY_BLOCK
    per_byte = 2 if packed else 1
    k_steps, value_tiles, tile_rows = d // 32, dv // 8 // WARPS, 16 * row_tiles
    n_s, n_o, n_rows = 16 * row_tiles, 4 * value_tiles * row_tiles, 2 * row_tiles
    shift_q, xor_q = swizzle_of(d)
    k_bytes, v_rows, later = d // per_byte, dv // per_byte, not turing
    shift_k, xor_k = swizzle_of(k_bytes)
    load_k = make_load_keys(block_k, k_bytes, paged, later)
    load_v = make_load_channels(v_rows, block_k, paged, later)
    load_scales = make_load_scales(block_k, paged, later)
    key_fragments = make_key_fragments(d, packed)
    value_fragments = make_value_fragments(value_tiles, block_k, packed)
    divide = NUMBER_BITS if packed else 0
    q_planes = 1 if packed else 2
    query_rows = make_query_rows(d, q_planes)(tile_rows)
    part_of = make_part_of(tile_rows, ring)
    store = make_store(row_tiles, value_tiles, direct, fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT)
    options_of, row_option, position_of, allowed, changed_score = make_changes(changed, ring, 9, 1)
    new_is_whole = 0 if changed else 1  # a mask may hide the first new token too
    mma_s = ptx.mma_turing_s8 if turing else ptx.mma_s8
    mma_p = ptx.mma_turing_u8s8 if turing else ptx.mma_u8s8
    wait_all, wait_but_one = ptx.cp_async_wait[0], ptx.cp_async_wait[1]
    q_size = tile_rows * d
    k_size = block_k * k_bytes
    v_size = v_rows * block_k
    p_size = tile_rows * P_ROW
    row_size = tile_rows * 4

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def decode(pointers, bytes_of, sizes, factors):
        q, k, v, scale_at, tables, lengths, out, m_out, l_out = pointers[:9]
        shift_at, slope_at, mask_at, cap, inverse = options_of(pointers, factors)
        k_page, k_head, v_page, v_head, s_page, s_head = bytes_of
        (
            queries,
            rows,
            kv_heads,
            splits,
            channels,
            columns,
            k_row,
            v_row,
            width,
            shift,
            window,
            sinks,
            ring_slots,
        ) = sizes
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        sq = ptx.shared_address(shared)
        sk = sq + u32(q_planes * q_size)
        sv = sk + u32(k_size)
        sp = sv + u32(v_size)
        s_scales = sp + u32(
            p_size
        )  # scales of the tile's keys, then of its values; the next tile's behind them
        s_factor = s_scales + u32(block_k * 16)
        s_max = s_factor + u32(row_size)
        s_sum = s_max + u32(WARPS * row_size)

        task = i32(cuda.blockIdx.x)
        b, g, head, first_row, length, newest, start, stop = part_of(
            task, rows, kv_heads, splits, lengths, sinks, ring_slots
        )
        k = k + u64(g) * u64(k_head)
        v = v + u64(g) * u64(v_head)
        scale_at = scale_at + u64(g) * u64(s_head)
        values_at = u64(s_head) >> u64(1)
        table = tables + u64(b * width) * u64(4) if paged else u64(b)
        keys = Pages(k, u64(k_page), table, shift, k_row)
        values = Pages(v, u64(v_page), table, shift, v_row)
        both_scales = Pages(scale_at, u64(s_page), table, shift, values_at)
        tokens = Tokens(length, newest, window, sinks, ring_slots)
        if start < stop:
            load_k(sk, keys, start, stop, thread)
            load_scales(s_scales, both_scales, start, stop, thread)
            if not turing:
                ptx.cp_async_commit()
        query_rows(
            sq,
            s_factor,
            q + u64(head) * u64(rows * channels * 4),
            first_row,
            rows,
            channels,
            factors[0],
            warp,
            lane,
        )
        cuda.syncthreads()

        cq = cuda.local.array(n_rows, f32)
        at = cuda.local.array(n_rows, i32)  # position of a row's token
        token = cuda.local.array(n_rows, i32)  # the number of that token among the new ones
        moved = cuda.local.array(n_rows, f32)
        slope = cuda.local.array(n_rows, f32)
        m = cuda.local.array(n_rows, i32)
        l = cuda.local.array(n_rows, f32)
        bad = cuda.local.array(n_rows, i32)
        alpha = cuda.local.array(n_rows, f32)
        weight = cuda.local.array(n_rows, f32)
        top = cuda.local.array(n_rows, f32)
        s = cuda.local.array(n_s, i32)
        high = cuda.local.array(n_s, i32)
        o = cuda.local.array(n_o, f32)
        p = cuda.local.array(32, u32)
        acc = cuda.local.array(8, i32)
        qf = cuda.local.array(4, u32)
        kb = cuda.local.array(4, u32)
        codes = cuda.local.array(8, u32)
        two = cuda.local.array(2, f32)
        ratio = cuda.local.array(8, u32)
        for i in range(n_rows):
            r = first_row + (lane >> 2) + 8 * i
            cq[i] = ptx.load_shared_f32(s_factor + u32(((lane >> 2) + 8 * i) * 4))
            token[i] = remainder(r, queries)
            at[i] = length - queries + token[i]
            r = min(r, rows - 1)
            moved[i] = row_option(shift_at, head * rows + r)
            slope[i] = row_option(slope_at, g * rows + r)
            m[i], l[i], bad[i] = i32(MIN_OCTAVE), f32(0), i32(0)
        for i in range(n_o):
            o[i] = f32(0)
        low = length - queries  # the first position of any row
        k_row_of = ((lane >> 4) << 3) + (lane & 7)
        k_at = sk + u32((32 * warp + k_row_of) * k_bytes)
        k_chunk = u32(((lane >> 3) & 1) ^ ((k_row_of >> shift_k) & xor_k))
        a_row = lane & 15
        q_chunk = u32((lane >> 4) ^ ((a_row >> shift_q) & xor_q))
        p_chunk = u32((lane >> 4) ^ (a_row & 7))
        stage = i32(0)
        while start < stop:
            if not turing:
                wait_all()
            # the keys are there, and everyone is done with the last values and weights
            cuda.syncthreads()
            load_v(sv, values, start, stop, thread)
            if not turing:
                ptx.cp_async_commit()
            scales = s_scales + u32(stage * (block_k * 8))

            # S = Q . K^T of this warp's 32 keys, exact
            for i in range(n_s):
                s[i], high[i] = i32(0), i32(0)
            for step in range(k_steps):
                for n in range(2):
                    key_fragments(kb, codes, k_at, k_chunk, step, n)
                    for t in range(row_tiles):
                        at_q = (
                            sq + u32((16 * t + a_row) * d) + ((q_chunk ^ u32(2 * step)) << u32(4))
                        )
                        if q_planes == 2:
                            ptx.ldmatrix(qf, 0, at_q)
                            mma_s(high, 16 * t + 8 * n, qf, 0, kb, 0)
                            mma_s(high, 16 * t + 8 * n + 4, qf, 0, kb, 2)
                        ptx.ldmatrix(qf, 0, at_q + u32((q_planes - 1) * q_size))
                        mma_s(s, 16 * t + 8 * n, qf, 0, kb, 0)
                        mma_s(s, 16 * t + 8 * n + 4, qf, 0, kb, 2)
            for i in range(n_s):
                s[i] = i32((s[i] + (high[i] << LOW_BITS)) >> divide)

            # t = round((float32(S) * ck) * cq) in Q8.8, except masked keys; the largest of each row
            # over this warp's keys
            whole = not ring and start + block_k <= min(stop, low + new_is_whole)
            for i in range(n_rows):
                largest, spoiled = i32(MASKED_SCORE), i32(0)
                for n in range(4):
                    ptx.load_shared_f32_v2(
                        two, 0, scales + u32((32 * warp + 8 * n + 2 * (lane & 3)) * 4)
                    )
                    for e in range(2):
                        at_s = 16 * (i >> 1) + 4 * n + 2 * (i & 1) + e
                        j = start + 32 * warp + 8 * n + 2 * (lane & 3) + e
                        position = position_of(j, length, newest, sinks, ring_slots)
                        seen = whole or (
                            visible(j, stop, at[i], tokens, ring)
                            and allowed(mask_at, b, queries, token[i], position - low)
                        )
                        x = ptx.mul(ptx.mul(ptx.to_float(s[at_s]), two[e]), cq[i])
                        t = i32(MASKED_SCORE)
                        if seen and x == x:
                            t = ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT))
                            if changed:
                                x = ptx.to_float(t)
                                away = at[i] - position
                                x = changed_score(x, moved[i], slope[i], away, cap, inverse)
                                t = ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT))
                        elif seen:
                            spoiled = i32(BAD)
                        s[at_s] = t
                        largest = ptx.imax(largest, t)
                bad[i] = spoiled
                largest = ptx.imax(largest, ptx.shuffle_xor_i32(largest, u32(1)))
                largest = ptx.imax(largest, ptx.shuffle_xor_i32(largest, u32(2)))
                if lane & 3 == 0:
                    ptx.store_shared(
                        s_max + u32((warp * tile_rows + (lane >> 2) + 8 * i) * 4), u32(largest)
                    )

            cuda.syncthreads()  # everyone is done with these keys, and the maxima are there
            stage ^= 1
            if start + block_k < stop:
                load_k(sk, keys, start + block_k, stop, thread)
                ahead = s_scales + u32(stage * (block_k * 8))
                load_scales(ahead, both_scales, start + block_k, stop, thread)
            if not turing:
                ptx.cp_async_commit()

            # the largest scale of a value in the block, and this thread's keys' shares of it
            v_max = f32(0)
            for n in range(4):
                if start + lane + 32 * n < stop:
                    v_max = ptx.fmax(
                        v_max, ptx.load_shared_f32(scales + u32((block_k + lane + 32 * n) * 4))
                    )
            for n in range(5):
                v_max = ptx.fmax(v_max, ptx.shuffle_xor(v_max, u32(1 << n)))
            # infinite for a block of zeros in 4 bits: its shares are NaN, which the conversion makes 0
            per_unit = ptx.div(f32(65536), v_max)
            for n in range(4):
                ptx.load_shared_f32_v2(
                    two, 0, scales + u32((block_k + 32 * warp + 8 * n + 2 * (lane & 3)) * 4)
                )
                for e in range(2):
                    ratio[2 * n + e] = ptx.umin(
                        u32(ptx.to_int(ptx.mul(two[e], per_unit))), u32(65535)
                    )

            # the block's octave, weights at that octave, and the whole octaves by which the sums so
            # far shrink
            for i in range(n_rows):
                r = (lane >> 2) + 8 * i
                largest = i32(MASKED_SCORE)
                for w in range(WARPS):
                    largest = ptx.imax(
                        largest, ptx.load_shared_s32(s_max + u32((w * tile_rows + r) * 4))
                    )
                octave = i32(MIN_OCTAVE) if largest == MASKED_SCORE else i32((largest + 255) >> 8)
                total = bad[i]
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
                    at_p = sp + u32(r * P_ROW) + u32(8 * (n & 1) + 2 * (lane & 3))
                    ptx.store_shared_u16(at_p + (chunk << u32(4)), pair)
                    ptx.store_shared_u16(at_p + u32(KEY_BLOCK) + (chunk << u32(4)), pair_low)
                total = i32(total + ptx.shuffle_xor_i32(total, u32(1)))
                total = i32(total + ptx.shuffle_xor_i32(total, u32(2)))
                if lane & 3 == 0:
                    ptx.store_shared(s_sum + u32((warp * tile_rows + r) * 4), u32(total))
                new = ptx.imax(m[i], octave)
                alpha[i] = power(i32(new - m[i]))
                weight[i] = f32(0) if largest == MASKED_SCORE else power(i32(new - octave))
                m[i] = new
            if not turing:
                wait_but_one()
            cuda.syncthreads()  # values, weights and their sums are there

            unit_of_v = ptx.mul(v_max, VALUE_UNIT)
            for i in range(n_rows):
                r = (lane >> 2) + 8 * i
                total = i32(0)
                for w in range(WARPS):
                    total = i32(total + ptx.load_shared_s32(s_sum + u32((w * tile_rows + r) * 4)))
                l[i] = ptx.add(
                    ptx.mul(l[i], alpha[i]),
                    ptx.mul(ptx.to_float(i32(total & (BAD - 1))), weight[i]),
                )
                if total >= BAD:
                    l[i] = NAN  # and stays so
                weight[i] = ptx.mul(weight[i], unit_of_v)

            # O = O * alpha + (P . V) * weight for this warp's channels: the product exact, each
            # float operation rounded once
            for t in range(row_tiles):
                for step in range(8):
                    ptx.ldmatrix(
                        p,
                        4 * step,
                        sp
                        + u32((16 * t + a_row) * P_ROW + KEY_BLOCK * (step >> 2))
                        + ((p_chunk ^ u32(2 * (step & 3))) << u32(4)),
                    )
                for n in range(value_tiles):
                    for e in range(8):
                        acc[e] = i32(0)
                    for half in range(2):  # 64 keys
                        value_fragments(kb, codes, sv, warp, n, half, lane)
                        for plane in range(2):
                            at_w = 16 * plane + 8 * half
                            mma_p(acc, 4 * plane, p, at_w, kb, 0)
                            mma_p(acc, 4 * plane, p, at_w + 4, kb, 2)
                    at_o = 4 * (t * value_tiles + n)
                    for e in range(4):
                        i = 2 * t + (e >> 1)
                        both = i32(((acc[e] << LOW_BITS) + acc[4 + e]) >> divide)
                        o[at_o + e] = ptx.add(
                            ptx.mul(o[at_o + e], alpha[i]), ptx.mul(ptx.to_float(both), weight[i])
                        )
            start += block_k

        for i in range(n_rows):
            top[i] = ptx.to_float(m[i])
        # addresses of results are computed here, not kept in registers during the loop
        head, first_row = ptx.fresh(head), ptx.fresh(first_row)
        results = Results(out, m_out, l_out, task, head, first_row, rows, columns)
        store(results, o, top, l, warp, lane)

    return Source(
        decode,
        extended(SIGNATURE) if changed else SIGNATURE,
        THREADS,
        q_planes * q_size + k_size + v_size + p_size + block_k * 16 + (1 + 2 * WARPS) * row_size,
    )
