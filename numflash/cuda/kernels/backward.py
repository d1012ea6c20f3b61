"""The gradient of attention on tensor cores for float16 and bfloat16 (FlashAttention 2, algorithm
2; Dao 2023), sm_75 to sm_120.

The forward pass saved LSE, one number per row, from which any tile of the weights is computed
again:

    P = exp(S - LSE)    dP = dO.V^T    dS = P * (dP - D), D = rowsum(dO * O)
    dV = P^T.dO         dK = scale * dS^T.Q       dQ = scale * dS.K

Two passes mirror each other, so one kernel serves both. A block owns rows of one side (`a`, `b`)
and iterates over tiles of the other (`c`, `e`), a warp owns 16 of the rows:

    pass       a    b     c    e     s = a.c^T    g = b.e^T    sum_a += dS.c    sum_b += P.e
    keys       K    V     Q    dO    S^T          dP^T         dK               dV
    queries    Q    dO    K    V     S            dP           dQ

Whichever side a warp owns, P and dS are accumulators laid out as the left operand of the next
product, so they never leave registers, and no other warp adds to its sums: no atomics, one
order of summation, equal bits on every run. The price is that S and dP are computed in both passes:
seven products where one pass with atomic additions to dQ needs five.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .backward_band import make_clear, make_find_bounds, make_find_columns, make_find_rows
from .backward_tiles import Layout, make_bring, make_store_sums
from .backward_weights import make_find_statistics, make_weigh
from .blocks import Call
from .products import make_add, make_scores
from .tiles import make_load_tile, make_read, make_waits, swizzle_of

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: a, b, c, e, sum_a, sum_b, statistics, diagonal, key_lengths, mask, slopes
# strides in bytes: batch, head, row of a, b, c, e, sum_a, sum_b; then of the mask: batch, head,
# query, key
# sizes: rows of a, rows of c, d, dv (bytes per row that exist), query heads, left, right, rows of
# statistics per head
# factors: scale * log2(e), scale, softcap * log2(e), 2 / softcap
SIGNATURE = types.void(
    types.UniTuple(u64, 11), types.UniTuple(i64, 22), types.UniTuple(i32, 8), types.UniTuple(f32, 4)
)


class Memory(NamedTuple):
    """Shared addresses: a block's rows of a and b, the first stages of c, e and the statistics."""

    a: Any
    b: Any
    c: Any
    e: Any
    statistics: Any


class Work(NamedTuple):
    """What a warp multiplies: local arrays."""

    a: Any  # fragments of its own rows
    b: Any
    s: Any  # scores, then weights: 16 x chunk
    g: Any  # gradient of the weights, then of the scores
    sum_a: Any
    sum_b: Any


class Own(NamedTuple):
    """Where a lane reads its warp's rows of a and b.

    A row's address, and the place of its first chunk under the swizzle.
    """

    a: Any
    a_chunk: Any
    b: Any
    b_chunk: Any


class Tile(NamedTuple):
    """A tile of the other side."""

    c: Any  # shared addresses
    e: Any
    pairs: Any  # of statistics, this lane's first
    start: Any  # its first row
    query_head: Any


class Other(NamedTuple):
    """Where a lane reads rows of the other side's tiles, as `products` takes them.

    Bytes from the tile's start of c to this lane's row, and the place of its first chunk under the
    swizzle, in c and in e: as rows, and transposed.
    """

    row: Any
    c_chunk: Any
    e_chunk: Any
    transposed: Any
    c_transposed: Any
    e_transposed: Any


def flash_backward(
    gradients: str,
    d: int,
    dv: int,
    rows: int,
    columns: int,
    chunk: int,
    dtype: str = "float16",
    group: int = 1,
    band: bool = False,
    mask: str = "",
    softcap: bool = False,
    alibi: bool = False,
    turing: bool = False,
    folded: bool = False,
) -> Source:
    """The kernel for padded head sizes d and dv.

    Parameters
    ----------
    gradients : "q" (the pass that owns queries), or "kv", "k", "v" (the pass that owns keys, for
        both or one of its sums)
    rows : rows that a block owns, 16 per warp;  columns : rows of the other side per tile
    chunk : columns of a tile whose scores are in registers at a time, a multiple of 16
    group : query heads per key head; the keys' pass processes them in order
    band, mask, softcap, alibi, turing : as in `flash_float`
    """
    threads = rows * 2
    of_keys, want_a, want_b = gradients != "q", gradients != "v", "v" in gradients
    n_a = d // 2 if want_a else 1
    n_b = dv // 2 if want_b else 1
    n_s = chunk // 2
    # the own rows' fragments stay in registers where there is room: with a mask, whose chunks are
    # smaller, there is more of it
    keep = n_a + n_b + (d + dv) // 4 <= (144 if mask else 128)
    n_af, n_bf, a_steps, b_steps = (d // 4, dv // 4, d // 16, dv // 16) if keep else (4, 4, 0, 0)
    d_bytes, dv_bytes = d * 2, dv * 2
    layout = Layout(d, dv, rows, columns, of_keys, turing)
    stages, c_size, e_size, stat_size = layout.stages, layout.c, layout.e, layout.statistics
    a_size, b_size = layout.a, layout.b
    shift_a, xor_a = swizzle_of(d_bytes)
    shift_b, xor_b = swizzle_of(dv_bytes)
    find_rows = make_find_rows(rows, of_keys, band, folded)
    find_columns = make_find_columns(rows, columns, of_keys, band)
    has_mask = bool(mask)
    find_bounds, clear = make_find_bounds(band, has_mask), make_clear(chunk // 8)
    find_statistics = make_find_statistics(of_keys)
    weigh = make_weigh(chunk, of_keys, want_a, mask, softcap, alibi)
    heads_of_other = group if of_keys else 1
    load_a, load_b = (make_load_tile(rows, n, threads, not turing) for n in (d_bytes, dv_bytes))
    bring = make_bring(layout, threads)
    # with equal widths the two tiles of a side are a constant apart, and one address serves both
    alike, to_b, to_e = d == dv, a_size, stages * c_size
    scores, add_a = make_scores(d, chunk, dtype, turing, keep), make_add(d, chunk, dtype, turing)
    products = make_scores(
        dv, chunk, dtype, turing, keep, to_b if alike else 0, to_e if alike else 0
    )
    add_b = make_add(dv, chunk, dtype, turing, to_e if alike else 0)
    read_a, read_b = make_read(d_bytes), make_read(dv_bytes)
    store_sums = make_store_sums(d, dv, dtype, turing, want_a, want_b)
    commit, wait_all, _ = make_waits(not turing)

    @device_function
    def memory_at(base):
        b = base + u32(a_size)
        c = b + u32(b_size)
        e = c + u32(stages * c_size)
        return Memory(base, b, c, e, e + u32(stages * e_size))

    @device_function
    def load_own(memory, call, block, first, thread):
        """Copies the block's rows of a, and of b if dP is wanted."""
        a, b, (d_left, dv_left) = call.pointers[0], call.pointers[1], call.sizes[2:4]
        a_batch, a_head, a_step, b_batch, b_head, b_step = call.strides[:6]
        a = a + u64(block.batch * a_batch + block.head * a_head) + u64(first) * u64(a_step)
        load_a(memory.a, a, a_step, block.own_left - first, d_left, thread)
        if want_a:
            b = b + u64(block.batch * b_batch + block.head * b_head) + u64(first) * u64(b_step)
            load_b(memory.b, b, b_step, block.own_left - first, dv_left, thread)

    @device_function
    def find_own(memory, lane, warp):
        """Where this lane reads its warp's rows."""
        row = i32(warp * 16 + (lane & 15))
        a, a_chunk = memory.a + u32(row * d_bytes), u32((lane >> 4) ^ ((row >> shift_a) & xor_a))
        b, b_chunk = (
            (a, a_chunk)
            if alike
            else (memory.b + u32(row * dv_bytes), u32((lane >> 4) ^ ((row >> shift_b) & xor_b)))
        )
        return Own(a, a_chunk, b, b_chunk)

    @device_function
    def begin(work, own):
        """Sums of 0; the fragments of the warp's rows that are to stay in registers."""
        for i in range(n_a):
            work.sum_a[i] = f32(0)
        for i in range(n_b):
            work.sum_b[i] = f32(0)
        for step in range(a_steps):
            read_a(work.a, step * 4, own.a, own.a_chunk, 2 * step, 0)
        if want_a:
            for step in range(b_steps):
                read_b(work.b, step * 4, own.b, own.b_chunk, 2 * step, to_b if alike else 0)

    @device_function
    def find_other(lane):
        """Where this lane reads rows of any tile of the other side."""
        row = ((lane >> 4) << 3) + (lane & 7)
        transposed = lane & 15
        return Other(
            row,
            u32(((lane >> 3) & 1) ^ ((row >> shift_a) & xor_a)),
            u32(((lane >> 3) & 1) ^ ((row >> shift_b) & xor_b)),
            transposed,
            u32((lane >> 4) ^ ((transposed >> shift_a) & xor_a)),
            u32((lane >> 4) ^ ((transposed >> shift_b) & xor_b)),
        )

    @device_function
    def warp_attends(block, first, column):
        """Whether any of the warp's rows from `first` on attends to a column of a chunk."""
        found = first < block.own_left
        if band:
            found = (
                found
                and i32(column + chunk + block.before) > i32(first + block.offset)
                and (column <= i32(first + 15 + block.offset + block.after))
            )
        return found

    @device_function
    def bring_first(memory, call, block, start, first_head, some, thread):
        """The first tile, if there is `some`, with the block's rows; sm_75 brings it when it is used."""
        if not turing:
            if some:
                bring(
                    memory.c, i32(0), call, start, block.other_left, first_head, block.batch, thread
                )
            commit()
            wait_all()
        cuda.syncthreads()

    @device_function
    def bring_next(memory, stage, call, block, first_head, now, then, thread):
        """Waits until a tile is there, and begins to copy the next one; sm_75 copies the tile itself.

        first_head : of the other side;  now, then : of either tile its first row and its head, from
        `first_head` on
        """
        # what is computed from these is not kept from before the loops: addresses would fill registers
        mover, batch, head = (
            (ptx.fresh(thread), ptx.fresh(block.batch), ptx.fresh(first_head))
            if has_mask
            else (thread, block.batch, first_head)
        )
        left = block.other_left
        if turing:
            start, other_head = now
            bring(memory.c, i32(0), call, start, left, i32(head + other_head), batch, mover)
            cuda.syncthreads()
        else:
            start, other_head = then
            wait_all()
            # everyone's part of this tile is there, and the last tile is done with
            cuda.syncthreads()
            if other_head < heads_of_other:
                head = i32(head + other_head)
                bring(memory.c, i32(stage ^ 1), call, start, left, head, batch, mover)
            commit()

    @device_function
    def find_weights(work, block, tile, part, whole, row, quad, statistics, call):
        """P and dS of a chunk, from S and dP: 0 where a row does not attend to a column.

        part : the chunk's first row in its tile;  whole : the columns that all rows attend to;  row,
        quad : the thread's first row, and its lane
        """
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        column0, (whole_low, whole_high) = i32(i32(tile.start + part) + 2 * (quad & 3)), whole
        find_bounds(low, high, block, row)
        pairs = tile.pairs + u32(part * 8)
        weigh(
            work.s, work.g, low, high, block, tile.query_head, statistics, pairs, row, column0, call
        )
        if not has_mask and (tile.start < whole_low or i32(tile.start + columns) > whole_high):
            clear(work.s, low, high, column0)
            clear(work.g, low, high, column0)

    @device_function
    def add_chunk(work, own, other, block, tile, part, whole, row0, lane, statistics, call):
        """A chunk of a tile: S and dP of the warp's rows, P and dS of them, and these to the sums."""
        c_at = tile.c + u32(part * d_bytes)
        e_at = c_at if alike else tile.e + u32(part * dv_bytes)
        row, quad = (ptx.fresh(row0), ptx.fresh(lane)) if has_mask else (row0, lane)
        c_rows, e_rows = c_at + u32(other.row * d_bytes), e_at + u32(other.row * dv_bytes)
        scores(work.s, work.a, own.a, own.a_chunk, c_rows, other.c_chunk)
        if want_a:
            products(work.g, work.b, own.b, own.b_chunk, e_rows, other.e_chunk)
        # a warp whose rows attend to nothing here continues; and what a mask needs is not computed
        # before the branch, where all registers hold what the products read
        column = i32(tile.start + part)
        if not has_mask or warp_attends(block, i32(row - (lane >> 2)), column):
            find_weights(work, block, tile, part, whole, row, quad, statistics, call)
            if want_b:
                e_rows = e_at + u32(other.transposed * dv_bytes)
                add_b(work.sum_b, work.s, e_rows, other.e_transposed)
            if want_a:
                c_rows = c_at + u32(other.transposed * d_bytes)
                add_a(work.sum_a, work.g, c_rows, other.c_transposed)

    def backward(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        memory = memory_at(ptx.shared_address(shared))
        first, block = find_rows(pointers[7], pointers[8], sizes)
        head, other_left = block.head, block.other_left
        head_of_other = i32(head * group) if of_keys else i32(head // group)  # the first one
        first_tile, tiles, whole_low, whole_high = find_columns(block, first)
        row0 = i32(first + warp * 16 + (lane >> 2))  # of the two that this thread holds, 8 apart
        statistics = find_statistics(pointers[6], block, row0, sizes[4], sizes[7])
        load_own(memory, call, block, first, thread)
        tile, other_head = first_tile, i32(0) if first_tile < tiles else i32(heads_of_other)
        some = other_head < heads_of_other
        bring_first(memory, call, block, i32(tile * columns), head_of_other, some, thread)

        work = Work(
            cuda.local.array(n_af, u32),
            cuda.local.array(n_bf, u32),
            cuda.local.array(n_s, f32),
            cuda.local.array(n_s, f32),
            cuda.local.array(n_a, f32),
            cuda.local.array(n_b, f32),
        )
        own, other = find_own(memory, lane, warp), find_other(lane)
        begin(work, own)
        stage = i32(0)
        while other_head < heads_of_other:
            start = i32(tile * columns)
            query_head = i32(head * group + other_head) if of_keys else head
            # the next tile; after the last one, the first of the next head
            ahead = i32(tile + 1)
            ahead_head = other_head
            if ahead == tiles:
                ahead, ahead_head = first_tile if of_keys else ahead, i32(other_head + 1)
            now, then = (start, other_head), (i32(ahead * columns), ahead_head)
            bring_next(memory, stage, call, block, head_of_other, now, then, thread)
            here = Tile(
                memory.c + u32(stage * c_size),
                memory.e + u32(stage * e_size),
                memory.statistics + u32(stage * stat_size) + u32((lane & 3) * 16),
                start,
                query_head,
            )
            # the end is not a constant where there are several parts: unrolled they would not fit
            # into registers
            part, whole = i32(0), (whole_low, whole_high)
            end = i32(chunk) if columns == chunk else i32(min(columns, other_left - start))
            while part < end:
                add_chunk(work, own, other, block, here, part, whole, row0, lane, statistics, call)
                part = i32(part + chunk)
            if turing:
                cuda.syncthreads()
            else:
                stage = i32(stage ^ 1)
            tile, other_head = ahead, ahead_head

        store_sums(work.sum_a, work.sum_b, memory.a, memory.b, call, block, first, warp, lane)

    return Source(backward, SIGNATURE, threads, layout.shared_bytes)
