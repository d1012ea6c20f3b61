"""The shared tiling parameters.

Which block sizes every kernel uses, on every device, and what they cost in cache.

A `Tiling` is data. Kernels read their sizes from it, the command line explains it, tests check its
arithmetic. The key block is common to CPU and CUDA: softmax weights are rounded once per row and
key block, so equal key blocks give equal bits (INT8 pipeline, step 1).

The tilings of the A64FX notes (docs/sources.md) are among the named ones, with their working sets
added up: the fused kernel needs 58.75 KiB where the summary says 46 KB.

`using` changes a tiling for a block of code; `in_use` is the one that the next call takes. May import
`jit` and `errors`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ArgumentError
from .choice import chosen, chosen_float, in_use, using
from .named import TILINGS
from .override import CHOSEN
from .sizes import (
    CACHES,
    CUDA_HEAD_DIMS,
    CUDA_NARROW,
    CUDA_PARTS,
    CUDA_RESIDENT,
    CUDA_SCORE_TIME,
    CUDA_SHARED_KEYS,
    CUDA_TILES_TO_SPLIT,
    CUDA_WIDE,
    KEY_BLOCK,
    MAX_HEAD_DIM,
    SHARED_MEMORY,
    SWIZZLED_HEAD_DIMS,
    Buffer,
    Caches,
    Tiling,
    padded,
)
from .store import Store

__all__ = [
    "CACHES",
    "CHOSEN",
    "CUDA_HEAD_DIMS",
    "CUDA_NARROW",
    "CUDA_PARTS",
    "CUDA_RESIDENT",
    "CUDA_SCORE_TIME",
    "CUDA_SHARED_KEYS",
    "CUDA_TILES_TO_SPLIT",
    "CUDA_WIDE",
    "KEY_BLOCK",
    "MAX_HEAD_DIM",
    "SHARED_MEMORY",
    "SWIZZLED_HEAD_DIMS",
    "TILINGS",
    "Buffer",
    "Caches",
    "Store",
    "Tiling",
    "chosen",
    "chosen_float",
    "cuda_tiling",
    "cuda_tilings",
    "few_parts",
    "gradient_tiling",
    "in_use",
    "padded",
    "split_count",
    "tiling",
    "using",
    "workers",
]


def tiling(isa: str, dtype: str = "int8", **changes: Any) -> Tiling:
    """The tiling that the kernels for `isa` and `dtype` use.

    Keyword arguments replace single sizes, checked again.
    """
    name = f"{isa}-{dtype}"
    if name not in TILINGS:
        raise ArgumentError(
            f"tiling: no tiling for isa {isa!r} and dtype {dtype!r}; allowed: {', '.join(sorted(TILINGS))}"
        )
    return replace(TILINGS[name], **changes) if changes else TILINGS[name]


# Multiplications from which on a thread of its own pays: 0.05 to 0.1 ms. A thread that waits for
# work starts in 0.007 ms (GNU OpenMP, Zen 5). After 20 ms without a call it sleeps and starts in 0.05
# ms: the smallest problems then take as long on two threads as on one.
THREAD_WORK = {"float32": 4 << 20, "bfloat16": 8 << 20, "int8": 8 << 20, "few rows": 1 << 20}


def workers(kind: str, multiplications: int) -> int:
    """The most threads that a problem of so many multiplications uses.

    Each thread gets at least `THREAD_WORK` multiplications: with fewer, another thread does not
    make the call faster.
    """
    return max(1, multiplications // THREAD_WORK[kind])


# Rows of a query head up to which float attention reads keys and values where they are; parts of at least so
# many keys, up to so many tasks. A register tile has six rows of one head: with one row of each of 1 to 16
# heads of a group the other way takes 0.3 to 0.7 of the time, with two 0.7 to 1, with four as long (Zen 4).
FEW_LENGTH, FEW_KEYS, FEW_TASKS = 2, 256, 8


def few_parts(length: int, heads: int, keys: int) -> int:
    """How many parts of the keys the kernel of few rows takes, of `length` rows and so many KV heads; 0 for
    more rows, which register tiles compute.

    As many for every number of threads: the parts are put together in order.
    """
    if length > FEW_LENGTH:
        return 0
    return max(1, min(keys // FEW_KEYS, -(-FEW_TASKS // heads)))


def split_count(units: int, blocks: int, workers: int) -> int:
    """How many splits of `blocks` key blocks keep `workers` busy with `units` query tiles.

    FlashAttention 2's rule.

    The smallest number whose last wave is filled at least 85 % as well as the best number's; counts
    that do not change the blocks of a split are left out. 14 heads on the T4's 40 multiprocessors
    (80 workers, blocks of 256 keys) at 1024 keys give 4, as in the T4 architecture
    (docs/sources.md).
    """
    fill = {}
    for n in range(1, min(blocks, 128) + 1):
        if n == 1 or -(-blocks // n) != -(-blocks // (n - 1)):
            waves = units * n / workers
            fill[n] = waves / -(-units * n // workers)
    return next((n for n in fill if fill[n] >= 0.85 * max(fill.values())), 1)


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
