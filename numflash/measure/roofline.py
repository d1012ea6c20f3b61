"""The roof of this machine, measured by kernels of our own.

INT8 dot and FP32 multiply-add peaks, memory read and copy.

Peaks come from loops that do nothing but the instruction, on independent accumulators in registers.
Measured on this machine, because clocks, ports and shared memory differ from the data sheet.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace

import llvmlite.ir as ir
import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from ..cpu.isa import amx_tiles
from ..cpu.isa.isas import VECTOR_ISAS, running_lanes
from ..cpu.isa.vectors import F32, I32, I64, Isa, Vectors, call, repeat
from ..jit import target
from ..jit.compiler import kernel
from ..jit.threads import limit
from .timing import best_time

# more than latency x throughput of the core (A64FX: 9 x 2), and no more than its registers hold
# (AVX2: 16)
ACCUMULATORS = 12 if platform.machine() in ("x86_64", "AMD64") else 24
STEPS = 1 << 18  # well below a millisecond: some run is not interrupted
MEMORY_BYTES = 256 << 20  # far larger than any cache share
F = np.float32


@dataclass(frozen=True)
class Roof:
    """Measured rates, each the best of a few runs.

    int8 : INT8 multiplications and additions per second (one dot instruction does 2 x group x
        lanes)
    float32 : the same for FP32 multiply-add
    read, copy : bytes per second; a copied byte is read once and written once, and counts twice
    """

    isa: str
    threads: int
    int8: float
    float32: float
    read: float
    copy: float

    def __str__(self) -> str:
        return (
            f"INT8 peak {self.int8 / 1e9:.0f} GOP/s ({self.isa}), FP32 peak {self.float32 / 1e9:.0f} GFLOP/s, "
            f"memory read {self.read / 1e9:.1f} GB/s, copy {self.copy / 1e9:.1f} GB/s"
        )

    def confirmed(self, rates: list[float]) -> Roof:
        """The same roof, measured again if one of these INT8 rates is above it.

        The higher one of both counts.
        """
        if max(rates, default=0.0) <= self.int8:
            return self
        int8, float32 = measure_compute(self.threads, self.isa)
        return replace(self, int8=max(self.int8, int8), float32=max(self.float32, float32))

    def as_dict(self) -> dict[str, float | str]:
        """The same as a dictionary, for --json."""
        return asdict(self)


def _chain(isa: Vectors, element: ir.Type, result: types.Type, step: Callable) -> Callable:
    """Intrinsic f(n, seed).

    n steps on each of ACCUMULATORS vector registers, reduced to one number so that none is dropped.
    """
    vec = isa.vector(element)

    @intrinsic
    def run(typingctx, n, seed):
        def codegen(context, b, sig, args):
            number = args[1]
            operand = isa.splat(b, number, vec)
            start = [
                call_add(b, operand, isa.fill(b, vec, float(i) if element == F32 else i))
                for i in range(ACCUMULATORS)
            ]
            out = repeat(
                b,
                I64(0),
                args[0],
                start,
                lambda _, registers: [step(b, r, operand) for r in registers],
            )
            total = out[0]
            for x in out[1:]:
                total = call_add(b, total, x)
            return b.bitcast(isa.reduce(b, "add", b.bitcast(total, isa.vector(I32)), I32), element)

        def call_add(b, x, y):
            return b.fadd(x, y) if element == F32 else b.add(x, y)

        return result(types.int64, result), codegen

    return run


@functools.cache
def _int8_peak(isa_name: str) -> tuple[Callable, float]:
    """Kernel f(workers, n, seed) of dot instructions, and operations per worker and step."""
    if isa_name not in VECTOR_ISAS:
        return _portable_int8_peak()
    if isa_name == "amx_int8":
        return _matrix_int8_peak()
    isa = VECTOR_ISAS[isa_name]
    operations = 2.0 * isa.group * running_lanes(isa_name) * ACCUMULATORS
    return _on_workers(_chain(isa, I32, types.int32, int8_step(isa))), operations


def int8_step(isa: Isa) -> Callable:
    """f(b, acc, x): one dot instruction.

    Where it is a product and an addition (AVX2), the sums are its first operand: a product that is
    the same in every turn would be computed once, and its additions become one multiplication.
    """

    def step(b, acc, x):
        first = acc if isa.group == 2 else x
        return isa.score_dot(b, acc, b.bitcast(first, isa.operand), b.bitcast(x, isa.operand))

    return step


@functools.cache
def _float32_peak() -> tuple[Callable, float]:
    """The same for the widest multiply-add of the target."""
    features = target.features()
    if "sve" in features:
        isa: Vectors = VECTOR_ISAS["sve"]
        lanes = running_lanes("sve")
    else:
        lanes = 16 if "avx512f" in features else 8 if "fma" in features else 4
        isa = Vectors("float32", lanes)

    def step(b, acc, x):
        return isa.generic(b, "fma", acc, x, x)

    return _on_workers(_chain(isa, F32, types.float32, step)), 2.0 * lanes * ACCUMULATORS


@functools.cache
def fexpa_chain() -> Callable:
    """Intrinsic f(n, seed): n FEXPA on each of ACCUMULATORS registers of SVE."""
    isa = VECTOR_ISAS["sve"]

    def step(b, acc, _):
        found = call(b, "llvm.aarch64.sve.fexpa.x.nxv4f32", isa.vector(F32), acc)
        return b.bitcast(found, acc.type)

    return _chain(isa, I32, types.int32, step)


def _on_workers(chain: Callable) -> Callable:
    @kernel(parallel=True)
    def run(workers, n, seed, out):
        for w in prange(workers):
            out[np.intp(w)] = chain(n, seed)

    return run


@functools.cache
def _matrix_int8_peak() -> tuple[Callable, float]:
    """Matrix tiles: products of registers."""
    configure = amx_tiles.configure
    loop = amx_tiles.peak_loop
    release = amx_tiles.release

    @kernel(parallel=True)
    def run(workers, n, seed, out):
        for w in prange(workers):
            configure()
            out[np.intp(w)] = loop(np.int64(n // 8), seed)
            release()

    return run, amx_tiles.PEAK_OPERATIONS / 8


@functools.cache
def _portable_int8_peak() -> tuple[Callable, float]:
    """The INT8 peak of a machine without register tiles.

    It is that of the dot product that the compiler makes of a plain loop, in the first-level cache.
    """
    rows = 64
    size = 1024

    @kernel(parallel=True)
    def run(workers, n, seed, out):
        for w in prange(workers):
            a, b = np.full(size, seed, np.int8), np.full(size, 3, np.int8)
            total = np.int32(0)
            for _ in range(n // rows):
                for i in range(size):
                    total = np.int32(total + np.int32(np.int32(a[i]) * np.int32(b[i])))
                a[total & 1023] = np.int8(total)
            out[np.intp(w)] = total

    return run, 2.0 * size / rows


@kernel(parallel=True, float_math=True)
def read_memory(x, workers, out):
    """Sum x (N, size) float32 by rows into out (workers,)."""
    for w in prange(workers):
        total = F(0)
        for r in range(np.intp(w), x.shape[0], workers):
            row = x[r]
            for i in range(row.size):
                total += row[i]
        out[np.intp(w)] = total


@kernel(parallel=True)
def copy_memory(x, workers, y):
    for w in prange(workers):
        for r in range(np.intp(w), x.shape[0], workers):
            a, b = x[r], y[r]
            for i in range(a.size):
                b[i] = a[i]


def measure_compute(threads: int = 1, isa: str | None = None) -> tuple[float, float]:
    """INT8 operations per second of `isa`, and FP32 operations per second, on `threads` threads.

    isa : an instruction set, or None for the best one here
    """
    isa = target.require(isa)
    with limit(threads):
        int8, int8_ops = _int8_peak(isa)
        float32, float32_ops = _float32_peak()
        int_out = np.empty(threads, np.int32)
        float_out = np.empty(threads, np.float32)
        int8_time = best_time(lambda: int8(threads, STEPS, np.int32(0x01010101), int_out))
        float_time = best_time(lambda: float32(threads, STEPS, F(0.5), float_out))
    return int8_ops * STEPS * threads / int8_time, float32_ops * STEPS * threads / float_time


def measure_fexpa(threads: int = 1) -> float | None:
    """Powers of 2 per second by SVE's FEXPA on `threads` threads; None on machines without it."""
    if target.missing("sve"):
        return None
    run, out = _on_workers(fexpa_chain()), np.empty(threads, np.int32)
    with limit(threads):
        seconds = best_time(lambda: run(threads, STEPS, np.int32(1), out))
    return running_lanes("sve") * ACCUMULATORS * STEPS * threads / seconds


def measure_memory(threads: int = 1) -> tuple[float, float]:
    """Bytes per second read and copied on `threads` threads."""
    x = np.ones((1024, MEMORY_BYTES // 4096), np.float32)
    y = np.empty_like(x)
    out = np.empty(threads, np.float32)
    y.fill(0)
    with limit(threads):
        read_time = best_time(lambda: read_memory(x, threads, out), 0.3)
        copy_time = best_time(lambda: copy_memory(x, threads, y), 0.3)
    return x.nbytes / read_time, 2 * x.nbytes / copy_time


def measure(threads: int = 1, isa: str | None = None) -> Roof:
    """The roof of this machine on `threads` threads, for the INT8 instructions of `isa`.

    isa : an instruction set, or None for the best one here

    Takes about two seconds, and 512 MB.
    """
    int8, float32 = measure_compute(threads, isa)
    return Roof(target.require(isa), threads, int8, float32, *measure_memory(threads))
