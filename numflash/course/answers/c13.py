"""Chapter 13: threads, warps and the memory hierarchy."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise
from .kernels import emulated, nothing_stored, wrong_numbers


def sectors(stride: int, size: int) -> int:
    """Sectors of 32 bytes that a warp's load touches."""
    return len({(lane * stride * size + byte) // 32 for lane in range(32) for byte in range(size)})


def key_bytes(length: int, d: int, rows: int) -> int:
    """Bytes of K and V read by blocks of `rows` queries."""
    return sum(2 * length * d * 2 for _ in range(0, length, rows))


def _scores(kernel: Any) -> str:
    """A tile of scores with K in shared memory, the first kernel to write."""
    rng = np.random.default_rng(0)
    q, k = (rng.standard_normal((64, 32), np.float32) for _ in range(2))
    out = np.zeros((64, 64), np.float32)
    print(
        "compiling your kernel, and running it in the emulator: up to half a minute ...", flush=True
    )
    report, fault = emulated(kernel, 1, 64, (q, k, out))
    fault = fault or nothing_stored(report)
    if fault:
        return fault
    least = 2 * 64 * 32 * 4
    return wrong_numbers(out, q.astype(float) @ k.T.astype(float), "out") or (
        f"the numbers are right, but {report.global_loaded} bytes are loaded from global memory; "
        f"with every row of Q and K loaded once it is {least}"
        if report.global_loaded > least
        else ""
    )


EXERCISES = {
    "13.1": Exercise(
        "sectors of a load",
        (
            "Which bytes does lane n touch? Which sectors (byte // 32) are these?",
            "For strides up to a sector all sectors between the first and the last byte are touched. "
            "There are never more than 32, because no item crosses a sector.",
        ),
        model=sectors,
        cases=((0, 4), (1, 4), (3, 4), (8, 4), (1, 2), (64, 2), (1, 16)),
        slip=("min(32,", "min(64,"),
    ),
    "13.2": Exercise(
        "bytes of K and V",
        (
            "How many blocks are there? The last may be partly filled: round up.",
            "Each block reads length * d numbers of 2 bytes of K, and as many of V.",
        ),
        model=key_bytes,
        cases=((128, 64, 64), (4096, 128, 64), (4096, 128, 128), (1000, 64, 128)),
        slip=("-(-length // rows)", "(length // rows)"),
    ),
    "13.3": Exercise(
        "a tile of scores with K in shared memory",
        (
            "Thread t copies row t of K into shared memory. All rows must have arrived before any "
            "thread reads another thread's row.",
            "Too many bytes loaded? The loop over keys reads your row of q again for every key. Copy "
            "it once into a cuda.local.array(32, np.float32), a small array of each thread.",
            "After cuda.syncthreads(): for each key j add up q_row[c] * shared[j, c] and store "
            "out[t, j].",
        ),
        judge=_scores,
        slip=("    cuda.syncthreads()\n", ""),
    ),
}
