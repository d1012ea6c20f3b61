"""Tiles of a backward pass on Hopper: where they lie in shared memory, and who brings them.

A block is persistent: it computes tile of own rows after tile of own rows. Those of a and b come
once, tiles of c and e, in the pass of the keys with the statistics of their queries, go through a
ring of stages. Full and empty mbarriers connect the warp that brings them with the warpgroups that
compute.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper import PANEL, PANEL_BYTES

i32, u32, u64 = types.int32, types.uint32, types.uint64
ROWS = 128  # that a block owns, 64 per warpgroup
CONSUMERS = ROWS // 64
A, B, C, E, STATISTICS = (128 * n for n in range(5))  # tensor maps, bytes from the first


class Layout(NamedTuple):
    """Shared memory of a block, in bytes from a multiple of 1024: barriers, a, b, the ring's stages
    of c and e, the ring's statistics.
    """

    d: int
    columns: int
    stages: int
    of_keys: bool

    @property
    def own(self) -> int:
        """Of a tile of a or b."""
        return ROWS * self.d * 2

    @property
    def other(self) -> int:
        """Of a tile of c or e."""
        return self.columns * self.d * 2

    @property
    def statistics(self) -> int:
        """Of the pairs (LSE, D) of a tile of queries."""
        return self.columns * 8 if self.of_keys else 0

    @property
    def ring(self) -> int:
        """Where the ring begins."""
        return 1024 + 2 * self.own

    @property
    def pairs(self) -> int:
        """Where the ring's statistics begin."""
        return self.ring + 2 * self.stages * self.other

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what aligns it."""
        return self.pairs + self.stages * self.statistics + 1024


class Ring(NamedTuple):
    """Shared addresses."""

    a: Any
    b: Any
    tiles: Any  # the first stage: c, then e
    pairs: Any  # of the first stage
    full_own: Any  # mbarriers
    empty_own: Any
    landed: Any  # of a tile that the bringing warp changes before it is full
    full: Any  # 8 bytes per stage
    empty: Any
    last: Any  # two bytes for each thread that computes


def make_ring(layout: Layout) -> tuple[Any, Any]:
    """(ring_at, prepare): the `Ring` from a multiple of 1024 on, and its mbarriers initialised."""
    own, ring, pairs, stages = layout.own, layout.ring, layout.pairs, layout.stages
    maps_used = 5 if layout.of_keys else 4

    @device_function
    def ring_at(base):
        return Ring(
            base + u32(1024),
            base + u32(1024 + own),
            base + u32(ring),
            base + u32(pairs),
            base,
            base + u32(8),
            base + u32(16),
            base + u32(24),
            base + u32(24 + 8 * stages),
            base + u32(512),
        )

    @device_function
    def prepare(ring, maps):
        ptx.mbarrier_init(ring.full_own, u32(1))
        ptx.mbarrier_init(ring.empty_own, u32(128 * CONSUMERS))
        ptx.mbarrier_init(ring.landed, u32(1))
        for i in range(stages):
            ptx.mbarrier_init(ring.full + u32(8 * i), u32(1))
            ptx.mbarrier_init(ring.empty + u32(8 * i), u32(128 * CONSUMERS))
        ptx.fence_mbarrier_init()
        for i in range(maps_used):  # in global memory, written before this launch
            ptx.tensormap_acquire(maps + u64(128 * i))

    return ring_at, prepare


def make_bring(layout: Layout, group: int) -> Any:
    """bring(turn, n, landed, first, tile, tiles, block, ring, maps, call): the part of the warp that
    brings tiles, for a tile of own rows; n and landed then.

    turn, n : of the tile of own rows, and of its first tile in the ring
    landed : how many tiles have been changed before they were full

    In the pass of the keys from every query head of the group. Rows of c that are no keys of their
    batch entry, but there in memory, become zeros: of dS they are multiplied by zeros, and may hold
    anything.
    """
    d, columns, stages, of_keys = layout
    panels, own_panel, panel = d // PANEL, ROWS * PANEL_BYTES, columns * PANEL_BYTES
    own, other, statistics = layout.own, layout.other, layout.statistics
    heads_of_other = group if of_keys else 1

    @device_function
    def bring_own(turn, lane, first, block, ring, maps):
        """Once the last products with the ones before are done."""
        ptx.mbarrier_wait(ring.empty_own, u32(turn & 1) ^ u32(1))
        if lane == 0:
            ptx.mbarrier_expect(ring.full_own, u32(2 * own))
            head, batch, bar = block.head, block.batch, ring.full_own
            for h in range(panels):
                ahead, column = u32(h * own_panel), i32(h * PANEL)
                ptx.tma_load_4d(ring.a + ahead, maps + u64(A), column, first, head, batch, bar)
                ptx.tma_load_4d(ring.b + ahead, maps + u64(B), column, first, head, batch, bar)

    @device_function
    def bring_tile(stage, start, head, batch, bar, ring, maps):
        ptx.mbarrier_expect(bar, u32(2 * other + statistics))
        to = ring.tiles + stage * u32(2 * other)
        for h in range(panels):
            ahead, column = u32(h * panel), i32(h * PANEL)
            ptx.tma_load_4d(to + ahead, maps + u64(C), column, start, head, batch, bar)
        for h in range(panels):
            ahead, column = u32(other + h * panel), i32(h * PANEL)
            ptx.tma_load_4d(to + ahead, maps + u64(E), column, start, head, batch, bar)
        if of_keys:
            to = ring.pairs + stage * u32(statistics)
            ptx.tma_load_3d(to, maps + u64(STATISTICS), i32(2 * start), head, batch, bar)

    @device_function
    def clear_rows(at, row, lane):
        """Zeros in the rows of a tile of c from `row` on."""
        zeros = cuda.local.array(4, u32)
        for n in range(4):
            zeros[n] = u32(0)
        while row < columns:
            for h in range(panels):
                place = at + u32(h * panel) + u32(row * PANEL_BYTES) + u32((lane & 7) * 16)
                if lane < 8:
                    ptx.store_shared_v4(place, zeros, 0)
            row += 1
        ptx.fence_async()
        cuda.syncwarp()

    @device_function
    def bring(turn, n, landed, first, tile, tiles, block, ring, maps, call):
        lane = i32(cuda.threadIdx.x) & 31
        head = i32(block.head * group) if of_keys else i32(block.head // group)
        end_head = i32(head + heads_of_other) if tile < tiles else head
        waiting = True
        while head < end_head:
            t = tile
            while t < tiles:
                stage, start = n % u32(stages), i32(t * columns)
                # what TMA finds beyond the array is zero already
                ragged = (
                    not of_keys
                    and i32(start + columns) > block.other_left
                    and block.other_left < call.sizes[1]
                )
                full, parity = ring.full + stage * u32(8), (n // u32(stages)) & u32(1)
                ptx.mbarrier_wait(ring.empty + stage * u32(8), parity ^ u32(1))
                if lane == 0:
                    bar = ring.landed if ragged else full
                    bring_tile(stage, start, head, block.batch, bar, ring, maps)
                if ragged:  # the last tile
                    ptx.mbarrier_wait(ring.landed, landed & u32(1))
                    landed = u32(landed + u32(1))
                    at = ring.tiles + stage * u32(2 * other)
                    clear_rows(at, i32(block.other_left - start), lane)
                    if lane == 0:
                        ptx.mbarrier_arrive(full)
                if waiting:  # the first stage is free before the own rows are
                    bring_own(turn, lane, first, block, ring, maps)
                    waiting = False
                n = u32(n + u32(1))
                t = ptx.fresh(i32(t + 1))  # unrolled the loop would spill
            head += 1
        if waiting:  # own rows that attend to nothing
            bring_own(turn, lane, first, block, ring, maps)
        return n, landed

    return bring
