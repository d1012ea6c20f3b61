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
from ...interop.arguments import EMULATED
from ..compile import Key
from ..device import Device, median_seconds
from . import expected
from .compare import distance
from .decode_cases import B, G, H, draw, redone, results
from .steps import Row, Step

# of the timings
LONG = {
    "batch": 16,
    "heads": 32,
    "kv_heads": 8,
    "length": 32768,
    "d": 128,
    "chunk": 2048,
}


SHORT = {"heads": 14, "kv_heads": 2, "length": 1024, "d": 64, "steps": 200}
# relative errors against float64 on standard normal numbers
LIMITS = {"float16": 2e-3, "bfloat16": 1.5e-2, "int8": 3e-2, "int4": 0.25}
LONG_LIMIT = 30.0  # seconds: a gigabyte of tokens is drawn, and appended in pieces


def kernels_of(case: tuple, arch: str, group: int = H // G) -> set[Key]:
    """The kernels of a cache on a card of this architecture, one new token and the case's number of
    them, `group` query heads for each KV head.
    """
    _, dtype, d, n, new, splits, options = case
    found: set[Key] = set()

    def note(factory: Any, constants: dict[str, Any], *_: Any) -> None:
        found.add((factory, arch, tuple(sorted(constants.items()))))

    known = arch if arch in EMULATED else "sm_80"  # Blackwell runs what sm_80 does
    place = f"cuda-emulator:{known}"
    cache = KVCache(B, G, d, n + 2 * new, dtype, device=place, **options)
    memory: Any = cache._memory
    memory.layout.card.run = note
    tokens, query = np.zeros((B, G, n, d), np.float32), np.zeros((B, G * group, new, d), np.float32)
    cache.append(tokens, tokens)
    token = tokens[:, :, :1].repeat(new, 2)
    cache.step(query, token, token, splits=splits)
    cache.decode(query, splits=splits)
    cache.close()
    return found


def checks(cases: Iterable, arch: str) -> Iterator[Step]:
    """A step per cache."""
    for case in cases:
        yield _check(case, arch)


def _check(case: tuple, arch: str) -> Step:
    def run(device: Device) -> Iterator[Row]:
        emulator = expected.get("decode", case, arch)
        yield compared(case[1], results(case, "cuda"), emulator)

    return Step(f"decode {case[0]}", lambda: kernels_of(case, arch), run)


def compared(dtype: str, card: list[np.ndarray], emulator: list[np.ndarray]) -> Row:
    """Equal bits with the emulator for integers, else errors against it; as many rows done again."""
    again = [x[-1].tolist() for x in (card, emulator)]
    found = list(zip(card[:-1], emulator[:-1], strict=True))
    row: Row = {"computed_again": again[0]}
    if dtype in INTEGERS:
        equal = all(np.array_equal(a.view(np.int32), b.view(np.int32)) for a, b in found)
        return row | {"equal_bits": equal, "passed": equal and again[0] == again[1]}
    error = max(float(np.abs(a - b).max()) for a, b in found)
    # weights are rounded to 8 or 11 bits on both sides, sums are taken in another order
    limit = 2e-2 if dtype == "bfloat16" else 3e-3
    passed = error <= limit and again[0] == again[1]
    return row | {"largest_difference": error, "passed": passed}


def exact(query: np.ndarray, key: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Attention of rows over the keys and values of one head, in float64."""
    scores = query.astype(np.float64) @ key.T.astype(np.float64) / np.sqrt(key.shape[1])
    p = np.exp(scores - scores.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True) @ value.astype(np.float64)


def wrong(dtype: str, again: int, error: float) -> Row:
    """What a row says of a result: how far it is off, and whether it is too far to be timed."""
    row: Row = {"error_of_rows": error}
    if again:
        return row | {"error": f"its result is wrong: {again} rows are not finite"}
    if not error <= LIMITS[dtype]:
        return row | {"error": f"its result is wrong: error {error:.2e} of some rows"}
    return row


def long_cache(
    device: Device,
    dtype: str,
    batch: int,
    heads: int,
    kv_heads: int,
    length: int,
    d: int,
    chunk: int,
) -> Row:
    """One new token of every sequence over a long cache, filled by `chunk` tokens at a time, and a
    copy of as many bytes.
    """
    cache = KVCache(batch, kv_heads, d, length, dtype, device="cuda")
    key = draw((batch, kv_heads, chunk, d), 0)
    value = draw((batch, kv_heads, chunk, d), 1)
    query = draw((batch, heads, 1, d), 2)
    for _ in range(0, length, chunk):
        cache.append(key, value)
    out = cache.decode(query)
    # keys that are there several times share their weight: the same as if they were there once
    group = heads // kv_heads
    right = exact(query[-1, -group:, 0], key[-1, -1], value[-1, -1])
    error = distance(out[-1, -group:, 0], right)
    row: Row = {
        "kernel": f"decode {dtype}",
        "B": batch,
        "H": heads,
        "Hkv": kv_heads,
        "S": length,
        "D": d,
        **wrong(dtype, redone(cache, query.shape), error),
    }
    if "error" not in row:
        row |= _rates(device, cache, query.shape)
    cache.close()
    return row


def _rates(device: Device, cache: KVCache, shape: tuple[int, ...]) -> Row:
    memory = cache._open()
    plan, c, _ = cast(Any, memory.calls.take)(shape, None, None, memory.longest)
    card = cast(Any, memory.layout).card
    store = cast(Any, memory.store)
    seconds = median_seconds(
        device, lambda: plan.launch(plan.q, c, store, plan.out), stream=card.stream
    )
    read = store.nbytes
    other = card.zeros(store.k.shape, store.k.dtype)
    copying = median_seconds(device, lambda: card.copy(other, store.k), stream=card.stream)
    rate, peak = read / seconds, 2 * store.k.nbytes / copying
    return {
        "splits": plan.splits,
        "seconds": seconds,
        "bytes": read,
        "bytes_per_second": rate,
        "copy_bytes_per_second": peak,
        "share_of_copy": rate / peak,
    }


def short_step(dtype: str, heads: int, kv_heads: int, length: int, d: int, steps: int) -> Row:
    """A whole step of one sequence as a graph: median seconds on the host."""
    heads, kv_heads, length, d = 14, 2, 1024, 64
    steps = 200
    cache = KVCache(1, kv_heads, d, length + steps, dtype, device="cuda")
    before = length - steps // 2
    key, value = draw((1, kv_heads, before, d), 0), draw((1, kv_heads, before, d), 1)
    cache.append(key, value)
    token = draw((1, kv_heads, 1, d), 2)
    query = draw((1, heads, 1, d), 3)
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        out = cache.step(query, token, token, splits=4)
        times.append(time.perf_counter() - start)
    group, again = heads // kv_heads, token[0, -1].repeat(steps, 0)
    right = exact(
        query[0, -group:, 0],
        np.concatenate((key[0, -1], again)),
        np.concatenate((value[0, -1], again)),
    )
    error = distance(out[0, -group:, 0], right)
    row: Row = {
        "kernel": f"decode {dtype} step in a graph",
        "B": 1,
        "H": heads,
        "Hkv": kv_heads,
        "S": length,
        "D": d,
        "splits": 4,
        **wrong(dtype, redone(cache, query.shape, 4), error),
    }
    cache.close()
    return row if "error" in row else row | {"seconds": statistics.median(times[10:])}


def timings(dtype: str, arch: str) -> Iterator[Step]:
    """The long cache, then the short step."""
    # small caches with the kernels of these; how often a long one is split is up to the card
    group = LONG["heads"] // LONG["kv_heads"]
    long: list[tuple] = [("long", dtype, LONG["d"], 300, 1, splits, {}) for splits in (1, 8)]
    short: tuple = ("short", dtype, SHORT["d"], 300, 1, 4, {})
    yield Step(
        f"decode {dtype}, long",
        lambda: set().union(*(kernels_of(case, arch, group) for case in long)),
        lambda device: [long_cache(device, dtype, **LONG)],
        LONG_LIMIT,
    )
    yield Step(
        f"decode {dtype}, step in a graph",
        lambda: kernels_of(short, arch),
        lambda device: [short_step(dtype, **SHORT)],
    )
