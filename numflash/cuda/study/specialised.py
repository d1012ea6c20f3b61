"""Rung 7s of the ladder: specialised warps without Hopper's instructions, as the L4 analysis
(docs/sources.md) describes them.

A block has eight warps. Four compute, on 16 queries each, with Q in registers as in rung 7a. One
brings tiles of Q by cp.async, one K, one V, and one stores results. They meet at named barriers
(PTX 9.7.13.1): a buffer has one for "full" and one for "empty", and whoever only says so arrives
without waiting. A block takes one tile of 64 queries after another, so the next tile's operands come
and the last one's results go while this one is computed.

Heads of float16, any number of queries, one key at least, causal or not, grouped heads.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..device.operands import LOG2E, Launch
from ..instructions import ptx
from ..kernels.softmax import quad_sum
from .pieces import (
    BLOCK,
    layout_of,
    make_begin,
    make_kept_scores,
    make_load_queries,
    make_outputs,
    make_softmax,
)
from .scalar import LOWEST

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
HEADS = types.Array(types.float16, 3, "C")
# q, k, v, o (heads, L, D); scale * log2(e)
SIGNATURE = types.void(HEADS, HEADS, HEADS, HEADS, f32)
# compute warps; who brings tiles of what; the last warp stores
COMPUTE, QUERIES, KEYS, VALUES, WARPS = 4, 4, 5, 6, 8
MEET = u32((COMPUTE + 1) * 32)  # threads at a barrier: the compute warps and one other
# numbers of the named barriers; tiles of K and V have two buffers, so two of each
Q_FULL, Q_EMPTY, K_FULL, K_EMPTY = u32(1), u32(2), u32(3), u32(5)
V_FULL, V_EMPTY, O_FULL, O_EMPTY = u32(7), u32(9), u32(11), u32(12)


def make_bring(d: int) -> Any:
    """bring(to, source, rows, lane): a warp copies BLOCK swizzled rows and waits for them.

    What is beyond `rows` becomes 0. The wait holds up nobody else.
    """
    row_bytes, xor = layout_of(d, "swizzled")
    chunks = d // 8
    landed = ptx.cp_async_wait[0]

    @device_function
    def bring(to, source, rows, lane):
        for i in range(BLOCK * chunks // 32):
            piece = lane + 32 * i
            row, chunk = piece // chunks, piece % chunks
            place = to + u32(row * row_bytes + ((chunk ^ (row & xor)) << 4))
            there = row < rows
            source_of = source + u64(piece * 16 if there else 0)
            ptx.cp_async_zfill(place, 0, source_of, u32(16 if there else 0))
        ptx.cp_async_commit()
        landed()

    return bring


def make_put(d: int) -> Any:
    """put(so, o, l, row, lane): a warp's rows of the result, divided, into the buffer of results."""
    row_bytes, xor = layout_of(d, "swizzled")
    pack = ptx.pack["float16"]

    @device_function
    def put(so, o, l, row, lane):
        for r in range(2):
            share = ptx.rcp(quad_sum(l[r]))
            here = row + 8 * r + (lane >> 2)
            for n in range(d // 8):
                word = pack(o[4 * n + 2 * r] * share, o[4 * n + 2 * r + 1] * share)
                place = here * row_bytes + ((n ^ (here & xor)) << 4) + (lane & 3) * 4
                ptx.store_shared(so + u32(place), word)

    return put


def make_store(d: int) -> Any:
    """store(to, so, rows, lane): a warp writes the buffer of results, 16 bytes per lane and turn."""
    row_bytes, xor = layout_of(d, "swizzled")
    chunks = d // 8

    @device_function
    def store(to, so, rows, lane):
        four = cuda.local.array(4, u32)
        for i in range(BLOCK * chunks // 32):
            piece = lane + 32 * i
            row, chunk = piece // chunks, piece % chunks
            if row < rows:
                place = so + u32(row * row_bytes + ((chunk ^ (row & xor)) << 4))
                ptx.load_shared_v4(four, 0, place)
                ptx.store_global_v4(to + u64(piece * 16), four, 0)

    return store


def make_hide(causal: bool) -> Any:
    """hide(s, start, first, keys, lane): scores of keys from `start` on that the rows do not see."""

    @device_function
    def hide(s, start, first, keys, lane):
        for r in range(2):
            end = keys
            if causal:
                end = min(keys, first + 8 * r + (lane >> 2) + 1)
            for i in range(BLOCK // 4):
                column = start + 8 * (i >> 1) + 2 * (lane & 3) + (i & 1)
                if column >= end:
                    s[4 * (i >> 1) + 2 * r + (i & 1)] = LOWEST

    return hide


def make_seen(causal: bool) -> Any:
    """seen(first, keys): how many keys the tile of queries from `first` on may see."""

    @device_function
    def seen(first, keys):
        return min(keys, first + BLOCK) if causal else keys

    return seen


def make_compute(d: int, causal: bool, tails: bool) -> Any:
    """compute(sq, keys, rows, scale, warp, lane): what a compute warp does, for all its tiles."""
    hides = causal or tails
    load_queries = make_load_queries(d, "swizzled")
    scores, softmax, outputs = make_kept_scores(d), make_softmax(), make_outputs(d, "swizzled")
    begin, put, hide, seen = make_begin(d), make_put(d), make_hide(causal), make_seen(causal)
    tile, steps = u32(BLOCK * d * 2), d // 16
    n_q, n_s, n_o = d // 4, BLOCK // 2, d // 2

    @device_function
    def compute(sq, keys, rows, scale, warp, lane):
        sk, sv, so = sq + tile, sq + u32(3) * tile, sq + u32(5) * tile
        qf, s = cuda.local.array(n_q, u32), cuda.local.array(n_s, f32)
        o = cuda.local.array(n_o, f32)
        m, l, alpha = cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
        row, stage = warp * 16, u32(0)
        ptx.barrier_arrive(Q_EMPTY, MEET)
        for n in range(2):
            ptx.barrier_arrive(K_EMPTY + u32(n), MEET)
            ptx.barrier_arrive(V_EMPTY + u32(n), MEET)
        for first in range(cuda.blockIdx.x * BLOCK, rows, cuda.gridDim.x * BLOCK):
            begin(o, m, l)
            ptx.barrier(Q_FULL, MEET)
            for step in range(steps):
                load_queries(qf, 4 * step, sq, row, step, lane)
            ptx.barrier_arrive(Q_EMPTY, MEET)
            for start in range(0, seen(first, keys), BLOCK):
                ptx.barrier(K_FULL + stage, MEET)
                scores(s, qf, sk + stage * tile, lane)
                ptx.barrier_arrive(K_EMPTY + stage, MEET)
                if hides and start + BLOCK > (min(keys, first + row) if causal else keys):
                    hide(s, start, first + row, keys, lane)
                softmax(s, m, l, alpha, scale)
                ptx.barrier(V_FULL + stage, MEET)
                outputs(o, s, alpha, sv + stage * tile, lane)
                ptx.barrier_arrive(V_EMPTY + stage, MEET)
                stage ^= u32(1)
            ptx.barrier(O_EMPTY, MEET)
            put(so, o, l, row, lane)
            ptx.barrier_arrive(O_FULL, MEET)

    return compute


def make_bring_tiles(d: int, causal: bool, full: Any, empty: Any) -> Any:
    """bring_tiles(to, source, keys, rows, lane): what the warp of K or of V does."""
    bring, seen, tile, row_bytes = make_bring(d), make_seen(causal), u32(BLOCK * d * 2), d * 2

    @device_function
    def bring_tiles(to, source, keys, rows, lane):
        stage = u32(0)
        for first in range(cuda.blockIdx.x * BLOCK, rows, cuda.gridDim.x * BLOCK):
            for start in range(0, seen(first, keys), BLOCK):
                ptx.barrier(empty + stage, MEET)
                bring(to + stage * tile, source + u64(start * row_bytes), keys - start, lane)
                ptx.barrier_arrive(full + stage, MEET)
                stage ^= u32(1)
        for n in range(2):
            ptx.barrier(empty + u32(n), MEET)  # whoever arrives at a barrier is met there

    return bring_tiles


def specialised(d: int = 64, causal: bool = False, tails: bool = False) -> Source:
    """Rung 7s: warps that bring, compute and store, each in code of its own.

    Without `tails` the number of keys is a multiple of 64, as on the other rungs.
    """
    bring, store, compute = make_bring(d), make_store(d), make_compute(d, causal, tails)
    bring_keys = make_bring_tiles(d, causal, K_FULL, K_EMPTY)
    bring_values = make_bring_tiles(d, causal, V_FULL, V_EMPTY)
    tile, row_bytes = u32(BLOCK * d * 2), d * 2

    def kernel(q, k, v, o, scale):
        shared = cuda.shared.array(0, u32)
        t = i32(cuda.threadIdx.x)
        lane, warp, head = t & 31, ptx.uniform(t >> 5), i32(cuda.blockIdx.y)
        rows, keys = i32(q.shape[1]), i32(k.shape[1])
        sq = ptx.shared_address(shared)  # one tile of Q, two of K, two of V, one of results
        own = u64(head) * u64(rows * row_bytes)
        others = u64(head // i32(q.shape[0] // k.shape[0])) * u64(keys * row_bytes)
        gq, go = ptx.global_address(q) + own, ptx.global_address(o) + own
        if warp < COMPUTE:
            compute(sq, keys, rows, scale, warp, lane)
        elif warp == QUERIES:
            for first in range(cuda.blockIdx.x * BLOCK, rows, cuda.gridDim.x * BLOCK):
                ptx.barrier(Q_EMPTY, MEET)
                bring(sq, gq + u64(first * row_bytes), rows - first, lane)
                ptx.barrier_arrive(Q_FULL, MEET)
            ptx.barrier(Q_EMPTY, MEET)
        elif warp == KEYS:
            bring_keys(sq + tile, ptx.global_address(k) + others, keys, rows, lane)
        elif warp == VALUES:
            bring_values(sq + u32(3) * tile, ptx.global_address(v) + others, keys, rows, lane)
        else:
            for first in range(cuda.blockIdx.x * BLOCK, rows, cuda.gridDim.x * BLOCK):
                ptx.barrier_arrive(O_EMPTY, MEET)
                ptx.barrier(O_FULL, MEET)
                store(go + u64(first * row_bytes), sq + u32(5) * tile, rows - first, lane)

    return Source(kernel, SIGNATURE, WARPS * 32, 6 * BLOCK * d * 2)


def launch(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    *,
    causal: bool = False,
    blocks: int | None = None,
    arch: str = "sm_89",
) -> Launch:
    """The launch of rung 7s.

    Parameters
    ----------
    query : (H, L, D) float16, D a multiple of 16
    key, value : (H / group, S, D) float16, S at least 1
    causal : query i sees keys 0 to i
    blocks : blocks per head that share its tiles of 64 queries; None: one for each tile
    """
    heads, length, d = query.shape
    out = np.zeros_like(query)
    grid = (blocks or -(-length // BLOCK), heads, 1)
    args = (query, key, value, out, np.float32(LOG2E / np.sqrt(d)))
    constants = {"d": d, "causal": causal, "tails": key.shape[1] % BLOCK != 0}
    return Launch(specialised, constants, arch, grid, args, lambda: (out, np.zeros(0)))
