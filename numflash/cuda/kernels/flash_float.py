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
    NEG_INF,
    join_sink,
    make_load_rows,
    make_load_tile,
    make_store_rows,
    quad_max,
    quad_sum,
    swizzle_of,
    tanh_accurate,
)

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
LOG2E, LN2 = f32(math.log2(math.e)), f32(math.log(2))

# pointers: q, k, v, o, lse, diagonal, key_lengths, mask, slopes, sinks
# strides in bytes: batch, head, row of q, k, v, o; then of the mask: batch, head, query, key
# sizes: queries, d, dv (bytes per row that exist), query heads, left, right;  factors: scale * log2(e), softcap
SIGNATURE = types.void(types.UniTuple(u64, 10), types.UniTuple(i64, 16), types.UniTuple(i32, 6), types.UniTuple(f32, 2))


def flash_float(d: int, dv: int, block_q: int, block_k: int, dtype: str = "float16", group: int = 1, band: bool = False,
                mask: str = "", softcap: bool = False, alibi: bool = False, transform: bool = False,
                turing: bool = False, sinks: bool = False) -> Source:
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
    k_steps, key_tiles, value_tiles, p_steps = d // 16, block_k // 8, dv // 8, block_k // 16
    n_s, n_o, n_q = key_tiles * 4, value_tiles * 4, k_steps * 4
    d_bytes, dv_bytes = d * 2, dv * 2
    keep_q = d < 128                                   # Q's fragments stay in registers where there is room (the ladder's rung 7)
    n_qf = n_q if keep_q else 4
    shift_k, xor_k = swizzle_of(d_bytes)
    shift_v, xor_v = swizzle_of(dv_bytes)
    stages = 1 if turing else 2
    q_size, k_size, v_size = block_q * max(d_bytes, dv_bytes), block_k * d_bytes, block_k * dv_bytes
    transform = transform or softcap or alibi or mask == "float"
    has_mask, float_mask = bool(mask), mask == "float"
    mma, mma8, pack = ptx.mma[dtype], ptx.mma_k8_f16, ptx.pack_turing if turing else ptx.pack[dtype]
    load_q = make_load_rows(block_q, d_bytes, threads, group, not turing)
    load_k = make_load_tile(block_k, d_bytes, threads, not turing)
    load_v = make_load_tile(block_k, dv_bytes, threads, not turing)
    store_o = make_store_rows(dv_bytes, group)
    wait_all = ptx.cp_async_wait[0]

    def flash(pointers, strides, sizes, factors):
        q, k, v, o_out, lse_out, diagonals, lengths, mask_at, slopes, sinks_at = pointers
        queries, d_left, dv_left, heads, left, right = sizes
        scale, cap = factors
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

        # rows of this block, and the tiles of keys that any of them sees
        rows = queries * group
        first = i32(cuda.blockIdx.x) * block_q
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles = i32(0), (keys + block_k - 1) // block_k
        whole_low, whole_high = i32(0), keys           # every row sees keys whole_low <= j < whole_high
        if band:
            low = first // group + diagonal
            high = (min(first + block_q, rows) - 1) // group + diagonal
            tile = max(low - left, 0) // block_k
            tiles = min(tiles, (max(high + right + 1, 0) + block_k - 1) // block_k)
            whole_low, whole_high = max(high - left, 0), min(keys, low + right + 1)

        # query and key range of the two rows that this thread holds
        row0 = first + warp * 16 + (lane >> 2)
        query0, query1 = row0 // group, (row0 + 8) // group
        low0, low1, high0, high1 = i32(0), i32(0), keys, keys
        if band:
            low0, low1 = query0 + diagonal - left, query1 + diagonal - left
            high0, high1 = min(keys, query0 + diagonal + right + 1), min(keys, query1 + diagonal + right + 1)
        head0 = kv_head * group + (row0 - query0 * group)
        head1 = kv_head * group + (row0 + 8 - query1 * group)
        slope0, slope1 = f32(0), f32(0)
        if alibi:
            if row0 < rows:
                slope0 = ptx.load_global_f32(slopes + u64((batch * heads + head0) * 4)) * LOG2E
            if row0 + 8 < rows:
                slope1 = ptx.load_global_f32(slopes + u64((batch * heads + head1) * 4)) * LOG2E

        load_q(sq, q, strides[1], strides[2], first, rows, d_left, thread)
        if not turing and tile < tiles:
            load_k(sk, k + u64(tile * block_k) * u64(strides[5]), strides[5], keys - tile * block_k, d_left, thread)
            load_v(sv, v + u64(tile * block_k) * u64(strides[8]), strides[8], keys - tile * block_k, dv_left, thread)
        if not turing:
            ptx.cp_async_commit()
            wait_all()
        cuda.syncthreads()

        qf = cuda.local.array(n_qf, u32)               # A fragments of Q
        s = cuda.local.array(n_s, f32)                 # scores, then weights: 16 x block_k per warp
        o = cuda.local.array(n_o, f32)                 # output: 16 x dv per warp
        a = cuda.local.array(4, u32)
        b = cuda.local.array(4, u32)
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
                load_k(sk, k + u64(start) * u64(strides[5]), strides[5], keys - start, d_left, thread)
                load_v(sv, v + u64(start) * u64(strides[8]), strides[8], keys - start, dv_left, thread)
                cuda.syncthreads()
            else:
                wait_all()
                cuda.syncthreads()                     # everyone's part of this tile is there, and the last tile is done with
                if tile + 1 < tiles:
                    ahead = start + block_k
                    load_k(sk + u32((stage ^ 1) * k_size), k + u64(ahead) * u64(strides[5]), strides[5], keys - ahead, d_left,
                           thread)
                    load_v(sv + u32((stage ^ 1) * v_size), v + u64(ahead) * u64(strides[8]), strides[8], keys - ahead, dv_left,
                           thread)
                ptx.cp_async_commit()

            # S = Q . K^T
            k_at = sk + u32(stage * k_size) + u32(k_row * d_bytes)
            for i in range(n_s):
                s[i] = f32(0)
            for step in range(k_steps):
                if not keep_q:
                    ptx.ldmatrix(qf, 0, q_at + ((q_chunk ^ u32(2 * step)) << u32(4)))
                qi = step * 4 if keep_q else 0
                for n in range(key_tiles // 2):
                    ptx.ldmatrix(b, 0, k_at + u32(n * 16 * d_bytes) + ((k_chunk ^ u32(2 * step)) << u32(4)))
                    if turing:
                        mma8(s, 8 * n, qf, qi, b, 0)
                        mma8(s, 8 * n, qf, qi + 2, b, 1)
                        mma8(s, 8 * n + 4, qf, qi, b, 2)
                        mma8(s, 8 * n + 4, qf, qi + 2, b, 3)
                    else:
                        mma(s, 8 * n, qf, qi, b, 0)
                        mma(s, 8 * n + 4, qf, qi, b, 2)

            if transform:
                for n in range(key_tiles):
                    for e in range(4):
                        j = start + 8 * n + 2 * (lane & 3) + (e & 1)
                        x = s[4 * n + e] * scale       # in units of log2
                        if softcap:
                            x = cap * tanh_accurate(ptx.div(x, cap))
                        if alibi:
                            query = query1 if e > 1 else query0
                            x -= (slope1 if e > 1 else slope0) * f32(abs(query + diagonal - j))
                        s[4 * n + e] = x
            if has_mask:
                for n in range(key_tiles):
                    for e in range(4):
                        j = start + 8 * n + 2 * (lane & 3) + (e & 1)
                        query = query1 if e > 1 else query0
                        head = head1 if e > 1 else head0
                        if query < queries and j < keys:
                            at = mask_at + u64(batch * strides[12] + head * strides[13] + query * strides[14] + j * strides[15])
                            if float_mask:
                                bias = ptx.load_global_f32(at)
                                if bias == NEG_INF:
                                    s[4 * n + e] = NEG_INF
                                else:
                                    s[4 * n + e] += bias * LOG2E
                            elif ptx.load_global_u8(at) == u32(0):
                                s[4 * n + e] = NEG_INF
            if start < whole_low or start + block_k > whole_high:
                for n in range(key_tiles):
                    for e in range(4):
                        j = start + 8 * n + 2 * (lane & 3) + (e & 1)
                        if j < (low1 if e > 1 else low0) or j >= (high1 if e > 1 else high0):
                            s[4 * n + e] = NEG_INF

            # online softmax: the new maximum, and what it does to the sums so far
            x0, x1 = m0, m1
            for n in range(key_tiles):
                x0 = ptx.fmax(x0, ptx.fmax(s[4 * n], s[4 * n + 1]))
                x1 = ptx.fmax(x1, ptx.fmax(s[4 * n + 2], s[4 * n + 3]))
            x0, x1 = quad_max(x0), quad_max(x1)
            factor = f32(1) if transform else scale
            safe0 = f32(0) if x0 == NEG_INF else x0 * factor           # nothing seen yet: keeps -inf - -inf away
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

            # O += P . V: two accumulator tiles of S are one A operand
            v_at = sv + u32(stage * v_size) + u32(v_row * dv_bytes)
            for step in range(p_steps):
                for e in range(4):
                    a[e] = pack(s[8 * step + 2 * e], s[8 * step + 2 * e + 1])
                for n in range(value_tiles // 2):
                    ptx.ldmatrix_trans(b, 0, v_at + u32(step * 16 * dv_bytes) + ((v_chunk ^ u32(2 * n)) << u32(4)))
                    if turing:
                        mma8(o, 8 * n, a, 0, b, 0)
                        mma8(o, 8 * n, a, 2, b, 1)
                        mma8(o, 8 * n + 4, a, 0, b, 2)
                        mma8(o, 8 * n + 4, a, 2, b, 3)
                    else:
                        mma(o, 8 * n, a, 0, b, 0)
                        mma(o, 8 * n + 4, a, 0, b, 2)
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
            if row0 < rows:
                x0, l0, r0 = join_sink(x0, l0, ptx.load_global_f32(sinks_at + u64(head0 * 4)) * LOG2E)
            if row0 + 8 < rows:
                x1, l1, r1 = join_sink(x1, l1, ptx.load_global_f32(sinks_at + u64(head1 * 4)) * LOG2E)
        r0 = f32(0) if l0 == f32(0) else r0 * ptx.rcp(l0)
        r1 = f32(0) if l1 == f32(0) else r1 * ptx.rcp(l1)
        if lane & 3 == 0:
            if row0 < rows:
                ptx.store_global_f32(lse_out + u64(((batch * heads + head0) * queries + query0) * 4), (x0 + ptx.lg2(l0)) * LN2)
            if row0 + 8 < rows:
                ptx.store_global_f32(lse_out + u64(((batch * heads + head1) * queries + query1) * 4), (x1 + ptx.lg2(l1)) * LN2)
        # through this warp's own part of Q's tile, so that memory is written 16 bytes at a time
        if dv > d:
            cuda.syncthreads()
        else:
            cuda.syncwarp()
        mine = sq + u32(warp * 16 * max(d_bytes, dv_bytes))
        o_row = lane >> 2
        o_at = mine + u32((lane & 3) * 4)
        for n in range(value_tiles):
            c0 = u32((n ^ ((o_row >> shift_v) & xor_v)) << 4)
            c1 = u32((n ^ (((o_row + 8) >> shift_v) & xor_v)) << 4)
            ptx.store_shared_f32(o_at + u32(o_row * dv_bytes) + c0, ptx.from_bits(pack(o[4 * n] * r0, o[4 * n + 1] * r0)))
            ptx.store_shared_f32(o_at + u32((o_row + 8) * dv_bytes) + c1, ptx.from_bits(pack(o[4 * n + 2] * r1, o[4 * n + 3] * r1)))
        cuda.syncwarp()
        store_o(mine, o_out + u64(batch * strides[9] + kv_head * group * strides[10]),
                strides[10], strides[11], first + warp * 16, rows, dv_left, lane)

    return Source(flash, SIGNATURE, threads, q_size + stages * (k_size + v_size))
