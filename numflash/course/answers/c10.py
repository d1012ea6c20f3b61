"""Chapter 10: decode and split-KV."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise, difference, show
from .c01 import peak_bytes


def merge(o_a: Any, m_a: float, l_a: float, o_b: Any, m_b: float, l_b: float) -> Any:
    """Two parts brought to one maximum; nothing is divided."""
    top = max(m_a, m_b)
    if top == -np.inf:
        return o_a, m_a, l_a
    a, b = 2.0 ** (m_a - top), 2.0 ** (m_b - top)
    return a * o_a + b * o_b, top, a * l_a + b * l_b


_x, _y = np.array([1.0, 2.0]), np.array([3.0, -1.0])


def _split_decode(decode: Any) -> str:
    """A decode with splits: right for any number, also more splits than keys."""
    rng = np.random.default_rng(3)
    for keys, splits in ((64, 1), (64, 4), (61, 4), (3, 8)):
        q = 4 * rng.standard_normal(8)
        k, v = rng.standard_normal((2, keys, 8))
        t = k @ q
        p = 2.0 ** (t - t.max())
        exact = p @ v / p.sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            came = decode(q.copy(), k.copy(), v.copy(), splits)
        if came is ...:
            return "open"
        if came is None:
            return "it returns None; is there a `return`?"
        if not np.isfinite(np.asarray(came, float)).all():
            return f"{keys} keys in {splits} splits give {show(came)}: an empty part needs weight 0"
        fault = difference(came, exact, 1e-4)  # float32 will do
        if fault:
            return f"{keys} keys in {splits} splits: {fault}"
    keys = 4096
    q, k, v = rng.standard_normal(8), *rng.standard_normal((2, keys, 8))
    used, scores = peak_bytes(lambda: decode(q, k, v, 64)), 8 * keys
    if used < 2 * scores:  # np.arange(keys), which a split may need, takes as much as all scores
        return ""
    return (
        f"the numbers are right, but {used / 1000:.0f} kB are in use at a time for {keys} keys in 64 "
        f"splits; all scores together take {scores / 1000:.0f} kB, a part has {keys // 64} keys"
    )


EXERCISES = {
    "10.1": Exercise(
        "megabytes of a layer's cache",
        (
            "K and V: two arrays of (heads, 1024, 64) numbers of 2 bytes.",
            "Divide by 10**6, and give both answers as a tuple, 2 heads first.",
        ),
        expected=(0.524288, 3.670016),
        within=0.01,
    ),
    "10.2": Exercise(
        "the merged part",
        (
            "Bring both parts to the larger maximum: multiply o and l by 2**(m - larger).",
            "2**(-inf - larger) is 0, so a part without keys needs nothing special here.",
        ),
        model=merge,
        cases=(
            (_x, 0.0, 1.0, _y, 3.0, 2.0),
            (_x, 5.0, 1.5, _y, -4.0, 1.0),
            (_x, 2.0, 1.0, 0 * _y, -np.inf, 0.0),
        ),
        slip=("l_a * grow_a + l_b * grow_b", "l_a + l_b"),
    ),
    "10.3": Exercise(
        "split decode",
        (
            "Cut the keys with np.array_split(np.arange(len(k)), splits). For each part compute "
            "(o, m, l) as in chapter 01, not divided.",
            "Merge the parts one after another with the rule of exercise 2, starting from "
            "(zeros, -inf, 0). Skip a part without keys. Divide o by l once, at the end.",
        ),
        judge=_split_decode,
        slip=("a * l + b * p.sum()", "l + p.sum()"),
    ),
}
