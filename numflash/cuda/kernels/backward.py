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
    def find_other(lane):
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

    def backward(pointers, strides, sizes, factors):
        a, b, stats = pointers[0], pointers[1], pointers[6]
        a_batch, a_head, a_step, b_batch, b_head, b_step = strides[:6]
        _, _, d_left, dv_left, heads, _, _, stat_rows = sizes
        call = Call(pointers, strides, sizes, factors)
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        sa = ptx.shared_address(shared)
        sb = sa + u32(a_size)
        sc = sb + u32(b_size)
        se = sc + u32(stages * c_size)
        st = se + u32(stages * e_size)
        first, block = find_rows(pointers[7], pointers[8], sizes)
        head, batch, own_left, other_left = (
            block.head,
            block.batch,
            block.own_left,
            block.other_left,
        )
        head_of_other = i32(head * group) if of_keys else i32(head // group)  # the first one
        first_tile, tiles, whole_low, whole_high = find_columns(block, first)
        row0 = i32(first + warp * 16 + (lane >> 2))  # of the two that this thread holds, 8 apart
        statistics = find_statistics(stats, block, row0, heads, stat_rows)

        a = a + u64(batch * a_batch + head * a_head) + u64(first) * u64(a_step)
        load_a(sa, a, a_step, own_left - first, d_left, thread)
        if want_a:
            b = b + u64(batch * b_batch + head * b_head) + u64(first) * u64(b_step)
            load_b(sb, b, b_step, own_left - first, dv_left, thread)
        tile, other_head = first_tile, i32(0) if first_tile < tiles else i32(heads_of_other)
        if not turing:
            if other_head < heads_of_other:
                start = i32(tile * columns)
                bring(sc, i32(0), call, start, other_left, head_of_other, batch, thread)
            commit()
            wait_all()
        cuda.syncthreads()

        af = cuda.local.array(n_af, u32)
        bf = cuda.local.array(n_bf, u32)
        s = cuda.local.array(n_s, f32)  # scores, then weights: 16 x chunk per warp
        g = cuda.local.array(n_s, f32)  # gradient of the weights, then of the scores
        sum_a = cuda.local.array(n_a, f32)
        sum_b = cuda.local.array(n_b, f32)
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        for i in range(n_a):
            sum_a[i] = f32(0)
        for i in range(n_b):
            sum_b[i] = f32(0)
        own = i32(warp * 16 + (lane & 15))
        a_at, a_chunk = sa + u32(own * d_bytes), u32((lane >> 4) ^ ((own >> shift_a) & xor_a))
        b_at, b_chunk = (
            (a_at, a_chunk)
            if alike
            else (sb + u32(own * dv_bytes), u32((lane >> 4) ^ ((own >> shift_b) & xor_b)))
        )
        other = find_other(lane)
        for step in range(a_steps):
            read_a(af, step * 4, a_at, a_chunk, 2 * step, 0)
        if want_a:
            for step in range(b_steps):
                read_b(bf, step * 4, b_at, b_chunk, 2 * step, to_b if alike else 0)

        stage = i32(0)
        while other_head < heads_of_other:
            start = i32(tile * columns)
            query_head = i32(head * group + other_head) if of_keys else head
            # the next tile; after the last one, the first of the next head
            ahead = i32(tile + 1)
            ahead_head = other_head
            if ahead == tiles:
                ahead, ahead_head = first_tile if of_keys else ahead, i32(other_head + 1)
            # what is computed from these is not kept from before the loops: addresses would fill
            # registers
            mover, entry, begin = (
                (ptx.fresh(thread), ptx.fresh(batch), ptx.fresh(head_of_other))
                if has_mask
                else (thread, batch, head_of_other)
            )
            if turing:
                begin = i32(begin + other_head)
                bring(sc, i32(0), call, start, other_left, begin, entry, mover)
                cuda.syncthreads()
            else:
                wait_all()
                # everyone's part of this tile is there, and the last tile is done with
                cuda.syncthreads()
                if ahead_head < heads_of_other:
                    next_start, begin = i32(ahead * columns), i32(begin + ahead_head)
                    bring(sc, i32(stage ^ 1), call, next_start, other_left, begin, entry, mover)
                commit()
            c_tile, e_tile = sc + u32(stage * c_size), se + u32(stage * e_size)
            stat_at = st + u32(stage * stat_size) + u32((lane & 3) * 16)

            # the end is not a constant where there are several parts: unrolled they would not fit
            # into registers
            part = i32(0)
            end = i32(chunk) if columns == chunk else i32(min(columns, other_left - start))
            while part < end:
                c_at = c_tile + u32(part * d_bytes)
                e_at = c_at if alike else e_tile + u32(part * dv_bytes)
                row, quad = (ptx.fresh(row0), ptx.fresh(lane)) if has_mask else (row0, lane)
                scores(s, af, a_at, a_chunk, c_at + u32(other.row * d_bytes), other.c_chunk)
                if want_a:
                    products(g, bf, b_at, b_chunk, e_at + u32(other.row * dv_bytes), other.e_chunk)
                # a warp whose rows attend to nothing here continues; and what a mask needs is not
                # computed before the branch, where all registers hold what the products read
                column = i32(start + part)
                if not has_mask or warp_attends(block, i32(row - (lane >> 2)), column):
                    column0 = i32(column + 2 * (quad & 3))
                    find_bounds(low, high, block, row)
                    at = stat_at + u32(part * 8)
                    weigh(s, g, low, high, block, query_head, statistics, at, row, column0, call)
                    if not has_mask and (start < whole_low or i32(start + columns) > whole_high):
                        clear(s, low, high, column0)
                        clear(g, low, high, column0)
                    if want_b:
                        e_rows = e_at + u32(other.transposed * dv_bytes)
                        add_b(sum_b, s, e_rows, other.e_transposed)
                    if want_a:
                        c_rows = c_at + u32(other.transposed * d_bytes)
                        add_a(sum_a, g, c_rows, other.c_transposed)
                part = i32(part + chunk)
            if turing:
                cuda.syncthreads()
            else:
                stage = i32(stage ^ 1)
            tile, other_head = ahead, ahead_head

        store_sums(sum_a, sum_b, sa, sb, call, block, first, warp, lane)

    return Source(backward, SIGNATURE, threads, layout.shared_bytes)
