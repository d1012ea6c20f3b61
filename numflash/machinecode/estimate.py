"""`numflash estimate`: what the INT8 kernels cost on an AArch64 CPU.

Instructions by the emulator, cycles by llvm-mca's model.

No hardware is measured. Instructions are exact. Cycles are llvm-mca's model of the straight line of
instructions that the emulator executed, in steady state: the ratios are worth reading, not the
figures (see `LIMITS`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ..cpu.int8 import microkernels, packing, portable
from ..cpu.isa.dot_loop import dot_loop
from ..cpu.isa.isas import VECTOR_ISAS, lanes_of
from ..cpu.isa.vectors import I32, I64, data, store
from ..errors import ArgumentError, UnsupportedError
from ..jit import target
from ..measure.console import Progress, Table
from ..tiling import KEY_BLOCK
from . import assembly, codegen
from .emulator import Emulated
from .estimate_floats import float_cycles

ROWS = 24  # query rows of the block: four tiles of 6
LENGTHS = {"a64fx": 512, "neoverse-v1": 256}  # bits of the CPU's own vectors; 128 elsewhere
LIMITS = (
    "a model, no hardware measured: caches never miss, every branch is foreseen and free, TLB, huge pages, threads and\n"
    "memory are left out, and width, latencies and pipes are LLVM's idea of the CPU; read the ratios"
)
Part = tuple[Emulated, tuple[Any, ...]]


def isa_of(cpu: str) -> str | None:
    """The instruction set of the register tiles on an AArch64 CPU.

    None where there is only the portable kernel.
    """
    allowed = [name for name, triple in codegen.TRIPLES.items() if triple == codegen.AARCH64]
    if cpu not in allowed:
        raise ArgumentError(f"cpu: got {cpu!r}; allowed: {', '.join(map(repr, allowed))}")
    found = codegen.code_generator(codegen.Target.named(cpu))
    return next(
        (isa for isa in ("sve", "neon_dot") if not target.missing(isa, codegen=found)), None
    )


def sums_tile(isa_name: str) -> Any:
    """Intrinsic f(q, q_stride, k, groups, out).

    a 6 x 4 tile of int32 sums and nothing else, as `scores` has before it scales.
    """
    isa = VECTOR_ISAS[isa_name]

    @intrinsic
    def tile(typingctx: Any, q: Any, q_stride: Any, k: Any, groups: Any, out: Any) -> Any:
        def generate(context: Any, b: Any, sig: Any, a: Any) -> Any:
            target.guard(isa_name, context.codegen())
            pq, pk, po = (data(context, b, sig.args[i], a[i]) for i in (0, 2, 4))
            start = [isa.fill(b, isa.vector(I32), 0)] * 6 * isa.nv
            rows = dot_loop(
                b, isa, isa.score_dot, pq, I64(0), a[1], pk, I64(0), a[3], start, 6, isa.nv
            )
            for n, x in enumerate(x for row in rows for x in row):
                store(b, x, po, isa.elements(b, n), 4)
            return context.get_dummy_value()

        return types.void(q, q_stride, k, groups, out), generate

    return tile


def tile_parts(isa: str, cpu: str, bits: int, d: int) -> dict[str, Part]:
    """Emulated functions of one key block and ROWS query rows, as the fused kernel calls its tiles,
    and their arguments.
    """
    score = microkernels.score_tile(isa, 6)
    value = microkernels.value_tile(isa, 6, VECTOR_ISAS[isa].nv)
    octaves = microkernels.block_octaves(isa, KEY_BLOCK)
    weights = microkernels.row_weights(isa, KEY_BLOCK)
    totals = microkernels.block_totals(isa)
    vector_lanes = lanes_of(isa)
    sums_only = sums_tile(isa)
    nv = VECTOR_ISAS[isa].nv

    @njit(error_model="numpy")
    def scores(q, k, start, ck, cq, x):
        panel, width = nv * vector_lanes(), q.shape[1]
        for c in range(0, KEY_BLOCK, panel):
            for i in range(0, ROWS, 6):
                score(
                    q,
                    i * width,
                    width,
                    k,
                    c * width,
                    width // 4,
                    start,
                    ck,
                    c,
                    cq,
                    i,
                    x,
                    i * KEY_BLOCK + c,
                    KEY_BLOCK,
                )

    @njit(error_model="numpy")
    def softmax(x, octave, octave_q8, p, sums, total):
        lanes = vector_lanes()
        for i in range(0, ROWS, 8):
            octaves(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
        for i in range(ROWS):
            weights(x, i * KEY_BLOCK, octave_q8, i, p, i * KEY_BLOCK, sums, i * lanes)
        for i in range(0, ROWS, 8):
            totals(sums, total, i)

    @njit(error_model="numpy")
    def values(p, v, scale, total, o):
        panel, width = nv * vector_lanes(), o.shape[1]
        for t in range(0, width, panel):
            for i in range(0, ROWS, 6):
                value(
                    p,
                    i * KEY_BLOCK,
                    KEY_BLOCK,
                    v,
                    t * KEY_BLOCK,
                    KEY_BLOCK // 4,
                    scale,
                    total,
                    i,
                    o,
                    i * width + t,
                    width,
                )

    @njit(error_model="numpy")
    def only_sums(q, k, out):
        sums_only(q, q.shape[1], k, q.shape[1] // 4, out)

    def emulated(function: Any, signature: str, *arguments: Any) -> Part:
        return Emulated(function, f"void({signature})", cpu, vector_bits=bits), arguments

    rng = np.random.default_rng(0)
    lanes = bits // 32
    q, k, v = (
        rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (ROWS, KEY_BLOCK, KEY_BLOCK)
    )
    keys = packing.pack_keys(isa, k[None], np.ones((1, KEY_BLOCK), np.float32), lanes)
    floats = np.zeros(ROWS, np.float32)
    ints = np.zeros(ROWS, np.int32)
    x = rng.integers(-3000, 0, (ROWS, KEY_BLOCK)).astype(np.int16)
    p = np.zeros((ROWS, KEY_BLOCK), np.uint8)
    return {
        "scores": emulated(
            scores,
            "int8[:,::1], int8[::1], int32[::1], float32[::1], float32[::1], int16[:,::1]",
            q,
            keys.data[0],
            keys.start[0],
            keys.scale[0],
            floats,
            x.copy(),
        ),
        "softmax": emulated(
            softmax,
            "int16[:,::1], int32[::1], int16[::1], uint8[:,::1], int32[::1], int32[::1]",
            x,
            ints.copy(),
            np.zeros(ROWS, np.int16),
            p,
            np.zeros(ROWS * lanes, np.int32),
            ints.copy(),
        ),
        "values": emulated(
            values,
            "uint8[:,::1], int8[::1], float32[::1], int32[::1], float32[:,::1]",
            p,
            packing.pack_values(isa, v[None], lanes)[0],
            floats,
            ints,
            np.zeros((ROWS, d), np.float32),
        ),
        "sums": emulated(
            only_sums,
            "int8[:,::1], int8[::1], int32[::1]",
            q,
            keys.data[0],
            np.zeros(6 * nv * lanes, np.int32),
        ),
    }


def portable_parts(cpu: str, bits: int, d: int) -> dict[str, Part]:
    """The same of the portable kernel; its softmax takes one row."""

    def emulated(name: str, function: Any, *arguments: Any) -> Part:
        return Emulated(
            function, codegen.KERNELS[f"portable-{name}"].signature, cpu, vector_bits=bits
        ), arguments

    rng = np.random.default_rng(0)
    q, k = (rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (ROWS, KEY_BLOCK))
    floats = np.zeros(KEY_BLOCK, np.float32)
    weights = np.zeros((ROWS, KEY_BLOCK), np.int8)
    v = np.zeros((d, KEY_BLOCK), np.int8)
    return {
        "scores": emulated(
            "scores",
            portable.score_block,
            q,
            k,
            floats,
            floats,
            np.zeros((ROWS, KEY_BLOCK), np.float32),
        ),
        "softmax": emulated(
            "softmax",
            portable.softmax_row,
            rng.integers(-3000, 0, KEY_BLOCK).astype(np.int16),
            0,
            weights[0].copy(),
        ),
        "values": emulated(
            "values", portable.value_block, weights, v, floats, np.zeros((ROWS, d), np.float32)
        ),
    }


def counts(name: str, parts: dict[str, Part], d: int) -> dict[str, float]:
    """Instructions per 64 multiply-adds, of the softmax per 16 scores."""
    found = {}
    for part, rows in (
        ("scores", ROWS),
        ("softmax", 1 if name == "portable" else ROWS),
        ("values", ROWS),
    ):
        emulated, arguments = parts[part]
        emulated(*arguments, count=True)
        found[part] = emulated.instructions / (
            rows * KEY_BLOCK * (1 / 16 if part == "softmax" else d / 64)
        )
    return found


class Model:
    """llvm-mca for one CPU: the newest on PATH."""

    def __init__(self, cpu: str) -> None:
        names = [f"llvm-mca-{release}" for release in range(40, 10, -1)]
        self.tool = next(filter(None, map(shutil.which, [*names, "llvm-mca"])), "")
        if not self.tool:
            raise UnsupportedError(
                "estimate: llvm-mca is not on PATH; allowed: a machine with LLVM's tools (Debian: apt-get "
                "install llvm), or --instructions for the emulator's exact counts alone"
            )
        self.cpu = cpu
        self.version = re.search(r"version (\S+)", self._run("--version"))[1]  # type: ignore[index]

    def _run(self, *options: str, text: str = "") -> str:
        done = subprocess.run([self.tool, *options], input=text, capture_output=True, text=True)
        if done.returncode or "not a recognized processor" in done.stderr:  # which it only warns of
            raise UnsupportedError(
                f"estimate: {self.tool} cannot model {self.cpu}, a newer LLVM may: "
                f"{done.stderr.strip().splitlines()[0]}"
            )
        return done.stdout

    def cycles(self, instructions: Sequence[str]) -> float:
        """Of a straight line of instructions in steady state; branches are left out."""
        text = (
            "\n".join(
                line
                for line in instructions
                if not re.match(r"(b|b\.\w+|cbn?z|tbn?z|ret|bl)\b", line)
            )
            + "\n"
        )
        said = [
            self._run("-mtriple=aarch64", f"-mcpu={self.cpu}", f"-iterations={n}", text=text)
            for n in (2, 4)
        ]
        two, four = (int(re.search(r"Total Cycles:\s+(\d+)", x)[1]) for x in said)  # type: ignore[index]
        return (four - two) / 2

    def limit(self, isa: str, bits: int) -> float:
        """Cycles per 64 multiply-adds of dot products that wait for nothing."""
        lanes = ("z", "s", "b") if isa == "sve" else ("v", "4s", "16b")
        line = "sdot {0}{{}}.{1}, {0}30.{2}, {0}31.{2}".format(*lanes)
        return self.cycles([line.format(n) for n in range(24)] * 10) / 240 * 512 / bits


def dot_products(instructions: Sequence[str]) -> int:
    return sum(line.startswith(("sdot ", "sdot\t")) for line in instructions)


def cycles(
    model: Model, isa: str, bits: int, head_dims: Sequence[int] = (64, 128)
) -> list[tuple[str, float, str]]:
    """(what, figure, unit) of the register tiles, by the model."""
    per_mac = "cycles per 64 multiply-adds"
    share = "%"
    best = model.limit(isa, bits)
    found = []
    found.append(("SDOT that wait for nothing", best, per_mac))
    code = tile_parts(isa, model.cpu, bits, 128)["scores"][0].code.assembly
    body = max(
        (loop.instructions for loop in assembly.loops(code)), key=lambda x: dot_products(x) / len(x)
    )
    found.append(
        (
            "loop of the 6 x 4 tile",
            model.cycles(list(body) * 20) / 20 / dot_products(body) * 512 / bits,
            per_mac,
        )
    )
    for d in head_dims:
        taken = {
            part: model.cycles(emulated.trace(*arguments))
            for part, (emulated, arguments) in tile_parts(isa, model.cpu, bits, d).items()
        }
        work = ROWS * KEY_BLOCK * d / 64
        tile = 6 * VECTOR_ISAS[isa].nv * bits / 32 * d / 64
        products = taken["scores"] + taken["values"]
        whole = products + taken["softmax"]
        found += [
            (f"6 x 4 tile to int32 sums in memory, D = {d}", taken["sums"] / tile, per_mac),
            (
                f"score tiles with scaling, rounding, saturation, D = {d}",
                taken["scores"] / work,
                per_mac,
            ),
            (
                f"value tiles with their merge into float32, D = {d}",
                taken["values"] / work,
                per_mac,
            ),
            (f"both products, D = {d}", products / work / 2, per_mac),
            (
                f"softmax, D = {d}",
                taken["softmax"] / (ROWS * KEY_BLOCK / 16),
                "cycles per 16 scores",
            ),
            (
                f"of the block's cycles not SDOT, D = {d}",
                100 * (1 - 2 * work * best / whole),
                share,
            ),
        ]
    return found


def run(cpu: str, instructions_only: bool = False, head_dim: int = 128) -> dict[str, Any]:
    """Print the tables and return them as data.

    Raises
    ------
    ArgumentError
        If `cpu` is not an AArch64 CPU of `numflash.machinecode.codegen.TRIPLES`.
    UnsupportedError
        Without llvm-mca (unless `instructions_only`).
    """
    isa = isa_of(cpu)
    model = (
        None if instructions_only or isa is None else Model(cpu)
    )  # no register tile, no loop to model
    lengths = (128, 256, 512) if isa == "sve" else (128,)
    with Progress("estimate", len(lengths) + (model is not None)) as progress:
        table = Table(
            f"{cpu}: instructions per 64 multiply-adds (softmax: per 16 scores), {ROWS} rows x {KEY_BLOCK} keys, "
            f"D = {head_dim}, executed by the emulator",
            ("kernel", "vector bits", "scores", "softmax", "values"),
        )
        for bits in lengths:
            progress.step(f"counting at {bits} bits")
            for name in filter(None, (isa, "portable")):
                parts = (
                    portable_parts(cpu, bits, head_dim)
                    if name == "portable"
                    else tile_parts(name, cpu, bits, head_dim)
                )
                found = counts(name, parts, head_dim)
                table.add(
                    name,
                    str(bits),
                    *(f"{n:.2f}" for n in found.values()),
                    kernel=name,
                    bits=bits,
                    **found,
                )
        table.show()
        result: dict[str, Any] = {"cpu": cpu, "isa": isa, "instructions": table.records}
        if model and isa:
            progress.step(f"cycles by {model.tool}")
            bits = LENGTHS.get(cpu, 128)
            table = Table(
                f"{cpu}: cycles at {bits} bits by llvm-mca {model.version}",
                ("what", "figure", "unit"),
                note=LIMITS,
            )
            for what, figure, unit in [*cycles(model, isa, bits), *float_cycles(model, bits)]:
                table.add(
                    what,
                    f"{figure:.3g}" if unit != "%" else f"{figure:.0f}",
                    unit,
                    what=what,
                    figure=figure,
                    unit=unit,
                )
            table.show()
            result |= {"llvm_mca": model.version, "cycles": table.records, "limits": LIMITS}
    return result
