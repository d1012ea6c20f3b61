"""Swizzled tiles in shared memory: where a row's pieces of 16 bytes lie, copies from and to global
memory, and which of them a lane reads with ldmatrix.

The makers are cached: a tile of keys and one of values of the same shape are loaded by one
function, compiled once.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32, u64 = types.int32, types.uint32, types.uint64


def swizzle_of(row_bytes: int) -> tuple[int, int]:
    """(shift, mask): chunk c of row r is stored at c ^ ((r >> shift) & mask), so that 8 rows of a
    column use 8 bank groups.

    A row of 128 bytes or a multiple covers all banks: XOR with r % 8. A row of 64 or 192 bytes
    covers half of them, so two rows share an XOR with (r / 2) % 4; of 32 bytes a quarter: four rows
    share one with (r / 4) % 2.
    """
    if row_bytes == 32:
        return 2, 1
    return (0, 7) if row_bytes % 128 == 0 else (1, 3)


@functools.cache
def make_read(row_bytes: int, transposed: bool = False) -> Any:
    """read(d, place, at, chunk, n, ahead).

    `ldmatrix` of chunks n and n + 1, n even, of swizzled rows.

    `at` is this lane's row and `chunk` the place of its chunk 0 in it; `ahead` bytes further is
    another row. The XOR stays within a swizzle. Whole swizzles and `ahead` are constants that the
    instruction adds itself: four addresses serve a row of any width.
    """
    _, xor = swizzle_of(row_bytes)
    load = ptx.ldmatrix_trans_ahead if transposed else ptx.ldmatrix_ahead

    @device_function
    def read(d, place, at, chunk, n, ahead):
        load(d, place, at + ((chunk ^ u32(n & xor)) << u32(4)), i32(((n & ~xor) << 4) + ahead))

    return read


@functools.cache
def make_copy(asynchronous: bool) -> Any:
    """copy(place, ahead, address, there).

    16 bytes from global to shared memory, zeros if not `there`; cp.async, or at once.

    `ahead`, a constant after unrolling, is added to `place` by the instruction itself: a register
    less for each copy of a loop.
    """

    @device_function
    def copy_later(place, ahead, address, there):
        ptx.cp_async_zfill(place, ahead, address, u32(16) if there else u32(0))

    @device_function
    def copy_now(place, ahead, address, there):
        four = cuda.local.array(4, u32)
        for n in range(4):
            four[n] = u32(0)
        if there:
            ptx.load_global_v4(four, 0, address)
        ptx.store_shared_v4(place + u32(ahead), four, 0)

    return copy_later if asynchronous else copy_now


@functools.cache
def make_waits(asynchronous: bool) -> tuple[Any, Any, Any]:
    """(commit, wait_all, wait_but_one): what copies of `make_copy` need.

    The end of a group of copies; waits until all groups, all but the last one, have arrived. Nothing
    where copies are made at once.
    """
    if asynchronous:
        return ptx.cp_async_commit, ptx.cp_async_wait[0], ptx.cp_async_wait[1]
    nothing = device_function(lambda: None)
    return nothing, nothing, nothing


@functools.cache
def make_load_tile(rows: int, row_bytes: int, threads: int, asynchronous: bool = True) -> Any:
    """Copy a tile from global to shared memory in pieces of 16 bytes, zeros beyond the limits.

    load_tile(to, source, stride, rows_left, bytes_left, thread): `rows_left` rows of `stride` bytes
    exist, each with `bytes_left` bytes. Asynchronous copies are committed and waited for by the
    caller.
    """
    chunks = row_bytes // 16
    pieces = rows * chunks
    shift, xor = swizzle_of(row_bytes)
    turns = (pieces + threads - 1) // threads
    even = pieces % threads == 0
    copy = make_copy(asynchronous)
    step = threads // chunks  # rows per turn, where a thread stays in one column

    @device_function
    def load_tile(to, source, stride, rows_left, bytes_left, thread):
        for i in range(turns):
            piece = i32(thread + i * threads)
            r = i32(piece // chunks)
            c = i32(piece - r * chunks)
            if even or piece < pieces:
                copy(
                    to + u32(r * row_bytes + ((c ^ ((r >> shift) & xor)) << 4)),
                    0,
                    source + u64(r) * u64(stride) + u64(c << 4),
                    r < rows_left and (c << 4) < bytes_left,
                )

    @device_function
    def load_tile_by_steps(to, source, stride, rows_left, bytes_left, thread):
        r = i32(thread // chunks)
        c = i32(thread - r * chunks)
        place = to + u32(r * row_bytes + ((c ^ ((r >> shift) & xor)) << 4))
        address = source + u64(r) * u64(stride) + u64(c << 4)
        left = i32(rows_left - r) if (c << 4) < bytes_left else i32(0)
        for i in range(turns):
            copy(
                place ^ u32((((i * step) >> shift) & xor) << 4),
                i32(i * step * row_bytes),
                address,
                i32(i * step) < left,
            )
            address += u64(step) * u64(stride)

    # the column is the thread's own in every turn; with r < step, a power of two, r + i * step is
    # their XOR, and so is its swizzle
    return (
        load_tile_by_steps
        if even and threads % chunks == 0 and step & (step - 1) == 0
        else load_tile
    )


@functools.cache
def make_load_rows(
    rows: int, row_bytes: int, threads: int, group: int, asynchronous: bool = True
) -> Any:
    """As `load_tile` for queries.

    Row r of the tile is query (first + r) // group of head (first + r) % group.

    Packing the heads that share keys into one tile fills it when there are few queries.
    load_rows(to, source, stride_head, stride_query, first, rows_total, bytes_left, thread).
    """
    chunks = row_bytes // 16
    pieces = rows * chunks
    shift, xor = swizzle_of(row_bytes)
    turns = (pieces + threads - 1) // threads
    even = pieces % threads == 0
    copy = make_copy(asynchronous)

    @device_function
    def load_rows(to, source, stride_head, stride_query, first, rows_total, bytes_left, thread):
        for i in range(turns):
            piece = i32(thread + i * threads)
            r = i32(piece // chunks)
            c = i32(piece - r * chunks)
            if even or piece < pieces:
                row = i32(first + r)
                query = i32(row // group)
                head = i32(row - query * group)
                copy(
                    to + u32(r * row_bytes + ((c ^ ((r >> shift) & xor)) << 4)),
                    0,
                    source
                    + u64(head) * u64(stride_head)
                    + u64(query) * u64(stride_query)
                    + u64(c << 4),
                    row < rows_total and (c << 4) < bytes_left,
                )

    return load_rows


@functools.cache
def make_store_rows(row_bytes: int, group: int) -> Any:
    """A warp writes its 16 rows from shared to global memory, 16 bytes per lane and turn (the
    inverse of `load_rows`).
    """
    chunks = row_bytes // 16
    pieces = 16 * chunks
    turns = (pieces + 31) // 32
    shift, xor = swizzle_of(row_bytes)

    @device_function
    def store_rows(source, to, stride_head, stride_query, first, rows_total, bytes_left, lane):
        four = cuda.local.array(4, u32)
        for i in range(turns):
            piece = i32(lane + i * 32)
            r = i32(piece // chunks)
            c = i32(piece - r * chunks)
            row = i32(first + r)
            if piece < pieces and row < rows_total and (c << 4) < bytes_left:
                query = i32(row // group)
                head = i32(row - query * group)
                ptx.load_shared_v4(
                    four, 0, source + u32(r * row_bytes + ((c ^ ((r >> shift) & xor)) << 4))
                )
                ptx.store_global_v4(
                    to
                    + u64(head) * u64(stride_head)
                    + u64(query) * u64(stride_query)
                    + u64(c << 4),
                    four,
                    0,
                )

    return store_rows


@device_function
def left_row(lane):
    """Of 16 rows the one whose address a lane gives ldmatrix: for the left operand of a product, or
    with `.trans` for the right one.
    """
    return lane & 15


@device_function
def right_row(lane):
    """As `left_row` for the right operand of a product, whose columns are rows in memory."""
    return ((lane >> 4) << 3) + (lane & 7)


@functools.cache
def make_first_chunk(row_bytes: int) -> tuple[Any, Any]:
    """(left_chunk(lane, row), right_chunk(lane, row)): the place of a lane's first chunk in its
    `left_row` or `right_row` of a tile. The others are an XOR with an even number away.
    """
    shift, xor = swizzle_of(row_bytes)

    @device_function
    def left_chunk(lane, row):
        return u32((lane >> 4) ^ ((row >> shift) & xor))

    @device_function
    def right_chunk(lane, row):
        return u32(((lane >> 3) & 1) ^ ((row >> shift) & xor))

    return left_chunk, right_chunk
