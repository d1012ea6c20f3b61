"""Decode of one token over a KV cache, against PyTorch's grouped SDPA and the measured read
bandwidth, in the same run.

Checked against float64 before it is timed. `extra_info` holds the bytes per second of cache read,
their share of the read bandwidth, the ratio to PyTorch where it is installed, and the time of
appending one token, also as a share of the decode.
"""

import functools
from importlib.util import find_spec

import numpy as np
import pytest

from numflash.cache.kvcache import KVCache
from numflash.measure import roofline
from numflash.measure.contenders import on_threads
from numflash.measure.timing import median_time

CASES = [
    (32, 8, 32768, 128),
    (32, 8, 4096, 128),
    (14, 2, 4096, 64),
    (14, 2, 256, 64),
]  # query heads, KV heads, length, D
CHECKED = 2  # query heads held against float64


@functools.cache
def memory():
    return np.ones((1024, roofline.MEMORY_BYTES // 4096), np.float32)


def share_of_bandwidth(run, nbytes, threads, rounds=15):
    """Bytes per second of `run` against those of a plain sum, by turns.

    Both move by a factor of two within minutes.
    """
    x = memory()
    out = np.empty(threads, np.float32)
    shares = []
    for _ in range(rounds):
        read = median_time(lambda: roofline.read_memory(x, threads, out), 1, 0)
        shares.append(nbytes / median_time(run, 3, 0) / (x.nbytes / read))
    return float(np.median(shares))


@functools.lru_cache(1)
def arrays(heads, kv_heads, length, d):
    rng = np.random.default_rng(length)
    return (
        rng.standard_normal((1, heads, 1, d), np.float32),
        *(rng.standard_normal((1, kv_heads, length, d), np.float32) for _ in range(2)),
    )


def torch_seconds(q, k, v):
    import torch

    tensors = [torch.from_numpy(x) for x in (q, k, v)]
    with torch.inference_mode():
        return median_time(
            lambda: torch.nn.functional.scaled_dot_product_attention(*tensors, enable_gqa=True), 7
        )


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize("case", CASES, ids=str)
def bench_decode(benchmark, case, dtype, threads):
    q, k, v = arrays(*case)
    cache = KVCache(1, case[1], case[3], case[2] + 64, dtype)
    cache.append(k, v)
    out = np.empty_like(q)
    with on_threads(threads):
        cache.decode(q, out=out)
        s = (q[0, :CHECKED, 0].astype(np.float64) @ k[0, 0].T.astype(np.float64)) * case[3] ** -0.5
        p = np.exp(s - s.max(1, keepdims=True))
        exact = p @ v[0, 0] / p.sum(1, keepdims=True)
        assert (
            np.abs(out[0, :CHECKED, 0] - exact).sum()
            <= (0.03 if dtype == "int8" else 1e-5) * np.abs(exact).sum()
        )
        benchmark.group = f"decode {case}, {threads} threads"
        benchmark.pedantic(functools.partial(cache.decode, q, out=out), rounds=50, warmup_rounds=2)
        if benchmark.stats:
            held = cache.nbytes * case[2] / cache.page_size  # the cache is a little longer
            share = share_of_bandwidth(functools.partial(cache.decode, q, out=out), held, threads)
        token = np.ascontiguousarray(k[:, :, :1]), np.ascontiguousarray(v[:, :, :1])
        append = median_time(
            lambda: cache.append(*token), 50, 0
        )  # no more: the cache has 64 slots left
        if benchmark.stats:
            median = benchmark.stats.stats.median
            benchmark.extra_info.update(
                bytes_per_second=held / median,
                share_of_read_bandwidth=share,
                append_seconds=append,
                append_share_of_decode=append / median,
            )
            if find_spec("torch"):
                benchmark.extra_info["times_torch"] = torch_seconds(q, k, v) / median
