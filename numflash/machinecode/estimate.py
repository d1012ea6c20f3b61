"""`numflash estimate`: what the INT8 kernels cost on an AArch64 CPU.

Instructions by the emulator, cycles by llvm-mca's model.

No hardware is measured. Instructions are exact. Cycles are llvm-mca's model of the straight line of
instructions that the emulator executed, in steady state: the ratios are worth reading, not the
figures (see `LIMITS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from ..cpu.int8 import microkernels, packing, portable, softmax_vectors
from ..cpu.isa.dot_loop import Panel, dot_loop
from ..cpu.isa.isas import VECTOR_ISAS, lanes_of
from ..cpu.isa.operands import Packed, Rows, Scales
from ..cpu.isa.vectors import I32, I64, data, store
from ..jit import target
from ..measure.console import Progress, Table
from ..measure.contenders import check_request
from ..tiling import KEY_BLOCK
from . import assembly, codegen
from .emulator import Emulated
from .estimate_floats import float_cycles
from .model import LIMITS, Model, bits_of, isa_of

ROWS = 24  # query rows of the block: four tiles of 6
Part = tuple[Emulated, tuple[Any, ...]]


def sums_tile(isa_name: str, mr: int = 6, nv: int = 0) -> Any:
    """Intrinsic f(q, q_stride, k, groups, out).

    An mr x nv tile of int32 sums and nothing else, as `scores` has before it scales; nv of the
    instruction set unless given.
    """
    isa = VECTOR_ISAS[isa_name]
    nv = nv or isa.nv

    @intrinsic
    def tile(typingctx: Any, q: Any, q_stride: Any, k: Any, groups: Any, out: Any) -> Any:
        def generate(context: Any, b: Any, sig: Any, a: Any) -> Any:
            target.guard(isa_name, context.codegen())
            pq, pk, po = (data(context, b, sig.args[i], a[i]) for i in (0, 2, 4))
            start = [isa.fill(b, isa.vector(I32), 0)] * mr * nv
            rows = dot_loop(
                b, isa, isa.score_dot, Rows(pq, I64(0), a[1]), Panel(pk, I64(0)), a[3], start, nv
            )
            for n, x in enumerate(x for row in rows for x in row):
                store(b, x, po, isa.elements(b, n), 4)
            return context.get_dummy_value()

        return types.void(q, q_stride, k, groups, out), generate

    return tile


def _scores(isa: str) -> Any:
    """Score tiles of one key block and ROWS query rows, as the fused kernel calls them."""
    score, lanes_here, nv = microkernels.score_tile(isa, 6), lanes_of(isa), VECTOR_ISAS[isa].nv

    @njit(error_model="numpy")
    def scores(q, k, start, ck, cq, x):
        panel, width = nv * lanes_here(), q.shape[1]
        for c in range(0, KEY_BLOCK, panel):
            for i in range(0, ROWS, 6):
                row, to = Rows(q, i * width, width), Rows(x, i * KEY_BLOCK + c, KEY_BLOCK)
                score(row, Packed(k, c * width), width // 4, Scales(start, ck, c, cq, i), to)

    return scores


def _softmax(isa: str) -> Any:
    """Octaves, weights and sums of the same."""
    octaves = softmax_vectors.block_tops(isa, KEY_BLOCK)
    weights = softmax_vectors.row_weights(isa, KEY_BLOCK)
    totals, lanes_here = softmax_vectors.block_totals(isa), lanes_of(isa)

    @njit(error_model="numpy")
    def softmax(x, octave, octave_q8, p, sums, total):
        lanes = lanes_here()
        for i in range(0, ROWS, 8):
            octaves(x, i * KEY_BLOCK, KEY_BLOCK, octave, octave_q8, i)
        for i in range(ROWS):
            weights(x, i * KEY_BLOCK, octave_q8, i, p, i * KEY_BLOCK, sums, i * lanes)
        for i in range(0, ROWS, 8):
            totals(sums, total, i)

    return softmax


def _values(isa: str) -> Any:
    """Value tiles of the same."""
    nv = VECTOR_ISAS[isa].nv
    value, lanes_here = microkernels.value_tile(isa, 6, nv), lanes_of(isa)

    @njit(error_model="numpy")
    def values(p, v, scale, total, o):
        panel, width = nv * lanes_here(), o.shape[1]
        steps = KEY_BLOCK // 4
        for t in range(0, width, panel):
            for i in range(0, ROWS, 6):
                row, to = Rows(p, i * KEY_BLOCK, KEY_BLOCK), Rows(o, i * width + t, width)
                value(row, Packed(v, t * KEY_BLOCK), steps, scale, total, i, to)

    return values


def _only_sums(isa: str) -> Any:
    """One tile of int32 sums."""
    sums_only = sums_tile(isa)

    @njit(error_model="numpy")
    def only_sums(q, k, out):
        sums_only(q, q.shape[1], k, q.shape[1] // 4, out)

    return only_sums


# the arguments of these, in their order
SCORES = "int8[:,::1], int8[::1], int32[::1], float32[::1], float32[::1], int16[:,::1]"
SOFTMAX = "int16[:,::1], int32[::1], int16[::1], uint8[:,::1], int32[::1], int32[::1]"
VALUES = "uint8[:,::1], int8[::1], float32[::1], int32[::1], float32[:,::1]"
SUMS = "int8[:,::1], int8[::1], int32[::1]"


def tile_parts(isa: str, cpu: str, bits: int, d: int) -> dict[str, Part]:
    """Emulated functions of one key block and ROWS query rows, as the fused kernel calls its tiles,
    and their arguments.
    """

    def emulated(function: Any, signature: str, *arguments: Any) -> Part:
        return Emulated(function, f"void({signature})", cpu, vector_bits=bits), arguments

    rng = np.random.default_rng(0)
    lanes = bits // 32
    q, k, v = (
        rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (ROWS, KEY_BLOCK, KEY_BLOCK)
    )
    q, k = (np.pad(x, ((0, 0), (0, -d % VECTOR_ISAS[isa].step))) for x in (q, k))  # as kernels do
    keys = packing.pack_keys(isa, k[None], np.ones((1, KEY_BLOCK), np.float32), lanes)
    packed_k, start, scale = keys.data[0], keys.start[0], keys.scale[0]
    packed_v = packing.pack_values(isa, v[None], lanes)[0]
    ints, floats = (np.zeros(ROWS, dtype) for dtype in (np.int32, np.float32))
    x = rng.integers(-3000, 0, (ROWS, KEY_BLOCK)).astype(np.int16)
    p, out = np.zeros((ROWS, KEY_BLOCK), np.uint8), np.zeros((ROWS, d), np.float32)
    lane_sums, octave_q8 = np.zeros(ROWS * lanes, np.int32), np.zeros(ROWS, np.int16)
    sums = np.zeros(6 * VECTOR_ISAS[isa].nv * lanes, np.int32)
    return {
        "scores": emulated(_scores(isa), SCORES, q, packed_k, start, scale, floats, x.copy()),
        "softmax": emulated(
            _softmax(isa), SOFTMAX, x, ints.copy(), octave_q8, p, lane_sums, ints.copy()
        ),
        "values": emulated(_values(isa), VALUES, p, packed_v, floats, ints, out),
        "sums": emulated(_only_sums(isa), SUMS, q, packed_k, sums),
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


def limit(model: Model, isa: str, bits: int) -> float:
    """Cycles per 64 multiply-adds of dot products that wait for nothing."""
    lanes = ("z", "s", "b") if isa == "sve" else ("v", "4s", "16b")
    line = "sdot {0}{{}}.{1}, {0}30.{2}, {0}31.{2}".format(*lanes)
    return model.cycles([line.format(n) for n in range(24)] * 10) / 240 * 512 / bits


def dot_products(instructions: Sequence[str]) -> int:
    return sum(line.startswith(("sdot ", "sdot\t")) for line in instructions)


def cycles(
    model: Model, isa: str, bits: int, head_dims: Sequence[int] = (64, 128)
) -> list[tuple[str, float, str]]:
    """(what, figure, unit) of the register tiles, by the model."""
    per_mac = "cycles per 64 multiply-adds"
    share = "%"
    best = limit(model, isa, bits)
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
    check_request(head_dim)
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
            bits = bits_of(cpu)
            table = Table(
                f"{cpu}: cycles at {bits} bits by llvm-mca {model.shown}",
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
