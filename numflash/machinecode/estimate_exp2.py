"""`numflash estimate exp2`: the exp2 benchmark (docs/sources.md) as machine code of an AArch64 CPU.

Every kernel, exp2 and broadcast of `study.exp2_values`, compiled for the CPU, run by the emulator
and held against float64, and its cycles by llvm-mca: per key of a tile of 4 rows x 64 columns, and
as the share of the FMA peak that its note gives, at M = 4; at M = 16 the product and two passes,
which the note has there, as calls of their own. Where V does not fit the first-level cache, a
second figure has its transfer from the next level on top (`machines`).
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

import numpy as np

from ..cpu.isa import fexpa
from ..cpu.study import exp2_benchmark, exp2_values
from ..measure.console import Progress, Table
from . import assembly, machines
from .emulator import Emulated
from .model import LIMITS, Model, bits_of, lanes_a_cycle

ROWS, D = exp2_values.ROWS, 64
MORE_ROWS = 16  # the note's other M
LENGTHS = (64, 128, 256, 512)  # Nc
MATRIX, ROW = "float32[:,::1]", "float32[::1]"
SCORES = f"int32[:,::1], float32, float32, {MATRIX}"
SIGNATURES = {
    "fused": f"void({SCORES}, {ROW}, {MATRIX})",
    "fused4": f"void({SCORES}, {ROW}, {MATRIX})",
    "two_pass": f"void({SCORES}, {MATRIX}, {MATRIX})",
    "exp2": f"void({SCORES})",
    "gemm": f"void({MATRIX}, {MATRIX}, {MATRIX})",
}
# share of the peak in the note, kernel -> {(M, Nc): percent}; its broadcast table at Nc = 512
# divides by half of the peak, which is put right here
DOCUMENT = {
    "fused": {(4, 64): 12.7, (4, 128): 12.9, (4, 256): 12.8, (4, 512): 8.0},
    "fused4": {(4, 64): 14.5, (4, 128): 14.6, (4, 256): 14.6, (4, 512): 12.4},
    "fused4 register": {(4, 512): 22.6},
    "two_pass": {(4, 64): 51.0, (4, 128): 58.1, (4, 256): 47.2}
    | {(16, 64): 54.6, (16, 128): 57.3, (16, 256): 48.1},
    "gemm": {(4, 64): 79.5, (4, 128): 82.9, (4, 256): 65.3}
    | {(16, 64): 79.6, (16, 128): 83.1, (16, 256): 61.9},
}
DOCUMENT_EXP2 = {"fexpa-quadratic": 1.19, "fexpa": 0.79, "ultra": 0.63}  # cycles per score
DUP = re.compile(r"(?:mov|dup) z\d+\.s, (?:z\d+\.s\[\d+\]|s\d+)$")  # one lane to all lanes


class Found(NamedTuple):
    """One kernel: cycles of a call at M = m (Nc -> cycles), and what its hot loop consists of."""

    m: int
    kernel: str
    exp2: str
    broadcast: str
    cycles: dict[int, float]
    waiting: dict[int, float] | None
    dup: int
    ld1rw: int
    spills: int


def columns_of(bits: int) -> int:
    """Columns of the register tile: four vectors, as long as 16 vectors of sums leave room."""
    return max(16, 4 * bits // 32)


def combinations(cpu: str) -> list[tuple[str, str, str]]:
    """Every kernel with every exp2 and broadcast that makes a difference, on a CPU."""
    names = [x for x in exp2_values.ALL_EXP2 if bits_of(cpu) > 128 or not x.startswith("fexpa")]
    found = []
    for exp2 in names:
        found += [
            (kernel, exp2, way)
            for kernel in ("fused", "fused4")
            for way in exp2_benchmark.BROADCASTS
        ]
        found += [("two_pass", exp2, "memory"), ("exp2", exp2, "")]
    return [("gemm", "", "memory"), *found]


def emulated(kernel: str, exp2: str, broadcast: str, cpu: str) -> Emulated:
    """A kernel of `exp2_values` for a CPU, at the CPU's vector length."""
    columns = columns_of(bits_of(cpu))
    function = {
        "fused": lambda: exp2_values.make_fused(exp2, broadcast, columns),
        "fused4": lambda: exp2_values.make_fused4(exp2, broadcast, columns),
        "two_pass": lambda: exp2_values.make_two_pass(exp2, columns),
        "exp2": lambda: exp2_values.make_exp2_rows(exp2),
        "gemm": lambda: exp2_values.make_gemm(columns),
    }[kernel]()
    return Emulated(function, SIGNATURES[kernel], cpu, vector_bits=max(128, bits_of(cpu)))


def checked_trace(run: Emulated, kernel: str, exp2: str, nc: int, m: int = ROWS) -> list[str]:
    """Instructions of one call at M = m, whose result is right.

    Raises
    ------
    ArithmeticError
        If it is off by more than its exp2 explains.
    """
    s, scale, top, v = exp2_benchmark.draw(m, nc, D)
    weights = np.exp2(s * np.float64(scale) - np.float64(top))
    p, o = np.zeros(s.shape, np.float32), np.zeros((m, D), np.float32)
    scratch = np.zeros(exp2_values.LANES, np.float32)
    budget = 2 * exp2_benchmark.WORST[exp2 or "accurate"]
    if kernel == "gemm":
        p[:] = weights
        lines = run.trace(p, v, o)
    elif kernel == "exp2":
        lines = run.trace(s, scale, top, p)
    elif kernel == "two_pass":
        lines = run.trace(s, scale, top, v, p, o)
    else:
        lines = run.trace(s, scale, top, v, scratch, o)
    out, exact = (p, weights) if kernel == "exp2" else (o, weights @ v)
    error = float(np.abs(out - exact).sum() / np.abs(exact).sum())
    if not error <= budget:
        raise ArithmeticError(
            f"{kernel}, exp2 {exp2}: relative error {error:.2g}, {budget} allowed"
        )
    return lines


def measure(model: Model, kernel: str, exp2: str, broadcast: str, m: int = ROWS) -> Found:
    """Modelled cycles of one kernel: of two lengths, and so of all, which have the same loops."""
    run = emulated(kernel, exp2, broadcast, model.cpu)
    lines = {nc: checked_trace(run, kernel, exp2, nc, m) for nc in LENGTHS[:2]}

    def all_lengths(stores_first: bool) -> dict[int, float]:
        short, long = (model.cycles(lines[nc], stores_first) for nc in LENGTHS[:2])
        per_key = (long - short) / (LENGTHS[1] - LENGTHS[0])
        return {nc: short + per_key * (nc - LENGTHS[0]) for nc in LENGTHS}

    products = [
        line
        for loop in assembly.loops(run.code.assembly)
        for line in loop.instructions
        if any("fmla" in x for x in loop.instructions)
    ]
    through_memory = kernel in ("fused", "fused4") and broadcast == "memory"
    return Found(
        m,
        kernel,
        exp2,
        broadcast,
        all_lengths(False),
        all_lengths(True) if through_memory else None,
        sum(bool(DUP.match(line)) for line in products),
        sum(line.startswith("ld1rw") for line in products),
        sum(map(assembly.is_spill, products)),
    )


def share(cycles: float, nc: int, bits: int, m: int = ROWS) -> float:
    """Of the FMA peak of a CPU whose vectors have `bits` bits."""
    return m * nc * D / lanes_a_cycle(bits) / cycles


def _percents(found: Found, machine: machines.Machine, bits: int) -> list[str]:
    """Shares at every Nc: in the first-level cache, and with the transfer of what it lacks."""
    cells = []
    for nc in LENGTHS:
        alone = share(found.cycles[nc], nc, bits, found.m)
        tiles = found.m // ROWS  # V comes once for each
        waits = machines.transfer(machine, 4 * (nc * D + 2 * found.m * nc), tiles * 4 * nc * D)
        beyond = share(found.cycles[nc] + waits, nc, bits, found.m)
        cells.append(
            f"{100 * alone:.1f}" if not waits else f"{100 * alone:.1f} ({100 * beyond:.1f})"
        )
    return cells


def _said(found: Found) -> list[str]:
    """What the note has for a kernel, Nc by Nc."""
    exact = DOCUMENT.get(f"{found.kernel} {found.broadcast}", {})
    known = exact if found.broadcast == "register" else DOCUMENT.get(found.kernel, {})
    return [f"{known[found.m, nc]:g}" if (found.m, nc) in known else "" for nc in LENGTHS]


def table_of_products(cpu: str, every: list[Found], bits: int) -> Table:
    """Shares of the peak beside the note's, for kernels of one M."""
    machine = machines.MACHINES[cpu]
    m = every[0].m
    lengths = [str(nc) for nc in LENGTHS]
    table = Table(
        f"{cpu}: exp2 and P.V, M = {m}, D = {D}: share of the FMA peak in %, Nc = {', '.join(lengths)}",
        (
            "kernel",
            "exp2",
            "broadcast",
            "cycles/key",
            "DUP",
            "LD1RW",
            "spills",
            *lengths,
            "document",
        ),
    )
    for found in every:
        if found.kernel == "exp2":
            continue
        per_key = (found.cycles[512] - found.cycles[64]) / 448
        said = [x or "-" for x in _said(found)]
        waiting = found.waiting
        cells = f"{per_key:.1f}"
        if waiting:
            cells += f" to {(waiting[512] - waiting[64]) / 448:.1f}"
        table.add(
            found.kernel,
            found.exp2,
            found.broadcast,
            cells,
            str(found.dup),
            str(found.ld1rw),
            str(found.spills),
            *_percents(found, machine, bits),
            " ".join(said) if any(x != "-" for x in said) else "",
            **found._asdict(),
        )
    table.note = (
        "in brackets: with V from the level behind L1 that it does not fit, nothing hidden. A range of cycles: LD1RW of a\n"
        "weight that was just stored, from no wait at all to every load waiting for every store before it"
    )
    return table


def table_of_exp2(cpu: str, every: list[Found]) -> Table:
    """The exp2 pass alone."""
    table = Table(
        f"{cpu}: exp2 over rows of S, int32 to float32",
        ("exp2", "cycles/score", "% of the product, D = 64", "largest error", "document"),
    )
    gemm = next(x for x in every if x.kernel == "gemm")
    for found in every:
        if found.kernel == "exp2":
            per_score = (found.cycles[512] - found.cycles[64]) / 448 / ROWS
            per_key = (gemm.cycles[512] - gemm.cycles[64]) / 448
            said = DOCUMENT_EXP2.get(found.exp2)
            worst = fexpa.EXP2_FLOAT.get(found.exp2, (None, exp2_benchmark.WORST[found.exp2]))[1]
            table.add(
                found.exp2,
                f"{per_score:.2f}",
                f"{100 * per_score * ROWS / per_key:.0f}",
                f"{worst:.2g}",
                f"{said:g}" if said else "",
                exp2=found.exp2,
                cycles_per_score=per_score,
            )
    return table


def broadcasts(every: list[Found]) -> str:
    """What DUP against LD1RW comes to, in one sentence for each exp2."""
    lines = []
    for found in every:
        if found.kernel == "fused4" and found.broadcast == "register":
            other = next(
                x
                for x in every
                if (x.kernel, x.exp2, x.broadcast) == ("fused4", found.exp2, "memory")
            )
            dup, free, waits = (
                (x[512] - x[64]) / 448 for x in (found.cycles, other.cycles, other.waiting or {})
            )
            lines.append(
                f"  {found.exp2}: DUP {dup:.1f} cycles a key, LD1RW {free:.1f} if no load waits for the store, "
                f"{waits:.1f} if all do: LD1RW takes {free / dup:.2f} to {waits / dup:.2f} of DUP's time"
            )
    return "four keys at a time, DUP against LD1RW:\n" + "\n".join(lines)


def run(cpu: str) -> dict[str, Any]:
    """Print the tables and return them as data.

    Raises
    ------
    ArgumentError, UnsupportedError
        For a CPU without a model; without llvm-mca.
    """
    model = Model(machines.known(cpu))
    bits = bits_of(cpu)
    todo = combinations(cpu)
    taller = [x for x in todo if x[0] in ("gemm", "two_pass")]
    found = []
    with Progress("estimate exp2", len(todo) + len(taller)) as progress:
        for m, names in ((ROWS, todo), (MORE_ROWS, taller)):
            for kernel, exp2, broadcast in names:
                progress.step(" ".join(filter(None, (f"M = {m}", kernel, exp2, broadcast))))
                found.append(measure(model, kernel, exp2, broadcast, m))
    every = found[: len(todo)]
    tables = [table_of_products(cpu, x, bits) for x in (every, found[len(todo) :]) if x]
    tables.append(table_of_exp2(cpu, every))
    for table in tables:
        table.show()
    said = broadcasts(every)
    print(said)
    print(f"cycles by llvm-mca {model.shown}; {LIMITS}")
    return {
        "cpu": cpu,
        "llvm_mca": model.version,
        "kernels": tables[0].records,
        "taller": tables[1].records if taller else [],
        "exp2": tables[-1].records,
        "broadcast": said,
        "limits": LIMITS,
    }
