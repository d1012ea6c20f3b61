"""Merge the splits of a decode step in their order, and divide by the sum of exponentials.

The reduce step of the T4 architecture (docs/sources.md) is O = sum_i exp(LSE_i - max) O_i. The
division by sum_i exp(LSE_i - max) is missing there; without it the result is several times too
large.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...numerics import fixedpoint as fx
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import THREADS, WARPS, divided
from .decode_rotate import LANES, make_turn_row
from .int8_softmax import power
from .softmax import warp_max

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
AHEAD = 16  # partial outputs that are on their way together
SHARED = 4 * (2 * THREADS + WARPS)

# pointers: partial outputs, m and l of all tasks; out (B, Hkv, rows, Dv), m and l (B, Hkv, rows);
# float32
# sizes: rows, splits, Dv
SIGNATURE = types.void(types.UniTuple(u64, 6), types.UniTuple(i32, 3))


class Splits(NamedTuple):
    """The splits of a row: global addresses of their results, and where the row is among them."""

    o: Any
    m: Any
    l: Any
    first: Any  # the row's number in the first split; in the next ones it is a tile farther each
    count: Any


class Shared(NamedTuple):
    """Addresses in shared memory."""

    shares: Any  # of as many splits as there are threads, what their outputs are multiplied by
    ls: Any  # their sums, multiplied by it
    warps: Any  # a float32 of each warp
    line: Any  # the row, where it is turned


@device_function
def block_max(x, at, thread):
    """The largest of all threads; `at` has a float32 for each warp."""
    x = warp_max(x)
    if thread & 31 == 0:
        ptx.store_shared_f32(at + u32(4 * (thread >> 5)), x)
    cuda.syncthreads()
    for w in range(WARPS):
        x = ptx.fmax(x, ptx.load_shared_f32(at + u32(4 * w)))
    return x


def decode_combine(dv: int, tile_rows: int, exact: bool, turned: int = 0) -> Source:
    """The kernel that merges the splits of `decode_int8` or `decode_float`: partial outputs (task,
    tile_rows, dv), m and l (task, tile_rows).

    exact : for `decode_int8`, whose factors are powers of two; each operation is rounded once
    turned : of a cache that rotates the channels of a row, which its first warp turns back

    One block for a row. Its threads have a split each while they make the splits' shares, then a
    channel each, or two.
    """
    per_thread = (dv + THREADS - 1) // THREADS
    one = f32(fx.SUM_ONE / fx.W_ONE / fx.VALUE_UNIT if exact else 1)
    turn_row, turns = make_turn_row(turned or LANES)

    @device_function
    def find_splits(pointers, sizes, row):
        """Where the splits of a row are: tasks are those of a tile of rows, then of the next tile."""
        rows, splits, _ = sizes
        head = divided(row, rows)
        inside = row - head * rows
        tiles = divided(rows + tile_rows - 1, tile_rows)
        tile = divided(inside, tile_rows)
        first = (head * tiles + tile) * splits * tile_rows + inside - tile * tile_rows
        return Splits(pointers[0], pointers[1], pointers[2], first, splits)

    @device_function
    def find_top(splits, shared, thread):
        """The largest maximum of all splits."""
        first, m = splits.first, splits.m
        top = ptx.load_global_f32(m + u64(first) * u64(4))
        for i in range(thread, splits.count, THREADS):
            top = ptx.fmax(top, ptx.load_global_f32(m + u64(first + i * tile_rows) * u64(4)))
        return block_max(top, shared.warps, thread)

    @device_function
    def share_splits(splits, start, top, shared, thread):
        """exp(m - top) of the splits from `start` on, one of each thread, and their sums times these."""
        if start + thread < splits.count:
            at = u64(splits.first + (start + thread) * tile_rows) * u64(4)
            m = ptx.load_global_f32(splits.m + at)
            share = power(ptx.to_int(ptx.sub(top, m))) if exact else ptx.ex2(m - top)
            l = ptx.mul(ptx.load_global_f32(splits.l + at), share)
            ptx.store_shared_f32(shared.shares + u32(4 * thread), share)
            ptx.store_shared_f32(shared.ls + u32(4 * thread), l)

    @device_function
    def add_outputs(sums, splits, start, stop, shared, thread):
        """The outputs of `stop` splits from `start` on times their shares, in order, to the sums."""
        part = cuda.local.array(AHEAD, f32)
        for t in range(per_thread):
            c = min(thread + t * THREADS, dv - 1)
            for i in range(0, stop, AHEAD):
                for n in range(AHEAD):
                    task = splits.first + (start + min(i + n, stop - 1)) * tile_rows
                    at = splits.o + (u64(task) * u64(dv) + u64(c)) * u64(4)
                    part[n] = ptx.load_global_f32(at)
                for n in range(AHEAD):
                    if i + n < stop:
                        share = ptx.load_shared_f32(shared.shares + u32(4 * (i + n)))
                        sums[t] = ptx.add(sums[t], ptx.mul(part[n], share))

    @device_function
    def write(to, sums, total, columns, shared, thread):
        """The sums divided by `total`: to memory, or where the row is turned to shared memory."""
        reciprocal = f32(0) if total == f32(0) else ptx.div(one, total)
        for t in range(per_thread):
            c = thread + t * THREADS
            if c < columns:
                x = ptx.mul(sums[t], reciprocal)
                if turned:
                    ptx.store_shared_f32(shared.line + u32(4 * c), x)
                else:
                    ptx.store_global_f32(to + u64(c * 4), x)

    @device_function
    def turn(to, shared, thread):
        """The row in shared memory turned back, by the first warp, to memory."""
        cuda.syncthreads()
        if thread < LANES:
            channels = cuda.local.array(turns, f32)
            for t in range(turns):
                c = thread + LANES * t
                channels[t] = f32(0)
                if c < turned:
                    channels[t] = ptx.load_shared_f32(shared.line + u32(4 * c))
            turn_row(channels, thread)
            for t in range(turns):
                c = thread + LANES * t
                if c < turned:
                    ptx.store_global_f32(to + u64(c * 4), channels[t])

    def combine(pointers, sizes):
        out, m_out, l_out = pointers[3:]
        columns, thread, row = sizes[2], i32(cuda.threadIdx.x), i32(cuda.blockIdx.x)
        base = ptx.shared_address(cuda.shared.array(0, u32))
        warps = base + u32(8 * THREADS)
        shared = Shared(base, base + u32(4 * THREADS), warps, warps + u32(4 * WARPS))
        splits = find_splits(pointers, sizes, row)
        sums = cuda.local.array(per_thread, f32)
        top = find_top(splits, shared, thread)
        total = f32(-0.0)  # -0 + x is x, also for x = -0
        for t in range(per_thread):
            sums[t] = f32(-0.0)
        for start in range(0, splits.count, THREADS):
            if start > 0:
                cuda.syncthreads()
            share_splits(splits, start, top, shared, thread)
            cuda.syncthreads()
            stop = min(splits.count - start, THREADS)
            for i in range(stop):
                total = ptx.add(total, ptx.load_shared_f32(shared.ls + u32(4 * i)))
            add_outputs(sums, splits, start, stop, shared, thread)
        if thread == 0:
            ptx.store_global_f32(m_out + u64(row) * u64(4), top)
            ptx.store_global_f32(l_out + u64(row) * u64(4), total)
        to = out + u64(row) * u64(columns) * u64(4)
        write(to, sums, total, columns, shared, thread)
        if turned:
            turn(to, shared, thread)

    return Source(combine, SIGNATURE, THREADS, SHARED + (4 * dv if turned else 0))
