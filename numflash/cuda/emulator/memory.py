"""Global memory as bounds-checked NumPy buffers, shared memory with a shadow, and the counting of
sectors and bank conflicts.

The shadow knows for each granule of shared memory whether it holds data, whether an asynchronous
copy is still under way, who wrote it last and who has read it since, in the vector clocks of the
warps (FastTrack, Flanagan and Freund 2009). A barrier or an mbarrier joins clocks; an access that
is not ordered after the one it conflicts with is a race, whatever the schedule was.
"""

from __future__ import annotations

import numpy as np

from .errors import Fault
from .writers import Writers

NO_LANE = np.int8(-1)  # written or read by no single lane
SEVERAL = np.int8(-2)  # read by several lanes of a warp
RESERVED = 1024  # the first KB of a block's window belongs to the system, and catches null pointers
EMPTY = 0
VALID = 1
PENDING = 2
IN_FLIGHT = np.int32(
    2**31 - 1
)  # read clock of an operand that an asynchronous product has not finished with


class Global:
    """A fake device address space over host arrays."""

    def __init__(self) -> None:
        self.buffers: list[tuple[int, int, np.ndarray, bool]] = []
        self.writers = Writers()
        self.next = 0x7000_0000_0000

    def add(self, array: np.ndarray) -> int:
        """Register a C-contiguous array; returns its address."""
        address = self.next
        self.buffers.append(
            (address, array.nbytes, array.reshape(-1).view(np.uint8), array.flags.writeable)
        )
        self.next += (array.nbytes + 0x20_0000) & ~0xFFFF
        return address

    def locate(
        self, address: np.ndarray, size: int, write: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """The buffer that holds all these accesses of `size` bytes, and their offsets in it."""
        low = int(address.min())
        high = int(address.max()) + size
        for base, n, data, writeable in self.buffers:
            if base <= low and high <= base + n:
                if write and not writeable:
                    raise Fault("out-of-bounds", f"store to a read-only array at {low:#x}")
                if size & (size - 1) == 0 and (address & np.uint64(size - 1)).any():
                    raise Fault("misaligned", f"global access of {size} bytes at {low:#x}")
                return data, (address - np.uint64(base)).astype(np.int64)
        raise Fault("out-of-bounds", self._explain(address, size))

    def _explain(self, address: np.ndarray, size: int) -> str:
        for a in (int(x) for x in address):
            if not any(base <= a and a + size <= base + n for base, n, *_ in self.buffers):
                before = [(base, n) for base, n, *_ in self.buffers if base <= a]
                near = (
                    f", {a - before[-1][0]} bytes into an array of {before[-1][1]}"
                    if before
                    else ""
                )
                return f"global access of {size} bytes at {a:#x}{near}"
        return f"one instruction touches several arrays, {int(address.min()):#x} to {int(address.max()):#x}"


class Shared:
    """Shared memory of all blocks of a batch, one after another, with its shadow.

    `clock` (warps, W + C) holds the vector clock of every warp over the W warps of its own cluster
    of C blocks (one block where there are no clusters) and, last, the blocks' copy engines.
    """

    def __init__(self, blocks: int, size: int, granule: int, warps: int, cluster: int) -> None:
        self.size = RESERVED + (size + 127) // 128 * 128
        self.granule, self.warps, self.blocks = granule, warps, blocks
        self.cluster = cluster
        self.span = warps * cluster  # warps of a cluster
        self.data = np.zeros(blocks * self.size, np.uint8)
        n = self.data.size // granule
        self.state = np.zeros(n, np.uint8)
        self.writer = np.zeros(n, np.int16)
        self.written = np.zeros(n, np.int32)
        self.reads = np.zeros((n, self.span), np.int32)
        self.unfenced = np.zeros(n, bool)
        # the lane that wrote a granule and the one that read it last, each with the epoch of its
        # warp: accesses of two lanes are ordered by what ends an epoch
        self.lane = np.full(n, NO_LANE)
        self.lane_epoch = np.zeros(n, np.int32)
        self.reader = np.full(n, NO_LANE)
        self.reader_warp = np.zeros(n, np.int16)
        self.reader_epoch = np.full(n, -1, np.int32)
        self.epoch = np.zeros(blocks * warps, np.int32)
        self.clock = np.zeros((blocks * warps, self.span + cluster), np.int32)
        self.engine = np.zeros(blocks, np.int32)
        self.own = np.arange(blocks * warps)
        self.reset()

    def reset(self) -> None:
        """As at the start of a block: nothing written, every warp knows of itself alone."""
        self.data[:] = 0xCB
        for array in (self.state, self.written, self.reads, self.clock, self.engine, self.unfenced):
            array[:] = 0
        self.lane[:] = self.reader[:] = NO_LANE
        self.epoch += 1
        self.clock[self.own, self.own % self.span] = 1

    def index(self, address: np.ndarray, block: np.ndarray, size: int) -> np.ndarray:
        """Byte offsets in `data`, after the checks of bounds and alignment."""
        a = address.astype(np.int64)
        if a.size and (int(a.min()) < RESERVED or int(a.max()) + size > self.size):
            bad = int(a[(a < RESERVED) | (a + size > self.size)][0])
            raise Fault(
                "out-of-bounds",
                f"shared access of {size} bytes at {bad - RESERVED} of {self.size - RESERVED}",
            )
        if (a & (size - 1)).any():
            bad = int(a[(a & (size - 1)) != 0][0])
            raise Fault("misaligned", f"shared access of {size} bytes at {bad - RESERVED}")
        return a + block * self.size

    def granules(self, index: np.ndarray, size: int) -> np.ndarray:
        return (index // self.granule)[:, None] + np.arange(max(1, size // self.granule))

    def _other_lane(self, g: np.ndarray, warp: np.ndarray, lanes: np.ndarray | int) -> np.ndarray:
        """Where another lane of the same warp wrote, with nothing that orders the two."""
        mine = np.broadcast_to(np.asarray(lanes, np.int8), warp.shape)[:, None]
        lane = self.lane[g]
        return (
            (lane != NO_LANE)
            & (lane != mine)
            & (self.writer[g] == (warp % self.span)[:, None])
            & (self.lane_epoch[g] == self.epoch[warp][:, None])
        )

    def check_lanes(self, g: np.ndarray, warp: np.ndarray, lanes: np.ndarray, write: bool) -> None:
        """g (n, k) granules accessed by lanes (n,) of warps (n,), or by whole warps (NO_LANE)."""
        bad = self._other_lane(g, warp, lanes)
        if bad.any():
            raise Fault(
                "race",
                f"{self._where(g, bad)} {'overwritten' if write else 'read'} by warp "
                f"{self._warp(warp, bad)} without bar.warp.sync after the write of its lane "
                f"{int(self.lane[g][bad][0])}",
            )
        mine = lanes.astype(np.int8)[:, None]
        here = (self.reader_epoch[g] == self.epoch[warp][:, None]) & (
            self.reader_warp[g] == warp[:, None]
        )
        if write:
            bad = here & (self.reader[g] != mine) & (self.reader[g] != NO_LANE)
            if bad.any():
                raise Fault(
                    "race",
                    f"{self._where(g, bad)} overwritten by warp {self._warp(warp, bad)} without "
                    "bar.warp.sync after another of its lanes has read it",
                )
            return
        self.reader[g] = np.where(here & (self.reader[g] != mine), SEVERAL, mine)
        self.reader_warp[g] = warp[:, None]
        self.reader_epoch[g] = self.epoch[warp][:, None]

    def check_read(self, g: np.ndarray, warp: np.ndarray, asynchronous: bool = False) -> None:
        """g (n, k) granules read by warps (n,)."""
        state = self.state[g]
        if (state != VALID).any():
            if (state == PENDING).any():
                raise Fault(
                    "pending",
                    f"{self._where(g, state == PENDING)} read before the wait that makes the copy visible",
                )
            raise Fault("uninitialised", f"{self._where(g, state == EMPTY)} read but never written")
        if (self.written[g] > self.clock[warp[:, None], self.writer[g]]).any():
            bad = self.written[g] > self.clock[warp[:, None], self.writer[g]]
            raise Fault(
                "race",
                f"{self._where(g, bad)} read by warp {self._warp(warp, bad)} without a barrier after the write of "
                f"{self._name(self.writer[g][bad][0])}",
            )
        if asynchronous:
            if self.unfenced[g].any():
                raise Fault(
                    "race",
                    f"{self._where(g, self.unfenced[g])} read by the asynchronous proxy without fence.proxy.async",
                )
            self.reads[g, (warp % self.span)[:, None]] = IN_FLIGHT
        else:
            self.reads[g, (warp % self.span)[:, None]] = self.clock[warp, warp % self.span][:, None]

    def check_write(self, g: np.ndarray, warp: np.ndarray, asynchronous: bool = False) -> None:
        """g (n, k) granules about to be overwritten by warps (n,), or for them by the copy engine.

        All earlier accesses must be known to them.
        """
        if asynchronous and self.unfenced[g].any():
            raise Fault(
                "race",
                f"{self._where(g, self.unfenced[g])} overwritten by the asynchronous proxy without "
                "fence.proxy.async after a write of the threads",
            )
        if (self.written[g] > self.clock[warp[:, None], self.writer[g]]).any():
            bad = self.written[g] > self.clock[warp[:, None], self.writer[g]]
            raise Fault(
                "race",
                f"{self._where(g, bad)} overwritten by warp {self._warp(warp, bad)} without a barrier "
                f"after the write of {self._name(self.writer[g][bad][0])}",
            )
        late = self.reads[g] > self.clock[warp, : self.span][:, None, :]
        if late.any():
            bad = late.any(2)
            first = tuple(np.argwhere(bad)[0])  # the writer and the place that the report names
            reader = int(np.nonzero(late[first])[0][0])
            flying = (self.reads[g] == IN_FLIGHT).any()
            raise Fault(
                "race",
                f"{self._where(g, bad)} overwritten by warp {self._warp(warp, bad)} while {self._name(reader)} "
                + (
                    "has an asynchronous product reading it"
                    if flying
                    else "may still be reading it"
                ),
            )
        if (self.state[g] == PENDING).any():
            raise Fault(
                "pending",
                f"{self._where(g, self.state[g] == PENDING)} overwritten while a copy into it is under way",
            )

    def note_write(self, g: np.ndarray, warp: np.ndarray, lanes: np.ndarray) -> None:
        """g (n, k) granules hold what lanes (n,) of warps (n,) have written."""
        self.lane[g] = lanes.astype(np.int8)[:, None]
        self.lane_epoch[g] = self.epoch[warp][:, None]
        self.state[g] = VALID
        self.writer[g] = (warp % self.span)[:, None]
        self.written[g] = self.clock[warp, warp % self.span][:, None]
        self.unfenced[g] = True

    def fence(self, warps: np.ndarray) -> None:
        """fence.proxy.async by these warps.

        What they have written, or know of, may be read by the asynchronous proxy.
        """
        for warp in warps:
            block = slice(
                warp // self.warps * self.size // self.granule,
                (warp // self.warps + 1) * self.size // self.granule,
            )
            known = self.written[block] <= self.clock[warp][self.writer[block]]
            self.unfenced[block] &= ~known

    def join(self, warps: np.ndarray) -> None:
        """A barrier among warps of one block: each learns what the others knew.

        What follows is new.
        """
        self.clock[warps] = self.clock[warps].max(0)
        self.epoch[warps] += 1
        self.tick(warps)

    def tick(self, warps: np.ndarray) -> None:
        self.clock[warps, warps % self.span] += 1

    def _where(self, g: np.ndarray, bad: np.ndarray) -> str:
        at = int(g[bad][0]) * self.granule
        return f"shared byte {at % self.size - RESERVED} (block {at // self.size} of the batch)"

    def _warp(self, warp: np.ndarray, bad: np.ndarray) -> int:
        return int(warp[np.nonzero(bad.any(1))[0][0]] % self.warps)

    def _name(self, writer: int) -> str:
        if writer >= self.span:
            return "the copy engine"
        block = f" of block {writer // self.warps} of the cluster" if self.cluster > 1 else ""
        return f"warp {writer % self.warps}{block}"

    def land(self, block: int, g: np.ndarray) -> tuple[int, int]:
        """The copy engine has written these granules of a block: its column and its clock."""
        column = self.span + block % self.cluster
        self.engine[block] += 1
        self.state[g], self.writer[g], self.written[g] = VALID, column, self.engine[block]
        self.unfenced[g], self.lane[g] = False, NO_LANE
        return column, int(self.engine[block])


def wavefronts(address: np.ndarray, thread: np.ndarray, size: int) -> tuple[int, int]:
    """Passes over the 32 banks that shared accesses of `size` bytes take, and that they would take
    without conflicts.

    4 bytes per lane are served a warp at a time, 8 bytes half a warp, 16 bytes a quarter.

    thread : sorted
    """
    per_pass = 32 // max(1, size // 4)
    number = np.cumsum(_differs(thread // per_pass)) - 1
    words = (address.astype(np.int64) // 4)[:, None] + np.arange(max(1, size // 4))
    in_bank = number[:, None] * 32 + (words & 31)
    count = 32 * (int(number[-1]) + 1)
    per_bank = np.bincount(in_bank.ravel(), minlength=count)
    if per_bank.max() > 1:  # lanes that read the same word share it: each word counts once
        found = distinct(in_bank << 32 | words)
        per_bank = np.bincount(found >> 32, minlength=count)
    per_bank = per_bank.reshape(-1, 32)
    return int(per_bank.max(1).sum()), int(np.maximum(1, -(-per_bank.sum(1) // 32)).sum())


def sectors(address: np.ndarray, thread: np.ndarray, size: int) -> int:
    """32-byte sectors that each warp's access touches, summed."""
    first = address.astype(np.int64) >> 5
    last = (address.astype(np.int64) + size - 1) >> 5
    warp = (thread >> 5).astype(np.int64) << 44
    if size <= 32 and (first == last).all():
        return distinct(warp | first).size
    return distinct(np.concatenate([warp | first, warp | last])).size


def distinct(x: np.ndarray) -> np.ndarray:
    """The different numbers of an array, sorted: faster than `np.unique`, which makes a hash table."""
    ordered = np.sort(x, axis=None)
    return ordered[_differs(ordered)]


def _differs(x: np.ndarray) -> np.ndarray:
    """Whether each element of a sorted array is another than the one before."""
    new = np.ones(x.size, bool)
    np.not_equal(x[1:], x[:-1], out=new[1:])
    return new
