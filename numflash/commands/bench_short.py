"""`numflash bench --short`: what a short call costs, by each way into numflash."""

from __future__ import annotations

from typing import Any

from ..measure import short_calls
from ..measure.console import Progress, Table, count
from ..measure.contenders import on_threads
from ..measure.short_calls import COMPILED, COMPILED_INT8, PEER, PEER_BFLOAT16, SHAPES, TOKENS

COLUMNS = (
    "arrays",
    COMPILED,
    "tensors",
    "numflash.torch",
    TOKENS,
    PEER,
    "int8",
    COMPILED_INT8,
    "int8, ready",
    PEER_BFLOAT16,
)
RATIOS = (("arrays", PEER), ("numflash.torch", PEER), ("int8", PEER), ("int8", PEER_BFLOAT16))


def run(threads: int) -> list[dict[str, Any]]:
    """Print microseconds of each call, and how many times as long PyTorch takes."""
    times = Table(
        f"microseconds of a call, {count(threads, 'thread')}, medians of calls in turns",
        ("(B, H, L, D)", *COLUMNS),
        note="compiled: what packs or quantises, attends and checks; the rest of a call is Python; by token: "
        "numflash.torch on tensors that are (B, L, H, D) in memory, as models have them",
    )
    ratios = Table(
        "how many times as long PyTorch takes",
        ("(B, H, L, D)", *(f"{name} / {peer}" for name, peer in RATIOS)),
    )
    with Progress("bench --short", len(SHAPES)) as progress, on_threads(threads):
        for shape in SHAPES:
            progress.step(str(shape))
            found = short_calls.measure(shape)
            cells = (f"{1e6 * found[name]:.1f}" if name in found else "" for name in COLUMNS)
            times.add(str(shape), *cells, shape=shape, seconds=found)
            ratios.add(
                str(shape),
                *(
                    f"{found[peer] / found[name]:.2f}" if peer in found else ""
                    for name, peer in RATIOS
                ),
            )
    times.show()
    if any(cell for row in ratios.rows for cell in row[1:]):
        ratios.show()
    return times.records
