"""Float query, key and value that are on the card to the operands of the INT8 kernels.

Two kernels, since the mean of K and the largest magnitudes of V's channels are those of all keys:

    statistics   sum of every channel of K, largest magnitude of V's, `CHUNK` keys to a block
    quantise     128 rows to a block: of a query head, or keys with their values

The bits are those of `quantization.quantize_problem`: IEEE operations that round once, in the same
order where the order counts. That is the case in the mean only: each chunk's sum is added key by key
in float32, as on the CPU, and the chunks' sums in float64, one addition per chunk and channel. A
row that holds NaN or infinity is stored as zeros and its scale is NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any

from ...numerics import fixedpoint as fx
from ...numerics.quantize_kernels import CHUNK, LARGEST, NO_SCALE
from ...numerics.scores import LIMIT
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import EXPONENT, warp_max_i32
from .pieces import make_find_block

i32, i64, u32, u64, f32, f64 = (
    types.int32, types.int64, types.uint32, types.uint64, types.float32, types.float64,
)  # fmt: skip
THREADS = 256  # one for each channel of the largest head
WARPS = THREADS // 32
ROWS = KEY_BLOCK  # of a block of `int8_quantize`
TOGETHER = 32  # rows whose finiteness a block of `int8_statistics` finds out at once
PITCH = KEY_BLOCK + 4  # bytes of a channel of V in shared memory: 32 lanes hit 32 banks
MEANS, FACTORS, TILE = 0, 4 * THREADS, 8 * THREADS  # where these are in shared memory
MAGNITUDE = 0x7FFFFFFF
NAN = f32(math.nan)
MOST = f32(LARGEST)
LEAST_PEAK = f32(NO_SCALE)
SCALE_LIMIT = f32(LIMIT)

# pointers: k, v, lengths, sums (B, Hkv, chunks, D) float32, peaks (B, Hkv, chunks, Dv) int32
# strides in bytes: batch, head, row, channel of k, then of v
# sizes: KV heads, keys, D, Dv
STATISTICS = types.void(
    types.UniTuple(u64, 5), types.UniTuple(i64, 8), types.UniTuple(i32, 4)
)  # fmt: skip
# pointers: q, k, v, lengths, sums, peaks; then what is written: q bytes, their scales, cq, shifts,
# k bytes, key scales, v bytes, value scales, mean of k, and of the first keys: planes, scales,
# values
# strides in bytes: batch, head, row, channel of q, of k and of v
# sizes: query heads, KV heads, queries, keys, D, Dv, bytes of a row of q and k, channels of v (a
# multiple of 4), keys of v as stored
# factors: what turns scales of Q into cq
QUANTIZE = types.void(
    types.UniTuple(u64, 18), types.UniTuple(i64, 12), types.UniTuple(i32, 9), types.UniTuple(f32, 1)
)


@functools.cache
def make_load(source: str) -> Any:
    """load(address): one element as float32."""
    if source == "float32":
        return ptx.load_global_f32

    @device_function
    def load(address):
        bits = ptx.load_global_u16(address)
        return ptx.from_bits(bits << u32(16)) if bfloat16 else ptx.half_to_float(bits)

    bfloat16 = source == "bfloat16"
    return load


@functools.cache
def make_read_row(turns: int, source: str) -> Any:
    """read_row(x, row, step, channels, lane) -> largest magnitude of the row, as bits.

    Lane n of the warp gets channels n, n + 32, ... in x, zeros beyond the row.
    """
    load = make_load(source)

    @device_function
    def read_row(x, row, step, channels, lane):
        top = i32(0)
        for t in range(turns):
            c = i32(lane + 32 * t)
            x[t] = f32(0)
            if c < channels:
                x[t] = load(row + u64(i64(c) * step))
            top = ptx.imax(top, i32(ptx.bits(x[t]) & u32(MAGNITUDE)))
        return warp_max_i32(top)

    return read_row


@functools.cache
def make_scale_row(turns: int, smooth: bool) -> Any:
    """scale_row(x, means, lane) -> (scale, factor) of a finite row: takes the means off x, which
    are in shared memory.
    """

    @device_function
    def scale_row(x, means, lane):
        top = i32(0)
        for t in range(turns):
            if smooth:
                moved = ptx.sub(x[t], ptx.load_shared_f32(means + u32((lane + 32 * t) * 4)))
                x[t] = ptx.fmin(ptx.fmax(moved, -MOST), MOST)
            top = ptx.imax(top, i32(ptx.bits(x[t]) & u32(MAGNITUDE)))
        return scale_of(ptx.from_bits(u32(warp_max_i32(top))))

    return scale_row


@device_function
def scale_of(largest):
    """(largest / 127, 127 / largest), or 1 and 0 where that would leave float32."""
    scale, factor = f32(1), f32(0)
    if largest > LEAST_PEAK:
        scale, factor = ptx.div(largest, f32(127)), ptx.div(f32(127), largest)
    return scale, factor


@device_function
def finer(t):
    """The value t in 1 / FINER of a step."""
    return ptx.to_int(ptx.mul(t, f32(fx.FINER)))


@device_function
def place_of(key):
    """Where a key's values are in its block: the inverse of `flash_int8.permuted_keys`."""
    return i32((key & ~15) | ((key & 6) << 1) | ((key & 8) >> 2) | (key & 1))


@functools.cache
def make_sum_and_peak(turns: int, source: str) -> Any:
    """sum_and_peak(at, row_step, step, channels, first, stop, tops, thread) -> (sum, peak).

    Of a thread's own channel over the finite rows from `first` to `stop`, of the head at `at`. The
    sum is added row by row; the largest magnitude is as bits. `tops` is in shared memory.
    """
    read_row, load = make_read_row(turns, source), make_load(source)

    @device_function
    def sum_and_peak(at, row_step, step, channels, first, stop, tops, thread):
        lane, warp = i32(thread & 31), i32(thread >> 5)
        x = cuda.local.array(turns, f32)
        total, peak = f32(0), i32(0)
        while first < stop:
            for turn in range(TOGETHER // WARPS):
                r = i32(turn * WARPS + warp)
                top = i32(EXPONENT)  # rows that do not exist count as not finite
                if first + r < stop:
                    top = read_row(x, at + u64(i64(first + r) * row_step), step, channels, lane)
                if lane == 0:
                    ptx.store_shared(tops + u32(4 * r), u32(top))
            cuda.syncthreads()
            if thread < channels:
                mine = at + u64(i64(thread) * step)
                for r in range(TOGETHER):  # a chain of additions, but the loads are not
                    row = i32(min(first + r, stop - 1))
                    value = load(mine + u64(i64(row) * row_step))
                    if ptx.load_shared_s32(tops + u32(4 * r)) < EXPONENT:
                        total = ptx.add(total, value)
                        peak = ptx.imax(peak, i32(ptx.bits(value) & u32(MAGNITUDE)))
            cuda.syncthreads()
            first = i32(first + TOGETHER)
        return total, peak

    return sum_and_peak


def int8_statistics(d: int, dv: int, source: str, folded: bool = False) -> Source:
    """Sums of K's channels and peaks of V's, of the finite rows of a chunk of keys.

    Padded head sizes; `source` is the dtype of K and V. Blocks: chunks, KV heads of V and then,
    where K is smoothed, of K, batches.
    """
    sum_and_peak = make_sum_and_peak((max(d, dv) + 31) // 32, source)
    find_block = make_find_block(CHUNK, folded=folded)

    def statistics(pointers, strides, sizes):
        k, v, lengths, sums, peaks = pointers
        kv_heads, keys, channels, columns = sizes
        shared = cuda.shared.array(0, u32)
        tops = ptx.shared_address(shared)
        thread = i32(cuda.threadIdx.x)
        rows = i32(max(1, keys))  # there is a chunk even without keys
        first, head, batch = find_block(rows)
        chunk, chunks = i32(first // CHUNK), i64((rows + CHUNK - 1) // CHUNK)
        stop = i32(min(first + CHUNK, ptx.load_global_s32(lengths + u64(batch * 4))))
        if head < kv_heads:
            at = v + u64(i64(batch) * strides[4] + i64(head) * strides[5])
            _, peak = sum_and_peak(at, strides[6], strides[7], columns, first, stop, tops, thread)
            number = i64(i32(batch * kv_heads + head)) * chunks + i64(chunk)
            if thread < columns:
                to = peaks + u64((number * i64(columns) + i64(thread)) * 4)
                ptx.store_global(to, u32(peak))
        else:
            head = i32(head - kv_heads)
            at = k + u64(i64(batch) * strides[0] + i64(head) * strides[1])
            total, _ = sum_and_peak(at, strides[2], strides[3], channels, first, stop, tops, thread)
            number = i64(i32(batch * kv_heads + head)) * chunks + i64(chunk)
            if thread < channels:
                to = sums + u64((number * i64(channels) + i64(thread)) * 4)
                ptx.store_global_f32(to, total)

    return Source(statistics, STATISTICS, THREADS, 4 * TOGETHER)


@functools.cache
def make_find_means(smooth: bool) -> Any:
    """find_means(table, sums, peaks, chunks, length, channels, columns, thread) -> (mean, scale).

    A thread's own channel of K and of V; means and factors go to shared memory, zeros for channels
    that are none.
    """

    @device_function
    def find_means(table, sums, peaks, chunks, length, channels, columns, thread):
        mean, scale, factor = f32(0), f32(0), f32(0)
        if smooth and thread < channels:
            total = f64(0)
            for n in range(chunks):
                at = sums + u64((i64(n) * i64(channels) + i64(thread)) * 4)
                total += f64(ptx.load_global_f32(at))
            mean = ptx.div(f32(total), ptx.to_float(i32(max(length, 1))))
            if i32(ptx.bits(mean) & u32(MAGNITUDE)) >= EXPONENT:
                mean = f32(0)
        if thread < columns:
            peak = i32(0)
            for n in range(chunks):
                at = peaks + u64((i64(n) * i64(columns) + i64(thread)) * 4)
                peak = ptx.imax(peak, ptx.load_global_s32(at))
            scale, factor = scale_of(ptx.from_bits(u32(peak)))
        ptx.store_shared_f32(table + u32(MEANS + 4 * thread), mean)
        ptx.store_shared_f32(table + u32(FACTORS + 4 * thread), factor)
        return mean, scale

    return find_means


def int8_quantize(
    d: int,
    dv: int,
    width: int,
    source: str,
    smooth: bool = True,
    softcap: bool = False,
    folded: bool = False,
) -> Source:
    """Everything that `launch_int8.Operands` holds, from Q, K, V and their statistics.

    d, dv : padded head sizes;  width : bytes of a row of the first keys' planes;  source : dtype of
        Q, K and V;  softcap : zeros are written as the rows' shifts

    Blocks: 128 rows, query heads and then KV heads, batches.
    """
    turns = (max(d, dv, width) + 31) // 32
    read_row = make_read_row(turns, source)
    scale_query, scale_key = make_scale_row(turns, False), make_scale_row(turns, smooth)
    find_means, find_block = make_find_means(smooth), make_find_block(ROWS, folded=folded)
    fine_unit = f32(1 / fx.FINER)

    @device_function
    def query_row(x, row, step, number, to, sizes, unit, lane):
        """Row `number` of Q."""
        bytes_at, scales, cqs, shifts = to
        channels, stored = sizes
        good = read_row(x, row, step, channels, lane) < EXPONENT
        scale, factor = scale_query(x, u32(0), lane)
        for t in range(turns):
            c = i32(lane + 32 * t)
            if c < stored:
                n = ptx.to_int(ptx.mul(x[t], factor)) if good else i32(0)
                ptx.store_global_u8(bytes_at + number * u64(stored) + u64(c), u32(n))
        if lane == 0:
            cq = ptx.fmin(ptx.fmax(ptx.mul(scale, unit), -SCALE_LIMIT), SCALE_LIMIT)
            at = number * u64(4)
            ptx.store_global_f32(scales + at, scale if good else f32(1))
            ptx.store_global_f32(cqs + at, cq if good else NAN)
            if softcap:
                ptx.store_global_f32(shifts + at, f32(0))

    # One long function: its steps share some twenty addresses and sizes, which functions of their
    # own would all take as arguments.
    def quantize(pointers, strides, sizes, factors):
        q, k, v, lengths, sums, peaks = pointers[:6]
        q_bytes, q_scale, cq, shifts, k_bytes, key_scale, v_bytes, v_scale, means = pointers[6:15]
        planes, first_scale, first_v = pointers[15:]
        heads, kv_heads, queries, keys, channels, columns, row_bytes, v_columns, stored = sizes
        shared = cuda.shared.array(0, u32)
        table = ptx.shared_address(shared)
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        first, head, batch = find_block(i32(max(1, max(queries, keys))))
        x, y = cuda.local.array(turns, f32), cuda.local.array(turns, f32)
        r = warp
        if head < heads:
            q += u64(i64(batch) * strides[0] + i64(head) * strides[1])
            before = u64(i32(batch * heads + head)) * u64(queries)
            stop = i32(min(ROWS, queries - first))
            while r < stop:
                i = i32(first + r)
                query_row(
                    x,
                    q + u64(i64(i) * strides[2]),
                    strides[3],
                    before + u64(i),
                    (q_bytes, q_scale, cq, shifts),
                    (channels, row_bytes),
                    factors[0],
                    lane,
                )
                r = i32(r + WARPS)
        elif first < stored or first == 0:
            head = i32(head - heads)
            kv = i32(batch * kv_heads + head)
            length = ptx.load_global_s32(lengths + u64(batch * 4))
            chunks = i32(max(1, (keys + CHUNK - 1) // CHUNK))
            before = u64(kv) * u64(chunks) * u64(4)
            mean, scale = find_means(
                table,
                sums + before * u64(channels),
                peaks + before * u64(columns),
                chunks,
                length,
                channels,
                columns,
                thread,
            )
            if first == 0:
                if thread < channels:
                    ptx.store_global_f32(means + u64(i32(kv * channels + thread) * 4), mean)
                if thread < v_columns:
                    ptx.store_global_f32(v_scale + u64(i32(kv * v_columns + thread) * 4), scale)
            cuda.syncthreads()
            k += u64(i64(batch) * strides[4] + i64(head) * strides[5])
            v += u64(i64(batch) * strides[8] + i64(head) * strides[9])
            k_bytes += u64(kv) * u64(keys) * u64(row_bytes)
            while r < ROWS:
                j = i32(first + r)
                good_k, good_v = True, True
                for t in range(turns):
                    x[t], y[t] = f32(0), f32(0)
                scale, factor = f32(1), f32(0)
                if j < length:
                    row = k + u64(i64(j) * strides[6])
                    good_k = read_row(x, row, strides[7], channels, lane) < EXPONENT
                    row = v + u64(i64(j) * strides[10])
                    good_v = read_row(y, row, strides[11], columns, lane) < EXPONENT
                    scale, factor = scale_key(x, table + u32(MEANS), lane)
                scale = ptx.fmin(scale, SCALE_LIMIT)
                scale = (scale if good_k and good_v else NAN) if j < keys else f32(0)
                if lane == 0 and j < stored:
                    ptx.store_global_f32(
                        key_scale + u64(i64(kv) * i64(stored) + i64(j)) * u64(4), scale
                    )
                if lane == 0 and j < fx.FIRST_KEYS:
                    at = first_scale + u64(i32(kv * fx.FIRST_KEYS + j) * 4)
                    ptx.store_global_f32(at, ptx.mul(scale, fine_unit))
                for t in range(turns):
                    c = i32(lane + 32 * t)
                    key = ptx.mul(x[t], factor)
                    value = f32(0)
                    if c < v_columns:
                        value = ptx.mul(y[t], ptx.load_shared_f32(table + u32(FACTORS + 4 * c)))
                    whole = ptx.to_int(key) if good_k else i32(0)
                    if c < row_bytes and j < keys:
                        ptx.store_global_u8(
                            k_bytes + u64(i64(j) * i64(row_bytes) + i64(c)), u32(whole)
                        )
                    if c < v_columns:
                        n = ptx.to_int(value) if good_v else i32(0)
                        at = table + u32(TILE + c * PITCH + place_of(r))
                        ptx.store_shared_u8(at, u32(n))
                    if j < fx.FIRST_KEYS:
                        rest = i32(finer(key) - whole * fx.FINER) if good_k else i32(0)
                        if c < width:
                            at = planes + u64(i32((kv * 2 * fx.FIRST_KEYS + j) * width + c))
                            ptx.store_global_u8(at, u32(whole))
                            ptx.store_global_u8(at + u64(fx.FIRST_KEYS * width), u32(rest))
                        if c < dv:
                            n = finer(value) if good_v else i32(0)
                            at = first_v + u64(i32((kv * fx.FIRST_KEYS + j) * dv + c) * 4)
                            ptx.store_global_f32(at, ptx.mul(ptx.to_float(n), fine_unit))
                r = i32(r + WARPS)
            cuda.syncthreads()
            if first < stored:
                c = warp
                while c < v_columns:
                    word = ptx.load_shared_s32(table + u32(TILE + c * PITCH + 4 * lane))
                    at = (i64(kv) * i64(v_columns) + i64(c)) * i64(stored) + i64(first + 4 * lane)
                    ptx.store_global(v_bytes + u64(at), u32(word))
                    c = i32(c + WARPS)

    return Source(quantize, QUANTIZE, THREADS, TILE + dv * PITCH)
