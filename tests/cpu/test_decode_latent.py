"""A cache whose values are the first channels of its keys, as DeepSeek's absorbed attention has it:
against float64, the integer model and a cache that stores them twice.
"""

import numpy as np
import pytest
from daily import of_today
from decode_cases import relative
from oracles import draw, naive

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target

B, H, D, DV = 2, 16, 40, 24
TOLERANCE = {"float32": 2e-6, "bfloat16": 1e-2, "int8": 0.02}
BEST = target.available()[0]


def latent(dtype, **options):
    return KVCache(B, 1, D, 700, dtype, value_dim=DV, value_in_key=True, **options)


def check(cache, query, key, tolerance=None, **options):
    """Against attention in float64 over the tokens that were appended."""
    options = {"is_causal": True, **options}
    out, lse = cache.decode(query, return_lse=True)
    exact, exact_lse = naive(query, key, key[..., :DV], alignment="lower_right", **options)
    assert relative(out, exact) <= (tolerance or TOLERANCE[cache.dtype])
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-5, atol=3e-2)


def model(cache, b, query, splits):
    k, v = cache.quantized(b)
    s, length = k.data.shape[1], query.shape[2]
    np.testing.assert_array_equal(v.data, k.data[..., :DV])
    seen = np.arange(s)[None] <= np.arange(length)[:, None] + s - length
    q = reference.decode_query(query[b])
    return reference.integer_decode(q, k, v, query.shape[3] ** -0.5, seen, splits)[0]


SLOW = pytest.mark.slow
NO_AVX2 = pytest.mark.skipif("avx2" not in target.available(), reason="words of 16 bits: AVX2")


@pytest.mark.parametrize(
    ("dtype", "isa"),
    [
        ("int8", BEST),
        *of_today(
            [
                pytest.param("float32", BEST, marks=SLOW),
                *(pytest.param("bfloat16", isa, marks=SLOW) for isa in target.available()[:2]),
                pytest.param("int8", "avx2", marks=[SLOW, NO_AVX2]),
            ],
            2,
        ),
    ],
)
def test_every_feature(dtype, isa):
    key, query = draw((B, 1, 300, D)), draw((B, H, 1, D), 1)
    key[:, :, 3], key[:, :, 5, :DV] = 0, 0
    cache = latent(dtype, isa=isa, page_size=128)
    for n in (1, 130, 256, 300):
        cache.append(key[:, :, int(cache.lengths[0]) : n])
        check(cache, query, key[:, :, :n])
        for splits in (1, 2) if dtype == "int8" else ():
            for b in range(B):
                exact = model(cache, b, query, splits)
                np.testing.assert_array_equal(cache.decode(query, splits=splits)[b], exact)
    np.testing.assert_array_equal(cache.read(1)[1], cache.read(1)[0][..., :DV])
    copy = latent(dtype, isa=isa)
    copy.load_state(cache.state())
    assert "value0" not in cache.state()
    np.testing.assert_array_equal(copy.decode(query), cache.decode(query))
    cache.truncate([200, 140])
    cache.reset(1)
    cache.share(0, 1, 140)
    cache.append(key[:, :, 200:201], counts=[1, 0])
    cache.reorder([1, 0])
    lengths = [140, 201]
    shared = np.stack([key[0], key[0]])
    check(cache, query, shared, key_lengths=lengths)
    out = cache.step(query, key[:, :, 299:])
    np.testing.assert_array_equal(out, cache.decode(query))
    ring = latent(dtype, isa=isa, window=100, sinks=2)
    ring.append(key)
    kept = np.concatenate([key[:, :, :2], key[:, :, 200:]], 2)
    check(ring, query, kept)


def test_memory_is_half_and_small():
    twice = KVCache(1, 1, 576, 1024, "float32", value_dim=512)
    once = KVCache(1, 1, 576, 1024, "float32", value_dim=512, value_in_key=True)
    assert once.nbytes == 1024 * (576 + 1) * 4
    assert twice.nbytes == 1024 * (576 + 512 + 1) * 4


@SLOW
@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_the_sizes_of_deepseek(dtype):
    key, query = draw((1, 1, 150, 576)), draw((1, 128, 2, 576), 1)
    cache = KVCache(1, 1, 576, 300, dtype, value_dim=512, value_in_key=True)
    cache.append(key)
    out = cache.decode(query, softcap=20.0)
    exact, _ = naive(
        query, key, key[..., :512], is_causal=True, alignment="lower_right", softcap=20.0
    )
    assert relative(out, exact) < TOLERANCE[dtype]


@SLOW
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tokens_and_queries_that_are_not_finite(dtype):
    key, query = draw((B, 1, 140, D)), draw((B, H, 1, D), 1)
    key[0, 0, 7, 30] = np.inf  # behind the values: the token is bad for both products
    query[1, 3, 0, 0] = np.nan
    cache = latent(dtype)
    cache.append(key)
    out = cache.decode(query)
    assert np.isnan(out[0]).all()
    assert np.isnan(out[1, 3]).all()
    assert np.isfinite(np.delete(out[1], 3, 0)).all()
    huge = latent("float32")
    huge.append(key[1:].repeat(2, 0) * np.float32(1e28))
    check(huge, query[:1].repeat(2, 0) * np.float32(1e9), key[1:].repeat(2, 0) * np.float32(1e28))


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"value_dim": 41}, ArgumentError, "value_dim: got 41"),
        ({"smooth": True}, ArgumentError, "smooth: got True with value_in_key"),
        ({"dtype": "float16"}, UnsupportedError, "value_in_key: got True with dtype 'float16'"),
        ({"device": "cuda-emulator"}, UnsupportedError, "value_in_key: got True with device"),
    ],
)
def test_what_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        KVCache(B, 1, D, 700, **{"value_dim": DV, "value_in_key": True, **options})


def test_values_are_refused():
    cache = latent("int8")
    key = draw((B, 1, 3, D))
    with pytest.raises(ArgumentError, match="value: got ndarray with value_in_key"):
        cache.append(key, key[..., :DV])
    assert not cache.lengths.any()
