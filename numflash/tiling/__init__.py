"""The shared tiling parameters.

Which block sizes every kernel uses, on every device, and what they cost in cache.

A `Tiling` is data. Kernels read their sizes from it, the command line explains it, tests check its
arithmetic. The key block is common to CPU and CUDA: softmax weights are rounded once per row and
key block, so equal key blocks give equal bits (INT8 pipeline, step 1).

`sizes` says what a tiling is, `named` lists them (those of the A64FX notes, docs/sources.md, among
them), `rules` which other sizes are allowed. `using` changes a tiling for a block of code; `in_use` is
the one that the next call takes. `threads` and `cards` have the other numbers that were measured.
"""

from __future__ import annotations

from .caches import CACHES, SHARED_MEMORY, Caches
from .cards import (
    CUDA_NARROW,
    CUDA_PARTS,
    CUDA_RESIDENT,
    CUDA_SCORE_TIME,
    CUDA_SHARED_KEYS,
    CUDA_TILES_TO_SPLIT,
    CUDA_WIDE,
    cuda_tiling,
    cuda_tilings,
    gradient_tiling,
)
from .choice import chosen, chosen_float, in_use, using
from .named import TILINGS, tiling
from .override import CHOSEN
from .plan_cache import PlanCache
from .sizes import (
    CUDA_HEAD_DIMS,
    KEY_BLOCK,
    MAX_HEAD_DIM,
    SWIZZLED_HEAD_DIMS,
    Buffer,
    Tiling,
    padded,
)
from .threads import few_gradient_parts, few_parts, split_count, workers

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
    "PlanCache",
    "Tiling",
    "chosen",
    "chosen_float",
    "cuda_tiling",
    "cuda_tilings",
    "few_gradient_parts",
    "few_parts",
    "gradient_tiling",
    "in_use",
    "padded",
    "split_count",
    "tiling",
    "using",
    "workers",
]
