"""An INT8 cache whose rows are rotated before they are rounded: it stores the rounded rotated rows,
and has the bits of `reference.rotated_decode`.
"""

import numpy as np
import pytest
from daily import isas_of_today, of_today
from decode_cases import B, D, G, H, expected, filled, relative, tokens
from oracles import draw

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.jit import target
from numflash.measure.data import minilm
from numflash.numerics import fixedpoint, quantization
from numflash.numerics.rotation import WHOLE, rotate, shared_block

ISAS = target.available()
SLOW = pytest.mark.slow


def assert_bits(cache, query, splits, most=WHOLE):
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    length, scale = query.shape[2], query.shape[3] ** -0.5
    for b in range(query.shape[0]):
        k, v = cache.quantized(b)
        s = k.data.shape[1]
        seen = np.arange(s) <= np.arange(length)[:, None] + s - length
        wanted, m, l = reference.rotated_decode(query[b], k, v, scale, seen, splits, most=most)
        np.testing.assert_array_equal(out[b], wanted)
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )


@SLOW
@pytest.mark.parametrize("isa", isas_of_today(ISAS))
def test_bits_of_the_model(isa):
    for n in (1, 129, 300):
        cache, _, _ = filled(n, n, rotate=True, isa=isa)
        for splits in (1, 3):
            assert_bits(cache, draw((B, H, 1, D), 9), splits)
    cache = KVCache(1, G, 96, 700, value_dim=7, rotate=True, isa=isa)
    cache.append(draw((1, G, 131, 96)), draw((1, G, 131, 7), 1))
    for splits in (1, 2):
        assert_bits(cache, draw((1, H, 2, 96), 9), splits)


@SLOW
@pytest.mark.parametrize(
    ("isa", "d", "dv", "most"),
    of_today(
        [(isa, *sizes) for sizes in ((40, 24, 8), (96, 80, 16), (48, 7, 1)) for isa in ISAS[:2]], 2
    ),
)
def test_bits_of_latents(isa, d, dv, most):
    """Values in the keys: matrices that rotate a key and its first channels alike."""
    assert shared_block(d, dv) == most
    cache = KVCache(B, 1, d, 700, value_dim=dv, value_in_key=True, rotate=True, isa=isa)
    key, query = draw((B, 1, 300, d)), draw((B, 16, 1, d), 1)
    key[..., 3] *= 20
    cache.append(key)
    for splits in (1, 2):
        assert_bits(cache, query, splits, most)
    exact = expected(query, key, key[..., :dv])[0]  # one channel is most of it
    assert relative(cache.decode(query), exact) < 0.05
    np.testing.assert_array_equal(cache.read(1)[1], cache.read(1)[0][..., :dv])


def test_storage_is_the_quantisation_of_rotated_rows():
    cache = KVCache(B, G, D, 700, rotate=True)
    key, value = tokens(133)
    key[:, :, 5], value[:, :, 9] = 0, 0
    key[0, 0, 7], value[0, 1, 8] = 1e-35, 3e38
    for part in (slice(0, 100), slice(100, 101), slice(101, 133)):
        cache.append(key[:, :, part], value[:, :, part])
    for b in range(B):
        for found, x in zip(cache.quantized(b), (key[b], value[b]), strict=True):
            wanted = quantization.quantize(rotate(x))
            np.testing.assert_array_equal(found.data, wanted.data)
            np.testing.assert_array_equal(found.scale, wanted.scale)
        for x, y in zip(cache.read(b), cache.quantized(b), strict=True):
            np.testing.assert_array_equal(x, rotate(y.dequantize()))


@SLOW
def test_sequences_rings_and_channel_means():
    key, value = tokens(500)
    key[..., 3] += 30
    query = draw((B, H, 1, D), 9)
    ring = KVCache(B, G, D, 64, window=100, sinks=4, rotate=True, smooth=True)
    for n in range(0, 500, 50):
        ring.append(key[:, :, n : n + 50], value[:, :, n : n + 50])
    held = [*range(4), *range(400, 500)]
    exact = expected(query, key[:, :, held], value[:, :, held])[0]
    assert relative(ring.decode(query), exact) < 0.02
    paged = KVCache(B, G, D, 700, page_size=128, rotate=True, smooth=True)
    paged.append(key[:, :, :200], value[:, :, :200])
    paged.truncate([133, 200])
    paged.reorder([1, 0])
    other = KVCache(B, G, D, 700, rotate=True, smooth=True)
    other.load_state(paged.copy().state())
    for cache in (paged, other):
        cache.append(key[[1, 0], :, 200:210], value[[1, 0], :, 200:210])
    np.testing.assert_array_equal(other.decode(query), paged.decode(query))
    wanted = expected(query[:1], key[1:, :, :210], value[1:, :, :210])[0]
    assert relative(paged.decode(query)[:1], wanted) < 0.02


@SLOW
def test_what_is_not_finite():
    cache, key, value = filled(130, rotate=True)
    cache.reset()
    value[:], key[0, 0, 100, 3] = 0, np.nan
    cache.append(key, value)
    out = cache.decode(draw((B, H, 1, D), 9))
    assert np.isnan(out[0, :2]).all() and not out[0, 2:].any() and not out[1].any()
    assert np.isnan(cache.read(0)[0][0, 100]).all()


@SLOW
def test_real_activations():
    """Keys of MiniLM-L6 with a channel 10 times as large as it is; and as they are."""
    query, key, value = (x[None].astype(np.float32) for x in minilm())

    def error(key, rotated):
        cache = KVCache(1, key.shape[1], key.shape[3], key.shape[2], rotate=rotated)
        cache.append(key, value)
        rows = np.ascontiguousarray(query[:, :, -64:])
        return relative(cache.decode(rows), expected(rows, key, value)[0])

    assert error(key, True) < 1.1 * error(key, False)
    key[..., 5] *= 10
    assert error(key, True) < 0.7 * error(key, False)


def test_arguments():
    with pytest.raises(ArgumentTypeError, match="rotate"):
        KVCache(1, 1, 16, 64, rotate=1)
    with pytest.raises(ArgumentError, match=r"rotate: got True .*'int8' or 'int4'"):
        KVCache(1, 1, 16, 64, "float32", rotate=True)
    assert KVCache(1, 1, 16, 64, "int4").rotate and not KVCache(1, 1, 16, 64).rotate
    plain, turned = KVCache(1, 1, 16, 64), KVCache(1, 1, 16, 64, rotate=True)
    for given, cache in ((plain, turned), (turned, plain)):
        with pytest.raises(ArgumentError, match=r"state: .*rotate=.*allowed"):
            cache.load_state(given.state())
    old = plain.state()
    del old["rotate"], old["window"], old["sinks"]  # of a version that stored none of these
    plain.load_state(old)
