"""Runs a parsed kernel over a batch of blocks.

Divergence, barriers and a randomised schedule of warps.

All threads of a batch advance together where they are at the same instruction. Threads of a warp
that part ways run as groups, smallest program counter first, and merge where they meet. After every
barrier the warps are dealt at random into two cohorts, and one cohort runs as far as it can before
the other moves: a missing barrier then shows as wrong or missing data, besides being found by the
shadow memory (`memory.Shared`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

# they register their instructions
from . import alu, asynchronous, cluster, conversions, products, rules, tensor, transfer, waits  # noqa: F401
from .binders import BINDERS
from .errors import EmulatorError, Fault
from .parse import Instruction, Program
from .registers import Launch, Registers

STEP_LIMIT = 5_000_000  # branches in one batch
PLAIN, BRANCH, EXIT, BARRIER, WAIT = range(5)
BARRIERS = 16  # of a block, in hardware


class Group:
    """Threads at the same instruction.

    `wait` is None, ("barrier", id), or ("mbarrier" or "barrier.cluster", version seen).
    """

    __slots__ = ("cohort", "mask", "pc", "wait", "warps")

    def __init__(self, pc: int, mask: np.ndarray, cohort: int, wait: Any = None) -> None:
        self.pc, self.mask, self.cohort, self.wait = pc, mask, cohort, wait
        self.warps = int(mask.reshape(-1, 32).any(1).sum())


class Bound(NamedTuple):
    """An instruction of a program for one machine.

    kind : PLAIN to WAIT
    run : what does it; the target of a branch, the operands of a barrier
    guard : its predicate's register, and whether it is negated
    hook : what is checked before it
    """

    kind: int
    run: Any
    guard: tuple[np.ndarray, bool] | None
    hook: rules.Hook | None


@dataclass
class Barrier:
    """One hardware barrier of one block: the warps that have come (and wait or only arrived)."""

    expected: int
    warps: list[int]


class Machine(Registers):
    """A batch of `blocks` blocks of one kernel.

    schedule : "random" or "lockstep", with a seed. `run` may be called again for other blocks of the grid.
    """

    def __init__(
        self, program: Program, blocks: int, launch: Launch, schedule: str, seed: int
    ) -> None:
        super().__init__(program, blocks, launch)
        self.schedule = schedule
        self.random = np.random.default_rng(seed)
        # warps that stay in one cohort
        self.together = 4 if any(i.op in ("wgmma", "setmaxnreg") for i in program.code) else 1
        self.counters: dict[str, int] = {}
        self.barriers: dict[tuple[int, int], Barrier] = {}
        self.alive = np.ones(self.n, bool)
        self.copies = asynchronous.Copies(self)
        self.clusters = cluster.Clusters(self)
        self.products = products.Products(self)
        self.unset, self.fences = rules.Unset(self), rules.Fences(self)
        self.bound: list[Bound | None] = [None] * len(program.code)
        self.executed = np.zeros(len(program.code), np.int64)
        self._warps_cache: tuple[Any, Any] = (None, None)
        self.groups: list[Group] = []
        self.current: Group
        self.first_block = 0  # blocks that have run before this batch
        self.most_branches = STEP_LIMIT

    # ---- instructions
    def _bind(self, pc: int) -> Bound:
        """An instruction, prepared when it is reached for the first time."""
        i = self.program.code[pc]
        try:
            kind, run = self._kind(i)
        except KeyError:
            raise Fault("unsupported", "instruction not implemented") from None
        guard = None if i.predicate is None else (self.value(i.predicate, "pred"), i.negated)
        found = self.bound[pc] = Bound(kind, run, guard, rules.hook(self, pc))
        return found

    def _kind(self, i: Instruction) -> tuple[int, Any]:
        """What `_advance` does with an instruction, and what it needs for it."""
        if i.op == "bra":
            return BRANCH, self.program.labels[i.operands[0]]
        if i.op in ("ret", "exit"):
            return EXIT, None
        if i.op == "barrier" and i.modifiers[:2] == ("cluster", "wait"):
            return WAIT, self.clusters.bind_wait(i)
        if i.op == "bar" or (i.op == "barrier" and "cluster" not in i.modifiers):
            return BARRIER, self._barrier_operands(i)
        if i.op == "mbarrier" and i.modifiers[0] == "try_wait":
            return WAIT, self.copies.bind_wait(i)
        return PLAIN, BINDERS[i.op](self, i)

    # ---- masks
    def full(self, mask: Any) -> np.ndarray:
        return np.ones(self.n, bool) if mask is True else mask

    def warps_of(self, mask: Any) -> np.ndarray:
        """Numbers (in the batch) of the warps with any active thread."""
        return (
            np.arange(self.n // 32) if mask is True else np.nonzero(mask.reshape(-1, 32).any(1))[0]
        )

    def whole_warps(self, mask: Any, what: str) -> np.ndarray:
        """As `warps_of`, for a `.sync` operation: part of a warp is a fault."""
        if mask is True:
            return np.arange(self.n // 32)
        if self._warps_cache[0] is mask:
            return self._warps_cache[1]
        rows = mask.reshape(-1, 32)
        some = rows.any(1)
        every = rows.all(1)
        if (some & ~every).any():
            warp = int(np.nonzero(some & ~every)[0][0])
            raise Fault(
                "divergent",
                f"{what} reached by {int(rows[warp].sum())} of the 32 threads of warp "
                f"{warp % self.warps_per_block}",
            )
        found = np.nonzero(every)[0]
        self._warps_cache = (mask, found)
        return found

    def count(self, name: str, n: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + n

    # ---- running
    def run(self, blocks: list[tuple[int, int, int]]) -> None:
        """Run these blocks of the grid (at most as many as the batch has) to their end."""
        for k, axis in enumerate("xyz"):
            per_block = np.zeros(self.blocks, np.uint32)
            per_block[: len(blocks)] = [b[k] for b in blocks]
            self.special["%ctaid." + axis][:] = per_block[self.block_of]
        self.block_number = 1 + self.first_block + self.block_of
        self.first_block += len(blocks)
        self.has_done_atomics = np.zeros(self.blocks, bool)
        self.shared.reset()
        self.copies.reset()
        self.clusters.reset()
        self.products.reset()
        self.unset.reset()
        self.fences.reset()
        self.barriers.clear()
        self.alive = self.block_of < len(blocks)
        self.groups = []
        self._deal(0, self.alive.copy())
        self.steps = 0
        while self.groups:
            self.current = self._pick()
            try:
                self._advance(self.current)
            except Fault as fault:
                self._raise(fault.kind, str(fault), self.current)

    def _raise(self, kind: str, message: str, group: Group) -> None:
        i = self.program.code[group.pc]
        block = int(self.block_of[np.nonzero(group.mask)[0][0]])
        where = tuple(
            int(self.special["%ctaid." + a][block * self.threads_per_block]) for a in "xyz"
        )
        raise EmulatorError(kind, f"{message} [block {where}]", i.line, i.text, i.source) from None

    def _deal(self, pc: int, mask: np.ndarray) -> None:
        """Put these (whole) warps at pc, in two random cohorts."""
        if self.schedule == "random":
            side = self.random.integers(0, 2, self.n // 32).astype(bool)[
                self.warp // self.together * self.together
            ]
            for cohort, part in enumerate((mask & side, mask & ~side)):
                if part.any():
                    self.groups.append(Group(pc, part, cohort))
        else:
            self.groups.append(Group(pc, mask, 0))
        self._merge()

    def _merge(self) -> None:
        """Groups of one cohort at the same instruction become one."""
        seen: dict[tuple, Group] = {}
        for g in list(self.groups):
            key = (g.pc, g.cohort, g.wait)
            if key in seen:
                into = seen[key]
                self.groups.remove(into)
                self.groups[self.groups.index(g)] = seen[key] = Group(
                    g.pc, g.mask | into.mask, g.cohort, g.wait
                )
            else:
                seen[key] = g

    def _ready(self, g: Group) -> bool:
        return g.wait is None or (g.wait[0] != "barrier" and g.wait[1] < self.copies.version)

    def _pick(self) -> Group:
        ready = [g for g in self.groups if self._ready(g)]
        while not ready:
            if not self.copies.land_one(self.random):
                stuck = self.groups[0]
                block = int(self.block_of[stuck.mask.argmax()])
                who = waits.described(self, block)
                self._raise("deadlock", f"every thread waits: {who}", stuck)
            ready = [g for g in self.groups if self._ready(g)]
        for g in ready:
            g.wait = None
        self._merge()
        ready = [g for g in self.groups if g.wait is None]
        cohorts = sorted({g.cohort for g in ready})
        if getattr(self, "cohort", None) not in cohorts:
            self.cohort = cohorts[int(self.random.integers(len(cohorts)))]
        return min((g for g in ready if g.cohort == self.cohort), key=lambda g: g.pc)

    def _advance(self, g: Group) -> None:
        """Run one group until it branches apart, waits, ends, or reaches another group of its
        cohort.
        """
        limit = min(
            (x.pc for x in self.groups if x is not g and x.cohort == g.cohort and x.wait is None),
            default=1 << 60,
        )
        bound = self.bound
        executed = self.executed
        where: Any = True if g.mask.all() else g.mask
        while True:
            pc = g.pc
            executed[pc] += g.warps
            kind, run, guard, hook = bound[pc] or self._bind(pc)
            if guard is not None and pc in self.unset.guards:
                self.unset.require(self.unset.guards[pc], where)
            if kind == PLAIN:
                active = where
                if guard is not None:
                    p = ~guard[0] if guard[1] else guard[0]
                    active = p & g.mask
                    if not active.any():
                        g.pc += 1
                        if g.pc >= limit:
                            self._merge()
                            return
                        continue
                if self.products.tainted:
                    self.products.check(self.program.code[pc], active)
                if hook is not None:
                    hook(active)
                run(active)
                g.pc += 1
            elif kind == BRANCH:
                self.steps += 1
                if self.steps > self.most_branches:
                    raise Fault(
                        "deadlock",
                        f"more than {self.most_branches} branches without an end: an endless loop",
                    )
                if self._branch(g, run, guard):
                    return
            else:
                active = g.mask
                if guard is not None:
                    active = (~guard[0] if guard[1] else guard[0]) & g.mask
                    if not active.any():
                        g.pc += 1
                        continue
                    if not np.array_equal(active, g.mask):
                        self.groups.append(Group(pc + 1, g.mask & ~active, g.cohort))
                        g.mask = active
                        g.warps = int(active.reshape(-1, 32).any(1).sum())
                if hook is not None:
                    hook(active)
                if kind == EXIT:
                    self.groups.remove(g)
                    self.alive &= ~g.mask
                    self.clusters.ended(g.mask)
                    self._check_barriers()
                elif kind == BARRIER:
                    self._barrier(g, run)
                else:
                    self._wait(g, run)
                self._merge()
                return
            if g.pc >= limit:
                self._merge()
                return

    def _branch(self, g: Group, target: int, guard: Any) -> bool:
        """Follow a branch; True if the group has split."""
        if guard is None:
            g.pc = target
            return False
        taken = (~guard[0] if guard[1] else guard[0]) & g.mask
        if not taken.any():
            g.pc += 1
            return False
        rest = g.mask & ~taken
        if not rest.any():
            g.pc = target
            return False
        self.groups.remove(g)
        self.groups += [Group(g.pc + 1, rest, g.cohort), Group(target, taken, g.cohort)]
        self._merge()
        return True

    # ---- barriers
    def _barrier_operands(self, i: Instruction) -> tuple[Any, Any, bool]:
        if "warp" in i.modifiers:
            return None, None, False
        number = self.value(i.operands[0], "u32")
        threads = self.value(i.operands[1], "u32") if len(i.operands) > 1 else None
        return number, threads, "arrive" in i.modifiers

    def _barrier(self, g: Group, operands: tuple[Any, Any, bool]) -> None:
        number, threads, only_arrive = operands
        warps = self.whole_warps(g.mask, "barrier")
        if number is None:  # bar.warp.sync: the warp is together, so it is done
            self.shared.epoch[warps] += 1
            g.pc += 1
            return
        first = warps * 32
        ids = np.broadcast_to(number, self.n)[first]
        expected = (
            np.broadcast_to(threads, self.n)[first]
            if threads is not None
            else np.zeros(warps.size, int)
        )
        for warp, name, count in zip(warps, ids, expected, strict=True):
            if int(name) >= BARRIERS:
                raise Fault("protocol", f"barrier {int(name)}; allowed: 0 to {BARRIERS - 1}")
            key = (int(warp) // self.warps_per_block, int(name))
            state = self.barriers.setdefault(key, Barrier(int(count), []))
            if int(warp) in state.warps:
                raise Fault(
                    "protocol",
                    f"warp {int(warp) % self.warps_per_block} came to barrier {int(name)} twice in one round",
                )
            if state.expected != int(count) or int(count) % 32:
                raise Fault(
                    "protocol",
                    f"barrier {int(name)} is used for {state.expected} and for {int(count)} threads",
                )
            state.warps.append(int(warp))
        self.count("barriers", warps.size)
        g.pc += 1
        if not only_arrive:
            self.groups.remove(g)
            for name in np.unique(ids):
                chosen = np.zeros(self.n // 32, bool)
                chosen[warps[ids == name]] = True
                self.groups.append(
                    Group(g.pc, g.mask & chosen[self.warp], g.cohort, ("barrier", int(name)))
                )
        self._check_barriers()

    def _check_barriers(self) -> None:
        released = np.zeros(self.n, bool)
        for key in list(self.barriers):
            block, name = key
            state = self.barriers[key]
            threads = slice(block * self.threads_per_block, (block + 1) * self.threads_per_block)
            expected = state.expected or int(self.alive[threads].sum())
            if 32 * len(state.warps) < expected:
                continue
            if 32 * len(state.warps) > expected:
                raise Fault(
                    "protocol",
                    f"{len(state.warps)} warps came to barrier {name}, which counts {expected} threads",
                )
            del self.barriers[key]
            self.shared.join(np.array(state.warps))
            waiting = np.zeros(self.n // 32, bool)
            waiting[state.warps] = True
            self._release(("barrier", name), waiting[self.warp], released)

    def _release(self, wait: tuple, mask: np.ndarray, released: np.ndarray) -> None:
        places: dict[int, np.ndarray] = {}
        for g in [x for x in self.groups if x.wait == wait]:
            part = g.mask & mask
            if part.any():
                self.groups.remove(g)
                rest = g.mask & ~mask
                if rest.any():
                    self.groups.append(Group(g.pc, rest, g.cohort, wait))
                places[g.pc] = places.get(g.pc, released) | part
        for pc, part in places.items():
            self._deal(pc, part)

    def _wait(self, g: Group, ready: Any) -> None:
        """mbarrier.try_wait and barrier.cluster.wait.

        The threads whose phase is over go on, the others stay at the instruction.
        """
        done = ready(g.mask)
        late = g.mask & ~done
        if not late.any():
            g.pc += 1
            return
        self.groups.remove(g)
        name = "mbarrier" if self.program.code[g.pc].op == "mbarrier" else "barrier.cluster"
        self.groups.append(Group(g.pc, late, g.cohort, (name, self.copies.version)))
        if done.any():
            self.groups.append(Group(g.pc + 1, done, g.cohort))
