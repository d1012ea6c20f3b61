"""A cache of 4 bits: it stores what `int4.quantize` gives, has the bits of `int4.decode`, and does
all that a cache of 8 bits does.
"""

import numpy as np
import pytest
from daily import of_today
from decode_cases import B, D, G, H, expected, filled, relative, tokens
from oracles import draw

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.jit import target
from numflash.measure.data import minilm
from numflash.numerics import fixedpoint
from numflash.numerics.rotation import rotate
from numflash.reference import int4

ISAS = target.available()


def model(cache, b, query, splits=1, change=None):
    k, v = cache.quantized(b)
    length, s = query.shape[2], k.data.shape[1]
    seen = np.arange(s) <= np.arange(length)[:, None] + s - length
    return int4.decode(query[b], k, v, query.shape[3] ** -0.5, seen, splits, change)


def assert_bits(cache, query, splits):
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    for b in range(query.shape[0]):
        wanted, m, l = model(cache, b, query, splits)
        np.testing.assert_array_equal(out[b], wanted)
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )


@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=[] if isa == ISAS[0] else pytest.mark.slow) for isa in ISAS],
)
def test_bits_of_the_model(isa):
    for n in (1, 3, 127, 129, 300):
        cache, _, _ = filled(n, n, dtype="int4", isa=isa)
        for splits in (1, 3):
            assert_bits(cache, draw((B, H, 1, D), 9), splits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isa", "d", "dv"),
    of_today([(isa, *sizes) for isa in ISAS for sizes in ((5, 7), (33, 24), (96, 80))], 2),
)
def test_bits_of_other_head_sizes(isa, d, dv):
    cache = KVCache(1, G, d, 700, "int4", value_dim=dv, isa=isa)
    cache.append(draw((1, G, 131, d)), draw((1, G, 131, dv), 1))
    cache.append(draw((1, G, 2, d), 2), draw((1, G, 2, dv), 3))
    for splits in (1, 2):
        assert_bits(cache, draw((1, H, 2, d), 9), splits)


@pytest.mark.slow
@pytest.mark.skipif("amx_int8" not in ISAS, reason="needs AMX")
def test_bits_of_matrix_tiles():
    cache = KVCache(1, G, 128, 400, "int4", value_dim=208)
    key, value = draw((1, G, 300, 128)), draw((1, G, 300, 208), 1)
    value[:, :, ::3] *= 1e-3
    cache.append(key, value)
    assert cache._open().layout.takes_matrix(8)
    for splits in (1, 2):
        assert_bits(cache, draw((1, 4 * G, 2, 128), 9), splits)


def test_storage_is_the_quantisation():
    cache = KVCache(B, G, D, 700, "int4")
    key, value = tokens(133)
    key[:, :, 5], value[:, :, 9] = 0, 0
    key[0, 0, 7], value[0, 1, 8] = 1e-35, 3e38
    for part in (slice(0, 100), slice(100, 101), slice(101, 133)):
        cache.append(key[:, :, part], value[:, :, part])
    for b in range(B):
        for found, x in zip(cache.quantized(b), (key[b], value[b]), strict=True):
            wanted = int4.quantize(x)
            np.testing.assert_array_equal(found.data, wanted.data)
            np.testing.assert_array_equal(found.scale, wanted.scale)
        stored = cache.read(b)
        for x, y in zip(stored, cache.quantized(b), strict=True):
            np.testing.assert_array_equal(x, rotate(y.dequantize()))
    assert KVCache(1, 1, 128, 700, "int4").nbytes == KVCache(1, 1, 128, 700).nbytes * 136 // 264


@pytest.mark.parametrize(
    "isa",
    [pytest.param(isa, marks=[] if isa == ISAS[0] else pytest.mark.slow) for isa in ISAS],
)
def test_the_query_has_eight_bits(isa):
    """A query of 0 to 127 steps that rotating leaves as it is: scores are whole, as they are added up."""
    d = 3  # the largest power of two that divides it is 1: nothing is rotated
    cache = KVCache(1, 1, d, 128, "int4", isa=isa)
    key = np.float32([[15, -15, 15], [-15, 15, 15]]).reshape(1, 1, 2, d) / 15
    cache.append(key, np.float32([[1, -1, 1], [-1, 1, 1]]).reshape(1, 1, 2, d))
    query, whole = (
        np.float32([x, x]).reshape(1, 2, 1, d) for x in ([127, 126.6, 0.4], [127, 127, 0])
    )
    found = cache.decode(query, scale=0.01)
    np.testing.assert_array_equal(found, cache.decode(whole, scale=0.01))
    np.testing.assert_allclose(found[0, :, 0], [[0, 0, 1]] * 2, atol=1e-4)


def test_zeros_and_what_is_not_finite():
    cache, key, value = filled(130, dtype="int4")
    assert np.isfinite(cache.decode(draw((B, H, 1, D), 9))).all()
    cache.reset()
    value[:], key[0, 0, 100, 3] = 0, np.nan
    cache.append(key, value)
    out = cache.decode(draw((B, H, 1, D), 9))
    assert np.isnan(out[0, :2]).all() and not out[0, 2:].any() and not out[1].any()


def test_changes_of_sequences_and_state():
    """Pages, shared and copied; cut in the middle of a pair of steps; from state to state."""
    cache = KVCache(2, G, D, 600, "int4", 128)
    plain = KVCache(2, G, D, 600, "int4")
    key, value = tokens(300)
    for held in (cache, plain):
        held.append(key[:, :, :250], value[:, :, :250])
        held.truncate([133, 250])
        held.append(key[:, :, 250:255], value[:, :, 250:255])
    cache.reorder([1, 0])
    cache.repeat(2)
    other = KVCache(4, G, D, 600, "int4")
    other.load_state(cache.copy().state())
    for held in (cache, other):
        held.append(key[[1, 1, 0, 0], :, 255:], value[[1, 1, 0, 0], :, 255:])
    plain.append(key[:, :, 255:], value[:, :, 255:])
    query = draw((2, H, 1, D), 9)
    wanted = plain.decode(query)
    for held in (cache, other):
        np.testing.assert_array_equal(held.decode(query[[1, 1, 0, 0]]), wanted[[1, 1, 0, 0]])
    state = plain.state()
    assert state["key0"].shape == (G, 183, D // 2) and state["key0"].dtype == np.uint8


def test_a_ring():
    cache = KVCache(B, G, D, 64, "int4", window=100, sinks=4)
    key, value = tokens(500)
    for n in range(0, 500, 50):
        cache.append(key[:, :, n : n + 50], value[:, :, n : n + 50])
    query = draw((B, H, 1, D), 9)
    held = [*range(4), *range(400, 500)]
    exact = expected(query, key[:, :, held], value[:, :, held])[0]
    assert relative(cache.decode(query), exact) < 0.2


def test_smooth():
    """A bias of 30 spreads in one channel is taken away before keys are rotated and rounded."""
    cache, key, value = filled(300, dtype="int4", smooth=True)
    biased = KVCache(B, G, D, 700, "int4", smooth=True)
    biased.append(key + np.float32(30) * (np.arange(D) == 3), value)
    query = draw((B, H, 1, D), 9)
    assert relative(biased.decode(query), cache.decode(query)) < 0.1
    assert relative(cache.decode(query), expected(query, key, value)[0]) < 0.2


@pytest.mark.slow
def test_bits_with_changed_scores():
    cache, _, _ = filled(300, dtype="int4")
    query, slopes = draw((B, H, 2, D), 9), np.linspace(0.1, 1, H, dtype=np.float32)
    found = cache.decode(query, softcap=20.0, alibi_slopes=slopes)
    away = np.abs(np.arange(300) - np.arange(298, 300)[:, None])
    for b in range(B):
        change = reference.decode_change(20.0, slopes, None, away)
        wanted, _, _ = model(cache, b, query, cache._open().layout.splits(B, 4, 1, 3), change)
        np.testing.assert_allclose(found[b], wanted, rtol=1e-5, atol=1e-6)


def test_real_activations():
    query, key, value = (x.astype(np.float32) for x in minilm())
    seen = np.ones((64, key.shape[1]), bool)
    k, v = int4.quantize(key), int4.quantize(value)
    out, _, _ = int4.decode(query[:, -64:], k, v, query.shape[2] ** -0.5, seen)
    s = query[:, -64:].astype(np.float64) @ key.swapaxes(1, 2) * query.shape[2] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    wanted = p @ value / p.sum(-1, keepdims=True)
    assert np.abs(out - wanted).sum() / np.abs(wanted).sum() < 0.09
