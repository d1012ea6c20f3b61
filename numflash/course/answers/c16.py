"""Chapter 16: FlashAttention-2."""

from __future__ import annotations

from ..exercises import Exercise


def products(queries: int, keys: int, d: int) -> int:
    """m16n8k16 products of attention."""
    flop = 2 * queries * keys * d
    return 2 * (flop // 4096)


def bytes_per_product(rows: int) -> float:
    """Bytes of K and V that a warp of `rows` queries reads per product."""
    return (2 * 64 * 64 * 2) / products(rows, 64, 64)


EXERCISES = {
    "16.1": Exercise(
        "products",
        (
            "One product is 16 queries x 8 keys x 16 channels of Q.K^T. P.V has as many.",
            "Divide each dimension by its own 16, 8 or 16 and multiply.",
        ),
        model=products,
        cases=((128, 128, 64), (16, 64, 128), (512, 512, 64)),
        slip=("scores + outputs", "scores"),
    ),
    "16.2": Exercise(
        "bytes per product",
        (
            "A warp reads one tile of K and one of V: 2 * 64 * 64 numbers of 2 bytes.",
            "Divide by the number of products of `rows` x 64 with 64 channels (exercise 1).",
        ),
        model=bytes_per_product,
        cases=((16,), (32,), (64,)),
        slip=("(2 * (rows", "((rows"),
    ),
}
