"""A strict emulator for the PTX of numflash's kernels.

Runs them on any machine, checks them, counts what they move.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ...errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ..instructions.tensormap import TensorMap
from . import architectures
from .errors import EmulatorError
from .machine import Machine
from .memory import Global
from .parse import Program, parse
from .registers import Launch
from .report import Report, classify

__all__ = ["EmulatorError", "Report", "TensorMap", "emulate"]

BATCH_THREADS = 2048
BATCH_BYTES = 16 << 20


def emulate(
    kernel: Any,
    grid: Sequence[int] | int,
    block: Sequence[int] | int | None,
    args: Sequence[Any],
    *,
    shared_bytes: int | None = None,
    arch: str = "sm_80",
    schedule: str = "random",
    seed: int = 0,
    branches: int | None = None,
) -> Report:
    """Run a kernel over a grid, as strictly as the machine's rules allow.

    Parameters
    ----------
    kernel : Compiled, Source, PTX text, or a Python function
        A plain function is compiled for `arch` with a signature taken from the arguments.
    grid, block : 1 to 3 numbers; `block` may be None for a `Compiled` or `Source`, which contain it
    args : NumPy arrays (changed in place by the kernel), numbers, lists of `TensorMap`, or tuples
        of these
        Where the kernel takes an address (uint64), an array or a list of tensor maps stands for its
        address.
    shared_bytes : dynamic shared memory per block
    schedule : "random" (blocks in a random order, warps in two random cohorts between barriers) or
        "lockstep"
    seed : of the schedule
    branches : that a batch of blocks may take before it counts as an endless loop; None: 5 million

    Returns
    -------
    Report

    Raises
    ------
    EmulatorError
        With the PTX line and the kernel's source line: out-of-bounds and misaligned accesses,
        uninitialised shared memory, reads before the wait that makes them valid, races between
        warps, divergent warp operations, deadlock; instructions that the architecture has not.
    """
    start = time.perf_counter()
    if schedule not in ("random", "lockstep"):
        raise ArgumentError(f"schedule: got {schedule!r}; allowed: 'random', 'lockstep'")
    text, layout, threads, dynamic = _resolve(kernel, args, arch)
    sizes = _three("grid", grid)
    blocks = _three("block", threads if block is None else block)
    dynamic = dynamic if shared_bytes is None else shared_bytes
    cluster = getattr(kernel, "cluster", 1)
    if sizes[0] % cluster:
        raise ArgumentError(
            f"grid: got {sizes[0]} blocks along x; allowed: multiples of {cluster}, the kernel's cluster"
        )
    program = _parsed(text)
    memory = Global()
    maps: dict[int, TensorMap] = {}
    values = _flatten(args, layout, memory, maps)
    if len(values) != len(program.parameters):
        raise ArgumentError(
            f"args: {len(values)} values after flattening; the kernel takes {len(program.parameters)}"
        )
    parameters = {name: value for (name, _), value in zip(program.parameters, values, strict=True)}
    todo = [(x, y, z) for z in range(sizes[2]) for y in range(sizes[1]) for x in range(sizes[0])]
    if schedule == "random":  # a card runs blocks in any order, those of a cluster together
        order = np.random.default_rng(seed).permutation(len(todo) // cluster)
        todo = [todo[cluster * n + rank] for n in order for rank in range(cluster)]
    report = Report(len(todo), blocks[0] * blocks[1] * blocks[2])
    if todo:
        fit = min(BATCH_THREADS // report.threads, BATCH_BYTES // (dynamic + 4096))
        per_batch = min(len(todo), max(1, fit // cluster) * cluster)
        with np.errstate(all="ignore"):
            launch = Launch(sizes, blocks, dynamic, memory, parameters, maps, cluster)
            machine = Machine(program, per_batch, launch, schedule, seed)
            machine.most_branches = branches or machine.most_branches
            for first in range(0, len(todo), per_batch):
                machine.run(todo[first : first + per_batch])
        _fill(report, machine)
    report.seconds = time.perf_counter() - start
    return report


_programs: dict[str, Program] = {}


def _parsed(text: str) -> Program:
    if text not in _programs:
        if len(_programs) > 64:
            _programs.clear()
        program = parse(text)
        architectures.check(program, text)
        _programs[text] = program
    return _programs[text]


def _resolve(
    kernel: Any, args: Sequence[Any], arch: str
) -> tuple[str, tuple[str, ...] | None, int | None, int]:
    """PTX text, parameter types, threads per block, dynamic shared memory."""
    if isinstance(kernel, str):
        return kernel, None, None, 0
    from ..compile import Compiled, Source, compile_source

    if isinstance(kernel, Compiled):
        return kernel.ptx, kernel.parameters, kernel.threads, kernel.shared_bytes
    if isinstance(kernel, Source):
        made = compile_source(kernel, arch, "ptx")
        return made.ptx, made.parameters, made.threads, made.shared_bytes
    if isinstance(kernel, Callable):  # type: ignore[arg-type]
        source = Source(getattr(kernel, "py_func", kernel), _signature(args), 1024)
        made = compile_source(source, arch, "ptx")
        return made.ptx, made.parameters, None, 0
    raise ArgumentTypeError(
        f"kernel: got {type(kernel).__name__}; allowed: Compiled, Source, PTX text, a Python function"
    )


def _signature(args: Sequence[Any]) -> Any:
    from ..compile.target import types

    found = []
    for a in args:
        if isinstance(a, np.ndarray):
            dtype = types.uint16 if a.dtype.name == "bfloat16" else getattr(types, a.dtype.name)
            found.append(types.Array(dtype, a.ndim, "C"))
        elif isinstance(a, (int, np.integer)):
            found.append(types.int64 if isinstance(a, int) else getattr(types, a.dtype.name))
        elif isinstance(a, (float, np.floating)):
            found.append(types.float32 if isinstance(a, float) else getattr(types, a.dtype.name))
        else:
            raise ArgumentTypeError(
                f"args: got {type(a).__name__}; allowed for a plain function: arrays and numbers"
            )
    return types.void(*found)


def _flatten(
    args: Sequence[Any], layout: tuple[str, ...] | None, memory: Global, maps: dict[int, TensorMap]
) -> list[Any]:
    """Arguments as the kernel's parameters.

    Numba passes an array as meminfo, parent, size, item size, data, shape, strides.
    """
    flat: list[Any] = []
    for a in args:
        flat += list(a) if isinstance(a, tuple) else [a]
    if layout is not None and len(layout) != len(flat):
        raise ArgumentError(f"args: {len(flat)} arguments; the kernel takes {len(layout)}")
    known: dict[int, int] = {}
    values: list[Any] = []
    for k, a in enumerate(flat):
        if isinstance(a, list):
            _check_maps(a)
            table = np.zeros((len(a), 16), np.uint64)
            address = memory.add(table)
            maps.update((address + 128 * n, item) for n, item in enumerate(a))
            values.append(address)
        elif isinstance(a, np.ndarray):
            if not a.flags.c_contiguous:
                raise ArgumentError(f"args[{k}]: not C-contiguous")
            if id(a) not in known:
                known[id(a)] = memory.add(a)
            as_array = layout is None or layout[k].startswith("array")
            if layout is not None and as_array and layout[k] != f"array{a.ndim}":
                raise ArgumentError(
                    f"args[{k}]: {a.ndim} dimensions; the kernel takes {layout[k][5:]}"
                )
            values += (
                [0, 0, a.size, a.itemsize, known[id(a)], *a.shape, *a.strides]
                if as_array
                else [known[id(a)]]
            )
        else:
            values.append(a)
    return values


def _check_maps(maps: Sequence[TensorMap]) -> None:
    """TMA's rules, as on a card where the arrays are used in place."""
    for item in maps:
        try:
            item.check(item.array.ctypes.data)
        except UnsupportedError as error:
            raise EmulatorError("protocol", str(error), 0, "", None) from error


def _three(name: str, value: Any) -> tuple[int, int, int]:
    given = (value,) if isinstance(value, (int, np.integer)) else tuple(value or ())
    if not 1 <= len(given) <= 3 or any(int(x) < (name == "block") for x in given):
        raise ArgumentError(f"{name}: got {value!r}; allowed: 1 to 3 positive numbers")
    return tuple(int(x) for x in (*given, 1, 1))[:3]  # type: ignore[return-value]


def _fill(report: Report, machine: Machine) -> None:
    for i, n in zip(machine.program.code, machine.executed, strict=True):
        if n:
            group = classify(i.op, i.type if i.modifiers else "")
            name = ".".join((i.op, *i.modifiers))
            report.instructions[group] = report.instructions.get(group, 0) + int(n)
            report.opcodes[name] = report.opcodes.get(name, 0) + int(n)
    for counter, total in machine.counters.items():
        setattr(report, counter, total)
