"""Rules about registers.

None is read before it is written, and none that a wgmma uses is written between the last
wgmma.fence and the product. What a program can break is found once, so that only those instructions
cost anything while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import write
from .errors import Fault
from .parse import Instruction, Program, names_in, vector

if TYPE_CHECKING:
    from .machine import Machine

Hook = Callable[[Any], None]


# ---- registers that nothing has written
def _successors(program: Program, pc: int) -> list[int]:
    i = program.code[pc]
    after = [pc + 1] if pc + 1 < len(program.code) else []
    if i.op == "bra":
        target = [program.labels[i.operands[0]]]
        return target if i.predicate is None else target + after
    if i.op in ("ret", "exit") and i.predicate is None:
        return []
    return after


def _blocks(program: Program) -> dict[int, int]:
    """{first instruction: one behind the last} of each straight piece of code."""
    heads = {0, *program.labels.values()}
    heads |= {n + 1 for n, i in enumerate(program.code) if i.op in ("bra", "ret", "exit")}
    ordered = sorted(h for h in heads if h < len(program.code))
    return dict(zip(ordered, [*ordered[1:], len(program.code)], strict=True))


def unset_reads(program: Program) -> dict[int, frozenset[str]]:
    """{instruction: registers it reads that some path leaves unwritten}.

    A move of such a register leaves its target unwritten too, and is no read.
    """
    number = {name: n for n, name in enumerate(program.registers)}

    def mask(names: list[str]) -> int:
        return sum(1 << n for n in {number[x] for x in names})

    code = program.code
    steps = []
    for i in code:
        written, used = mask(i.results), mask(i.reads)
        guard = mask([i.predicate]) if i.predicate in number else 0
        move = i.op == "mov" and written.bit_count() == used.bit_count() == 1
        steps.append((written, used, guard, move, i.predicate is None))

    def through(first: int, end: int, unset: int, found: dict[int, int] | None) -> int:
        for pc in range(first, end):
            written, used, guard, move, always = steps[pc]
            read = unset & (guard if move else guard | used)
            if read and found is not None:
                found[pc] = read
            if move and unset & used:
                unset |= written
            elif always:
                unset &= ~written
        return unset

    blocks = _blocks(program)
    before = dict.fromkeys(blocks, 0)
    before[0] = (1 << len(number)) - 1
    todo = [0]
    done: set[int] = set()
    while todo:
        first = todo.pop()
        done.add(first)
        left = through(first, blocks[first], before[first], None)
        for then in _successors(program, blocks[first] - 1):
            if left | before[then] != before[then] or then not in done:
                before[then] |= left
                todo.append(then)
    found: dict[int, int] = {}
    for first in done:
        through(first, blocks[first], before[first], found)
    names = list(number)
    return {
        pc: frozenset(names[n] for n in range(bits.bit_length()) if bits >> n & 1)
        for pc, bits in found.items()
    }


class Unset:
    """Which threads have written the registers that some path leaves unwritten."""

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        program = machine.program
        if program.unset is None:
            program.unset = unset_reads(program)
        self.reads = program.unset
        self.guards = {
            pc: i.predicate
            for pc, names in self.reads.items()
            if (i := program.code[pc]).predicate in names and i.predicate is not None
        }
        watched = {x for names in self.reads.values() for x in names}
        while True:  # moves carry the state on
            more = {
                source
                for i in program.code
                if i.op == "mov" and not watched.isdisjoint(i.results)
                for source in i.reads
            }
            if more <= watched:
                break
            watched |= more
        self.written = {name: np.zeros(machine.n, bool) for name in watched}

    def reset(self) -> None:
        for written in self.written.values():
            written[:] = False

    def require(self, name: str, mask: Any) -> None:
        """A fault if a thread of the mask reads this register before it has written it."""
        written = self.written[name]
        if not (written.all() if mask is True else written[mask].all()):
            raise Fault("uninitialised", f"register {name} read but never written")

    def hooks(self, pc: int, i: Instruction) -> list[Hook]:
        """What to do before an instruction: check its operands, then note its results."""
        found: list[Hook] = []
        for name in self.reads.get(pc, ()):
            if name in i.reads:
                found.append(functools.partial(self.require, name))
        sources = i.reads if i.op == "mov" else []
        for name in i.results:
            if name not in self.written:
                continue
            source = self.written.get(sources[0]) if len(sources) == 1 else None
            value = True if source is None else source
            found.append(functools.partial(write, self.written[name], value))
        return found


# ---- registers of products
class Fences:
    """Which warps have written a register of a product since their last wgmma.fence (PTX 9.7.15.7).

    Moves between such registers are the compiler's renaming and carry the state on; moves of
    constants are not counted.
    """

    def __init__(self, machine: Machine) -> None:
        self.m = machine
        program = machine.program
        used: set[str] = set()
        for i in program.code:
            if i.is_product:
                names = (name for x in self._registers(i) for name in names_in(x))
                used.update(name for name in names if name in program.registers)
        while True:
            more = {
                source
                for i in program.code
                if i.op == "mov" and not used.isdisjoint(i.results)
                for source in i.reads
            }
            if more <= used:
                break
            used |= more
        self.row = {name: n for n, name in enumerate(sorted(used))}
        self.touched = np.zeros((len(used), machine.n // 32), bool)

    @staticmethod
    def _registers(i: Instruction) -> tuple[str, ...]:
        """Accumulators, and the fragments of A if they are registers."""
        return i.operands[:2] if i.operands[1].startswith("{") else i.operands[:1]

    def reset(self) -> None:
        self.touched[:] = False

    def fence(self, warps: np.ndarray) -> None:
        self.touched[:, warps] = False

    def hooks(self, i: Instruction) -> list[Hook]:
        touched = self.touched
        if i.is_product:
            names = [x for o in self._registers(i) for x in vector(o) if x in self.row]
            rows = np.array([self.row[x] for x in names])

            def check(mask: Any) -> None:
                late = touched[rows][:, self.m.warps_of(mask)].any(1)
                if late.any():
                    raise Fault(
                        "protocol",
                        f"register {names[int(np.nonzero(late)[0][0])]} was written between the last "
                        "wgmma.fence and this product",
                    )

            return [check]
        results, sources = i.results, i.reads
        if i.op == "mov" and not sources:
            return []  # a constant, which the compiler puts anywhere
        if i.op == "mov" and len(results) == len(sources) == 1:
            if results[0] not in self.row:
                return []
            to, source = self.row[results[0]], self.row[sources[0]]

            def move(mask: Any) -> None:
                warps = self.m.warps_of(mask)
                touched[to, warps] = touched[source, warps]

            return [move]
        rows = np.array(sorted({self.row[x] for x in results if x in self.row}), int)
        if not rows.size:
            return []

        def touch(mask: Any) -> None:
            touched[rows[:, None], self.m.warps_of(mask)] = True

        return [touch]


def hook(machine: Machine, pc: int) -> Hook | None:
    """What runs before an instruction, None if there is nothing to do."""
    i = machine.program.code[pc]
    hooks = machine.unset.hooks(pc, i)
    if machine.fences.row:
        hooks += machine.fences.hooks(i)
    if len(hooks) < 2:
        return hooks[0] if hooks else None

    def several(mask: Any) -> None:
        for check in hooks:
            check(mask)

    return several
