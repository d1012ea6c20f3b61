"""Chapter 17: Hopper."""

from __future__ import annotations

from ..exercises import Exercise
from .c23 import pipeline


def place(n: int, stages: int) -> tuple[int, int, int]:
    """Stage of tile n, the parity of its full barrier, the parity of its empty barrier."""
    uses = [m for m in range(n) if m % stages == n % stages]
    return n % stages, len(uses) % 2, (len(uses) + 1) % 2


def consumers(n: int) -> int:
    """Registers of a consumer thread if a producer thread keeps n."""
    return max(r for r in range(8, 241, 8) if 128 * n + 256 * r <= 65536)


EXERCISES = {
    "17.1": Exercise(
        "stage and parities",
        (
            "How often was the stage used before tile n? n // stages times.",
            "The first use is phase 0, parity 0; the next one 1, then 0 again. The producer waits "
            "for the phase before it: the other parity.",
        ),
        model=place,
        cases=((0, 2), (1, 2), (2, 2), (5, 2), (7, 3)),
        slip=("use & 1 ^ 1", "use & 1"),
    ),
    "17.2": Exercise(
        "an mbarrier pipeline",
        (
            "A deadlock: somebody waits for a phase that never ends. Does the producer's first wait "
            "return at once (parity 1)? Does every consumer arrive at `empty` after its last load of "
            "a tile?",
            "Producer, for each n: wait for empty with parity ((n >> 1) & 1) ^ 1; "
            "ptx.mbarrier_expect(full, u32(1024)); then ptx.tma_load_4d(stage, maps, i32(0), "
            "i32(8 * n), i32(0), i32(0), full).",
            "Consumer, for each n: wait for full with parity (n >> 1) & 1; "
            "ptx.load_shared_v4(four, 0, stage + u32(16 * t)); add the four words; "
            "ptx.mbarrier_arrive(empty).",
        ),
        judge=pipeline,
        slip=("((n >> 1) & 1) ^ 1", "(n >> 1) & 1"),
    ),
    "17.3": Exercise(
        "registers of a consumer",
        (
            "128 * n + 256 * r must not exceed 65536.",
            "Round r down to a multiple of 8, and never above 240.",
        ),
        model=consumers,
        cases=((8,), (24,), (40,), (168,)),
        slip=("// 8 * 8", ""),
    ),
}
