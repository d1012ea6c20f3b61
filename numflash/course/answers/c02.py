"""Chapter 02: tiling and caches."""

from __future__ import annotations

from typing import Any

from ..exercises import Exercise


def _working_set(block_q: int, block_k: int, d: int) -> int:
    return 4 * (2 * block_q * d + 2 * block_k * d + block_q * block_k + 2 * block_q)


def largest_block_q(block_k: int, d: int, cache: int) -> int:
    """The largest multiple of 6 whose working set fits."""
    return max(q for q in range(6, 10000, 6) if _working_set(q, block_k, d) <= cache)


def _tile_kib() -> float:
    from ...tiling import TILINGS

    return sum(TILINGS["a64fx-fused-48x64"].working_set(128).values()) / 1024


def _ridge(peak: Any) -> float:
    return peak.float32 / peak.read


EXERCISES = {
    "02.1": Exercise(
        "KiB of the 48 x 64 tile",
        (
            "Six parts are listed; add all six.",
            "The state has 48 rows of 4 numbers of 4 bytes: divide its bytes by 1024.",
        ),
        expected=_tile_kib,
        within=0.01,
    ),
    "02.2": Exercise(
        "the largest tile that fits",
        (
            "`working_set` has terms that grow with block_q and terms that do not. Separate them.",
            "The cache minus the fixed part, divided by the bytes of one more row; then round down "
            "to a multiple of 6.",
        ),
        model=largest_block_q,
        cases=((64, 128, 131072), (64, 64, 49152), (64, 128, 127360)),  # the last: all of the cache
        slip=("// 6 * 6", ""),
    ),
    "02.3": Exercise(
        "operations per byte where the roofs meet",
        (
            "Below the ridge a kernel's speed is i * bandwidth, above it is the peak. "
            "Where are the two equal?",
        ),
        expected=_ridge,
        within=0.01,
    ),
}
