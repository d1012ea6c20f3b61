"""`numflash estimate attention`: fused attention on a CPU with its caches, memory and energy.

llvm-mca gives the cycles of a block of 24 query rows and 128 keys; the emulator's trace says how
many bytes it moves between registers and L1; the tiling says what comes from behind. `machines` has
rates and joules. Two times are given, because nobody here has measured how much of a transfer an
A64FX hides: all of it, and nothing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..errors import UnsupportedError
from ..measure.console import Progress, Table
from ..tiling import KEY_BLOCK
from . import estimate, machines
from .emulator import Emulated
from .estimate_floats import block_parts
from .model import LIMITS, Model, bits_of, isa_of, lanes_a_cycle

LENGTHS = (512, 2048, 4096, 8192, 32768)
D, ROWS = 128, estimate.ROWS
MOVES = re.compile(r"(ld|st)(\w*)\s+(?:\{\s*)?([zqdsxw])(\d+)(?:\.(\w))?")
SCALAR = {"q": 16, "d": 8, "s": 4, "x": 8, "w": 4}
REPLICATED = {"b": 1, "h": 2, "w": 4, "d": 8}


class Block(NamedTuple):
    """ROWS query rows x KEY_BLOCK keys of one kind of attention.

    Attributes
    ----------
    cycles : modelled, everything in L1
    l1 : bytes between registers and L1
    streamed : bytes of K and V, which come from behind L1 where they do not fit
    own : bytes of Q and O, which come and go once for each query tile
    kinds : multiply-adds by kind of `machines.OPERATION`
    """

    name: str
    cycles: float
    l1: int
    streamed: int
    own: int
    kinds: dict[str, float]


def moved_bytes(lines: Sequence[str], bits: int) -> int:
    """Bytes that the loads and stores of executed instructions move (predicates are all true)."""
    total = 0
    for line in lines:
        found = MOVES.match(line)
        if not found:
            continue
        _, rest, register, _, _ = found.groups()
        if register == "z":
            total += REPLICATED[rest[2]] if rest.startswith("1r") else bits // 8
        else:
            total += SCALAR[register] * (2 if rest.startswith("p") else 1)
    return total


def _block(model: Model, name: str, parts: dict[str, tuple[Emulated, Any]], size: int) -> Block:
    """From the emulated parts; `size` bytes of an element of K and V."""
    bits = bits_of(model.cpu)
    lines = {part: run.trace(*arguments) for part, (run, arguments) in parts.items()}
    kind = "int8 to int32" if size == 1 else "float32"
    return Block(
        name,
        sum(map(model.cycles, lines.values())),
        sum(moved_bytes(x, bits) for x in lines.values()),
        2 * KEY_BLOCK * D * size + 8 * KEY_BLOCK,
        ROWS * D * (size + 4),
        {kind: 2.0 * ROWS * KEY_BLOCK * D},
    )


def blocks(model: Model) -> list[Block]:
    """INT8 and float32 attention of the CPU's best tiles."""
    cpu, bits, isa = model.cpu, bits_of(model.cpu), isa_of(model.cpu)
    if isa is None:
        raise UnsupportedError(f"estimate: {cpu} has no register tiles; allowed: CPUs with SVE")
    parts = estimate.tile_parts(isa, cpu, bits, D)
    parts.pop("sums")
    return [_block(model, "INT8", parts, 1), _block(model, "float32", block_parts(cpu, bits, D), 4)]


class Time(NamedTuple):
    """One head of L queries and keys on one core of `active` that do the same.

    Cycles with every transfer hidden, and with none; bytes by level; where K and V lie.
    """

    hidden: float
    open: float
    traffic: dict[str, float]
    home: str


def time(machine: machines.Machine, block: Block, length: int, active: int = 1) -> Time:
    """Cycles and bytes of a head; cores of a group work on heads of their own."""
    count = (length / ROWS) * (length / KEY_BLOCK)
    held = block.streamed / KEY_BLOCK * length + block.own  # of one core
    level = machines.home(machine, held)
    if level and level.cores > 1 and held * active > level.size:  # all cores' heads together
        level = None
    big = 2 * machine.levels[-1].size  # fits no cache
    moved = machines.transfer(machine, held if level else big, block.streamed, active)
    traffic = {"L1": block.l1 * count}
    for cache in machine.levels[1:]:
        if moved:
            traffic[cache.name] = block.streamed * count
        if cache is level:
            break
    once = held + 4.0 * length * D
    traffic["memory"] = once + (block.streamed * count if level is None else 0.0)
    first = machines.transfer(machine, big, once, active)
    compute = block.cycles * count
    return Time(
        max(compute, moved * count) + (0 if level is None else first),
        compute + moved * count + (0 if level is None else first),
        traffic,
        level.name if level else "memory",
    )


def bytes_table(cpu: str, every: list[Block]) -> Table:
    """What a block moves at each level, and the cycles for it."""
    machine = machines.MACHINES[cpu]
    near, behind = machine.levels[0], machine.levels[1]
    table = Table(
        f"{cpu}: a block of {ROWS} query rows x {KEY_BLOCK} keys, D = {D}",
        (
            "attention",
            "cycles",
            "bytes at L1",
            "cycles",
            "K and V behind L1",
            f"cycles {behind.name}",
            "memory",
            "memory, all cores",
        ),
    )
    big = 2 * machine.levels[-1].size
    for block in every:
        memory = [machines.transfer(machine, big, block.streamed, n) for n in (1, machine.cores)]
        table.add(
            block.name,
            f"{block.cycles:.0f}",
            f"{block.l1}",
            f"{block.l1 / near.rate:.0f}",
            f"{block.streamed}",
            f"{block.streamed / behind.rate:.0f}",
            *(f"{x:.0f}" for x in memory),
            **block._asdict(),
        )
    return table


def lengths_table(cpu: str, block: Block, peak: float) -> Table:
    """Rates over L, on one core and on a whole group."""
    machine = machines.MACHINES[cpu]
    table = Table(
        f"{cpu}: {block.name} attention, D = {D}: GOP/s of a core, transfers hidden to not hidden",
        (
            "L",
            "one core",
            "of the peak",
            "K, V in",
            f"each of {machine.cores}",
            "of the peak",
            "K, V in",
        ),
    )
    for length in LENGTHS:
        cells, records = [], []
        for active in (1, machine.cores):
            found = time(machine, block, length, active)
            operations = 4.0 * length**2 * D
            rates = [operations / x * machine.clock for x in (found.hidden, found.open)]
            cells += [
                " to ".join(f"{x / 1e9:.0f}" for x in rates),
                " to ".join(f"{100 * x / machine.clock / peak:.0f} %" for x in rates),
                found.home,
            ]
            records.append({"cores": active, "rates": rates, **found._asdict()})
        table.add(str(length), *cells, length=length, runs=records)
    return table


def energy_table(cpu: str, every: list[Block]) -> Table:
    """Picojoules an operation by mode, every core of the group at work."""
    length = 4096
    machine = machines.MACHINES[cpu]
    table = Table(
        f"{cpu}: energy of attention, L = {length}, D = {D}, all {machine.cores} cores of a group: pJ an operation",
        (
            "attention",
            "mode",
            "GOP/s of a core",
            "arithmetic",
            "caches",
            "memory",
            "everything else",
            "all",
            "W of a node",
        ),
        note=machines.SOURCES,
    )
    operations = 4.0 * length**2 * D
    for block in every:
        for mode, setting in machine.modes.items():
            found = time(machine, block, length, machine.cores)
            slower = machine.modes["normal"].pipes / setting.pipes
            seconds = found.hidden * slower / setting.clock
            kinds = {k: n * length / ROWS * length / KEY_BLOCK for k, n in block.kinds.items()}
            spent = machines.energy(machine, kinds, found.traffic, seconds, mode)
            pico = 1e12 / operations
            caches = sum(x for level, x in spent.levels.items() if level != "memory")
            watts = spent.total / seconds * machine.cores * machine.groups
            whole = [f"{pico * x:.2f}" for x in (spent.rest, spent.total)] + [f"{watts:.0f}"]
            table.add(
                block.name,
                mode,
                f"{operations / seconds / 1e9:.0f}",
                *(f"{pico * x:.2f}" for x in (spent.arithmetic, caches, spent.levels["memory"])),
                *(whole if machine.node_watts else ["unknown"] * 3),
                attention=block.name,
                mode=mode,
                seconds=seconds,
                watts=watts,
                **spent._asdict(),
            )
    return table


def run(cpu: str) -> dict[str, Any]:
    """Print the tables and return them as data.

    Raises
    ------
    ArgumentError, UnsupportedError
        For a CPU without a model or register tiles; without llvm-mca.
    """
    model = Model(machines.known(cpu))
    bits = bits_of(cpu)
    with Progress("estimate attention", 1) as progress:
        progress.step("a block of INT8 and of float32")
        every = blocks(model)
    lanes = lanes_a_cycle(bits)
    tables = [bytes_table(cpu, every)]
    tables += [lengths_table(cpu, b, lanes * (8 if b.name == "INT8" else 2)) for b in every]
    tables.append(energy_table(cpu, every))
    for table in tables:
        table.show()
    print(f"cycles by llvm-mca {model.shown}; {LIMITS}")
    names = ("blocks", "int8", "float32", "energy")
    return {
        "cpu": cpu,
        "llvm_mca": model.version,
        **{name: table.records for name, table in zip(names, tables, strict=True)},
        "sources": machines.SOURCES,
        "limits": LIMITS,
    }
