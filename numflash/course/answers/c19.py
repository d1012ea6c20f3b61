"""Chapter 19: decode on the GPU."""

from __future__ import annotations

from ..exercises import Exercise


def uploaded(heads: int, kv_heads: int, d: int) -> int:
    """Bytes of one token's float32 query, key and value."""
    return 4 * d * (heads + kv_heads + kv_heads)


def written(kv_heads: int, splits: int, d: int) -> int:
    """Bytes of the parts: 16 rows of d sums, a maximum and a sum each."""
    return kv_heads * splits * (16 * d * 4 + 2 * 16 * 4)


EXERCISES = {
    "19.1": Exercise(
        "bytes up per step",
        (
            "One new token brings a query for each head, a key and a value for each KV head.",
            "All in float32: 4 bytes for each of d numbers.",
        ),
        model=uploaded,
        cases=((14, 2, 64), (32, 8, 128)),
        slip=("2 * kv_heads", "kv_heads"),
    ),
    "19.2": Exercise(
        "bytes of the parts",
        (
            "A part has 16 rows. Each has d sums, one maximum and one row sum, all float32.",
            "There is a part for each KV head and split.",
        ),
        model=written,
        cases=((2, 3, 64), (2, 16, 64), (8, 4, 128)),
        slip=("(d + 2)", "d"),
    ),
}
