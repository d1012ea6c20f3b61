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

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .flash_float import LOG2E
from .pieces import (
    NEG_INF,
    make_copy,
    make_load_tile,
    make_read,
    make_row_block,
    make_store_rows,
    swizzle_of,
)
from .products import make_add, make_scores, make_stage
from .scores import tanh_accurate

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: a, b, c, e, sum_a, sum_b, statistics, diagonal, key_lengths, mask, slopes
# strides in bytes: batch, head, row of a, b, c, e, sum_a, sum_b; then of the mask: batch, head,
# query, key
# sizes: rows of a, rows of c, d, dv (bytes per row that exist), query heads, left, right, rows of
# statistics per head
# factors: scale * log2(e), scale, softcap * log2(e)
SIGNATURE = types.void(
    types.UniTuple(u64, 11), types.UniTuple(i64, 22), types.UniTuple(i32, 8), types.UniTuple(f32, 3)
)


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
    tiles_of_8 = chunk // 8
    # the own rows' fragments stay in registers where there is room: with a mask, whose chunks are
    # smaller, there is more of it
    keep = n_a + n_b + (d + dv) // 4 <= (144 if mask else 128)
    n_af, n_bf, a_steps, b_steps = (d // 4, dv // 4, d // 16, dv // 16) if keep else (4, 4, 0, 0)
    d_bytes, dv_bytes, stages = d * 2, dv * 2, 1 if turing else 2
    shift_a, xor_a = swizzle_of(d_bytes)
    shift_b, xor_b = swizzle_of(dv_bytes)
    a_size = rows * d_bytes
    b_size = rows * dv_bytes
    c_size = columns * d_bytes
    e_size = columns * dv_bytes
    row_block = make_row_block(band and not of_keys)  # the first keys are seen by most queries
    stat_size = columns * 8 if of_keys else 0  # (LSE, D) of a tile's queries
    transform = softcap or alibi or mask == "float"
    has_mask = bool(mask)
    float_mask = mask == "float"
    heads_of_other = group if of_keys else 1
    load_a, load_b = (make_load_tile(rows, n, threads, not turing) for n in (d_bytes, dv_bytes))
    load_c, load_e = (make_load_tile(columns, n, threads, not turing) for n in (d_bytes, dv_bytes))
    # with equal widths the two tiles of a side are a constant apart, and one address serves both
    alike, to_b, to_e = d == dv, a_size, stages * c_size
    scores, add_a = make_scores(d, chunk, dtype, turing, keep), make_add(d, chunk, dtype, turing)
    products = make_scores(
        dv, chunk, dtype, turing, keep, to_b if alike else 0, to_e if alike else 0
    )
    add_b = make_add(dv, chunk, dtype, turing, to_e if alike else 0)
    read_a, read_b = make_read(d_bytes), make_read(dv_bytes)
    stage_a, stage_b = (make_stage(n, dtype, turing) for n in (d, dv))
    store_a, store_b = (make_store_rows(n, 1) for n in (d_bytes, dv_bytes))
    copy, wait_all = make_copy(not turing), ptx.cp_async_wait[0]

    @device_function
    def move(sc, stage, pointers, strides, sizes, start, other_left, head, batch, thread):
        """The other side's tile from row `start` of a head on, with the statistics of its queries,
        to a stage of shared memory.
        """
        _, _, c, e, _, _, stats, _, _, _, _ = pointers
        _, _, d_left, dv_left, heads, _, _, stat_rows = sizes
        load_c(
            sc + u32(stage * c_size),
            c + u64(batch * strides[6] + head * strides[7] + start * strides[8]),
            strides[8],
            i32(other_left - start),
            d_left,
            thread,
        )
        load_e(
            sc + u32(stages * c_size + stage * e_size),
            e + u64(batch * strides[9] + head * strides[10] + start * strides[11]),
            strides[11],
            i32(other_left - start),
            dv_left,
            thread,
        )
        if of_keys and thread < columns // 2:
            copy(
                sc + u32(stages * (c_size + e_size) + stage * stat_size + thread * 16),
                0,
                stats + u64(((batch * heads + head) * stat_rows + start) * 8 + thread * 16),
                True,
            )

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def backward(pointers, strides, sizes, factors):
        a, b, _, _, out_a, out_b, stats, diagonals, lengths, masks, slopes = pointers
        own_rows, other_rows, d_left, dv_left, heads, left, right, stat_rows = sizes
        scale_log2, scale, cap = factors
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = i32(thread & 31), i32(thread >> 5)
        head, batch = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        sa = ptx.shared_address(shared)
        sb = sa + u32(a_size)
        sc = sb + u32(b_size)
        se = sc + u32(stages * c_size)
        st = se + u32(stages * e_size)
        a = a + u64(batch * strides[0] + head * strides[1])
        b = b + u64(batch * strides[3] + head * strides[4])
        row_step, column_step = (
            (strides[21], strides[20]) if of_keys else (strides[20], strides[21])
        )

        # row r attends to the columns from r + offset - before to r + offset + after
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        own_left, other_left = (keys, other_rows) if of_keys else (own_rows, keys)
        offset, before, after = (
            (i32(-diagonal), right, left) if of_keys else (diagonal, left, right)
        )
        head_of_other = i32(head * group) if of_keys else i32(head // group)  # the first one
        first = i32(row_block() * rows)  # without the cast this is int64: two registers
        first_tile, tiles = i32(0), i32((other_left + columns - 1) // columns)
        # every row attends to columns whole_low <= i < whole_high
        whole_low = i32(0)
        whole_high = other_left
        if band:
            low, high = i32(first + offset), i32(min(first + rows, own_left) - 1 + offset)
            first_tile = i32(max(low - before, 0) // columns)
            tiles = i32(min(tiles, (max(high + after + 1, 0) + columns - 1) // columns))
            whole_low = i32(max(high - before, 0))
            whole_high = i32(min(other_left, low + after + 1))
        if of_keys and first >= own_left:
            tiles = first_tile

        row0 = i32(first + warp * 16 + (lane >> 2))  # of the two that this thread holds, 8 apart
        lse0, lse1, delta0, delta1 = f32(0), f32(0), f32(0), f32(0)
        if not of_keys:  # the statistics' rows are padded to whole blocks
            at = stats + u64(((batch * heads + head) * stat_rows + row0) * 8)
            lse0, delta0 = ptx.load_global_f32(at), ptx.load_global_f32(at + u64(4))
            lse1, delta1 = ptx.load_global_f32(at + u64(64)), ptx.load_global_f32(at + u64(68))

        load_a(sa, a + u64(first) * u64(strides[2]), strides[2], own_left - first, d_left, thread)
        if want_a:
            load_b(
                sb, b + u64(first) * u64(strides[5]), strides[5], own_left - first, dv_left, thread
            )
        tile, other_head = first_tile, i32(0) if first_tile < tiles else i32(heads_of_other)
        if not turing:
            if other_head < heads_of_other:
                move(
                    sc,
                    i32(0),
                    pointers,
                    strides,
                    sizes,
                    i32(tile * columns),
                    other_left,
                    head_of_other,
                    batch,
                    thread,
                )
            ptx.cp_async_commit()
            wait_all()
        cuda.syncthreads()

        af = cuda.local.array(n_af, u32)
        bf = cuda.local.array(n_bf, u32)
        s = cuda.local.array(n_s, f32)  # scores, then weights: 16 x chunk per warp
        g = cuda.local.array(n_s, f32)  # gradient of the weights, then of the scores
        sum_a = cuda.local.array(n_a, f32)
        sum_b = cuda.local.array(n_b, f32)
        four = cuda.local.array(4, u32)
        for i in range(n_a):
            sum_a[i] = f32(0)
        for i in range(n_b):
            sum_b[i] = f32(0)
        # addresses of this lane, as `products` takes them: own rows, other rows, other rows turned
        own = i32(warp * 16 + (lane & 15))
        a_at, a_chunk = sa + u32(own * d_bytes), u32((lane >> 4) ^ ((own >> shift_a) & xor_a))
        b_at, b_chunk = (
            (a_at, a_chunk)
            if alike
            else (sb + u32(own * dv_bytes), u32((lane >> 4) ^ ((own >> shift_b) & xor_b)))
        )
        other = ((lane >> 4) << 3) + (lane & 7)
        c_chunk = u32(((lane >> 3) & 1) ^ ((other >> shift_a) & xor_a))
        e_chunk = u32(((lane >> 3) & 1) ^ ((other >> shift_b) & xor_b))
        turned = lane & 15
        c_turned = u32((lane >> 4) ^ ((turned >> shift_a) & xor_a))
        e_turned = u32((lane >> 4) ^ ((turned >> shift_b) & xor_b))
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
                move(
                    sc,
                    i32(0),
                    pointers,
                    strides,
                    sizes,
                    start,
                    other_left,
                    i32(begin + other_head),
                    entry,
                    mover,
                )
                cuda.syncthreads()
            else:
                wait_all()
                # everyone's part of this tile is there, and the last tile is done with
                cuda.syncthreads()
                if ahead_head < heads_of_other:
                    move(
                        sc,
                        i32(stage ^ 1),
                        pointers,
                        strides,
                        sizes,
                        i32(ahead * columns),
                        other_left,
                        i32(begin + ahead_head),
                        entry,
                        mover,
                    )
                ptx.cp_async_commit()
            c_tile, e_tile = sc + u32(stage * c_size), se + u32(stage * e_size)
            stat_at = st + u32(stage * stat_size) + u32((lane & 3) * 16)

            # the end is not a constant where there are several parts: unrolled they would not fit
            # into registers
            part = i32(0)
            end = i32(chunk) if columns == chunk else i32(min(columns, other_left - start))
            while part < end:
                c_at = c_tile + u32(part * d_bytes)
                e_at = c_at if alike else e_tile + u32(part * dv_bytes)
                mask_row, quad = (ptx.fresh(row0), ptx.fresh(lane)) if has_mask else (row0, lane)
                scores(s, af, a_at, a_chunk, c_at + u32(other * d_bytes), c_chunk)
                if want_a:
                    products(g, bf, b_at, b_chunk, e_at + u32(other * dv_bytes), e_chunk)
                # a warp whose rows attend to nothing here continues; and what a mask needs is not
                # computed before the branch, where all registers hold what the products read
                attends = True
                if has_mask:
                    lead = i32(mask_row - (lane >> 2))  # the warp's first row
                    attends = lead < own_left
                    if band:
                        attends = (
                            attends
                            and i32(start + part + chunk + before) > i32(lead + offset)
                            and (i32(start + part) <= i32(lead + 15 + offset + after))
                        )
                if attends:
                    column0 = i32(start + part + 2 * (quad & 3))
                    low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
                    for r in range(2):
                        row = i32(mask_row + 8 * r)
                        low[r], high[r] = i32(0), other_left
                        if band:
                            low[r], high[r] = (
                                i32(row + offset - before),
                                i32(min(other_left, i32(row + offset + after + 1))),
                            )
                        if has_mask and row >= own_left:
                            high[r] = i32(0)
                    if has_mask:
                        upper = ptx.fresh_address(
                            masks
                            + u64(
                                ptx.fresh(batch) * strides[18]
                                + ptx.fresh(query_head) * strides[19]
                                + mask_row * row_step
                                + column0 * column_step
                            )
                        )
                        lower = ptx.fresh_address(upper + u64(8 * row_step))
                    if alibi:
                        steep = (
                            ptx.load_global_f32(slopes + u64((batch * heads + query_head) * 4))
                            * LOG2E
                        )
                    for n in range(tiles_of_8):
                        if of_keys:
                            ptx.load_shared_v4(four, 0, stat_at + u32((part + 8 * n) * 8))
                        for i in range(4):
                            if of_keys:
                                lse = ptx.from_bits(four[2 if i & 1 else 0])
                                delta = ptx.from_bits(four[3 if i & 1 else 1])
                            else:
                                lse, delta = lse1 if i > 1 else lse0, delta1 if i > 1 else delta0
                            row = i32(mask_row + (8 if i > 1 else 0))
                            column = i32(column0 + 8 * n + (i & 1))
                            query, key = (column, row) if of_keys else (row, column)
                            x, slope, seen = s[4 * n + i], f32(1), True
                            if transform:
                                x = x * scale_log2  # in units of log2
                                if softcap:
                                    t = tanh_accurate(ptx.div(x, cap))
                                    x, slope = cap * t, f32(1) - t * t
                                if alibi:
                                    x -= steep * ptx.to_float(i32(abs(query + diagonal - key)))
                            if has_mask:
                                seen = column >= low[i >> 1] and column < high[i >> 1]
                                if seen:
                                    at = (lower if i > 1 else upper) + u64(
                                        (8 * n + (i & 1)) * column_step
                                    )
                                    if float_mask:
                                        bias = ptx.load_global_f32(at)
                                        seen = bias != NEG_INF
                                        x += bias * LOG2E
                                    else:
                                        seen = ptx.load_global_u8(at) != u32(0)
                            p = ptx.ex2(x - lse if transform else ptx.fma(x, scale_log2, -lse))
                            if want_a:
                                ds = p * (g[4 * n + i] - delta)
                                if softcap:
                                    ds *= slope
                                g[4 * n + i] = ds if seen else f32(0)
                            s[4 * n + i] = p if seen else f32(0)
                    if not has_mask and (start < whole_low or i32(start + columns) > whole_high):
                        for n in range(tiles_of_8):
                            for i in range(4):
                                column = i32(column0 + 8 * n + (i & 1))
                                if column < low[i >> 1] or column >= high[i >> 1]:
                                    s[4 * n + i] = f32(0)
                                    g[4 * n + i] = f32(0)
                    if want_b:
                        add_b(sum_b, s, e_at + u32(turned * dv_bytes), e_turned)
                    if want_a:
                        add_a(sum_a, g, c_at + u32(turned * d_bytes), c_turned)
                part = i32(part + chunk)
            if turing:
                cuda.syncthreads()
            else:
                stage = i32(stage ^ 1)
            tile, other_head = ahead, ahead_head

        # through this warp's own part of its tile, so that memory is written 16 bytes at a time
        cuda.syncwarp()
        live0 = f32(1) if row0 < own_left else f32(0)
        live1 = f32(1) if row0 + 8 < own_left else f32(0)
        if want_a:
            mine = sa + u32(warp * 16 * d_bytes)
            stage_a(sum_a, mine, scale * live0, scale * live1, lane)
            cuda.syncwarp()
            store_a(
                mine,
                out_a + u64(batch * strides[12] + head * strides[13]),
                i64(0),
                strides[14],
                first + warp * 16,
                own_rows,
                d_left,
                lane,
            )
        if want_b:
            mine = sb + u32(warp * 16 * dv_bytes)
            stage_b(sum_b, mine, live0, live1, lane)
            cuda.syncwarp()
            store_b(
                mine,
                out_b + u64(batch * strides[15] + head * strides[16]),
                i64(0),
                strides[17],
                first + warp * 16,
                own_rows,
                dv_left,
                lane,
            )

    return Source(
        backward, SIGNATURE, threads, a_size + b_size + stages * (c_size + e_size + stat_size)
    )
