"""FlashAttention-3 forward for sm_90a (Shah et al. 2024, algorithms 1 and 2).

TMA, wgmma and specialised warps.

Three warpgroups of 128 threads. One thread of the first brings tiles of keys and values by TMA into
a ring of two stages; the other two own 64 query rows each and compute with asynchronous products.
Full and empty mbarriers connect them. With `overlap` the scores of the next tile are multiplied
while the softmax of this one runs (section 3.2 of the paper); with `ping_pong` the two issue their
products in turns (section 3.1).
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from ...tiling import tiling
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper import (
    DESCRIPTOR,
    FEWER,
    MORE,
    PANEL_BYTES,
    THREADS,
    ahead,
    descriptor,
    make_issue_scores,
)
from .pieces import NEG_INF, State, make_row_block, make_softmax, make_tile_range, quad_sum
from .score_functions import known, make_apply, make_tile_list, pointers_of
from .scores import (
    LOG2E,
    Mask,
    Place,
    Rows,
    ScoreOptions,
    join_sink,
    load_slopes,
    make_adjust,
    make_hide,
)

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
LN2 = f32(math.log(2))
BLOCK_Q = tiling("sm_90a", "float16").block_q
OWN, MASK, SLOPES = 8, 5, 6  # pointers before those of the functions; places of two of them
STAGES, PANEL = 2, PANEL_BYTES // 2  # columns of a panel

# pointers: tensor maps of q, k, v (3 x 128 bytes), o, lse, diagonal, key_lengths, mask, slopes,
# sinks strides in bytes: batch, head, row of o; then of the mask: batch, head, query, key sizes:
# queries, bytes per row of o, query heads, left, right;  factors: scale * log2(e), softcap
SIGNATURE = types.void(
    types.UniTuple(u64, OWN), types.UniTuple(i64, 7), types.UniTuple(i32, 5), types.UniTuple(f32, 2)
)


class Block(NamedTuple):
    """What a thread's scores need to know of its rows and of their block, for every tile."""

    lane: Any
    row: Any  # the first of the thread's two
    first_head: Any  # of those that are packed together
    heads: Any
    slope: Any  # ALiBi's, of the two rows
    listed_at: Any
    whole_low: Any  # the keys [whole_low, whole_high) are visible to all rows
    whole_high: Any
    diagonal: Any
    queries: Any
    keys: Any
    left: Any
    right: Any


def flash_hopper(
    d: int,
    dv: int,
    block_k: int,
    dtype: str = "float16",
    group: int = 1,
    packed: int = 1,
    overlap: bool = True,
    ping_pong: bool = False,
    **options: Any,
) -> Source:
    """The kernel for head sizes d and dv, multiples of 64.

    `packed`, a power of two, divides `group`; `options` are those of `ScoreOptions`.

    Row r of the problem is query r // packed of head r % packed of those that are packed together.
    """
    chosen = ScoreOptions(**options)
    band, mask, softcap, alibi, _, sinks, functions, listed = chosen
    key_tiles, value_tiles, k_steps, p_steps = block_k // 8, dv // 8, d // 16, block_k // 16
    n_s, n_o, n_p = block_k // 2, dv // 2, block_k // 4
    d_panels, dv_panels = d // PANEL, dv // PANEL
    q_panel, k_panel = BLOCK_Q * PANEL_BYTES, block_k * PANEL_BYTES  # bytes of one panel of a tile
    q_size, k_size, v_size = d_panels * q_panel, d_panels * k_panel, dv_panels * k_panel
    o_size = dv_panels * q_panel
    first_tile = 1024 + max(q_size, o_size)
    pair = k_size + v_size
    sums_at = first_tile + STAGES * pair  # with `overlap`, 4 bytes for each thread of the consumers
    value_descriptor = DESCRIPTOR | (
        k_panel >> 4 << 16
    )  # values are MN-major: the leading stride spans a panel
    multiply_k, multiply_v = ptx.wgmma(block_k, dtype, False), ptx.wgmma(dv, dtype, True)
    issue_scores = make_issue_scores(multiply_k, k_steps, q_panel, k_panel)
    fence_s, fence_o = ptx.register_fence(n_s), ptx.register_fence(n_o)
    code = known(functions)
    changes, masks = code.changes, code.masks
    scaled = chosen.transforms and not changes  # by `adjust`
    adjusted = scaled or softcap or alibi or bool(mask)
    transform = chosen.transforms or changes
    find_tiles, start_of, is_full = make_tile_list(OWN, listed, block_k)
    softmax, hide, pack = make_softmax(key_tiles), make_hide(key_tiles), ptx.pack[dtype]
    wide = dv > 128  # registers are short: fewer scores at a time, slopes read again for every tile
    part = 2 if wide else 4
    adjust = make_adjust(key_tiles, scaled, softcap, alibi, mask, part)
    change = make_apply(OWN, functions, "score", key_tiles, part)
    hide_by_mask = make_apply(OWN, functions, "mask", key_tiles, part)
    tile_range, row_block = make_tile_range(BLOCK_Q, block_k, packed, band), make_row_block(band)
    wait_none, wait_one = ptx.wgmma_wait[0], ptx.wgmma_wait[1]

    @device_function
    def outputs(o, p, dv_at):
        """Issues O += P . V, 16 keys (two groups of 8 rows of 128 bytes) at a time."""
        for step in range(p_steps):
            multiply_v(o, 0, p, 4 * step, ahead(dv_at, step * 128), i32(1))

    @device_function
    def weights(p, s):
        for n in range(n_p):
            p[n] = pack(s[2 * n], s[2 * n + 1])

    @device_function
    def shrink(o, alpha):
        for n in range(value_tiles):
            for e in range(4):
                o[4 * n + e] *= alpha[e >> 1]

    @device_function
    def begin(s, o, dq, n, full, ring, turn):
        """Waits for the keys of the ring's tile n and issues their scores."""
        stage = u32(n & 1)
        ptx.mbarrier_wait(full + stage * u32(16), u32((n >> 1) & 1))
        if ping_pong:
            ptx.barrier(turn, u32(256))
        fence_s(s, 0)
        fence_o(o, 0)
        ptx.wgmma_fence()
        issue_scores(s, dq, descriptor(DESCRIPTOR, ring + stage * u32(pair)))
        ptx.wgmma_commit()

    @device_function
    def finish(o, p, n, full, ring):
        """Waits for the values of the ring's tile n, and for their product."""
        stage = u32(n & 1)
        ptx.mbarrier_wait(full + stage * u32(16) + u32(8), u32((n >> 1) & 1))
        fence_o(o, 0)
        ptx.wgmma_fence()
        outputs(o, p, descriptor(value_descriptor, ring + stage * u32(pair) + u32(k_size)))
        ptx.wgmma_commit()
        wait_none()
        fence_o(o, 0)

    @device_function
    def describe(query, head, row, first_head):
        """Query and head of the thread's two rows, 8 apart."""
        for r in range(2):
            query[r] = i32((row + 8 * r) // packed)
            head[r] = i32(first_head + (row + 8 * r - query[r] * packed))

    @device_function
    def place_of(block):
        """Where the block's scores are; its batch entry is read anew: no register keeps it."""
        return Place(ptx.block_z(), block.diagonal, block.queries, block.keys)

    @device_function
    def soften(s, state, t, block, factors, pointers, strides):
        """Functions, options and the online softmax on the scores of tile number t."""
        diagonal, keys = block.diagonal, block.keys
        mask_at, slopes = pointers[MASK], pointers[SLOPES]
        start = start_of(block.listed_at, t)
        here = i32(start + 2 * (block.lane & 3))
        query, head = cuda.local.array(2, i32), cuda.local.array(2, i32)
        # not in registers from tile to tile
        describe(query, head, ptx.fresh(block.row), block.first_head)
        if alibi and wide:
            load_slopes(block.slope, slopes, ptx.block_z() * block.heads, head)
        held = Rows(query, head, block.slope)
        change(s, here, held, place_of(block), factors[0] * LN2, pointers)
        if adjusted:
            adjust(s, here, held, place_of(block), factors, Mask(mask_at, strides[3:]))
        if masks and not is_full(block.listed_at, t):
            hide_by_mask(s, here, held, place_of(block), f32(1), pointers)
        if start < block.whole_low or start + block_k > block.whole_high:
            low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
            for r in range(2):
                low[r], high[r] = i32(0), keys
                if band:
                    middle = i32(query[r] + diagonal)
                    low[r], high[r] = (
                        i32(middle - block.left),
                        i32(min(keys, i32(middle + block.right + 1))),
                    )
            hide(s, here, low, high)
        softmax(s, state.m, state.l, state.alpha, f32(1) if transform else factors[0])

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def flash(pointers, strides, sizes, factors):
        maps, o_out, lse_out, diagonals, lengths, _, slopes, sinks_at = pointers[:OWN]
        queries, dv_left, heads, left, right = sizes
        scale = f32(1) if transform else factors[0]
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warpgroup = thread & 31, ptx.uniform(thread >> 7)
        first_head, batch = i32(cuda.blockIdx.y) * packed, i32(cuda.blockIdx.z)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        # full and empty: 16 bytes per stage, keys then values
        full_q = base
        full = base + u32(16)
        empty = base + u32(64)
        sq, ring = base + u32(1024), base + u32(first_tile)
        first = row_block() * BLOCK_Q
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles, whole_low, whole_high = tile_range(
            first, queries * packed, keys, diagonal, left, right
        )
        listed_at, tile, tiles = find_tiles(
            pointers, batch, i32(cuda.blockIdx.y), first // BLOCK_Q, tile, tiles
        )
        if thread == 0:
            ptx.mbarrier_init(full_q, u32(1))
            for i in range(2 * STAGES):
                ptx.mbarrier_init(full + u32(8 * i), u32(1))
                ptx.mbarrier_init(empty + u32(8 * i), u32(256))
            ptx.fence_mbarrier_init()
            for i in range(3):  # the maps are in global memory, written before this launch
                ptx.tensormap_acquire(maps + u64(128 * i))
        cuda.syncthreads()
        if warpgroup == 0:
            FEWER()
            if thread == 0:
                ptx.mbarrier_expect(full_q, u32(q_size))
                for h in range(d_panels):
                    ptx.tma_load_5d(
                        sq + u32(h * q_panel),
                        maps,
                        i32(h * PANEL),
                        i32(0),
                        first // packed,
                        first_head // packed,
                        batch,
                        full_q,
                    )
                n = i32(0)
                for t in range(tile, tiles):
                    stage, parity = u32(n & 1), u32(((n >> 1) & 1) ^ 1)
                    bar, at = full + stage * u32(16), ring + stage * u32(pair)
                    ptx.mbarrier_wait(empty + stage * u32(16), parity)
                    ptx.mbarrier_expect(bar, u32(k_size))
                    for h in range(d_panels):
                        ptx.tma_load_4d(
                            at + u32(h * k_panel),
                            maps + u64(128),
                            i32(h * PANEL),
                            start_of(listed_at, t),
                            first_head // group,
                            batch,
                            bar,
                        )
                    ptx.mbarrier_wait(empty + stage * u32(16) + u32(8), parity)
                    ptx.mbarrier_expect(bar + u32(8), u32(v_size))
                    for h in range(dv_panels):
                        ptx.tma_load_4d(
                            at + u32(k_size + h * k_panel),
                            maps + u64(256),
                            i32(h * PANEL),
                            start_of(listed_at, t),
                            first_head // group,
                            batch,
                            bar + u32(8),
                        )
                    n += 1
        else:
            MORE()
            s = cuda.local.array(n_s, f32)
            o = cuda.local.array(n_o, f32)
            p = cuda.local.array(n_p, u32)
            m, l, alpha = state = State(
                cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
            )
            query = cuda.local.array(2, i32)
            head = cuda.local.array(2, i32)
            slope = cuda.local.array(2, f32)
            for i in range(n_o):
                o[i] = f32(0)
            warp = (thread >> 5) & 3
            row = i32(first + (warpgroup - 1) * 64 + warp * 16 + (lane >> 2))
            describe(query, head, row, first_head)
            for r in range(2):
                m[r], l[r] = NEG_INF, f32(0)
                slope[r] = f32(0)
            if alibi and not wide:
                load_slopes(slope, slopes, batch * heads, head)
            # named barriers; 1 and 2 are the warpgroups' own
            turn = u32(2 + warpgroup)
            other = u32(5 - warpgroup)
            if ping_pong and warpgroup == 2 and tile < tiles:
                ptx.barrier_arrive(other, u32(256))  # the first turn is warpgroup 1's
            dq = descriptor(DESCRIPTOR, sq + u32((warpgroup - 1) * 64 * 128))
            ptx.mbarrier_wait(full_q, u32(0))
            block = Block(
                lane, row, first_head, heads, slope, listed_at, whole_low, whole_high,
                diagonal, queries, keys, left, right,
            )  # fmt: skip
            n = i32(0)
            sums = base + u32(sums_at) + u32((thread - 128) * 4)
            if overlap:
                # the first tile by itself: with a branch around products that are still under way
                # ptxas waits after each of them
                if tile < tiles:
                    begin(s, o, dq, n, full, ring, turn)
                    if ping_pong:
                        ptx.barrier_arrive(other, u32(256))
                    wait_none()
                    fence_s(s, 0)
                    ptx.mbarrier_arrive(empty)
                    soften(s, state, tile, block, factors, pointers, strides)
                    weights(p, s)
                for t in range(
                    tile + 1, tiles
                ):  # last tile's P . V runs beside this tile's Q . K^T
                    n += 1
                    before = u32((n - 1) & 1)
                    begin(s, o, dq, n, full, ring, turn)
                    ptx.mbarrier_wait(full + before * u32(16) + u32(8), u32(((n - 1) >> 1) & 1))
                    fence_o(o, 0)
                    ptx.wgmma_fence()
                    outputs(
                        o, p, descriptor(value_descriptor, ring + before * u32(pair) + u32(k_size))
                    )
                    ptx.wgmma_commit()
                    if ping_pong:
                        ptx.barrier_arrive(other, u32(256))
                    wait_one()
                    fence_s(s, 0)
                    ptx.mbarrier_arrive(empty + u32(n & 1) * u32(16))
                    soften(s, state, t, block, factors, pointers, strides)
                    # a store that the wait cannot pass: without it ptxas moves the wait ahead of
                    # every exponential
                    ptx.store_shared_f32(sums, l[0] + l[1])
                    wait_none()
                    fence_o(o, 0)
                    ptx.mbarrier_arrive(empty + before * u32(16) + u32(8))
                    shrink(o, alpha)
                    weights(p, s)
                if tile < tiles:
                    finish(o, p, n, full, ring)
            else:
                for t in range(tile, tiles):
                    begin(s, o, dq, n, full, ring, turn)
                    if ping_pong:
                        ptx.barrier_arrive(other, u32(256))
                    wait_none()
                    fence_s(s, 0)
                    ptx.mbarrier_arrive(empty + u32(n & 1) * u32(16))
                    soften(s, state, t, block, factors, pointers, strides)
                    shrink(o, alpha)
                    weights(p, s)
                    finish(o, p, n, full, ring)
                    ptx.mbarrier_arrive(empty + u32(n & 1) * u32(16) + u32(8))
                    n += 1

            if ping_pong and warpgroup == 1 and tile < tiles:
                ptx.barrier(turn, u32(256))  # what the other's last arrival is waiting for
            ptx.barrier(
                u32(warpgroup), u32(128)
            )  # the four warps have all read their part of Q's tile
            mine, batch = sq + u32(((warpgroup - 1) * 64 + warp * 16) * 128), ptx.block_z()
            for r in range(2):
                l[r] = quad_sum(l[r])
                top, share = NEG_INF if l[r] == f32(0) else m[r] * scale, f32(1)
                if sinks and query[r] < queries:
                    top, l[r], share = join_sink(
                        top, l[r], ptx.load_global_f32(sinks_at + u64(head[r] * 4)) * LOG2E
                    )
                share = f32(0) if l[r] == f32(0) else share * ptx.rcp(l[r])
                inner = i32((lane >> 2) + 8 * r)
                if lane & 3 == 0 and query[r] < queries:
                    lse = (top + ptx.lg2(l[r])) * LN2
                    ptx.store_global_f32(
                        lse_out + u64(((batch * heads + head[r]) * queries + query[r]) * 4), lse
                    )
                for c in range(value_tiles):
                    place = mine + u32(
                        (c >> 3) * q_panel
                        + inner * 128
                        + (((c & 7) ^ (inner & 7)) << 4)
                        + (lane & 3) * 4
                    )
                    ptx.store_shared_f32(
                        place,
                        ptx.from_bits(pack(o[4 * c + 2 * r] * share, o[4 * c + 2 * r + 1] * share)),
                    )
            cuda.syncwarp()
            four = cuda.local.array(4, u32)
            o_at = o_out + u64(batch * strides[0])
            for turn_of in range(value_tiles * 16 // 32):
                piece = lane + 32 * turn_of
                inner, c = piece // value_tiles, piece % value_tiles
                mine_row = first + (warpgroup - 1) * 64 + warp * 16 + inner
                i = mine_row // packed
                if i < queries and c * 16 < dv_left:
                    ptx.load_shared_v4(
                        four,
                        0,
                        mine
                        + u32((c >> 3) * q_panel + inner * 128 + (((c & 7) ^ (inner & 7)) << 4)),
                    )
                    h = first_head + mine_row - i * packed
                    ptx.store_global_v4(
                        o_at + u64(h * strides[1] + i * strides[2] + c * 16), four, 0
                    )

    own = types.void(pointers_of(OWN, functions), *SIGNATURE.args[1:])
    return Source(flash, own, THREADS, first_tile + STAGES * pair + (1024 if overlap else 0) + 1024)
