"""What a cache refuses, and what it takes and gives: kinds, dtypes, shapes."""

import re

import numpy as np
import pytest
from decode_cases import B, D, G, H, expected, filled, tokens
from oracles import draw

import numflash
from numflash.cache.kvcache import KVCache
from numflash.errors import (
    ArgumentError,
    ArgumentTypeError,
    CacheFullError,
    NumflashError,
    UnsupportedError,
)


def test_kinds_and_outputs():
    cache, key, value = filled(50, dtype="float32")
    query = draw((B, H, 1, D), 5)
    exact = cache.decode(query)
    out = np.empty_like(query)
    assert cache.decode(query, out=out) is out and (out == exact).all()
    transposed = np.ascontiguousarray(query.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    np.testing.assert_array_equal(cache.decode(transposed), exact)
    readonly = query.copy()
    readonly.flags.writeable = False
    np.testing.assert_array_equal(cache.decode(readonly), exact)
    assert cache.decode(query.astype(np.float16)).dtype == np.float16
    np.testing.assert_allclose(cache.decode(query.astype(np.float64)), exact, rtol=1e-6)
    for scale in (0.1, np.float32(0.1), np.array(0.1)):
        np.testing.assert_allclose(
            cache.decode(query, scale=scale), expected(query, key, value, scale=0.1)[0], atol=1e-5
        )
    assert numflash.KVCache is KVCache


def test_errors():
    cache, key, value = filled(4, dtype="float32")
    query = draw((B, H, 1, D))
    for bad in (query[:1], query[:, :3], query[..., :8], query[0]):
        with pytest.raises(ArgumentError, match="query: got shape"):
            cache.decode(np.ascontiguousarray(bad))
    for arguments, error, words in (
        ((key[:1], value), ArgumentError, "key: got shape"),
        ((key, value[..., :3]), ArgumentError, "value: got shape"),
        ((key, value[:, :, :3]), ArgumentError, "value: got 3 tokens"),
        ((key.astype(int), value), ArgumentTypeError, "key: got dtype"),
        (("x", value), ArgumentTypeError, "key"),
    ):
        with pytest.raises(error, match=words):
            cache.append(*arguments)
    for counts in ([1], [5, 0], [-1, 0], [0.5, 1]):
        with pytest.raises(ArgumentError, match="counts"):
            cache.append(key, value, counts=counts)
    for options, error in (
        ({"splits": 0}, ArgumentError),
        ({"splits": 1.5}, ArgumentTypeError),
        ({"splits": [1]}, ArgumentTypeError),
        ({"return_lse": 1}, ArgumentTypeError),
        ({"scale": "x"}, ArgumentTypeError),
        ({"scale": np.nan}, ArgumentError),
        ({"scale": [1.0]}, ArgumentTypeError),
        ({"scale": 1e300}, ArgumentError),
        ({"out": np.zeros(3)}, ArgumentTypeError),
        ({"out": np.zeros((1, 2), np.float32)}, ArgumentError),
    ):
        with pytest.raises(error, match=next(iter(options))):
            cache.decode(query, **options)
    out = np.full((B, H, 1, D), 7, np.float32)
    with pytest.raises(ArgumentTypeError, match="return_lse"):
        cache.decode(query, out=out, return_lse="yes")
    assert (out == 7).all()  # a call that is refused changes nothing
    with pytest.raises(CacheFullError, match="allowed: 700 in all"):
        cache.append(*tokens(697))
    assert cache.lengths.tolist() == [4, 4]
    with pytest.raises(ArgumentError, match="no pages"):
        cache.share(0, 1)
    with pytest.raises(ArgumentError, match="sequences"):
        cache.reset(2)
    with pytest.raises(ArgumentTypeError, match="sequences"):
        cache.reset(np.array([[0]]))
    with pytest.raises(ArgumentError, match="only 'int8'"):
        cache.quantized(0)
    cache.close()
    for use in (
        lambda: cache.decode(query),
        lambda: cache.append(key, value),
        cache.reset,
        lambda: cache.lengths,
        lambda: cache.nbytes,
    ):
        with pytest.raises(NumflashError, match="is closed"):
            use()


def test_nothing_is_asked_and_nobody_asks():
    cache, key, value = filled(4, dtype="float32")
    with pytest.raises(ArgumentError, match="one token or more"):
        cache.decode(np.zeros((B, H, 0, D), np.float32))
    for ragged in ([[1], [2, 3]], [[0], [1, 0]]):
        with pytest.raises(ArgumentError, match="counts"):
            cache.append(key, value, counts=ragged)
        with pytest.raises(ArgumentError, match="sequences"):
            cache.reset(ragged)
    with pytest.raises(ArgumentTypeError, match="sequences"):
        cache.reset(1.5)
    assert cache.lengths.tolist() == [4, 4]
    cache.reset(np.int64(1))
    cache.reset(np.array([1]))
    assert cache.lengths.tolist() == [4, 0]
    nobody = KVCache(0, G, D, 8)
    for counts in (None, []):
        nobody.append(*tokens(9, b=0), counts=counts)
    assert nobody.lengths.tolist() == []
    with pytest.raises(ArgumentError, match=r"index: got \[0\]; .*the cache holds no sequence"):
        nobody.reorder([0])


@pytest.mark.parametrize(
    "bad",
    [
        {"query": (B, H, 1, D + 1)},
        {"query": (B, H, 0, D)},
        {"scale": "x"},
        {"splits": 0},
        {"out": np.zeros(3, np.float32)},
    ],
    ids=str,
)
def test_a_step_that_raises_appends_nothing(bad):
    cache, _, _ = filled(4)
    options = dict(bad)
    query = np.zeros(options.pop("query", (B, H, 1, D)), np.float32)
    with pytest.raises((ArgumentError, ArgumentTypeError), match=next(iter(bad))):
        cache.step(query, *tokens(1), **options)
    assert cache.lengths.tolist() == [4, 4]


def test_equal_steps_append_and_decode():
    """Steps of the same shapes take a shorter way: other lengths, a full and an emptied cache."""
    cache, twin = (KVCache(B, G, D, 50, smooth=True) for _ in range(2))
    query = draw((B, H, 16, D), 3)
    for n in range(3):
        key, value = (x + np.float32(7 * n) for x in tokens(16))
        twin.append(key, value)
        np.testing.assert_array_equal(cache.step(query, key, value), twin.decode(query))
        if n == 1:  # the third step makes new means for the second sequence
            for each in (cache, twin):
                each.reset(1)
    np.testing.assert_array_equal(cache.read(1)[0], twin.read(1)[0])
    with pytest.raises(CacheFullError):
        cache.step(query, *tokens(16))
    assert cache.lengths.tolist() == [48, 16]


def test_the_result_may_go_over_the_query():
    smooth, _, _ = filled(40, smooth=True)
    huge = KVCache(B, G, D, 9, "float32")
    key, value = tokens(3)
    huge.append(key * np.float32(1e25), value)  # rows that are done again in float64
    for cache, factor in ((smooth, 1), (huge, 1e25)):
        query = draw((B, H, 1, D), 5) * np.float32(factor)
        first = query.copy()
        wanted, wanted_lse = cache.decode(query, return_lse=True)
        out, lse = cache.decode(query, out=query, return_lse=True)
        assert out is query
        np.testing.assert_array_equal(out, wanted)
        np.testing.assert_array_equal(lse, wanted_lse)
        for _ in range(2):  # the second call is an equal one, which is prepared by then
            again = first.copy()
            assert cache.decode(again, out=again) is again
            np.testing.assert_array_equal(again, wanted)
        for wrong, error in ((wanted[:1], ArgumentError), (wanted[::-1], ArgumentTypeError)):
            with pytest.raises(error, match="out: got"):
                cache.decode(wanted, out=wrong)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": "int3"}, "dtype"),
        ({"page_size": 100}, "page_size: got 100; allowed: a power of two, 128 to 1048576"),
        ({"page_size": 64}, "page_size: got 64; allowed: a power of two"),
        ({"page_size": 1 << 22}, "page_size: got 4194304; allowed: a power of two, 128 to 1048576"),
        ({"page_size": -128}, "page_size: got -128; allowed: a power of two"),
        ({"window": 0}, "window"),
        ({"sinks": 3}, "sinks"),
        ({"window": 9, "page_size": 128}, "window"),
        ({"pages": 4}, "pages"),
        ({"value_dim": 577}, "value_dim"),
        ({"smooth": True, "dtype": "float32"}, "smooth"),
        ({"isa": "sse2"}, "isa"),
        ({"device": "tpu"}, "device"),
    ],
)
def test_options_that_are_not_allowed(options, words):
    with pytest.raises(ArgumentError, match=words):
        KVCache(1, 1, 8, 100, **options)


def test_cuda_is_said_to_be_missing():
    try:
        KVCache(1, 1, 8, 100, device="cuda")
    except UnsupportedError as error:
        assert "device: got 'cuda'" in str(error)  # noqa: PT017
    else:
        pytest.skip("there is a card")


BEYOND = {
    "float16": (65519, 65520, np.float32),
    "bfloat16": (3.3961e38, 3.3962e38, np.float32),
    "float32": (3.4028234e38, 3.4028236e38, np.float64),
    "int8": (3.38e38, 3.4028236e38, np.float64),
}


@pytest.mark.parametrize("dtype", BEYOND)
def test_finite_tokens_that_the_storage_cannot_hold(dtype):
    """They would come back as NaN; infinity and NaN themselves are taken, and mark their token."""
    largest, beyond, given = BEYOND[dtype]
    cache = KVCache(B, G, D, 9, dtype)
    key, value = (np.array(x, given) for x in tokens(2))
    for name, x in (("key", key), ("value", value)):
        x[0, 1, 1, 3] = -beyond
        with pytest.raises(
            ArgumentError,
            match=re.escape(f"{name}: got {beyond:.6g} in a cache of dtype '{dtype}'"),
        ):
            cache.append(key, value)
        x[0, 1, 1, 3] = -largest
    assert cache.lengths.tolist() == [0, 0]
    cache.append(key, value)
    assert (
        np.isfinite(cache.read(0)[0]).all()
        and np.isfinite(cache.decode(draw((B, H, 1, D), 1))).all()
    )
    key[0, 1, 1, 3] = np.inf
    cache.append(key, value)
    out = cache.decode(draw((B, H, 1, D), 1))
    assert (
        np.isnan(out[0, 2:]).all() and np.isfinite(out[0, :2]).all() and np.isfinite(out[1]).all()
    )


def test_bfloat16_tokens_in_a_float16_cache():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    key, value = (x.astype(ml_dtypes.bfloat16) for x in tokens(2))
    cache = KVCache(B, G, D, 9, "float16")
    cache.append(key, value)
    key[0, 0, 0, 0] = 1e6
    with pytest.raises(ArgumentError, match="key: got 999424 in a cache of dtype 'float16'"):
        cache.append(key, value)


def test_a_cache_says_what_it_holds():
    cache = KVCache(B, G, D, 9, "float16", window=4, sinks=1)
    cache.append(*tokens(2))
    shown = f"KVCache('float16', kv_heads={G}, head_dim={D}, window=4, sinks=1, tokens=[2, 2])"
    assert repr(cache) == shown
    cache.close()
    assert repr(cache) == shown.replace("tokens=[2, 2]", "closed")


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"softcap": 3e38}, "softcap: got 3e+38"),
        ({"softcap": np.array([1.0, 2.0])}, "softcap: got array"),
        ({"alibi_slopes": np.full(H, 3e38)}, "alibi_slopes: got NaN, infinity or a number beyond"),
        ({"sinks": np.full(H, np.inf)}, "sinks: got NaN, infinity or a number beyond"),
        ({"mask": np.ma.masked_array(np.ones((1, 1), bool))}, "mask: got a masked array"),
        ({"mask": [[True], [True, False]]}, "mask: got"),
    ],
)
def test_options_have_the_limits_of_attention(option, words):
    cache = KVCache(B, G, D, 9, "float32")
    cache.append(*tokens(2))
    with pytest.raises((ArgumentError, ArgumentTypeError), match=re.escape(words)):
        cache.decode(draw((B, H, 1, D), 1), **option)


def test_arguments_of_another_kind():
    cache = KVCache(B, G, D, 9, "float32")
    ragged, query = [[1], [2, 3]], draw((B, H, 1, D), 1)
    same = np.zeros((G, 9, D), np.float32)
    for call, words in (
        (lambda: KVCache(B, G, D, 9, isa=["avx2"]), "isa: got ['avx2']"),
        (lambda: cache.tail(0, out=3), "out: got 3; allowed: a pair"),
        (lambda: cache.tail(0, out=()), "out: got (); allowed: a pair"),
        (lambda: cache.tail(0, out=(same, same)), "out: got two arrays of the same memory"),
        (lambda: cache.step(query, ragged, tokens(1)[1]), "key: got"),
        (lambda: cache.decode(query, scale=np.array("1")), "scale: got array('1'"),
        (lambda: cache.decode(query, softcap=ragged), "softcap: got [[1]"),
    ):
        with pytest.raises(NumflashError, match=re.escape(words)):
            call()
    assert not cache.lengths.any()


def test_what_equals_1_is_still_refused():
    """Calls are remembered by their arguments, and True == 1 == 1.0."""
    cache, query = KVCache(B, G, D, 9, "float32"), draw((B, H, 1, D), 1)
    cache.append(*tokens(2))
    cache.decode(query, scale=1.0, splits=1)
    for option in ({"scale": True}, {"splits": True}, {"splits": 1.0}):
        with pytest.raises(ArgumentTypeError):
            cache.decode(query, **{"scale": 1.0, "splits": 1, **option})


def test_a_refused_step_appends_nothing():
    """Rows that attend to tokens which a ring has dropped, with fewer new tokens than rows."""
    cache = KVCache(B, G, D, 1, "float32", window=60)
    cache.append(*tokens(400))
    cache.truncate(380)
    with pytest.raises(ArgumentError, match="whose ring was truncated"):
        cache.step(draw((B, H, 60, D), 1), *tokens(1))
    assert cache.lengths.tolist() == [380] * B


def test_a_length_near_the_largest_integer_is_damage():
    cache = KVCache(B, G, D, 1, "float32", window=4)
    cache.append(*tokens(9))
    state = cache.state()
    state["lengths"] = np.full(B, 2**63 - 1)
    with pytest.raises(ArgumentError, match="state: got lengths"):
        KVCache(B, G, D, 1, "float32", window=4).load_state(state)


def test_empty_lists_of_a_batch_of_none():
    cache = KVCache(0, G, D, 9, "float32")
    cache.truncate([])
    cache.reorder([])
    assert cache.batch == 0


def test_a_cache_that_no_machine_holds():
    """Beyond the numbers of bytes that NumPy counts in."""
    for sizes in ((1 << 20, 1024, 576, 1 << 31), (1 << 20, 8, 128, 1 << 31)):
        with pytest.raises(MemoryError, match="Unable to allocate"):
            numflash.KVCache(*sizes)


@pytest.mark.parametrize("window", [None, 6])
def test_the_tail_that_the_next_token_sees(window):
    cache = KVCache(B, G, D, 16, "float32", window=window)
    key, value = tokens(9)
    cache.append(key, value)
    for own in (None, 4):
        most = min(own or 10, window or 10)
        room = np.empty((G, 12, D), np.float32), np.empty((G, 11, D), np.float32)
        plain, written = cache.tail(1, own), cache.tail(1, own, out=room)
        for found, mine, x, right in zip(written, plain, room, (key, value), strict=True):
            assert np.shares_memory(found, x) and np.array_equal(found, mine)
            np.testing.assert_array_equal(found, right[1, :, 9 - (most - 1) :])
    if window:  # sinks are attended to as well
        with_sinks = KVCache(B, G, D, 16, "float32", window=window, sinks=2)
        for n, seen in ((5, range(5)), (9, [0, 1, 4, 5, 6, 7, 8]), (200, [0, 1, *range(195, 200)])):
            with_sinks.reset()
            key, value = tokens(n)
            with_sinks.append(key, value)
            for own in (None, 9):
                for found, right in zip(with_sinks.tail(1, own), (key, value), strict=True):
                    np.testing.assert_array_equal(found, right[1][:, list(seen)])
    wide, small = np.zeros((G, 12, D), np.float32), np.zeros((G, 2, D), np.float32)
    for out, error, message in (
        ((wide, small), ArgumentError, "out: got room for 2 tokens; allowed: "),
        ((wide, wide[:, :, :3].copy()), ArgumentError, r"out: got shape \(.*3\); allowed"),
        ((wide[:, ::2], wide), ArgumentTypeError, "out: got float32, contiguous False"),
        ((wide.astype(np.float64), wide), ArgumentTypeError, "out: got float64"),
        ((wide, "x"), ArgumentTypeError, "out: got str; allowed: a NumPy array"),
    ):
        with pytest.raises(error, match=message):
            cache.tail(0, out=out)
