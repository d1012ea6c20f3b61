"""Loads, stores, atomics, shuffles and votes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import DTYPES, Run, binds, write
from .errors import Fault
from .memory import sectors, wavefronts
from .parse import Instruction, vector

if TYPE_CHECKING:
    from .machine import Machine


def _space(i: Instruction) -> str:
    return next(
        (s for s in ("shared", "global", "local", "param", "const") if s in i.modifiers), "generic"
    )


class Access:
    """The addresses of a load or store, checked, and the memory at them."""

    def __init__(self, m: Machine, i: Instruction, operand: str, width: int) -> None:
        self.m, self.size, self.space = m, width, _space(i)
        self.base, self.offset = m.address(
            operand, "u32" if self.space == "shared" and _is_narrow(m, operand) else "u64"
        )

    def lanes(self, mask: Any) -> np.ndarray:
        return self.m.thread if mask is True else np.nonzero(mask)[0]

    def resolve(self, mask: Any, store: bool) -> tuple[str, np.ndarray, np.ndarray, np.ndarray]:
        """Space, threads, buffer of bytes, and offsets into it."""
        m = self.m
        lanes = self.lanes(mask)
        base = np.broadcast_to(self.base, m.n)[lanes]
        space = self.space
        address = base.astype(np.uint64) + np.uint64(self.offset & (2**64 - 1))
        if space == "generic":
            space, address = self._window(address)
        if space == "shared":
            return (
                space,
                lanes,
                m.shared.data,
                m.shared.index(address.view(np.int64), m.block_of[lanes], self.size),
            )
        if space == "local":
            index = (address - np.uint64(m.window["local"])).view(np.int64)
            if index.min() < 0 or index.max() + self.size > m.local.shape[1]:
                raise Fault(
                    "out-of-bounds",
                    f"local access at {int(index.min())} of {m.local.shape[1]} bytes",
                )
            return space, lanes, m.local.reshape(-1), index + lanes * m.local.shape[1]
        data, index = m.memory.locate(address, self.size, store)
        m.count("global_stored" if store else "global_loaded", self.size * lanes.size)
        m.count(
            "global_store_sectors" if store else "global_load_sectors",
            sectors(address, lanes, self.size),
        )
        return "global", lanes, data, index

    def _window(self, address: np.ndarray) -> tuple[str, np.ndarray]:
        for space, start in self.m.window.items():
            inside = (address >= np.uint64(start)) & (address < np.uint64(start + (1 << 32)))
            if inside.all():
                return space, address if space == "local" else address - np.uint64(start)
            if inside.any():
                raise Fault("unsupported", "one instruction touches several state spaces")
        return "global", address

    def note_shared(self, lanes: np.ndarray, index: np.ndarray, store: bool) -> None:
        m = self.m
        taken, ideal = wavefronts(index, lanes, self.size)
        m.count("shared_wavefronts", taken)
        m.count("shared_conflicts", taken - ideal)
        m.count("shared_stored" if store else "shared_loaded", self.size * lanes.size)
        g = m.shared.granules(index, self.size)
        warp = m.warp[lanes]
        if store:
            m.shared.check_write(g, warp)
            m.shared.check_lanes(g, warp, lanes & 31, write=True)
            m.shared.note_write(g, warp, lanes & 31)
        else:
            m.shared.check_read(g, warp)
            m.shared.check_lanes(g, warp, lanes & 31, write=False)


def _is_narrow(m: Machine, operand: str) -> bool:
    name = operand.strip("[]").partition("+")[0].strip()
    return name in m.program.registers and m.base(name).dtype.itemsize == 4


def elements(
    data: np.ndarray, index: np.ndarray, kind: Any, n: int
) -> tuple[np.ndarray, np.ndarray]:
    """The bytes seen as `kind`, and (threads, n) element numbers."""
    size = np.dtype(kind).itemsize
    return data[: data.size // size * size].view(kind), (index // size)[:, None] + np.arange(n)


@binds("ld", "ldu")
def load(m: Machine, i: Instruction) -> Run:
    t = i.type
    names = vector(i.operands[0])
    if _space(i) == "param":
        name, _, _ = i.operands[1].strip("[]").partition("+")
        d, wide = m.wide_target(names[0], t)
        value = np.array(m.parameters[name]).astype(DTYPES[t]).astype(wide)
        return lambda mask: write(d, value, mask)
    kind = DTYPES[t]
    access = Access(m, i, i.operands[1], np.dtype(kind).itemsize * len(names))
    targets = [m.wide_target(x, t) for x in names]
    coherent = "nc" not in i.modifiers

    def run(mask: Any) -> None:
        space, lanes, data, index = access.resolve(mask, store=False)
        if space == "shared":
            access.note_shared(lanes, index, store=False)
        elif space == "global":
            own = m.block_number[lanes] if coherent else np.zeros(lanes.size, np.int64)
            free = m.has_done_atomics[m.block_of[lanes]] & coherent
            m.memory.writers.check_read(data, index, access.size, own, free)
        cells, at = elements(data, index, kind, len(names))
        values = cells[at]
        for k, (d, wide) in enumerate(targets):
            d[lanes] = values[:, k].astype(wide)

    return run


@binds("st")
def store(m: Machine, i: Instruction) -> Run:
    t = i.type
    names = vector(i.operands[1])
    kind = DTYPES[t]
    access = Access(m, i, i.operands[0], np.dtype(kind).itemsize * len(names))
    sources = [m.value(x, t) for x in names]

    def run(mask: Any) -> None:
        space, lanes, data, index = access.resolve(mask, store=True)
        if space == "shared":
            access.note_shared(lanes, index, store=True)
        elif space == "global":
            block = m.block_of[lanes]
            free = m.has_done_atomics[block]
            m.memory.writers.note(data, index, access.size, m.block_number[lanes], free)
        cells, at = elements(data, index, kind, len(names))
        for k, s in enumerate(sources):
            values = np.broadcast_to(s, m.n)[lanes]
            cells[at[:, k]] = values
            if space == "shared" and not _same(cells[at[:, k]], values):
                raise Fault("race", "two threads store different values to one place at once")

    return run


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Equal bits."""
    whole = f"u{b.dtype.itemsize}"
    return bool((a.view(whole) == np.ascontiguousarray(b).astype(a.dtype).view(whole)).all())


@binds("atom", "red")
def atomic(m: Machine, i: Instruction) -> Run:
    t = i.type
    kind = DTYPES[t]
    with_result = i.op == "atom"
    d = m.target(i.operands[0], t) if with_result else None
    address, source = i.operands[1:3] if with_result else i.operands[:2]
    access = Access(m, i, address, np.dtype(kind).itemsize)
    a = m.value(source, t)
    name = next((x for x in ("add", "max", "min", "exch", "or", "and") if x in i.modifiers), "")
    combine: Any = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "or": np.bitwise_or,
        "and": np.bitwise_and,
        "exch": lambda old, new: new,
    }.get(name)
    if combine is None:
        raise Fault("unsupported", i.text)

    def run(mask: Any) -> None:
        space, lanes, data, index = access.resolve(mask, store=True)
        if space == "global":
            m.has_done_atomics[m.block_of[lanes]] = True
        cells, at = elements(data, index, kind, 1)
        values = np.broadcast_to(a, m.n)[lanes]
        for lane, where, value in zip(lanes, at[:, 0], values, strict=True):
            if d is not None:
                d[lane] = cells[where]
            cells[where] = combine(cells[where], value)

    return run


_LANE = np.arange(32)


@binds("shfl")
def shuffle(m: Machine, i: Instruction) -> Run:
    result, _, valid = i.operands[0].partition("|")
    d = m.target(result, "u32")
    p = m.target(valid, "pred") if valid else None
    a, b, c = (m.value(x, "u32") for x in i.operands[1:4])
    mode = i.modifiers[1]

    def run(mask: Any) -> None:
        warps = m.whole_warps(mask, "shfl.sync")
        shift = np.broadcast_to(b, m.n).reshape(-1, 32)[warps].astype(np.int64)
        control = np.broadcast_to(c, m.n).reshape(-1, 32)[warps].astype(np.int64)
        segment = (control >> 8) & 31
        clamp = control & 31
        low = _LANE & segment
        high = low | (clamp & ~segment)
        if mode == "bfly":
            source = _LANE ^ shift
            inside = None
        elif mode == "up":
            source = _LANE - shift
            inside = "low"
        elif mode == "down":
            source = _LANE + shift
            inside = None
        else:
            source = low | (shift & ~segment & 31)
            inside = None
        ok = source >= clamp if inside == "low" else source <= high
        source = np.where(ok, source, _LANE)
        values = np.take_along_axis(np.broadcast_to(a, m.n).reshape(-1, 32)[warps], source, 1)
        d.reshape(-1, 32)[warps] = values
        if p is not None:
            p.reshape(-1, 32)[warps] = ok

    return run


@binds("redux")
def reduce_warp(m: Machine, i: Instruction) -> Run:
    t = i.type
    d = m.target(i.operands[0], t)
    a = m.value(i.operands[1], t)
    name = i.modifiers[1]
    combine = {
        "add": np.add,
        "max": np.maximum,
        "min": np.minimum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
    }[name]

    def run(mask: Any) -> None:
        warps = m.whole_warps(mask, "redux.sync")
        values = np.broadcast_to(a, m.n).reshape(-1, 32)[warps]
        d.reshape(-1, 32)[warps] = combine.reduce(values, axis=1, dtype=values.dtype)[:, None]

    return run


def _all_there(active: np.ndarray, members: np.ndarray) -> None:
    """A fault unless the lanes at a `vote.sync` are those that its mask names."""
    there = (active << _LANE.astype(np.uint64)).sum(1, dtype=np.uint64)
    wrong = active & (members != there[:, None])
    if wrong.any():
        warp, lane = np.argwhere(wrong)[0]
        raise Fault(
            "divergent",
            f"vote.sync of the lanes {int(members[warp, lane]):#010x} by the lanes {int(there[warp]):#010x} of a warp",
        )


@binds("vote", "activemask")
def vote(m: Machine, i: Instruction) -> Run:
    mode = i.modifiers[1] if i.op == "vote" else "active"
    t = "pred" if mode in ("any", "all", "uni") else "u32"
    d = m.target(i.operands[0], t)
    a = m.value(i.operands[1].lstrip("!"), "pred") if i.op == "vote" else None
    negate = i.op == "vote" and i.operands[1].startswith("!")
    members = m.value(i.operands[2], "u32") if i.op == "vote" else None

    def run(mask: Any) -> None:
        active = m.full(mask).reshape(-1, 32)
        if members is not None:
            _all_there(active, np.broadcast_to(members, m.n).reshape(-1, 32))
        votes = (
            active
            if a is None
            else active & (np.broadcast_to(~a if negate else a, m.n).reshape(-1, 32))
        )
        rows = active.any(1)
        if t == "u32":
            result: Any = (
                (votes.astype(np.uint64) << _LANE.astype(np.uint64)).sum(1).astype(np.uint32)
            )
        else:
            result = votes.any(1) if mode == "any" else (votes | ~active).all(1)
        d.reshape(-1, 32)[rows] = result[rows, None]

    return run


@binds("elect")
def elect(m: Machine, i: Instruction) -> Run:
    d = m.target(i.operands[0].rpartition("|")[2], "pred")

    def run(mask: Any) -> None:
        warps = m.whole_warps(mask, "elect.sync")
        d.reshape(-1, 32)[warps] = _LANE == 0

    return run
