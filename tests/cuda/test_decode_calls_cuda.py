"""Calls of a cache on CUDA in the emulator: what they store, read, upload and refuse."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from oracles import draw

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

from numflash.cache.engine import DecodeEngine, State
from numflash.cache.kvcache import KVCache
from numflash.cuda import decode_layout
from numflash.cuda.device import resident
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.decode_pieces import THREADS
from numflash.errors import ArgumentError, CacheFullError, UnsupportedError
from numflash.numerics import quantization


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
    cache.reserve(500)  # the prepared call follows the tokens to other memory
    cache.append(*tokens(3, 8))
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "paged"),
    [
        ("int8", False),
        ("int8", True),
        ("float16", False),
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


def test_tokens_of_other_types():
    key, value = tokens(9)
    half = new("float16")
    half.append(key.astype(np.float16), value.astype(np.float16))
    whole = new("float16")
    whole.append(key.astype(np.float64), value)
    for a, b in zip(half.read(0), whole.read(0), strict=True):
        np.testing.assert_array_equal(a, b)
    assert half.decode(draw((B, H, 1, D)).astype(np.float16)).dtype == np.float16
