"""Chapter 06: the register tile."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..exercises import Exercise, show


def loads_and_registers(mr: int, nv: int) -> tuple[float, int]:
    """Loads per dot instruction of an mr x nv tile, and the registers it needs."""
    return (nv + mr) / (mr * nv), mr * nv + nv + 1


def sums_needed(latency: int, per_cycle: int) -> int:
    """Independent sums that keep a dot unit busy."""
    sums = 1
    while sums / latency < per_cycle:
        sums += 1
    return sums


def two_by_two(m: Machine, q: np.ndarray, k: np.ndarray) -> list[list[np.ndarray]]:
    """The sums of two rows and two vectors of keys."""
    sums = [[m.zero(), m.zero()], [m.zero(), m.zero()]]
    for e in range(q.shape[1]):
        vectors = m.load(k, e, 0), m.load(k, e, 1)
        for i in range(2):
            word = m.broadcast(q, i, e)
            sums[i] = [m.dot(s, word, x) for s, x in zip(sums[i], vectors, strict=True)]
    return sums


def _tile(kernel: Any) -> str:
    """A register tile written with `load`, `broadcast` and `dot`: right numbers, few loads."""
    rng = np.random.default_rng(0)
    q = rng.integers(0, 128, (2, 64)).astype(np.int32)
    k = rng.integers(-127, 128, (64, 32)).astype(np.int32)
    machine = Machine()
    came = kernel(machine, q, k)
    if came is ...:
        return "open"
    if np.shape(came) != (2, 2, 16):
        return f"got {show(came)}; return the sums as [[s00, s01], [s10, s11]]"
    if machine.dots != 256:
        return f"{machine.dots} dots were used; 64 channels x 2 rows x 2 vectors are 256"
    exact = q @ k
    for i in range(2):
        for n in range(2):
            part = exact[i, 16 * n : 16 * n + 16]
            if not np.array_equal(np.asarray(came[i][n]), part):
                return f"sum [{i}][{n}] is wrong: got {show(np.asarray(came[i][n]))}"
    if machine.loads < 256:
        return (
            f"the numbers are right, but only {machine.loads} of 256 operands came by `m.load` and "
            "`m.broadcast`; a dot reads registers, so no slice of q or k is an operand"
        )
    if machine.loads > 256:
        return (
            f"the numbers are right, but it loads {machine.loads} times for 256 dots; "
            "a 2 x 2 tile needs 256: 2 vectors of K and 2 broadcasts for each channel"
        )
    return ""


class Machine:
    """Vector registers of 16 lanes, with counters: what a register tile is written with."""

    def __init__(self) -> None:
        self.loads = 0
        self.dots = 0

    def zero(self) -> np.ndarray:
        """A vector of 16 zeros."""
        return np.zeros(16, np.int32)

    def load(self, k: np.ndarray, e: int, n: int) -> np.ndarray:
        """Vector n (keys 16 n to 16 n + 15) of channel e of k (channels, keys). Counts a load."""
        self.loads += 1
        return k[e, 16 * n : 16 * n + 16]

    def broadcast(self, q: np.ndarray, i: int, e: int) -> np.ndarray:
        """q[i, e] in all 16 lanes. Counts a load."""
        self.loads += 1
        return np.full(16, q[i, e], np.int32)

    def dot(self, total: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        """Total + x * y, lane by lane."""
        self.dots += 1
        return total + x * y


EXERCISES = {
    "06.1": Exercise(
        "loads per dot, registers",
        (
            "One step loads nv vectors and mr words and does mr * nv dots.",
            "Registers: mr * nv sums, nv vectors of K, one word.",
        ),
        model=loads_and_registers,
        cases=((1, 1), (6, 4), (8, 4)),
        slip=("* nv + 1", "* nv"),
    ),
    "06.2": Exercise(
        "sums under way",
        (
            "A sum can take its next dot only after `latency` cycles.",
            "In that time the unit could start latency * per_cycle dots, each into another sum.",
        ),
        model=sums_needed,
        cases=((4, 2), (9, 2)),
        slip=("latency * per_cycle", "latency + per_cycle"),
    ),
    "06.3": Exercise(
        "fewest rows for enough sums on the A64FX",
        (
            "How many sums does exercise 2 give for 9 cycles and 2 per cycle? A tile has mr * nv.",
            "Divide by nv = 4 and round up: with fewer sums the unit waits.",
        ),
        expected=lambda: -(-sums_needed(9, 2) // 4),
        slip=("-(-9 * 2 // 4)", "9 * 2 // 4"),
    ),
    "06.4": Exercise(
        "a register tile of 2 x 2",
        (
            "Keep four sums in four variables. Nothing is stored before the loop over e ends.",
            "In each step: load two vectors of K once, then broadcast each of the two query "
            "words once, and use each of the four in two dots.",
        ),
        model=two_by_two,
        judge=_tile,
        slip=("s11 = m.dot(s11, b, k1)", "s11 = m.dot(s11, b, m.load(k, e, 1))"),
    ),
}
