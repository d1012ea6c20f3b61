"""Products of one warp on tensor cores.

16 rows that it owns against a tile of the other operand in shared memory.

The accumulator of one product is laid out as the left operand of the next, so what `make_scores`
leaves goes into `make_add` without leaving registers. An address in shared memory is (start of this
lane's row, this lane's chunk under the swizzle): the column enters by XOR with an even chunk
number, which leaves the lane's bit alone. The makers are cached: what two operands share is
compiled once.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .tiles import make_read, swizzle_of

i32, u32, f32 = types.int32, types.uint32, types.float32


@functools.cache
def make_scores(
    width: int,
    columns: int,
    dtype: str,
    turing: bool,
    keep: bool,
    own_ahead: int = 0,
    other_ahead: int = 0,
) -> Any:
    """s (16 x columns) = own (16 x width) . other (columns x width)^T, of 16-bit numbers.

    scores(s, own, own_at, own_chunk, other_at, other_chunk): `own` holds all fragments of the
    warp's rows if they are to be kept in registers, else it is room for one. `own_ahead` and
    `other_ahead` are constants that belong to the two addresses.
    """
    steps, pairs, row_bytes = width // 16, columns // 16, width * 2
    (mma, _), read = ptx.products(dtype, turing), make_read(row_bytes)

    @device_function
    def scores(s, own, own_at, own_chunk, other_at, other_chunk):
        b = cuda.local.array(4, u32)
        for i in range(pairs * 8):
            s[i] = f32(0)
        for step in range(steps):
            if not keep:
                read(own, 0, own_at, own_chunk, 2 * step, own_ahead)
            a = 4 * step if keep else 0
            for n in range(pairs):
                read(b, 0, other_at, other_chunk, 2 * step, other_ahead + n * 16 * row_bytes)
                mma(s, 8 * n, own, a, b, 0)
                mma(s, 8 * n + 4, own, a, b, 2)

    return scores


@functools.cache
def make_add(width: int, columns: int, dtype: str, turing: bool, other_ahead: int = 0) -> Any:
    """sums (16 x width) += w (16 x columns, rounded to `dtype`) . other (columns x width).

    add(sums, w, other_at, other_chunk); the other tile is the one that `make_scores` reads, here
    transposed by ldmatrix.trans.
    """
    steps, pairs, row_bytes = columns // 16, width // 16, width * 2
    mma, pack = ptx.products(dtype, turing)
    read = make_read(row_bytes, transposed=True)

    @device_function
    def add(sums, w, other_at, other_chunk):
        a = cuda.local.array(4, u32)
        b = cuda.local.array(4, u32)
        for step in range(steps):
            for i in range(4):
                a[i] = pack(w[8 * step + 2 * i], w[8 * step + 2 * i + 1])
            for n in range(pairs):
                read(b, 0, other_at, other_chunk, 2 * n, other_ahead + step * 16 * row_bytes)
                mma(sums, 8 * n, a, 0, b, 0)
                mma(sums, 8 * n + 4, a, 0, b, 2)

    return add


@functools.cache
def make_stage(width: int, dtype: str, turing: bool) -> Any:
    """stage(sums, at, factor0, factor1, lane).

    16 x width sums, times a factor for rows 0-7 and 8-15, as `dtype` to shared memory.

    A factor of 0 writes 0 whatever the sums hold. The rows are swizzled, as
    `tiles.make_store_rows` reads them.
    """
    tiles, row_bytes = width // 8, width * 2
    shift, xor = swizzle_of(row_bytes)
    pack = ptx.pack_turing if turing else ptx.pack[dtype]

    @device_function
    def stage(sums, at, factor0, factor1, lane):
        row = lane >> 2
        start = at + u32((lane & 3) * 4)
        for n in range(tiles):
            c0 = u32((n ^ ((row >> shift) & xor)) << 4)
            c1 = u32((n ^ (((row + 8) >> shift) & xor)) << 4)
            low = pack(sums[4 * n] * factor0, sums[4 * n + 1] * factor0)
            high = pack(sums[4 * n + 2] * factor1, sums[4 * n + 3] * factor1)
            ptx.store_shared_f32(
                start + u32(row * row_bytes) + c0,
                ptx.from_bits(low if factor0 != f32(0) else u32(0)),
            )
            ptx.store_shared_f32(
                start + u32((row + 8) * row_bytes) + c1,
                ptx.from_bits(high if factor1 != f32(0) else u32(0)),
            )

    return stage
