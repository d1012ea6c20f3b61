"""Tiles of the backward pass of `mma.sync`: where they lie in shared memory, how those of the other side
come there, and how a warp's sums leave.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from .products import make_stage
from .tiles import make_copy, make_load_tile, make_store_rows

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32


class Layout(NamedTuple):
    """Shared memory of a block: a, b, the stages of c, those of e, those of the statistics, in bytes."""

    d: int
    dv: int
    rows: int
    columns: int
    of_keys: bool
    turing: bool

    @property
    def stages(self) -> int:
        """Tiles of the other side: sm_75 has no copies beside products."""
        return 1 if self.turing else 2

    @property
    def a(self) -> int:
        """Of a tile of a."""
        return self.rows * self.d * 2

    @property
    def b(self) -> int:
        """Of a tile of b."""
        return self.rows * self.dv * 2

    @property
    def c(self) -> int:
        """Of a tile of c."""
        return self.columns * self.d * 2

    @property
    def e(self) -> int:
        """Of a tile of e."""
        return self.columns * self.dv * 2

    @property
    def statistics(self) -> int:
        """Of the pairs (LSE, D) of a tile of queries."""
        return self.columns * 8 if self.of_keys else 0

    @property
    def shared_bytes(self) -> int:
        """Of a block."""
        return self.a + self.b + self.stages * (self.c + self.e + self.statistics)


@functools.cache
def make_bring(layout: Layout, threads: int) -> Any:
    """bring(sc, stage, call: Call, start, other_left, head, batch, thread): the other side's tile from
    row `start` of a head on, with the statistics of its queries, to a stage of shared memory.

    sc : the first stage of c
    """
    columns, of_keys, stages, stat_size = (
        layout.columns, layout.of_keys, layout.stages, layout.statistics,
    )  # fmt: skip
    c_size, e_size, asynchronous = layout.c, layout.e, not layout.turing
    copy = make_copy(asynchronous)
    load_c, load_e = (
        make_load_tile(columns, 2 * n, threads, asynchronous) for n in (layout.d, layout.dv)
    )

    @device_function
    def bring(sc, stage, call, start, other_left, head, batch, thread):
        c, e, stats = call.pointers[2], call.pointers[3], call.pointers[6]
        c_batch, c_head, c_step, e_batch, e_head, e_step = call.strides[6:12]
        _, _, d_left, dv_left, heads, _, _, stat_rows = call.sizes
        left = i32(other_left - start)
        to_c, to_e = sc + u32(stage * c_size), sc + u32(stages * c_size + stage * e_size)
        c = c + u64(batch * c_batch + head * c_head + start * c_step)
        load_c(to_c, c, c_step, left, d_left, thread)
        e = e + u64(batch * e_batch + head * e_head + start * e_step)
        load_e(to_e, e, e_step, left, dv_left, thread)
        if of_keys and thread < columns // 2:
            copy(
                sc + u32(stages * (c_size + e_size) + stage * stat_size + thread * 16),
                0,
                stats + u64(((batch * heads + head) * stat_rows + start) * 8 + thread * 16),
                True,
            )

    return bring


@functools.cache
def make_store_sums(d: int, dv: int, dtype: str, turing: bool, want_a: bool, want_b: bool) -> Any:
    """store_sums(sum_a, sum_b, sa, sb, call: Call, block: Block, first, warp, lane): write the warp's
    sums, through its own part of the tiles at `sa` and `sb`: 16 bytes at a time.

    first : the block's first row
    """
    d_bytes, dv_bytes = d * 2, dv * 2
    stage_a, stage_b = (make_stage(n, dtype, turing) for n in (d, dv))
    store_a, store_b = (make_store_rows(n, 1) for n in (d_bytes, dv_bytes))

    @device_function
    def store_sums(sum_a, sum_b, sa, sb, call, block, first, warp, lane):
        out_a, out_b, scale = call.pointers[4], call.pointers[5], call.factors[1]
        a_batch, a_head, a_step, b_batch, b_head, b_step = call.strides[12:18]
        own_rows, _, d_left, dv_left = call.sizes[:4]
        row, row0 = first + warp * 16, i32(first + warp * 16 + (lane >> 2))
        live0 = f32(1) if row0 < block.own_left else f32(0)
        live1 = f32(1) if row0 + 8 < block.own_left else f32(0)
        cuda.syncwarp()
        if want_a:
            mine = sa + u32(warp * 16 * d_bytes)
            stage_a(sum_a, mine, scale * live0, scale * live1, lane)
            cuda.syncwarp()
            to = out_a + u64(block.batch * a_batch + block.head * a_head)
            store_a(mine, to, i64(0), a_step, row, own_rows, d_left, lane)
        if want_b:
            mine = sb + u32(warp * 16 * dv_bytes)
            stage_b(sum_b, mine, live0, live1, lane)
            cuda.syncwarp()
            to = out_b + u64(block.batch * b_batch + block.head * b_head)
            store_b(mine, to, i64(0), b_step, row, own_rows, dv_left, lane)

    return store_sums
