"""Chapter 22: score and mask functions."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise, difference


def _alibi(slopes: Any) -> Any:
    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score - slopes[h] * abs(q_idx - kv_idx)

    return alibi


def _judge_alibi(answer: Any, slopes: Any) -> str:
    h, q, k = np.arange(2)[:, None, None], np.arange(9)[:, None], np.arange(9)
    score = np.linspace(-1, 1, 162).reshape(2, 9, 9)
    came = answer(score, 0, h, q, k)
    return "open" if came is ... else difference(came, _alibi(slopes)(score, 0, h, q, k))


def stream(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A causal window of 128 keys, and the first four."""
    return (q_idx >= kv_idx) & ((q_idx - kv_idx < 128) | (kv_idx < 4))


Q, K = np.arange(300)[:, None], np.arange(300)

EXERCISES = {
    "22.1": Exercise(
        "ALiBi",
        ("The distance is abs(q_idx - kv_idx).", "Subtract SLOPES[h] times the distance."),
        expected=_alibi,
        judge=_judge_alibi,
        slip=("score - ", "score + "),
    ),
    "22.2": Exercise(
        "a window and the first keys",
        (
            "Three conditions: not later than the query, and (near, or one of the first four).",
            "128 keys with the query's own: the distance is at most 127.",
        ),
        model=stream,
        cases=((0, 0, Q, K), (0, 1, 128, K), (0, 0, 3, 200)),
        slip=("< 128", "<= 128"),
    ),
    "22.3": Exercise(
        "blocks of a row",
        (
            "A block of 64 queries looks back 127 keys from its first row and not beyond its last.",
            "That is parts of three blocks. The first four keys are in one block more.",
        ),
        expected=(4, 4 / 128),
        within=0.05,
        slip=("4, 4", "3, 3"),
    ),
}
