"""What a card has computed, beside the emulator, float64 and the integer model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import reference
from ...interop.arrays import widen
from ...numerics.merge import apply_sinks
from ...validation import Problem
from .steps import Row

# relative errors that are allowed where there is no emulator's to compare with: twice what rounding
# to the precision costs on standard normal numbers; INT8's own error is 1 to 2 %
LIMITS = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3, "int8": 4e-2}
GRADIENT_LIMITS = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}
# LSE is float32 arithmetic for every precision: the emulator is off by 1e-6. A card's tensor cores cut
# sums off instead of rounding them, 1e-5 at 256 channels; one of 1000 keys left out costs 1e-3.
LSE_LIMIT = 1e-4
INT8_LSE_LIMIT = 5e-2  # against the floats that were quantised
SAMPLES = 16  # rows that are compared after a timing, of the first and of the last head


def floats(problem: Problem) -> Problem:
    """The problem in float32."""
    wide: dict[str, Any] = {
        name: widen(getattr(problem, name)) for name in ("query", "key", "value")
    }
    return problem.changed(**wide)


def distance(found: np.ndarray, exact: np.ndarray) -> float:
    """The relative error, in the Euclidean norm; NaN where a number is NaN."""
    return float(np.linalg.norm(widen(found) - exact)) / (float(np.linalg.norm(exact)) or 1.0)


def largest(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference; infinity where one is finite and the other is not."""
    same = found == exact  # infinities of one sign
    with np.errstate(invalid="ignore"):
        difference = np.where(same, 0.0, np.abs(found - exact))
    return float(np.where(np.isnan(difference), np.inf, difference).max(initial=0.0))


def different(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> int:
    """How many numbers differ in a bit."""
    pairs = zip(found, exact, strict=True)
    return sum(int((a.view(np.uint8) != b.view(np.uint8)).any(-1).sum()) for a, b in pairs)


def bits(found: Sequence[np.ndarray], exact: Sequence[np.ndarray]) -> Row:
    """Whether all bits are equal."""
    wrong = different([x[..., None] for x in found], [x[..., None] for x in exact])
    row: Row = {"equal_bits": not wrong, "passed": not wrong}
    return row if row["passed"] else row | {"different_numbers": wrong}


def errors(
    problem: Problem, card: Sequence[np.ndarray], emulator: Sequence[np.ndarray] | None
) -> Row:
    """Out and LSE of a float problem, of the card and of the emulator, against float64.

    The card adds in another order and keeps fewer bits than the emulator: the same size of error,
    not the same bits.
    """
    exact, exact_lse = reference.oracle(floats(problem))
    row: Row = {
        "card_error": distance(card[0], exact),
        "lse_error": largest(card[1], exact_lse),
    }
    most = LIMITS[problem.precision]
    most_lse = INT8_LSE_LIMIT if problem.precision == "int8" else LSE_LIMIT
    if emulator is not None:
        row["emulator_error"] = distance(emulator[0], exact)
        most = 2 * row["emulator_error"] + 1e-6
        most_lse += 2 * largest(emulator[1], exact_lse)
    # `not >` would let NaN pass
    return row | {"passed": bool(row["card_error"] <= most and row["lse_error"] <= most_lse)}


def forward(
    problem: Problem, card: Sequence[np.ndarray], emulator: Sequence[np.ndarray] | None
) -> Row:
    """Equal bits for INT8, with the integer model where there are no results of the emulator."""
    if problem.precision != "int8":
        return errors(problem, card, emulator)
    return bits(card, reference.integer_model(problem) if emulator is None else emulator)


def gradients(
    problem: Problem,
    operands: tuple[np.ndarray, ...],
    card: Sequence[np.ndarray],
    emulator: Sequence[np.ndarray] | None,
) -> Row:
    """dq, dk and dv against float64. `operands`: dO, out and LSE."""
    grad, out, lse = operands
    exact = reference.gradients(problem, widen(grad), widen(out), lse)
    found = [distance(*pair) for pair in zip(card, exact, strict=True)]
    row: Row = {"card_error": found}
    limits = [GRADIENT_LIMITS[problem.precision]] * 3
    if emulator is not None:
        theirs = [distance(*pair) for pair in zip(emulator, exact, strict=True)]
        row["emulator_error"], limits = theirs, [2 * x + 1e-6 for x in theirs]
    return row | {"passed": all(x <= most for x, most in zip(found, limits, strict=True))}


def on_the_card(
    problem: Problem, there: Sequence[np.ndarray], host: Sequence[np.ndarray], parts: int = 1
) -> Row:
    """Results of arrays on the card beside those of the same arrays in host memory.

    Equal bits, but for sinks, which `host` is without, for INT8's LSE, float32 there, and for
    `parts` of the keys, which are rounded before they are put together.
    """
    plain = problem.sinks is None
    if plain and problem.precision != "int8" and parts == 1:
        return bits(there, host)
    if plain and problem.precision == "int8":
        row, limit = bits(there[:1], host[:1]), 0.0
    else:
        host = widen(host[0]).copy(), host[1].copy()
        if problem.sinks is not None:
            apply_sinks(*host, problem.sinks)
        row, limit = {"passed": True}, LIMITS[problem.precision.replace("int8", "float32")]
        row["difference"] = distance(there[0], host[0])
        row["passed"] = row["difference"] <= limit
    row["lse_error"] = largest(there[1], host[1])
    return row | {"passed": bool(row["passed"] and row["lse_error"] <= LSE_LIMIT)}


class _Head:
    """One head of a problem in float64: full or causal attention without other options."""

    def __init__(self, problem: Problem, b: int, h: int) -> None:
        g = h * problem.shape[2] // problem.shape[1]
        self.at, self.problem = (b, h), problem
        found = (problem.query[b, h], problem.key[b, g], problem.value[b, g])
        self.q, self.k, self.v = (widen(x).astype(np.float64) for x in found)

    def scores(self, rows: Any = slice(None), keys: Any = slice(None)) -> np.ndarray:
        """Scores of some rows and keys, -inf where hidden."""
        i = np.arange(len(self.q))[rows, None] + self.problem.diagonal[self.at[0]]
        found = self.q[rows] @ self.k[keys].T * self.problem.scale
        if self.problem.right is None:
            return found
        return np.where(np.arange(len(self.k))[keys] <= i + self.problem.right, found, -np.inf)

    def rows(self, rows: np.ndarray) -> np.ndarray:
        """Some rows of the output."""
        scores = self.scores(rows)
        p = np.exp(scores - scores.max(1, keepdims=True))
        return p / p.sum(1, keepdims=True) @ self.v

    def gradients(self, some: np.ndarray, operands: tuple[np.ndarray, ...]) -> list[np.ndarray]:
        """Some rows of dq, dk and dv."""
        grad, out = (widen(x[self.at]).astype(np.float64) for x in operands[:2])
        lse, delta = operands[2][self.at][:, None], (grad * out).sum(1, keepdims=True)
        p = np.exp(self.scores(some) - lse[some])
        dq = p * (grad[some] @ self.v.T - delta[some]) @ self.k
        p = np.exp(self.scores(keys=some) - lse)
        dk = (p * (grad @ self.v[some].T - delta)).T @ self.q
        return [dq * self.problem.scale, dk * self.problem.scale, p.T @ grad]


def _worst(errors: Sequence[float]) -> float:
    return max(x if x == x else np.inf for x in errors)


def sample(
    problem: Problem, found: Sequence[np.ndarray], operands: tuple[np.ndarray, ...] | None = None
) -> float:
    """The largest relative error among some rows of the first and of the last head.

    found : out, or with `operands` (dO, out and LSE) dq, dk and dv; query and key heads as many
    """
    nb, nh, _, length, *_ = problem.shape
    rows = np.unique(np.linspace(0, length - 1, min(SAMPLES, length)).astype(int))
    worst = []
    for b, h in ((0, 0), (nb - 1, nh - 1)):
        head = _Head(problem, b, h)
        exact = [head.rows(rows)] if operands is None else head.gradients(rows, operands)
        worst += [distance(x[b, h, rows], y) for x, y in zip(found, exact, strict=True)]
    return _worst(worst)
