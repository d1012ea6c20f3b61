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

from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .decode_changes import extended, make_changes
from .decode_pieces import (
    NOTHING,
    THREADS,
    WARPS,
    Pages,
    Results,
    Tokens,
    make_load_keys,
    make_part_of,
    make_query_rows,
    make_store,
    remainder,
    visible,
)
from .pieces import NEG_INF, quad_max, quad_sum, swizzle_of

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
BLOCK_K = 64  # keys of a tile: 16 per warp
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
    block_k = BLOCK_K
    k_steps, value_tiles, tile_rows = d // 16, dv // 8 // WARPS, 16 * row_tiles
    d_bytes, dv_bytes = d * 2, dv * 2
    n_s, n_o, n_p, n_rows = 8 * row_tiles, 4 * value_tiles * row_tiles, 8 * row_tiles, 2 * row_tiles
    keep_q = row_tiles == 1 and d <= 128  # Q's fragments stay in registers where there is room
    n_qf = 4 * k_steps if keep_q else 4
    shift_k, xor_k = swizzle_of(d_bytes)
    shift_v, xor_v = swizzle_of(dv_bytes)
    mma, pack = ptx.products(dtype, turing)
    load_k, load_v = (make_load_keys(block_k, n, paged, not turing) for n in (d_bytes, dv_bytes))
    query_rows = make_query_rows(d, 0, pack)(tile_rows)
    part_of = make_part_of(tile_rows, ring)
    store = make_store(row_tiles, value_tiles, direct, 1.0)
    options_of, row_option, position_of, allowed, changed_score = make_changes(changed, ring, 8, 2)
    new_is_whole = 0 if changed else 1  # a mask may hide the first new token too
    wait_all, wait_but_one = ptx.cp_async_wait[0], ptx.cp_async_wait[1]
    q_size, k_size, v_size = tile_rows * d_bytes, block_k * d_bytes, block_k * dv_bytes
    p_size, row_size = tile_rows * 128, tile_rows * 4

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def decode(pointers, bytes_of, sizes, factors):
        q, k, v, tables, lengths, out, m_out, l_out = pointers[:8]
        shift_at, slope_at, mask_at, cap, inverse = options_of(pointers, factors)
        k_page, k_head, v_page, v_head = bytes_of
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
        scale, phi = factors[:2]
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        sq = ptx.shared_address(shared)
        sk = sq + u32(q_size)
        sv = sk + u32(k_size)
        sp = sv + u32(v_size)
        s_factor = sp + u32(p_size)
        s_max = s_factor + u32(row_size)
        s_sum = s_max + u32(WARPS * row_size)

        task = i32(cuda.blockIdx.x)
        b, g, head, first_row, length, newest, begin, stop = part_of(
            task, rows, kv_heads, splits, lengths, sinks, ring_slots
        )
        k = k + u64(g) * u64(k_head)
        v = v + u64(g) * u64(v_head)
        table = tables + u64(b * width) * u64(4) if paged else u64(b)
        keys = Pages(k, u64(k_page), table, shift, k_row)
        values = Pages(v, u64(v_page), table, shift, v_row)
        tokens = Tokens(length, newest, window, sinks, ring_slots)
        if begin < stop:
            load_k(sk, keys, begin, stop, thread)
            if not turing:
                ptx.cp_async_commit()
        query_rows(
            sq,
            s_factor,
            q + u64(head) * u64(rows * channels * 4),
            first_row,
            rows,
            channels,
            scale,
            warp,
            lane,
        )
        cuda.syncthreads()

        row_factor = cuda.local.array(n_rows, f32)
        at = cuda.local.array(n_rows, i32)  # position of a row's token
        token = cuda.local.array(n_rows, i32)  # the number of that token among the new ones
        moved = cuda.local.array(n_rows, f32)
        slope = cuda.local.array(n_rows, f32)
        m = cuda.local.array(n_rows, f32)
        l = cuda.local.array(n_rows, f32)
        top = cuda.local.array(n_rows, f32)
        alpha = cuda.local.array(n_rows, f32)
        s = cuda.local.array(n_s, f32)
        o = cuda.local.array(n_o, f32)
        qf = cuda.local.array(n_qf, u32)
        p = cuda.local.array(n_p, u32)
        kb = cuda.local.array(4, u32)
        for i in range(n_rows):
            r = first_row + (lane >> 2) + 8 * i
            row_factor[i] = ptx.load_shared_f32(s_factor + u32(((lane >> 2) + 8 * i) * 4))
            token[i] = remainder(r, queries)
            at[i] = length - queries + token[i]
            r = min(r, rows - 1)
            moved[i] = row_option(shift_at, head * rows + r)
            slope[i] = row_option(slope_at, g * rows + r)
        low = length - queries  # the first position of any row
        k_row_of = ((lane >> 4) << 3) + (lane & 7)
        k_at = sk + u32((16 * warp + k_row_of) * d_bytes)
        k_chunk = u32(((lane >> 3) & 1) ^ ((k_row_of >> shift_k) & xor_k))
        a_row = lane & 15
        q_chunk = u32((lane >> 4) ^ ((a_row >> shift_k) & xor_k))
        p_chunk = u32((lane >> 4) ^ (a_row & 7))
        if keep_q:
            for step in range(k_steps):
                ptx.ldmatrix(
                    qf, 4 * step, sq + u32(a_row * d_bytes) + ((q_chunk ^ u32(2 * step)) << u32(4))
                )
        constant = unified  # whether this pass takes phi for the maximum
        again = True
        while again:
            again = False
            for i in range(n_o):
                o[i] = f32(0)
            for i in range(n_rows):
                m[i], l[i], top[i] = phi if constant else NOTHING, f32(0), NOTHING
            start = begin
            while start < stop:
                if not turing:
                    wait_all()
                # the keys are there, and everyone is done with the last values and weights
                cuda.syncthreads()
                load_v(sv, values, start, stop, thread)
                if not turing:
                    ptx.cp_async_commit()

                # S = Q . K^T of this warp's 16 keys
                for i in range(n_s):
                    s[i] = f32(0)
                for step in range(k_steps):
                    ptx.ldmatrix(kb, 0, k_at + ((k_chunk ^ u32(2 * step)) << u32(4)))
                    for t in range(row_tiles):
                        qi = 4 * step if keep_q else 0
                        if not keep_q:
                            ptx.ldmatrix(
                                qf,
                                0,
                                sq
                                + u32((16 * t + a_row) * d_bytes)
                                + ((q_chunk ^ u32(2 * step)) << u32(4)),
                            )
                        mma(s, 8 * t, qf, qi, kb, 0)
                        mma(s, 8 * t + 4, qf, qi, kb, 2)

                # in octaves, masked keys -inf, what float32 does not hold NaN; the largest of each
                # row over this warp's keys
                whole = not ring and start + block_k <= min(stop, low + new_is_whole)
                for i in range(n_rows):
                    largest = NOTHING
                    for n in range(2):
                        for e in range(2):
                            at_s = 8 * (i >> 1) + 4 * n + 2 * (i & 1) + e
                            j = start + 16 * warp + 8 * n + 2 * (lane & 3) + e
                            x = s[at_s] * row_factor[i]
                            fits = abs(x) < HUGE
                            position = position_of(j, length, newest, sinks, ring_slots)
                            away = at[i] - position
                            x = changed_score(x, moved[i], slope[i], away, cap, inverse)
                            if not fits:
                                x = NAN
                            if not whole and not (
                                visible(j, stop, at[i], tokens, ring)
                                and allowed(mask_at, b, queries, token[i], position - low)
                            ):
                                x = NEG_INF
                            s[at_s] = x
                            largest = ptx.fmax(largest, x)
                    if constant:
                        top[i] = ptx.fmax(top[i], largest)
                    else:
                        largest = quad_max(largest)
                        if lane & 3 == 0:
                            ptx.store_shared_f32(
                                s_max + u32((warp * tile_rows + (lane >> 2) + 8 * i) * 4), largest
                            )
                cuda.syncthreads()  # everyone is done with these keys
                if start + block_k < stop:
                    load_k(sk, keys, start + block_k, stop, thread)
                if not turing:
                    ptx.cp_async_commit()

                # weights and their sums
                for i in range(n_rows):
                    alpha[i] = f32(1)
                    if not constant:
                        largest = m[i]
                        for w in range(WARPS):
                            largest = ptx.fmax(
                                largest,
                                ptx.load_shared_f32(
                                    s_max + u32((w * tile_rows + (lane >> 2) + 8 * i) * 4)
                                ),
                            )
                        alpha[i] = ptx.ex2(m[i] - largest)
                        m[i] = largest
                    total = f32(0)
                    r = (lane >> 2) + 8 * i
                    for n in range(2):
                        at_s = 8 * (i >> 1) + 4 * n + 2 * (i & 1)
                        p0, p1 = ptx.ex2(s[at_s] - m[i]), ptx.ex2(s[at_s + 1] - m[i])
                        total += p0 + p1
                        chunk = u32((2 * warp + n) ^ (r & 7))
                        ptx.store_shared(
                            sp + u32(r * 128) + (chunk << u32(4)) + u32(4 * (lane & 3)),
                            pack(p0, p1),
                        )
                    total = quad_sum(total)
                    if lane & 3 == 0:
                        ptx.store_shared_f32(s_sum + u32((warp * tile_rows + r) * 4), total)
                if not turing:
                    wait_but_one()
                cuda.syncthreads()  # values and weights are there

                for i in range(n_rows):
                    r = (lane >> 2) + 8 * i
                    total = f32(0)
                    for w in range(WARPS):
                        total += ptx.load_shared_f32(s_sum + u32((w * tile_rows + r) * 4))
                    l[i] = l[i] * alpha[i] + total

                # O = O * alpha + P . V for this warp's channels
                for t in range(row_tiles):
                    for n in range(value_tiles):
                        for e in range(2):
                            o[4 * (t * value_tiles + n) + e] *= alpha[2 * t]
                            o[4 * (t * value_tiles + n) + 2 + e] *= alpha[2 * t + 1]
                for half in range(2):  # 32 keys
                    for t in range(row_tiles):
                        for step in range(2):
                            ptx.ldmatrix(
                                p,
                                8 * t + 4 * step,
                                sp
                                + u32((16 * t + a_row) * 128)
                                + ((p_chunk ^ u32(4 * half + 2 * step)) << u32(4)),
                            )
                    v_row_of = 32 * half + lane
                    v_xor = (v_row_of >> shift_v) & xor_v
                    for n in range(value_tiles):
                        ptx.ldmatrix_trans(
                            kb,
                            0,
                            sv
                            + u32(v_row_of * dv_bytes)
                            + (u32((warp * value_tiles + n) ^ v_xor) << u32(4)),
                        )
                        for t in range(row_tiles):
                            for step in range(2):
                                at_o = 4 * (t * value_tiles + n)
                                mma(o, at_o, p, 8 * t + 4 * step, kb, 2 * step)
                start += block_k

            if constant:
                # overflow test: every row that attends to a key has its largest within what weights
                # relative to phi hold
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
                    ptx.store_shared_f32(s_max + u32(warp * 4), bad)
                cuda.syncthreads()
                for w in range(WARPS):
                    again = again or ptx.load_shared_f32(s_max + u32(w * 4)) != f32(0)
                constant = False
                if again:
                    load_k(sk, keys, begin, stop, thread)
                    if not turing:
                        ptx.cp_async_commit()

        # addresses of results are computed here, not kept in registers during the loop
        head, first_row = ptx.fresh(head), ptx.fresh(first_row)
        results = Results(out, m_out, l_out, task, head, first_row, rows, columns)
        store(results, o, m, l, warp, lane)

    # three blocks to a multiprocessor keep more bytes on their way; with wider heads the registers
    # would spill
    blocks = 3 if row_tiles == 1 and max(d, dv) <= 64 and not unified else 1
    return Source(
        decode,
        extended(SIGNATURE) if changed else SIGNATURE,
        THREADS,
        q_size + k_size + v_size + p_size + (1 + 2 * WARPS) * row_size,
        blocks=blocks,
    )
