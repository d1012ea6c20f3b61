"""Chapter 01: online softmax."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np

from ..exercises import NO_RETURN, Exercise, difference, show

State = tuple[Any, Any, Any]


def step(state: State, s: np.ndarray, v: np.ndarray) -> State:
    """The state after one more block of scores and values."""
    m, l, o = state
    top = max(m, s.max())
    old, p = 2.0 ** (m - top), 2.0 ** (s - top)
    return top, l * old + p.sum(), o * old + p @ v


def merge(a: State, b: State) -> State:
    """Two states of different keys, brought to one maximum."""
    top = max(a[0], b[0])
    x, y = 2.0 ** (a[0] - top), 2.0 ** (b[0] - top)
    return top, a[1] * x + b[1] * y, a[2] * x + b[2] * y


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that a call has allocated at a time."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _tiled(answer: Any) -> str:
    rng = np.random.default_rng(5)
    for length, keys, d, block_q, block_k, size in (
        (8, 8, 4, 4, 4, 0.7),
        (10, 13, 4, 4, 5, 0.7),
        (8, 40, 4, 4, 8, 400.0),
    ):
        q, k, v = (rng.standard_normal((n, d)) for n in (length, keys, keys))
        t = q @ k.T * size
        p = 2.0 ** (t - t.max(1, keepdims=True))
        exact = p @ v / p.sum(1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):
            came = answer(q.copy(), k.copy(), v.copy(), size, block_q, block_k)
        if came is ...:
            return "open"
        if came is None:
            return NO_RETURN
        where = f"{length} queries, {keys} keys, tiles of {block_q} x {block_k}"
        if size > 1:
            where += ", scores up to a thousand octaves"
        came = np.asarray(came)
        if came.shape == exact.shape and not np.isfinite(came).all():
            return f"{where}: {show(came)} is not finite; is the largest score so far subtracted?"
        fault = difference(came, exact, 1e-5 * max(1.0, size))  # float32 will do
        if fault:
            return f"{where}: {fault}"
    for length, keys, d, allowed, words in (
        (512, 512, 4, 4 * 64 * 512, "the float32 scores of one tile of rows"),
        # float32 copies of K and V, and 60 kB: not one row of scores with its weights
        (
            64,
            32768,
            1,
            322_000,
            "a tile of scores is 4 kB; does your loop over key blocks keep only one?",
        ),
    ):
        given = [rng.standard_normal((n, d), np.float32) for n in (length, keys, keys)]
        used = peak_bytes(lambda: answer(*given, 0.7, 64, 8))  # noqa: B023
        if used > allowed:
            return (
                f"the numbers are right, but {used / 1000:.0f} kB are in use at a time for {length} "
                f"queries and {keys} keys, tiles of 64 x 8; allowed: {allowed / 1000:.0f} kB, {words}"
            )
    return ""


_rng = np.random.default_rng(0)
_first, _second = ((_rng.normal(0, 3, 8), _rng.normal(size=(8, 2))) for _ in range(2))
_nothing: State = (-np.inf, 0.0, np.zeros(2))
_seen = step(_nothing, *_first)

EXERCISES = {
    "01.1": Exercise(
        "one step",
        (
            "The new m is max(m, s.max()). Everything else is relative to it.",
            "shrink = 2.0 ** (m - m_new); the weights of the block are p = 2.0 ** (s - m_new).",
            "l becomes l * shrink + p.sum(). o works alike, with p @ v. o is not divided by l here; that "
            "comes once, at the end.",
        ),
        model=step,
        cases=((_nothing, *_first), (_seen, *_second), (_seen, _second[0] + 5, _second[1])),
        slip=("o * shrink", "o"),
    ),
    "01.2": Exercise(
        "merge of two states",
        (
            "m is the larger of the two maxima.",
            "l and o of each state are multiplied by 2.0 ** (its own m - m), then added.",
        ),
        model=merge,
        cases=((_seen, step(_nothing, *_second)), (_nothing, _seen), (_seen, _nothing)),
        slip=("a[1] * x + b[1] * y", "a[1] + b[1]"),
    ),
    "01.3": Exercise(
        "tiled attention",
        (
            "Start with the two loops and slices: q[r : r + block_q], k[c : c + block_k], "
            "v[c : c + block_k].",
            "m and l have one number per row. top = np.maximum(m, s.max(axis=1)); "
            "p = 2.0 ** (s - top[:, None]).",
            "shrink = 2.0 ** (m - top) multiplies l, and o with [:, None], before this block is "
            "added. Do not forget m = top.",
        ),
        judge=_tiled,
        slip=("o = o * shrink[:, None] + ", "o = o + "),
    ),
    "01.4": Exercise(
        "divisions of a row",
        (
            "One division for each of the D channels, each time the row is divided.",
            "Dividing in every block needs D divisions per block (and D multiplications back).",
        ),
        expected=(128, 128 * 32),
    ),
}
