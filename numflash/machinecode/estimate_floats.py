# ruff: noqa: ANN001, ANN202 (arguments of compiled functions)
"""Modelled cycles of the float32 tiles on an AArch64 CPU.

Scalable vectors, and NEON beside them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

from ..cpu.floats import float_rows, float_tiles
from ..cpu.isa import fexpa
from ..errors import ArgumentError
from ..jit import target
from ..tiling import KEY_BLOCK
from . import codegen
from .emulator import Emulated
from .model import Model, bits_of

ROWS = 24  # query rows of the block, as in `estimate`
ARRAY = "float32[::1]"


def _isas(cpu: str, bits: int) -> list[str]:
    """The float instruction sets of a CPU whose vectors are `bits` long, best first."""
    found = codegen.code_generator(codegen.Target.named(cpu))
    names = [f"sve{bits}", "neon"]
    return [
        x
        for x in names
        if x in target.FLOAT_ISAS and not target.missing(x, target.FLOAT_ISAS, found)
    ]


def _parts(isa_name: str, cpu: str, bits: int, d: int) -> dict[str, tuple[Emulated, Any]]:
    """Score tiles and value tiles of a block, as the fused kernel calls them."""
    isa = float_tiles.FLOAT_ISAS[isa_name]
    score, value = (
        float_tiles.score_tile(isa_name, isa.nv),
        float_tiles.value_tile(isa_name, isa.nv),
    )
    width, mr = isa.panel, isa.rows
    keys = KEY_BLOCK // width * width  # whole tiles, of rows, keys and columns
    rows, columns = ROWS // mr * mr, d // width * width

    @njit(error_model="numpy")
    def scores(q, k, x):
        for c in range(0, keys, width):
            for i in range(0, rows, mr):
                score(q, i * d, d, k, c * d, d, x, i * KEY_BLOCK + c, KEY_BLOCK)

    @njit(error_model="numpy")
    def values(p, v, o):
        for t in range(0, columns, width):
            for i in range(0, rows, mr):
                value(p, i * KEY_BLOCK, KEY_BLOCK, v, t, d, KEY_BLOCK, o, i * d + t, d)

    q, k, x = (np.zeros(n, np.float32) for n in (ROWS * d, KEY_BLOCK * d, ROWS * KEY_BLOCK))
    signature = f"void({ARRAY}, {ARRAY}, {ARRAY})"
    made = {f: Emulated(f, signature, cpu, vector_bits=bits) for f in (scores, values)}
    return {"score": (made[scores], (q, k, x)), "value": (made[values], (x, k, q))}


def tile_cycles(isa_name: str, cpu: str, d: int) -> float:
    """Cycles per 64 multiply-adds of both products by a float register tile, as llvm-mca has them.

    Tiles that leave a rest of the block of 24 x 128 count by what they compute.
    """
    isa, bits = float_tiles.FLOAT_ISAS[isa_name], max(128, bits_of(cpu))
    model, width = Model(cpu), isa.panel
    if width > min(KEY_BLOCK, d):
        raise ArgumentError(f"head_dim: got {d}; allowed: {width} or more for {isa_name!r}")
    rows = ROWS // isa.rows * isa.rows
    work = {"score": rows * (KEY_BLOCK // width * width) * d, "value": rows * KEY_BLOCK * (d // width * width)}  # fmt: skip
    cycles = [
        64 * model.cycles(run.trace(*arguments)) / work[part]
        for part, (run, arguments) in _parts(isa_name, cpu, bits, d).items()
    ]
    return sum(cycles) / len(cycles)


def block_parts(cpu: str, bits: int, d: int) -> dict[str, tuple[Emulated, Any]]:
    """Scores, softmax and values of a block by the CPU's best float tiles.

    The softmax is a maximum, an exp2 and a sum of each row, as the fused kernel has them.
    """
    isa = _isas(cpu, bits)[0]
    largest, weights = float_rows.row_max(isa), float_rows.row_weights(isa)
    lanes = float_tiles.FLOAT_ISAS[isa].lanes
    vectors = KEY_BLOCK // lanes

    @njit(error_model="numpy")
    def softmax(x, p, l):
        for i in range(ROWS):
            at, factor = i * KEY_BLOCK, np.float32(0.1)
            m = largest(x, at, vectors) * factor
            weights(x, at, vectors, factor, m, p, at, l, i * lanes)

    x, p, l = (np.zeros(n, np.float32) for n in (ROWS * KEY_BLOCK, ROWS * KEY_BLOCK, ROWS * lanes))
    run = Emulated(softmax, f"void({ARRAY}, {ARRAY}, {ARRAY})", cpu, vector_bits=max(128, bits))
    parts = _parts(isa, cpu, bits, d)
    return {"score": parts["score"], "softmax": (run, (x, p, l)), "value": parts["value"]}


def float_cycles(model: Any, bits: int) -> list[tuple[str, float, str]]:
    """(what, figure, unit) of the float32 tiles, and of FEXPA's exp2, by a `estimate.Model`."""
    found = []
    for isa in _isas(model.cpu, bits):
        for d in (64, 128):
            work = ROWS * KEY_BLOCK * d / 64
            for part, (emulated, arguments) in _parts(isa, model.cpu, bits, d).items():
                cycles = model.cycles(emulated.trace(*arguments)) / work
                found.append(
                    (f"float32 {part} tiles, {isa}, D = {d}", cycles, "cycles per 64 multiply-adds")
                )
        if isa == "neon":
            continue
        for name in fexpa.EXP2_FLOAT:
            row, x = fexpa.exp2_row(name), np.zeros(KEY_BLOCK, np.float32)
            run = Emulated(
                _row(row),
                f"void({ARRAY}, {ARRAY})",
                model.cpu,
                vector_bits=bits,
            )
            cycles = model.cycles(run.trace(x, x.copy())) / (KEY_BLOCK / 16)
            found.append((f"exp2 by {name}", cycles, "cycles per 16 scores"))
    return found


def _row(row: Any) -> Any:
    @njit(error_model="numpy")
    def exp2(x, y):
        row(x, y, KEY_BLOCK)

    return exp2
