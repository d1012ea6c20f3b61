"""The gradient of attention for sm_90a: TMA, wgmma and specialised warps.

The two mirrored passes of `backward`, by persistent blocks of three warpgroups of 128 threads. A warp
of the first brings tiles by TMA (`backward_hopper_tiles`); the others own 64 rows of a and b each. A
tile of c and e serves two products each: row by row for S and dP, column by column for the sums.
Products are asynchronous: exponentials run beside dP, dS beside the sum of P.e, and S of the next
tile is issued behind this tile's sums, so that the tensor cores have work at every wait.

P and dS are packed into registers as the left operands of the sums. Only tiles at an edge of what
the rows attend to have code that hides columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .backward_band import make_block_of, make_find_columns
from .backward_hopper_rows import make_write_sums
from .backward_hopper_tiles import CONSUMERS, ROWS, Layout, make_bring, make_ring
from .backward_hopper_weights import Rows, make_find_statistics, make_weights
from .blocks import Call
from .hopper import (
    DESCRIPTOR,
    FEWER,
    MORE,
    PANEL_BYTES,
    ahead,
    descriptor,
    make_issue_held,
    make_issue_scores,
)
from .hopper_schedule import make_place_in, make_rows_at
from .tiles import left_row, make_first_chunk, make_read

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32

# pointers: tensor maps of a, b, c, e and the statistics (128 bytes each), sum_a, sum_b, statistics,
# diagonal, key_lengths, order of the tiles of own rows where the host has arranged them
# strides in bytes: batch, head, row of sum_a, sum_b
# sizes: rows of a, rows of c, bytes per row of sum_a, sum_b, query heads, left, right, rows of
# statistics per head, then the schedule's (`hopper_schedule`): tiles of own rows, units (heads)
# factors: scale * log2(e), scale
SIGNATURE = types.void(
    types.UniTuple(u64, 7), types.UniTuple(i64, 6), types.UniTuple(i32, 10), types.UniTuple(f32, 2)
)


class Work(NamedTuple):
    """What a warpgroup multiplies: local arrays."""

    s: Any  # scores, then weights
    g: Any  # gradient of the weights, then of the scores
    p: Any  # packed weights
    ds: Any  # packed gradient of the scores
    sum_a: Any
    sum_b: Any


class Own(NamedTuple):
    """A warpgroup's own rows: descriptors, or local arrays of 4 words for each 16 columns."""

    a: Any
    b: Any


def backward_hopper(
    gradients: str,
    d: int,
    columns: int,
    stages: int,
    held: bool = False,
    dtype: str = "float16",
    group: int = 1,
    band: bool = False,
) -> Source:
    """The kernel for padded head sizes d, a multiple of 64, of keys and of values.

    Parameters
    ----------
    gradients : "q" (the pass that owns queries) or "kv" (the pass that owns keys)
    columns : rows of the other side per tile, a multiple of 16;  stages : tiles of the ring
    held : the own rows are held in registers, not read from shared memory for every tile
    group : query heads per key head; the keys' pass processes them in order
    band : a causal or windowed problem; tiles outside are skipped
    """
    of_keys = gradients == "kv"
    layout = Layout(d, columns, stages, of_keys)
    own_panel, panel = ROWS * PANEL_BYTES, columns * PANEL_BYTES
    other, statistics = layout.other, layout.statistics
    n_s, n_p, n_a, n_b = columns // 2, columns // 4, d // 2, d // 2 if of_keys else 1
    steps, heads_of_other = columns // 16, group if of_keys else 1
    # a query beyond the last has weights that multiply zeros, a key beyond the last is hidden
    edges = band or not of_keys
    # c and e are read column by column for the sums: the leading stride spans a panel
    turned = DESCRIPTOR | (panel >> 4 << 16)
    by_rows, by_columns = ptx.wgmma(columns, dtype, held, False), ptx.wgmma(d, dtype, True)
    if held:
        issue_scores = make_issue_held(by_rows, d // 16, panel)
    else:
        issue_scores = make_issue_scores(by_rows, d // 16, own_panel, panel)
    fence_s, fence_sum = ptx.register_fence(n_s), ptx.register_fence(n_a)
    block_of, place_in, rows_at = make_block_of(of_keys), make_place_in(1), make_rows_at(band)
    find_columns = make_find_columns(ROWS, columns, of_keys, band)
    n_own, read, (left_chunk, _) = d // 4, make_read(PANEL_BYTES), make_first_chunk(PANEL_BYTES)
    find_statistics = make_find_statistics(of_keys)
    (ring_at, prepare), bring = make_ring(layout), make_bring(layout, group)
    write_sums, more_registers = make_write_sums(d, dtype), MORE[CONSUMERS]
    wait_none, wait_one = ptx.wgmma_wait[0], ptx.wgmma_wait[1]

    @device_function
    def stage_of(n):
        return u32(n) % u32(stages)

    @device_function
    def describe(ring, own_row):
        at = u32((own_row & ~63) * PANEL_BYTES)
        return Own(descriptor(DESCRIPTOR, ring.a + at), descriptor(DESCRIPTOR, ring.b + at))

    @device_function
    def load(ring, own_row):
        a, b = cuda.local.array(n_own, u32), cuda.local.array(n_own, u32)
        lane = i32(cuda.threadIdx.x) & 31
        row = i32((own_row & ~15) + left_row(lane))
        at, chunk = u32(row * PANEL_BYTES), left_chunk(lane, row)
        for step in range(n_own // 4):
            panel_at = (step >> 2) * own_panel
            read(a, 4 * step, ring.a + at, chunk, 2 * (step & 3), panel_at)
            read(b, 4 * step, ring.b + at, chunk, 2 * (step & 3), panel_at)
        return Own(a, b)

    take = load if held else describe

    @device_function
    def begin(work, n, own, ring):
        """Waits for the ring's tile n and issues its S, then its dP once earlier products are done:
        the registers of dP hold the packed dS of the tile before, whose stage is then empty.
        """
        stage, turn = stage_of(n), u32(n) // u32(stages)
        at = ring.tiles + stage * u32(2 * other)
        ptx.mbarrier_wait(ring.full + stage * u32(8), turn & u32(1))
        fence_s(work.s, 0)
        ptx.wgmma_fence()
        issue_scores(work.s, own.a, descriptor(DESCRIPTOR, at))
        ptx.wgmma_commit()
        wait_one()
        if n > 0:
            ptx.mbarrier_arrive(ring.empty + stage_of(n - 1) * u32(8))
        fence_s(work.g, 0)
        ptx.wgmma_fence()
        issue_scores(work.g, own.b, descriptor(DESCRIPTOR, at + u32(other)))
        ptx.wgmma_commit()

    @device_function
    def add(sums, packed, at):
        """Issues sums += packed . tile: 16 rows of it (two groups of 8 of 128 bytes) at a time."""
        ptx.wgmma_fence()
        tile = descriptor(turned, at)
        for step in range(steps):
            by_columns(sums, 0, packed, 4 * step, ahead(tile, step * 128), i32(1))
        ptx.wgmma_commit()

    def make_run(edge):
        """run(first, end, n, ...): tiles [first, end), of which the first comes as number n."""
        weigh, grade = make_weights(columns, dtype, of_keys, band, edge)

        @device_function
        def step(work, n, tile, own, rows, block, ring, call):
            """A tile. The sums of the one before may be under way, and its own are at the end."""
            stage, start = stage_of(n), i32(tile * columns)
            at = ring.tiles + stage * u32(2 * other)
            pairs = rows.pairs + stage * u32(statistics)
            begin(work, n, own, ring)
            wait_one()
            fence_s(work.s, 0)
            weigh(work.s, work.p, start, pairs, rows, block, call.factors[0])
            if of_keys:
                add(work.sum_b, work.p, at + u32(other))
                wait_one()
            else:
                # a store of something of each that the wait cannot pass: without it ptxas moves the
                # wait ahead of the exponentials
                mixed = u32(0)
                for i in range(n_s):
                    mixed ^= ptx.bits(work.s[i])
                ptx.store_shared_u16(rows.last, mixed)
                wait_none()
            fence_s(work.g, 0)
            grade(work.g, work.s, work.ds, start, pairs, rows, block)
            add(work.sum_a, work.ds, at)

        @device_function
        def run(first, end, n, work, own, rows, block, ring, call):
            tile = first
            while tile < end:
                step(work, n, tile, own, rows, block, ring, call)
                tile += 1
                n += 1
            return n

        return run

    run_edge, run_full = make_run(True), make_run(False)

    @device_function
    def attend(n, tile, tiles, low, high, work, own, rows, block, ring, call):
        """All products of a tile of own rows, which attend to all columns in [low, high)."""
        if not edges:
            count = i32(tiles - tile) * i32(heads_of_other)
            n = run_full(i32(0), count, n, work, own, rows, block, ring, call)
        else:
            full = i32(min(max(i32((low + columns - 1) // columns), tile), tiles))
            full_end = i32(max(full, min(i32(max(high, 0) // columns), tiles)))
            head = i32(0)
            while head < heads_of_other:
                at, edge_end = tile, full
                while at < tiles:
                    if edge_end > at:
                        n = run_edge(at, edge_end, n, work, own, rows, block, ring, call)
                        at = edge_end
                    if at < full_end:
                        n = run_full(at, full_end, n, work, own, rows, block, ring, call)
                        at = full_end
                    edge_end = tiles
                head += 1
        wait_none()
        return n

    @device_function
    def fence_sums(work):
        fence_sum(work.sum_a, 0)
        if of_keys:
            fence_sum(work.sum_b, 0)

    @device_function
    def write(work, row, block, call):
        own_rows, _, d_left, dv_left = call.sizes[:4]
        a_batch, a_head, a_step, b_batch, b_head, b_step = call.strides
        to = call.pointers[1] + u64(block.batch * a_batch + block.head * a_head)
        live, scale = block.own_left, call.factors[1]
        write_sums(work.sum_a, scale, to, a_step, row, own_rows, live, d_left)
        if of_keys:
            to = call.pointers[2] + u64(block.batch * b_batch + block.head * b_head)
            write_sums(work.sum_b, f32(1), to, b_step, row, own_rows, live, dv_left)

    @device_function
    def rows_in(turn, call):
        """The block's first own row in its turn, and what its rows attend to."""
        tile, unit = rows_at(place_in(turn), call.pointers[6], call.sizes[8])
        heads = i32(call.sizes[4] // group) if of_keys else call.sizes[4]
        batch = i32(ptx.udiv(u32(unit), u32(heads)))
        block = block_of(
            i32(unit - batch * heads), batch, call.pointers[4], call.pointers[5], call.sizes
        )
        return i32(tile * ROWS), block

    @device_function
    def own_row():
        """The first of a thread's two rows among the block's: a warp has 16."""
        thread = ptx.fresh(i32(cuda.threadIdx.x))
        return i32((((thread - 128) >> 5) << 4) + ((thread & 31) >> 2))

    @device_function
    def compute(turn, n, work, rows, ring, call):
        """A warpgroup's part of a tile of own rows; how many tiles of the ring have been used then."""
        first, block = rows_in(turn, call)
        tile, tiles, low, high = find_columns(block, first)
        mine = Rows(i32(first + own_row()), rows.lse, rows.delta, rows.pairs, rows.last)
        find_statistics(mine, block, call)
        for i in range(n_a):
            work.sum_a[i] = f32(0)
        for i in range(n_b):
            work.sum_b[i] = f32(0)
        ptx.mbarrier_wait(ring.full_own, u32(turn & 1))
        own = take(ring, own_row())
        if held:
            ptx.mbarrier_arrive(ring.empty_own)
        fence_sums(work)
        if tile < tiles:
            n = attend(n, tile, tiles, low, high, work, own, mine, block, ring, call)
        if not held:
            ptx.mbarrier_arrive(ring.empty_own)
        fence_sums(work)
        first, block = rows_in(ptx.fresh(turn), call)  # in no register until here
        write(work, i32(first + own_row()), block, call)
        return n

    def backward(pointers, strides, sizes, factors):
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        warpgroup = ptx.uniform(thread >> 7)
        maps, call = pointers[0], Call(pointers, strides, sizes, factors)
        tiles_of_rows = u32(sizes[8] * sizes[9])
        ring = ring_at((ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00))
        if thread == 0:
            prepare(ring, maps)
        cuda.syncthreads()
        turn = i32(0)
        if warpgroup == 0:
            FEWER()
            brought, landed = u32(0), u32(0)
            if thread < 32:
                while place_in(turn) < tiles_of_rows:
                    first, block = rows_in(turn, call)
                    tile, tiles, _, _ = find_columns(block, first)
                    brought, landed = bring(
                        turn, brought, landed, first, tile, tiles, block, ring, maps, call
                    )
                    turn += 1
        else:
            more_registers()
            work = Work(
                cuda.local.array(n_s, f32),
                cuda.local.array(n_s, f32),
                cuda.local.array(n_p, u32),
                cuda.local.array(n_p, u32),
                cuda.local.array(n_a, f32),
                cuda.local.array(n_b, f32),
            )
            rows = Rows(
                i32(0),
                cuda.local.array(2, f32),
                cuda.local.array(2, f32),
                ring.pairs + u32((thread & 3) * 16),
                ring.last + u32((thread - 128) * 2),
            )
            n = i32(0)
            while place_in(turn) < tiles_of_rows:
                n = compute(turn, n, work, rows, ring, call)
                turn += 1

    return Source(backward, SIGNATURE, 128 * (1 + CONSUMERS), layout.shared_bytes)
