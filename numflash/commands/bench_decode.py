"""`numflash bench decode`: one token over a KV cache, by each storage, beside PyTorch and OpenVINO."""

from __future__ import annotations

from typing import Any

from ..measure import decode_calls
from ..measure.console import Progress, Table, count
from ..measure.contenders import on_threads
from ..measure.decode_calls import DTYPES, PEER, PEER_BFLOAT16, PEER_U8

COLUMNS = (*DTYPES, PEER, PEER_BFLOAT16, PEER_U8)
RATIOS = (
    ("float32", PEER),
    ("int8", PEER),
    ("int4", PEER),
    ("bfloat16", PEER_BFLOAT16),
    ("int8", PEER_U8),
)
SHAPE = "(H, Hkv, tokens, D)"


def run(threads: int) -> list[dict[str, Any]]:
    """Print microseconds a token, how many times as long the peers take, and the errors."""
    times = Table(
        f"microseconds a token, {count(threads, 'thread')}, medians of calls in turns",
        (SHAPE, *COLUMNS),
        note="PyTorch: scaled_dot_product_attention with the query heads of a group folded into rows; OpenVINO: "
        "a stateful model, which appends the token, too (each where it is installed)",
    )
    ratios = Table(
        "how many times as long the peer takes",
        (SHAPE, *(f"{name} / {peer}" for name, peer in RATIOS)),
    )
    accuracy = Table(
        "relative L1 against float64, N(0,1)",
        (SHAPE, *COLUMNS),
        note="real activations: docs/precision.md",
    )
    with Progress("bench decode", len(decode_calls.SHAPES)) as progress, on_threads(threads):
        for shape in decode_calls.SHAPES:
            progress.step(str(shape))
            found, wrong = decode_calls.measure(shape)
            cells = (f"{1e6 * found[name]:.1f}" if name in found else "" for name in COLUMNS)
            times.add(str(shape), *cells, shape=shape, seconds=found, relative_l1=wrong)
            off = (f"{wrong[name]:.1e}" if name in wrong else "" for name in COLUMNS)
            accuracy.add(str(shape), *off)
            against = (
                f"{found[peer] / found[name]:.2f}" if peer in found else "" for name, peer in RATIOS
            )
            ratios.add(str(shape), *against)
    times.show()
    if any(cell for row in ratios.rows for cell in row[1:]):
        ratios.show()
    accuracy.show()
    return times.records
