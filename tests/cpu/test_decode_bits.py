"""INT8 decode has the bits of the integer model, in every split, on every instruction set, at any
number of threads.
"""

import numpy as np
import pytest
from daily import of_today
from decode_cases import B, D, G, H, expected, filled, relative, tokens
from oracles import draw
from test_decode_int4 import assert_bits as int4_bits

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.jit import target
from numflash.jit.threads import limit, most
from numflash.numerics import fixedpoint, quantization


def model(cache, b, query, splits, seen=None):
    q = reference.decode_query(query[b])
    k, v = cache.quantized(b)
    if seen is None:
        length = query.shape[2]
        s = k.data.shape[1]
        seen = np.arange(s)[None] <= np.arange(length)[:, None] + s - length
    return reference.integer_decode(q, k, v, query.shape[3] ** -0.5, seen, splits)


def assert_bits(cache, query, splits, **options):
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    for b in range(query.shape[0]):
        exact, m, l = model(cache, b, query, splits, **options)
        np.testing.assert_array_equal(out[b], exact)
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )


ISAS = target.available()


@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=[] if isa == ISAS[0] else pytest.mark.slow) for isa in ISAS],
)
def test_int8_has_the_bits_of_the_model(isa):
    for n in (1, 3, 127, 128, 129, 300):
        cache, _, _ = filled(n, n, isa=isa)
        for splits in (1, 2, 3, 7):
            assert_bits(cache, draw((B, H, 1, D), 9), splits)


HEIGHTS = [(isa, rows) for isa in ISAS for rows in range(1, 9)]
# of the best instruction set: one loop for both planes, and, in the slow tests, two
FEW = HEIGHTS[1], HEIGHTS[6]


@pytest.mark.parametrize(
    ("isa", "rows"),
    [
        FEW[0],
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (FEW[1], *of_today([x for x in HEIGHTS if x not in FEW], 5))
        ),
    ],
)
def test_bits_of_every_number_of_rows(isa, rows):
    """Whole vectors of keys and columns, and some besides, by tiles of every height."""
    for dtype, bits in (("int8", assert_bits), ("int4", int4_bits)):
        cache = KVCache(1, 2, 64, 400, dtype, value_dim=80, isa=isa)
        cache.append(draw((1, 2, 300, 64)), draw((1, 2, 300, 80), 1))
        bits(cache, draw((1, 2 * rows, 1, 64), 9), 2)


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e18])
def test_int8_bits_at_extreme_scales(scale):
    cache = KVCache(B, G, D, 700)
    key, value = tokens(150)
    value[:, :, ::3] *= 1e-6  # values of very different size in one block
    key[:, :, 5] = 0
    cache.append(key * scale, value * scale)
    assert_bits(cache, draw((B, H, 1, D), 9) * scale, 2)


def test_int8_bits_of_the_largest_values():
    cache = KVCache(B, G, D, 700)
    key, value = tokens(300)
    value *= 3e38 / np.abs(value).max()
    cache.append(key, value)
    for splits in (1, 2):
        assert_bits(cache, draw((B, H, 1, D), 9), splits)
    query = draw((B, H, 1, D), 9)
    assert relative(cache.decode(query).astype(np.float64), expected(query, key, value)[0]) < 0.03


@pytest.mark.slow
def test_int8_bits_with_several_new_tokens_and_odd_channels():
    cache = KVCache(B, G, 5, 700, value_dim=7)
    cache.append(draw((B, G, 131, 5)), draw((B, G, 131, 7), 1))
    for splits in (1, 2):
        assert_bits(cache, draw((B, H, 2, 5), 9), splits)


def test_int8_storage_is_the_quantisation():
    cache, key, value = filled(133)
    for b in range(B):
        k, v = cache.quantized(b)
        for found, x in ((k, key[b]), (v, value[b])):
            wanted = quantization.quantize(x)
            np.testing.assert_array_equal(found.data, wanted.data)
            np.testing.assert_array_equal(found.scale, wanted.scale)


def test_threads_and_splits():
    key = draw((1, G, 3000, 64))
    value = draw((1, G, 3000, 64), 1)
    cache = KVCache(1, G, 64, 3000)
    cache.append(key, value)
    query = draw((1, H, 1, 64), 2)
    found = []
    for threads in range(1, most() + 1):
        with limit(threads):
            found.append(cache.decode(query, splits=4))
    assert all((x == found[0]).all() for x in found)
    exact = expected(query, key, value)[0]
    for splits in (None, 1, 2, 5, 24, 100):
        assert relative(cache.decode(query, splits=splits), exact) < 0.03
        assert relative(cache.decode(query, splits=splits), found[0]) < 1e-6


@pytest.mark.skipif("amx_int8" not in ISAS, reason="needs AMX")
def test_matrix_tiles_have_the_bits_of_the_model():
    """Whole tiles of channels, and columns beyond them; blocks in part; hidden keys."""
    cache = KVCache(1, G, 64, 400, value_dim=80)
    key, value = draw((1, G, 300, 64)), draw((1, G, 300, 80), 1)
    value[:, :, ::3] *= 1e-3
    cache.append(key, value)
    assert cache._open().layout.takes_matrix(8) and not cache._open().layout.takes_matrix(1)
    for splits in (1, 2):
        assert_bits(cache, draw((1, 4 * G, 2, 64), 9), splits)
