"""What the decode kernels share.

A cache's tiles on their way to shared memory, query rows on theirs, and the results' way back.

A block works on one KV head, one tile of query rows (the heads of its group times the new tokens,
4 to 32 rows) and one split of the keys. Its four warps divide the keys of a tile among them for
the scores, and the channels for the output, so every byte of K and V is read once from memory to
shared memory and once from there to registers; maxima, weights and their sums cross between the
warps through shared memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ...numerics import quantize_kernels
from ...numerics.fixedpoint import CODE_QUERY_ONE, KEY_SCALE_LIMIT, QUERY_ONE, ZERO_VALUE_SCALE
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .tiles import make_copy, swizzle_of

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
WARPS = 4
THREADS = 32 * WARPS
LANE_KEYS = 16  # slots of a page come in pieces of at least this: 16 bytes of INT8 values
EXPONENT = 0x7F800000
NO_SCALE = f32(quantize_kernels.NO_SCALE)
SCALE_LIMIT = f32(2.0**100)  # of a query
KEY_LIMIT = f32(KEY_SCALE_LIMIT)
NO_VALUE = f32(ZERO_VALUE_SCALE)
NOTHING = f32(-3e38)  # maximum of a float row that has seen no key
NAN = f32(math.nan)


@device_function
def divided(a, b):
    """a // b for int32 that are not negative."""
    return i32(ptx.udiv(u32(a), u32(b)))


@device_function
def remainder(a, b):
    """a % b for int32 that are not negative."""
    return i32(ptx.urem(u32(a), u32(b)))


def make_page_of(paged: bool) -> Any:
    """page_of(table, slot, shift): the page of a slot.

    `table` is the address of the sequence's page numbers, or its only page.
    """

    @device_function
    def page_of(table, slot, shift):
        return u64(ptx.load_global_s32(table + u64((slot >> shift) * 4))) if paged else table

    return page_of


class Pages(NamedTuple):
    """One head's keys, values or scales in the pages of a cache."""

    data: Any  # address of this head in page 0
    page_bytes: Any  # over all heads, uint64
    table: Any  # address of the sequence's page numbers, or its one page
    shift: Any  # log2 of the slots of a page
    left: Any  # bytes of a stored key, rows of a stored value; of scales, bytes from K's to V's


class Results(NamedTuple):
    """Where a block's results go: out (rows, columns), m and l (rows), float32, in `decode_int8`'s
    and `decode_float`'s last outputs or the partial ones of all tasks.
    """

    out: Any  # addresses
    m: Any
    l: Any
    first: Any  # the row of the block's first one
    rows: Any  # of the block
    columns: Any


def make_find_results(direct: bool, tile_rows: int, dv: int) -> Any:
    """find_results(out, m, l, task: Task, rows, columns) -> Results.

    direct: (B, Hkv, rows, columns). Else (task, tile_rows, dv), for `decode_combine`.
    """

    @device_function
    def find_results(out, m, l, task, rows, columns):
        # computed here, not kept in registers during the loop over keys
        first_row = ptx.fresh(task.first_row)
        first = ptx.fresh(task.head) * rows + first_row if direct else task.number * tile_rows
        return Results(out, m, l, first, rows - first_row, columns if direct else i32(dv))

    return find_results


def make_finish(direct: bool, one: float) -> Any:
    """(reciprocal_of(l), store_value(to: Results, r, c, x, reciprocal)).

    direct: outputs are x * (one / l), 0 where l is; else x as it is.
    """
    numerator = f32(one)

    @device_function
    def reciprocal_of(l):
        return f32(0) if not direct or l == f32(0) else ptx.div(numerator, l)

    @device_function
    def store_value(to, r, c, x, reciprocal):
        if r < to.rows and c < to.columns:
            place = u64(to.first + r) * u64(to.columns) + u64(c)
            ptx.store_global_f32(to.out + place * u64(4), ptx.mul(x, reciprocal) if direct else x)

    return reciprocal_of, store_value


@device_function
def store_state(to, r, m, l):
    if r < to.rows:
        ptx.store_global_f32(to.m + u64(to.first + r) * u64(4), m)
        ptx.store_global_f32(to.l + u64(to.first + r) * u64(4), l)


@functools.cache
def make_place(row_bytes: int) -> Any:
    """place(r, c): the byte of a tile at which chunk c of row r, of 16 bytes, is stored."""
    shift, xor = swizzle_of(row_bytes)

    @device_function
    def place(r, c):
        return r * row_bytes + ((c ^ ((r >> shift) & xor)) << 4)

    return place


@functools.cache
def make_place_of_fours(row_bytes: int) -> Any:
    """place(r, c): as `make_place`, so that 8 rows that are four apart use 8 bank groups.

    Rows that share 128 bytes change places too. row_bytes : 32 or more, a power of two
    """
    shared, shift, xor = spread_of(row_bytes)

    @device_function
    def place(r, c):
        row = r ^ ((r >> 2) & shared)
        return row * row_bytes + ((c ^ ((r >> shift) & xor)) << 4)

    return place


def spread_of(row_bytes: int) -> tuple[int, int, int]:
    """(mask, shift, xor) of `make_place_of_fours`: row r is stored at r ^ ((r >> 2) & mask), chunk c of it at
    c ^ ((r >> shift) & xor).
    """
    rows = max(1, 128 // row_bytes)  # in all banks
    return rows - 1, 1 + rows.bit_length(), 8 // rows - 1


def make_load_keys(
    rows: int, row_bytes: int, paged: bool, asynchronous: bool = True, fours: bool = False
) -> Any:
    """Copy `rows` slots of K, or of V as it is stored for floats, to a swizzled tile.

    Zeros beyond `stop` and `bytes_left`.

    load_keys(to, pages: Pages, first, stop, thread): slots first .. stop, of `pages.left` bytes
    each, a multiple of 16. fours : where `make_place_of_fours` says
    """
    page_of, chunks = make_page_of(paged), row_bytes // 16
    pieces = rows * chunks
    turns = (pieces + THREADS - 1) // THREADS
    even = pieces % THREADS == 0
    place_of = make_place_of_fours(row_bytes) if fours else make_place(row_bytes)
    copy = make_copy(asynchronous)
    step = THREADS // chunks  # rows per turn, where a thread stays in one column

    @device_function
    def copy_piece(place, ahead, pages, slot, stop, c):
        data, page_bytes, table, shift, bytes_left = pages
        there = slot < stop and (c << 4) < bytes_left
        address = data
        if there:
            inside = slot & ((i32(1) << shift) - 1)
            address = (
                data
                + page_of(table, slot, shift) * page_bytes
                + u64(inside) * u64(bytes_left)
                + u64(c << 4)
            )
        copy(place, ahead, address, there)

    @device_function
    def load_keys(to, pages, first, stop, thread):
        for i in range(turns):
            piece = i32(thread + i * THREADS)
            r = i32(piece // chunks)
            c = i32(piece - r * chunks)
            if even or piece < pieces:
                copy_piece(to + u32(place_of(r, c)), 0, pages, i32(first + r), stop, c)

    @device_function
    def load_keys_by_steps(to, pages, first, stop, thread):
        r = i32(thread // chunks)
        c = i32(thread - r * chunks)
        slot = i32(first + r)
        left = i32(stop - slot) if (c << 4) < pages.left else i32(0)
        address = pages.data + pages.table * pages.page_bytes  # of sequences with a page each
        address += u64(slot) * u64(pages.left) + u64(c << 4)
        for i in range(turns):
            # r < step: the bits of both are apart, and places are XORs of bits
            ahead = i32(i * step * row_bytes)
            place = to + u32(place_of(r, c) ^ (place_of(i32(i * step), i32(0)) ^ ahead))
            if paged:
                copy_piece(place, ahead, pages, slot + i * step, stop, c)
            else:
                copy(place, ahead, address, i32(i * step) < left)
                address = ptx.fresh_address(address + u64(step) * u64(pages.left))

    # where the column is the thread's own in every turn, and turns are whole swizzles or constants
    shift, xor = swizzle_of(row_bytes)
    steady = even and THREADS % chunks == 0 and (fours or step % ((xor + 1) << shift) == 0)
    return load_keys_by_steps if steady else load_keys


def make_load_channels(channels: int, block_k: int, paged: bool, asynchronous: bool) -> Any:
    """Copy a tile of V^T, as it is stored for integers, to a swizzled tile of `channels` rows of
    `block_k` bytes.

    load_channels(to, pages: Pages, first, stop, thread): within a page the values are stored in
    blocks of min(page, block_k) slots, channel after channel (of INT4 pair after pair of them),
    `pages.left` of them.
    """
    copy = make_copy(asynchronous)
    page_of, chunks = make_page_of(paged), block_k // LANE_KEYS
    swizzle, xor = swizzle_of(block_k)
    step = THREADS // chunks  # channels per turn: whole swizzles

    @device_function
    def load_channels(to, pages, first, stop, thread):
        data, page_bytes, table, shift, channels_left = pages
        channel = i32(thread // chunks)
        c = i32(thread - channel * chunks)
        place = to + u32(channel * block_k + ((c ^ ((channel >> swizzle) & xor)) << 4))
        slot = i32(first + c * LANE_KEYS)
        span = min(i32(1) << shift, i32(block_k))
        left, address = i32(0), data
        if slot < stop:
            inside = slot & ((i32(1) << shift) - 1)
            within = inside & (span - 1)
            left = i32(channels_left - channel)
            address = (
                data
                + page_of(table, slot, shift) * page_bytes
                + u64(inside - within) * u64(channels_left)
                + u64(channel * span + within)
            )
        for i in range(channels // step):
            copy(place, i32(i * step * block_k), address, i32(i * step) < left)
            address = ptx.fresh_address(address + u64(step * span))

    return load_channels


def make_load_scales(block_k: int, paged: bool, asynchronous: bool) -> Any:
    """Copy the float32 scales of `block_k` slots: of the keys, and behind them of the values.

    load_scales(to, pages: Pages, first, stop, thread): in a page and head those of the values begin
    `pages.left` bytes behind those of the keys.
    """
    page_of, copy = make_page_of(paged), make_copy(asynchronous)

    @device_function
    def load_scales(to, pages, first, stop, thread):
        data, page_bytes, table, shift, values_at = pages
        if thread < block_k // 2:
            slot = first + 4 * (thread & (block_k // 4 - 1))
            there = slot < stop
            address = data
            if there:
                inside = slot & ((i32(1) << shift) - 1)
                address = (
                    data
                    + page_of(table, slot, shift) * page_bytes
                    + u64(inside * 4)
                    + (u64(0) if thread < block_k // 4 else values_at)
                )
            copy(to + u32(thread * 16), 0, address, there)

    return load_scales


@device_function
def warp_max_i32(x):
    for n in range(5):
        x = ptx.imax(x, ptx.shuffle_xor_i32(x, u32(1 << n)))
    return x


def make_query_rows(d: int, planes: int, pack: Any = None) -> Any:
    """Convert a warp's query rows to the operand of the scores, in shared memory, with one float
    factor each.

    query_rows(memory, q, task, rows, channels, c, warp, lane): q is (B, Hkv, rows, channels)
    float32; this block takes `tile_rows` rows of its head (zeros beyond `rows`).

    INT8: `reference.decode_query` of a row in two planes of bytes; its factor scale * c at most
    2**100. INT4: the same in one plane. They are columns, as `decode_columns` has them. Floats,
    planes = 0: the row times a power of two that brings its largest magnitude to 1 .. 2, so that
    float16 holds it; the factor is c over that power. A row that is not finite has zeros and the
    factor NaN.
    """
    exact = planes > 0
    most = f32(QUERY_ONE if planes == 2 else CODE_QUERY_ONE)
    row_bytes = d if exact else 2 * d
    per_lane = 4 if exact else 2
    words = (d + 32 * per_lane - 1) // (32 * per_lane)
    n_x = words * per_lane
    place_of = make_place(row_bytes)

    def make(tile_rows: int) -> Any:
        pairs = planes == 2 or tile_rows < 8  # the odd columns are low planes, or zeros

        @device_function
        def place_row(r):
            if not exact:
                return r
            return 2 * r if pairs else ((r >> 3) << 3) + 2 * (r & 3) + ((r >> 2) & 1)

        @device_function
        def query_rows(memory, q, task, rows, channels, c, warp, lane):
            to, factors, first = memory.q, memory.factors, task.first_row
            q = q + u64(task.head) * u64(rows * channels * 4)
            x = cuda.local.array(n_x, f32)
            for turn in range(tile_rows // WARPS):
                r = turn * WARPS + warp
                top = i32(0)
                for i in range(words):
                    for e in range(per_lane):
                        channel = (i * 32 + lane) * per_lane + e
                        y = f32(0)
                        if first + r < rows and channel < channels:
                            y = ptx.load_global_f32(
                                q + (u64(first + r) * u64(channels) + u64(channel)) * u64(4)
                            )
                        x[i * per_lane + e] = y
                        top = ptx.imax(top, i32(ptx.bits(y) & u32(0x7FFFFFFF)))
                top = warp_max_i32(top)
                good = top < EXPONENT
                factor, scale = f32(0), f32(1)
                if exact:
                    largest = ptx.from_bits(u32(top))
                    if largest > NO_SCALE:
                        factor = ptx.div(most, largest)
                        scale = ptx.div(largest, most)
                    scale = ptx.fmin(ptx.mul(scale, c), SCALE_LIMIT)
                    scale = ptx.fmax(scale, -SCALE_LIMIT)
                else:
                    power = ptx.imax(ptx.imin(top >> 23, i32(253)), i32(1))
                    factor = ptx.from_bits(u32(254 - power) << u32(23))
                    scale = c * ptx.from_bits(u32(power) << u32(23))
                for i in range(words):
                    word, low = u32(0), u32(0)
                    if good:
                        if exact:
                            for e in range(4):
                                n = ptx.to_int(ptx.mul(x[4 * i + e], factor))
                                if planes == 2:
                                    high = i32(n + 64) >> 7
                                    low |= (u32(i32(n - (high << 7))) & u32(255)) << u32(8 * e)
                                    n = high
                                word |= (u32(n) & u32(255)) << u32(8 * e)
                        else:
                            word = pack(x[2 * i] * factor, x[2 * i + 1] * factor)
                    place = (i * 32 + lane) * 4
                    if place < row_bytes:
                        row, chunk, inside = place_row(r), place >> 4, place & 15
                        ptx.store_shared(to + u32(place_of(row, chunk) + inside), word)
                        if exact and pairs:
                            ptx.store_shared(to + u32(place_of(row + 1, chunk) + inside), low)
                if lane == 0:
                    ptx.store_shared_f32(factors + u32(r * 4), scale if good else NAN)

        return query_rows

    return make
