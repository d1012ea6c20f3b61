"""Tiles of queries, keys and values of the 16-bit Hopper kernel: where they lie in shared memory, and
who brings them.

A block computes tile of rows after tile of rows. Their tiles of keys and values go through a ring of
two stages, the last one first. Full and empty mbarriers connect the thread that brings them with the
warpgroups that compute; Q counts with its first tile of keys.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import device_function, types
from ..instructions import ptx
from .hopper import DESCRIPTOR, PANEL, PANEL_BYTES, ahead, descriptor
from .hopper_cluster import make_bring as make_bring_panels
from .hopper_cluster import make_release, readers

i32, u32, u64 = types.int32, types.uint32, types.uint64
STAGES = 2
BARRIERS, OF_VALUES = 16, 8  # bytes of a stage's two mbarriers: of keys, then of values
K, V = 128, 256  # tensor maps, bytes from the first, which is Q's


class Layout(NamedTuple):
    """Shared memory of a block, in bytes from a multiple of 1024: barriers, tiles of Q, the ring's
    stages of K and V, 4 bytes for each thread that computes.
    """

    d: int
    dv: int
    block_q: int
    block_k: int
    queries: int  # tiles of Q
    overlap: bool

    @property
    def q_panel(self) -> int:
        """Of one panel of a tile of Q."""
        return self.block_q * PANEL_BYTES

    @property
    def k_panel(self) -> int:
        """Of one panel of a tile of K or V."""
        return self.block_k * PANEL_BYTES

    @property
    def q_size(self) -> int:
        """Of a tile of Q."""
        return self.d // PANEL * self.q_panel

    @property
    def k_size(self) -> int:
        """Of a tile of K."""
        return self.d // PANEL * self.k_panel

    @property
    def v_size(self) -> int:
        """Of a tile of V."""
        return self.dv // PANEL * self.k_panel

    @property
    def pair(self) -> int:
        """Of a stage: K, then V."""
        return self.k_size + self.v_size

    @property
    def ring(self) -> int:
        """Where the ring begins."""
        return 1024 + self.queries * self.q_size

    @property
    def sums(self) -> int:
        """Where the threads' own 4 bytes begin, which only `overlap` needs."""
        return self.ring + STAGES * self.pair

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what aligns it."""
        return self.sums + (8 * self.block_q if self.overlap else 0) + 1024


class Ring(NamedTuple):
    """Shared addresses of tiles and barriers, and a warpgroup's numbers of named barriers."""

    rows: Any  # Q, of this tile of rows
    query: Any  # descriptor of the warpgroup's rows of it
    tiles: Any  # the ring's first stage: keys, then values
    full: Any  # mbarriers, 16 bytes per stage: keys, and a tile of Q with its first; then values
    empty: Any
    emptied: Any  # where this thread arrives for the first stage, of its cluster's `empty`
    sums: Any  # the thread's own 4 bytes
    turn: Any  # this warpgroup may issue products
    next: Any  # the next one's


@functools.cache
def make_ring(layout: Layout, cluster: int) -> tuple[Any, Any]:
    """(ring_at, prepare): the `Ring` of a thread from a multiple of 1024 on, with the first tile of Q,
    and its mbarriers initialised, `maps` being the three tensor maps.

    ring_at(base, thread, warpgroup), prepare(ring, maps)
    """
    first_tile, sums, consumers = layout.ring, layout.sums, layout.block_q // 64
    reads, (emptied, _) = readers(cluster, consumers), make_release(cluster)

    @device_function
    def ring_at(base, thread, warpgroup):
        rows = base + u32(1024)
        return Ring(
            rows,
            descriptor(DESCRIPTOR, rows + u32((warpgroup - 1) * 64 * PANEL_BYTES)),
            base + u32(first_tile),
            base,
            base + u32(64),
            emptied(base + u32(64)),
            base + u32(sums) + u32((thread - 128) * 4),
            u32(warpgroup),
            u32(warpgroup % consumers + 1),
        )

    @device_function
    def prepare(ring, maps):
        for i in range(2 * STAGES):
            ptx.mbarrier_init(ring.full + u32(8 * i), u32(1))
            ptx.mbarrier_init(ring.empty + u32(8 * i), u32(reads))
        ptx.fence_mbarrier_init()
        for i in range(3):  # the maps are in global memory, written before this launch
            ptx.tensormap_acquire(maps + u64(128 * i))

    return ring_at, prepare


@functools.cache
def make_with_queries(layout: Layout) -> Any:
    """with_queries(ring, q_tile): the ring with tile 0 or 1 of Q in shared memory."""
    queries, q_size = layout.queries, layout.q_size

    @device_function
    def with_queries(ring, q_tile):
        if queries == 1:
            return ring
        rows = ring.rows + u32(q_tile) * u32(q_size)
        query = ahead(ring.query, i32(q_tile) * i32(q_size >> 4))
        return Ring(
            rows,
            query,
            ring.tiles,
            ring.full,
            ring.empty,
            ring.emptied,
            ring.sums,
            ring.turn,
            ring.next,
        )

    return with_queries


@functools.cache
def make_bring(
    layout: Layout, group: int, packed: int, cluster: int, rows_in: Any, keys_of: Any, start_of: Any
) -> Any:
    """bring(turn, n, ring, maps, call: Call): the producer's part of a tile of rows, whose first tile
    of keys is the ring's tile n. Returns the number of the next one.

    rows_in, keys_of : `hopper_keys`;  start_of : `score_functions.make_tile_list`
    """
    queries, q_size, k_size, v_size = layout.queries, layout.q_size, layout.k_size, layout.v_size
    pair = layout.pair
    d_panels, dv_panels, q_panel = layout.d // PANEL, layout.dv // PANEL, layout.q_panel
    bring_k, bring_v = (
        make_bring_panels(cluster, n, layout.k_panel) for n in (d_panels, dv_panels)
    )

    @device_function
    def bring_q(n, turn, ring, maps, call):
        """Loads a tile of Q, which counts with the keys of the ring's tile n.

        The last products with the tile of Q before it are done when tile n - 1 is released, which
        happens ahead of that tile's softmax. With two tiles of Q those with the last but one are done
        when tile n - 2 is, for which the keys have waited.
        """
        bar = ring.full + u32(n & 1) * u32(BARRIERS)
        if queries == 1:
            ptx.mbarrier_wait(
                ring.empty + u32((n - 1) & 1) * u32(BARRIERS), u32(((n - 1) >> 1) & 1)
            )
        ptx.mbarrier_expect(bar, u32(q_size))
        place = rows_in(ptx.fresh(turn), call)  # in no register until here
        first_row, first_head, batch, _ = place
        for h in range(d_panels):
            at, column = ring.rows + u32(h * q_panel), i32(h * PANEL)
            ptx.tma_load_5d(
                at, maps, column, i32(0), first_row // packed, first_head // packed, batch, bar
            )

    @device_function
    def bring_keys(n, first, start, place, ring, maps):
        """Loads keys as the ring's tile n once its stage is empty, the `first` ones before Q.

        Their stage is free before the rows are.
        """
        stage = u32(n & 1)
        bar, at = ring.full + stage * u32(BARRIERS), ring.tiles + stage * u32(pair)
        ptx.mbarrier_wait(ring.empty + stage * u32(BARRIERS), u32(((n >> 1) & 1) ^ 1))
        if first:
            ptx.mbarrier_expect_more(bar, u32(k_size))
        else:
            ptx.mbarrier_expect(bar, u32(k_size))
        bring_k(at, maps + u64(K), start, place[1] // group, place[2], bar)

    @device_function
    def bring_values(n, start, place, ring, maps):
        stage = u32(n & 1)
        bar = ring.full + stage * u32(BARRIERS) + u32(OF_VALUES)
        at = ring.tiles + stage * u32(pair) + u32(k_size)
        ptx.mbarrier_wait(
            ring.empty + stage * u32(BARRIERS) + u32(OF_VALUES), u32(((n >> 1) & 1) ^ 1)
        )
        ptx.mbarrier_expect(bar, u32(v_size))
        bring_v(at, maps + u64(V), start, place[1] // group, place[2], bar)

    @device_function
    def bring(turn, n, ring, maps, call):
        place = rows_in(turn, call)
        found = keys_of(place, call)
        first, last = n, i32(found.tiles - 1 + n)
        while n <= i32(last - found.tile):
            start = start_of(found.listed_at, last - n)
            bring_keys(n, n == first, start, place, ring, maps)
            if n == first:
                bring_q(n, turn, ring, maps, call)
            bring_values(n, start, place, ring, maps)
            n = i32(ptx.fresh(n) + 1)  # a loop whose passes LLVM cannot count stays one
        return n

    return bring
