"""What finishes later: cp.async groups, TMA with mbarriers, and wgmma.

Everything is as late as the rules allow. A cp.async lands at the wait of the thread that issued it;
a TMA tile when every warp waits; until then the bytes are "pending" and reading them is an error.
Accumulators of a wgmma are tainted until its group is waited for, and its operands in shared memory
count as being read all that time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..tensormap import TensorMap
from .alu import Run, binds
from .errors import Fault
from .memory import IN_FLIGHT, NO_LANE, PENDING, VALID, sectors, wavefronts
from .parse import Instruction, registers_of, vector
from .tensor import BITS, accumulator_order, decode, gather, operand_layout

if TYPE_CHECKING:
    from .machine import Machine

WGMMA_SIZES = {
    16: range(8, 257, 8),
    8: (8, 24, *range(16, 257, 16)),
}  # columns, by the bits of an operand (PTX 9.7.15.2)


@dataclass
class Mbarrier:
    """An mbarrier object.

    Arrivals still missing in this phase, bytes still expected, and the clocks it hands on.
    """

    count: int
    missing: int
    clock: np.ndarray
    done: np.ndarray
    expected: int = 0
    phase: int = 0
    landing: list[Any] = field(default_factory=list)
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
    # -----------------------------------------------------------------------------------------------------------
    def issue(
        self, lanes: np.ndarray, to: np.ndarray, source: np.ndarray, size: int, given: np.ndarray
    ) -> None:
        m = self.m
        index = m.shared.index(to, m.block_of[lanes], size)
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
    # -----------------------------------------------------------------------------------------------------------
    def barrier(self, block: int, address: int) -> Mbarrier:
        found = self.barriers.get((block, address))
        if found is None:
            raise Fault("protocol", f"no mbarrier was initialised at shared byte {address - 1024}")
        return found

    def fence(self, warps: np.ndarray) -> None:
        """The copy engine learns of the mbarriers that are initialised in the warps' blocks."""
        blocks = set((warps // self.m.warps_per_block).tolist())
        for (block, _), bar in self.barriers.items():
            bar.fenced |= block in blocks

    def arrive(self, lanes: np.ndarray, address: np.ndarray, expected: np.ndarray | None) -> None:
        m = self.m
        for key in np.unique(m.block_of[lanes] << 32 | address):
            mine = (m.block_of[lanes] << 32 | address) == key
            bar = self.barrier(int(key >> 32), int(key & 0xFFFFFFFF))
            if expected is not None:
                bar.expected += int(expected[mine].sum())
            bar.missing -= int(mine.sum())
            if bar.missing < 0:
                raise Fault(
                    "protocol", f"more arrivals than the {bar.count} that the mbarrier counts"
                )
            warps = np.unique(m.warp[lanes[mine]])
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
                bar = self.barrier(int(key >> 32), int(key & 0xFFFFFFFF))
                mine = (keys == key) & ((bar.phase & 1) != wanted)
                done[lanes[mine]] = True
                warps = np.unique(m.warp[lanes[mine]])
                m.shared.clock[warps] = np.maximum(m.shared.clock[warps], bar.done)
                m.shared.epoch[warps] += 1
            d[done] = True
            return done

        return ready

    # ---- TMA
    # ----------------------------------------------------------------------------------------------------------------
    def load_tile(
        self, thread: int, to: int, tensor: TensorMap, coordinates: list[int], address: int
    ) -> None:
        m = self.m
        block = int(self.m.block_of[thread])
        bar = self.barrier(block, address)
        if not bar.fenced:
            raise Fault(
                "protocol",
                "a copy with an mbarrier that was initialised without fence.mbarrier_init",
            )
        array = tensor.array
        box = tensor.box
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
            tile[
                tuple(slice(s.start - o, s.stop - o) for s, o in zip(inside, start, strict=True))
            ] = array[tuple(inside)]
        data = np.ascontiguousarray(tile).view(np.uint8).reshape(-1)
        if to % 128:
            raise Fault(
                "misaligned",
                f"a tile at shared byte {to - 1024}; allowed: multiples of 128",
            )
        offset = to + np.arange(0, data.size, 16)
        if tensor.swizzle == 128:
            if to % 1024:
                raise Fault(
                    "misaligned",
                    f"a tile with 128-byte swizzle at shared byte {to - 1024}; allowed: multiples of 1024",
                )
            if box[-1] * array.itemsize != 128:
                raise Fault(
                    "protocol",
                    f"a box row of {box[-1] * array.itemsize} bytes with 128-byte swizzle; allowed: 128",
                )
            offset = offset ^ (((offset >> 7) & 7) << 4)
        index = m.shared.index(offset, np.full(offset.size, block), 16)
        g = m.shared.granules(index, 16)
        m.shared.check_write(g, np.full(index.size, m.warp[thread]), asynchronous=True)
        m.shared.state[g] = PENDING
        m.count("tma_copied", data.size)
        m.count("global_loaded", data.size)
        m.count("global_load_sectors", data.size // 32)
        self.flying.append((bar, (block, index, data.reshape(-1, 16), g)))

    def land_one(self, random: np.random.Generator) -> bool:
        """One tile, any of those on their way, arrives. False if there is none."""
        if not self.flying:
            return False
        bar, (block, index, data, g) = self.flying.pop(int(random.integers(len(self.flying))))
        shared = self.m.shared
        shared.data[index[:, None] + np.arange(16)] = data
        shared.engine[block] += 1
        shared.state[g], shared.writer[g], shared.written[g], shared.unfenced[g] = (
            VALID,
            shared.warps,
            shared.engine[block],
            False,
        )
        shared.lane[g] = NO_LANE
        bar.clock[shared.warps] = max(bar.clock[shared.warps], shared.engine[block])
        bar.expected -= data.size
        if bar.expected < 0 and bar.missing == bar.count:
            raise Fault("protocol", "more bytes arrived than mbarrier.arrive.expect_tx announced")
        self._finish(bar)
        self.version += 1
        return True


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

    def run(mask: Any) -> None:
        for t in m.thread if mask is True else np.nonzero(mask)[0]:
            at = lambda x: np.broadcast_to(x, m.n)[t]  # noqa: B023, E731
            described = m.maps.get(int(at(tensor)))
            if described is None:
                raise Fault("protocol", f"no tensor map at {int(at(tensor)):#x}")
            m.copies.load_tile(
                int(t),
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

    def run(mask: Any) -> None:
        lanes = m.thread if mask is True else np.nonzero(mask)[0]
        address = np.broadcast_to(base, m.n)[lanes].astype(np.int64) + offset
        values = np.broadcast_to(number, m.n)[lanes] if number is not None else None
        if what == "arrive":
            m.copies.arrive(lanes, address, values if "expect_tx" in i.modifiers else None)
        elif what == "init":
            m.shared.index(address, m.block_of[lanes], 8)
            for lane, a, n in zip(lanes, address, values, strict=True):  # type: ignore[arg-type]
                clock = np.zeros(m.warps_per_block + 1, np.int32)
                m.copies.barriers[int(m.block_of[lane]), int(a)] = Mbarrier(
                    int(n), int(n), clock, clock.copy()
                )
        else:
            raise Fault("unsupported", i.text)

    return run


# ---- wgmma
# ---------------------------------------------------------------------------------------------------------------------
class Products:
    """wgmma groups under way, per warp: tainted registers and operands being read."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.reset()

    def reset(self) -> None:
        warps = self.m.n // 32
        self.tainted: dict[
            str, np.ndarray
        ] = {}  # register -> (warps,) number of the group that will deliver it
        self.frozen: dict[str, np.ndarray] = {}  # A fragments that a product still reads
        self.current = np.zeros(
            warps, np.int64
        )  # groups committed so far; the open one has the next number
        self.retired = np.zeros(warps, np.int64)
        self.fenced = np.zeros(warps, bool)
        self.reading: list[tuple[int, int, np.ndarray]] = []  # (warp, group, granules)

    def taint(self, where: dict[str, np.ndarray], names: list[str], warps: np.ndarray) -> None:
        for name in names:
            where.setdefault(name, np.zeros(self.m.n // 32, np.int64))[warps] = (
                self.current[warps] + 1
            )

    def late(self, where: dict[str, np.ndarray], name: str) -> np.ndarray | None:
        group = where.get(name)
        return None if group is None else group > self.retired

    def check(self, i: Instruction, names: frozenset, writes: frozenset, mask: Any) -> None:
        """Called for every instruction while products are under way.

        None may touch their registers, except to move them on.
        """
        if i.op == "wgmma":
            return
        active = None
        for name in names:
            late = self.late(self.tainted, name)
            if late is None and name in writes:
                late = self.late(self.frozen, name)
            if late is None:
                continue
            active = self.m.warps_of(mask) if active is None else active
            if not late[active].any():
                continue
            if i.op == "mov" and name not in writes:  # the compiler's renaming of tied registers
                for to in registers_of(i.operands[0]):
                    group = self.tainted.setdefault(to, np.zeros(self.m.n // 32, np.int64))
                    group[active] = self.tainted[name][active]
                continue
            if (
                i.op == "mov"
                and self.late(self.tainted, registers_of(i.operands[1])[-1]) is not None
            ):
                continue
            raise Fault("pending", f"register {name} used before wgmma.wait_group")
        if i.op == "mov" and active is None:  # overwritten by a finished value
            for to in writes:
                if to in self.tainted:
                    self.tainted[to][self.m.warps_of(mask)] = 0

    def fence(self, warps: np.ndarray) -> None:
        self.fenced[warps] = True
        self.m.fences.fence(warps)

    def commit(self, warps: np.ndarray) -> None:
        self.current[warps] += 1

    def wait(self, warps: np.ndarray, keep: int) -> None:
        m = self.m
        self.retired[warps] = np.maximum(self.retired[warps], self.current[warps] - keep)
        self.fenced[warps] = False
        mine = set(warps.tolist())
        done = [x for x in self.reading if x[0] in mine and x[1] <= self.retired[x[0]]]
        self.reading = [
            x for x in self.reading if not (x[0] in mine and x[1] <= self.retired[x[0]])
        ]
        for warp, _, g in done:
            m.shared.reads[g, warp % m.warps_per_block] = m.shared.clock[
                warp, warp % m.warps_per_block
            ]
        for warp, _, g in self.reading:
            m.shared.reads[g, warp % m.warps_per_block] = IN_FLIGHT
        if (self.retired == self.current).all():
            self.tainted.clear()
            self.frozen.clear()


@binds("wgmma")
def wgmma(m: Machine, i: Instruction) -> Run:
    what = i.modifiers[0]
    if what == "fence":
        return lambda mask: m.products.fence(_groups_of_four(m, mask, "wgmma.fence", numbers=True))
    if what == "commit_group":
        return lambda mask: m.products.commit(
            _groups_of_four(m, mask, "wgmma.commit_group", numbers=True)
        )
    if what == "wait_group":
        return lambda mask: m.products.wait(
            _groups_of_four(m, mask, "wgmma.wait_group", numbers=True), int(i.operands[0])
        )
    return _product(m, i)


def _groups_of_four(m: Machine, mask: Any, what: str, numbers: bool = False) -> np.ndarray:
    """The warps, which must be whole warpgroups (four warps from a multiple of four), as a mask
    over warps or as numbers.
    """
    warps = m.whole_warps(mask, what)
    in_block = (warps % m.warps_per_block).reshape(-1, 4) if warps.size % 4 == 0 else None
    if in_block is None or (in_block[:, 0] % 4).any() or (np.diff(in_block, axis=1) != 1).any():
        found = sorted({int(w) % m.warps_per_block for w in warps})
        raise Fault("divergent", f"{what} by warps {found}; allowed: whole warpgroups")
    if numbers:
        return warps
    chosen = np.zeros(m.n // 32, bool)
    chosen[warps] = True
    return chosen


@binds("setmaxnreg")
def registers(m: Machine, i: Instruction) -> Run:
    """Only whole warpgroups may change how many registers they have, by 8s from 24 to 256."""
    number = int(i.operands[0])
    if number % 8 or not 24 <= number <= 256:
        raise Fault("protocol", f"setmaxnreg to {number}; allowed: multiples of 8 from 24 to 256")
    return lambda mask: _groups_of_four(m, mask, "setmaxnreg", numbers=True)


def _product(m: Machine, i: Instruction) -> Run:
    shape = next(x for x in i.modifiers if x.startswith("m64"))
    n, k = (int(x) for x in re.fullmatch(r"m64n(\d+)k(\d+)", shape).groups())  # type: ignore[union-attr]
    td, ta, tb = i.modifiers[-3:]
    bytes_in = {ta, tb} <= {"s8", "u8"}
    if not (
        (bytes_in and td == "s32" and k == 32)
        or (ta == tb in ("f16", "bf16") and td == "f32" and k == 16)
    ):
        raise Fault("unsupported", i.text)
    if n not in WGMMA_SIZES[BITS[ta]]:
        raise Fault("protocol", f"there is no {shape} for {ta}")
    d, a, b, keep = (i.operands[x] for x in range(4))
    in_registers = a.startswith("{")
    if len(vector(d)) != n // 2 or (in_registers and len(vector(a)) != 4):
        raise Fault("protocol", f"{shape} takes {n // 2} accumulators and 4 registers of A")
    flags = [int(x) for x in i.operands[4:]]
    if len(flags) != (
        0 if bytes_in else 3 if in_registers else 4
    ):  # bytes are K-major and have neither sign nor transposition
        raise Fault(
            "protocol", f"{len(flags)} immediates after the operands of {shape}.{td}.{ta}.{tb}"
        )
    if flags[:2] not in ([], [1, 1]):
        raise Fault("unsupported", i.text)
    trans_b = 0 if bytes_in else flags[-1]
    trans_a = 0 if bytes_in or in_registers else flags[2]
    names = vector(d)
    targets = [m.target(x, td) for x in names]
    kept = m.value(keep, "pred")
    view_a = [m.value(x, "u32") for x in vector(a)] if in_registers else m.value(a, "u64")
    view_b = m.value(b, "u64")
    per_word = 32 // BITS[ta]
    places = operand_layout("a", k, per_word)[1]
    row, col = accumulator_order(n)

    def run(mask: Any) -> None:
        warps = _groups_of_four(m, mask, "wgmma", numbers=True)
        state = m.products
        if not state.fenced[warps].all():
            raise Fault(
                "protocol",
                "wgmma without wgmma.fence since the last wait: registers written before may not be seen",
            )
        for four in warps.reshape(-1, 4):
            first = int(four[0]) * 32
            threads = slice(int(four[0]) * 32, int(four[0]) * 32 + 128)
            B = _tile(m, int(np.broadcast_to(view_b, m.n)[first]), n, k, trans_b, tb, four)
            if in_registers:
                A = decode(gather(view_a, four), ta).reshape(4, -1)[:, places].reshape(64, k)
            else:
                A = _tile(m, int(np.broadcast_to(view_a, m.n)[first]), 64, k, trans_a, ta, four)
            values = (A @ B.T).reshape(4, 16, n)[:, row, col]
            go_on = np.broadcast_to(kept, m.n)[threads].reshape(4, 32)
            for r, target in enumerate(targets):
                old = target[threads].reshape(4, 32)
                fresh = values[:, :, r].astype(target.dtype)
                target[threads] = np.where(go_on, old + fresh, fresh).reshape(-1)
        state.taint(state.tainted, names, warps)
        if in_registers:
            state.taint(state.frozen, vector(a), warps)
        m.count("tensor_operations", warps.size)
        m.count("tensor_flops", warps.size // 4 * 2 * 64 * n * k)

    return run


def _tile(
    m: Machine, descriptor: int, mn: int, k: int, mn_major: int, t: str, four: np.ndarray
) -> np.ndarray:
    """Read an (mn, k) operand through its matrix descriptor (PTX 9.7.15.5.1.2.2), 128-byte swizzle,
    and mark it as being read.
    """
    start, lead, stride = ((descriptor >> s & 0x3FFF) << 4 for s in (0, 16, 32))
    if descriptor >> 62 != 1:
        raise Fault(
            "unsupported",
            f"matrix descriptor {descriptor:#x}: only the 128-byte swizzle is emulated",
        )
    size = BITS[t] // 8
    r = np.arange(mn)[:, None]
    c = np.arange(k)[None]
    if mn_major:  # atoms of 64 elements x 8 k-rows: `lead` between atoms along mn, `stride` along k
        offset = (r >> 6) * lead + (r & 63) * size + (c >> 3) * stride + (c & 7) * 128
    else:  # atoms of 8 rows x 128 bytes: `stride` between atoms along mn
        offset = (r >> 3) * stride + (r & 7) * 128 + c * size
    address = start + offset
    address = address ^ (((address >> 7) & 7) << 4)
    block = int(m.block_of[four[0] * 32])
    index = m.shared.index(address.reshape(-1), np.full(address.size, block), size)
    g = np.unique(index // m.shared.granule)
    for warp in four:
        m.shared.check_read(g[:, None], np.full(g.size, warp), asynchronous=True)
        m.products.reading.append((int(warp), int(m.products.current[warp]) + 1, g))
    m.count("shared_loaded", size * index.size)
    raw = m.shared.data.view({1: np.int8, 2: np.uint16}[size])[index // size]
    if t == "f16":
        return raw.view(np.float16).astype(np.float32).reshape(mn, k)
    if t == "bf16":
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(mn, k)
    return (raw if t == "s8" else raw.view(np.uint8)).astype(np.float32).reshape(mn, k)
