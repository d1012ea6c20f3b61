"""Chapter 09: threads, causal, GQA."""

from __future__ import annotations

from ..exercises import Exercise


def amdahl(serial: float, n: int) -> float:
    """Speed-up of n threads if `serial` of the time does not divide."""
    return 1 / (serial + (1 - serial) / n)


def times_fewer(length: int, block_q: int, block_k: int) -> float:
    """All tiles over the tiles that a causal mask leaves."""
    rows, blocks = -(-length // block_q), -(-length // block_k)
    seen = sum(
        1
        for r in range(rows)
        for b in range(blocks)
        if b * block_k < min((r + 1) * block_q, length)
    )
    return rows * blocks / seen


EXERCISES = {
    "09.1": Exercise(
        "Amdahl's law",
        (
            "Take one thread's time as 1. How long do n threads take?",
            "serial stays, (1 - serial) is divided by n; the gain is 1 over the sum.",
        ),
        model=amdahl,
        cases=((0.0, 12), (0.01, 12), (0.1, 1000)),
        slip=("(1.0 - serial) / n", "1 / n"),
    ),
    "09.2": Exercise(
        "causal saves",
        (
            "Count for each tile of rows the key blocks that begin at or before its last row.",
            "The last tile of rows may be cut short by `length`: use min. -(-a // b) rounds up.",
        ),
        model=times_fewer,
        cases=((512, 48, 64), (1024, 48, 64), (4096, 48, 64)),
        slip=("row + block_q", "row + 1"),
    ),
    "09.3": Exercise(
        "bytes of K and V per layer",
        (
            "K and V: two arrays of (heads, 1024, 64) numbers of 2 bytes.",
            "Write both numbers, the one with 2 heads first.",
        ),
        expected=(2 * 2 * 1024 * 64 * 2, 2 * 14 * 1024 * 64 * 2),
    ),
}
