"""FlashAttention-3 forward for sm_90a (Shah et al. 2024, algorithms 1 and 2).

TMA, wgmma and specialised warps.

Three or four warpgroups of 128 threads. One thread of the first brings tiles of keys and values by
TMA into a ring of two stages; the others own 64 query rows each and compute with asynchronous
products. Full and empty mbarriers connect them. With `overlap` the scores of the next tile are
multiplied while the softmax of this one runs (section 3.2 of the paper); with `ping_pong` they
issue their products in turns (section 3.1). The last tile of keys comes first: only it, and the tiles at the
edges of a band, which have a loop of their own, have code that hides keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper import DESCRIPTOR, FEWER, MORE, PANEL_BYTES, ahead, descriptor, make_issue_scores
from .hopper_scores import LN2, OWN, WIDE, Block, Call, make_describe, make_soften
from .pieces import NEG_INF, State, make_row_block, make_tile_range, quad_sum
from .score_functions import known, make_tile_list, pointers_of
from .scores import LOG2E, ScoreOptions, join_sink, load_slopes

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
STAGES, PANEL = 2, PANEL_BYTES // 2  # columns of a panel

# pointers: tensor maps of q, k, v (3 x 128 bytes), o, lse, diagonal, key_lengths, mask, slopes,
# sinks strides in bytes: batch, head, row of o; then of the mask: batch, head, query, key sizes:
# queries, bytes per row of o, query heads, left, right;  factors: scale * log2(e), softcap
SIGNATURE = types.void(
    types.UniTuple(u64, OWN), types.UniTuple(i64, 7), types.UniTuple(i32, 5), types.UniTuple(f32, 2)
)


class Ring(NamedTuple):
    """Shared addresses that a warpgroup uses for every tile, and its numbers of named barriers."""

    query: Any  # descriptor of the warpgroup's rows of Q
    tiles: Any  # the ring's first stage: keys, then values
    full: Any  # mbarriers: 16 bytes per stage, keys then values
    empty: Any
    sums: Any  # the thread's own 4 bytes
    turn: Any  # this warpgroup may issue products
    next: Any  # the next one's


class Fragments(NamedTuple):
    """What a warpgroup multiplies: local arrays."""

    s: Any  # scores, then weights
    o: Any  # the output so far
    p: Any  # packed weights


def flash_hopper(
    d: int,
    dv: int,
    block_k: int,
    block_q: int = 128,
    dtype: str = "float16",
    group: int = 1,
    packed: int = 1,
    overlap: bool = True,
    ping_pong: bool = False,
    **options: Any,
) -> Source:
    """The kernel for head sizes d and dv, multiples of 64.

    `block_q` is 128 or 192 rows, 64 per consumer warpgroup; `block_k` keys are a multiple of 16;
    `packed`, a power of two, divides `group` and `block_q`; `options` are those of `ScoreOptions`.

    Row r of the problem is query r // packed of head r % packed of those that are packed together.
    """
    chosen = ScoreOptions(**options)
    band, _, _, alibi, _, sinks, functions, listed = chosen
    consumers = block_q // 64
    more_registers = MORE[consumers]
    value_tiles, k_steps, p_steps = dv // 8, d // 16, block_k // 16
    n_s, n_o, n_p = block_k // 2, dv // 2, block_k // 4
    d_panels, dv_panels = d // PANEL, dv // PANEL
    q_panel, k_panel = block_q * PANEL_BYTES, block_k * PANEL_BYTES  # bytes of one panel of a tile
    q_size, k_size, v_size = d_panels * q_panel, d_panels * k_panel, dv_panels * k_panel
    o_size = dv_panels * q_panel
    first_tile = 1024 + max(q_size, o_size)
    pair = k_size + v_size
    sums_at = first_tile + STAGES * pair  # with `overlap`, 4 bytes for each consumer thread
    sums_size = 512 * consumers if overlap else 0
    value_descriptor = DESCRIPTOR | (
        k_panel >> 4 << 16
    )  # values are MN-major: the leading stride spans a panel
    multiply_k, multiply_v = ptx.wgmma(block_k, dtype, False), ptx.wgmma(dv, dtype, True)
    issue_scores = make_issue_scores(multiply_k, k_steps, q_panel, k_panel)
    fence_s, fence_o = ptx.register_fence(n_s), ptx.register_fence(n_o)
    transform = chosen.transforms or known(functions).changes
    find_tiles, start_of, _, all_seen = make_tile_list(OWN, listed, block_k)
    pack, describe = ptx.pack[dtype], make_describe(packed)
    tile_range, row_block = make_tile_range(block_q, block_k, packed, band), make_row_block(band)
    wait_none, wait_one = ptx.wgmma_wait[0], ptx.wgmma_wait[1]

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
    def begin(work, n, ring):
        """Waits for the keys of the ring's tile n and issues their scores."""
        stage = u32(n & 1)
        ptx.mbarrier_wait(ring.full + stage * u32(16), u32((n >> 1) & 1))
        if ping_pong:
            ptx.barrier(ring.turn, u32(256))
        fence_s(work.s, 0)
        fence_o(work.o, 0)
        ptx.wgmma_fence()
        issue_scores(work.s, ring.query, descriptor(DESCRIPTOR, ring.tiles + stage * u32(pair)))
        ptx.wgmma_commit()

    @device_function
    def add_values(work, n, ring):
        """Waits for the values of the ring's tile n and issues O += P . V.

        16 keys (two groups of 8 rows of 128 bytes) at a time.
        """
        stage = u32(n & 1)
        ptx.mbarrier_wait(ring.full + stage * u32(16) + u32(8), u32((n >> 1) & 1))
        fence_o(work.o, 0)
        ptx.wgmma_fence()
        dv_at = descriptor(value_descriptor, ring.tiles + stage * u32(pair) + u32(k_size))
        for step in range(p_steps):
            multiply_v(work.o, 0, work.p, 4 * step, ahead(dv_at, step * 128), i32(1))
        ptx.wgmma_commit()

    @device_function
    def pass_turn(ring):
        if ping_pong:
            ptx.barrier_arrive(ring.next, u32(256))

    @device_function
    def values_read(work, n, ring):
        """Waits for O += P . V of the ring's tile n, whose stage is then empty."""
        wait_none()
        fence_o(work.o, 0)
        ptx.mbarrier_arrive(ring.empty + u32(n & 1) * u32(16) + u32(8))

    def make_step(edge):
        """step(work, state, n, ring, block, call): the tile of keys that comes as number n.

        Before it `alone`, for a tile with nothing else under way: its scores and softmax.
        """
        soften = make_soften(chosen, dv, block_k, packed, edge)

        @device_function
        def alone(work, state, n, ring, block, call):
            begin(work, n, ring)
            pass_turn(ring)
            wait_none()
            fence_s(work.s, 0)
            ptx.mbarrier_arrive(ring.empty + u32(n & 1) * u32(16))
            soften(work.s, state, n, block, call)

        @device_function
        def in_order(work, state, n, ring, block, call):
            alone(work, state, n, ring, block, call)
            shrink(work.o, state.alpha)
            weights(work.p, work.s)
            add_values(work, n, ring)
            values_read(work, n, ring)

        @device_function
        def beside(work, state, n, ring, block, call):
            """P . V of the tile before runs beside Q . K^T and the softmax of this one."""
            begin(work, n, ring)
            add_values(work, n - 1, ring)
            pass_turn(ring)
            wait_one()
            fence_s(work.s, 0)
            ptx.mbarrier_arrive(ring.empty + u32(n & 1) * u32(16))
            soften(work.s, state, n, block, call)
            # a store that the wait cannot pass: without it ptxas moves the wait ahead of
            # every exponential
            ptx.store_shared_f32(ring.sums, state.l[0] + state.l[1])
            values_read(work, n - 1, ring)
            shrink(work.o, state.alpha)
            weights(work.p, work.s)

        return alone, beside if overlap else in_order

    alone, edge_step = make_step(True)
    _, full_step = make_step(False)

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
        sq, tiles_at = base + u32(1024), base + u32(first_tile)
        first_row = row_block() * block_q
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles, whole_low, whole_high = tile_range(
            first_row, queries * packed, keys, diagonal, left, right
        )
        listed_at, tile, tiles = find_tiles(
            pointers, batch, i32(cuda.blockIdx.y), first_row // block_q, tile, tiles
        )
        if thread == 0:
            ptx.mbarrier_init(full_q, u32(1))
            for i in range(2 * STAGES):
                ptx.mbarrier_init(full + u32(8 * i), u32(1))
                ptx.mbarrier_init(empty + u32(8 * i), u32(128 * consumers))
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
                        first_row // packed,
                        first_head // packed,
                        batch,
                        full_q,
                    )
                for n in range(tiles - tile):
                    start = start_of(listed_at, tiles - 1 - n)
                    stage, parity = u32(n & 1), u32(((n >> 1) & 1) ^ 1)
                    bar, at = full + stage * u32(16), tiles_at + stage * u32(pair)
                    ptx.mbarrier_wait(empty + stage * u32(16), parity)
                    ptx.mbarrier_expect(bar, u32(k_size))
                    for h in range(d_panels):
                        ptx.tma_load_4d(
                            at + u32(h * k_panel),
                            maps + u64(128),
                            i32(h * PANEL),
                            start,
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
                            start,
                            first_head // group,
                            batch,
                            bar + u32(8),
                        )
        else:
            more_registers()
            work = Fragments(
                cuda.local.array(n_s, f32), cuda.local.array(n_o, f32), cuda.local.array(n_p, u32)
            )
            o = work.o
            m, l, alpha = state = State(
                cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
            )
            query = cuda.local.array(2, i32)
            head = cuda.local.array(2, i32)
            slope = cuda.local.array(2, f32)
            for i in range(n_o):
                o[i] = f32(0)
            warp = (thread >> 5) & 3
            row = i32(first_row + (warpgroup - 1) * 64 + warp * 16 + (lane >> 2))
            describe(query, head, row, first_head)
            for r in range(2):
                m[r], l[r] = NEG_INF, f32(0)
                slope[r] = f32(0)
            if alibi and dv <= WIDE:
                load_slopes(slope, slopes, batch * heads, head)
            ring = Ring(
                descriptor(DESCRIPTOR, sq + u32((warpgroup - 1) * 64 * 128)),
                tiles_at,
                full,
                empty,
                base + u32(sums_at) + u32((thread - 128) * 4),
                # named barriers: the warpgroups' own, then those of their turns
                u32(consumers + warpgroup),
                u32(consumers + warpgroup % consumers + 1),
            )
            block = Block(
                lane, row, first_head, heads, slope, listed_at, i32(tiles - 1), diagonal, queries,
                keys, left, right,
            )  # fmt: skip
            call = Call(pointers, strides, factors)
            if ping_pong and warpgroup == consumers and tile < tiles:
                ptx.barrier_arrive(ring.next, u32(256))  # the first turn is warpgroup 1's
            ptx.mbarrier_wait(full_q, u32(0))
            n, count = i32(0), i32(tiles - tile)
            if overlap and n < count:
                # the first tile by itself: with a branch around products that are still under way
                # ptxas waits after each of them
                alone(work, state, n, ring, block, call)
                weights(work.p, work.s)
                n += 1
            seen, seen_end = (
                all_seen(listed_at, tile, tiles, whole_low, whole_high) if band else (tile, tiles)
            )
            # tiles at an edge, then those that all rows see, then tiles at the other edge of a band
            edge_end = i32(max(n, tiles - seen_end)) if band else i32(1)
            while n < count:
                if band or not overlap:
                    while n < edge_end:
                        edge_step(work, state, n, ring, block, call)
                        n += 1
                while n < i32(tiles - seen):
                    full_step(work, state, n, ring, block, call)
                    n += 1
                edge_end = count
            if overlap and count > 0:
                add_values(work, n - 1, ring)
                wait_none()
                fence_o(o, 0)
            if ping_pong and warpgroup == 1 and count > 0:
                ptx.barrier(ring.turn, u32(256))  # what the other's last arrival is waiting for
            ptx.barrier(
                u32(warpgroup), u32(128)
            )  # the four warps have all read their part of Q's tile
            describe(query, head, ptx.fresh(row), first_head)  # not in registers until here
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
                mine_row = first_row + (warpgroup - 1) * 64 + warp * 16 + inner
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
    return Source(flash, own, 128 * (1 + consumers), sums_at + sums_size + 1024)
