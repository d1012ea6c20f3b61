"""`numflash estimate unfused`: the unfused INT8 pipeline (docs/sources.md) on an AArch64 CPU.

The parts of `study.unfused` (product by 6 x 4 tiles, with buffers, maxima or prefetches; the passes
of softmax in 32-bit lanes) are compiled, run by the emulator, held against NumPy, and modelled; then
the pipelines over L beside the status note's figures, with what S costs behind L1.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from ..cpu.int8.packing import pack_keys
from ..cpu.isa.isas import VECTOR_ISAS
from ..cpu.study import unfused, unfused_times
from ..errors import UnsupportedError
from ..measure.console import Progress, Table
from . import assembly, estimate, machines
from .emulator import Emulated
from .model import LIMITS, Model, bits_of, isa_of, lanes_a_cycle

ROWS, KEYS, D = 12, 256, 128  # of the emulated call: two register tiles, two key tiles
LENGTHS = (1024, 4096, 8192)
SHAPES = ((4, 4), (5, 4), (6, 4), (7, 3), (8, 3), (9, 2), (12, 2), (12, 8))
REGISTERS = 32
STORE_RATE = 32  # bytes a cycle that an A64FX core writes to its L2; assumed elsewhere
INT8, INT32, FLOAT, LONG = "int8[:,::1]", "int32[:,::1]", "float32[:,::1]", "int64[::1]"
PRODUCTS: dict[str, dict[str, Any]] = {
    "straight to S": {},
    "by one buffer": {"buffers": 1},
    "by two buffers": {"buffers": 2},
    "with the row maxima": {"maxima": True},
    "with PLDL2STRM of the next keys": {"ahead": True},
}


class Part(NamedTuple):
    """Modelled cycles of a part: per 64 multiply-adds of the product, per 16 scores of softmax."""

    name: str
    cycles: float
    unit: str


def _products(model: Model, isa: str) -> list[Part]:
    """Q.K^T of ROWS x KEYS scores, each way that `unfused.make_gemm` has."""
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-127, 128, (n, D)).astype(np.int8) for n in (ROWS, KEYS))
    lanes = bits_of(model.cpu) // 32
    keys = pack_keys(isa, k[None], np.ones((1, KEYS), np.float32), lanes)
    found = []
    for name, options in PRODUCTS.items():
        run = Emulated(
            unfused.make_gemm(isa, **options),
            f"void({INT8}, int8[::1], int32[::1], {INT32}, int32[::1])",
            model.cpu,
            vector_bits=bits_of(model.cpu),
        )
        s, top = np.zeros((ROWS, KEYS), np.int32), np.full(ROWS, unfused.UNSEEN, np.int32)
        lines = run.trace(q, keys.data[0], keys.start[0], s, top)
        exact = q.astype(np.int32) @ k.T.astype(np.int32)
        if not np.array_equal(s, exact) or (options.get("maxima") and (top != exact.max(1)).any()):
            raise ArithmeticError(f"unfused: the product {name} is wrong")
        work = ROWS * KEYS * D / 64
        found.append(Part(name, model.cycles(lines) / work, "64 multiply-adds"))
    return found


def softmax_passes(cpu: str) -> dict[str, tuple[Emulated, tuple[Any, ...]]]:
    """The three passes over S, 8 rows of 512 scores, and their arguments."""
    rng = np.random.default_rng(0)
    s = np.rint(rng.normal(0, 4096, (8, 512))).astype(np.int32)
    top, e, l = s.max(1), np.zeros_like(s), np.zeros(8, np.int64)
    scale = np.float32(256 * np.log2(np.e) / 4096)

    def emulated(function: Any, signature: str) -> Emulated:
        return Emulated(function, f"void({signature})", cpu, vector_bits=bits_of(cpu))

    return {
        "maximum": (
            emulated(unfused.maxima, f"{INT32}, int64, int32[::1]"),
            (s, 512, np.zeros(8, np.int32)),
        ),
        "exponential and sum": (
            emulated(
                unfused.make_exponentials("quadratic"),
                f"{INT32}, int64, float32, int32[::1], {INT32}, {LONG}",
            ),
            (s, 512, scale, top, e, l),
        ),
        "normalise": (
            emulated(unfused.normalise, f"{INT32}, int64, {LONG}, {FLOAT}"),
            (s, 512, l + 1, np.zeros(s.shape, np.float32)),
        ),
    }


def _softmax(model: Model) -> list[Part]:
    found = []
    for name, (run, arguments) in softmax_passes(model.cpu).items():
        cycles = model.cycles(run.trace(*arguments)) / (8 * 512 / 16)
        found.append(Part(name, cycles, "16 scores"))
    return found


def _tile(isa: str, cpu: str, mr: int, nv: int) -> Emulated:
    """A call of one register tile of sums."""
    tile = estimate.sums_tile(isa, mr, nv)

    @njit(error_model="numpy")
    def sums(q: Any, k: Any, out: Any) -> None:
        tile(q, q.shape[1], k, q.shape[1] // 4, out)

    signature = f"void({INT8}, int8[::1], int32[::1])"
    return Emulated(sums, signature, cpu, vector_bits=bits_of(cpu))


def tile_shapes(model: Model, isa: str) -> Table:
    """Register tiles by rows and vectors, 12 x 8 with what it spills."""
    lanes = bits_of(model.cpu) // 32
    table = Table(
        f"{model.cpu}: register tiles of int32 sums, D = {D}",
        ("rows x vectors", "registers", "of", "spills in the loop", "cycles per 64 multiply-adds"),
    )
    for mr, nv in SHAPES:
        run = _tile(isa, model.cpu, mr, nv)
        arguments = (
            np.ones((mr, D), np.int8),
            np.ones(nv * lanes * D, np.int8),
            np.zeros(mr * nv * lanes, np.int32),
        )
        lines = run.trace(*arguments)
        if (arguments[2] != D).any():
            raise ArithmeticError(f"unfused: the {mr} x {nv} tile is wrong")
        cycles = model.cycles(lines) / (mr * nv * lanes * D / 64)
        spills = sum(map(assembly.is_spill, assembly.hot_loop(run.code.assembly).instructions))
        table.add(
            f"{mr} x {nv}",
            str(mr * nv + nv + 1),
            str(REGISTERS),
            str(spills),
            f"{cycles:.2f}",
            mr=mr,
            nv=nv,
            spills=spills,
            cycles=cycles,
        )
    table.note = (
        f"a tile needs rows * vectors sums, its vectors of K and a broadcast of Q; there are {REGISTERS} registers. The note's\n"
        "12 x 8 is 96 sums: on no CPU of 32 vector registers, so LLVM spills them and stores replace dot products. What 12 x 8\n"
        "is to save, loads, is no limit here: a 6 x 4 tile loads 10 times for 24 dot products, on pipes of their own"
    )
    return table


def pipelines(cpu: str, products: list[Part], softmax: list[Part]) -> Table:
    """The note's table over L, modelled: product, share of the peak, share of softmax."""
    machine, bits = machines.MACHINES[cpu], bits_of(cpu)
    peak = 8 * lanes_a_cycle(bits)  # operations of dot products
    passes = sum(part.cycles for part in softmax) / 16
    product = next(p.cycles for p in products if p.name == "straight to S") * D / 64
    table = Table(
        f"{cpu}: S, then softmax in three passes, D = {D}: a core alone, {machine.cores} cores in brackets",
        ("L", "GOP/s", "of the peak", "with S moved", "softmax", "strip of 48", "document"),
    )
    for length in LENGTHS:
        cells = []
        for active in (1, machine.cores):
            moved = machines.transfer(machine, 4.0 * active * length**2, 4.0, active)
            whole = product + max(4 / STORE_RATE, moved)
            scores = passes + 5 * moved  # S is read twice and E once, E and P are written
            near = machines.transfer(machine, 4.0 * 48 * length * active, 4.0, active)
            strip = product + passes + 4 * near + 4 / STORE_RATE + moved  # P alone goes out
            cells.append(
                {
                    "cores": active,
                    "operations_per_second": 2 * D * machine.clock / whole,
                    "share_of_peak": 2 * D / product / peak,
                    "share_with_memory": 2 * D / whole / peak,
                    "softmax_share": scores / (scores + whole),
                    "strip_speed_up": (whole + scores) / strip,
                }
            )
        one, all_ = cells
        said = unfused_times.NOTE[length]
        table.add(
            str(length),
            f"{one['operations_per_second'] / 1e9:.0f} ({all_['operations_per_second'] / 1e9:.0f})",
            f"{100 * one['share_of_peak']:.0f} %",
            f"{100 * one['share_with_memory']:.0f} % ({100 * all_['share_with_memory']:.0f} %)",
            f"{100 * one['softmax_share']:.0f} % ({100 * all_['softmax_share']:.0f} %)",
            f"{one['strip_speed_up']:.2f}x ({all_['strip_speed_up']:.2f}x)",
            f"{said[0]} %, softmax {said[1]} %",
            length=length,
            one=one,
            group=all_,
        )
    table.note = (
        "with S moved: its transfers behind L1 on top, nothing hidden; strip: all passes on 48 rows, whose S stays nearer.\n"
        f"softmax takes {passes:.2f} cycles a score, the note's 2.47 (810 M a second at 2 GHz)"
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
    isa = isa_of(cpu)
    if isa is None or isa not in VECTOR_ISAS:
        raise UnsupportedError(f"estimate: {cpu} has no register tiles; allowed: CPUs with SVE")
    with Progress("estimate unfused", 3) as progress:
        progress.step("products")
        products = _products(model, isa)
        progress.step("softmax")
        softmax = _softmax(model)
        progress.step("register tiles")
        shapes = tile_shapes(model, isa)
    parts = Table(f"{cpu}: parts of the unfused pipeline, D = {D}", ("part", "cycles", "per"))
    for part in (*products, *softmax):
        name = f"product {part.name}" if part in products else f"softmax: {part.name}"
        parts.add(name, f"{part.cycles:.3g}", part.unit, **part._asdict())
    tables = parts, shapes, pipelines(cpu, products, softmax)
    for table in tables:
        table.show()
    print(f"cycles by llvm-mca {model.shown}; {LIMITS}")
    names = ("parts", "tiles", "lengths")
    return {
        "cpu": cpu,
        "llvm_mca": model.version,
        **{name: table.records for name, table in zip(names, tables, strict=True)},
        "limits": LIMITS,
    }
