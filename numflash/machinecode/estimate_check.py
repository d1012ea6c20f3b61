# ruff: noqa: ANN001, ANN202 (arguments of compiled functions)
"""`numflash estimate check`: the same model for this machine's CPU, beside measured times.

What the A64FX's tables cannot have, a machine at hand, this one has: llvm-mca's cycles of the same
kernels' hot loops and `machines`' transfers, each against the time that the kernel takes here. How
far the model is off here says what to make of its A64FX figures; energy is not checked (no meter).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from ..cpu.study import exp2_benchmark, exp2_values, unfused
from ..errors import UnsupportedError
from ..jit.compiler import kernel
from ..measure import roofline
from ..measure.console import Progress, Table
from ..measure.timing import best_time
from ..tiling import Caches
from . import assembly, codegen, estimate_exp2, machines
from .model import Model

NC, D, ROWS = 128, 64, exp2_values.ROWS
CASES = (
    ("gemm", "accurate", "memory"),
    ("fused4", "accurate", "register"),
    ("fused4", "accurate", "memory"),
    ("fused4", "fast", "register"),
    ("exp2", "accurate", "register"),
    ("exp2", "fast", "register"),
    ("exp2", "ultra", "register"),
)
# bytes a cycle of a core: Intel's figure for Skylake servers, sustained, from memory; assumed
L2_RATE, L3_RATE = 48, 12
SIZES = (24 << 10, 512 << 10, 64 << 20, 512 << 20)
_FMA = re.compile(r"vfn?m\w*add\w*ps\s|fmla\s|fmad\s")
_STORE = re.compile(r"vmov(?:[au]ps|dq[au]\d*)\s+%[xyz]mm\d+,\s*-?\w*\(|st1w\s|st[rp]\s+q")


def hot_loop(kernel: str, text: str) -> tuple[tuple[str, ...], float]:
    """The loop that takes the time, and how many keys (scores of exp2) a turn of it does."""

    def weight(loop: assembly.Loop) -> tuple[int, int]:
        products = sum(bool(_FMA.match(x)) for x in loop.instructions)
        return products, sum(map(assembly.is_vector, loop.instructions))

    body = max(assembly.loops(text), key=weight).instructions
    if kernel == "exp2":
        return body, exp2_values.LANES * max(1, sum(bool(_STORE.match(x)) for x in body))
    products = sum(bool(_FMA.match(x)) for x in body)
    vectors = exp2_values.COLUMNS * ROWS // (exp2_values.LANES if exp2_values.COLUMNS > 16 else 8)
    return body, 4 * max(1, products // (4 * vectors)) if kernel == "fused4" else products / vectors


def kernels_table(model: Model, target: codegen.Target) -> Table:
    """Kernels of the exp2 benchmark in L1: cycles modelled and measured."""
    clock = exp2_benchmark.measure_clock()
    table = Table(
        f"{model.cpu}: kernels in L1, cycles a key of 4 x {exp2_values.COLUMNS} (exp2: 16 scores) at {clock / 1e9:.2f} GHz",
        ("kernel", "exp2", "broadcast", "modelled", "measured", "measured / modelled"),
    )
    for name, exp2, broadcast in CASES:
        function: Any = exp2_values.gemm
        if name == "fused4":
            function = exp2_values.make_fused4(exp2, broadcast)
        elif name == "exp2":
            function = exp2_values.make_exp2_rows(exp2)
        text = codegen.compile_for(function, estimate_exp2.SIGNATURES[name], target).assembly
        body, done = hot_loop(name, text)
        modelled = model.cycles(list(body) * 20) / 20 / done * (16 if name == "exp2" else 1)
        s, scale, top, v = exp2_benchmark.draw(ROWS, NC, exp2_values.COLUMNS)
        call, times = exp2_benchmark.prepare(name, exp2, broadcast, s, scale, top, v)
        work = times * (s.size / 16 if name == "exp2" else NC)
        measured = best_time(call, 0.1) * clock / work
        table.add(
            name,
            exp2 if name != "gemm" else "",
            broadcast if name == "fused4" else "",
            f"{modelled:.1f}",
            f"{measured:.1f}",
            f"{measured / modelled:.2f}",
            kernel=name,
            exp2=exp2,
            broadcast=broadcast,
            modelled=modelled,
            measured=measured,
        )
    return table


def this_machine(clock: float, read: float) -> machines.Machine:
    """Caches of this machine as the system reports them, its measured clock and memory read."""
    found = dict(Caches.of_this_machine().levels())
    rates = {"L1": 128.0, "L2": float(L2_RATE), "L3": float(L3_RATE)}
    levels = tuple(machines.Level(n, size, rates.get(n, L3_RATE)) for n, size in found.items())
    return machines.Machine(
        "this machine", levels, read, read, 1, 1, {"normal": machines.Mode(clock, 2, 1.0)}
    )


@kernel
def _maxima_again(times, s, top):  # type: ignore[no-untyped-def]
    for _ in range(times):
        unfused.maxima(s, s.shape[1], top)


def memory_table(model: Model, target: codegen.Target) -> Table:
    """A pass over S that reads it once, in every level: modelled (hidden, not hidden), measured."""
    clock, read = exp2_benchmark.measure_clock(), roofline.measure_memory(1)[0]
    machine = this_machine(clock, read)
    text = codegen.compile_for(
        unfused.maxima, "void(int32[:,::1], int64, int32[::1])", target
    ).assembly
    loops = [
        x
        for x in assembly.loops(text)
        if any(re.match(r"v?pmaxsd|smax", i) for i in x.instructions)
    ]
    body = max(loops, key=lambda x: sum(map(assembly.is_vector, x.instructions))).instructions
    widest = max((64 if "%zmm" in x else 32 if "%ymm" in x else 16) for x in body)
    done = sum(bool(re.match(r"v?pmaxsd|smax", x)) for x in body) * widest
    compute = model.cycles(list(body) * 20) / 20 / done  # cycles a byte
    table = Table(
        f"{model.cpu}: the pass of row maxima over S, bytes a cycle (memory read {read / 1e9:.1f} GB/s)",
        ("S", "in", "modelled", "measured", "measured / modelled"),
    )
    for size in SIZES:
        s = np.ones((max(1, size // (1 << 20)), min(size, 1 << 20) // 4), np.int32)
        top = np.zeros(len(s), np.int32)
        repeats = max(1, (4 << 20) // size)
        call = functools.partial(_maxima_again, repeats, s, top)
        call()
        moved = machines.transfer(machine, size, 1.0)
        slowest, fastest = compute + moved, max(compute, moved)
        level = machines.home(machine, size)
        rate = s.nbytes * repeats / (best_time(call, 0.1) * clock)
        table.add(
            f"{size >> 10} KiB",
            level.name if level else "memory",
            f"{1 / slowest:.1f} to {1 / fastest:.1f}",
            f"{rate:.1f}",
            f"{rate * slowest:.2f} to {rate * fastest:.2f}",
            bytes=size,
            modelled=(1 / slowest, 1 / fastest),
            measured=rate,
        )
    table.note = (
        f"modelled: nothing hidden to all of it; L2 {L2_RATE} bytes a cycle (Intel's optimisation manual on Skylake servers, from\n"
        f"memory), L3 {L3_RATE} an assumption, memory as measured. Energy is not checked: this machine has no meter that a\n"
        "process may read"
    )
    return table


def run(cpu: str = "host") -> dict[str, Any]:
    """Print both tables and return them as data; always of this machine's code.

    cpu : whose pipes llvm-mca is to model, where LLVM mistakes this machine for another CPU

    Raises
    ------
    UnsupportedError
        Without llvm-mca, or if it does not know this CPU.
    """
    target = codegen.Target.named("host")
    if not target.triple.startswith(("x86_64", "aarch64")):
        raise UnsupportedError(f"estimate check: got {target.triple}; allowed: x86-64 and AArch64")
    triple = codegen.X86_64 if target.triple.startswith("x86_64") else codegen.AARCH64
    model = Model(target.cpu if cpu == "host" else cpu, triple)
    jobs: dict[str, Callable[[Model, codegen.Target], Table]] = {
        "kernels": kernels_table,
        "memory": memory_table,
    }
    found = {}
    with Progress("estimate check", len(jobs)) as progress:
        for name, job in jobs.items():
            progress.step(name)
            table = job(model, target)
            table.show()
            found[name] = table.records
    return {"cpu": model.cpu, "llvm_mca": model.version, **found}
