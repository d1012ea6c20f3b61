"""Chapter 08: variants of exp2 and P.V."""

from __future__ import annotations

from ..exercises import Exercise


def fewest_cycles(m: int, d: int) -> float:
    """Cycles per key of m rows and d channels on two pipes of 16 lanes."""
    return m * d / (2 * 16)


def columns_for_share(exp2_cycles: float, product_cycles: float, d: int, share: float) -> float:
    """Columns of V at which exp2 takes `share` of the product."""
    return d * exp2_cycles / (share * product_cycles)


EXERCISES = {
    "08.1": Exercise(
        "fewest cycles per key",
        (
            "How many multiply-adds does one key take: rows times channels.",
            "Two pipes of 16 float32 lanes do 32 of them in a cycle.",
        ),
        model=fewest_cycles,
        cases=((4, 64), (16, 64), (4, 128)),
        slip=("2 * 16", "16"),
    ),
    "08.2": Exercise(
        "two passes over fused",
        (
            "Bring both to one unit: the best fused kernel is printed with its GFLOP/s.",
            "Two passes reach 0.51 * 128 GFLOP/s.",
        ),
        expected=0.51 * 128 / 28.9,
        within=5e-3,
    ),
    "08.3": Exercise(
        "columns of V",
        (
            "The product takes product_cycles / d for each column of V.",
            "exp2_cycles = share * (cycles per column) * columns.",
        ),
        model=columns_for_share,
        cases=((1.19, 2.5, 64, 0.05), (0.5, 2.0, 128, 0.1)),
        within=5e-3,  # whole columns will do
        slip=("/ share", "* share"),
    ),
}
