"""The cache's meaning against float64.

Lengths, several new tokens, pages, shared prefixes, rings, tokens out of range.
"""

import numpy as np
import pytest
from decode_cases import TOLERANCE, B, D, G, H, expected, filled, relative, tokens
from oracles import draw, naive

from numflash.cache import pages
from numflash.cache.exact import positions
from numflash.cache.kvcache import KVCache
from numflash.errors import ArgumentError, ArgumentTypeError, CacheFullError
from numflash.jit.threads import limit
from numflash.tiling import split_count

NEW = 4  # tokens at once: the kernels of tests/cpu/test_decode_options.py


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_every_length_is_full_attention(dtype):
    cache = KVCache(B, G, D, 700, dtype)
    key, value = tokens(262)
    query = draw((B, H, 1, D), 5)
    for n in range(1, 263):
        cache.append(key[:, :, n - 1 : n], value[:, :, n - 1 : n])
        if n < 6 or n % 128 in (0, 1, 2, 63, 64, 65, 127) or n % 40 == 0:
            exact, exact_lse = expected(query, key[:, :, :n], value[:, :, :n])
            for splits in (None, 2, 3):
                out, lse = cache.decode(query, splits=splits, return_lse=True)
                assert relative(out, exact) <= TOLERANCE[dtype]
                np.testing.assert_allclose(
                    lse, exact_lse, atol=0.03 if dtype in ("int8", "bfloat16") else 3e-3
                )
    stored = cache.read(0)
    assert (
        relative(stored[0], key[0]) < TOLERANCE[dtype]
        and relative(stored[1], value[0]) < TOLERANCE[dtype]
    )


def test_several_new_tokens_are_causal():
    for dtype in ("float32", "int8"):
        cache, key, value = filled(130, dtype=dtype)
        query = draw((B, H, NEW, D), 5)
        assert relative(cache.decode(query), expected(query, key, value)[0]) <= TOLERANCE[dtype]
    cache = KVCache(B, G, D, 8, "float32")
    cache.append(*tokens(1))
    out, lse = cache.decode(
        draw((B, H, NEW, D)), return_lse=True
    )  # all rows but the last stand before the sequence
    assert (
        not out[:, :, :-1].any()
        and (lse[:, :, :-1] == -np.inf).all()
        and np.isfinite(lse[:, :, -1]).all()
    )


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_lengths_differ(dtype):
    cache = KVCache(B, G, D, 700, dtype)
    key, value = tokens(150)
    cache.append(key, value, counts=[150, 9])
    cache.append(key[:, :, :2].copy(), value[:, :, :2].copy(), counts=np.array([0, 1]))
    assert cache.lengths.tolist() == [150, 10]
    query = draw((B, H, 1, D), 3)
    out = cache.decode(query)
    for b, n in ((0, 150), (1, 10)):
        k, v = (
            np.concatenate([x[b : b + 1, :, : n - 1 if b else n], x[b : b + 1, :, :1]], 2)
            if b
            else x[:1]
            for x in (key, value)
        )
        assert relative(out[b : b + 1], expected(query[b : b + 1], k, v)[0]) <= TOLERANCE[dtype]


def test_empty_and_reset():
    cache, _, _ = filled(40)
    cache.reset(0)
    assert cache.lengths.tolist() == [0, 40]
    out, lse = cache.decode(draw((B, H, 1, D)), return_lse=True)
    assert not out[0].any() and (lse[0] == -np.inf).all() and out[1].any()
    cache.reset()
    key, value = tokens(7, 4)
    cache.append(key, value)  # what lay there before is not seen
    query = draw((B, H, 1, D), 1)
    assert relative(cache.decode(query), expected(query, key, value)[0]) < 0.03
    assert KVCache(0, G, D, 8).decode(np.zeros((0, H, 1, D), np.float32)).shape == (0, H, 1, D)


@pytest.mark.parametrize("which", [1, np.int64(1), np.array(1), np.array([1]), (1, 1), range(1, 2)])
def test_reset_of_one_sequence(which):
    cache, _, _ = filled(40)
    cache.reset(which)
    assert cache.lengths.tolist() == [40, 0]
    cache.reset([])
    assert cache.lengths.tolist() == [40, 0]
    with pytest.raises(
        ArgumentTypeError, match="sequences: got 'b'; allowed: an integer or several"
    ):
        cache.reset("b")
    with pytest.raises(ArgumentError, match="sequences: got 2; allowed: 0 to 1"):
        cache.reset([2])


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_pages_give_the_same_bits(dtype):
    whole, key, value = filled(400, dtype=dtype)
    paged = KVCache(B, G, D, 700, dtype, page_size=128)
    for a in range(0, 400, 57):  # pages of the two sequences interleave
        paged.append(key[:, :, a : a + 57], value[:, :, a : a + 57])
    query = draw((B, H, 1, D), 5)
    for splits in (1, 3):
        np.testing.assert_array_equal(
            whole.decode(query, splits=splits), paged.decode(query, splits=splits)
        )
    for a, b in zip(whole.read(1), paged.read(1), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("sinks", "ring"), [(0, 5), (1, 5), (4, 7)])
def test_which_token_lies_in_which_slot(sinks, ring):
    """Against a ring that is written token by token."""
    slots = []
    for token in range(3 * ring):
        slot = token if token < sinks else sinks + (token - sinks) % ring
        slots[slot : slot + 1] = [token]
        assert positions(token + 1, len(slots), sinks, ring).tolist() == slots


def test_whole_pages_are_shared_from_a_pool_that_is_used_up():
    table = np.zeros((2, 3), np.int32)
    lengths = np.zeros(2, np.int64)
    pages.grow(table, lengths, np.array([256, 0]), 128, 2)
    lengths[0] = 256
    assert pages.share(table, lengths, 0, 1, 256, 128, 2) is None
    lengths[1] = 256
    assert table[1, :2].tolist() == table[0, :2].tolist()
    lengths[1] = 0
    assert not pages.free_pages(table, lengths, 128, 2).size
    with pytest.raises(CacheFullError, match="share: one more page"):
        pages.share(table, lengths, 0, 1, 200, 128, 2)
    lengths[0] = 0
    assert pages.free_pages(table, lengths, 128, 2).size == 2


def test_shared_prefix():
    cache = KVCache(3, G, D, 700, page_size=128, pages=7)
    key, value = tokens(300, b=3)
    cache.append(key, value, counts=[300, 0, 0])
    assert cache.free_pages == 4
    cache.share(0, 1)
    cache.share(0, 2, 128)
    assert cache.free_pages == 3 and cache.lengths.tolist() == [300, 300, 128]
    more = tokens(5, 8, b=3)
    cache.append(*more)
    query = draw((3, H, 1, D), 2)
    out = cache.decode(query)
    for b, n in enumerate((300, 300, 128)):
        k, v = (
            np.concatenate([x[:1, :, :n], y[b : b + 1]], 2)
            for x, y in zip((key, value), more, strict=True)
        )
        assert relative(out[b : b + 1], expected(query[b : b + 1], k, v)[0]) < 0.03
    assert cache.free_pages == 2
    cache.reset(0)
    assert cache.free_pages == 3  # its own last page; two are shared with the others
    np.testing.assert_array_equal(cache.decode(query)[1:], out[1:])
    cache.reset()
    assert cache.free_pages == 7
    with pytest.raises(CacheFullError, match="8 more pages"):
        cache.append(*tokens(700, b=3), counts=[700, 200, 0])
    assert cache.lengths.tolist() == [0, 0, 0] and cache.free_pages == 7


@pytest.mark.parametrize("dtype", ["int8", "float32"])
@pytest.mark.parametrize(("window", "sinks"), [(100, 0), (70, 4), (1, 2)])
def test_ring(dtype, window, sinks):
    cache = KVCache(B, G, D, 1, dtype, window=window, sinks=sinks)
    size = cache.nbytes
    key, value = tokens(500)
    i = 0
    queries = NEW if window > 1 else 1
    for step in (1, 2, 60, 64, 1, 100, 3, 200, 2):
        cache.append(key[:, :, i : i + step], value[:, :, i : i + step])
        i += step
        query = draw((B, H, queries if i >= queries else 1, D), i)
        with limit(1):  # the kernels of tests/cpu/test_decode_options.py, too
            out = cache.decode(query)
        for row in range(query.shape[2]):
            stop = i - query.shape[2] + row + 1
            seen = [j for j in range(stop) if j < sinks or j >= stop - window]
            exact, _ = naive(query[:, :, row : row + 1], key[:, :, seen], value[:, :, seen])
            assert relative(out[:, :, row : row + 1], exact) <= TOLERANCE[dtype]
    assert cache.nbytes == size and cache.lengths.tolist() == [433, 433]


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_tokens_that_are_not_finite(dtype):
    cache, key, value = filled(20, dtype=dtype)
    bad = tokens(2, 3)
    bad[0][0, 0, 1, 3], bad[1][1, 1, 1, 2] = np.nan, np.inf
    cache.append(*bad)
    out = cache.decode(draw((B, H, NEW, D), 1))
    spoiled = np.isnan(out).all(-1)
    assert not np.isnan(out[:, :, :-1]).any()  # the rows before do not see them
    assert (
        spoiled[0, :2, -1].all()
        and not spoiled[0, 2:].any()
        and spoiled[1, 2:, -1].all()
        and not spoiled[1, :2].any()
    )
    assert np.isnan(cache.read(0)[0][0, 21]).all()
    query = draw((B, H, NEW, D), 1)
    query[0, 1, 1, 0] = np.nan
    cache.reset()
    cache.append(key, value)
    assert np.argwhere(np.isnan(cache.decode(query)).any(-1)).tolist() == [[0, 1, 1]]


HUGE = {
    "scores that overflow": (1e25, 1e25, 1.0),
    "partial sums that overflow": (3e19, 3e19, 1.0),
    "scores near the largest": (1.7e19, 1.9e19, 1.0),
    "values near the largest": (1.0, 1.0, 1e38),
    "all of it": (1e38, 1e38, 1e38),
}


@pytest.mark.parametrize("ring", [{}, {"window": 150, "sinks": 3}], ids=["all keys", "ring"])
@pytest.mark.parametrize("sizes", HUGE.values(), ids=HUGE)
def test_what_float32_does_not_hold(sizes, ring):
    rng = np.random.default_rng(3)
    cache = KVCache(B, G, D, 700, "float32", **ring)
    held = [np.zeros((B, G, 0, D), np.float32)] * 2
    for n in (300, 70, 1):
        key, value = (
            np.float32(size) * rng.uniform(-3, 3, (B, G, n, D)).astype(np.float32)
            for size in sizes[1:]
        )
        cache.append(key, value)
        held = [np.concatenate(x, 2) for x in zip(held, (key, value), strict=True)]
    query = np.float32(sizes[0]) * rng.uniform(-3, 3, (B, H, NEW, D)).astype(np.float32)
    for splits in (1, 3):
        out, lse = cache.decode(query, splits=splits, return_lse=True)
        for row in range(NEW):
            stop = 372 - NEW + row
            seen = [j for j in range(stop) if not ring or j < 3 or j >= stop - 150]
            exact, exact_lse = naive(query[:, :, row : row + 1], *(x[:, :, seen] for x in held))
            np.testing.assert_allclose(
                out[:, :, row : row + 1], exact, rtol=1e-4, atol=1e-5 * sizes[2]
            )
            with np.errstate(over="ignore"):
                np.testing.assert_allclose(
                    lse[:, :, row : row + 1], exact_lse.astype(np.float32), rtol=1e-5
                )


def test_smoothing_helps_biased_keys_and_keeps_the_lse():
    key, value = tokens(200)
    key[..., 3] += 30
    query = draw((B, H, 1, D), 5)
    exact, exact_lse = expected(query, key, value)
    found = {}
    for smooth in (False, True):
        cache = KVCache(B, G, D, 700, smooth=smooth)
        cache.append(key[:, :, :100].copy(), value[:, :, :100].copy())
        for i in range(100, 200):
            cache.append(key[:, :, i : i + 1].copy(), value[:, :, i : i + 1].copy())
        out, lse = cache.decode(query, return_lse=True)
        found[smooth] = relative(out, exact)
    np.testing.assert_allclose(lse, exact_lse, atol=0.1)
    assert found[True] < 0.03 and found[True] < 0.3 * found[False]


def test_split_count():
    assert split_count(14, 4, 80) == 4  # the T4 architecture: 14 heads, 1024 keys in blocks of 256
    assert split_count(8, 256, 1) == 1 and split_count(2, 32, 2) == 1
    assert split_count(1, 32, 2) == 2 and split_count(3, 32, 2) == 2 and split_count(1, 1, 64) == 1
    for units, blocks, workers in np.ndindex(20, 20, 20):
        n = split_count(units + 1, blocks + 1, workers + 1)
        assert 1 <= n <= blocks + 1
