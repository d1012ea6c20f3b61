"""Decode with a soft cap, ALiBi, sinks and masks of the new tokens.

Float64 for floats, the integer model for INT8.
"""

import numpy as np
import pytest
from decode_cases import TOLERANCE, B, D, G, H, filled, relative, tokens
from oracles import draw, naive

from numflash import reference
from numflash.cache.decoding import cap_shift
from numflash.cache.exact import positions
from numflash.cache.kvcache import KVCache
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.jit import target

SLOPES = np.array([0.5, 0.25, 0.03, 2.0], np.float32)
SINKS = np.array([-1.0, 0.0, 2.0, 5.0], np.float32)
TREE = np.array(
    [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]], bool
)  # 0 -> 1; 0 -> 2 -> 3
CASES = {
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sinks": SINKS},
    "tree": {"mask": TREE},
    "all": {"softcap": 3.0, "alibi_slopes": SLOPES, "sinks": SINKS, "mask": TREE},
}


def of_every_isa():
    first, *others = target.available()
    return [first, *(pytest.param(isa, marks=pytest.mark.slow) for isa in others)]


def oracle(query, key, value, mask=None, window=None, **options):
    n = query.shape[2]
    s = key.shape[2]
    seen = np.arange(s)[None] <= np.arange(n)[:, None] + s - n
    if window:
        seen &= np.arange(s)[None] > np.arange(n)[:, None] + s - n - window
    if mask is not None:
        seen[:, s - n :] &= mask
    options = {**options, "alignment": "lower_right"}
    return naive(query, key, value, seen, **options)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("case", CASES)
def test_against_float64(dtype, case):
    options = CASES[case]
    for n in (4, 140, 300):
        cache, key, value = filled(n, dtype=dtype, page_size=128 if n == 300 else None)
        query = draw((B, H, 4, D), 5)
        out, lse = cache.decode(query, splits=2, return_lse=True, **options)
        exact, exact_lse = oracle(query, key, value, **options)
        assert relative(out, exact) <= (2e-5 if dtype == "float32" else 0.03)
        np.testing.assert_allclose(lse, exact_lse, atol=0.03 if dtype == "int8" else 3e-4)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_in_a_ring(dtype):
    cache = KVCache(B, G, D, 1, dtype, window=100)
    key, value = tokens(300)
    query = draw((B, H, 4, D), 5)
    for n in (290, 300):
        cache.append(*(x[:, :, 0 if n == 290 else 290 : n].copy() for x in (key, value)))
        out = cache.decode(query, **CASES["all"])
        exact, _ = oracle(query, key[:, :, :n], value[:, :, :n], window=100, **CASES["all"])
        assert relative(out, exact) <= (2e-5 if dtype == "float32" else 0.03)


@pytest.mark.parametrize("isa", of_every_isa())
@pytest.mark.parametrize(
    ("smooth", "splits", "softcap", "slopes", "mask"),
    [
        (False, 1, 3.0, SLOPES, TREE),
        (True, 3, 3.0, SLOPES, TREE),
        (True, 1, 3.0, None, None),  # from here on whole blocks are changed in one pass
        (False, 3, 0.0, SLOPES, None),
        (True, 1, 3.0, SLOPES * (1, 0, 1, 1), None),
    ],
)
def test_int8_has_the_bits_of_the_model(isa, smooth, splits, softcap, slopes, mask):
    cache, _, _ = filled(300, 3, smooth=smooth, isa=isa)
    query = draw((B, H, 4, D), 9)
    out = cache.decode(query, splits=splits, softcap=softcap, alibi_slopes=slopes, mask=mask)
    seen = np.arange(300)[None] <= np.arange(4)[:, None] + 296
    away = np.abs(np.arange(300)[None] - np.arange(4)[:, None] - 296)
    if mask is not None:
        seen[:, 296:] &= mask
    shift = (
        cap_shift(query, cache._open().offset, D**-0.5, softcap)
        if smooth
        else np.zeros((B, H, 4), np.float32)
    )
    for b in range(B):
        change = reference.decode_change(softcap, slopes, shift[b], away)
        q = reference.decode_query(query[b])
        k, v = cache.quantized(b)
        exact, _, _ = reference.integer_decode(q, k, v, D**-0.5, seen, splits, change)
        np.testing.assert_array_equal(out[b], exact)


def test_a_token_that_is_not_finite_spoils_the_rows_that_attend_to_it():
    cache, key, value = filled(256)
    key[0, 1, 40], value[1, 0, 200] = np.nan, np.inf
    cache.reset()
    cache.append(key, value)
    out = cache.decode(draw((B, H, 4, D), 1), softcap=3.0)
    spoiled = np.isnan(out).any((2, 3)).reshape(B, G, -1)
    np.testing.assert_array_equal(spoiled.all(2), [[False, True], [True, False]])
    np.testing.assert_array_equal(spoiled.any(2), spoiled.all(2))


def test_a_masked_token_that_is_not_finite_is_not_attended_to():
    for dtype in ("float32", "int8"):
        cache, _, _ = filled(130, dtype=dtype)
        key, value = tokens(4, 3)
        value[:, :, 2] = np.nan
        cache.append(key, value)
        out = cache.decode(draw((B, H, 4, D), 1), mask=TREE)
        assert np.isfinite(out[:, :, :2]).all() and np.isnan(out[:, :, 2:]).all()


def test_a_query_that_is_not_finite_and_attends_to_nothing():
    """The mask hides all that its first row could attend to; the second one attends to a token."""
    for dtype in ("float32", "int8"):
        cache = filled(2, dtype=dtype)[0]
        query = draw((B, H, 2, D), 1)
        query[:, :, :, 3] = np.nan
        out, lse = cache.decode(query, mask=np.tri(2, k=-1, dtype=bool), return_lse=True)
        assert not out[:, :, 0].any() and np.isneginf(lse[:, :, 0]).all()
        assert np.isnan(out[:, :, 1]).all() and np.isnan(lse[:, :, 1]).all()


def test_scores_beyond_float32_are_computed_again():
    cache, key, value = filled(20, dtype="float32")
    query = draw((B, H, 4, D), 5) * np.float32(1e37)
    out = cache.decode(query, softcap=2.0, mask=TREE)
    exact, _ = oracle(query, key, value, softcap=2.0, mask=TREE)
    assert relative(out, exact) < 2e-5


@pytest.mark.slow
def test_rows_without_keys_and_16_bits():
    cache = KVCache(1, G, D, 300, "bfloat16")
    cache.append(*(x[:1] for x in tokens(2)))
    out = cache.decode(draw((1, H, 4, D), 2), mask=TREE, softcap=4.0)
    assert not out[:, :, :2].any() and out[:, :, 2:].any()
    cache, key, value = filled(140, dtype="bfloat16")
    query = draw((B, H, 4, D), 5)
    out = cache.decode(query, **CASES["all"])
    assert relative(out, oracle(query, key, value, **CASES["all"])[0]) <= TOLERANCE["bfloat16"]


def test_bad_options():
    cache, _, _ = filled(20)
    query = draw((B, H, 4, D))
    for options, error in (
        ({"softcap": -1.0}, ArgumentError),
        ({"softcap": np.inf}, ArgumentError),
        ({"softcap": "x"}, ArgumentTypeError),
        ({"alibi_slopes": SLOPES[:2]}, ArgumentError),
        ({"alibi_slopes": SLOPES * np.nan}, ArgumentError),
        ({"sinks": SINKS[None]}, ArgumentError),
        ({"mask": TREE[:2]}, ArgumentError),
        ({"mask": TREE.astype(float)}, ArgumentTypeError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            cache.decode(query, **options)


def test_positions_of_a_ring_are_the_kernels():
    """`token_in` of the kernels against `positions`."""
    from numflash.cpu.decode.changes import token_in

    for length in (5, 30, 63):
        held = positions(length, min(length, 24), 4, 20)
        assert [token_in.py_func(j, length, 4, 20) for j in range(held.size)] == held.tolist()


def test_a_call_has_its_own_options_whatever_the_last_one_had():
    rng = np.random.default_rng(13)
    k, v = (rng.standard_normal((1, 2, 50, 32), np.float32) for _ in "kv")
    q = rng.standard_normal((1, 4, 4, 32), np.float32)

    def filled():
        cache = KVCache(1, 2, 32, 50, "int8")
        cache.append(k, v)
        return cache

    calls = [
        {"softcap": 2.0}, {"softcap": 3.0}, {}, {"softcap": 3.0}, {"alibi_slopes": np.ones(4)},
        {"score_mod": lambda s, *at: s * 2}, {"score_mod": lambda s, *at: s * 2, "softcap": 2.0},
        {"softcap": 2.0}, {"softcap": 2.0, "alibi_slopes": np.ones(4)}, {"softcap": 2.0},
        {"alibi_slopes": SLOPES}, {"alibi_slopes": 2 * SLOPES}, {"alibi_slopes": SLOPES}, {},
        {"alibi_slopes": SLOPES, "softcap": 2.0}, {"mask": np.zeros((4, 4), bool)},
        {"alibi_slopes": SLOPES}, {"alibi_slopes": SLOPES, "score_mod": lambda s, *at: s * 2},
    ]  # fmt: skip
    cache = filled()
    for options in calls:
        assert np.array_equal(cache.decode(q, **options), filled().decode(q, **options))
    slopes = SLOPES.copy()
    before = cache.decode(q, alibi_slopes=slopes)
    slopes += 1  # the same array, other numbers
    after = cache.decode(q, alibi_slopes=slopes)
    assert np.array_equal(after, filled().decode(q, alibi_slopes=slopes))
    assert not np.array_equal(after, before)
    for wrong in ({"softcap": -1.0}, {"alibi_slopes": SLOPES * np.float32(np.inf)}):
        with pytest.raises(ArgumentError, match=next(iter(wrong))):
            cache.decode(q, **wrong)


def test_a_softcap_of_zero_of_any_kind_is_none():
    """A plan made for options is taken, and has those of its last call."""
    rng = np.random.default_rng(14)
    cache = KVCache(1, 2, 32, 50)
    cache.append(*(rng.standard_normal((1, 2, 50, 32), np.float32) for _ in "kv"))
    q = rng.standard_normal((1, 4, 4, 32), np.float32)
    plain, lse = cache.decode(q, return_lse=True)
    for options in ({"softcap": 0.5}, {"alibi_slopes": np.ones(4)}):
        for zero in (np.float32(0), np.float64(0), np.int64(0)):
            cache.decode(q, **options)
            found = cache.decode(q, softcap=zero, return_lse=True)
            assert np.array_equal(found[0], plain) and np.array_equal(found[1], lse)


def test_a_scale_beyond_float32_of_either_sign():
    """A score of 0 stays 0, and is seen: 0 * infinity would be NaN."""
    key = np.ones((1, 1, 2, 32), np.float32)
    key[0, 0, 0, ::2] = -1
    cache = KVCache(1, 1, 32, 8, "int8", rotate=False)
    cache.append(key, np.float32([1, 2]).reshape(1, 1, 2, 1).repeat(32, 3))
    query = np.full((1, 2, 1, 32), 1e38, np.float32)
    for scale, wanted in ((-1e20, 1), (1e20, 2)):  # scores 0 and -+3e59
        np.testing.assert_allclose(cache.decode(query, scale=scale), wanted, rtol=1e-2)
