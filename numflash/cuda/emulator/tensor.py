"""ldmatrix and mma.sync: which thread holds which element, and the products themselves.

Layouts are read from the PTX ISA manual, section 9.7.14.5 ("Matrix Fragments for mma"): `group` =
lane / 4, `quad` = lane % 4. Products and sums of float16 and bfloat16 are done in float32 (exact
products, NumPy's order of summation); a tensor core adds in another order and keeps fewer bits, so
float results agree to rounding only. Integer results are exact.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from .binders import Run, binds
from .errors import Fault
from .memory import NO_LANE, wavefronts
from .parse import Instruction, vector

if TYPE_CHECKING:
    from .machine import Machine

LANE = np.arange(32)
GROUP = LANE >> 2
QUAD = LANE & 3
BITS = {"f16": 16, "bf16": 16, "s8": 8, "u8": 8, "tf32": 32}


def decode(words: np.ndarray, t: str) -> np.ndarray:
    """32-bit words to the elements packed in them, as float32 (exact for every type here).

    A last axis is added.
    """
    words = np.ascontiguousarray(words)[..., None]
    if t == "tf32":
        return (words & np.uint32(0xFFFFE000)).view(np.float32)
    if t == "f16":
        return words.view(np.float16).astype(np.float32)
    if t == "bf16":
        return (words.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return words.view(np.int8 if t == "s8" else np.uint8).astype(np.float32)


@functools.cache
def operand_layout(which: str, k: int, per_word: int) -> tuple[int, np.ndarray]:
    """Registers of an m16 x k A or k x n8 B operand, and for each matrix element its place among
    (lane, register, part).

    An m8 x k A operand is laid out as B.
    """
    rows = 16 if which == "a" else 8
    step = per_word * 4
    registers = (2 if which == "a" else 1) * k // step
    places = np.zeros((rows, k), np.int64)
    for register in range(registers):
        for part in range(per_word):
            row = GROUP + 8 * (register & 1) if which == "a" else GROUP
            col = per_word * QUAD + part + step * (register >> 1 if which == "a" else register)
            places[row, col] = (LANE * registers + register) * per_word + part
    return registers, places


@functools.cache
def accumulator_order(columns: int = 8, rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    """Row and column that (lane, register) holds of a 16 x columns accumulator, or of its upper 8
    rows, the even pairs.
    """
    registers = np.arange(columns // 2) if rows == 16 else np.arange(2)
    return (
        GROUP[:, None] + 8 * ((registers >> 1) & 1)[None],
        8 * (registers >> 2)[None] + 2 * QUAD[:, None] + (registers & 1)[None],
    )


@functools.cache
def accumulator_layout(rows: int = 16) -> np.ndarray:
    """(rows, 8) places among (lane, register) of an accumulator of 8 columns.

    The inverse of `accumulator_order`.
    """
    places = np.zeros((rows, 8), np.int64)
    row, column = accumulator_order(8, rows)
    places[row, column] = np.arange(row.size).reshape(row.shape)
    return places


def gather(views: list[np.ndarray], warps: np.ndarray) -> np.ndarray:
    """(warps, 32, registers) of the values that the warps hold in these registers."""
    return np.stack([v.reshape(-1, 32)[warps] for v in views], -1)


@binds("ldmatrix")
def ldmatrix(m: Machine, i: Instruction) -> Run:
    if "m8n8" not in i.modifiers or i.type != "b16":
        raise Fault("unsupported", i.text)
    targets = [m.target(x, "u32") for x in vector(i.operands[0])]
    base, offset = m.address(i.operands[1], "u32")
    n = len(targets)
    transposed = "trans" in i.modifiers

    def run(mask: Any) -> None:
        warps = m.whole_warps(mask, "ldmatrix")
        address = (
            np.broadcast_to(base, m.n)
            .reshape(-1, 32)[warps][:, : 8 * n]
            .astype(np.int64)
            .reshape(-1)
            + offset
        )
        threads = (warps[:, None] * 32 + LANE[None, : 8 * n]).reshape(-1)
        index = m.shared.index(address, m.block_of[threads], 16)
        taken, ideal = wavefronts(index, threads, 16)
        m.count("shared_wavefronts", taken)
        m.count("shared_conflicts", taken - ideal)
        m.count("shared_loaded", 16 * index.size)
        g = m.shared.granules(index, 16)
        m.shared.check_read(g, m.warp[threads])
        m.shared.check_lanes(g, m.warp[threads], np.full(threads.size, NO_LANE), write=False)
        rows = m.shared.data.view(np.uint16)[(index // 2)[:, None] + np.arange(8)].reshape(
            warps.size, n, 8, 8
        )
        if transposed:
            rows = rows.transpose(0, 1, 3, 2)
        words = np.ascontiguousarray(rows).view(np.uint32).reshape(warps.size, n, 32)
        for k, d in enumerate(targets):
            d.reshape(-1, 32)[warps] = words[:, k]

    return run


@binds("mma")
def mma(m: Machine, i: Instruction) -> Run:
    shape = next((x for x in i.modifiers if re.fullmatch(r"m\d+n\d+k\d+", x)), "")
    td, ta, tb, tc = i.modifiers[-4:]
    if (
        not shape.startswith(("m16n8k", "m8n8k"))
        or ta not in BITS
        or tb not in BITS
        or "row" not in i.modifiers
    ):
        raise Fault("unsupported", i.text)
    rows = int(shape[1 : shape.index("n")])
    k = int(shape[shape.index("k") + 1 :])
    per_word = 32 // BITS[ta]
    if not all(x.startswith("{") for x in i.operands):
        raise Fault("protocol", "operands of mma are vectors, in braces")
    d, a, b, c = (vector(x) for x in i.operands)
    (na, place_a), (nb, place_b) = (
        operand_layout("a" if rows == 16 else "b", k, per_word),
        operand_layout("b", k, per_word),
    )
    if (len(a), len(b)) != (na, nb):
        raise Fault(
            "protocol", f"{shape} takes {na} and {nb} operand registers, got {len(a)} and {len(b)}"
        )
    view_a = [m.value(x, "u32") for x in a]
    view_b = [m.value(x, "u32") for x in b]
    half = td == "f16"
    kind = "u32" if half else td
    view_c = [m.value(x, kind) for x in c]
    view_d = [m.target(x, kind) for x in d]
    place_c, (row, col) = accumulator_layout(rows), accumulator_order(8, rows)

    def run(mask: Any) -> None:
        warps = m.whole_warps(mask, "mma.sync")
        A = decode(gather(view_a, warps), ta).reshape(warps.size, -1)[:, place_a]
        B = decode(gather(view_b, warps), tb).reshape(warps.size, -1)[:, place_b]
        product = np.matmul(A, B.transpose(0, 2, 1))
        words = gather(view_c, warps)
        if half:
            C = decode(words, "f16").reshape(warps.size, -1)[:, place_c]
            # two halves per register
            D = np.ascontiguousarray((product + C).astype(np.float16)[:, row, col]).view(np.uint32)
        else:
            C = words.reshape(warps.size, -1)[:, place_c]
            # integer products are below 2**24: exact in float32
            D = (product.astype(C.dtype) + C)[:, row, col]
        for r, target in enumerate(view_d):
            target.reshape(-1, 32)[warps] = D[:, :, r]
        m.count("tensor_operations", warps.size)
        m.count("tensor_flops", warps.size * 2 * rows * 8 * k)

    return run
