"""Merge the splits of a decode step in their order, and divide by the sum of exponentials.

The reduce step of the T4 architecture (docs/sources.md) is O = sum_i exp(LSE_i - max) O_i. The
division by sum_i exp(LSE_i - max) is missing there; without it the result is several times too
large.
"""

from __future__ import annotations

from ...numerics import fixedpoint as fx
from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .decode_pieces import THREADS, WARPS, divided
from .int8_softmax import power

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32

# pointers: partial outputs, m and l of all tasks; out (B, Hkv, rows, Dv), m and l (B, Hkv, rows);
# float32
# sizes: rows, splits, Dv
SIGNATURE = types.void(types.UniTuple(u64, 6), types.UniTuple(i32, 3))


def decode_combine(dv: int, row_tiles: int, exact: bool) -> Source:
    """The kernel that merges the splits of `decode_int8` or `decode_float`.

    exact : for `decode_int8`, whose factors are powers of two; each operation is rounded once

    One block for 16 rows of a query tile and 32 of its dv padded channels, four values per thread,
    as the tensor cores left them.
    """
    value_tiles, tile_rows = dv // 8 // WARPS, 16 * row_tiles
    one = f32(fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT if exact else 1)

    def combine(pointers, sizes):
        o_part, m_part, l_part, out, m_out, l_out = pointers
        rows, splits, columns = sizes
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        block = i32(cuda.blockIdx.x)
        unit = divided(block, value_tiles * row_tiles)
        block -= unit * (value_tiles * row_tiles)
        t = divided(block, value_tiles)
        n = block - t * value_tiles
        groups = divided(rows + tile_rows - 1, tile_rows)
        head = divided(unit, groups)
        first_row = (unit - head * groups) * tile_rows
        part = cuda.local.array(4, u32)
        sums = cuda.local.array(4, f32)
        top = cuda.local.array(2, f32)
        total = cuda.local.array(2, f32)
        share = cuda.local.array(2, f32)
        state = u64(unit * splits * tile_rows + 16 * t + (lane >> 2)) * u64(4)
        for h in range(2):
            top[h], total[h] = ptx.load_global_f32(m_part + state + u64(32 * h)), f32(-0.0)
        for e in range(4):
            sums[e] = f32(-0.0)  # -0 + x is x, also for x = -0
        for i in range(1, splits):
            for h in range(2):
                top[h] = ptx.fmax(
                    top[h], ptx.load_global_f32(m_part + state + u64(i * tile_rows * 4 + 32 * h))
                )
        for i in range(splits):
            for h in range(2):
                at = state + u64(i * tile_rows * 4 + 32 * h)
                m = ptx.load_global_f32(m_part + at)
                share[h] = power(ptx.to_int(ptx.sub(top[h], m))) if exact else ptx.ex2(m - top[h])
                total[h] = ptx.add(total[h], ptx.mul(ptx.load_global_f32(l_part + at), share[h]))
            place = (((unit * splits + i) * row_tiles + t) * WARPS + warp) * value_tiles + n
            ptx.load_global_v4(part, 0, o_part + u64(place * 32 + lane) * u64(16))
            for e in range(4):
                sums[e] = ptx.add(sums[e], ptx.mul(ptx.from_bits(part[e]), share[e >> 1]))
        for h in range(2):
            r = first_row + 16 * t + (lane >> 2) + 8 * h
            reciprocal = f32(0) if total[h] == f32(0) else ptx.div(one, total[h])
            if r < rows:
                if n == 0 and warp == 0 and lane & 3 == 0:
                    ptx.store_global_f32(m_out + u64(head * rows + r) * u64(4), top[h])
                    ptx.store_global_f32(l_out + u64(head * rows + r) * u64(4), total[h])
                for e in range(2):
                    c = 8 * (warp * value_tiles + n) + 2 * (lane & 3) + e
                    if c < columns:
                        ptx.store_global_f32(
                            out + u64((head * rows + r) * columns + c) * u64(4),
                            ptx.mul(sums[2 * h + e], reciprocal),
                        )

    return Source(combine, SIGNATURE, THREADS)
