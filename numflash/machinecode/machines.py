"""Caches, memory and energy of the CPUs that `numflash estimate` models.

llvm-mca knows pipes and latencies and lets every load hit the first-level cache. This adds what
lies behind it: bytes that a tile moves at each level, cycles for them at the published rates, and
joules. `SOURCES` says of every figure whether it was found in print, found as others quote it, is
quoted from memory, or is assumed; none was measured by us on these CPUs.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ArgumentError

KIB = 1024
PICO = 1e-12


class Level(NamedTuple):
    """A cache: bytes, bytes a cycle that a core loads from it, and the cores that share it."""

    name: str
    size: int
    rate: float
    cores: int = 1


class Mode(NamedTuple):
    """A power mode: clock in Hz, arithmetic pipes, and watts of a node against the normal mode."""

    clock: float
    pipes: int
    power: float


class Machine(NamedTuple):
    """A CPU.

    Attributes
    ----------
    levels : caches, the nearest first
    bandwidth, alone : bytes a second that the cores of a group load from memory all together, and
        that one loads by itself; sustained, as others measured, not the peak of the memory
    cores : of a group with memory of its own
    groups : of a node
    modes : by name; the first is the normal one
    node_watts : of a node under HPL in the normal mode; 0 where nobody published it
    hpl : operations a second of that run on a node, in float64
    """

    name: str
    levels: tuple[Level, ...]
    bandwidth: float
    alone: float
    cores: int
    groups: int
    modes: dict[str, Mode]
    node_watts: float = 0.0
    hpl: float = 0.0

    @property
    def clock(self) -> float:
        """Of the normal mode, in Hz."""
        return next(iter(self.modes.values())).clock


MACHINES = {
    "a64fx": Machine(
        "Fujitsu A64FX (Fugaku)",
        (Level("L1", 64 * KIB, 128), Level("L2", 8192 * KIB, 64, 12)),
        227.5e9,
        35.7e9,
        12,
        4,
        {
            "normal": Mode(2.0e9, 2, 1.0),
            "boost": Mode(2.2e9, 2, 1.17),
            "eco": Mode(2.0e9, 1, 0.82),
        },
        118.48e3 / 768,
        1.9995e15 / 768,
    ),
    "neoverse-v1": Machine(
        "Neoverse V1 (Graviton 3)",
        (
            Level("L1", 64 * KIB, 64),
            Level("L2", 1024 * KIB, 32),
            Level("L3", 32768 * KIB, 16, 64),
        ),
        252e9,
        43e9,
        64,
        1,
        {"normal": Mode(2.6e9, 2, 1.0)},
    ),
    "neoverse-v2": Machine(
        "Neoverse V2 (Grace)",
        (
            Level("L1", 64 * KIB, 48),
            Level("L2", 1024 * KIB, 34),
            Level("L3", 114 * 1024 * KIB, 28, 72),
        ),
        410e9,
        37e9,
        72,
        1,
        {"normal": Mode(3.1e9, 4, 1.0)},
    ),
}

# picojoules in 7 nm; of a multiplication and an addition together, and of a byte
OPERATION = {
    "int8 to int32": 0.07 + 0.03,
    "float16": 0.34 + 0.16,
    "float32": 1.31 + 0.38,
    "float64": 4 * 1.31 + 2 * 0.38,
}
BYTE = {"L1": 8.5 / 8, "L2": 14 / 8, "L3": 14 / 8, "memory": 350 / 8}
SOURCES = (
    "Found in print: A64FX, 64 KiB and 8 MiB of cache, 12 cores and a peak of 256 GB/s a group (Arm, Introduction to the\n"
    "A64FX, 2019; Fujitsu's data sheet); L1, 230 GB/s for each core at 1.8 GHz, hence 128 bytes a cycle (Fujitsu at Cool\n"
    "Chips 22, 2019, reported by Mynavi); L2, 64 bytes a cycle and core (Kerncraft's A64FX.yml, after Alappat et al.,\n"
    "arXiv 2103.03013); sustained loads at 1.8 GHz, 227.5 GB/s for 12 cores and 35.7 for one by itself (measured, Kerncraft's\n"
    "A64FX_qpace4.yml); 1.9995 PFLOP/s at 16.876 GFLOP/s a watt on 768 CPUs, hence 154 W a node (Green500, November 2019;\n"
    "Fujitsu's press release); boost, 17 % more power for 10 % more speed (Kodama et al., CLUSTER 2020); Graviton 3, caches and\n"
    "8 channels of DDR5-4800, a peak of 307 GB/s (WikiChip); Grace, a peak of 500 GB/s (announced by NVIDIA), 410 of STREAM\n"
    "triad (its tuning guide); Neoverse V2, one core of Graviton 4, 95 GB/s from L2, 78 from L3, 37 from memory (Arm's\n"
    "learning path on streaming bandwidth), at 2.8 GHz 34 and 28 bytes a cycle.\n"
    "Found as quoted by others: energy in 7 nm (Jouppi et al., Ten lessons from three generations shaped Google's TPUv4i,\n"
    "ISCA 2021, table 2), int8 multiplication 0.07 pJ, int32 addition 0.03, float16 multiplication 0.34, float32 1.31, 8 bytes\n"
    "of a 32 KiB SRAM 8.5, of 1 MiB 14; HBM2, 3.92 pJ a bit, 31 a byte (O'Connor et al., MICRO 2017).\n"
    "Quoted from memory, check them before you rely on them: additions in float16 0.16 pJ and in float32 0.38, 8 bytes of\n"
    "HBM2 250 to 450 pJ (the same table 2; 350 here, 44 a byte); Neoverse, cache sizes other than Graviton 3's (Arm's manuals).\n"
    "Assumptions: memory as fast at 2.0 GHz as at 1.8; Neoverse V1, rates of its caches, 82 % of its memory's peak (as Grace),\n"
    "43 GB/s for one core (Graviton 4's 37 are 14 % less by STREAM); Grace's L2 and L3 as Graviton 4's; larger caches cost as\n"
    "much as 1 MiB (too little); float64 = 4 multiplications and 2 additions of float32; everything else (fetch, rename,\n"
    "registers, leakage, network) is what remains of a node's watts in HPL, at all times; eco, one of two pipes and 18 % less\n"
    "power"
)


def known(cpu: str) -> str:
    """`cpu` itself, if its caches are known here."""
    if cpu not in MACHINES:
        raise ArgumentError(f"cpu: got {cpu!r}; allowed: {', '.join(map(repr, MACHINES))}")
    return cpu


def home(machine: Machine, size: float) -> Level | None:
    """The nearest level that holds `size` bytes; None for memory."""
    return next((level for level in machine.levels if size <= level.size), None)


def transfer(machine: Machine, working_set: float, streamed: float, active: int = 1) -> float:
    """Cycles to bring `streamed` bytes into L1 from the level that holds `working_set` bytes.

    `active` cores of the group do the same. 0 where all is in L1 already.
    """
    level = home(machine, working_set)
    if level is machine.levels[0]:
        return 0.0
    if level is not None:
        return streamed / level.rate
    return streamed * machine.clock / min(machine.bandwidth / active, machine.alone)


def rest_watts(machine: Machine) -> float:
    """Watts of a node for what `OPERATION` and `BYTE` leave out: from its HPL run.

    HPL's products read an operand from L1 for every instruction, about half a byte an operation.
    """
    dynamic = machine.hpl * PICO * (OPERATION["float64"] / 2 + 0.5 * 8 * BYTE["L1"])
    return max(0.0, machine.node_watts - dynamic)


class Energy(NamedTuple):
    """Joules of some work on one core: arithmetic, bytes by level, everything else."""

    arithmetic: float
    levels: dict[str, float]
    rest: float

    @property
    def total(self) -> float:
        """All of them."""
        return self.arithmetic + sum(self.levels.values()) + self.rest


def energy(
    machine: Machine,
    multiply_adds: dict[str, float],
    traffic: dict[str, float],
    seconds: float,
    mode: str = "normal",
) -> Energy:
    """Joules of a core that does so many multiply-adds (by kind) and moves so many bytes (by level).

    A core answers for its share of the node's other watts. The power of a mode scales everything
    but HBM2.
    """
    factor = machine.modes[mode].power / (
        machine.modes[mode].clock / machine.clock if mode == "boost" else 1
    )
    arithmetic = factor * sum(n * OPERATION[kind] * PICO for kind, n in multiply_adds.items())
    levels = {
        name: (1 if name == "memory" else factor) * n * BYTE[name] * PICO
        for name, n in traffic.items()
    }
    share = rest_watts(machine) * machine.modes[mode].power / (machine.cores * machine.groups)
    return Energy(arithmetic, levels, share * seconds)
