"""Chapter 14: the tensor core's fragments."""

from __future__ import annotations

import numpy as np

from ..exercises import Exercise


def element(lane: int, r: int) -> tuple[int, int]:
    """Row and first column of A in register r of a lane."""
    held, register = _owners()
    rows, columns = np.nonzero((held == lane) & (register == r))
    return int(rows[0]), int(columns.min())


def register_of(tile: int, lower: int) -> int:
    """The register of A that a pair of C becomes."""
    return int(_owners()[1][5 // 4 + 8 * lower, 8 * tile + 2 * (5 & 3)])


def _owners() -> tuple[np.ndarray, np.ndarray]:
    from ...cuda.emulator import tensor

    registers, place = tensor.operand_layout("a", 16, 2)
    return place // (2 * registers), place // 2 % registers


EXERCISES = {
    "14.1": Exercise(
        "element of A",
        (
            "Start with register 0: lanes 0 to 3 share row 0, lanes 4 to 7 row 1. Two columns each.",
            "Registers 1 and 3 are 8 rows below, registers 2 and 3 are 8 columns to the right.",
        ),
        model=element,
        cases=((0, 0), (5, 1), (17, 2), (31, 3)),
        slip=("8 * (r % 2)", "8 * (r // 2)"),
    ),
    "14.2": Exercise(
        "register of A",
        (
            "Tile 1 is the right half of A: registers 2 and 3.",
            "Within a half the lower rows are the odd register.",
        ),
        model=register_of,
        cases=((0, 0), (0, 1), (1, 0), (1, 1)),
        slip=("2 * tile + lower", "tile + 2 * lower"),
    ),
}
