"""Equal calls of `KVCache.decode` skip the checks of the first one: they still attend to what the
cache holds now, and refuse what they must.
"""

import numpy as np
import pytest

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError, NumflashError

HEADS, KV_HEADS, D = 4, 2, 32
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


def exact(query, keys, values, scale=D**-0.5):
    """Attention in float64 of one new token (B, H, 1, D) over lists of (Hkv, tokens, D)."""
    out = np.zeros(query.shape)
    for b, (key, value) in enumerate(zip(keys, values, strict=True)):
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            s = key[g].astype(np.float64) @ query[b, h, 0] * scale
            p = np.exp(s - s.max())
            out[b, h, 0] = p @ value[g] / p.sum()
    return out


@pytest.mark.parametrize("page_size", [None, 128])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("int8", 0.06)])
def test_equal_calls_attend_to_what_the_cache_holds_now(dtype, atol, page_size):
    cache = numflash.KVCache(2, KV_HEADS, D, 256, dtype, page_size)
    query = normal(2, HEADS, 1, D)
    held = [[normal(KV_HEADS, 0, D)] * 2 for _ in range(2)]  # keys, values of each sequence

    def append(n):
        new = [normal(2, KV_HEADS, n, D) for _ in range(2)]
        cache.append(*new)
        for x, rows in zip(held, new, strict=True):
            x[:] = [np.concatenate([old, r], 1) for old, r in zip(x, rows, strict=True)]

    def check(scale=None):
        for _ in range(2):  # the second is an equal call
            wanted = exact(query, *held, scale or D**-0.5)
            np.testing.assert_allclose(cache.decode(query, scale=scale), wanted, atol=atol)

    append(100)
    check()
    check(scale=0.5)
    append(1)
    check()
    append(60)  # more splits, and another page
    check()
    cache.reorder([1, 0])
    held[:] = [x[::-1] for x in held]
    check()
    cache.truncate([90, 130])
    held[:] = [[x[0][:, :90], x[1][:, :130]] for x in held]
    check()
    cache.reserve(700)
    check()
    append(300)
    check()


def test_equal_calls_refuse_what_the_first_would():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    cache.append(normal(1, KV_HEADS, 3, D), normal(1, KV_HEADS, 3, D))
    query = normal(1, HEADS, 1, D)
    for _ in range(2):
        cache.decode(query)
    with pytest.raises(ArgumentError, match="scale: got inf"):
        cache.decode(query, scale=np.inf)
    with pytest.raises(ArgumentError, match="splits: got 0"):
        cache.decode(query, splits=0)
    with pytest.raises(ArgumentTypeError, match="return_lse: got 1"):
        cache.decode(query, return_lse=1)
    with pytest.raises(ArgumentError, match="query: got shape"):
        cache.decode(query[:, :, :, :-1])
    cache.close()
    with pytest.raises(NumflashError, match="closed"):
        cache.decode(query)


def test_equal_calls_do_rows_again_that_float32_cannot_hold():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    key, value = normal(1, KV_HEADS, 5, D), normal(1, KV_HEADS, 5, D)
    key[0, 0, 2] = 1e30
    cache.append(key, value)
    query = normal(1, HEADS, 1, D)
    query[0, 0] = 1e20  # its score of that key is beyond float32
    wanted = exact(query, key, value)
    for _ in range(3):
        np.testing.assert_allclose(cache.decode(query), wanted, atol=2e-6)


def test_more_calls_than_are_kept():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    key, value = normal(1, KV_HEADS, 5, D), normal(1, KV_HEADS, 5, D)
    cache.append(key, value)
    query = normal(1, HEADS, 1, D)
    for n in range(150):
        scale = 0.1 + n / 1000
        wanted = exact(query, key, value, scale)
        np.testing.assert_allclose(cache.decode(query, scale=scale), wanted, atol=2e-6)
