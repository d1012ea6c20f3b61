"""FlashAttention-2 forward on tensor cores for float16 and bfloat16 (Dao 2023, algorithm 1), sm_75 to sm_120.

A warp owns 16 query rows. Its scores, weights and outputs are accumulators of m16n8k16 products, and the accumulator of one
product is laid out as the operand of the next, so the weights never leave registers. Keys and values come by cp.async into two
buffers; sm_75 has neither cp.async nor k16 products and uses one buffer and two k8 products instead.

Heads that share keys are packed: row r of the problem is query r // group of head r % group of the group.
"""

from __future__ import annotations

import math

from .. import ptx
from .._target import cuda, types
from ..compile import Source
from .pieces import (
    LOG2E,
    NEG_INF,
    join_sink,
    load_slopes,
    make_adjust,
    make_hide,
    make_load_rows,
    make_load_tile,
    make_row_block,
    make_store_rows,
    make_tile_range,
    quad_max,
    quad_sum,
    swizzle_of,
)
from .products import make_add, make_scores, make_stage

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
LN2 = f32(math.log(2))

# pointers: q, k, v, o, lse, diagonal, key_lengths, mask, slopes, sinks
# strides in bytes: batch, head, row of q, k, v, o; then of the mask: batch, head, query, key
# sizes: queries, d, dv (bytes per row that exist), query heads, left, right;  factors: scale * log2(e), softcap
SIGNATURE = types.void(
    types.UniTuple(u64, 10), types.UniTuple(i64, 16), types.UniTuple(i32, 6), types.UniTuple(f32, 2)
)


def flash_float(
    d: int,
    dv: int,
    block_q: int,
    block_k: int,
    dtype: str = "float16",
    group: int = 1,
    band: bool = False,
    mask: str = "",
    softcap: bool = False,
    alibi: bool = False,
    transform: bool = False,
    turing: bool = False,
    sinks: bool = False,
) -> Source:
    """The kernel for padded head sizes d and dv.

    Parameters
    ----------
    block_q : query rows per block, 16 per warp;  block_k : keys per tile, a multiple of 16
    group : query heads per key head
    band : a causal or windowed problem; tiles outside are skipped
    mask : "", "bool" (uint8) or "float" (float32, added)
    transform : scores are scaled before the maximum is taken (implied by softcap, alibi, mask "float"; needed for scale <= 0)
    turing : sm_75
    sinks : exp(sink) of the head joins each row's sum
    """
    _warps, threads = block_q // 16, block_q * 2
    k_steps, key_tiles, value_tiles = d // 16, block_k // 8, dv // 8
    n_s, n_o, n_q = key_tiles * 4, value_tiles * 4, k_steps * 4
    d_bytes, dv_bytes = d * 2, dv * 2
    keep_q = d < (
        96 if mask else 128
    )  # Q's fragments stay in registers where there is room (the ladder's rung 7)
    n_qf = n_q if keep_q else 4
    wide = max(d, dv) > 128  # no register is left: slopes are read again for every tile
    shift_k, xor_k = swizzle_of(d_bytes)
    shift_v, xor_v = swizzle_of(dv_bytes)
    stages = 1 if turing else 2
    q_size, k_size, v_size = block_q * max(d_bytes, dv_bytes), block_k * d_bytes, block_k * dv_bytes
    transform = transform or softcap or alibi or mask == "float"
    options, adjust = (
        transform or bool(mask),
        make_adjust(key_tiles, transform, softcap, alibi, mask),
    )
    hide = make_hide(key_tiles)
    scores, add = (
        make_scores(d, block_k, dtype, turing, keep_q),
        make_add(dv, block_k, dtype, turing),
    )
    stage_rows, tile_range, row_block = (
        make_stage(dv, dtype, turing),
        make_tile_range(block_q, block_k, group, band),
        make_row_block(band),
    )
    load_q = make_load_rows(block_q, d_bytes, threads, group, not turing)
    load_k = make_load_tile(block_k, d_bytes, threads, not turing)
    load_v = make_load_tile(block_k, dv_bytes, threads, not turing)
    store_o = make_store_rows(dv_bytes, group)
    wait_all = ptx.cp_async_wait[0]

    def flash(pointers, strides, sizes, factors):
        q, k, v, o_out, lse_out, diagonals, lengths, mask_at, slopes, sinks_at = pointers
        queries, d_left, dv_left, heads, left, right = sizes
        scale = factors[0]
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        kv_head, batch = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        sq = ptx.shared_address(shared)
        sk = sq + u32(q_size)
        sv = sk + u32(stages * k_size)
        k = k + u64(batch * strides[3] + kv_head * strides[4])
        v = v + u64(batch * strides[6] + kv_head * strides[7])
        q = q + u64(batch * strides[0] + kv_head * group * strides[1])

        # rows of this block, the tiles of keys that any of them sees, and the keys that all of them see
        rows, first = i32(queries * group), i32(row_block() * block_q)
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles, whole_low, whole_high = tile_range(first, rows, keys, diagonal, left, right)

        # query and key range of the two rows that this thread holds
        row = i32(first + warp * 16 + (lane >> 2))
        query, head, slope = (
            cuda.local.array(2, i32),
            cuda.local.array(2, i32),
            cuda.local.array(2, f32),
        )
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        for r in range(2):
            query[r] = i32((row + 8 * r) // group)
            head[r] = i32(kv_head * group + (row + 8 * r - query[r] * group))
            slope[r], low[r], high[r] = f32(0), i32(0), keys
            if band:
                low[r], high[r] = (
                    i32(query[r] + diagonal - left),
                    i32(min(keys, query[r] + diagonal + right + 1)),
                )

        if alibi and not wide:
            load_slopes(slope, slopes, batch * heads, head)

        load_q(sq, q, strides[1], strides[2], first, rows, d_left, thread)
        if not turing and tile < tiles:
            load_k(
                sk,
                k + u64(tile * block_k) * u64(strides[5]),
                strides[5],
                keys - tile * block_k,
                d_left,
                thread,
            )
            load_v(
                sv,
                v + u64(tile * block_k) * u64(strides[8]),
                strides[8],
                keys - tile * block_k,
                dv_left,
                thread,
            )
        if not turing:
            ptx.cp_async_commit()
            wait_all()
        cuda.syncthreads()

        qf = cuda.local.array(n_qf, u32)  # A fragments of Q
        s = cuda.local.array(n_s, f32)  # scores, then weights: 16 x block_k per warp
        o = cuda.local.array(n_o, f32)  # output: 16 x dv per warp
        for i in range(n_o):
            o[i] = f32(0)
        m0, m1, l0, l1 = NEG_INF, NEG_INF, f32(0), f32(0)
        # ldmatrix addresses of this lane; the column enters by XOR with an even chunk number, which leaves the lane's bit alone
        q_row = warp * 16 + (lane & 15)
        q_at = sq + u32(q_row * d_bytes)
        q_chunk = u32((lane >> 4) ^ ((q_row >> shift_k) & xor_k))
        k_row = ((lane >> 4) << 3) + (lane & 7)
        k_chunk = u32(((lane >> 3) & 1) ^ ((k_row >> shift_k) & xor_k))
        v_row = lane & 15
        v_chunk = u32((lane >> 4) ^ ((v_row >> shift_v) & xor_v))
        if keep_q:
            for step in range(k_steps):
                ptx.ldmatrix(qf, step * 4, q_at + ((q_chunk ^ u32(2 * step)) << u32(4)))
        stage = i32(0)
        while tile < tiles:
            start = tile * block_k
            if turing:
                load_k(
                    sk, k + u64(start) * u64(strides[5]), strides[5], keys - start, d_left, thread
                )
                load_v(
                    sv, v + u64(start) * u64(strides[8]), strides[8], keys - start, dv_left, thread
                )
                cuda.syncthreads()
            else:
                wait_all()
                cuda.syncthreads()  # everyone's part of this tile is there, and the last tile is done with
                if tile + 1 < tiles:
                    ahead = start + block_k
                    load_k(
                        sk + u32((stage ^ 1) * k_size),
                        k + u64(ahead) * u64(strides[5]),
                        strides[5],
                        keys - ahead,
                        d_left,
                        thread,
                    )
                    load_v(
                        sv + u32((stage ^ 1) * v_size),
                        v + u64(ahead) * u64(strides[8]),
                        strides[8],
                        keys - ahead,
                        dv_left,
                        thread,
                    )
                ptx.cp_async_commit()

            scores(s, qf, q_at, q_chunk, sk + u32(stage * k_size) + u32(k_row * d_bytes), k_chunk)
            here = i32(start + 2 * (lane & 3))
            if alibi and wide:
                load_slopes(slope, slopes, batch * heads, head)
            if options:
                adjust(
                    s,
                    here,
                    query,
                    head,
                    slope,
                    (batch, diagonal),
                    (queries, keys),
                    factors,
                    mask_at,
                    strides[12:],
                )
            if start < whole_low or start + block_k > whole_high:
                hide(s, here, low, high)

            # online softmax: the new maximum, and what it does to the sums so far
            x0, x1 = m0, m1
            for n in range(key_tiles):
                x0 = ptx.fmax(x0, ptx.fmax(s[4 * n], s[4 * n + 1]))
                x1 = ptx.fmax(x1, ptx.fmax(s[4 * n + 2], s[4 * n + 3]))
            x0, x1 = quad_max(x0), quad_max(x1)
            factor = f32(1) if transform else scale
            safe0 = (
                f32(0) if x0 == NEG_INF else x0 * factor
            )  # nothing seen yet: keeps -inf - -inf away
            safe1 = f32(0) if x1 == NEG_INF else x1 * factor
            alpha0, alpha1 = ptx.ex2(m0 * factor - safe0), ptx.ex2(m1 * factor - safe1)
            m0, m1 = x0, x1
            l0, l1 = l0 * alpha0, l1 * alpha1
            for n in range(key_tiles):
                for e in range(2):
                    s[4 * n + e] = ptx.ex2(ptx.fma(s[4 * n + e], factor, -safe0))
                    s[4 * n + 2 + e] = ptx.ex2(ptx.fma(s[4 * n + 2 + e], factor, -safe1))
                l0 += s[4 * n] + s[4 * n + 1]
                l1 += s[4 * n + 2] + s[4 * n + 3]
            for n in range(value_tiles):
                for e in range(2):
                    o[4 * n + e] *= alpha0
                    o[4 * n + 2 + e] *= alpha1

            add(o, s, sv + u32(stage * v_size) + u32(v_row * dv_bytes), v_chunk)
            if turing:
                cuda.syncthreads()
            else:
                stage ^= 1
            tile += 1

        # one division per row; a row that saw nothing is 0, its LSE -inf (or the sink)
        factor = f32(1) if transform else scale
        l0, l1 = quad_sum(l0), quad_sum(l1)
        x0 = NEG_INF if l0 == f32(0) else m0 * factor
        x1 = NEG_INF if l1 == f32(0) else m1 * factor
        r0, r1 = f32(1), f32(1)
        if sinks:
            if query[0] < queries:
                x0, l0, r0 = join_sink(
                    x0, l0, ptx.load_global_f32(sinks_at + u64(head[0] * 4)) * LOG2E
                )
            if query[1] < queries:
                x1, l1, r1 = join_sink(
                    x1, l1, ptx.load_global_f32(sinks_at + u64(head[1] * 4)) * LOG2E
                )
        r0 = f32(0) if l0 == f32(0) else r0 * ptx.rcp(l0)
        r1 = f32(0) if l1 == f32(0) else r1 * ptx.rcp(l1)
        if lane & 3 == 0:
            if query[0] < queries:
                ptx.store_global_f32(
                    lse_out + u64(((batch * heads + head[0]) * queries + query[0]) * 4),
                    (x0 + ptx.lg2(l0)) * LN2,
                )
            if query[1] < queries:
                ptx.store_global_f32(
                    lse_out + u64(((batch * heads + head[1]) * queries + query[1]) * 4),
                    (x1 + ptx.lg2(l1)) * LN2,
                )
        # through this warp's own part of Q's tile, so that memory is written 16 bytes at a time
        if dv > d:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        mine = sq + u32(warp * 16 * max(d_bytes, dv_bytes))
        stage_rows(o, mine, r0, r1, lane)
        cuda.syncwarp()
        store_o(
            mine,
            o_out + u64(batch * strides[9] + kv_head * group * strides[10]),
            strides[10],
            strides[11],
            first + warp * 16,
            rows,
            dv_left,
            lane,
        )

    return Source(flash, SIGNATURE, threads, q_size + stages * (k_size + v_size))
