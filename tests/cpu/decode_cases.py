"""What the tests of decode share: small caches, their tokens, and attention in float64."""

import numpy as np
from oracles import draw, naive

from numflash.cache.kvcache import KVCache

B = 2
H = 4
G = 2
D = 16
TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3, "int8": 0.02}


def tokens(n, seed=0, b=B, d=D):
    return draw((b, G, n, d), seed), draw((b, G, n, d), seed + 1)


def filled(n, seed=0, **options):
    cache = KVCache(B, G, D, 700, **options)
    key, value = tokens(n, seed)
    cache.append(key, value)
    return cache, key, value


def relative(out, exact):
    return np.abs(out - exact).sum() / max(np.abs(exact).sum(), 1e-30)


def expected(query, key, value, **options):
    return naive(query, key, value, is_causal=True, alignment="lower_right", **options)
