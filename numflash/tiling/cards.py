"""Which tilings the CUDA kernels use, and what else was measured on a card."""

from __future__ import annotations

from .named import TILINGS, tiling
from .sizes import Tiling

CUDA_NARROW = 64
# time of a score in Hopper's tiles of (rows, keys), without and with a band, where one in tiles of
# 128 x 128 takes 1 (an H200, float16, 64 to 2048 rows)
CUDA_SCORE_TIME = {(192, 128): (0.82, 0.88), (128, 176): (0.96, 1.0)}
# channels from which on two blocks of a Hopper card share keys and values (a cluster). At 128, where
# FlashAttention-3 does so too, blocks by themselves are as fast or faster (H200, 256 to 8192 keys)
CUDA_SHARED_KEYS = 256
# few query rows over many keys: several blocks share the keys of a tile of rows (`cuda.launch_split`)
CUDA_PARTS = 64  # at most: a warp that merges them holds the log-sum-exps of two in each lane
CUDA_TILES_TO_SPLIT = 8  # fewer tiles of keys are not split: one takes 1 us, merging parts takes 3
CUDA_RESIDENT = 3  # blocks that a multiprocessor is given; with 4 some wait for others (an H200)
CUDA_WIDE = 128  # head sizes beyond have tilings of their own, named "-wide"


def cuda_tilings(
    arch: str,
    dtype: str,
    head_dim: int,
    value_dim: int | None = None,
    plain: bool = False,
    band: bool = False,
) -> list[Tiling]:
    """The tilings that the CUDA kernels may use for a problem, the one for many rows and keys first.

    Architectures from sm_86 on use sm_80's; sm_90a has its own for 16-bit numbers and bytes, larger
    ones for problems that are `plain` (no option touches the scores) or, of 16-bit numbers, have no
    band.
    """
    family = arch if f"{arch}-{dtype}" in TILINGS else "sm_80"
    widest = max(head_dim, value_dim or 0)
    if widest > CUDA_WIDE:
        kinds = ["-wide"]
    elif plain and widest <= CUDA_NARROW and f"{family}-{dtype}-narrow" in TILINGS:
        kinds = ["-narrow", ""]
    else:
        kinds = ["-full", ""] if plain and not band else [""]
    found = [x for x in kinds if f"{family}-{dtype}{x}" in TILINGS]
    return [tiling(family, dtype + x) for x in found or [""]]


def cuda_tiling(
    arch: str,
    dtype: str,
    head_dim: int,
    value_dim: int | None = None,
    plain: bool = False,
    band: bool = False,
) -> Tiling:
    """The first of `cuda_tilings`."""
    return cuda_tilings(arch, dtype, head_dim, value_dim, plain, band)[0]


def gradient_tiling(gradients: str, dtype: str, head_dim: int) -> Tiling:
    """The tiling of a pass of sm_90a's gradient kernel: "q", or "kv", for head sizes up to 128."""
    return tiling("sm_90a", f"{dtype}-{gradients}{'-narrow' if head_dim <= CUDA_NARROW else ''}")
