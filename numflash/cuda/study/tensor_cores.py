"""Rungs 3 to 7 of the ladder: tensor cores, then what keeps them fed.

One head of float16 (L, D) arrays, L a multiple of 64.

A block of four warps owns 64 queries, a warp 16 of them; 64 keys at a time. The parts are in
`pieces`.
"""

from __future__ import annotations

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from ..kernels.softmax import quad_sum
from .pieces import (
    BLOCK,
    THREADS,
    layout_of,
    make_begin,
    make_copy,
    make_finish,
    make_kept_scores,
    make_load_keys,
    make_load_queries,
    make_outputs,
    make_scores,
    make_softmax,
)
from .scalar import SIGNATURE

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32


def scores_only(d: int = 64, turing: bool = False) -> Source:
    """Rung 3: only Q . K^T on tensor cores.

    The weights go through shared memory to a scalar P . V, two threads per row.
    """
    copy, scores, softmax = make_copy(d), make_scores(d, "naive", turing), make_softmax()
    # 64 weights and a factor
    row_bytes = d * 2
    tile = BLOCK * d * 2
    half = d // 2
    n_s = BLOCK // 2
    line = (BLOCK + 1) * 4

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = i32(cuda.threadIdx.x)
        lane, warp, side, first = t & 31, t >> 5, t & 1, i32(cuda.blockIdx.x) * BLOCK
        sq = ptx.shared_address(shared)
        sk, sv, sp = sq + u32(tile), sq + u32(2 * tile), sq + u32(3 * tile)
        # the upper of the two rows whose scores this lane holds
        mine = sp + u32((warp * 16 + (lane >> 2)) * line)
        s, o_row = cuda.local.array(n_s, f32), cuda.local.array(half, f32)
        m, l, alpha = cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
        four, x = cuda.local.array(4, u32), cuda.local.array(2, f32)
        for c in range(half):
            o_row[c] = f32(0)
        for r in range(2):
            m[r], l[r] = f32(-1e30), f32(0)
        copy(sq, ptx.global_address(q) + u64(first * row_bytes), t)
        for start in range(0, keys, BLOCK):
            cuda.syncthreads()
            copy(sk, ptx.global_address(k) + u64(start * row_bytes), t)
            copy(sv, ptx.global_address(v) + u64(start * row_bytes), t)
            cuda.syncthreads()
            scores(s, sq, sk, warp * 16, lane)
            softmax(s, m, l, alpha, scale)
            for r in range(2):
                for i in range(n_s // 2):
                    column = 8 * (i >> 1) + 2 * (lane & 3) + (i & 1)
                    ptx.store_shared_f32(
                        mine + u32(8 * r * line + column * 4), s[4 * (i >> 1) + 2 * r + (i & 1)]
                    )
                if lane & 3 == 0:
                    ptx.store_shared_f32(mine + u32(8 * r * line + BLOCK * 4), alpha[r])
            cuda.syncwarp()
            weights = sp + u32((t >> 1) * line)
            factor = ptx.load_shared_f32(weights + u32(BLOCK * 4))
            for c in range(half):
                o_row[c] *= factor
            for j in range(BLOCK):
                p = ptx.load_shared_f32(weights + u32(j * 4))
                for i in range(half // 8):
                    ptx.load_shared_v4(four, 0, sv + u32(j * row_bytes + side * d + i * 16))
                    for e in range(4):
                        ptx.unpack_half(x, 0, four[e])
                        o_row[8 * i + 2 * e] += p * x[0]
                        o_row[8 * i + 2 * e + 1] += p * x[1]
            cuda.syncwarp()
        for r in range(2):
            total = quad_sum(l[r])
            if lane & 3 == 0:
                ptx.store_shared_f32(mine + u32(8 * r * line), total)
        cuda.syncwarp()
        inverse = ptx.rcp(ptx.load_shared_f32(sp + u32((t >> 1) * line)))
        for c in range(half):
            o[first + (t >> 1), side * half + c] = types.float16(o_row[c] * inverse)

    return Source(kernel, SIGNATURE, THREADS, 3 * tile + BLOCK * line)


def both_products(d: int = 64, layout: str = "naive", turing: bool = False) -> Source:
    """Rungs 4 and 5: both products, Q . K^T and P . V, on tensor cores.

    The weights never leave registers (FlashAttention-2).
    """
    copy = make_copy(d, layout)
    scores = make_scores(d, layout, turing)
    softmax = make_softmax()
    outputs = make_outputs(d, layout, turing=turing)
    begin, finish = make_begin(d), make_finish(d, turing=turing)
    tile, n_s, n_o, d_bytes = BLOCK * layout_of(d, layout)[0], BLOCK // 2, d // 2, d * 2

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = i32(cuda.threadIdx.x)
        lane, row, first = t & 31, (t >> 5) * 16, i32(cuda.blockIdx.x) * BLOCK
        sq = ptx.shared_address(shared)
        sk, sv = sq + u32(tile), sq + u32(2 * tile)
        s, acc = cuda.local.array(n_s, f32), cuda.local.array(n_o, f32)
        m, l, alpha = cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
        begin(acc, m, l)
        copy(sq, ptx.global_address(q) + u64(first * d_bytes), t)
        for start in range(0, keys, BLOCK):
            cuda.syncthreads()  # everyone is done with the last tile
            copy(sk, ptx.global_address(k) + u64(start * d_bytes), t)
            copy(sv, ptx.global_address(v) + u64(start * d_bytes), t)
            cuda.syncthreads()  # everyone's part of this one is there
            scores(s, sq, sk, row, lane)
            softmax(s, m, l, alpha, scale)
            outputs(acc, s, alpha, sv, lane)
        finish(acc, l, ptx.global_address(o) + u64((first + row) * d_bytes), lane)

    return Source(kernel, SIGNATURE, THREADS, 3 * tile)


def double_buffer(d: int = 64) -> Source:
    """Rung 6: the next tile comes by cp.async into the other buffer while this one is worked on.

    One barrier per tile.
    """
    copy = make_copy(d, "swizzled", True)
    scores = make_scores(d, "swizzled")
    softmax = make_softmax()
    outputs = make_outputs(d, "swizzled")
    begin, finish, wait_all = make_begin(d), make_finish(d), ptx.cp_async_wait[0]
    tile, n_s, n_o, d_bytes = BLOCK * d * 2, BLOCK // 2, d // 2, d * 2

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = i32(cuda.threadIdx.x)
        lane, row, first = t & 31, (t >> 5) * 16, i32(cuda.blockIdx.x) * BLOCK
        sq = ptx.shared_address(shared)
        sk, sv = sq + u32(tile), sq + u32(3 * tile)  # two of each
        gk, gv = ptx.global_address(k), ptx.global_address(v)
        s, acc = cuda.local.array(n_s, f32), cuda.local.array(n_o, f32)
        m, l, alpha = cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
        begin(acc, m, l)
        copy(sq, ptx.global_address(q) + u64(first * d_bytes), t)
        copy(sk, gk, t)
        copy(sv, gv, t)
        ptx.cp_async_commit()
        stage = u32(0)
        for start in range(0, keys, BLOCK):
            wait_all()
            # this tile is there for everyone, and everyone is done with the last
            cuda.syncthreads()
            ahead = stage ^ u32(tile)
            if start + BLOCK < keys:
                copy(sk + ahead, gk + u64((start + BLOCK) * d_bytes), t)
                copy(sv + ahead, gv + u64((start + BLOCK) * d_bytes), t)
            ptx.cp_async_commit()
            scores(s, sq, sk + stage, row, lane)
            softmax(s, m, l, alpha, scale)
            outputs(acc, s, alpha, sv + stage, lane)
            stage = ahead
        finish(acc, l, ptx.global_address(o) + u64((first + row) * d_bytes), lane)

    return Source(kernel, SIGNATURE, THREADS, 5 * tile)


def register_blocks(
    d: int = 64, row_tiles: int = 1, half_scores: bool = False, turing: bool = False
) -> Source:
    """Rung 7: Q stays in registers.

    A warp owns 16 * row_tiles queries, so each fragment of K and V serves 2 * row_tiles products.

    With `half_scores` Q . K^T is accumulated in float16, two scores per register, and widened
    afterwards. With `turing` (sm_75) tiles are copied through registers: it has no cp.async.
    """
    copy = make_copy(d, "swizzled", not turing)
    load_queries = make_load_queries(d, "swizzled")
    load_keys = make_load_keys(d, "swizzled")
    scores, softmax = make_kept_scores(d, row_tiles, turing), make_softmax(row_tiles)
    outputs = make_outputs(d, "swizzled", row_tiles, turing)
    wait_all = ptx.cp_async_wait[0]
    begin, finish = make_begin(d, row_tiles), make_finish(d, row_tiles, turing)
    tile, k_steps, d_bytes, queries = BLOCK * d * 2, d // 16, d * 2, BLOCK * row_tiles
    n_s = row_tiles * BLOCK // 2
    n_o = row_tiles * d // 2
    n_q = row_tiles * d // 4
    n_rows = 2 * row_tiles
    tile_s = BLOCK // 2
    n_h = n_s // 2
    mma_half = ptx.mma_f16_accumulate

    @device_function
    def scores_in_half(s, qf, sk, lane):
        b, h, x = cuda.local.array(4, u32), cuda.local.array(n_h, u32), cuda.local.array(2, f32)
        for i in range(n_h):
            h[i] = u32(0)
        for step in range(k_steps):
            for n in range(BLOCK // 16):
                load_keys(b, sk, 16 * n, step, lane)
                for r in range(row_tiles):
                    mma_half(h, (r * tile_s + 8 * n) // 2, qf, 4 * (r * k_steps + step), b, 0)
                    mma_half(h, (r * tile_s + 8 * n) // 2 + 2, qf, 4 * (r * k_steps + step), b, 2)
        for i in range(n_h):
            ptx.unpack_half(x, 0, h[i])
            s[2 * i], s[2 * i + 1] = x[0], x[1]

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = i32(cuda.threadIdx.x)
        lane, row, first = t & 31, (t >> 5) * 16 * row_tiles, i32(cuda.blockIdx.x) * queries
        sq = ptx.shared_address(shared)
        sk, sv = sq + u32(row_tiles * tile), sq + u32((row_tiles + 2) * tile)
        gq, gk, gv = ptx.global_address(q), ptx.global_address(k), ptx.global_address(v)
        qf = cuda.local.array(n_q, u32)
        s = cuda.local.array(n_s, f32)
        acc = cuda.local.array(n_o, f32)
        m = cuda.local.array(n_rows, f32)
        l = cuda.local.array(n_rows, f32)
        alpha = cuda.local.array(n_rows, f32)
        begin(acc, m, l)
        for r in range(row_tiles):
            copy(sq + u32(r * tile), gq + u64((first + r * BLOCK) * d_bytes), t)
        copy(sk, gk, t)
        copy(sv, gv, t)
        if not turing:
            ptx.cp_async_commit()
            wait_all()
        cuda.syncthreads()
        for r in range(row_tiles):
            for step in range(k_steps):
                load_queries(qf, 4 * (r * k_steps + step), sq, row + 16 * r, step, lane)
        stage = u32(0)
        for start in range(0, keys, BLOCK):
            if not turing:
                wait_all()
            cuda.syncthreads()
            ahead = stage ^ u32(tile)
            if start + BLOCK < keys:
                copy(sk + ahead, gk + u64((start + BLOCK) * d_bytes), t)
                copy(sv + ahead, gv + u64((start + BLOCK) * d_bytes), t)
            if not turing:
                ptx.cp_async_commit()
            if half_scores:
                scores_in_half(s, qf, sk + stage, lane)
            else:
                scores(s, qf, sk + stage, lane)
            softmax(s, m, l, alpha, scale)
            outputs(acc, s, alpha, sv + stage, lane)
            stage = ahead
        finish(acc, l, ptx.global_address(o) + u64((first + row) * d_bytes), lane)

    return Source(kernel, SIGNATURE, THREADS, (row_tiles + 4) * tile)
