"""Chapter 00: attention and the memory it moves."""

from __future__ import annotations

from typing import Any

from ..exercises import NO_RETURN, Exercise, difference


def bytes_of_k_and_v(length: int, d: int, block_q: int) -> int:
    """Bytes of K and V from memory, float32."""
    return length // block_q * 2 * length * d * 4


def _by_the_traces(answer: Any, *reports: Any) -> str:
    for block_q, report in zip((1, 16), reports, strict=True):
        traced = (report.arrays["k"].misses + report.arrays["v"].misses) * report.line
        came = answer(96, 16, block_q)
        if came is ...:
            return "open"
        if came is None:
            return NO_RETURN
        fault = difference(came, traced)
        if fault:
            return (
                f"for length 96, d 16 and block_q {block_q} the trace counts other bytes: {fault}"
            )
    fault = difference(answer(192, 32, 8), bytes_of_k_and_v(192, 32, 8))
    return f"for length 192, d 32 and block_q 8: {fault}" if fault else ""


def _equal_at(peak: Any) -> float:
    """L at which 4 L L D operations take as long as 4 L D numbers of 4 bytes."""
    return 16 * peak.float32 / (4 * peak.read)


EXERCISES = {
    "00.1": Exercise(
        "MiB of scores at L = 4096",
        (
            "How many scores are there, and how many bytes has a float32?",
            "4096 * 4096 scores of 4 bytes, divided by 2**20.",
        ),
        expected=4096 * 4096 * 4 / 2**20,
    ),
    "00.2": Exercise(
        "K and V from memory",
        (
            "How many tiles are there? Each reads K and V once.",
            "K and V together have 2 * length * d numbers of 4 bytes.",
        ),
        model=bytes_of_k_and_v,
        judge=_by_the_traces,
        slip=("2 * length", "length"),
    ),
    "00.3": Exercise(
        "L at which both times are equal",
        (
            "Write both times with L and D: 4 * L * L * D operations, and 4 * L * D numbers of 4 bytes.",
            "4 * L * L * D / peak.float32 = 4 * 4 * L * D / peak.read. Solve it for L: D and one L cancel.",
        ),
        expected=_equal_at,
        within=0.02,  # a whole number will do
        slip=("4 * peak", "peak"),
    ),
}
