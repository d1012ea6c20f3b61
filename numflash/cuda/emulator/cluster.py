"""Blocks of a cluster: how they name each other's shared memory, and the barrier of their threads.

An address of the window shared::cluster has the block's rank, plus one, above the address within
its shared memory; without a rank it is the own block's (PTX 5.1.6.1). A block's shared memory is
gone when its last thread has ended: what other blocks do with it must be ordered before that end.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import Run, binds, write
from .errors import Fault
from .parse import Instruction

if TYPE_CHECKING:
    from .machine import Machine

RANK_BITS = 24  # below the rank: the address within a block's shared memory
WITHIN = (1 << RANK_BITS) - 1


class Clusters:
    """The clusters of a batch: consecutive blocks, `size` at a time."""

    def __init__(self, machine: Machine) -> None:
        self.m, self.size = machine, machine.cluster
        self.first = machine.block_of // self.size * self.size  # first block of a thread's cluster
        self.reset()

    def reset(self) -> None:
        """As at the start of the blocks: no thread has come to the barrier, none uses another block."""
        m = self.m
        clusters, columns = m.blocks // self.size, m.shared.clock.shape[1]
        self.arrivals = np.zeros(m.n, np.int64)  # at barrier.cluster, of each thread
        self.waits = np.zeros(m.n, np.int64)
        self.phase = np.zeros(clusters, np.int64)
        self.released = np.zeros((clusters, columns), np.int32)  # clocks of the arrivals
        # the clock at which a warp of another block has last used a block's shared memory
        self.used = np.zeros((m.blocks, m.shared.span), np.int32)

    # ---- addresses
    def reach(self, lanes: np.ndarray, address: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Block and address within it of addresses in the window shared::cluster."""
        rank = address >> RANK_BITS
        if (rank > self.size).any():
            raise Fault(
                "out-of-bounds", f"a shared address of block {int(rank.max()) - 1} of a cluster"
            )
        own = self.m.block_of[lanes]
        block = np.where(rank == 0, own, self.first[lanes] + rank - 1)
        for other in np.unique(block[block != own]):
            self.use(int(other), np.unique(self.m.warp[lanes[block == other]]))
        return block, address & WITHIN

    def use(self, block: int, warps: np.ndarray) -> None:
        """Warps of another block use this block's shared memory."""
        shared = self.m.shared
        if not self.m.alive[self.m.block_of == block].any():
            raise Fault("race", f"shared memory of a block that has ended ({self._rank(block)})")
        self.used[block, warps % shared.span] = shared.clock[warps, warps % shared.span]

    def named(self, thread: int, mask: int) -> list[int]:
        """The blocks of a cta_mask."""
        if mask == 0 or mask >> self.size:
            raise Fault("protocol", f"a cta_mask of {mask:#x} in a cluster of {self.size} blocks")
        found = [int(self.first[thread]) + r for r in range(self.size) if mask >> r & 1]
        for block in found:
            if block != self.m.block_of[thread]:
                self.use(block, self.m.warp[[thread]])
        return found

    def _rank(self, block: int) -> str:
        return f"block {block % self.size} of the cluster"

    # ---- the barrier
    def arrive(self, mask: Any, release: bool) -> None:
        m = self.m
        lanes = m.thread if mask is True else np.nonzero(mask)[0]
        if (self.arrivals[lanes] != self.waits[lanes]).any():
            raise Fault("protocol", "barrier.cluster.arrive twice without barrier.cluster.wait")
        self.arrivals[lanes] += 1
        warps = np.unique(m.warp[lanes])
        for warp in warps if release else ():
            cluster = warp // m.shared.span
            self.released[cluster] = np.maximum(self.released[cluster], m.shared.clock[warp])
        m.shared.tick(warps)
        m.shared.epoch[warps] += 1
        self.settle()

    def settle(self) -> None:
        """A phase ends when all threads that have not ended are there."""
        m = self.m
        absent = m.alive & (self.arrivals <= self.phase[self.first // self.size])
        here = m.alive.reshape(self.phase.size, -1).any(1)
        done = here & ~absent.reshape(self.phase.size, -1).any(1)
        if done.any():
            self.phase += done
            m.copies.version += 1

    def bind_wait(self, i: Instruction) -> Any:
        """For the machine: which threads find the phase over; they learn what arrivals knew."""
        m = self.m

        def ready(mask: np.ndarray) -> np.ndarray:
            if "aligned" in i.modifiers:
                m.whole_warps(mask, "barrier.cluster.wait.aligned")
            if (mask & (self.arrivals == self.waits)).any():
                raise Fault("protocol", "barrier.cluster.wait without barrier.cluster.arrive")
            done = mask & (self.phase[self.first // self.size] >= self.arrivals)
            self.waits[done] += 1
            warps = np.unique(m.warp[done])
            known = self.released[warps // m.shared.span]
            m.shared.clock[warps] = np.maximum(m.shared.clock[warps], known)
            m.shared.epoch[warps] += 1
            return done

        return ready

    # ---- the end of a block
    def ended(self, mask: np.ndarray) -> None:
        """Threads have ended; faults where a whole block has, whose shared memory is in use."""
        m, shared = self.m, self.m.shared
        for block in np.unique(m.block_of[mask]):
            if m.alive[m.block_of == block].any():
                continue
            if m.copies.under_way(block):
                raise Fault("race", "a block ends while a copy into its shared memory is under way")
            warps = slice(block * shared.warps, (block + 1) * shared.warps)
            late = self.used[block] > shared.clock[warps].max(0)[: shared.span]
            if late.any():
                user = self._rank(int(np.nonzero(late)[0][0]) // shared.warps)
                raise Fault(
                    "race",
                    f"{self._rank(int(block))} ends while {user} may still use its shared memory",
                )
        self.settle()


@binds("mapa")
def map_address(m: Machine, i: Instruction) -> Run:
    if "shared::cluster" not in i.modifiers or i.type != "u32":
        raise Fault("unsupported", i.text)
    d = m.target(i.operands[0], "u32")
    address, rank = (m.value(x, "u32") for x in i.operands[1:3])

    def run(mask: Any) -> None:
        some = np.broadcast_to(rank, m.n)[m.full(mask)]
        if some.size and int(some.max()) >= m.cluster:
            raise Fault("protocol", f"mapa of block {int(some.max())} of a cluster of {m.cluster}")
        shifted = (rank + np.uint32(1)) << np.uint32(RANK_BITS)
        write(d, (address & np.uint32(WITHIN)) | shifted, mask)

    return run


@binds("barrier")
def arrive_at_cluster(m: Machine, i: Instruction) -> Run:
    """barrier.cluster.arrive; the machine itself waits."""

    def run(mask: Any) -> None:
        if "aligned" in i.modifiers:
            m.whole_warps(mask, "barrier.cluster.arrive.aligned")
        m.clusters.arrive(mask, "relaxed" not in i.modifiers)

    return run
