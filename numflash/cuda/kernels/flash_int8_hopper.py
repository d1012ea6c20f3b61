"""INT8 attention for sm_90a.

The integer pipeline of `flash_int8` with TMA, wgmma on bytes and specialised warps.

One thread of the first warpgroup brings blocks of 128 keys, K with V and K's scales, by TMA into a
ring; the other warpgroups own 64 query rows each. Their softmax is the longest part (eleven
instructions per score), and products are waited for, so there are three where 160 registers a
thread are enough: while one waits, the schedulers still have warps of two others. Where they are
not, two have 240 registers. Up to 64 channels, and with two up to 128, Q . K^T of the next block
runs beside the scaling of this block's sums.

wgmma reads bytes with k along memory only (K-major), for both operands: K is stored so; V is stored
transposed (channels x keys) and permuted once, as for `mma.sync`: transposed here, it would cross
registers for every query tile. P stays in registers, where the permutation of the keys makes the
accumulator of Q . K^T the operand of P . V (`flash_int8.permuted_keys`; a warp of wgmma holds its
16 rows as mma.m16n8k32 does). P is unsigned: wgmma .s32.u8.s8.

Heads that share keys are packed into the rows, as many as a power of two divides the group: a map
of rank 5 brings them so.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...numerics.fixedpoint import FIRST_KEYS
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_find_block, make_tile_range
from .hopper import DESCRIPTOR, FEWER, MORE, PANEL_BYTES, descriptor, make_issue_scores
from .int8_first import make_begin_rows
from .int8_ring import Layout, make_bring, make_ring
from .int8_rows import (
    ROW_BYTES,
    Block,
    Int8Options,
    OptionData,
    Outputs,
    Sums,
    make_describe_rows,
    make_write_rows,
)
from .int8_softmax import (
    Rows,
    make_add_weights,
    make_find_shares,
    make_log2_scores,
    make_shrink,
    make_sum_weights,
)
from .int8_weights import make_weigh

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: tensor maps of q, k, v, ck (4 x 128 bytes), out, m, l, cq, value scale, diagonal,
# key_lengths, mask, bias, slopes, shift, q, and of the first keys: planes (8 x d), scales, values
# (4 x dv)
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, channels of v and out (a multiple of 4), query heads, left, right, bytes per row
# of q
# factors: softcap in Q8.8
SIGNATURE = types.void(
    types.UniTuple(u64, 16), types.UniTuple(i64, 8), types.UniTuple(i32, 6), types.UniTuple(f32, 1)
)


class Fragments(NamedTuple):
    """A thread's registers: local arrays."""

    s: Any  # scores
    o: Any  # sums of the outputs
    p: Any  # weights, four bytes each
    acc: Any  # P . V of some channels


def flash_int8_hopper(
    d: int,
    dv: int,
    block_q: int,
    group: int = 1,
    packed: int = 1,
    first_keys: int = FIRST_KEYS,
    folded: bool = False,
    **options: Any,
) -> Source:
    """The kernel for padded head sizes d and dv (multiples of 32).

    block_q : 128 rows or 192, 64 for each warpgroup that computes

    `packed`, a power of two, divides `group`; `first_keys` is `Problem.first_keys`, `options` are
    those of `Int8Options`.
    """
    chosen = Int8Options(**options)
    consumers = block_q // 64
    block_k, more_registers = KEY_BLOCK, MORE[consumers]
    k_steps, key_tiles, value_tiles, p_steps = d // 32, block_k // 8, dv // 8, block_k // 32
    # of one product P . V: its sums are registers, beside the scores
    columns = 32 if dv > 128 or dv % 64 else 64
    parts, n_acc = dv // columns, columns // 2
    n_s, n_o, n_p = block_k // 2, dv // 2, block_k // 8
    # beyond, there are no registers for scores beside sums
    overlap = dv <= (128 if consumers == 2 else 64)
    layout = Layout(d, dv, block_q)
    stages, stage_size, scale_size = layout.stages, layout.stage, layout.stage_scales
    k_size, table_at, turn = layout.k_size, layout.table, stages.bit_length() - 1
    multiply_k, multiply_v = ptx.wgmma(block_k, "int8", False), ptx.wgmma(columns, "int8", True)
    issue_scores = make_issue_scores(multiply_k, k_steps, layout.q_panel, layout.k_panel)
    (ring_at, prepare), bring = make_ring(layout), make_bring(layout, packed)
    fence_s, fence_acc = ptx.register_fence(n_s, i32), ptx.register_fence(n_acc, i32)
    wait_none, wait_one = ptx.wgmma_wait[0], ptx.wgmma_wait[1]
    band = chosen.band
    tile_range, own_range, find_block = (
        make_tile_range(block_q, block_k, packed, band),
        make_tile_range(64, block_k, packed, band),
        make_find_block(block_q, band, folded),
    )
    describe_rows = make_describe_rows(packed, chosen, first_keys)
    begin_rows = make_begin_rows(d, dv, value_tiles, chosen, False, first_keys)
    write_rows = make_write_rows(value_tiles)
    log2_scores = make_log2_scores(key_tiles, chosen)
    weigh, find_shares = make_weigh(key_tiles, "int8"), make_find_shares("int8")
    sum_weights, add_weights = make_sum_weights(n_p, "int8"), make_add_weights("int8")
    shrink = make_shrink(value_tiles)

    @device_function
    def begin_scores(s, dq, n, ring):
        """Waits for the ring's block n and issues its Q . K^T."""
        stage = u32(n & (stages - 1))
        ptx.mbarrier_wait(ring.full + stage * u32(8), u32((n >> turn) & 1))
        fence_s(s, 0)
        ptx.wgmma_fence()
        issue_scores(s, dq, descriptor(DESCRIPTOR, ring.tiles + stage * u32(stage_size)))
        ptx.wgmma_commit()

    @device_function
    def pass_block(n, ring):
        """The ring's block n is none of this warpgroup's."""
        stage = u32(n & (stages - 1)) * u32(8)
        ptx.mbarrier_wait(ring.full + stage, u32((n >> turn) & 1))
        ptx.mbarrier_arrive(ring.empty + stage)

    @device_function
    def soften(f, rows, tile, table, scales, block, given, lane):
        """Weights of the block's scores, and what they make of the rows' state."""
        key = i32(tile * block_k + 2 * (lane & 3))  # the thread's first in the block
        log2_scores(f.s, rows.top, table, key, scales + u32(8 * (lane & 3)), block, given)
        weigh(f.s, f.p, rows.top)
        find_shares(rows.top, rows.m, rows.alpha, rows.share)
        sum_weights(f.p, rows.total)
        add_weights(rows.total, rows.top, rows.l, rows.alpha, rows.share)
        shrink(f.o, rows.alpha)

    @device_function
    def begin_values(f, part, dv_at):
        """Issues P . V of the channels of a part."""
        fence_acc(f.acc, 0)
        ptx.wgmma_fence()
        for step in range(p_steps):
            ahead = u64(2 * step + part * (columns * block_k >> 4))
            multiply_v(f.acc, 0, f.p, 4 * step, dv_at + ahead, i32(step != 0))
        ptx.wgmma_commit()

    @device_function
    def add_values(f, rows, part):
        """Adds the product of a part, which has ended, to its channels."""
        fence_acc(f.acc, 0)
        for i in range(n_acc):
            at, r = part * n_acc + i, (i >> 1) & 1
            f.o[at] = ptx.fma(ptx.to_float(f.acc[i]), rows.share[r], f.o[at])

    def make_add_parts(stop):
        """add_parts(f, rows, dv_at): P . V of the first `stop` parts, one after the other.

        Unrolled here: libNVVM may leave a loop over products in place, and O in memory.
        """
        if stop == 0:
            return device_function(lambda f, rows, dv_at: None)
        add_before = make_add_parts(stop - 1)

        @device_function
        def add_parts(f, rows, dv_at):
            add_before(f, rows, dv_at)
            begin_values(f, stop - 1, dv_at)
            wait_none()
            add_values(f, rows, stop - 1)

        return add_parts

    add_first, add_all = make_add_parts(parts - 1), make_add_parts(parts)

    @device_function
    def find_rows(call):
        """The first of this block's rows, the heads that are packed into them, what they belong to."""
        diagonals, lengths = call.pointers[6:8]
        queries, _, heads, left, right = call.sizes[:5]
        first, pack, batch = find_block(i32(queries * packed))
        kv_head = i32(pack * packed // group)
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        return first, pack, Block(batch, kv_head, heads, queries, keys, diagonal, left, right)

    @device_function
    def begin(call, block, given, first_row, first_head, rows_at, f, rows, lane):
        """m, l and O of the thread's rows after the first keys (`int8_first`).

        The warp's 16 rows from `first_row` on are described at `rows_at`; where the thread's first one
        is.
        """
        q, first_k, first_scale, first_v = call.pointers[12:]
        cq, slopes, shifts = call.pointers[4], call.pointers[10], call.pointers[11]
        describe_rows(rows_at, first_row, first_head, block, (cq, slopes, shifts), lane)
        table = rows_at + u32((lane >> 2) * 16)
        sums, sources = Sums(f.o, rows.m, rows.l), (q, first_k, first_scale, first_v)
        first_sizes = i32(block.heads // group), call.sizes[5]
        begin_rows(sums, table, block, first_sizes, sources, given, lane)
        return table

    @device_function
    def own_tiles(block, own_first, tile):
        """The blocks of keys of the warpgroup's own rows, from `own_first` on: of those from `tile` on
        some may be none of theirs, and all where the rows are beyond the last.
        """
        total = i32(block.queries * packed)
        own, stop, _, _ = own_range(
            own_first, total, block.keys, block.diagonal, block.left, block.right
        )
        if own >= stop or own_first >= block.queries * packed:
            own, stop = tile, tile
        return own, stop

    @device_function
    def pass_blocks(n, tile, end, ring):
        """Passes blocks [tile, end); the number of the next one in the ring, and `end`."""
        while tile < end:
            pass_block(n, ring)
            n = i32(n + 1)
            tile = i32(tile + 1)
        return n, tile

    @device_function
    def attend(f, rows, n, tile, stop, dq, ring, table, block, given, lane):
        """Softmax and both products of the blocks [tile, stop), of which the first is the ring's n.

        Returns the number of the next one in the ring, and `stop`.
        """
        last = i32(stop - int(overlap))
        if overlap and tile < stop:
            begin_scores(f.s, dq, n, ring)
            wait_none()
            fence_s(f.s, 0)
        while tile < last:
            stage = u32(n & (stages - 1))
            dv_at = descriptor(DESCRIPTOR, ring.tiles + stage * u32(stage_size) + u32(k_size))
            if not overlap:
                begin_scores(f.s, dq, n, ring)
                wait_none()
                fence_s(f.s, 0)
            scales = ring.scales + stage * u32(scale_size)
            soften(f, rows, tile, table, scales, block, given, lane)
            add_first(f, rows, dv_at)
            begin_values(f, parts - 1, dv_at)
            n = i32(n + 1)
            tile = i32(tile + 1)
            if overlap:  # the next block's scores beside the last sums of this one
                begin_scores(f.s, dq, n, ring)
                wait_one()
            else:
                wait_none()
            add_values(f, rows, parts - 1)
            ptx.mbarrier_arrive(ring.empty + stage * u32(8))
            if overlap:
                wait_none()
                fence_s(f.s, 0)
        # the last block by itself: with a branch around the next one's scores ptxas would wait for each
        # product
        if overlap and tile < stop:
            stage = u32(n & (stages - 1))
            dv_at = descriptor(DESCRIPTOR, ring.tiles + stage * u32(stage_size) + u32(k_size))
            scales = ring.scales + stage * u32(scale_size)
            soften(f, rows, tile, table, scales, block, given, lane)
            add_all(f, rows, dv_at)
            ptx.mbarrier_arrive(ring.empty + stage * u32(8))
            n = i32(n + 1)
            tile = i32(tile + 1)
        return n, tile

    @device_function
    def write(call, block, f, rows, table, lane):
        """out, m and l of the thread's rows."""
        out, m, l = call.pointers[1:4]
        batch, kv_head, heads, queries = block.batch, block.kv_head, block.heads, block.queries
        kv_heads, channels, scales = i32(heads // group), call.sizes[1], call.pointers[5]
        outputs = Outputs(batch, kv_head, queries, heads, kv_heads, channels, out, m, l, scales)
        write_rows(Sums(f.o, rows.m, rows.l), table, outputs, i32(0), lane)

    def flash(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warpgroup = i32(thread & 31), ptx.uniform(i32(thread >> 7))
        first, pack, block = find_rows(call)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        ring = ring_at(base)
        total = i32(block.queries * packed)
        tile, tiles, _, _ = tile_range(
            first, total, block.keys, block.diagonal, block.left, block.right
        )
        if thread == 0:
            prepare(ring)
        cuda.syncthreads()
        if warpgroup == 0:
            FEWER()
            if thread == 0:
                bring(tile, tiles, first, pack, block.kv_head, block.batch, ring, pointers[0])
        else:
            more_registers()
            f = Fragments(
                cuda.local.array(n_s, i32),
                cuda.local.array(n_o, f32),
                cuda.local.array(n_p, u32),
                cuda.local.array(n_acc, i32),
            )
            rows = Rows(
                cuda.local.array(2, i32),
                cuda.local.array(2, f32),
                cuda.local.array(2, i32),
                cuda.local.array(2, i32),
                cuda.local.array(2, f32),
                cuda.local.array(2, f32),
            )
            given = OptionData(factors[0], pointers[8], pointers[9], strides)
            own_first = i32(
                (warpgroup - 1) * 64
            )  # the warpgroup's rows in the block, then the warp's
            mine = i32(own_first + ((thread >> 5) & 3) * 16)
            rows_at = base + u32(table_at) + u32(mine * ROW_BYTES)
            first_head = i32(pack * packed)
            table = begin(call, block, given, i32(first + mine), first_head, rows_at, f, rows, lane)
            dq = descriptor(DESCRIPTOR, ring.q + u32((warpgroup - 1) * 64 * PANEL_BYTES))
            ptx.mbarrier_wait(ring.full_q, u32(0))
            own, stop = own_tiles(block, i32(first + (warpgroup - 1) * 64), tile)
            n, tile = pass_blocks(i32(0), tile, own, ring)
            n, tile = attend(f, rows, n, tile, stop, dq, ring, table, block, given, lane)
            pass_blocks(n, tile, tiles, ring)
            write(call, block, f, rows, table, lane)

    return Source(flash, SIGNATURE, 128 * (1 + consumers), layout.shared_bytes)
