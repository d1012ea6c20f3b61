"""Decode on CUDA in the emulator: INT8 with the integer model's bits, floats against float64."""

import numpy as np
import pytest
from daily import of_today
from oracles import draw, naive

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from decode_checks import (
    TOLERANCE,
    B,
    D,
    G,
    H,
    assert_bits,
    expected,
    filled,
    new,
    relative,
    reports,
    tokens,
)

from numflash.cache.kvcache import KVCache

QUICK = {(1, False), (17, True), (128, True), (129, False)}  # lengths and pages of default tests


@pytest.mark.parametrize(
    ("n", "paged"),
    [
        pytest.param(n, paged, marks=() if (n, paged) in QUICK else pytest.mark.slow)
        for n in (
            1,
            2,
            3,
            15,
            16,
            17,
            31,
            33,
            63,
            64,
            65,
            70,
            127,
            128,
            129,
            130,
            255,
            256,
            257,
            300,
        )
        for paged in (False, True)
    ],
)
def test_int8_has_the_bits_of_the_model(n, paged):
    cache, _, _ = filled(n, page_size=16 if paged else None)
    for splits in (1, 3) if n > 129 else (1,):
        assert_bits(cache, draw((B, H, 1, D), 9), splits)


@pytest.mark.slow
@pytest.mark.parametrize(("d", "heads", "paged"), of_today([(64, 4, True), (128, 40, False)], 2))
def test_int8_on_a_t4(d, heads, paged):
    """Without asynchronous copies, by products of sm_75's shape; one tile of rows and two."""
    page_size = 16 if paged else None
    cache = KVCache(B, G, d, 300, device="cuda-emulator:sm_75", page_size=page_size)
    cache.append(*tokens(140, d=d))
    for queries, splits in ((1, 2), (3, 1)):
        assert_bits(cache, draw((B, heads, queries, d), 9), splits)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_the_cpu_gives_the_same(dtype):
    """Token by token, on both devices: INT8 equal bits, with the same splits."""
    caches = [KVCache(B, G, D, 300, dtype, device=device) for device in ("cpu", "cuda-emulator")]
    key, value = tokens(135)
    query = draw((B, H, 1, D), 3)
    for a, z in ((0, 126), (126, 127), (127, 128), (128, 129), (129, 135)):
        found = []
        for cache in caches:
            cache.append(key[:, :, a:z], value[:, :, a:z])
            found.append(cache.decode(query, splits=2 if z > 128 else 1, return_lse=True))
        for x, y in zip(*found, strict=True):
            if dtype == "int8":
                np.testing.assert_array_equal(x, y)
            else:
                np.testing.assert_allclose(x, y, atol=3e-3)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "n",
    [
        17,
        128,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in (1, 2, 15, 16, 31, 33, 63, 64, 65, 70, 127, 129, 130, 255, 257, 300)
        ),
    ],
)
def test_floats(dtype, n):
    whole, key, value = filled(n, dtype)
    paged, _, _ = filled(n, dtype, page_size=16) if n in (16, 300) else (None, 0, 0)
    query = draw((B, H, 1, D), 5)
    exact, exact_lse = expected(query, key, value)
    for splits in (1, 3) if n > 128 else (1,):
        out, lse = whole.decode(query, splits=splits, return_lse=True)
        assert relative(out, exact) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, exact_lse, atol=0.03 if dtype == "bfloat16" else 3e-3)
        if paged is not None:
            np.testing.assert_array_equal(paged.decode(query, splits=splits), out)
    assert reports(whole)[-1].shared_conflicts == 0


@pytest.mark.parametrize("dtype", [pytest.param("int8", marks=pytest.mark.slow), "float16"])
def test_several_new_tokens_are_causal(dtype):
    cache, key, value = filled(140, dtype)
    query = draw((B, H, 3, D), 5)
    assert relative(cache.decode(query), expected(query, key, value)[0]) <= TOLERANCE[dtype]
    if dtype == "int8":
        assert_bits(cache, query, 2)
    even, key, value = filled(128, dtype)  # a full tile, of which the first row sees all but one
    assert (
        relative(even.decode(query[:, :, 1:]), expected(query[:, :, 1:], key, value)[0])
        <= TOLERANCE[dtype]
    )
    if dtype == "int8":
        assert_bits(even, query[:, :, 1:], 1)
    short = new(dtype)
    short.append(*tokens(1))
    out, lse = short.decode(
        query[:, :, :2], return_lse=True
    )  # the first row stands before the sequence
    assert (
        not out[:, :, 0].any()
        and (lse[:, :, 0] == -np.inf).all()
        and np.isfinite(lse[:, :, 1:]).all()
    )


@pytest.mark.parametrize(
    "heads", [8, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 14, 32, 40))]
)
def test_groups_of_heads(heads):
    """4, 1, 7, 16 and 20 query heads on a KV head.

    Tiles of 4, 8, 16 and 32 rows, never a second reading of the keys.
    """
    cache, _, _ = filled(130)
    assert_bits(cache, draw((B, heads, 1, D), 9), 2 if heads > 32 else 1)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_more_splits_than_a_block_has_threads(dtype):
    """Most of them without a key."""
    cache, key, value = filled(257, dtype, b=1)
    query = draw((1, H, 1, D), 9)
    if dtype == "int8":
        assert_bits(cache, query, 130)
    out = cache.decode(query, splits=130)
    assert relative(out, expected(query, key, value)[0]) <= TOLERANCE[dtype]


@pytest.mark.slow
def test_groups_of_heads_in_floats():
    """20 heads on a KV head: all rows of two tiles, each with a maximum of its own."""
    cache, key, value = filled(130, "float16")
    query = draw((B, 40, 1, D), 9)
    for splits in (1, 2):
        assert (
            relative(cache.decode(query, splits=splits), expected(query, key, value)[0])
            <= TOLERANCE["float16"]
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv", "dtype"),
    of_today(
        [
            (5, 7, "int8"),
            (5, 7, "float16"),
            (80, 96, "int8"),
            (256, 256, "int8"),
            (128, 64, "float16"),
        ],
        2,
    ),
)
def test_channels(d, dv, dtype):
    cache = KVCache(B, G, d, 300, dtype, device="cuda-emulator", value_dim=dv)
    key = draw((B, G, 131, d))
    value = draw((B, G, 131, dv), 1)
    cache.append(key, value)
    query = draw((B, H, 1, d), 9)
    if dtype == "int8":
        assert_bits(cache, query, 1)
    for splits in (1, 2):
        assert (
            relative(cache.decode(query, splits=splits), expected(query, key, value)[0])
            <= TOLERANCE[dtype]
        )


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_tokens_and_queries_that_are_not_finite(dtype):
    cache = new(dtype)
    key, value = tokens(150)  # a tile that every row sees whole, and one with an end
    key[0, 0, 21, 3], value[1, 1, 149, 5] = np.inf, np.nan
    cache.append(key, value)
    query = draw((B, H, 2, D), 1)
    query[1, 0, 0, 2] = np.nan
    out = cache.decode(query)
    assert np.isnan(cache.read(0)[0][0, 21]).all()
    # heads 0 and 1 read KV head 0; the last token of sequence 1 is seen by the last row only
    wanted = {(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 2, 1), (1, 3, 1)}
    assert {tuple(x) for x in np.argwhere(np.isnan(out).any(-1)).tolist()} == wanted
    assert np.isnan(out[tuple(zip(*wanted, strict=True))]).all()


@pytest.mark.parametrize("size", [1e-30, 1e4, pytest.param(1e18, marks=pytest.mark.slow), 1e36])
def test_extreme_queries(size):
    """A query beyond float16's range, and scores beyond float32's.

    Rows that float32 does not hold are done again in float64.
    """
    cache, key, value = filled(70, "float16")
    query = np.float32(size) * draw((B, H, 1, D), 5)
    exact, _ = naive(query, *(x.astype(np.float16) for x in (key, value)))
    np.testing.assert_allclose(cache.decode(query), exact, atol=3e-3)


def test_small_queries_with_a_large_scale():
    """In float16 as it is, such a query would have four bits."""
    cache, key, value = filled(70, "float16")
    query = np.float32(1e-6) * draw((B, H, 1, D), 5)
    exact, _ = naive(query, key, value, scale=1e6 * D**-0.5)
    assert relative(cache.decode(query, scale=1e6 * D**-0.5), exact) <= TOLERANCE["float16"]


@pytest.mark.parametrize("size", [1e-3, 1e18])
def test_int8_at_extreme_scales(size):
    cache = new()
    key, value = tokens(150)
    value[:, :, ::3] *= 1e-6
    key[:, :, 5] = 0
    cache.append(key * np.float32(size), value * np.float32(size))
    assert_bits(cache, draw((B, H, 1, D), 9) * np.float32(size), 2)
