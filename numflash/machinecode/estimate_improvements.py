"""`numflash estimate improvements`: the A64FX summary's eight proposals on an AArch64 CPU.

The switched kernel of `study.fused` is compiled for the CPU as it is, one thread, run by the
emulator on 24 queries, held against float64, and modelled: the cycles of one more block of 128 keys.
16-bit P.V is a tile of `study.half_tiles`. What is no matter of instructions (threads, grouped
heads, LayerNorm's passes over memory, skipped blocks) follows from counts of blocks and bytes and
the rates of `machines`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numba
import numpy as np

from ..cpu.floats import float_tiles
from ..cpu.int8.packing import PackedKeys, pack_keys, pack_values
from ..cpu.study import fused, half_tiles
from ..cpu.study.improvements import PREDICTED
from ..errors import UnsupportedError
from ..measure.console import Progress, Table
from ..tiling import KEY_BLOCK, tiling
from . import machines
from .emulator import Emulated
from .model import LIMITS, Model, bits_of, isa_of

D, LENGTH, GROUP = 128, 4096, 4  # head dimension; keys and query heads to a KV head of the table
SCORE = np.float32(256 * np.log2(np.e) / (32 * 32 * D**0.5))  # int8 scores to Q8.8
CHAINS = (8, 16, 32, KEY_BLOCK)  # products that an FP16 sum takes before it is added to a float32
SHARP = 4  # times the numbers of Q and K: rows in which one key has nearly all the weight
VARIANTS = {
    "the summary's": ("plain", "fp32", False),
    "vector exp2": ("vectors", "fp32", False),
    "prefetching": ("vectors", "fp32", True),
    "INT8 P.V": ("vectors", "int8", False),
}


class Gain(NamedTuple):
    """Modelled gain of one proposal, from and to (they differ where hiding of transfers decides)."""

    name: str
    low: float
    high: float
    why: str


def _operands(
    isa: str, rows: int, keys: int, lanes: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, PackedKeys]:
    rng = np.random.default_rng(0)
    q, k, v = (
        np.clip(np.rint(rng.normal(0, 32, (n, D))), -127, 127).astype(np.int8)
        for n in (rows, keys, keys)
    )
    return q, k, v, pack_keys(isa, k[None], np.ones((1, keys), np.float32), lanes)


def block_cycles(model: Model, isa: str, exp2: str, pv: str, ahead: bool) -> tuple[float, int]:
    """Cycles and executed instructions of one more key block of the whole fused kernel.

    Raises
    ------
    ArithmeticError
        Its result is off by more than 5 %.
    """
    lanes = bits_of(model.cpu) // 32
    rows = tiling(isa).block_q
    attend = numba.njit(error_model="numpy")(fused.make_fused(isa, exp2, pv).py_func)
    run, taken = None, []
    for keys in (KEY_BLOCK, 2 * KEY_BLOCK):
        q, k, v, packed = _operands(isa, rows, keys, lanes)
        values: np.ndarray = v[None].astype(np.float32).reshape(1, -1)
        if pv == "int8":
            values = pack_values(isa, v[None], lanes)
        out = np.zeros((1, rows, D), np.float32)
        arguments = (
            *(q[None], np.full((1, rows), SCORE), packed, values, D, 1, False, ahead, keys, 1),
            *(np.zeros(1, np.int64), out, np.zeros((1, rows), np.int32)),
            np.zeros((1, rows), np.float32),
        )
        kinds = tuple(map(numba.typeof, arguments))
        run = run or Emulated(attend, kinds, model.cpu, vector_bits=bits_of(model.cpu))
        lines = run.trace(*arguments)
        scores = q.astype(np.float64) @ k.T.astype(np.float64) * SCORE / 256
        weights = np.exp2(scores - scores.max(1, keepdims=True))
        exact = weights / weights.sum(1, keepdims=True) @ v.astype(np.float64)
        if not np.abs(out[0] - exact).sum() <= 0.05 * np.abs(exact).sum():
            raise ArithmeticError(f"improvements: {exp2} exp2, {pv} P.V is off by more than 5 %")
        taken.append((model.cycles(lines), len(lines)))
    (one, short), (two, long) = taken
    return two - one, long - short


def value_tiles(model: Model, rows: int) -> tuple[float, float, float]:
    """Cycles of P.V of a block in FP16 and in float32, and FP16's relative L1 error.

    FP16's have a cycle for every vector of weights on top, which a conversion and a narrowing of
    two take.

    Raises
    ------
    ArithmeticError
        The FP16 tile's result is not that of `half_tiles.relative_error`.
    """
    bits = bits_of(model.cpu)
    lanes = bits // 32
    half, wide = half_tiles.make_value_tile(), float_tiles.value_tile("sve", half_tiles.VECTORS)

    def loop(tile: Any, columns: int) -> Any:
        @numba.njit(error_model="numpy")
        def values(p: Any, v: Any, o: Any) -> None:
            for t in range(0, D, columns):
                for i in range(0, rows, half_tiles.ROWS):
                    at, to = i * KEY_BLOCK, i * D + t
                    tile(p, at, KEY_BLOCK, v, t, D, KEY_BLOCK, o, to, D)

        return values

    rng = np.random.default_rng(0)
    p = rng.random((rows, KEY_BLOCK), np.float32)
    v = rng.standard_normal((KEY_BLOCK, D), np.float32)
    exact = p.astype(np.float64) @ v.astype(np.float64)
    found = []
    for kind, tile, columns, operands in (
        (
            "uint16",
            half,
            8 * lanes,
            (p.astype(np.float16).view(np.uint16), half_tiles.pack(v, lanes)),
        ),
        ("float32", wide, 4 * lanes, (p, v)),
    ):
        signature = f"void({kind}[:,::1], {kind}[:,::1], float32[:,::1])"
        run = Emulated(loop(tile, columns), signature, model.cpu, vector_bits=bits)
        o = np.zeros((rows, D), np.float32)
        lines = run.trace(*operands, o)
        error = float(np.abs(o - exact).sum() / np.abs(exact).sum())
        if not error <= (2 * half_tiles.relative_error(p, v) if kind == "uint16" else 1e-5):
            raise ArithmeticError(f"improvements: the P.V tile in {kind} is off by {error:.2g}")
        found.append((model.cycles(lines), error))
    (narrow, error), (cycles, _) = found
    return narrow + rows * KEY_BLOCK / lanes, cycles, error


def chain_cycles(model: Model, rows: int, chain: int) -> float:
    """Cycles per 64 multiply-adds of FP16 tiles whose sums go to float32 after `chain` products.

    P.V's tile; Q.K^T's would have the same instructions, Q in place of P.
    """
    bits = bits_of(model.cpu)
    tile, columns = half_tiles.make_value_tile(), 8 * (bits // 32)

    @numba.njit(error_model="numpy")
    def values(p: Any, v: Any, o: Any) -> None:
        for t in range(0, D, columns):
            for i in range(0, rows, half_tiles.ROWS):
                for n in range(0, KEY_BLOCK, chain):
                    at, to = i * KEY_BLOCK + n, i * D + t
                    tile(p, at, KEY_BLOCK, v, n * D + t, D, chain, o, to, D)

    halves = "uint16[:,::1]"
    run = Emulated(values, f"void({halves}, {halves}, float32[:,::1])", model.cpu, vector_bits=bits)
    p, v = np.zeros((rows, KEY_BLOCK), np.uint16), np.zeros((KEY_BLOCK, D), np.uint16)
    cycles = model.cycles(run.trace(p, v, np.zeros((rows, D), np.float32)))
    return 64 * cycles / (rows * KEY_BLOCK * D)


def half_table(model: Model, rows: int, wide: float) -> Table:
    """What FP16 sums of several lengths gain, and cost in errors."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((n, D), np.float32) for n in (rows, 1024, 1024))
    p = rng.random((rows, 1024), np.float32)
    table = Table(
        f"{model.cpu}: products in FP16, D = {D}; in float32 {wide:.2f} cycles per 64 multiply-adds",
        (
            "sums of",
            "cycles",
            "P.V off by",
            "Q.K^T, attention off by",
            "of sharp rows",
            "worst row",
        ),
        note=f'relative L1, random numbers, 1024 keys; sharp: Q and K times {SHARP}. precision="float16" may be off by 2e-3',
    )
    for chain in CHAINS:
        cycles, values = chain_cycles(model, rows, chain), half_tiles.relative_error(p, v, chain)
        scores = half_tiles.score_error(q, k, v, chain)[0]
        sharp = half_tiles.score_error(SHARP * q, SHARP * k, v, chain)
        table.add(
            str(chain),
            f"{cycles:.2f}",
            *(f"{x:.1e}" for x in (values, scores, *sharp)),
            chain=chain,
            cycles=cycles,
            values=values,
            scores=scores,
            sharp=sharp,
        )
    return table


def causal_gain(length: int, rows: int) -> float:
    """Key blocks of all tiles of `rows` queries over those that a causal mask leaves."""
    ends = [min(first + rows, length) for first in range(0, length, rows)]
    return len(ends) * -(-length // KEY_BLOCK) / sum(-(-end // KEY_BLOCK) for end in ends)


def gains(cpu: str, cycles: dict[str, float], half: float, values: float) -> list[Gain]:
    """The table's rows, from the cycles of a block by variant and of both P.V tiles."""
    machine, isa = machines.MACHINES[cpu], isa_of(cpu) or "sve"
    rows = tiling(isa).block_q
    base, alone, whole = (cycles[x] for x in ("the summary's", "vector exp2", "INT8 P.V"))
    wide, narrow = 5.0 * D * KEY_BLOCK, 2.0 * D * KEY_BLOCK  # K and V of a block
    big = 2 * machine.levels[-1].size
    near, shared = (
        machines.transfer(machine, held, wide, n)
        for held, n in ((machine.levels[0].size + 1, 1), (big, machine.cores))
    )
    skipped = causal_gain(LENGTH, rows)
    width = GROUP * D  # of a token, float32, through LayerNorm and the quantiser
    attention = (LENGTH / KEY_BLOCK) * GROUP / rows * whole  # cycles for a token
    per_byte = machines.transfer(machine, big, 1.0)
    apart, at_once = (attention + n * width * per_byte for n in (13, 5))
    norm = apart / at_once
    small = machines.transfer(machine, big, narrow, machine.cores)
    threads = (machine.cores * alone / max(alone, shared), float(machine.cores))
    everything = (base + near) / whole * skipped * machine.cores
    return [
        Gain(
            "vector code for exp2",
            *(base / alone,) * 2,
            f"{base:.0f} to {alone:.0f} cycles a block",
        ),
        Gain(
            "prefetching",
            alone / cycles["prefetching"],
            (alone + near) / max(cycles["prefetching"], near),
            f"costs {cycles['prefetching'] - alone:.0f} cycles a block, saves at most the {near:.0f} of the L2",
        ),
        Gain(
            "threads",
            *threads,
            f"1 to {machine.cores} cores of a group; all blocks from memory would take {shared:.0f} cycles of {alone:.0f}",
        ),
        Gain(
            "GQA",
            1.0,
            (alone + shared) / (alone + near),
            f"prefill, {GROUP} query heads: the same operations, K and V from L2 for memory; decode reads 1/{GROUP}",
        ),
        Gain(
            "16-bit P.V",
            *(alone / (alone - values + half),) * 2,
            f"FP16 FMLA: {values:.0f} to {half:.0f} cycles of the values",
        ),
        Gain(
            "fused LayerNorm",
            1.0,
            norm,
            f"13 to 5 bytes an element, L = {LENGTH}, {width} wide, against {attention:.0f} cycles of attention a token",
        ),
        Gain("causal skipping", skipped, skipped, f"blocks of {rows} x {KEY_BLOCK}, L = {LENGTH}"),
        Gain("INT8 P.V", *(alone / whole,) * 2, f"{alone:.0f} to {whole:.0f} cycles a block"),
        Gain(
            "all together",
            everything * whole / max(whole, small),
            everything,
            f"vector exp2, INT8 P.V, causal, {machine.cores} cores",
        ),
    ]


def run(cpu: str) -> dict[str, Any]:
    """Print the table and return it as data.

    Raises
    ------
    ArgumentError, UnsupportedError
        For a CPU without a model or SVE; without llvm-mca.
    """
    model = Model(machines.known(cpu))
    isa = isa_of(cpu)
    if isa != "sve":
        raise UnsupportedError(f"estimate: {cpu} has no SVE tiles; allowed: a CPU with SVE")
    cycles, instructions = {}, {}
    with Progress("estimate improvements", len(VARIANTS) + 2) as progress:
        for name, switches in VARIANTS.items():
            progress.step(name)
            cycles[name], instructions[name] = block_cycles(model, isa, *switches)
        progress.step("16-bit P.V")
        rows = tiling(isa).block_q
        half, values, error = value_tiles(model, rows)
        progress.step("FP16 sums")
        halves = half_table(model, rows, 64 * values / (rows * KEY_BLOCK * D))
    found = gains(cpu, cycles, half, values)
    table = Table(
        f"{cpu}: the summary's eight improvements, D = {D}, modelled",
        ("improvement", "predicted", "modelled", "from"),
    )
    for gain in found:
        figures = dict.fromkeys(f"{x:.2f}" for x in (gain.low, gain.high))
        predicted = "-".join(f"{x:g}" for x in dict.fromkeys(PREDICTED[gain.name]))
        table.add(gain.name, predicted, " to ".join(figures), gain.why, **gain._asdict())
    table.note = (
        "a range: no transfer hidden in the base to all of them. Sums of 128 weights in FP16 alone are off by "
        f"{error:.1e} (relative L1)"
    )
    table.show()
    halves.show()
    print(f"cycles by llvm-mca {model.shown}; {LIMITS}")
    return {
        "cpu": cpu,
        "llvm_mca": model.version,
        "cycles": cycles,
        "instructions": instructions,
        "gains": table.records,
        "halves": halves.records,
        "limits": LIMITS,
    }
