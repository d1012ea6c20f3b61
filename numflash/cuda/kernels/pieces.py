"""Parts that the kernels share.

Swizzled tiles in shared memory, reductions over a quad of lanes, the visible range of a row.

The makers are cached: a tile of keys and one of values of the same shape are loaded by one
function, compiled once.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
NEG_INF = f32(-math.inf)


class Call(NamedTuple):
    """The arguments of the kernel."""

    pointers: Any
    strides: Any
    sizes: Any
    factors: Any


class State(NamedTuple):
    """The online softmax of a thread's two rows: local arrays of two."""

    m: Any  # running maximum
    l: Any  # running sum
    alpha: Any  # what the output so far is multiplied by


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


@functools.cache
def make_tile_range(block_q: int, block_k: int, group: int, band: bool) -> Any:
    """tile_range(first, rows, keys, diagonal, left, right).

    The keys that the `block_q` packed rows from `first` on attend to.

    Returns the first tile of keys that any of them attends to and the end of these tiles, then the
    first key that all of them attend to and the end of those.
    """

    @device_function
    def all_keys(first, rows, keys, diagonal, left, right):
        return i32(0), i32((keys + block_k - 1) // block_k), i32(0), i32(keys)

    @device_function
    def a_band(first, rows, keys, diagonal, left, right):
        low = i32(first // group + diagonal)
        high = i32((min(first + block_q, rows) - 1) // group + diagonal)
        end = min(
            i32((keys + block_k - 1) // block_k),
            i32((max(high + right + 1, 0) + block_k - 1) // block_k),
        )
        return (
            i32(max(low - left, 0) // block_k),
            i32(end),
            i32(max(high - left, 0)),
            i32(min(keys, low + right + 1)),
        )

    return a_band if band else all_keys


@functools.cache
def make_find_block(rows: int, last_first: bool = False, folded: bool = False) -> Any:
    """find_block(total): this block's first row of `total`, its head and its batch entry.

    A block has `rows` rows. The grid is tiles of rows, heads, batch entries; where these are more
    than its last axis takes, it is `folded`: tiles of rows of one batch entry after the other,
    heads (`Launch.blocks`). That is code of its own: what a division gives takes a register, and a
    block's number none.

    With `last_first`, for a band, the last rows, which attend to most keys when causal, start
    first: the short ones fill the end of the launch.
    """

    @device_function
    def find_block(total):
        tile = (
            u32(u32(cuda.gridDim.x) - u32(1) - u32(cuda.blockIdx.x))
            if last_first
            else u32(cuda.blockIdx.x)
        )
        return i32(tile * u32(rows)), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)

    @device_function
    def find_folded(total):
        tiles = u32(u32(total + rows - 1) // u32(rows))
        batch = ptx.udiv(u32(cuda.blockIdx.x), tiles)
        tile = u32(u32(cuda.blockIdx.x) - batch * tiles)
        if last_first:
            tile = u32(tiles - u32(1) - tile)
        return i32(tile * u32(rows)), i32(cuda.blockIdx.y), i32(batch)

    return find_folded if folded else find_block


@device_function
def quad_max(x):
    """Largest over the four lanes that hold one row of an accumulator."""
    x = ptx.fmax(x, ptx.shuffle_xor(x, u32(1)))
    return ptx.fmax(x, ptx.shuffle_xor(x, u32(2)))


@device_function
def quad_sum(x):
    x = x + ptx.shuffle_xor(x, u32(1))
    return x + ptx.shuffle_xor(x, u32(2))


@device_function
def warp_max(x):
    for n in range(5):
        x = ptx.fmax(x, ptx.shuffle_xor(x, u32(1 << n)))
    return x


@device_function
def warp_sum(x):
    for n in range(5):
        x += ptx.shuffle_xor(x, u32(1 << n))
    return x


@functools.cache
def make_softmax(key_tiles: int):
    """One step of the online softmax on a fragment of scores.

    m, l and alpha hold one value for each of a thread's two rows.
    """

    @device_function
    def softmax(s, m, l, alpha, scale):
        for r in range(2):
            x = m[r]
            for n in range(key_tiles):
                x = ptx.fmax(x, ptx.fmax(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]))
            x = quad_max(x)
            safe = f32(0) if x == NEG_INF else x * scale
            alpha[r] = ptx.ex2(m[r] * scale - safe)
            m[r] = x
            total = l[r] * alpha[r]
            for n in range(key_tiles):
                s[4 * n + 2 * r] = ptx.ex2(ptx.fma(s[4 * n + 2 * r], scale, -safe))
                s[4 * n + 2 * r + 1] = ptx.ex2(ptx.fma(s[4 * n + 2 * r + 1], scale, -safe))
                total += s[4 * n + 2 * r] + s[4 * n + 2 * r + 1]
            l[r] = total

    return softmax


@functools.cache
def make_rescale(value_tiles: int) -> Any:
    """rescale(o, alpha): the outputs of a thread's two rows, each times its row's factor."""

    @device_function
    def rescale(o, alpha):
        for n in range(value_tiles):
            for e in range(4):
                o[4 * n + e] *= alpha[e >> 1]

    return rescale
