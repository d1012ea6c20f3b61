"""KVCache.decode with score and mask functions: positions as indices, against float64."""

import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.jit.threads import limit

B, KV, D = 2, 2, 32
H, NEW = 4, 4  # the kernels of tests/cpu/test_decode_options.py
# query heads and new tokens; rows of one token are heads, and one call of a function serves them
ROWS = pytest.mark.parametrize(("heads", "new"), [(H, NEW), (4 * H, 1)])
CLOSE = {"float32": 3e-5, "int8": 8e-2}
SCORES = [g.alibi, g.relative_bias, g.softcap, g.t5_bias, g.causal_in_score]
MASKS = [None, g.documents, g.local_and_sinks]
rng = np.random.default_rng(3)
KEY, VALUE = (rng.standard_normal((B, KV, 150, D)).astype(np.float32) for _ in "kv")


def oracle(query, key, value, score_mod, mask_mod, window=None, sinks=0):
    """Output and LSE (B, H, L, ...) in float64 of the last tokens of all keys."""
    heads, new, count = query.shape[1], query.shape[2], key.shape[2]
    b, h = np.arange(B)[:, None, None, None], np.arange(heads)[:, None, None]
    q, k = (np.arange(new) + count - new)[:, None], np.arange(count)
    key, value = (np.repeat(x.astype(np.float64), heads // KV, 1) for x in (key, value))
    with np.errstate(all="ignore"):
        s = query.astype(np.float64) @ key.swapaxes(2, 3) / np.sqrt(D)
        s = s if score_mod is None else score_mod(s, b, h, q, k)
        seen = (k <= q) if mask_mod is None else (k <= q) & mask_mod(b, h, q, k)
        if window is not None:
            seen = seen & ((k > q - window) | (k < sinks))
        s = np.where(seen, s, -np.inf)
        top = np.maximum(s.max(-1, keepdims=True), -1e300)
        p = np.exp(s - top)
        total = p.sum(-1, keepdims=True)
        out = p @ np.where(np.isfinite(value), value, 0) / np.where(total == 0, 1, total)
        return out, (top + np.log(total))[..., 0]


def check(found, wanted, tolerance):
    for x, y in zip(found, wanted, strict=True):
        assert np.array_equal(np.isinf(x), np.isinf(y))
        finite = np.isfinite(y)
        assert np.abs(x[finite] - y[finite]).max(initial=0) <= tolerance


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("options", [{}, {"page_size": 128}, {"smooth": True}], ids=str)
def test_against_float64(dtype, options):
    if options.get("smooth") and dtype != "int8":
        pytest.skip("smoothing is of INT8")
    key = KEY + (5 * rng.standard_normal(D).astype(np.float32) if "smooth" in options else 0)
    cache = numflash.KVCache(B, KV, D, 256, dtype, **options)
    cache.append(key, VALUE)
    query = rng.standard_normal((B, H, NEW, D)).astype(np.float32)
    for n, score_mod in enumerate(SCORES):
        mask_mod = MASKS[n % len(MASKS)]
        found = cache.decode(query, score_mod=score_mod, mask_mod=mask_mod, return_lse=True)
        check(found, oracle(query, key, VALUE, score_mod, mask_mod), CLOSE[dtype])
    found = cache.decode(query, mask_mod=g.dilated, return_lse=True)
    check(found, oracle(query, key, VALUE, None, g.dilated), CLOSE[dtype])


@ROWS
@pytest.mark.parametrize("options", [{}, {"smooth": True}], ids=str)
def test_runs_of_whole_blocks(options, heads, new):
    """Each head, row, block and token has its own change; a token that is not finite is among them."""
    key, value = (rng.standard_normal((B, KV, 290, D)).astype(np.float32) for _ in "kv")
    key += 4 * ("smooth" in options)
    cache = numflash.KVCache(B, KV, D, 384, "int8", **options)
    cache.append(key[:, :, :200], value[:, :, :200])
    bad = key.copy()
    bad[0, 0, 230] = np.nan  # hidden from head 0, not from head 1
    cache.append(bad[:, :, 200:], value[:, :, 200:])
    table = rng.standard_normal((B, heads, 290)).astype(np.float32)

    def score_mod(score, b, h, q, k):
        return np.where(score > 0, score, score / 2) + table[b, h, k] - 0.02 * (h + 1) * (q - k)

    def mask_mod(b, h, q, k):
        return (h > 0) | (k != 230)

    query = rng.standard_normal((B, heads, new, D)).astype(np.float32)
    cache.decode(query)
    first, second = (cache.decode(query, score_mod=score_mod, mask_mod=mask_mod) for _ in "12")
    wanted, _ = oracle(query, key, value, score_mod, mask_mod)
    spoiled = np.zeros((B, heads), bool)
    spoiled[0, 1 : heads // KV] = True
    assert np.isnan(first[spoiled]).all()
    assert np.abs(first[~spoiled] - wanted[~spoiled]).max() <= CLOSE["int8"]
    np.testing.assert_array_equal(first, second)
    np.testing.assert_array_equal(cache.decode(query), cache.decode(query, scale=D**-0.5))


@ROWS
@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("sinks", [0, 5])
def test_a_ring_gives_positions(dtype, sinks, heads, new):
    key, value = (rng.standard_normal((B, KV, 700, D)).astype(np.float32) for _ in "kv")
    cache = numflash.KVCache(B, KV, D, 1, dtype, window=90, sinks=sinks)
    table = rng.standard_normal(701).astype(np.float32)

    def score_mod(score, b, h, q, k):
        return score + table[k] - 0.01 * (q - k)

    def mask_mod(b, h, q, k):
        return (k % 7 != 3) | (q - k < 4)

    for at in (60, 101, 128, 333, 700):
        held = int(cache.lengths[0])
        cache.append(key[:, :, held:at], value[:, :, held:at])
        query = rng.standard_normal((B, heads, new, D)).astype(np.float32)
        with limit(1):  # the kernels of test_against_float64
            found = cache.decode(query, score_mod=score_mod, mask_mod=mask_mod, return_lse=True)
        wanted = oracle(query, key[:, :, :at], value[:, :, :at], score_mod, mask_mod, 90, sinks)
        check(found, wanted, CLOSE[dtype])


@ROWS
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_what_the_mask_hides_stays_out(dtype, heads, new):
    key = KEY.copy()
    key[0, 0, 20] = np.nan  # hidden from all rows
    key[1, 1, 30] = np.inf  # hidden from all heads but the last one, by the score
    value = VALUE.copy()
    value[0, 1, 21] = np.inf
    cache = numflash.KVCache(B, KV, D, 256, dtype)
    cache.append(key, value)
    query = rng.standard_normal((B, heads, new, D)).astype(np.float32)

    def mask_mod(b, h, q, k):
        return ((k != 20) & (k != 21)) | (b == 1)

    def score_mod(score, b, h, q, k):
        return np.where((k == 30) & (h < heads - 1), -np.inf, score)

    out = cache.decode(query, score_mod=score_mod, mask_mod=mask_mod)
    wanted, _ = oracle(query, np.nan_to_num(key, posinf=0), value, score_mod, mask_mod)
    spoiled = np.zeros((B, heads), bool)
    spoiled[1, heads - 1] = True
    assert np.isnan(out[spoiled]).all()
    assert np.abs(out[~spoiled] - wanted[~spoiled]).max() <= CLOSE[dtype]
    out, lse = cache.decode(query, mask_mod=lambda b, h, q, k: k < 0, return_lse=True)
    assert not out.any()
    assert (lse == -np.inf).all()


def test_more_values_of_keys_than_are_kept():
    """A function of 80 terms that depend on the key, each by a head's own number."""
    heads, terms = 4 * H, range(1, 81)
    numbers = rng.standard_normal((80, heads)).astype(np.float32)
    cache = numflash.KVCache(B, KV, D, 256, "float32")
    cache.append(KEY, VALUE)
    query = rng.standard_normal((B, heads, 1, D)).astype(np.float32)

    def score_mod(score, b, h, q, k):
        for n in terms:
            score = score + 0.1 * numbers[n - 1, h] * ((k % n) == 0)
        return score

    found = cache.decode(query, score_mod=score_mod, return_lse=True)
    check(found, oracle(query, KEY, VALUE, score_mod, None), CLOSE["float32"])


@pytest.mark.parametrize("dtype", ["float32", "int8", pytest.param("int4", marks=pytest.mark.slow)])
def test_one_head_alone_is_spoiled_or_huge(dtype):
    """What one query head meets in a whole block, where one call serves all heads."""
    heads, key = 4 * H, KEY.copy()
    key[0, 0, 40] = np.inf  # heads 2 and 3 attend to it
    cache = numflash.KVCache(B, KV, D, 256, dtype)
    cache.append(key, VALUE)
    query = rng.standard_normal((B, heads, 1, D)).astype(np.float32)

    def score_mod(score, b, h, q, k):
        score = np.where((h == 5) & (k == 77), np.nan, score + 0.25 * (k % 3))
        return np.where((h == 14) & (k == 80), 2e38, score)

    def mask_mod(b, h, q, k):
        return (k != 40) | (h == 2) | (h == 3)

    out = cache.decode(query, score_mod=score_mod, mask_mod=mask_mod)
    spoiled = np.zeros((B, heads), bool)
    spoiled[:, 5] = spoiled[0, 2:4] = True
    assert np.array_equal(np.isnan(out).any((2, 3)), spoiled)
    alone = VALUE[:, 1:, 80:81]  # the token of head 14
    assert np.abs(out[:, 14:15] - alone).max() <= (1e-6 if dtype == "float32" else 0.3)
    hidden = cache.decode(
        query, score_mod=lambda s, b, h, q, k: s + 0.25 * (k % 3), mask_mod=mask_mod
    )
    others = ~spoiled[1]
    others[14] = False
    if dtype == "float32":
        assert np.abs(out[1, others] - hidden[1, others]).max() <= 1e-6
    else:
        np.testing.assert_array_equal(out[1, others], hidden[1, others])


@pytest.mark.parametrize(
    "dtype",
    ["float32", "int8", *(pytest.param(x, marks=pytest.mark.slow) for x in ("bfloat16", "int4"))],
)
def test_bits_do_not_depend_on_how_rows_are_called(dtype):
    """One call for all heads of a whole block, or row by row with a mask of the new token."""
    heads, held = 4 * H, 150
    cache = numflash.KVCache(B, KV, D, 256, dtype)
    cache.append(KEY, VALUE)
    query = rng.standard_normal((B, heads, 1, D)).astype(np.float32)
    order = rng.permutation(held)
    table = rng.standard_normal((heads, held)).astype(np.float32)

    def score_mod(score, b, h, q, k):
        near = (q - k < 20) | (k % 5 == h % 5)
        far = 0.01 * ((k * 3_000_000_000) % 11)  # wider than 32 bits
        return (
            np.where(near, score * 1.5, score + table[h, order[k]])
            + np.sin(k * 0.1) * (k > 9)
            - far
        )

    calls = {"score_mod": score_mod, "mask_mod": lambda b, h, q, k: (k % 4 != 1) | (h > 3)}
    together = cache.decode(query, **calls)
    apart = cache.decode(query, **calls, mask=np.ones((1, 1), bool))
    np.testing.assert_array_equal(together, apart)
    wanted, _ = oracle(query, KEY, VALUE, *calls.values())
    limit = {"float32": 3e-5, "bfloat16": 2e-2, "int8": 8e-2, "int4": 0.6}[dtype]
    assert np.abs(together - wanted).max() <= limit


@ROWS
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_scores_beyond_float32(dtype, heads, new):
    cache = numflash.KVCache(B, KV, D, 256, dtype)
    cache.append(KEY, VALUE)
    query = rng.standard_normal((B, heads, new, D)).astype(np.float32)
    for score_mod in (lambda s, b, h, q, k: s * 3e37, lambda s, b, h, q, k: s - 2e38):
        out = cache.decode(query, score_mod=score_mod)
        if dtype == "float32":
            exact = oracle(query, KEY, VALUE, score_mod, None)[0]
            assert np.abs(out - exact).max() <= 1e-5
        assert np.isfinite(out).all()
    if dtype == "float32":
        query *= np.float32(1e37)
        huge = cache.decode(query, mask_mod=lambda b, h, q, k: k % 3 == 0)
        wanted = oracle(query, KEY, VALUE, None, lambda b, h, q, k: k % 3 == 0)
        assert np.abs(huge - wanted[0]).max() <= 1e-5
    assert np.isnan(cache.decode(query, score_mod=lambda s, *at: np.log(s * 0 - 1))).all()


@ROWS
def test_together_with_the_other_options(heads, new):
    table = rng.standard_normal((heads, 301)).astype(np.float32)

    def bias(score, b, h, q, k):
        return score + table[h, q - k + 150]

    for dtype in ("float32", "int8"):
        cache = numflash.KVCache(B, KV, D, 256, dtype)
        cache.append(KEY, VALUE)
        query = rng.standard_normal((B, heads, new, D)).astype(np.float32)

        def both(score, b, h, q, k):
            return 3 * np.tanh(bias(score, b, h, q, k) / 3) - 0.25 * abs(q - k)

        found = cache.decode(
            query,
            score_mod=bias,
            mask_mod=g.documents,
            softcap=3.0,
            alibi_slopes=np.full(heads, 0.25),
            return_lse=True,
        )
        check(found, oracle(query, KEY, VALUE, both, g.documents), CLOSE[dtype])


@pytest.mark.parametrize(
    "options",
    [{"smooth": True}, pytest.param({"dtype": "int4"}, marks=pytest.mark.slow)],
    ids=str,
)
def test_a_soft_cap_function_has_the_bits_of_the_option(options):
    cache = numflash.KVCache(B, KV, D, 256, **options)
    cache.append(KEY, VALUE)
    query = 3 * rng.standard_normal((B, H, NEW, D)).astype(np.float32)
    slopes = np.full(H, 0.25)
    for others in ({}, {"alibi_slopes": slopes, "return_lse": True}):
        found = cache.decode(query, score_mod=lambda s, *at: 2.5 * np.tanh(s / 2.5), **others)
        wanted = cache.decode(query, softcap=2.5, **others)
        np.testing.assert_array_equal(found[0], wanted[0])
    twice = cache.decode(query, softcap=1.5, score_mod=lambda s, *at: 2.5 * np.tanh(s / 2.5))
    assert np.abs(twice - cache.decode(query, softcap=2.5)).max() > 1e-3
    assert np.abs(twice - cache.decode(query, softcap=1.5)).max() > 1e-3


def test_rows_before_the_sequence_and_arrays_that_are_too_short():
    cache = numflash.KVCache(B, KV, D, 256, "float32")
    cache.append(KEY[:, :, :4], VALUE[:, :, :4], counts=[2, 4])
    table = np.ones(4, np.float32)
    query = rng.standard_normal((B, H, NEW, D)).astype(np.float32)

    def score_mod(score, b, h, q, k):
        return score + table[q] * table[k]

    out = cache.decode(query, score_mod=score_mod)
    assert not out[0, :, :2].any()
    assert np.isfinite(out).all()
    cache.append(KEY[:, :, :1], VALUE[:, :, :1])
    with pytest.raises(ArgumentError, match=r"shape \(4,\) is indexed by [qk]"):
        cache.decode(query, score_mod=score_mod)
    with pytest.raises(ArgumentTypeError, match=r"score_mod: .* where"):
        cache.decode(query, score_mod=lambda s, b, h, q, k: s if q > k else -s)
