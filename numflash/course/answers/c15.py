"""Chapter 15: swizzle and bank conflicts."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise
from .kernels import emulated, nothing_stored, wrong_numbers


def passes(n: int) -> int:
    """Passes over the banks for a stride of n words."""
    words = {lane * n for lane in range(32)}
    return max(sum(word % 32 == bank for word in words) for bank in range(32))


def byte_of(row: int, column: int) -> int:
    """Byte of an element in a swizzled tile of 64 halves per row."""
    chunk, inside = divmod(column, 8)
    return row * 128 + (chunk ^ row % 8) * 16 + 2 * inside


def _transpose(kernel: Any) -> str:
    """A 32 x 32 transpose through shared memory without a bank conflict, global memory in rows."""
    x = np.random.default_rng(0).standard_normal((32, 32), np.float32)
    y = np.zeros_like(x)
    report, fault = emulated(kernel, 1, 32, (x, y))
    fault = fault or nothing_stored(report, "y") or wrong_numbers(y, x.T.astype(float), "y")
    if fault:
        return fault
    sectors, least = report.global_load_sectors + report.global_store_sectors, 2 * x.nbytes // 32
    if sectors > least:
        return (
            f"the numbers are right, but {sectors} sectors of global memory are moved; "
            f"reading and writing rows takes {least}"
        )
    if report.shared_conflicts:
        return (
            f"the numbers are right, but {report.shared_conflicts} of {report.shared_wavefronts} "
            "passes over the banks are conflicts; none is needed"
        )
    if _shared_bytes(kernel) > x.nbytes:
        return (
            f"the numbers are right, but {_shared_bytes(kernel)} bytes of shared memory are used; "
            f"without padding it is {x.nbytes}"
        )
    return ""


def _shared_bytes(kernel: Any) -> int:
    """Bytes of the shared arrays of a kernel of two matrices."""
    from ...cuda.compile import Source, compile_source
    from ...cuda.compile.target import types
    from ...cuda.emulator.parse import parse

    matrix = types.Array(types.float32, 2, "C")
    made = compile_source(Source(kernel, types.void(matrix, matrix), 32), "sm_80", "ptx")
    return sum(size for size, _ in parse(made.ptx).shared.values())


EXERCISES = {
    "15.1": Exercise(
        "passes of a stride",
        (
            "Write down the banks (n * lane) % 32 for n = 2, 3 and 4. How many differ?",
            "The banks repeat after 32 / gcd(n, 32) lanes. A stride of 0 is one word for all.",
        ),
        model=passes,
        cases=((0,), (1,), (6,), (12,), (32,), (33,)),
        slip=("if n else 1", ""),
    ),
    "15.2": Exercise(
        "byte of an element",
        (
            "A row is 128 bytes. An element is in chunk column // 8, at 2 * (column % 8) inside it.",
            "The chunk is stored at place chunk XOR (row % 8).",
        ),
        model=byte_of,
        cases=((0, 0), (1, 0), (3, 17), (12, 63)),
        slip=("row % 8 << 4", "row % 4 << 4"),
    ),
    "15.3": Exercise(
        "a transpose without conflicts",
        (
            "Stored as it is, a column has all its 32 words in one bank. Store element (r, c) at "
            "column c XOR r instead.",
            "Writing: lane t stores x[r, t] at shared[r, t ^ r]. Reading column r of the tile: "
            "lane t wants element (t, r). Where is it stored?",
        ),
        judge=_transpose,
        slip=("shared[t, r ^ t]", "shared[t, r]"),
    ),
}
