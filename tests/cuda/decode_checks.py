"""Caches in the emulator, and the comparison of what they decode with the integer model."""

import numpy as np
from oracles import draw, naive

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.numerics import fixedpoint

B = 2
H = 4
G = 2
D = 64
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "int8": 0.03}


def tokens(n, seed=0, b=B, d=D):
    return draw((b, G, n, d), seed), draw((b, G, n, d), seed + 1)


def new(dtype="int8", length=400, b=B, d=D, **options):
    return KVCache(b, G, d, length, dtype, device="cuda-emulator", **options)


def filled(n, dtype="int8", seed=0, **options):
    cache = new(dtype, **options)
    key, value = tokens(n, seed, options.get("b", B))
    cache.append(key, value)
    return cache, key, value


def reports(cache):
    return cache.emulator.reports


def relative(out, exact):
    return np.abs(out - exact).sum() / max(np.abs(exact).sum(), 1e-30)


def expected(query, key, value, **options):
    return naive(query, key, value, is_causal=True, alignment="lower_right", **options)


def assert_bits(cache, query, splits, seen=None):
    """Output and LSE of every sequence are the integer model's over what the cache stores."""
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    assert reports(cache)[-1].shared_conflicts == 0
    for b in range(query.shape[0]):
        k, v = cache.quantized(b)
        length = query.shape[2]
        s = k.data.shape[1]
        sees = (
            np.arange(s)[None] <= np.arange(length)[:, None] + s - length if seen is None else seen
        )
        exact, m, l = reference.integer_decode(
            reference.decode_query(query[b]), k, v, query.shape[3] ** -0.5, sees, splits
        )
        np.testing.assert_array_equal(out[b].view(np.int32), exact.view(np.int32))
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )
