"""Copies that finish later: cp.async groups, and TMA with mbarriers.

Everything is as late as the rules allow. A cp.async lands at the wait of the thread that issued it;
a TMA tile when every warp waits; until then the bytes are "pending" and reading them is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..instructions.tensormap import TensorMap
from .binders import Run, binds
from .errors import Fault
from .memory import PENDING, sectors, wavefronts
from .parse import Instruction, vector

if TYPE_CHECKING:
    from .machine import Machine


@dataclass
class Mbarrier:
    """An mbarrier object.

    Arrivals still missing in this phase, bytes still expected, and the clocks it hands on.
    """

    made: tuple[int, int]  # the warp of the cluster that initialised it, and its clock then
    count: int
    missing: int
    clock: np.ndarray
    done: np.ndarray
    expected: int = 0
    phase: int = 0
    fenced: bool = False  # a fence has made the initialised object known to the copy engine


class Copies:
    """Groups of cp.async per thread's warp, and mbarriers with the tiles on their way."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.reset()

    def reset(self) -> None:
        warps = self.m.n // 32
        self.open: list[list[tuple]] = [[] for _ in range(warps)]
        self.groups: list[list[list[tuple]]] = [[] for _ in range(warps)]
        self.barriers: dict[tuple[int, int], Mbarrier] = {}
        self.flying: list[tuple[Mbarrier, Any]] = []
        self.version = 0

    # ---- cp.async
    def issue(
        self, lanes: np.ndarray, to: np.ndarray, source: np.ndarray, size: int, given: np.ndarray
    ) -> None:
        m = self.m
        index = m.shared.index(to, m.block_of[lanes], size)
        if (source & np.uint64(size - 1)).any():  # also where nothing is read
            raise Fault("misaligned", f"cp.async of {size} bytes from {int(source.max()):#x}")
        data = np.zeros((lanes.size, size), np.uint8)
        for n in np.unique(given):
            some = given == n
            if n > size:
                raise Fault("protocol", f"cp.async of {size} bytes with a source size of {int(n)}")
            if n:
                buffer, at = m.memory.locate(source[some], size if int(n) == size else 1)
                if at.max() + int(n) > buffer.size:
                    raise Fault("out-of-bounds", f"cp.async source of {int(n)} bytes")
                data[some, : int(n)] = buffer[at[:, None] + np.arange(int(n))]
                m.count("global_load_sectors", sectors(source[some], lanes[some], size))
        m.count("global_loaded", int(given.sum()))
        taken, ideal = wavefronts(index, lanes, size)
        m.count("shared_wavefronts", taken)
        m.count("shared_conflicts", taken - ideal)
        m.count("async_copied", size * lanes.size)
        g = m.shared.granules(index, size)
        m.shared.check_write(g, m.warp[lanes])
        m.shared.state[g] = PENDING
        for w in np.unique(lanes >> 5):
            mine = (lanes >> 5) == w
            self.open[w].append((index[mine], data[mine], g[mine], lanes[mine] & 31))

    def commit(self, warps: np.ndarray) -> None:
        for w in warps:
            self.groups[w].append(self.open[w])
            self.open[w] = []

    def wait(self, warps: np.ndarray, keep: int) -> None:
        m = self.m
        for w in warps:
            while len(self.groups[w]) > keep:
                for index, data, g, lanes in self.groups[w].pop(0):
                    m.shared.data[index[:, None] + np.arange(data.shape[1])] = data
                    m.shared.note_write(g, np.full(index.size, w), lanes)

    # ---- mbarrier
    def barrier(self, block: int, address: int, warps: np.ndarray) -> Mbarrier:
        """The mbarrier at an address, for warps that know that it is initialised."""
        found = self.barriers.get((block, address))
        if found is None:
            raise Fault("protocol", f"no mbarrier was initialised at shared byte {address - 1024}")
        warp, clock = found.made
        if (self.m.shared.clock[warps, warp] < clock).any():
            raise Fault(
                "race",
                f"the mbarrier at shared byte {address - 1024} is used without a barrier after its initialisation",
            )
        return found

    def under_way(self, block: int) -> bool:
        """Whether copies into a block's shared memory have not landed."""
        return any(copy[0] == block for _, copy in self.flying)

    def fence(self, warps: np.ndarray) -> None:
        """The copy engine learns of the mbarriers that are initialised in the warps' blocks."""
        blocks = set((warps // self.m.warps_per_block).tolist())
        for (block, _), bar in self.barriers.items():
            bar.fenced |= block in blocks

    def arrive(
        self,
        lanes: np.ndarray,
        block: np.ndarray,
        address: np.ndarray,
        expected: np.ndarray | None,
    ) -> None:
        """Lanes arrive at mbarriers of these blocks.

        Whatever its scope, an arrival orders what its warp has done before.
        """
        m = self.m
        for key in np.unique(block << 32 | address):
            mine = (block << 32 | address) == key
            warps = np.unique(m.warp[lanes[mine]])
            bar = self.barrier(int(key >> 32), int(key & 0xFFFFFFFF), warps)
            if expected is not None:
                bar.expected += int(expected[mine].sum())
            bar.missing -= int(mine.sum())
            if bar.missing < 0:
                raise Fault(
                    "protocol", f"more arrivals than the {bar.count} that the mbarrier counts"
                )
            bar.clock[:] = np.maximum(bar.clock, m.shared.clock[warps].max(0))
            m.shared.tick(warps)
            m.shared.epoch[warps] += 1
            self._finish(bar)

    def _finish(self, bar: Mbarrier) -> None:
        if bar.missing == 0 and bar.expected == 0:
            bar.phase += 1
            bar.missing = bar.count
            bar.done = np.maximum(bar.done, bar.clock)
            self.version += 1

    def bind_wait(self, i: Instruction) -> Any:
        """For the machine: which threads find the phase over (`mbarrier.try_wait`).

        They learn what the arrivals knew.
        """
        m = self.m
        if "parity" not in i.modifiers:
            raise Fault("unsupported", i.text)
        d = m.target(i.operands[0], "pred")
        parity = m.value(i.operands[2], "u32")
        base, offset = m.address(i.operands[1], "u32")

        def ready(mask: np.ndarray) -> np.ndarray:
            done = np.zeros(m.n, bool)
            lanes = np.nonzero(mask)[0]
            address = np.broadcast_to(base, m.n)[lanes].astype(np.int64) + offset
            wanted = np.broadcast_to(parity, m.n)[lanes]
            keys = m.block_of[lanes] << 32 | address
            for key in np.unique(keys):
                waiting = np.unique(m.warp[lanes[keys == key]])
                bar = self.barrier(int(key >> 32), int(key & 0xFFFFFFFF), waiting)
                mine = (keys == key) & ((bar.phase & 1) != wanted)
                done[lanes[mine]] = True
                warps = np.unique(m.warp[lanes[mine]])
                m.shared.clock[warps] = np.maximum(m.shared.clock[warps], bar.done)
                m.shared.epoch[warps] += 1
            d[done] = True
            return done

        return ready

    # ---- TMA
    def load_tile(
        self,
        thread: int,
        blocks: list[int],
        to: int,
        tensor: TensorMap,
        coordinates: list[int],
        address: int,
    ) -> None:
        """A tile is read once, and on its way to the same address in each of these blocks."""
        m = self.m
        data = _box(tensor, coordinates)
        offset = _places(tensor, to, data.size)
        m.count("global_loaded", data.size)
        m.count("global_load_sectors", data.size // 32)
        for block in blocks:
            bar = self.barrier(block, address, m.warp[[thread]])
            if not bar.fenced:
                raise Fault(
                    "protocol",
                    "a copy with an mbarrier that was initialised without fence.mbarrier_init",
                )
            index = m.shared.index(offset, np.full(offset.size, block), 16)
            g = m.shared.granules(index, 16)
            m.shared.check_write(g, np.full(index.size, m.warp[thread]), asynchronous=True)
            m.shared.state[g] = PENDING
            m.count("tma_copied", data.size)
            self.flying.append((bar, (block, index, data.reshape(-1, 16), g)))

    def land_one(self, random: np.random.Generator) -> bool:
        """One tile, any of those on their way, arrives. False if there is none."""
        if not self.flying:
            return False
        bar, (block, index, data, g) = self.flying.pop(int(random.integers(len(self.flying))))
        shared = self.m.shared
        shared.data[index[:, None] + np.arange(16)] = data
        column, clock = shared.land(block, g)
        bar.clock[column] = max(bar.clock[column], clock)
        bar.expected -= data.size
        # another block's part of a tile may come before its own block announces the whole
        if bar.expected < 0 and bar.missing == bar.count and self.m.cluster == 1:
            raise Fault("protocol", "more bytes arrived than mbarrier.arrive.expect_tx announced")
        self._finish(bar)
        self.version += 1
        return True


def _box(tensor: TensorMap, coordinates: list[int]) -> np.ndarray:
    """The bytes of a tensor map's box at these coordinates, zeros outside of its array."""
    array, box = tensor.array, tensor.box
    if len(coordinates) != array.ndim:
        raise Fault(
            "protocol",
            f"a copy of {len(coordinates)} coordinates by a tensor map of rank {array.ndim}",
        )
    start = coordinates[::-1]
    tile = np.zeros(box, array.dtype)
    inside = [
        slice(max(0, s), max(0, min(s + b, n)))
        for s, b, n in zip(start, box, array.shape, strict=True)
    ]
    if all(s.stop > s.start for s in inside):
        tile[tuple(slice(s.start - o, s.stop - o) for s, o in zip(inside, start, strict=True))] = (
            array[tuple(inside)]
        )
    return np.ascontiguousarray(tile).view(np.uint8).reshape(-1)


def _places(tensor: TensorMap, to: int, size: int) -> np.ndarray:
    """Where the box's pieces of 16 bytes go in shared memory."""
    if to % 128:
        raise Fault(
            "misaligned",
            f"a tile at shared byte {to - 1024}; allowed: multiples of 128",
        )
    offset = to + np.arange(0, size, 16)
    if tensor.swizzle != 128:
        return offset
    row = tensor.box[-1] * tensor.array.itemsize
    if to % 1024:
        raise Fault(
            "misaligned",
            f"a tile with 128-byte swizzle at shared byte {to - 1024}; allowed: multiples of 1024",
        )
    if row != 128:
        raise Fault("protocol", f"a box row of {row} bytes with 128-byte swizzle; allowed: 128")
    return offset ^ (((offset >> 7) & 7) << 4)


@binds("cp")
def copy(m: Machine, i: Instruction) -> Run:
    if "bulk" in i.modifiers:
        return _bulk(m, i)
    if "commit_group" in i.modifiers:
        return lambda mask: m.copies.commit(m.warps_of(mask))
    if "wait_group" in i.modifiers or "wait_all" in i.modifiers:
        keep = int(i.operands[0]) if i.operands else 0
        return lambda mask: m.copies.wait(m.warps_of(mask), keep)
    (to, to_offset), (source, offset) = (
        m.address(i.operands[0], "u32"),
        m.address(i.operands[1], "u64"),
    )
    size = int(i.operands[2])
    given = m.value(i.operands[3], "u32") if len(i.operands) > 3 else np.uint32(size)

    def run(mask: Any) -> None:
        lanes = m.thread if mask is True else np.nonzero(mask)[0]
        m.copies.issue(
            lanes,
            np.broadcast_to(to, m.n)[lanes].astype(np.int64) + to_offset,
            np.broadcast_to(source, m.n)[lanes] + np.uint64(offset),
            size,
            np.broadcast_to(given, m.n)[lanes],
        )

    return run


def _bulk(m: Machine, i: Instruction) -> Run:
    if "tensor" not in i.modifiers or not any(x.startswith("mbarrier") for x in i.modifiers):
        raise Fault("unsupported", i.text)
    (to, to_offset), (bar, bar_offset) = (
        m.address(i.operands[0], "u32"),
        m.address(i.operands[2], "u32"),
    )
    name, coordinates = re.fullmatch(r"\[(\S+),\s*\{(.*)\}\]", i.operands[1]).groups()  # type: ignore[union-attr]
    tensor = m.value(name, "u64")
    places = [m.value(x, "s32") for x in vector(coordinates)]
    several = m.value(i.operands[3], "u16") if "multicast::cluster" in i.modifiers else None

    def run(mask: Any) -> None:
        for t in m.thread if mask is True else np.nonzero(mask)[0]:
            at = lambda x: np.broadcast_to(x, m.n)[t]  # noqa: B023, E731
            described = m.maps.get(int(at(tensor)))
            if described is None:
                raise Fault("protocol", f"no tensor map at {int(at(tensor)):#x}")
            blocks = [int(m.block_of[t])]
            if several is not None:
                blocks = m.clusters.named(int(t), int(at(several)))
            m.copies.load_tile(
                int(t),
                blocks,
                int(at(to)) + to_offset,
                described,
                [int(at(p)) for p in places],
                int(at(bar)) + bar_offset,
            )

    return run


@binds("mbarrier")
def mbarrier(m: Machine, i: Instruction) -> Run:
    what = i.modifiers[0]
    operands = i.operands[1:] if what == "arrive" else i.operands
    base, offset = m.address(operands[0], "u32")
    number = m.value(operands[1], "u32") if len(operands) > 1 else None

    far = "shared::cluster" in i.modifiers

    def run(mask: Any) -> None:
        lanes = m.thread if mask is True else np.nonzero(mask)[0]
        address = np.broadcast_to(base, m.n)[lanes].astype(np.int64) + offset
        values = np.broadcast_to(number, m.n)[lanes] if number is not None else None
        if what == "arrive":
            block = m.block_of[lanes]
            if far:
                block, address = m.clusters.reach(lanes, address)
            expected = values if "expect_tx" in i.modifiers else None
            m.copies.arrive(lanes, block, address, expected)
        elif what == "expect_tx" and not far:
            for lane, a, n in zip(lanes, address, values, strict=True):  # type: ignore[arg-type]
                warp = m.warp[[lane]]
                m.copies.barrier(int(m.block_of[lane]), int(a), warp).expected += int(n)
        elif what == "init":
            m.shared.index(address, m.block_of[lanes], 8)
            for lane, a, n in zip(lanes, address, values, strict=True):  # type: ignore[arg-type]
                none = np.zeros(m.shared.clock.shape[1], np.int32)
                own = int(m.warp[lane]) % m.shared.span
                made = own, int(m.shared.clock[m.warp[lane], own])
                m.copies.barriers[int(m.block_of[lane]), int(a)] = Mbarrier(
                    made, int(n), int(n), none, none.copy()
                )
        else:
            raise Fault("unsupported", i.text)

    return run
