"""What the backward passes need of a row, made once.

LSE in units of log2, and D = rowsum(dO * O) - dLSE, summed in one order.
"""

from __future__ import annotations

import math

from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .blocks import make_find_block
from .scores import LOG2E
from .softmax import NEG_INF

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
LANES, ROWS = 8, 16  # lanes per row, rows per block
INFINITE, NAN = f32(math.inf), f32(math.nan)

# pointers: dO, O, LSE (B, H, L), statistics (B, H, padded L, 2); with `of_lse` dLSE (B, H, L)
# strides in bytes: batch, head, row of dO and O
# sizes: queries, bytes per row, query heads, padded L
REST = types.UniTuple(i64, 6), types.UniTuple(i32, 4)


def backward_rows(
    dv: int, dtype: str = "float16", folded: bool = False, of_lse: bool = False
) -> Source:
    """The kernel for rows of up to `dv` numbers, a multiple of 8.

    A row that attends to nothing has LSE -inf and gets +inf here, as rows beyond the last: their
    weights 2**(s - LSE) are 0. A row whose output or gradient is not finite gets NaN: it spoils
    what it sees, and nothing else.
    """
    chunks = dv // 8
    turns = -(-chunks // LANES)
    is_half = dtype == "float16"
    find_block = make_find_block(ROWS, folded=folded)

    def rows(pointers, strides, sizes):
        grad, out, lse_at, stats = pointers[:4]
        queries, bytes_left, heads, padded = sizes
        thread = i32(cuda.threadIdx.x)
        first, head, batch = find_block(padded)
        lane, row = thread & (LANES - 1), first + (thread >> 3)
        x, y = cuda.local.array(4, u32), cuda.local.array(4, u32)
        u, w = cuda.local.array(2, f32), cuda.local.array(2, f32)
        total = f32(0)
        for i in range(turns):
            at = (lane + LANES * i) * 16
            if row < queries and at < bytes_left:
                ptx.load_global_v4(
                    x, 0, grad + u64(batch * strides[0] + head * strides[1] + row * strides[2] + at)
                )
                ptx.load_global_v4(
                    y, 0, out + u64(batch * strides[3] + head * strides[4] + row * strides[5] + at)
                )
                for n in range(4):
                    if is_half:
                        ptx.unpack_half(u, 0, x[n])
                        ptx.unpack_half(w, 0, y[n])
                    else:  # a bfloat16 is the upper half of a float32
                        u[0], u[1] = (
                            ptx.from_bits(x[n] << u32(16)),
                            ptx.from_bits(x[n] & u32(0xFFFF0000)),
                        )
                        w[0], w[1] = (
                            ptx.from_bits(y[n] << u32(16)),
                            ptx.from_bits(y[n] & u32(0xFFFF0000)),
                        )
                    total = ptx.fma(u[1], w[1], ptx.fma(u[0], w[0], total))
        for n in range(3):
            total += ptx.shuffle_xor(total, u32(1 << n))
        if lane == 0 and row < padded:
            lse = INFINITE
            if row < queries:
                place = u64(((batch * heads + head) * queries + row) * 4)
                lse = ptx.load_global_f32(lse_at + place) * LOG2E
                if of_lse:
                    total -= ptx.load_global_f32(pointers[4] + place)
                if lse == NEG_INF:
                    lse = INFINITE
                if total - total != f32(0):
                    lse = NAN
            pair = cuda.local.array(2, u32)
            pair[0], pair[1] = ptx.bits(lse), ptx.bits(total)
            ptx.store_global_v2(stats + u64(((batch * heads + head) * padded + row) * 8), pair, 0)

    pointers = types.UniTuple(u64, 5 if of_lse else 4)
    return Source(rows, types.void(pointers, *REST), LANES * ROWS)
