"""Rungs 1 and 2 of the ladder.

Attention without tensor cores, for one head of float16 (L, D) arrays, L a multiple of 64.
"""

from __future__ import annotations

from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx

u32, u64, f32, i32 = types.uint32, types.uint64, types.float32, types.int32
HALVES = types.Array(types.float16, 2, "C")
SIGNATURE = types.void(
    HALVES, HALVES, HALVES, HALVES, i32, f32
)  # q, k, v, o, keys, scale * log2(e)
LOWEST = f32(-1e30)


def one_thread_per_row(d: int = 64) -> Source:
    """Rung 1, the smallest kernel that is right.

    Each thread loops over all keys for its own row, straight from global memory.
    """

    def kernel(q, k, v, o, keys, scale):
        row = cuda.grid(1)
        q_row, o_row = cuda.local.array(d, f32), cuda.local.array(d, f32)
        for c in range(d):
            q_row[c] = f32(q[row, c]) * scale
            o_row[c] = f32(0)
        m, l = LOWEST, f32(0)
        for j in range(keys):
            s = f32(0)
            for c in range(d):
                s += q_row[c] * f32(k[j, c])
            top = ptx.fmax(m, s)
            alpha, p = ptx.ex2(m - top), ptx.ex2(s - top)
            l = l * alpha + p
            for c in range(d):
                o_row[c] = o_row[c] * alpha + p * f32(v[j, c])
            m = top
        for c in range(d):
            o[row, c] = types.float16(o_row[c] / l)

    return Source(kernel, SIGNATURE, 64)


def shared_tiles(d: int = 64) -> Source:
    """Rung 2: 64 keys at a time in shared memory, loaded 16 bytes per thread.

    Two threads share a row.

    A key is read from global memory once per block instead of once per thread, and the maximum is
    taken over 16 scores before anything is rescaled. Two barriers per tile are enough.
    """
    block, pairs, step = 64, d // 4, 16  # a thread holds half a row: d / 4 pairs of halves
    half = d // 2
    pieces = block * d * 2 // 16 // 128

    def kernel(q, k, v, o, keys, scale):
        shared = cuda.shared.array(0, u32)
        t = cuda.threadIdx.x
        row, side = cuda.blockIdx.x * block + (t >> 1), t & 1
        sk = ptx.shared_address(shared)
        sv = sk + u32(block * d * 2)
        gk, gv, gq = ptx.global_address(k), ptx.global_address(v), ptx.global_address(q)
        four = cuda.local.array(4, u32)
        x = cuda.local.array(2, f32)
        q_row, o_row = cuda.local.array(half, f32), cuda.local.array(half, f32)
        s = cuda.local.array(step, f32)
        for i in range(half // 8):
            ptx.load_global_v4(four, 0, gq + u64(row * d * 2 + side * d + i * 16))
            for e in range(4):
                ptx.unpack_half(x, 0, four[e])
                q_row[8 * i + 2 * e], q_row[8 * i + 2 * e + 1] = x[0] * scale, x[1] * scale
        for c in range(half):
            o_row[c] = f32(0)
        m, l = LOWEST, f32(0)
        for start in range(0, keys, block):
            cuda.syncthreads()
            for i in range(pieces):
                at = (t + i * 128) * 16
                ptx.load_global_v4(four, 0, gk + u64(start * d * 2 + at))
                ptx.store_shared_v4(sk + u32(at), four, 0)
                ptx.load_global_v4(four, 0, gv + u64(start * d * 2 + at))
                ptx.store_shared_v4(sv + u32(at), four, 0)
            cuda.syncthreads()
            for first in range(0, block, step):
                top = m
                for j in range(step):
                    total = f32(0)
                    for i in range(pairs // 4):
                        ptx.load_shared_v4(
                            four, 0, sk + u32((first + j) * d * 2 + side * d + i * 16)
                        )
                        for e in range(4):
                            ptx.unpack_half(x, 0, four[e])
                            total += q_row[8 * i + 2 * e] * x[0] + q_row[8 * i + 2 * e + 1] * x[1]
                    s[j] = total + ptx.shuffle_xor(total, u32(1))
                    top = ptx.fmax(top, s[j])
                alpha = ptx.ex2(m - top)
                m = top
                l *= alpha
                for c in range(half):
                    o_row[c] *= alpha
                for j in range(step):
                    p = ptx.ex2(s[j] - top)
                    l += p
                    for i in range(pairs // 4):
                        ptx.load_shared_v4(
                            four, 0, sv + u32((first + j) * d * 2 + side * d + i * 16)
                        )
                        for e in range(4):
                            ptx.unpack_half(x, 0, four[e])
                            o_row[8 * i + 2 * e] += p * x[0]
                            o_row[8 * i + 2 * e + 1] += p * x[1]
        inverse = ptx.rcp(l)
        for c in range(half):
            o[row, side * half + c] = types.float16(o_row[c] * inverse)

    return Source(kernel, SIGNATURE, 128, 2 * block * d * 2)
