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
from ..jit import target
from ..tiling import KEY_BLOCK
from . import codegen
from .emulator import Emulated

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
    width = isa.panel

    @njit(error_model="numpy")
    def scores(q, k, x):
        for c in range(0, KEY_BLOCK, width):
            for i in range(0, ROWS, 6):
                score(q, i * d, d, k, c * d, d, x, i * KEY_BLOCK + c, KEY_BLOCK)

    @njit(error_model="numpy")
    def values(p, v, o):
        for t in range(0, d, width):
            for i in range(0, ROWS, 6):
                value(p, i * KEY_BLOCK, KEY_BLOCK, v, t, d, KEY_BLOCK, o, i * d + t, d)

    q, k, x = (np.zeros(n, np.float32) for n in (ROWS * d, KEY_BLOCK * d, ROWS * KEY_BLOCK))
    signature = f"void({ARRAY}, {ARRAY}, {ARRAY})"
    made = {f: Emulated(f, signature, cpu, vector_bits=bits) for f in (scores, values)}
    return {"score": (made[scores], (q, k, x)), "value": (made[values], (x, k, q))}


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
