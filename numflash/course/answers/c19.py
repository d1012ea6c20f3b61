"""Chapter 19: decode on the GPU."""

from __future__ import annotations

from ..exercises import Exercise


def uploaded(heads: int, kv_heads: int, d: int) -> int:
    """Bytes of one token's float32 query, key and value."""
    return 4 * d * (heads + kv_heads + kv_heads)


def written(heads: int, splits: int, d: int) -> int:
    """Bytes of the parts: for each query head a row of d sums, a maximum and a sum."""
    return splits * (heads * d * 4 + 2 * heads * 4)


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
            "A part has a row for each query head of its KV head: d sums, one maximum and one row sum, all float32.",
            "There is a part for each KV head and split, so a row for each query head and split.",
        ),
        model=written,
        cases=((14, 3, 64), (14, 16, 64), (32, 4, 128)),
        slip=("(d + 2)", "d"),
    ),
}
