"""FlashAttention-3 forward for sm_90a (Shah et al. 2024, algorithms 1 and 2).

TMA, wgmma and specialised warps.

Three or four warpgroups of 128 threads. One thread of the first brings tiles of keys and values by
TMA into a ring of two stages; the others own 64 query rows each and compute with asynchronous
products. Full and empty mbarriers connect them; Q counts with its first tile of keys. With `overlap`
the scores of the next tile are multiplied while the softmax of this one runs (section 3.2 of the
paper), and the next tile of rows' first ones while this one's output is written, its Q loaded beside
this one's scores where there is room for two tiles of it (`queries`); with `ping_pong`
they issue their products in turns (section 3.1); the blocks of a `cluster` share keys and values.
The last tile of keys comes first: only it, and the tiles at the edges of a band, which have a loop
of their own, have code that hides keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call
from .hopper import DESCRIPTOR, FEWER, MORE, ahead, descriptor, make_issue_scores
from .hopper_cluster import make_meet, make_release
from .hopper_keys import make_keys_of, make_rows_in
from .hopper_ring import BARRIERS, OF_VALUES, Layout, make_bring, make_ring, make_with_queries
from .hopper_rows import make_write_rows
from .hopper_schedule import make_place_in
from .hopper_scores import OWN, SLOPES, WIDE, Block, make_describe, make_soften
from .score_functions import known, make_tile_list, pointers_of
from .scores import ScoreOptions, load_slopes
from .softmax import NEG_INF, State, make_rescale

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: tensor maps of q, k, v (3 x 128 bytes), o, lse, diagonal, key_lengths, mask, slopes,
# sinks, order of the tiles of rows where the host has arranged them, then the functions'
# strides in bytes: batch, head, row of o; then of the mask: batch, head, query, key
# sizes: queries, bytes per row of o, query heads, left, right, then the schedule's
# (`hopper_schedule`): tiles of rows (of each part of the keys), units; parts
# factors: scale * log2(e), softcap * log2(e), 2 / softcap
SIGNATURE = types.void(
    types.UniTuple(u64, OWN), types.UniTuple(i64, 7), types.UniTuple(i32, 8), types.UniTuple(f32, 3)
)


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
    queries: int = 1,
    ping_pong: bool = False,
    cluster: int = 1,
    split: bool = False,
    **options: Any,
) -> Source:
    """The kernel for head sizes d and dv, multiples of 64.

    `block_q` is 128 or 192 rows, 64 per consumer warpgroup; `block_k` keys are a multiple of 16;
    `packed`, a power of two, divides `group` and `block_q`; `options` are those of `ScoreOptions`.
    `cluster` blocks share each tile of keys and values (`hopper_cluster`): 1, or 2 for head sizes that
    are multiples of 128, without a band and a list of tiles, and for an even number of tiles of rows.
    With `split` each tile of rows is several, of parts of the keys (`key_parts`).

    Row r of the problem is query r // packed of head r % packed of those that are packed together.
    """
    chosen = ScoreOptions(**options)
    band, _, _, alibi, _, sinks, functions, listed = chosen
    consumers = block_q // 64
    more_registers = MORE[consumers]
    k_steps, p_steps = d // 16, block_k // 16
    n_s, n_o, n_p = block_k // 2, dv // 2, block_k // 4
    layout = Layout(d, dv, block_q, block_k, queries, overlap)
    q_panel, k_panel, k_size, pair = layout.q_panel, layout.k_panel, layout.k_size, layout.pair
    # values are MN-major: the leading stride spans a panel
    value_descriptor = DESCRIPTOR | (k_panel >> 4 << 16)
    multiply_k, multiply_v = ptx.wgmma(block_k, dtype, False), ptx.wgmma(dv, dtype, True)
    issue_scores = make_issue_scores(multiply_k, k_steps, q_panel, k_panel)
    fence_s, fence_o = ptx.register_fence(n_s), ptx.register_fence(n_o)
    transform = chosen.transforms or known(functions).changes
    _, start_of, _, _ = make_tile_list(OWN, listed, block_k)
    pack, describe = ptx.pack[dtype], make_describe(packed)
    rescale = make_rescale(dv // 8)
    arranged = (band or listed) and not split
    rows_in = make_rows_in(block_q, packed, cluster, arranged, split)
    keys_of = make_keys_of(block_q, block_k, packed, band, listed, split)
    place_in = make_place_in(cluster)
    meet_all = make_meet(cluster)
    _, release = make_release(cluster)
    ring_at, prepare = make_ring(layout, cluster)
    with_queries = make_with_queries(layout)
    bring = make_bring(layout, group, packed, cluster, rows_in, keys_of, start_of)
    write_rows = make_write_rows(dv, pack, packed, transform, sinks, split)
    wait_none, wait_one = ptx.wgmma_wait[0], ptx.wgmma_wait[1]
    # blocks of a cluster would wait for each other's output: measured slower
    continued = overlap and cluster == 1

    @device_function
    def weights(p, s):
        for n in range(n_p):
            p[n] = pack(s[2 * n], s[2 * n + 1])

    @device_function
    def begin(work, n, ring):
        """Waits for the keys of the ring's tile n and issues their scores.

        O may be under way; where it is not, `fence_o` keeps what changes it ahead of the products.
        """
        stage = u32(n & 1)
        ptx.mbarrier_wait(ring.full + stage * u32(BARRIERS), u32((n >> 1) & 1))
        if ping_pong:
            ptx.barrier(ring.turn, u32(256))
        fence_s(work.s, 0)
        ptx.wgmma_fence()
        issue_scores(work.s, ring.query, descriptor(DESCRIPTOR, ring.tiles + stage * u32(pair)))
        ptx.wgmma_commit()

    @device_function
    def add_values(work, n, ring):
        """Waits for the values of the ring's tile n and issues O += P . V.

        16 keys (two groups of 8 rows of 128 bytes) at a time.
        """
        stage = u32(n & 1)
        ptx.mbarrier_wait(ring.full + stage * u32(BARRIERS) + u32(OF_VALUES), u32((n >> 1) & 1))
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
    def scores_read(work, n, ring):
        """After a wait for the scores of the ring's tile n: the stage of its keys is empty."""
        fence_s(work.s, 0)
        release(ring.emptied + u32(n & 1) * u32(BARRIERS))

    @device_function
    def values_read(work, n, ring):
        """After a wait for O += P . V of the ring's tile n: the stage of its values is empty."""
        fence_o(work.o, 0)
        release(ring.emptied + u32(n & 1) * u32(BARRIERS) + u32(OF_VALUES))

    @device_function
    def alone(work, n, ring):
        """The scores of the ring's tile n, with nothing beside them."""
        fence_o(work.o, 0)
        begin(work, n, ring)
        pass_turn(ring)
        wait_none()
        scores_read(work, n, ring)

    def make_step(edge):
        """step(work, state, n, ring, block, call): the tile of keys that comes as number n.

        Before it `soften`, its softmax alone.
        """
        soften = make_soften(chosen, dv, block_k, packed, edge)

        @device_function
        def in_order(work, state, n, ring, block, call):
            alone(work, n, ring)
            soften(work.s, state, n, block, call)
            rescale(work.o, state.alpha)
            weights(work.p, work.s)
            add_values(work, n, ring)
            wait_none()
            values_read(work, n, ring)

        @device_function
        def beside(work, state, n, ring, block, call):
            """P . V of the tile before runs beside Q . K^T and the softmax of this one."""
            fence_o(work.o, 0)
            begin(work, n, ring)
            add_values(work, n - 1, ring)
            pass_turn(ring)
            wait_one()
            scores_read(work, n, ring)
            soften(work.s, state, n, block, call)
            # a store that the wait cannot pass: without it ptxas moves the wait ahead of
            # every exponential
            ptx.store_shared_f32(ring.sums, state.l[0] + state.l[1])
            wait_none()
            values_read(work, n - 1, ring)
            rescale(work.o, state.alpha)
            weights(work.p, work.s)

        return soften, beside if overlap else in_order

    soften_edge, edge_step = make_step(True)
    _, full_step = make_step(False)

    @device_function
    def after(turn, call):
        """Whether the block has another tile of rows after this turn's; its place and keys."""
        more = place_in(turn + 1) < u32(call.sizes[5] * call.sizes[6])
        place = rows_in(i32(turn + 1) if more else turn, call)
        return more, place, keys_of(place, call)

    @device_function
    def write(turn, own_row, work, state, call):
        place = rows_in(ptx.fresh(turn), call)  # in no register until here
        return write_rows(work.o, state, i32(place[0] + own_row), place, call)

    @device_function
    def finish(turn, n, some, own_row, work, state, ring, following, call):
        """The last P . V of a tile of rows, if it has `some` keys, and its output.

        Beside them runs the next tile of rows' first Q . K^T: `following` is the ring with its tile of
        Q, n its first tile of keys. Returns whether its scores are there, its place and its keys. What
        is under way when branches meet would make ptxas wait after each product.
        """
        begun = False
        if overlap and some:
            add_values(work, n - 1, ring)
            more, place, found = after(turn, call)
            begun = continued and more and found.tile < found.tiles
            if begun:
                begin(work, n, following)
                pass_turn(ring)
                wait_one()
                values_read(work, n - 1, ring)
                # a store that the wait cannot pass, as in `beside`
                ptx.store_shared(ring.sums, write(turn, own_row, work, state, call))
                wait_none()
                scores_read(work, n, ring)
            else:
                wait_none()
                values_read(work, n - 1, ring)
        else:
            more, place, found = after(turn, call)
        if not begun:
            write(turn, own_row, work, state, call)
        return begun, place, found

    @device_function
    def attend(turn, n, q_tile, begun, place, found, own_row, work, state, shared_ring, call):
        """A consumer's part of a tile of rows, whose first scores are there if they are `begun`.

        Its rows are in tile `q_tile` of Q. Returns the numbers of the next tiles of keys and of Q,
        then what `finish` returns.
        """
        ring = with_queries(shared_ring, q_tile)
        first_row, first_head, batch, _ = place
        keys, diagonal, listed_at, tile, tiles, seen, seen_end = found
        queries, _, heads, left, right = call.sizes[:5]
        row = i32(first_row + own_row)
        slope = cuda.local.array(2, f32)
        for i in range(n_o):
            work.o[i] = f32(0)
        for r in range(2):
            state.m[r], state.l[r], slope[r] = NEG_INF, f32(0), f32(0)
        if alibi and dv <= WIDE:
            query, head = cuda.local.array(2, i32), cuda.local.array(2, i32)
            describe(query, head, row, first_head)
            load_slopes(slope, call.pointers[SLOPES], batch * heads, head)
        last = i32(tiles - 1 + n)  # the tile of keys that comes as number i is last - i
        block = Block(
            i32(cuda.threadIdx.x) & 3, row, first_head, batch, heads, slope, listed_at, last, diagonal, queries,
            keys, left, right,
        )  # fmt: skip
        end = i32(n + tiles - tile)
        some = n < end
        # tiles at an edge, then those that all rows see, then tiles at the other edge of a band
        edge_end = i32(max(n + 1, last + 1 - seen_end)) if band else i32(n + 1)
        if overlap and some:
            # with a branch around products that are still under way ptxas waits after each of them:
            # the first scores are there when the loop begins
            if not begun:
                alone(work, n, ring)
            soften_edge(work.s, state, n, block, call)
            weights(work.p, work.s)
            n += 1
        while n < end:
            if band or not overlap:
                while n < edge_end:
                    edge_step(work, state, n, ring, block, call)
                    n += 1
            while n < i32(last + 1 - seen):
                full_step(work, state, n, ring, block, call)
                n += 1
            edge_end = end
        next_tile = i32(q_tile ^ 1) if some else q_tile  # rows without keys bring no Q
        following = with_queries(shared_ring, next_tile)
        done = finish(turn, n, some, own_row, work, state, ring, following, call)
        return n, next_tile, *done

    def flash(pointers, strides, sizes, factors):
        maps = pointers[0]
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warpgroup = thread & 31, ptx.uniform(thread >> 7)
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        call = Call(pointers, strides, sizes, factors)
        tiles_of_rows = u32(sizes[5] * sizes[6])
        ring = ring_at(base, thread, warpgroup)
        if thread == 0:
            prepare(ring, maps)
        meet_all()
        turn, n, q_tile, begun = i32(0), i32(0), i32(0), False
        if warpgroup == 0:
            FEWER()
            if thread == 0:
                while place_in(turn) < tiles_of_rows:
                    end = bring(turn, n, with_queries(ring, q_tile), maps, call)
                    q_tile = i32(q_tile ^ 1) if end > n else q_tile
                    n = end
                    turn += 1
        else:
            more_registers()
            work = Fragments(
                cuda.local.array(n_s, f32), cuda.local.array(n_o, f32), cuda.local.array(n_p, u32)
            )
            state = State(
                cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32)
            )
            own_row = i32((warpgroup - 1) * 64 + ((thread >> 5) & 3) * 16 + (lane >> 2))
            if ping_pong and warpgroup == consumers:
                ptx.barrier_arrive(ring.next, u32(256))  # the first turn is warpgroup 1's
            place = rows_in(turn, call)
            found = keys_of(place, call)
            while place_in(turn) < tiles_of_rows:
                n, q_tile, begun, place, found = attend(
                    turn, n, q_tile, begun, place, found, own_row, work, state, ring, call
                )
                turn += 1
            if ping_pong and warpgroup == 1:
                ptx.barrier(ring.turn, u32(256))  # what the last arrival is waiting for
        if cluster > 1:
            meet_all()  # the other block arrives at this one's mbarriers until its end

    own = types.void(pointers_of(OWN, functions), *SIGNATURE.args[1:])
    return Source(flash, own, 128 * (1 + consumers), layout.shared_bytes, cluster=cluster)
