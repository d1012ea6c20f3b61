"""Chapter 24: the capstone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from ..exercises import NO_RETURN, Exercise, difference


def kv_milliseconds(length: int, d: int, block_q: int) -> float:
    """Time to read the K and V of all tiles at 32 bytes a nanosecond."""
    return -(-length // block_q) * 2 * length * d / 32e6


def sweep(sizes: Any, run: Any, using: Any) -> dict[int, Any]:
    """What `run` returns with each size."""
    found = {}
    for size in sizes:
        with using(block_q=size):
            found[size] = run()
    return found


def _sweep(answer: Any) -> str:
    now: list[int | None] = [None]

    @contextmanager
    def using(*, block_q: int) -> Iterator[None]:
        now[0] = block_q
        try:
            yield
        finally:
            now[0] = None

    def run() -> tuple[Any, str]:
        return now[0], f"output with {now[0]}"

    came = answer((12, 48), run, using)
    if came is ...:
        return "open"
    if not isinstance(came, dict) or set(came) != {12, 48}:
        return f"got {came!r}; return a dictionary with one entry for each size"
    for size, found in came.items():
        if found != (size, f"output with {size}"):
            return (
                f"the entry of {size} was made with block_q = {found[0]}: is run() inside the with?"
            )
    return ""


def fits(mr: int, nv: int) -> bool:
    """Whether a tile fits 32 registers."""
    return mr * nv + nv + 1 <= 32


def distance(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """0.1 per position of distance."""
    return score - 0.1 * abs(q_idx - kv_idx)


def _distance(answer: Any) -> str:
    from ... import flex_attention

    first = answer(0.0, 0, 0, 1, 2)
    if first is ... or first is None:
        return "open" if first is ... else NO_RETURN
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 40, 16)).astype(np.float32) for _ in range(3))
    s = q[0, 0].astype(float) @ k[0, 0].T / 4
    s -= 0.1 * np.abs(np.subtract.outer(np.arange(40), np.arange(40)))
    p = np.exp(s - s.max(1, keepdims=True))
    exact = p @ v[0, 0] / p.sum(1, keepdims=True)
    return difference(np.asarray(flex_attention(q, k, v, answer))[0, 0].astype(float), exact, 1e-3)


EXERCISES = {
    "24.1": Exercise(
        "milliseconds for K and V",
        (
            "How many tiles are there? Round up: -(-length // block_q).",
            "Each tile reads 2 * length * d bytes. 32 bytes a nanosecond are 32e6 a millisecond.",
        ),
        model=kv_milliseconds,
        within=0.01,
        cases=((1024, 128, 48), (1024, 128, 192), (4096, 64, 96)),
        slip=("-(-length // block_q)", "(length // block_q)"),
    ),
    "24.2": Exercise(
        "the sweep",
        (
            "with using(block_q=size): ... holds for the calls inside its block only.",
            "found[size] = run() must be indented below the with.",
        ),
        model=sweep,
        judge=_sweep,
        slip=("            found[size] = run()", "            pass\n        found[size] = run()"),
    ),
    "24.3": Exercise(
        "shapes that fit 32 registers",
        ("mr * nv + nv + 1 registers, as in chapter 06; compare with 32.",),
        model=fits,
        cases=((6, 4), (8, 4), (4, 4), (14, 2), (15, 2), (30, 1)),
        slip=("<= 32", "<= 30"),
    ),
    "24.4": Exercise(
        "a score function",
        (
            "Return score minus something; b and h are not needed.",
            "abs(q_idx - kv_idx) is the distance.",
        ),
        model=distance,
        judge=_distance,
        slip=("0.1 * abs(q_idx - kv_idx)", "0.1 * (q_idx - kv_idx)"),
    ),
}
