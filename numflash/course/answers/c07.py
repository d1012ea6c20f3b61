"""Chapter 07: fusing it."""

from __future__ import annotations

from typing import Any

from ..exercises import Exercise, does_nothing

PARTS = ("scores", "softmax", "merge", "values")


class Machine:
    """Runs the four parts of key blocks, checks their order, counts the blocks alive."""

    def __init__(self) -> None:
        self.done: dict[int, int] = {}
        self.most_alive = 0
        self.fault = ""

    def _part(self, number: int, block: int) -> None:
        if self.done.get(block, 0) != number and not self.fault:
            self.fault = (
                f"{PARTS[number]} of block {block} came when {self.done.get(block, 0)} of its four "
                f"parts were done; the order within a block is {', '.join(PARTS)}"
            )
        self.done[block] = number + 1
        alive = sum(0 < n < len(PARTS) for n in self.done.values())
        self.most_alive = max(self.most_alive, alive)

    def scores(self, block: int) -> None:
        """Part 1."""
        self._part(0, block)

    def softmax(self, block: int) -> None:
        """Part 2."""
        self._part(1, block)

    def merge(self, block: int) -> None:
        """Part 3."""
        self._part(2, block)

    def values(self, block: int) -> None:
        """Part 4."""
        self._part(3, block)


def _fused(answer: Any) -> str:
    for blocks in (5, 1):
        machine = Machine()
        answer(machine, blocks)
        if not machine.done and does_nothing(answer):
            return "open"
        if machine.fault:
            return machine.fault
        if machine.done != {b: len(PARTS) for b in range(blocks)}:
            return f"of {blocks} blocks, {sum(n == 4 for n in machine.done.values())} were finished"
        if machine.most_alive > 1:
            return f"{machine.most_alive} blocks of scores were alive at once; fused needs one"
    return ""


def gain(parts: dict[str, float]) -> float:
    """How many times faster the whole is with half of the softmax."""
    whole = sum(parts.values())
    return whole / (whole - parts["softmax"] / 2)


EXERCISES = {
    "07.1": Exercise(
        "the fused order",
        (
            "One loop over the blocks is enough.",
            "Within a turn call all four parts for the same block b.",
        ),
        judge=_fused,
        slip=("        m.values(b)", "    for b in range(blocks):\n        m.values(b)"),
    ),
    "07.2": Exercise(
        "bytes of S at L = 8192, times smaller",
        (
            "L * L scores of 2 bytes. Write both numbers as a tuple.",
            "The tile has 48 * 128 scores of the same size.",
        ),
        expected=(2 * 8192**2, 8192**2 / (48 * 128)),
        within=1e-3,  # 10923 will do
    ),
    "07.3": Exercise(
        "gain of half a softmax",
        (
            "Add up all parts: the time before.",
            "The time after is the same sum less half of parts['softmax']. Divide before by after.",
        ),
        model=gain,
        cases=(
            ({"scores": 4.0, "softmax": 2.0, "values": 4.0},),
            ({"scores": 1.0, "softmax": 1.0},),
        ),
        slip=('parts["softmax"] / 2', 'parts["softmax"]'),
    ),
}
