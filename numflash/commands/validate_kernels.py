"""The kernels' times of `numflash validate`, one thread each: beside the measured peaks, and beside the
cycles that llvm-mca's model gives their instructions on some AArch64 CPUs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import numflash

from ..cpu.study.exp2_benchmark import measure_clock
from ..jit import target
from ..jit.threads import limit
from ..measure import data
from ..measure.roofline import Roof
from ..measure.timing import best_time

F = np.float32
HEADS, LENGTH = 2, 2048
ROWS = 4  # query heads of a KV head in decoding
CACHE_BYTES = 2**27  # of a cache that is decoded: more than most CPUs' caches hold
PRODUCTS = {"INT8 attention": 2, "float32 attention": 2, "float32 gradient": 5}
CACHES = {"int8": "decoding, INT8 cache", "float32": "decoding, float32 cache"}


def draw(head_dim: int, count: int = 3) -> list[np.ndarray]:
    """Random arrays (1, HEADS, LENGTH, head_dim)."""
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, HEADS, LENGTH, head_dim), F) for _ in range(count)]


def seconds_of(call: Callable[[], Any], threads: int, budget: float) -> float:
    """The least time of a call within `budget` seconds."""
    with limit(threads):
        return best_time(call, budget)


def int8_call(head_dim: int) -> Callable[[], Any]:
    """INT8 attention of ready operands."""
    quantised = numflash.quantize_qkv(*draw(head_dim))
    return lambda: numflash.attention_int8(*quantised)


def float_call(head_dim: int) -> Callable[[], Any]:
    """float32 attention, packing included."""
    q, k, v = draw(head_dim)
    return lambda: numflash.attention(q, k, v)


def gradient_call(head_dim: int) -> Callable[[], Any]:
    """The gradient alone."""
    do, q, k, v = draw(head_dim, 4)
    out, lse = numflash.attention(q, k, v, return_lse=True)
    return lambda: numflash.attention_backward(do, q, k, v, out, lse)


CALLS = {
    "INT8 attention": int8_call,
    "float32 attention": float_call,
    "float32 gradient": gradient_call,
}


def operations(head_dim: int, products: int = 2) -> int:
    """Multiplications and additions of such a call."""
    return products * 2 * HEADS * LENGTH**2 * head_dim


def modelled(kernel: str, head_dim: int) -> float | None:
    """Cycles per score on this CPU by the stored model; None where it has none."""
    stored = json.loads(
        (Path(data.__file__).parent / "modelled_cycles.json").read_text(encoding="utf-8")
    )
    return stored.get(target.cpu_name(), {}).get(kernel, {}).get(str(head_dim))


def compute(kernel: str, head_dim: int, roof: Roof, clock: float, budget: float) -> dict[str, Any]:
    """A kernel that the pipes bound: its share of their peak, and cycles per score."""
    seconds = seconds_of(CALLS[kernel](head_dim), 1, budget)
    peak = roof.int8 if kernel.startswith("INT8") else roof.float32
    rate = operations(head_dim, PRODUCTS[kernel]) / seconds
    return {
        "check": "kernel",
        "kernel": kernel,
        "head_dim": head_dim,
        "seconds": seconds,
        "operations_per_second": rate,
        "share_of_peak": rate / peak,
        "cycles_per_score": seconds * clock / (HEADS * LENGTH**2),
        "modelled_cycles_per_score": modelled(kernel, head_dim),
        "ok": True,
    }


def decoding(dtype: str, head_dim: int, roof: Roof, clock: float, budget: float) -> dict[str, Any]:
    """Decoding with ROWS query heads of a KV head.

    The model: every byte of the cache is read once, or the cycles of its scores if these take longer.
    """
    tokens = CACHE_BYTES // (2 * HEADS * head_dim * np.dtype(dtype).itemsize)
    cache = numflash.KVCache(1, HEADS, head_dim, tokens, dtype)
    rng = np.random.default_rng(0)
    for _ in range(0, tokens, 1024):
        cache.append(*(rng.standard_normal((1, HEADS, 1024, head_dim), F) for _ in range(2)))
    query = rng.standard_normal((1, ROWS * HEADS, 1, head_dim), F)
    cycles = ROWS * HEADS * tokens * (modelled(CACHES[dtype], head_dim) or 0.0)
    seconds = seconds_of(partial(cache.decode, query), 1, budget)
    return {
        "check": "kernel",
        "kernel": CACHES[dtype],
        "head_dim": head_dim,
        "seconds": seconds,
        "bytes_per_second": cache.nbytes / seconds,
        "share_of_peak": cache.nbytes / seconds / roof.read,
        "modelled_seconds": max(cache.nbytes / roof.read, cycles / clock),
        "ok": True,
    }


def checks(quick: bool, roof: Roof, budget: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, record) of one kernel after the other."""
    clock = measure_clock()
    for kernel in ("INT8 attention",) if quick else CALLS:
        for head_dim in (128,) if quick else (64, 128):
            yield kernel, compute(kernel, head_dim, roof, clock, budget)
    for dtype in () if quick else CACHES:
        yield CACHES[dtype], decoding(dtype, 128, roof, clock, budget)


def row(x: dict[str, Any]) -> tuple[str, str]:
    """What the table says."""
    name = f"{x['kernel']}, one thread, D = {x['head_dim']}"
    if "bytes_per_second" in x:
        return name, (
            f"{x['bytes_per_second'] / 1e9:.1f} GB/s of the cache, {x['share_of_peak']:.0%} of the read bandwidth; "
            f"{x['seconds'] / x['modelled_seconds']:.2f} times the model"
        )
    model = x["modelled_cycles_per_score"]
    beside = f", {model:.2f} by the model" if model else ""
    return name, (
        f"{x['operations_per_second'] / 1e9:.0f} GOP/s, {x['share_of_peak']:.0%} of the peak; "
        f"{x['cycles_per_score']:.2f} cycles a score{beside}"
    )
