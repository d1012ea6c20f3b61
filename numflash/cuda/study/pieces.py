"""What rungs 3 to 7 are put together from.

Tiles of 64 rows in shared memory, and the work of one warp on its 16 rows.

A lane's share of an m16n8 accumulator is two neighbouring columns of row lane / 4 and the same two
of the row 8 below. Scores, weights and outputs are such accumulators, 8 columns after 8 columns, so
index 8 * n + 4 * tile + 2 * r + e of a fragment is row r (0 or 1), column 16 * n + 8 * tile + 2 *
(lane % 4) + e. Tables: PTX 9.7.14.5.8.
"""

from __future__ import annotations

from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from ..kernels.softmax import quad_max, quad_sum
from .scalar import LOWEST

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
BLOCK, THREADS = 64, 128  # keys and queries per tile; four warps


def layout_of(d: int, layout: str) -> tuple[int, int]:
    """(bytes per row, XOR mask): "naive" rows as stored, "padded" by 16 bytes, "swizzled".

    Chunk c of row r at c ^ (r % 8).
    """
    return d * 2 + (16 if layout == "padded" else 0), 7 if layout == "swizzled" else 0


def make_copy(d: int, layout: str = "naive", asynchronous: bool = False) -> Any:
    """copy(to, source, thread).

    BLOCK rows of d halves from global to shared memory, 16 bytes per thread and turn.
    """
    row_bytes, xor = layout_of(d, layout)
    chunks = d // 8
    turns = BLOCK * chunks // THREADS

    @device_function
    def copy(to, source, thread):
        four = cuda.local.array(4, u32)
        for i in range(turns):
            piece = thread + i * THREADS
            row, chunk = piece // chunks, piece % chunks
            place = to + u32(row * row_bytes + ((chunk ^ (row & xor)) << 4))
            if asynchronous:
                ptx.cp_async(place, source + u64(piece * 16))
            else:
                ptx.load_global_v4(four, 0, source + u64(piece * 16))
                ptx.store_shared_v4(place, four, 0)

    return copy


def make_load_queries(d: int, layout: str) -> Any:
    """load_queries(a, at, tile, row, step, lane).

    The A fragment of 16 queries from `row` on, 16 channels from 16 * step on.
    """
    row_bytes, xor = layout_of(d, layout)

    @device_function
    def load_queries(a, at, tile, row, step, lane):
        r = row + (lane & 15)
        ptx.ldmatrix(
            a, at, tile + u32(r * row_bytes + (((2 * step + (lane >> 4)) ^ (r & xor)) << 4))
        )

    return load_queries


def make_load_keys(d: int, layout: str) -> Any:
    """load_keys(b, tile, row, step, lane).

    Two B fragments, keys row to row + 7 and row + 8 to row + 15, the same 16 channels.
    """
    row_bytes, xor = layout_of(d, layout)

    @device_function
    def load_keys(b, tile, row, step, lane):
        r = row + ((lane >> 4) << 3) + (lane & 7)
        ptx.ldmatrix(
            b, 0, tile + u32(r * row_bytes + (((2 * step + ((lane >> 3) & 1)) ^ (r & xor)) << 4))
        )

    return load_keys


def make_load_values(d: int, layout: str) -> Any:
    """load_values(b, tile, row, n, lane).

    Two B fragments, 16 keys from `row` on, channels 16 * n to 16 * n + 15, transposed.
    """
    row_bytes, xor = layout_of(d, layout)

    @device_function
    def load_values(b, tile, row, n, lane):
        r = row + (lane & 15)
        ptx.ldmatrix_trans(
            b, 0, tile + u32(r * row_bytes + (((2 * n + (lane >> 4)) ^ (r & xor)) << 4))
        )

    return load_values


def make_scores(d: int, layout: str, turing: bool = False) -> Any:
    """scores(s, sq, sk, row, lane): S = Q . K^T, 16 queries from `row` on against 64 keys.

    Both from shared memory each time.
    """
    load_queries, load_keys = make_load_queries(d, layout), make_load_keys(d, layout)
    n_s, k_steps, (mma, _) = BLOCK // 2, d // 16, ptx.products("float16", turing)

    @device_function
    def scores(s, sq, sk, row, lane):
        a, b = cuda.local.array(4, u32), cuda.local.array(4, u32)
        for i in range(n_s):
            s[i] = f32(0)
        for n in range(BLOCK // 16):
            for step in range(k_steps):
                load_queries(a, 0, sq, row, step, lane)
                load_keys(b, sk, 16 * n, step, lane)
                mma(s, 8 * n, a, 0, b, 0)
                mma(s, 8 * n + 4, a, 0, b, 2)

    return scores


def make_kept_scores(d: int, row_tiles: int = 1, turing: bool = False) -> Any:
    """scores(s, qf, sk, lane): S = Q . K^T with Q's fragments in registers, 64 swizzled keys.

    Each fragment of K serves 2 * row_tiles products.
    """
    load_keys, (mma, _) = make_load_keys(d, "swizzled"), ptx.products("float16", turing)
    tile_s, k_steps = BLOCK // 2, d // 16

    @device_function
    def scores(s, qf, sk, lane):
        b = cuda.local.array(4, u32)
        for i in range(row_tiles * tile_s):
            s[i] = f32(0)
        for step in range(k_steps):
            for n in range(BLOCK // 16):
                load_keys(b, sk, 16 * n, step, lane)
                for r in range(row_tiles):
                    mma(s, r * tile_s + 8 * n, qf, 4 * (r * k_steps + step), b, 0)
                    mma(s, r * tile_s + 8 * n + 4, qf, 4 * (r * k_steps + step), b, 2)

    return scores


def make_softmax(row_tiles: int = 1) -> Any:
    """softmax(s, m, l, alpha, scale): scores become weights.

    Arrays m, l and alpha hold one value for each of a lane's rows.
    """
    key_tiles = BLOCK // 8

    @device_function
    def softmax(s, m, l, alpha, scale):
        for tile in range(row_tiles):
            for r in range(2):
                i, first = 2 * tile + r, tile * key_tiles * 4 + 2 * r
                top = m[i]
                for n in range(key_tiles):
                    top = ptx.fmax(top, ptx.fmax(s[first + 4 * n], s[first + 4 * n + 1]))
                top = quad_max(top)
                alpha[i] = ptx.ex2((m[i] - top) * scale)
                m[i] = top
                total = l[i] * alpha[i]
                for n in range(key_tiles):
                    s[first + 4 * n] = ptx.ex2(ptx.fma(s[first + 4 * n], scale, -(top * scale)))
                    s[first + 4 * n + 1] = ptx.ex2(
                        ptx.fma(s[first + 4 * n + 1], scale, -(top * scale))
                    )
                    total += s[first + 4 * n] + s[first + 4 * n + 1]
                l[i] = total

    return softmax


def make_outputs(d: int, layout: str, row_tiles: int = 1, turing: bool = False) -> Any:
    """outputs(o, s, alpha, sv, lane): O = alpha * O + P . V.

    Two accumulator tiles of P, packed, are one A operand.
    """
    load_values, (mma, pack) = make_load_values(d, layout), ptx.products("float16", turing)
    n_s, n_o, n_a = BLOCK // 2, d // 2, 4 * row_tiles

    @device_function
    def outputs(o, s, alpha, sv, lane):
        a, b = cuda.local.array(n_a, u32), cuda.local.array(4, u32)
        for tile in range(row_tiles):
            for i in range(n_o):
                o[tile * n_o + i] *= alpha[2 * tile + ((i >> 1) & 1)]
        for step in range(BLOCK // 16):
            for tile in range(row_tiles):
                for e in range(4):
                    at = tile * n_s + 8 * step + 2 * e
                    a[4 * tile + e] = pack(s[at], s[at + 1])
            for n in range(d // 16):
                load_values(b, sv, 16 * step, n, lane)
                for tile in range(row_tiles):
                    mma(o, tile * n_o + 8 * n, a, 4 * tile, b, 0)
                    mma(o, tile * n_o + 8 * n + 4, a, 4 * tile, b, 2)

    return outputs


def make_begin(d: int, row_tiles: int = 1) -> Any:
    """begin(o, m, l): nothing seen yet."""

    @device_function
    def begin(o, m, l):
        for i in range(row_tiles * d // 2):
            o[i] = f32(0)
        for i in range(2 * row_tiles):
            m[i], l[i] = LOWEST, f32(0)

    return begin


def make_finish(d: int, row_tiles: int = 1, turing: bool = False) -> Any:
    """finish(o, l, to, lane): one division per row, and the warp's rows to global memory."""
    n_o, (_, pack) = d // 2, ptx.products("float16", turing)

    @device_function
    def finish(o, l, to, lane):
        for tile in range(row_tiles):
            for r in range(2):
                share = ptx.rcp(quad_sum(l[2 * tile + r]))
                at = to + u64((16 * tile + 8 * r + (lane >> 2)) * d * 2 + (lane & 3) * 4)
                for n in range(d // 8):
                    i = tile * n_o + 4 * n + 2 * r
                    ptx.store_global(at + u64(16 * n), pack(o[i] * share, o[i + 1] * share))

    return finish
