"""Tiles of queries, keys and values of the INT8 Hopper kernel: where they lie in shared memory, and who
brings them.

One thread brings Q once, and blocks of 128 keys, K with V and K's scales, through a ring. Full and
empty mbarriers connect it with the warpgroups that compute.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ...tiling import KEY_BLOCK
from ..compile.target import device_function, types
from ..instructions import ptx
from .hopper import PANEL_BYTES
from .int8_rows import ROW_BYTES

i32, u32, u64 = types.int32, types.uint32, types.uint64
Q, K, V, SCALES = (128 * n for n in range(4))  # tensor maps, bytes from the first


class Layout(NamedTuple):
    """Shared memory of a block, in bytes from a multiple of 1024: barriers, Q, the ring's stages of K
    and V, the ring's scales, the table of `int8_rows`.
    """

    d: int
    dv: int
    block_q: int

    @property
    def stages(self) -> int:
        """Of the ring, a power of two."""
        return 4 if max(self.d, self.dv) <= 128 else 2

    @property
    def panels(self) -> int:
        """Of a tile of Q or K."""
        return -(-self.d // PANEL_BYTES)

    @property
    def q_panel(self) -> int:
        """Of one panel of Q."""
        return self.block_q * PANEL_BYTES

    @property
    def k_panel(self) -> int:
        """Of one panel of a tile of K."""
        return KEY_BLOCK * PANEL_BYTES

    @property
    def k_size(self) -> int:
        """Of a tile of K."""
        return self.panels * self.k_panel

    @property
    def stage(self) -> int:
        """Of a stage: K, then V."""
        return self.k_size + self.dv * KEY_BLOCK

    @property
    def stage_scales(self) -> int:
        """Of the scales of a tile of K."""
        return KEY_BLOCK * 4

    @property
    def ring(self) -> int:
        """Where the ring begins."""
        return 1024 + self.panels * self.q_panel

    @property
    def scales(self) -> int:
        """Where the ring's scales begin."""
        return self.ring + self.stages * self.stage

    @property
    def table(self) -> int:
        """Where the table begins."""
        return self.scales + self.stages * self.stage_scales

    @property
    def shared_bytes(self) -> int:
        """Of a block, with what aligns it."""
        return self.table + self.block_q * ROW_BYTES + 1024


class Ring(NamedTuple):
    """Shared addresses."""

    q: Any
    tiles: Any  # the ring's first stage: K, then V
    scales: Any  # of the first stage
    full_q: Any  # mbarriers
    full: Any  # 8 bytes per stage
    empty: Any


@functools.cache
def make_ring(layout: Layout) -> tuple[Any, Any]:
    """(ring_at(base), prepare(ring)): the `Ring` from a multiple of 1024 on, and its mbarriers
    initialised.
    """
    tiles, scales, stages, readers = layout.ring, layout.scales, layout.stages, 2 * layout.block_q

    @device_function
    def ring_at(base):
        return Ring(
            base + u32(1024),
            base + u32(tiles),
            base + u32(scales),
            base,
            base + u32(16),
            base + u32(64),
        )

    @device_function
    def prepare(ring):
        ptx.mbarrier_init(ring.full_q, u32(1))
        for i in range(stages):
            ptx.mbarrier_init(ring.full + u32(8 * i), u32(1))
            ptx.mbarrier_init(ring.empty + u32(8 * i), u32(readers))
        ptx.fence_mbarrier_init()

    return ring_at, prepare


@functools.cache
def make_bring(layout: Layout, packed: int) -> Any:
    """bring(tile, tiles, first, pack, kv_head, batch, ring, maps): the producer's part.

    Q's rows from `first` on of the `pack`-th heads that are packed together, and the tiles of keys
    [tile, tiles) of a key head.
    """
    panels, q_panel, k_panel, k_size = layout.panels, layout.q_panel, layout.k_panel, layout.k_size
    stages, turn = layout.stages, layout.stages.bit_length() - 1
    stage_size, scale_size = layout.stage, layout.stage_scales

    @device_function
    def bring_queries(first, pack, batch, ring, maps):
        ptx.mbarrier_expect(ring.full_q, u32(panels * q_panel))
        for h in range(panels):
            at, column = ring.q + u32(h * q_panel), i32(h * PANEL_BYTES)
            ptx.tma_load_5d(
                at, maps + u64(Q), column, i32(0), first // packed, pack, batch, ring.full_q
            )

    @device_function
    def bring_tile(n, tile, kv_head, batch, ring, maps):
        """Keys, scales and values as the ring's block n, once its stage is empty."""
        stage, parity = u32(n & (stages - 1)), u32(((n >> turn) & 1) ^ 1)
        at, bar = ring.tiles + stage * u32(stage_size), ring.full + stage * u32(8)
        start = i32(tile * KEY_BLOCK)
        ptx.mbarrier_wait(ring.empty + stage * u32(8), parity)
        ptx.mbarrier_expect(bar, u32(stage_size + scale_size))
        for h in range(panels):
            column = i32(h * PANEL_BYTES)
            ptx.tma_load_4d(
                at + u32(h * k_panel), maps + u64(K), column, start, kv_head, batch, bar
            )
        to = ring.scales + stage * u32(scale_size)
        ptx.tma_load_4d(to, maps + u64(SCALES), start, i32(0), kv_head, batch, bar)
        ptx.tma_load_4d(at + u32(k_size), maps + u64(V), start, i32(0), kv_head, batch, bar)

    @device_function
    def bring(tile, tiles, first, pack, kv_head, batch, ring, maps):
        for i in range(4):  # the maps are in global memory, written before this launch
            ptx.tensormap_acquire(maps + u64(128 * i))
        bring_queries(first, pack, batch, ring, maps)
        n = i32(0)
        while tile < tiles:
            bring_tile(n, tile, kv_head, batch, ring, maps)
            n = i32(n + 1)
            tile = i32(tile + 1)

    return bring
