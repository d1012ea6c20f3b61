"""Float query, key and value that are on the card to the operands of the INT8 kernels.

Two kernels, since the mean of K and the largest magnitudes of V's channels are those of all keys:
`int8_statistics`, then this one, which reads everything once. A block takes 128 rows of a query
head, or 128 keys with their values; a warp reads four of them at a time (`int8_four_rows`), whose
values are then bytes that follow each other in V as stored.

The bits are those of `quantization.quantize_problem`: IEEE operations that round once, in the same
order where the order counts. That is the case in the mean only: each chunk's sum is added key by key
in float32, as on the CPU, and the chunks' sums in float64, one addition per chunk and channel. A
row that holds NaN or infinity is stored as zeros and its scale is NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ...numerics import fixedpoint as fx
from ...numerics.quantize_kernels import CHUNK, LARGEST, NO_SCALE
from ...numerics.scores import LIMIT
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_find_block
from .int8_four_rows import (
    CHANNELS,
    MAGNITUDE,
    ROWS,
    Shape,
    first_row,
    four_bytes,
    is_finite,
    make_clear_bad,
    make_is_whole,
    make_join_largest,
    make_largest,
    make_read,
    make_unpack,
    row_ahead,
    shape_of,
    spread,
)

i32, i64, u32, u64, f32, f64 = (
    types.int32, types.int64, types.uint32, types.uint64, types.float32, types.float64,
)  # fmt: skip
THREADS = 256  # one for each channel of the largest head
WARPS = THREADS // 32
WORDS = KEY_BLOCK // ROWS  # of a channel of V in a block: each holds four keys
SUMS_TOGETHER = 8  # chunks whose sums are loaded at once
MEANS, FACTORS, TILE = 0, 4 * THREADS, 8 * THREADS  # where these are in shared memory
NAN = f32(math.nan)
MOST = f32(LARGEST)
LEAST_PEAK = f32(NO_SCALE)
SCALE_LIMIT = f32(LIMIT)

# pointers: q, k, v, lengths, sums, peaks; then what is written: q bytes, their scales, cq, shifts,
# k bytes, key scales, v bytes, value scales, mean of k, and of the first keys: planes, scales,
# values
# strides in bytes: batch, head, row, channel of q, of k and of v
# sizes: query heads, KV heads, queries, keys, D, Dv, bytes of a row of q and k, channels of v (a
# multiple of 4), keys of v as stored
# factors: what turns scales of Q into cq
SIGNATURE = types.void(
    types.UniTuple(u64, 18), types.UniTuple(i64, 12), types.UniTuple(i32, 9), types.UniTuple(f32, 1)
)


class Place(NamedTuple):
    """A lane's place in its warp, and what it takes of four rows."""

    lane: Any
    own: Any  # its place among the lanes of a row
    c: Any  # its first channel
    ahead: Any  # row `lane % 4` of the four, from the first on


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
def largest_of(top):
    return ptx.imax(ptx.imax(top[0], top[1]), ptx.imax(top[2], top[3]))


@functools.cache
def make_place(shape: Shape) -> Any:
    """place(lane) -> (Place, the first of the lane's words of four rows, for warp 0)."""
    group_words = WORDS // shape.beside

    @device_function
    def place(lane):
        own = i32(lane & (shape.lanes - 1))
        word = i32(lane // shape.lanes * group_words)
        return Place(lane, own, i32(CHANNELS * own), row_ahead(lane & 3)), word

    return place


@functools.cache
def make_find_means(smooth: bool) -> Any:
    """find_means(table, sums, peaks, chunks, length, channels, columns, thread) -> (mean, scale).

    Of a thread's own channel of K, and of the one of V that is half of the threads further: up to 128
    channels different warps read the two. Means and factors go to shared memory, zeros for channels
    that are none.
    """

    @device_function
    def find_means(table, sums, peaks, chunks, length, channels, columns, thread):
        mean, scale, factor, value = f32(0), f32(0), f32(0), i32(thread ^ (THREADS // 2))
        few = cuda.local.array(SUMS_TOGETHER, f32)
        if smooth and thread < channels:
            total = f64(0)
            for first in range(0, chunks, SUMS_TOGETHER):
                for i in range(SUMS_TOGETHER):
                    n = i64(min(i32(first + i), i32(chunks - 1)))
                    few[i] = ptx.load_global_f32(sums + u64((n * channels + thread) * 4))
                for i in range(SUMS_TOGETHER):
                    if i32(first + i) < chunks:
                        total += f64(few[i])
            mean = ptx.div(f32(total), ptx.to_float(i32(max(length, 1))))
            if not is_finite(i32(ptx.bits(mean) & u32(MAGNITUDE))):
                mean = f32(0)
        if value < columns:
            peak = i32(0)
            for n in range(chunks):
                at = peaks + u64((i64(n) * columns + value) * 4)
                peak = ptx.imax(peak, ptx.load_global_s32(at))
            scale, factor = scale_of(ptx.from_bits(u32(peak)))
        ptx.store_shared_f32(table + u32(MEANS + 4 * thread), mean)
        ptx.store_shared_f32(table + u32(FACTORS + 4 * value), factor)
        return mean, scale

    return find_means


@functools.cache
def make_of_channels(shape: Shape) -> Any:
    """of_channels(x, table, c): the numbers of a lane's channels, from a table of all."""
    span = CHANNELS * shape.lanes

    @device_function
    def of_channels(x, table, c):
        four = cuda.local.array(CHANNELS, u32)
        for t in range(shape.turns):
            ptx.load_shared_v4(four, 0, table + u32(4 * (c + span * t)))
            for i in range(CHANNELS):
                x[CHANNELS * t + i] = ptx.from_bits(four[i])

    return of_channels


@functools.cache
def make_take_means(shape: Shape) -> Any:
    """take_means(x, means, top): the means off four rows of K, `top` for `make_largest`.

    Finite differences stay finite; a row that is not so keeps a `top` that says it.
    """
    own = CHANNELS * shape.turns

    @device_function
    def take_means(x, means, top):
        for r in range(ROWS):
            given, moved = top[r], i32(0)
            for i in range(own):
                less = ptx.sub(x[own * r + i], means[i])
                x[own * r + i] = ptx.fmin(ptx.fmax(less, -MOST), MOST)
                moved = ptx.imax(moved, i32(ptx.bits(x[own * r + i]) & u32(MAGNITUDE)))
            top[r] = moved if is_finite(given) else given

    return take_means


@functools.cache
def make_store_rows(shape: Shape) -> Any:
    """store_rows(to, x, factors, first, stop, row_bytes, c): four rows of bytes."""
    own, span = CHANNELS * shape.turns, CHANNELS * shape.lanes

    @device_function
    def store_rows(to, x, factors, first, stop, row_bytes, c):
        for r in range(ROWS):
            row = i32(first + row_ahead(r))
            at = to + u64(i64(row) * i64(row_bytes) + i64(c))
            for t in range(shape.turns):
                n = own * r + CHANNELS * t
                word = four_bytes(
                    ptx.mul(x[n], factors[r]),
                    ptx.mul(x[n + 1], factors[r]),
                    ptx.mul(x[n + 2], factors[r]),
                    ptx.mul(x[n + 3], factors[r]),
                )
                if row < stop and c + span * t < row_bytes:
                    ptx.store_global(at + u64(span * t), word)

    return store_rows


@functools.cache
def make_store_values(shape: Shape) -> Any:
    """store_values(tile, y, factors, word, columns, c): word `word` of the lane's channels of V.

    The words of a channel are turned by the lane that stores them, so that lanes hit all banks.
    """
    own, span = CHANNELS * shape.turns, CHANNELS * shape.lanes

    @device_function
    def store_values(tile, y, factors, word, columns, c):
        for t in range(shape.turns):
            if c + span * t < columns:
                for i in range(CHANNELS):
                    n = CHANNELS * t + i
                    bytes_of_channel = four_bytes(
                        ptx.mul(y[n], factors[n]),
                        ptx.mul(y[own + n], factors[n]),
                        ptx.mul(y[2 * own + n], factors[n]),
                        ptx.mul(y[3 * own + n], factors[n]),
                    )
                    at = tile + u32((c + span * t + i) * KEY_BLOCK)
                    ptx.store_shared(at + turned(word, c + span * t), bytes_of_channel)

    return store_values


@device_function
def turned(word, c):
    """Where in shared memory word `word` of channel c is, in bytes from the channel's first."""
    return u32(((word ^ (c // CHANNELS)) & (WORDS - 1)) * 4)


@functools.cache
def make_first_keys(shape: Shape, width: int) -> Any:
    """first_keys(x, factors, planes, number, c): bytes, and what these leave, of the first keys.

    Of rows 0 and 1 of the four; the first goes to row `number` of all heads' planes, the rest of it
    `FIRST_KEYS` rows further (`launch_int8.Operands`).
    """
    own, span = CHANNELS * shape.turns, CHANNELS * shape.lanes

    @device_function
    def first_keys(x, factors, planes, number, c):
        for r in range(2):
            for t in range(shape.turns):
                for i in range(CHANNELS):
                    n, channel = CHANNELS * t + i, i32(c + span * t + i)
                    if channel < width:
                        key = ptx.mul(x[own * r + n], factors[r])
                        whole = ptx.to_int(key)
                        at = planes + u64(i32((number + r) * width + channel))
                        ptx.store_global_u8(at, u32(whole))
                        rest = u32(finer(key) - whole * fx.FINER)
                        ptx.store_global_u8(at + u64(fx.FIRST_KEYS * width), rest)

    return first_keys


@functools.cache
def make_first_values(shape: Shape, dv: int) -> Any:
    """first_values(y, factors, values, number, c): the first keys' values, finer than bytes.

    Of rows 0 and 1 of the four; the first goes to row `number` of all heads' (`launch_int8.Operands`).
    """
    own, span = CHANNELS * shape.turns, CHANNELS * shape.lanes
    unit = f32(1 / fx.FINER)

    @device_function
    def first_values(y, factors, values, number, c):
        for r in range(2):
            for t in range(shape.turns):
                for i in range(CHANNELS):
                    n, channel = CHANNELS * t + i, i32(c + span * t + i)
                    if channel < dv:
                        value = finer(ptx.mul(y[own * r + n], factors[n]))
                        at = values + u64(i32((number + r) * dv + channel) * 4)
                        ptx.store_global_f32(at, ptx.mul(ptx.to_float(value), unit))

    return first_values


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
    shape = shape_of(max(d, dv, width))
    place_of, is_whole, read = make_place(shape), make_is_whole(source), make_read(shape, source)
    unpack, largest, join = (
        make_unpack(shape, source),
        make_largest(shape),
        make_join_largest(shape.lanes),
    )
    clear_bad, take_means, of_channels = (
        make_clear_bad(shape),
        make_take_means(shape),
        make_of_channels(shape),
    )
    store_rows, store_values = make_store_rows(shape), make_store_values(shape)
    first_keys, first_values = make_first_keys(shape, width), make_first_values(shape, dv)
    find_means, find_block = make_find_means(smooth), make_find_block(KEY_BLOCK, folded=folded)
    group_words, own, n_x = WORDS // shape.beside, CHANNELS * shape.turns, shape.numbers
    n_raw = n_x // (1 if source == "float32" else 2)
    fine_unit = f32(1 / fx.FINER)

    @device_function
    def query_rows(q, steps, first, warp, to, sizes, unit, lane):
        """A block's rows of Q from `first` on; q and the arrays of `to` begin at the head."""
        bytes_at, scales, cqs, shifts = to
        queries, channels, row_bytes = sizes
        place, start = place_of(lane)
        raw, x = cuda.local.array(n_raw, u32), cuda.local.array(n_x, f32)
        top, factors = cuda.local.array(ROWS, i32), cuda.local.array(ROWS, f32)
        whole = is_whole(q, steps[0], steps[1], channels)
        word, stop = i32(start + warp), i32(start + group_words)
        # one turn more than there are words: the next rows are on their way while these become bytes
        while word < stop + WARPS:
            c, lane = ptx.fresh(place.c), ptx.fresh(lane)
            unpack(x, raw)
            if word < stop:
                read(raw, q, steps, i32(first + first_row(word)), queries, channels, whole, c)
            row = i32(first + first_row(i32(word - WARPS)))
            if word >= start + WARPS:
                largest(x, top)
                peak = join(top, lane)
                good = is_finite(peak)
                scale, factor = scale_of(ptx.from_bits(u32(peak)))
                spread(factors, factor if good else f32(0), lane)
                clear_bad(x, good, lane)
                store_rows(bytes_at, x, factors, row, queries, row_bytes, c)
                if place.own < ROWS and row + place.ahead < queries:
                    cq = ptx.fmin(ptx.fmax(ptx.mul(scale, unit), -SCALE_LIMIT), SCALE_LIMIT)
                    at = u64(i64(row + place.ahead) * 4)
                    ptx.store_global_f32(scales + at, scale if good else f32(1))
                    ptx.store_global_f32(cqs + at, cq if good else NAN)
                    if softcap:
                        ptx.store_global_f32(shifts + at, f32(0))
            word = i32(word + WARPS)

    @device_function
    def value_rows(y, numbers, top, raw, table, word, row, kv, call, c, lane):
        """Four rows of V from `row` on as word `word` of the tile in shared memory, and finer in memory if
        they are first keys'. Returns whether this lane's row is finite.
        """
        of_channels(numbers, table + u32(FACTORS), c)
        unpack(y, raw)
        largest(y, top)
        good = True
        if not ptx.vote_all(i32(is_finite(largest_of(top)))):
            good = is_finite(join(top, lane))
            clear_bad(y, good, lane)
        store_values(table + u32(TILE), y, numbers, word, call.sizes[7], c)
        if row < fx.FIRST_KEYS:
            number = i32(kv * fx.FIRST_KEYS + row)
            first_values(y, numbers, call.pointers[17], number, c)
        return good

    @device_function
    def key_rows(x, numbers, top, raw, table, to, row, kv, length, good_v, place, call, c, lane):
        """Four rows of K from `row` on as bytes and scales, and finer if they are first keys.

        to : the head's bytes and scales;  good_v : what `value_rows` returned for the same rows
        """
        (k_bytes, key_scale), (planes, first_scale) = to, call.pointers[15:17]
        keys, row_bytes, stored = call.sizes[3], call.sizes[6], call.sizes[8]
        factors = cuda.local.array(ROWS, f32)
        unpack(x, raw)
        largest(x, top)
        if smooth:
            of_channels(numbers, table + u32(MEANS), c)
            take_means(x, numbers, top)
        peak, j = join(top, lane), i32(row + place.ahead)
        good_k = is_finite(peak)
        scale, factor = f32(1), f32(0)
        if j < length:
            scale, factor = scale_of(ptx.from_bits(u32(peak)))
        spread(factors, factor if good_k else f32(0), lane)
        clear_bad(x, good_k, lane)
        store_rows(k_bytes, x, factors, row, keys, row_bytes, c)
        scale = ptx.fmin(scale, SCALE_LIMIT)
        scale = (scale if good_k and good_v else NAN) if j < keys else f32(0)
        if place.own < ROWS and j < stored:
            ptx.store_global_f32(key_scale + u64(j * 4), scale)
        if place.own < ROWS and j < fx.FIRST_KEYS:
            at = first_scale + u64(i32(kv * fx.FIRST_KEYS + j) * 4)
            ptx.store_global_f32(at, ptx.mul(scale, fine_unit))
        if row < fx.FIRST_KEYS:
            first_keys(x, factors, planes, i32(kv * 2 * fx.FIRST_KEYS + row), c)

    @device_function
    def find_table(table, before, chunks, kv, length, first, call, thread):
        """Means and factors of a head's channels in shared memory; its first block writes the means of K
        and the scales of V.

        before : bytes of a channel's float32 of the chunks of the heads before
        """
        sums, peaks = call.pointers[4:6]
        channels, columns, v_columns = call.sizes[4], call.sizes[5], call.sizes[7]
        sums, peaks = sums + before * u64(channels), peaks + before * u64(columns)
        mean, scale = find_means(table, sums, peaks, chunks, length, channels, columns, thread)
        column = i32(thread ^ (THREADS // 2))
        if first == 0 and thread < channels:
            at = call.pointers[14] + u64(i32(kv * channels + thread) * 4)
            ptx.store_global_f32(at, mean)
        if first == 0 and column < v_columns:
            at = call.pointers[13] + u64(i32(kv * v_columns + column) * 4)
            ptx.store_global_f32(at, scale)

    @device_function
    def write_tile(table, kv, first, call, warp, lane):
        """The block's bytes of V, which `value_rows` has made: a warp writes a channel after the other."""
        v_bytes, v_columns, stored = call.pointers[12], call.sizes[7], call.sizes[8]
        c = warp
        while c < v_columns:
            at = table + u32(TILE + c * KEY_BLOCK) + turned(lane, c)
            to = (i64(kv) * i64(v_columns) + i64(c)) * i64(stored) + i64(first + 4 * lane)
            ptx.store_global(v_bytes + u64(to), u32(ptx.load_shared_s32(at)))
            c = i32(c + WARPS)

    @device_function
    def keys_and_values(first, head, batch, table, call, thread, warp, lane):
        """A block's keys and values from `first` on, of a KV head."""
        kv_heads, _, keys, channels, columns, row_bytes, _, stored = call.sizes[1:]
        strides = call.strides
        kv = i32(batch * kv_heads + head)
        length = ptx.load_global_s32(call.pointers[3] + u64(batch * 4))
        chunks = i32(max(1, (keys + CHUNK - 1) // CHUNK))
        k = call.pointers[1] + u64(i64(batch) * strides[4] + i64(head) * strides[5])
        v = call.pointers[2] + u64(i64(batch) * strides[8] + i64(head) * strides[9])
        k_steps, v_steps = (strides[6], strides[7]), (strides[10], strides[11])
        k_whole = is_whole(k, k_steps[0], k_steps[1], channels)
        v_whole = is_whole(v, v_steps[0], v_steps[1], columns)
        place, start = place_of(lane)
        raw_k, raw_v = cuda.local.array(n_raw, u32), cuda.local.array(n_raw, u32)
        x, numbers = cuda.local.array(n_x, f32), cuda.local.array(own, f32)
        top = cuda.local.array(ROWS, i32)
        before = u64(kv) * u64(chunks) * u64(4)
        to = (
            call.pointers[10] + u64(kv) * u64(keys) * u64(row_bytes),
            call.pointers[11] + u64(kv) * u64(stored) * u64(4),
        )
        word, stop = i32(start + warp), i32(start + group_words)
        good_v = True
        # one turn more than there are words: the next rows of V are on their way while those of K
        # become bytes, and the other way round
        while word < stop + WARPS:
            c, kv, lane = ptx.fresh(place.c), ptx.fresh(kv), ptx.fresh(lane)
            row, done = i32(first + first_row(word)), i32(word - WARPS)
            old_row = i32(first + first_row(done))
            if done >= start:
                good_v = value_rows(x, numbers, top, raw_v, table, done, old_row, kv, call, c, lane)
            if word < stop:
                read(raw_v, v, v_steps, row, length, columns, v_whole, c)
            if done >= start:
                key_rows(
                    x, numbers, top, raw_k, table, to, old_row, kv, length, good_v, place, call, c, lane
                )  # fmt: skip
            if word < stop:
                read(raw_k, k, k_steps, row, length, channels, k_whole, c)
            if word < start + WARPS:  # while the first rows are on their way
                find_table(table, before, chunks, kv, length, first, call, thread)
                cuda.syncthreads()
            word = i32(word + WARPS)
        cuda.syncthreads()
        if first < stored:
            write_tile(table, kv, first, call, warp, lane)

    def quantize(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        heads, _, queries, keys, channels, _, row_bytes, _, stored = sizes
        shared = cuda.shared.array(0, u32)
        table = ptx.shared_address(shared)
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        first, head, batch = find_block(i32(max(1, max(queries, keys))))
        if head < heads:
            q_bytes, q_scale, cq, shifts = pointers[6:10]
            before = u64(i32(batch * heads + head)) * u64(queries)
            rows = before * u64(4)
            query_rows(
                pointers[0] + u64(i64(batch) * strides[0] + i64(head) * strides[1]),
                (strides[2], strides[3]),
                first,
                warp,
                (q_bytes + before * u64(row_bytes), q_scale + rows, cq + rows, shifts + rows),
                (queries, channels, row_bytes),
                factors[0],
                lane,
            )
        elif first < stored or first == 0:
            keys_and_values(first, i32(head - heads), batch, table, call, thread, warp, lane)

    return Source(
        quantize, SIGNATURE, THREADS, TILE + dv * KEY_BLOCK, blocks=2 if shape.turns == 1 else 1
    )
