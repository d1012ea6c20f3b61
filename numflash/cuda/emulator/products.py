"""wgmma: products that finish later.

Accumulators of a wgmma are tainted until its group is waited for, and its operands in shared memory
count as being read all that time.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .binders import Run, binds
from .errors import Fault
from .memory import IN_FLIGHT
from .parse import Instruction, vector
from .tensor import BITS, accumulator_order, decode, gather, operand_layout

if TYPE_CHECKING:
    from .machine import Machine

# columns, by the bits of an operand (PTX 9.7.15.2)
WGMMA_SIZES = {16: range(8, 257, 8), 8: (8, 24, *range(16, 257, 16))}


class Products:
    """wgmma groups under way, per warp: tainted registers and operands being read."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        self.reset()

    def reset(self) -> None:
        warps = self.m.n // 32
        # register -> (warps,) number of the group that will deliver it
        self.tainted: dict[str, np.ndarray] = {}
        self.frozen: dict[str, np.ndarray] = {}  # A fragments that a product still reads
        # groups committed so far; the open one has the next number
        self.current = np.zeros(warps, np.int64)
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

    def check(self, i: Instruction, mask: Any) -> None:
        """Called for every instruction while products are under way.

        None may touch their registers, except to move them on.
        """
        if i.op == "wgmma":
            return
        active = None
        for name in {*i.results, *i.reads}:
            late = self.late(self.tainted, name)
            if late is None and name in i.results:
                late = self.late(self.frozen, name)
            if late is None:
                continue
            active = self.m.warps_of(mask) if active is None else active
            if not late[active].any():
                continue
            if i.op == "mov" and name not in i.results:  # the compiler's renaming of tied registers
                for to in i.results:
                    group = self.tainted.setdefault(to, np.zeros(self.m.n // 32, np.int64))
                    group[active] = self.tainted[name][active]
                continue
            source = i.reads[-1] if i.reads else ""  # none: a constant
            if i.op == "mov" and self.late(self.tainted, source) is not None:
                continue
            raise Fault("pending", f"register {name} used before wgmma.wait_group")
        if i.op == "mov" and active is None:  # overwritten by a finished value
            for to in i.results:
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
            own = warp % m.shared.span
            m.shared.reads[g, own] = m.shared.clock[warp, own]
        for warp, _, g in self.reading:
            m.shared.reads[g, warp % m.shared.span] = IN_FLIGHT
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


class Wgmma(NamedTuple):
    """Sizes and types of a product of a warpgroup, 64 x n x k."""

    n: int
    k: int
    td: str
    ta: str
    tb: str
    in_registers: bool  # A
    trans_a: int
    trans_b: int


def _wgmma_of(i: Instruction) -> Wgmma:
    """Reads and checks a wgmma.mma_async; raises Fault for what there is not."""
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
    d, a = i.operands[:2]
    in_registers = a.startswith("{")
    if len(vector(d)) != n // 2 or (in_registers and len(vector(a)) != 4):
        raise Fault("protocol", f"{shape} takes {n // 2} accumulators and 4 registers of A")
    flags = [int(x) for x in i.operands[4:]]
    # bytes are K-major and have neither sign nor transposition
    if len(flags) != (0 if bytes_in else 3 if in_registers else 4):
        raise Fault(
            "protocol", f"{len(flags)} immediates after the operands of {shape}.{td}.{ta}.{tb}"
        )
    if flags[:2] not in ([], [1, 1]):
        raise Fault("unsupported", i.text)
    trans_b = 0 if bytes_in else flags[-1]
    trans_a = 0 if bytes_in or in_registers else flags[2]
    return Wgmma(n, k, td, ta, tb, in_registers, trans_a, trans_b)


def _product(m: Machine, i: Instruction) -> Run:
    n, k, td, ta, tb, in_registers, trans_a, trans_b = _wgmma_of(i)
    d, a, b, keep = i.operands[:4]
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
