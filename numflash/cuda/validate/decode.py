"""The decode part of `python -m numflash.cuda.validate`.

Caches on the card against the emulator, then times against its memory.

A step of a long cache is timed on the card alone (attention of one new token, its query resident)
and divided into the bytes of keys, values and scales, which it reads once; beside it the rate of a
device-to-device copy of the keys, reads and writes counted. A short step is timed whole, as one
graph, by the host's clock: token up, append, attention, result down.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from typing import Any, cast

import numpy as np

from ...cache.kvcache import KVCache
from ...cache.settings import INTEGERS
from ...errors import DriverError, UnsupportedError
from ..device import Device, median_seconds
from . import expected
from .decode_cases import CASES, draw, results

# of the timings
LONG = {
    "batch": 16,
    "heads": 32,
    "kv_heads": 8,
    "length": 32768,
    "d": 128,
    "chunk": 2048,
}


def timed_caches(dtype: str) -> list[tuple]:
    """Cases whose kernels are those of the timings."""
    long: tuple = (f"{dtype} long", dtype, LONG["d"], 300, 1, 8, {})
    return [long, (f"{dtype} short", dtype, 64, 300, 1, 4, {})]


def refused(error: UnsupportedError) -> dict[str, Any]:
    """What a row says of a case without a kernel (no failure) or that the driver refused (a
    failure).
    """
    failed = isinstance(error, DriverError)
    return {"error" if failed else "skipped": str(error), "passed": not failed}


def check(device: Device, cases: Iterable = CASES) -> Iterator[dict[str, Any]]:
    """One row per case: equal bits with the emulator for integers, else errors against it."""
    for case in cases:
        name, dtype = case[:2]
        row: dict[str, Any] = {"case": f"decode {name}", "arch": device.arch}
        try:
            emulator = expected.get("decode", case, device.arch)
            found = list(zip(results(case, "cuda"), emulator, strict=True))
        except UnsupportedError as problem:
            yield row | refused(problem)
            continue
        if dtype in INTEGERS:
            equal = all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in found)
            yield row | {"equal_bits": equal, "passed": equal}
        else:
            error = max(float(np.abs(a - b).max()) for a, b in found)
            # weights are rounded to 8 or 11 bits on both sides, sums are taken in another order
            limit = 2e-2 if dtype == "bfloat16" else 3e-3
            yield row | {"largest_difference": error, "passed": error <= limit}


def long_cache(
    device: Device,
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    d: int,
    chunk: int,
) -> dict[str, Any]:
    """One new token of every sequence over a long cache, filled by `chunk` tokens at a time, and a
    copy of as many bytes.
    """
    cache = KVCache(batch, kv_heads, d, length, dtype, device="cuda")
    key = draw((batch, kv_heads, chunk, d), 0)
    value = draw((batch, kv_heads, chunk, d), 1)
    query = draw((batch, heads, 1, d), 2)
    for _ in range(0, length, chunk):
        cache.append(key, value)
    cache.decode(query)
    memory = cache._open()
    plan, c, _ = cast(Any, memory.calls.take)(query.shape, None, None, memory.longest)
    card = cast(Any, memory.layout).card
    store = cast(Any, memory.store)
    seconds = median_seconds(
        device, lambda: plan.launch(plan.q, c, store, plan.out), stream=card.stream
    )
    read = store.nbytes
    other = card.zeros(store.k.shape, store.k.dtype)
    copying = median_seconds(device, lambda: card.copy(other, store.k), stream=card.stream)
    rate = read / seconds
    peak = 2 * store.k.nbytes / copying
    cache.close()
    return {
        "kernel": f"decode {dtype}",
        "B": batch,
        "H": heads,
        "Hkv": kv_heads,
        "S": length,
        "D": d,
        "splits": plan.splits,
        "seconds": seconds,
        "bytes": read,
        "bytes_per_second": rate,
        "copy_bytes_per_second": peak,
        "share_of_copy": rate / peak,
    }


def short_step(dtype: str) -> dict[str, Any]:
    """A whole step of one sequence as a graph: median seconds on the host."""
    heads, kv_heads, length, d = 14, 2, 1024, 64
    steps = 200
    cache = KVCache(1, kv_heads, d, length + steps, dtype, device="cuda")
    cache.append(
        draw((1, kv_heads, length - steps // 2, d), 0),
        draw((1, kv_heads, length - steps // 2, d), 1),
    )
    token = draw((1, kv_heads, 1, d), 2)
    query = draw((1, heads, 1, d), 3)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        cache.step(query, token, token, splits=4)
        times.append(time.perf_counter() - start)
    cache.close()
    return {
        "kernel": f"decode {dtype} step in a graph",
        "B": 1,
        "H": heads,
        "Hkv": kv_heads,
        "S": length,
        "D": d,
        "splits": 4,
        "seconds": statistics.median(times[10:]),
    }


def timings(device: Device, dtype: str) -> Iterator[dict[str, Any]]:
    """The long cache, then the short step."""
    yield long_cache(device, dtype, **LONG)
    yield short_step(dtype)
