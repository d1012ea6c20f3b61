"""Rungs 3 to 7 of the ladder: tensor cores, then what keeps them fed. One head of float16 (L, D) arrays, L a multiple of 64.

One factory, because each rung differs from the last in one decision:

layout : "naive" rows as they lie, "padded" by 16 bytes, "swizzled" by XOR.
double_buffer : tiles come by cp.async while the last one is worked on; else by plain loads between two barriers.
q_in_registers : Q's fragments are loaded once; else from shared memory for every tile.
scores_only : only Q . K^T on tensor cores; the weights go through shared memory to a scalar P . V.
half_scores : Q . K^T accumulated in float16 instead of float32.
"""
from __future__ import annotations

from .. import ptx
from .._target import cuda, types
from ..compile import Source
from ..kernels.pieces import quad_max, quad_sum
from .scalar import LOWEST, SIGNATURE

u32, u64, f32, i32 = types.uint32, types.uint64, types.float32, types.int32
BLOCK, THREADS = 64, 128


def tensor_cores(d: int = 64, layout: str = "naive", double_buffer: bool = False, q_in_registers: bool = False,
                 scores_only: bool = False, half_scores: bool = False) -> Source:
    """A block of 4 warps owns 64 rows, a warp 16; 64 keys per tile."""
    row_bytes = d * 2 + (16 if layout == "padded" else 0)
    xor = 7 if layout == "swizzled" else 0
    tile_bytes, pieces, chunks = BLOCK * row_bytes, BLOCK * d // 8 // THREADS, d // 8
    k_steps, key_tiles, value_tiles, p_steps = d // 16, BLOCK // 8, d // 8, BLOCK // 16
    n_q, n_s, n_o, half = (k_steps if q_in_registers else 1) * 4, key_tiles * 4, value_tiles * 4, d // 2
    stages = 2 if double_buffer else 1
    weights_bytes = BLOCK * (BLOCK + 1) * 4 if scores_only else 0
    mma, mma_half, pack, wait_all = ptx.mma["float16"], ptx.mma_f16_accumulate, ptx.pack["float16"], ptx.cp_async_wait[0]

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = cuda.threadIdx.x
        lane, warp = t & 31, t >> 5
        sq = ptx.shared_address(shared)
        sk = sq + u32(tile_bytes)
        sv = sk + u32(stages * tile_bytes)
        sp = sv + u32(stages * tile_bytes)             # weights of rung 3, then one factor per row
        gk, gv = ptx.global_address(k), ptx.global_address(v)
        gq = ptx.global_address(q) + u64(cuda.blockIdx.x * BLOCK * d * 2)
        four, a, b = cuda.local.array(4, u32), cuda.local.array(4, u32), cuda.local.array(4, u32)
        qf, s, o_acc = cuda.local.array(n_q, u32), cuda.local.array(n_s, f32), cuda.local.array(n_o, f32)
        o_row, h, x = cuda.local.array(half, f32), cuda.local.array(2, u32), cuda.local.array(2, f32)
        for i in range(pieces):
            piece = t + i * THREADS
            r, c = piece // chunks, piece % chunks
            to = u32(r * row_bytes + ((c ^ (r & xor)) << 4))
            ptx.load_global_v4(four, 0, gq + u64(piece * 16))
            ptx.store_shared_v4(sq + to, four, 0)
            if double_buffer:
                ptx.cp_async(sk + to, gk + u64(piece * 16))
                ptx.cp_async(sv + to, gv + u64(piece * 16))
        ptx.cp_async_commit()
        cuda.syncthreads()
        for i in range(n_o):
            o_acc[i] = f32(0)
        for i in range(half):
            o_row[i] = f32(0)
        m0, m1, l0, l1 = LOWEST, LOWEST, f32(0), f32(0)
        q_row, k_row, v_row = warp * 16 + (lane & 15), ((lane >> 4) << 3) + (lane & 7), lane & 15
        if q_in_registers:
            for step in range(k_steps):
                ptx.ldmatrix(qf, 4 * step, sq + u32(q_row * row_bytes + (((2 * step + (lane >> 4)) ^ (q_row & xor)) << 4)))
        stage = u32(0)
        for start in range(0, keys, BLOCK):
            if double_buffer:
                wait_all()
                cuda.syncthreads()
                if start + BLOCK < keys:
                    ahead = (stage ^ u32(1)) * u32(tile_bytes)
                    for i in range(pieces):
                        piece = t + i * THREADS
                        r, c = piece // chunks, piece % chunks
                        to = u32(r * row_bytes + ((c ^ (r & xor)) << 4)) + ahead
                        ptx.cp_async(sk + to, gk + u64((start + BLOCK) * d * 2 + piece * 16))
                        ptx.cp_async(sv + to, gv + u64((start + BLOCK) * d * 2 + piece * 16))
                ptx.cp_async_commit()
            else:
                cuda.syncthreads()
                for i in range(pieces):
                    piece = t + i * THREADS
                    r, c = piece // chunks, piece % chunks
                    to = u32(r * row_bytes + ((c ^ (r & xor)) << 4))
                    ptx.load_global_v4(four, 0, gk + u64(start * d * 2 + piece * 16))
                    ptx.store_shared_v4(sk + to, four, 0)
                    ptx.load_global_v4(four, 0, gv + u64(start * d * 2 + piece * 16))
                    ptx.store_shared_v4(sv + to, four, 0)
                cuda.syncthreads()
            k_at, v_at = sk + stage * u32(tile_bytes), sv + stage * u32(tile_bytes)
            # S = Q . K^T
            for n in range(key_tiles // 2):
                for i in range(8):
                    s[8 * n + i] = f32(0)
                for tile in range(2):
                    h[0], h[1] = u32(0), u32(0)
                    for step in range(k_steps):
                        if not q_in_registers:
                            ptx.ldmatrix(qf, 0, sq + u32(q_row * row_bytes + (((2 * step + (lane >> 4)) ^ (q_row & xor)) << 4)))
                        r = n * 16 + k_row
                        ptx.ldmatrix(b, 0, k_at + u32(r * row_bytes + (((2 * step + ((lane >> 3) & 1)) ^ (r & xor)) << 4)))
                        if half_scores:
                            mma_half(h, 0, qf, 4 * step if q_in_registers else 0, b, 2 * tile)
                        else:
                            mma(s, 8 * n + 4 * tile, qf, 4 * step if q_in_registers else 0, b, 2 * tile)
                    if half_scores:
                        for r in range(2):
                            ptx.unpack_half(x, 0, h[r])
                            s[8 * n + 4 * tile + 2 * r], s[8 * n + 4 * tile + 2 * r + 1] = x[0], x[1]
            # online softmax in registers
            x0, x1 = m0, m1
            for n in range(key_tiles):
                x0 = ptx.fmax(x0, ptx.fmax(s[4 * n], s[4 * n + 1]))
                x1 = ptx.fmax(x1, ptx.fmax(s[4 * n + 2], s[4 * n + 3]))
            x0, x1 = quad_max(x0), quad_max(x1)
            alpha0, alpha1 = ptx.ex2((m0 - x0) * scale), ptx.ex2((m1 - x1) * scale)
            m0, m1 = x0, x1
            l0, l1 = l0 * alpha0, l1 * alpha1
            for n in range(key_tiles):
                for e in range(2):
                    s[4 * n + e] = ptx.ex2(ptx.fma(s[4 * n + e], scale, -(x0 * scale)))
                    s[4 * n + 2 + e] = ptx.ex2(ptx.fma(s[4 * n + 2 + e], scale, -(x1 * scale)))
                l0 += s[4 * n] + s[4 * n + 1]
                l1 += s[4 * n + 2] + s[4 * n + 3]
            if scores_only:
                # weights to shared memory; then two threads per row, as in rung 2
                g = warp * 16 + (lane >> 2)
                for n in range(key_tiles):
                    for e in range(2):
                        c = 8 * n + 2 * (lane & 3) + e
                        ptx.store_shared_f32(sp + u32((g * (BLOCK + 1) + c) * 4), s[4 * n + e])
                        ptx.store_shared_f32(sp + u32(((g + 8) * (BLOCK + 1) + c) * 4), s[4 * n + 2 + e])
                if lane & 3 == 0:
                    ptx.store_shared_f32(sp + u32((g * (BLOCK + 1) + BLOCK) * 4), alpha0)
                    ptx.store_shared_f32(sp + u32(((g + 8) * (BLOCK + 1) + BLOCK) * 4), alpha1)
                cuda.syncwarp()
                p_at = sp + u32((t >> 1) * (BLOCK + 1) * 4)
                alpha = ptx.load_shared_f32(p_at + u32(BLOCK * 4))
                for i in range(half):
                    o_row[i] *= alpha
                for j in range(BLOCK):
                    p = ptx.load_shared_f32(p_at + u32(j * 4))
                    for i in range(half // 8):
                        c = (t & 1) * (chunks // 2) + i
                        ptx.load_shared_v4(four, 0, v_at + u32(j * row_bytes + ((c ^ (j & xor)) << 4)))
                        for e in range(4):
                            ptx.unpack_half(x, 0, four[e])
                            o_row[8 * i + 2 * e] += p * x[0]
                            o_row[8 * i + 2 * e + 1] += p * x[1]
                cuda.syncwarp()
            else:
                for n in range(value_tiles):
                    for e in range(2):
                        o_acc[4 * n + e] *= alpha0
                        o_acc[4 * n + 2 + e] *= alpha1
                for step in range(p_steps):
                    for e in range(4):
                        a[e] = pack(s[8 * step + 2 * e], s[8 * step + 2 * e + 1])
                    for n in range(value_tiles // 2):
                        r = step * 16 + v_row
                        ptx.ldmatrix_trans(b, 0, v_at + u32(r * row_bytes + (((2 * n + (lane >> 4)) ^ (r & xor)) << 4)))
                        mma(o_acc, 8 * n, a, 0, b, 0)
                        mma(o_acc, 8 * n + 4, a, 0, b, 2)
            if double_buffer:
                stage ^= u32(1)
        l0, l1 = quad_sum(l0), quad_sum(l1)
        if scores_only:
            g = warp * 16 + (lane >> 2)
            if lane & 3 == 0:
                ptx.store_shared_f32(sp + u32(g * (BLOCK + 1) * 4), l0)
                ptx.store_shared_f32(sp + u32((g + 8) * (BLOCK + 1) * 4), l1)
            cuda.syncwarp()
            inverse = ptx.rcp(ptx.load_shared_f32(sp + u32((t >> 1) * (BLOCK + 1) * 4)))
            for i in range(half):
                o[cuda.blockIdx.x * BLOCK + (t >> 1), (t & 1) * half + i] = types.float16(o_row[i] * inverse)
        else:
            r0, r1 = ptx.rcp(l0), ptx.rcp(l1)
            go = ptx.global_address(o) + u64((cuda.blockIdx.x * BLOCK + warp * 16 + (lane >> 2)) * d * 2 + (lane & 3) * 4)
            for n in range(value_tiles):
                ptx.store_global(go + u64(16 * n), pack(o_acc[4 * n] * r0, o_acc[4 * n + 1] * r0))
                ptx.store_global(go + u64(16 * n + 16 * d), pack(o_acc[4 * n + 2] * r1, o_acc[4 * n + 3] * r1))
    return Source(kernel, SIGNATURE, THREADS, (1 + 2 * stages) * tile_bytes + weights_bytes)
