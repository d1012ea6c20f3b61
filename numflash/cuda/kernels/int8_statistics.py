"""Sums of K's channels and largest magnitudes of V's, for quantising both.

A chunk of `CHUNK` keys of one head is a block's, one channel a thread's. Each chunk's sum is added
key by key in float32, as on the CPU: the chain of additions is the kernel's longest, so a thread's
loads are many and ahead of it. All rows are added as they come; where one turns out not to be
finite, the block begins again and leaves such rows out.
"""

from __future__ import annotations

import functools
from typing import Any

from ...numerics.quantize_kernels import CHUNK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import make_find_block
from .decode_pieces import warp_max_i32
from .int8_four_rows import MAGNITUDE, is_finite, make_as_float, make_load

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
TOGETHER = 32  # rows whose loads are under way together
FEW = 8  # of the last ones, and where some are not finite

# pointers: k, v, lengths, sums (B, Hkv, chunks, D) float32, peaks (B, Hkv, chunks, Dv) int32
# strides in bytes: batch, head, row, channel of k, then of v
# sizes: KV heads, keys, D, Dv
SIGNATURE = types.void(types.UniTuple(u64, 5), types.UniTuple(i64, 8), types.UniTuple(i32, 4))


@device_function
def magnitude(x):
    """Bits of |x|: ordered like the floats, NaN and infinity above all others."""
    return i32(ptx.bits(x) & u32(MAGNITUDE))


@functools.cache
def make_add_rows(source: str, together: int, whole: bool, careful: bool = False) -> Any:
    """add_rows(total, peak, mine, row_step, rows, tops): rows of a thread's own channel.

    total, peak : the sum and the largest magnitude so far, local arrays of one
    mine : address of the first row's element;  rows : how many there are, of `together` that are
        loaded before the first is added; where it is `whole`, as many
    tops : where the rows' largest magnitudes are in shared memory, read if `careful`: rows that are
        not finite are left out
    """
    load, as_float = make_load(source), make_as_float(source)

    @device_function
    def add_rows(total, peak, mine, row_step, rows, tops):
        raw = cuda.local.array(together, u32)
        for r in range(together):
            row = i32(r) if whole else i32(min(i32(r), i32(rows - 1)))
            raw[r] = u32(load(mine + u64(i64(row) * row_step)))
        for r in range(together):
            kept = True if whole else r < rows
            if careful:
                kept &= is_finite(ptx.load_shared_s32(tops + u32(4 * r)))
            if kept:
                x = as_float(raw[r])
                total[0] = ptx.add(total[0], x)
                peak[0] = ptx.imax(peak[0], magnitude(x))

    return add_rows


@functools.cache
def make_find_tops(turns: int, warps: int, source: str) -> Any:
    """find_tops(tops, at, steps, channels, rows, lane, warp): largest magnitudes of rows, as bits."""
    load, as_float = make_load(source), make_as_float(source)

    @device_function
    def find_tops(tops, at, steps, channels, rows, lane, warp):
        row_step, step = steps
        r = warp
        while r < rows:
            top = i32(0)
            for t in range(turns):
                c = i32(lane + 32 * t)
                if c < channels:
                    element = at + u64(i64(r) * row_step + i64(c) * step)
                    top = ptx.imax(top, magnitude(as_float(u32(load(element)))))
            top = warp_max_i32(top)
            if lane == 0:
                ptx.store_shared(tops + u32(4 * r), u32(top))
            r = i32(r + warps)

    return find_tops


@functools.cache
def make_all_finite(warps: int) -> Any:
    """all_finite(peak, words, lane, warp): whether every thread's peak is; a word for each warp."""

    @device_function
    def all_finite(peak, words, lane, warp):
        good = ptx.vote_all(i32(is_finite(peak)))
        if lane == 0:
            ptx.store_shared(words + u32(4 * warp), u32(good))
        cuda.syncthreads()
        for n in range(warps):
            good &= ptx.load_shared_s32(words + u32(4 * n))
        return good != 0

    return all_finite


@functools.cache
def make_sum_and_peak(width: int, source: str) -> Any:
    """sum_and_peak(at, steps, channels, rows, memory, thread) -> (sum, peak).

    Of a thread's own channel over the finite ones of the rows at `at`. The sum is added row by row;
    the largest magnitude is as bits. `memory` is shared.
    """
    turns, warps = width // 32, width // 32
    add_many, add_few = make_add_rows(source, TOGETHER, True), make_add_rows(source, FEW, False)
    add_finite = make_add_rows(source, FEW, False, True)
    find_tops, all_finite = make_find_tops(turns, warps, source), make_all_finite(warps)

    @device_function
    def sum_and_peak(at, steps, channels, rows, memory, thread):
        row_step, step = steps
        lane, warp = i32(thread & 31), i32(thread >> 5)
        total, peak = cuda.local.array(1, f32), cuda.local.array(1, i32)
        mine = at + u64(i64(thread) * step)
        total[0], peak[0], n = f32(0), i32(0), i32(0)
        if thread < channels:
            while n + TOGETHER <= rows:
                first = mine + u64(i64(n) * row_step)
                add_many(total, peak, first, row_step, i32(TOGETHER), memory)
                n = i32(n + TOGETHER)
            while n < rows:
                first = mine + u64(i64(n) * row_step)
                add_few(total, peak, first, row_step, i32(rows - n), memory)
                n = i32(n + FEW)
        if not all_finite(peak[0], memory + u32(4 * FEW), lane, warp):
            total[0], peak[0], n = f32(0), i32(0), i32(0)
            while n < rows:
                left = i32(min(rows - n, FEW))
                ahead = u64(i64(n) * row_step)
                find_tops(memory, at + ahead, steps, channels, left, lane, warp)
                cuda.syncthreads()
                if thread < channels:
                    add_finite(total, peak, mine + ahead, row_step, left, memory)
                cuda.syncthreads()
                n = i32(n + FEW)
        return total[0], peak[0]

    return sum_and_peak


def int8_statistics(d: int, dv: int, source: str, folded: bool = False) -> Source:
    """Sums of K's channels and peaks of V's, of the finite rows of a chunk of keys.

    Padded head sizes; `source` is the dtype of K and V. Blocks: chunks, KV heads of V and then,
    where K is smoothed, of K, batches.
    """
    width = max(d, dv)
    sum_and_peak = make_sum_and_peak(width, source)
    find_block = make_find_block(CHUNK, folded=folded)

    def statistics(pointers, strides, sizes):
        k, v, lengths, sums, peaks = pointers
        kv_heads, keys, channels, columns = sizes
        shared = cuda.shared.array(0, u32)
        memory = ptx.shared_address(shared)
        thread = i32(cuda.threadIdx.x)
        all_keys = i32(max(1, keys))  # there is a chunk even without keys
        first, head, batch = find_block(all_keys)
        chunk, chunks = i32(first // CHUNK), i64((all_keys + CHUNK - 1) // CHUNK)
        length = ptx.load_global_s32(lengths + u64(batch * 4))
        rows = i32(min(CHUNK, length - first))
        if head < kv_heads:
            v += u64(i64(batch) * strides[4] + i64(head) * strides[5] + i64(first) * strides[6])
            steps = strides[6], strides[7]
            _, peak = sum_and_peak(v, steps, columns, rows, memory, thread)
            number = i64(i32(batch * kv_heads + head)) * chunks + i64(chunk)
            if thread < columns:
                to = peaks + u64((number * i64(columns) + i64(thread)) * 4)
                ptx.store_global(to, u32(peak))
        else:
            head = i32(head - kv_heads)
            k += u64(i64(batch) * strides[0] + i64(head) * strides[1] + i64(first) * strides[2])
            steps = strides[2], strides[3]
            total, _ = sum_and_peak(k, steps, channels, rows, memory, thread)
            number = i64(i32(batch * kv_heads + head)) * chunks + i64(chunk)
            if thread < channels:
                to = sums + u64((number * i64(channels) + i64(thread)) * 4)
                ptx.store_global_f32(to, total)

    return Source(statistics, SIGNATURE, width, 4 * FEW + width // 8)
