"""The problems of the decode part of a validation: caches, their tokens, what they return."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...cache.kvcache import KVCache

B = 2
H = 14
G = 2
# name, dtype, head size, tokens, new tokens, splits, options
CASES: tuple[tuple[str, str, int, int, int, int, dict[str, Any]], ...] = (
    *(
        (f"{dtype} {n} tokens, D={d}", dtype, d, n, 1, 1 if n < 257 else 3, {})
        for dtype in ("int8", "int4", "float16", "bfloat16")
        for d, n in ((64, 1), (64, 17), (128, 128), (128, 129), (64, 300), (256, 300))
    ),
    *(
        (f"{dtype} pages of 16", dtype, 64, 300, 1, 3, {"page_size": 16})
        for dtype in ("int8", "int4", "float16")
    ),
    *(
        (f"{dtype} three new tokens", dtype, 64, 140, 3, 2, {})
        for dtype in ("int8", "int4", "float16")
    ),
    *(
        (f"{dtype} ring", dtype, 64, 300, 1, 1, {"window": 20, "sinks": 3})
        for dtype in ("int8", "int4", "float16")
    ),
    ("int8 smoothed", "int8", 64, 100, 1, 1, {"smooth": True}),
    ("int8 rotated", "int8", 80, 300, 1, 3, {"smooth": True, "rotate": True}),
    ("int4 smoothed", "int4", 80, 300, 1, 3, {"smooth": True}),
    *(
        (f"float16 unified maximum {phi}", "float16", 64, 100, 1, 1, {"unified_max": phi})
        for phi in (0.0, 40.0)
    ),
)


def draw(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Standard normal float32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def results(case: tuple, device: str) -> list[np.ndarray]:
    """What a cache returns for a case: the last token's `step`, `decode` with LSE, its keys; last how
    many rows of `step` and of `decode` the host has computed again.
    """
    _, dtype, d, n, new, splits, options = case
    key = draw((B, G, n + new, d), 0)
    value = draw((B, G, n + new, d), 1)
    query = draw((B, H, new, d), 2)
    cache = KVCache(B, G, d, n + 2 * new, dtype, device=device, **options)
    cache.append(key[:, :, :n], value[:, :, :n])
    token = [np.ascontiguousarray(x[:, :, n:]) for x in (key, value)]
    found = [cache.step(query, *token, splits=splits)]
    again = [redone(cache, query.shape, splits)]
    found += cache.decode(query, splits=splits, return_lse=True)
    again.append(redone(cache, query.shape, splits))
    found += [cache.read(0)[0], np.array(again, np.int32)]
    cache.close()
    return found


def redone(cache: KVCache, shape: tuple[int, ...], splits: int | None = None) -> int:
    """How many rows of the last call with such a query were not finite on the card.

    The host has computed them again, so a kernel that gives nothing but NaN would pass for right.
    """
    memory = cache._open()
    plan, _, free = memory.calls.take(shape, None, splits, memory.longest)
    free.append(plan)  # the one that was given back last
    return len(plan.to_redo())
