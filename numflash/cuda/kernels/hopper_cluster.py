"""How the blocks of a cluster share tiles of keys and values in the 16-bit Hopper kernel.

They compute neighbouring tiles of rows of one head, and need the same tiles of keys. Each block
brings its share of a tile's panels and the copy engine writes them to the same place in every block,
so that a tile comes from L2 once for the cluster. Two rules follow (PTX 9.7.13.15 and 9.7.9.27):

* a block's full mbarrier expects the bytes of the whole tile, whoever brings them;
* a stage is empty when its readers in all blocks are done, as each producer writes to all: one
  lane of a warp arrives for it at the empty mbarrier of each block.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper import PANEL

i32, u32 = types.int32, types.uint32
WARPS = 4  # of a warpgroup


def readers(blocks: int, warpgroups: int) -> int:
    """Arrivals that make a stage empty."""
    return 128 * warpgroups if blocks == 1 else blocks * WARPS * warpgroups


@functools.cache
def make_meet(blocks: int) -> Any:
    """meet(): the threads of all blocks wait for each other."""

    @device_function
    def meet():
        if blocks == 1:
            cuda.syncthreads()
        else:
            ptx.cluster_arrive()
            ptx.cluster_wait()

    return meet


@functools.cache
def make_release(blocks: int) -> tuple[Any, Any]:
    """How readers of a stage tell the producers of `blocks`, a power of two, that it is empty.

    emptied(empty): where this thread arrives, given its own block's mbarrier; release(emptied): its
    warp's products have read the stage. The arrival has no `.release.cluster`, for which ptxas waits
    for all of the thread's memory accesses; products that are waited for have done their reading.
    """

    @device_function
    def emptied(empty):
        if blocks == 1:
            return empty
        return ptx.cluster_address(empty, u32(cuda.threadIdx.x) & u32(blocks - 1))

    @device_function
    def release(at):
        if blocks == 1:
            ptx.mbarrier_arrive(at)
        else:
            ptx.mbarrier_arrive_cluster(at, u32(cuda.threadIdx.x) & u32(31), u32(blocks))

    return emptied, release


@functools.cache
def make_bring(blocks: int, panels: int, size: int) -> Any:
    """bring(to, tensor, start, head, batch, full): a tile of `panels` panels of `size` bytes.

    Of a cluster each block brings its share, to all blocks.
    """
    share, everyone = panels // blocks, (1 << blocks) - 1  # a bit for each block

    @device_function
    def bring(to, tensor, start, head, batch, full):
        first = i32(0) if blocks == 1 else i32(ptx.cluster_rank()) * i32(share)
        for h in range(share):
            at, column = to + u32((first + h) * size), i32((first + h) * PANEL)
            if blocks == 1:
                ptx.tma_load_4d(at, tensor, column, start, head, batch, full)
            else:
                ptx.tma_multicast_4d(at, tensor, column, start, head, batch, full, u32(everyone))

    return bring
