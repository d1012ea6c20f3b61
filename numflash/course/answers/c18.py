"""Chapter 18: INT8 on tensor cores."""

from __future__ import annotations

import numpy as np

from ..exercises import Exercise


def longest(limit: int) -> int:
    """Longest block of keys whose sum of 255 * 127 stays within a limit, a power of two."""
    return max(2**n for n in range(40) if 255 * 127 * 2**n <= limit)


def _key_at(p: int) -> int:
    from ...cuda.emulator import tensor

    registers, place = tensor.operand_layout("a", 32, 4)
    lane_a = place[0] // (4 * registers)
    lane_c = np.tile(tensor.accumulator_layout()[0] // 4, 4)
    order = np.zeros(32, int)
    for owner in range(4):
        order[np.nonzero(lane_a == owner)[0]] = np.nonzero(lane_c == owner)[0]
    return int(order[p])


EXERCISES = {
    "18.1": Exercise(
        "key at a place",
        (
            "A lane holds 4 neighbouring places of A, but 2 neighbouring columns of each tile of C.",
            "Within 16 places: lane t = p // 4, its e-th byte (p % 4) is column 2 t + e % 2 of tile "
            "e // 2, and a tile is 8 keys.",
        ),
        model=_key_at,
        cases=((0,), (2,), (5,), (15,), (22,)),
        slip=("e % 2", "e // 2"),
    ),
    "18.2": Exercise(
        "longest key block",
        (
            "Each key adds at most 255 * 127. How many fit below 2**24 (float32) and 2**31 (int32)?",
            "Round down to a power of two; write (in float32, in int32).",
        ),
        expected=(longest(2**24), longest(2**31 - 1)),
    ),
}
