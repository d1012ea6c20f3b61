"""Chapter 10: decode and split-KV."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import NO_RETURN, Exercise, difference
from .c01 import peak_bytes

State = tuple[Any, Any, Any]


def merge(a: State, b: State) -> State:
    """Two states (m, l, o) brought to one maximum, also if both are empty; nothing is divided."""
    top = max(a[0], b[0])
    if top == -np.inf:
        return a
    x, y = 2.0 ** (a[0] - top), 2.0 ** (b[0] - top)
    return top, x * a[1] + y * b[1], x * a[2] + y * b[2]


_x, _y = np.array([1.0, 2.0]), np.array([3.0, -1.0])


def _split_decode(decode: Any) -> str:
    """A decode with splits: right for any number, also more splits than keys."""
    rng = np.random.default_rng(3)
    for keys, splits in ((64, 1), (64, 4), (61, 4), (3, 8)):
        merged: list[bool] = []

        def counted(a: State, b: State, merged: list[bool] = merged) -> State:
            merged.append(a[1] > 0 and b[1] > 0)  # two parts that have keys
            return merge(a, b)

        q = 4 * rng.standard_normal(8)
        k, v = rng.standard_normal((2, keys, 8))
        t = k @ q
        p = 2.0 ** (t - t.max())
        exact = p @ v / p.sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            came = decode(q.copy(), k.copy(), v.copy(), splits, counted)
        if came is ...:
            return "open"
        if came is None:
            return NO_RETURN
        fault = difference(came, exact, 1e-4)  # float32 will do
        if fault:
            empty = "; a part without keys needs weight 0" * (keys < splits)
            return f"{keys} keys in {splits} splits: {fault}{empty}"
        parts = min(keys, splits)
        if sum(merged) != parts - 1:
            return (
                f"{keys} keys in {splits} splits: the numbers are right, but `merge` was called for "
                f"{sum(merged)} pairs of states that have keys; {parts} parts are {parts - 1} merges"
            )
    keys = 4096
    q, k, v = rng.standard_normal(8), *rng.standard_normal((2, keys, 8))
    used, scores = peak_bytes(lambda: decode(q, k, v, 64, merge)), 8 * keys
    if used < 2 * scores:  # np.arange(keys), which a split may need, takes as much as all scores
        return ""
    return (
        f"the numbers are right, but {used / 1000:.0f} kB are in use at a time for {keys} keys in 64 "
        f"splits; all scores together take {scores / 1000:.0f} kB, a part has {keys // 64} keys"
    )


EXERCISES = {
    "10.1": Exercise(
        "microseconds of a token",
        (
            "K and V: two arrays of (heads, 1024, 64) numbers of 2 bytes.",
            "20 GB/s are 20 000 bytes a microsecond. Give both answers as a tuple, 2 heads first.",
        ),
        expected=(26.2144, 183.5008),
        within=0.01,
    ),
    "10.2": Exercise(
        "the merged part",
        (
            "Bring both parts to the larger maximum: multiply o and l by 2**(m - larger).",
            "2**(-inf - larger) is 0, so one part without keys needs nothing special.",
            "If both m are -inf, return either part: -inf - -inf is nan.",
        ),
        model=merge,
        cases=(
            ((0.0, 1.0, _x), (3.0, 2.0, _y)),
            ((5.0, 1.5, _x), (-4.0, 1.0, _y)),
            ((2.0, 1.0, _x), (-np.inf, 0.0, 0 * _y)),
            ((-np.inf, 0.0, 0 * _x), (-np.inf, 0.0, 0 * _y)),
        ),
        slip=("l_a * grow_a + l_b * grow_b", "l_a + l_b"),
    ),
    "10.3": Exercise(
        "split decode",
        (
            "Cut the keys with np.array_split(np.arange(len(k)), splits). For each part compute "
            "(m, l, o) as in chapter 01, not divided.",
            "state = merge(state, part) for one part after another, starting from (-inf, 0, zeros). "
            "Skip a part without keys. Divide o by l once, at the end.",
        ),
        judge=_split_decode,
        slip=("p.sum(), p @", "1.0, p @"),
    ),
}
