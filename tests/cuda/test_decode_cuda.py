"""Decode on CUDA in the emulator.

INT8 with the integer model's bits, floats against float64, pages, rings, traffic, errors.
"""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import draw, naive

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash import reference
from numflash.cache.engine import DecodeEngine, State
from numflash.cache.kvcache import KVCache
from numflash.cuda import decode_layout
from numflash.cuda.device import resident
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.decode_pieces import THREADS
from numflash.errors import ArgumentError, CacheFullError, UnsupportedError
from numflash.numerics import fixedpoint, quantization

B = 2
H = 4
G = 2
D = 64
QUICK = {(1, False), (17, True), (128, True), (129, False)}  # lengths and pages of default tests
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "int8": 0.03}


def tokens(n, seed=0, b=B, d=D):
    return draw((b, G, n, d), seed), draw((b, G, n, d), seed + 1)


def new(dtype="int8", length=400, b=B, d=D, **options):
    return KVCache(b, G, d, length, dtype, device="cuda-emulator", **options)


def filled(n, dtype="int8", seed=0, **options):
    cache = new(dtype, **options)
    key, value = tokens(n, seed)
    cache.append(key, value)
    return cache, key, value


def reports(cache):
    return cache.emulator.reports


def relative(out, exact):
    return np.abs(out - exact).sum() / max(np.abs(exact).sum(), 1e-30)


def expected(query, key, value, **options):
    return naive(query, key, value, is_causal=True, alignment="lower_right", **options)


def assert_bits(cache, query, splits, seen=None):
    """Output and LSE of every sequence are the integer model's over what the cache stores."""
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    assert reports(cache)[-1].shared_conflicts == 0
    for b in range(query.shape[0]):
        k, v = cache.quantized(b)
        length = query.shape[2]
        s = k.data.shape[1]
        sees = (
            np.arange(s)[None] <= np.arange(length)[:, None] + s - length if seen is None else seen
        )
        exact, m, l = reference.integer_decode(
            reference.decode_query(query[b]), k, v, query.shape[3] ** -0.5, sees, splits
        )
        np.testing.assert_array_equal(out[b].view(np.int32), exact.view(np.int32))
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )


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
@pytest.mark.parametrize(("d", "heads", "paged"), [(64, 4, True), (128, 40, False)])
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
    paged, _, _ = filled(n, dtype, page_size=16) if n in (17, 300) else (None, 0, 0)
    query = draw((B, H, 1, D), 5)
    exact, exact_lse = expected(query, key, value)
    for splits in (1, 3) if n > 128 else (1,):
        out, lse = whole.decode(query, splits=splits, return_lse=True)
        assert relative(out, exact) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, exact_lse, atol=0.03 if dtype == "bfloat16" else 3e-3)
        if paged is not None:
            np.testing.assert_array_equal(paged.decode(query, splits=splits), out)
    assert reports(whole)[-1].shared_conflicts == 0


@pytest.mark.parametrize("dtype", ["int8", "float16"])
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
    "heads", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (14, 16, 40))]
)
def test_groups_of_heads(heads):
    """1, 7, 8 and 20 query heads on a KV head.

    Rows of one tile, of two, never a second reading of the keys.
    """
    cache, _, _ = filled(130)
    assert_bits(cache, draw((B, heads, 1, D), 9), 2 if heads > 32 else 1)


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
    [
        (5, 7, "int8"),
        (80, 96, "int8"),
        (256, 256, "int8"),
        (5, 7, "float16"),
        (128, 64, "float16"),
    ],
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


def test_storage_is_the_quantisation():
    cache, key, value = filled(40)
    for b in range(B):
        for found, x in zip(cache.quantized(b), (key[b], value[b]), strict=True):
            wanted = quantization.quantize(x)
            np.testing.assert_array_equal(found.data, wanted.data)
            np.testing.assert_array_equal(found.scale, wanted.scale)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_floats_are_rounded_once(dtype):
    cache, key, _ = filled(20, dtype)
    rounded = KVCache(B, G, D, 400, dtype)
    rounded.append(*tokens(20))
    for a, b in zip(cache.read(1), rounded.read(1), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.abs(cache.read(0)[0] - key[0]).max() > 0


def test_an_append_reads_the_length_before_it_moves(monkeypatch):
    """Whichever warps run first."""
    for seed in range(6):
        monkeypatch.setattr(resident, "emulate", functools.partial(emulate, seed=seed))
        cache, key, value = new("float16", b=1), *tokens(4, b=1)
        cache.append(key, value)
        np.testing.assert_allclose(cache.read(0)[0], key[0], rtol=1e-3)


def test_lengths_differ_and_reset():
    cache = new()
    key, value = tokens(150)
    cache.append(key, value, counts=[150, 9])
    cache.append(key[:, :, :2], value[:, :, :2], counts=np.array([0, 1]))
    assert cache.lengths.tolist() == [150, 10]
    query = draw((B, H, 1, D), 3)
    assert_bits(cache, query, 1)
    cache.reset(0)
    out, lse = cache.decode(query, return_lse=True)
    assert not out[0].any() and (lse[0] == -np.inf).all() and out[1].any()
    cache.append(*tokens(7, 4))  # what lay there before is not seen
    assert cache.lengths.tolist() == [7, 17]
    assert_bits(cache, query, 1)


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_shared_prefix(dtype):
    cache = KVCache(3, G, D, 200, dtype, page_size=32, pages=7, device="cuda-emulator")
    key, value = tokens(70, b=3)
    cache.append(key, value, counts=[70, 0, 0])
    cache.share(0, 1)
    cache.share(0, 2, 32)
    assert cache.free_pages == 3 and cache.lengths.tolist() == [70, 70, 32]
    more = tokens(3, 8, b=3)
    cache.append(*more)
    query = draw((3, H, 1, D), 2)
    out = cache.decode(query)
    for b, n in enumerate((70, 70, 32)):
        k, v = (
            np.concatenate([x[:1, :, :n], y[b : b + 1]], 2)
            for x, y in zip((key, value), more, strict=True)
        )
        assert relative(out[b : b + 1], expected(query[b : b + 1], k, v)[0]) < TOLERANCE[dtype]
    cache.reset(0)
    np.testing.assert_array_equal(cache.decode(query)[1:], out[1:])
    with pytest.raises(CacheFullError, match="more pages"):
        cache.append(*tokens(100, b=3))


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_ring(dtype):
    """More tokens than slots.

    Each row sees the first `sinks` and the last `window`, on both ends of the ring too.
    """
    window = 20
    sinks = 3
    cache = new(dtype, length=1, window=window, sinks=sinks)
    key, value = tokens(300)
    query = draw((B, H, 1, D), 2)
    for a, z in ((0, 2), (2, 20), (20, 26), (26, 134), (134, 135), (135, 290), (290, 300)):
        cache.append(key[:, :, a:z], value[:, :, a:z])
        out, lse = cache.decode(query, splits=1, return_lse=True)
        seen = [j for j in range(z) if j < sinks or j >= z - window]
        exact, exact_lse = expected(query, key[:, :, seen], value[:, :, seen])
        assert relative(out, exact) <= TOLERANCE[dtype]
        np.testing.assert_allclose(lse, exact_lse, atol=0.05)
    two = draw((B, H, 2, D), 4)
    out = cache.decode(two)
    for row in range(2):
        seen = [j for j in range(299 + row) if j < sinks or j >= 299 + row - window]
        exact = naive(two[:, :, row : row + 1], key[:, :, seen], value[:, :, seen])[0]
        assert relative(out[:, :, row : row + 1], exact) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_tokens_and_queries_that_are_not_finite(dtype):
    cache = new(dtype)
    key, value = tokens(30)
    key[0, 0, 21, 3], value[1, 1, 29, 5] = np.inf, np.nan
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


def test_smoothing():
    key, value = tokens(60)
    key[..., 3] += 30
    caches = [
        KVCache(B, G, D, 100, smooth=True, device=device) for device in ("cpu", "cuda-emulator")
    ]
    for cache in caches:
        cache.append(key[:, :, :50], value[:, :, :50])
        cache.append(key[:, :, 50:], value[:, :, 50:])
    query = draw((B, H, 1, D), 5)
    for x, y in zip(
        *(cache.decode(query, splits=1, return_lse=True) for cache in caches), strict=True
    ):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("dtype", "paged"),
    [
        ("int8", False),
        pytest.param("int8", True, marks=pytest.mark.slow),
        pytest.param("float16", False, marks=pytest.mark.slow),
    ],
)
def test_every_byte_of_the_cache_is_read_once(dtype, paged):
    """Traffic of a step, exactly: the keys, values and scales in use, once, whatever the splits.

    The query once per block.
    """
    n = 288
    heads = 14
    size = 1 if dtype == "int8" else 2
    cache, _, _ = filled(n, dtype, page_size=32 if paged else None)
    query = draw((B, heads, 1, D), 3)
    kept = B * G * n * (2 * D * size + (8 if dtype == "int8" else 0))
    for splits in (1, 3):
        reports(cache).clear()
        cache.decode(query, splits=splits)
        report = reports(cache)[0]
        blocks = B * G * splits
        assert report.blocks == blocks and len(reports(cache)) == (1 if splits == 1 else 2)
        small = blocks * (THREADS * 4 + heads // G * D * 4)  # length, query
        # a page number for a piece of a key, for 16 slots of 16 channels, for 4 scales
        table = B * G * n * 4 * (D // 16 + 1 + 1 / 2) if paged else 0
        assert report.global_loaded == kept + small + table


def test_a_step_uploads_only_its_token():
    cache, _, _ = filled(120)
    card = cache.emulator
    query = draw((B, H, 1, D), 3)
    cache.append(*tokens(1))
    cache.decode(query)
    for step in range(3):
        before = card.uploaded
        key, value = tokens(1, step)
        cache.append(key, value)
        assert card.uploaded - before == key.nbytes + value.nbytes
        cache.decode(query)
        assert card.uploaded - before == key.nbytes + value.nbytes + query.nbytes


def test_short_contexts_take_one_block_per_head():
    cache, _, _ = filled(256, length=600)
    reports(cache).clear()
    cache.decode(draw((B, H, 1, D)))
    assert [r.blocks for r in reports(cache)] == [B * G]
    cache.append(*tokens(1))
    reports(cache).clear()
    cache.decode(draw((B, H, 1, D)))
    assert (
        len(reports(cache)) == 2 and reports(cache)[0].blocks == 3 * B * G
    )  # and a kernel that combines


@pytest.mark.parametrize(
    ("phi", "readings"), [(0.0, 1), (40.0, 2), pytest.param(-40.0, 2, marks=pytest.mark.slow)]
)
def test_unified_maximum(phi, readings):
    """A constant in place of the maximum where it fits.

    Where it does not, the block reads its keys again with the maximum.
    """
    n = 100
    cache, key, value = filled(n, "float16", unified_max=phi)
    query = draw((B, H, 1, D), 5)
    reports(cache).clear()
    out, lse = cache.decode(query, return_lse=True)
    exact, exact_lse = expected(query, key, value)
    assert relative(out, exact) <= TOLERANCE["float16"]
    np.testing.assert_allclose(lse, exact_lse, atol=3e-3)
    small = B * G * (THREADS * 4 + H // G * D * 4)
    assert reports(cache)[0].global_loaded == small + readings * B * G * n * 2 * D * 2


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float16", marks=pytest.mark.slow)])
def test_a_step_is_append_and_decode(dtype):
    whole, parts = (new(dtype, page_size=128) for _ in range(2))
    for cache in (whole, parts):
        cache.append(*tokens(126))
    for i in range(4):  # across the end of a page
        (key, value), query = tokens(1, i), draw((B, H, 1, D), 50 + i)
        parts.append(key, value)
        np.testing.assert_array_equal(whole.step(query, key, value), parts.decode(query))
    assert whole.lengths.tolist() == parts.lengths.tolist() == [130, 130]
    with pytest.raises(ArgumentError, match="key: got shape"):
        whole.step(query, key[:, :1].copy(), value)
    with pytest.raises(CacheFullError, match="allowed: 400 in all"):
        whole.step(draw((B, H, 300, D)), *tokens(300))
    assert whole.lengths.tolist() == [130, 130]


def test_the_decode_engine():
    engine = DecodeEngine(
        batch=B, kv_heads=G, head_dim=D, max_length=40, dtype="float16", device="cuda-emulator"
    )
    key, value = tokens(4)
    query = draw((B, H, 4, D), 5)
    engine.init()
    for i in range(2):
        engine.load_qkv(*(x[:, :, i : i + 1] for x in (query, key, value)))
        engine.decode()
        exact = expected(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1])[0]
        assert relative(engine.get_output(), exact) <= TOLERANCE["float16"]
    assert engine.state is State.OUTPUT_READY
    engine.reset()
    for i in range(2):
        out = engine.step(*(np.ascontiguousarray(x[:, :, i : i + 1]) for x in (query, key, value)))
    assert relative(out, exact) <= TOLERANCE["float16"]
    engine.cleanup()
    assert engine.cache is None


def test_what_is_refused():
    for options, error, words in (
        ({"dtype": "float32"}, UnsupportedError, "dtype"),
        ({"d": 300}, UnsupportedError, "head_dim"),
        ({"page_size": 8}, ArgumentError, "page_size"),
        ({"page_size": 48}, ArgumentError, "page_size"),
        ({"isa": "portable"}, ArgumentError, "isa"),
        ({"unified_max": 0}, UnsupportedError, "unified_max"),
    ):
        with pytest.raises(error, match=words):
            new(**options)
    with pytest.raises(UnsupportedError, match="emulator: got a cache on 'cpu'"):
        assert KVCache(1, 1, 8, 8).emulator
    cache, key, value = filled(4)
    with pytest.raises(ArgumentError, match="query: got shape"):
        cache.decode(np.zeros((B, 3, 1, D), np.float32))
    on_card = SimpleNamespace(
        __cuda_array_interface__={
            "shape": key.shape,
            "typestr": "<f4",
            "data": (16, False),
            "version": 3,
        }
    )
    query = np.zeros((B, H, 4, D), np.float32)
    for name, call in (
        ("key", lambda: cache.append(on_card, value)),
        ("value", lambda: cache.append(key, on_card)),
        ("query", lambda: cache.decode(on_card)),
        ("query", lambda: cache.step(on_card, key, value)),
        ("key", lambda: cache.step(query, on_card, value)),
    ):
        with pytest.raises(
            UnsupportedError,
            match=f"{name}: the array is in GPU memory; allowed: arrays in host memory",
        ):
            call()
    assert cache.lengths.tolist() == [4] * B
    with pytest.raises(CacheFullError, match="allowed: 400 in all"):
        cache.append(*tokens(397))
    assert cache.lengths.tolist() == [4, 4]
    assert cache.nbytes == B * G * 512 * (2 * D + 8)
    assert decode_layout.SHORT_CONTEXT == 256


SLOPES = np.array([0.5, 0.25, 0.03, 2.0], np.float32)
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
OPTIONS = {
    "softcap": {"softcap": 1.5},
    "all": {"softcap": 3.0, "alibi_slopes": SLOPES, "mask": TREE, "sinks": SLOPES},
}


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("case", OPTIONS)
def test_options_have_the_bits_of_the_cpu(case, smooth):
    """Pages or one sequence after another; a key that the mask hides is not finite."""
    options = OPTIONS[case]
    query = draw((B, H, 3, D), 5)
    key, value = tokens(150)
    value[:, :, 148] = np.nan
    found = []
    for device in ("cpu", "cuda-emulator"):
        cache = KVCache(B, G, D, 200, device=device, smooth=smooth, page_size=128)
        cache.append(key, value)
        found.append(cache.decode(query, splits=2, return_lse=True, **options))
    for x, y in zip(*found, strict=True):
        np.testing.assert_array_equal(x, y)
    assert np.isfinite(found[0][0][:, :, 2 if case == "all" else 3 :]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "float16"])
def test_options_in_a_ring(dtype):
    query = draw((B, H, 3, D), 5)
    key, value = tokens(100)
    found = []
    for device in ("cpu", "cuda-emulator"):
        cache = KVCache(B, G, D, 1, dtype, device=device, window=20, sinks=2)
        for a in (0, 97):
            cache.append(key[:, :, a : a + 97], value[:, :, a : a + 97])
        found.append(cache.decode(query, splits=1, **OPTIONS["all"]))
    if dtype == "int8":
        np.testing.assert_array_equal(*found)
    np.testing.assert_allclose(*found, atol=3e-3)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_75"])
def test_options_in_floats(arch):
    query = draw((B, H, 3, D), 5)
    cache = KVCache(B, G, D, 200, "float16", device=f"cuda-emulator:{arch}")
    key, value = tokens(70)
    cache.append(key, value)
    out, lse = cache.decode(query, return_lse=True, **OPTIONS["all"])
    seen = np.arange(70)[None] <= np.arange(3)[:, None] + 67
    seen[:, 67:] &= TREE
    options = {name: x for name, x in OPTIONS["all"].items() if name != "mask"}
    exact, exact_lse = naive(query, key, value, seen, alignment="lower_right", **options)
    assert relative(out, exact) <= TOLERANCE["float16"]
    np.testing.assert_allclose(lse, exact_lse, atol=2e-3)


def test_tokens_of_other_types():
    key, value = tokens(9)
    half = new("float16")
    half.append(key.astype(np.float16), value.astype(np.float16))
    whole = new("float16")
    whole.append(key.astype(np.float64), value)
    for a, b in zip(half.read(0), whole.read(0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert half.decode(draw((B, H, 1, D)).astype(np.float16)).dtype == np.float16
