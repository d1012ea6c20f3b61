"""An INT4 cache on a card, in the emulator: the bits of `int4.quantize`, of `int4.decode`, and so of
the CPU's cache, in half of INT8's memory.
"""

import numpy as np
import pytest
from daily import of_today
from oracles import draw

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash import reference
from numflash.cache.kvcache import KVCache
from numflash.cuda.kernels.decode_codes import KEY_PAIR, VALUE_PAIR
from numflash.cuda.kernels.decode_pieces import THREADS
from numflash.errors import UnsupportedError
from numflash.numerics import fixedpoint
from numflash.numerics.code_pairs import from_pairs, to_pairs
from numflash.numerics.rotation import rotate
from numflash.reference import int4

B, H, G, D = 2, 4, 2, 64
DEVICES = ("cpu", "cuda-emulator")
SLOPES = np.array([0.5, 0.25, 0.03, 2.0], np.float32)
TREE = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def tokens(n, seed=0, b=B, d=D, dv=D):
    return draw((b, G, n, d), seed), draw((b, G, n, dv), seed + 1)


def new(length=400, device="cuda-emulator", d=D, b=B, **options):
    return KVCache(b, G, d, length, "int4", device=device, **options)


def assert_bits(cache, query, splits=1):
    """Output and LSE of every sequence are the integer model's over what the cache stores."""
    out, lse = cache.decode(query, splits=splits, return_lse=True)
    assert not any(report.shared_conflicts for report in cache.emulator.reports)
    for b in range(query.shape[0]):
        k, v = cache.quantized(b)
        length, s = query.shape[2], k.data.shape[1]
        seen = np.arange(s) <= np.arange(length)[:, None] + s - length
        exact, m, l = int4.decode(query[b], k, v, query.shape[3] ** -0.5, seen, splits)
        np.testing.assert_array_equal(out[b].view(np.int32), exact.view(np.int32))
        np.testing.assert_array_equal(
            lse[b], reference.log_sum_exp(m.astype(np.float64), l, None, fixedpoint.SUM_ONE)
        )


def assert_equal(here, there):
    for x, y in zip(here, there, strict=True):
        np.testing.assert_array_equal(x, y)


def assert_equal_states(*caches):
    here, there = (cache.state() for cache in caches)
    assert here.keys() == there.keys()
    assert_equal(here.values(), there.values())


@pytest.mark.parametrize("apart", [1, KEY_PAIR, VALUE_PAIR])
def test_pairs_of_codes(apart):
    for d in (1, 15, 16, 33, 64):
        x = (2 * np.random.default_rng(d).integers(0, 16, (3, d)) - 15).astype(np.int8)
        pairs = to_pairs(x, apart)
        assert pairs.shape == (3, -(-d // (2 * apart)) * apart)
        np.testing.assert_array_equal(from_pairs(pairs, d, apart), x)
    x = np.full((1, 2 * apart), -15, np.int8)
    x[0, 0], x[0, apart] = 15, 1
    assert to_pairs(x, apart)[0, 0] == 0x8F


@pytest.mark.parametrize(
    ("n", "paged"),
    [
        (129, True),
        *(slow(n, n in (17, 65)) for n in (1, 2, 16, 17, 63, 64, 65, 128, 129, 255, 300)),
    ],
)
def test_bits_of_the_model(n, paged):
    cache = new(page_size=16 if paged else None)
    cache.append(*tokens(n))
    for splits in (1, 3) if n > 129 else (1,):
        assert_bits(cache, draw((B, H, 1, D), 9), splits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d", "paged", "queries", "splits"),
    [
        ("sm_75", 64, True, 1, 2),
        ("sm_75", 128, False, 3, 1),
        ("sm_75", 256, True, 1, 2),
        ("sm_75", 256, True, 3, 1),
        ("sm_89", 256, True, 3, 1),
        ("sm_90a", 128, False, 1, 2),
    ],
)
def test_bits_on_other_architectures(arch, d, paged, queries, splits):
    cache = new(device=f"cuda-emulator:{arch}", d=d, page_size=32 if paged else None)
    cache.append(*tokens(140, d=d, dv=d))
    assert_bits(cache, draw((B, H, queries, d), 9), splits)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [2, 6, 14, 16, 32, 40])
def test_groups_of_heads(heads):
    """1, 3, 7, 8, 16 and 20 query heads on a KV head, in one tile of rows and in two."""
    cache = new()
    cache.append(*tokens(130))
    assert_bits(cache, draw((B, heads, 1, D), 9), 2 if heads > 32 else 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("d", "dv"),
    of_today([(5, 7), (33, 24), (80, 96), (96, 32), (64, 129), (200, 160), (256, 256)], 2),
)
def test_channels(d, dv):
    caches = [new(device=device, d=d, value_dim=dv) for device in DEVICES]
    for cache in caches:
        cache.append(*tokens(131, d=d, dv=dv))
        cache.append(*tokens(2, 5, d=d, dv=dv))
    assert_equal_states(*caches)
    for splits in (1, 2):
        assert_bits(caches[1], draw((B, H, 2, d), 9), splits)


def test_storage_is_the_quantisation():
    cache = new(page_size=32)
    key, value = tokens(45, d=D)
    key[:, :, 5], value[:, :, 9] = 0, 0
    key[0, 0, 7], value[0, 1, 8] = 1e-35, 3e38
    for part in (slice(0, 30), slice(30, 31), slice(31, 45)):
        cache.append(key[:, :, part], value[:, :, part])
    for b in range(B):
        for found, x in zip(cache.quantized(b), (key[b], value[b]), strict=True):
            wanted = int4.quantize(x)
            np.testing.assert_array_equal(found.data, wanted.data)
            np.testing.assert_array_equal(found.scale, wanted.scale)
        for x, y in zip(cache.read(b), cache.quantized(b), strict=True):
            np.testing.assert_array_equal(x, rotate(y.dequantize()))
    assert new(d=128).nbytes == KVCache(B, G, 128, 400, device=DEVICES[1]).nbytes * 136 // 264


def test_all_codes_at_both_ends():
    """Rows whose rotation has one magnitude and any signs: numbers of -15 and 15 only, and the
    largest sums that products of bytes can reach.
    """
    rng = np.random.default_rng(3)
    signs = rng.choice([-1.0, 1.0], (2, B, G, 128, D))
    signs[:, :, 0] = 1  # the largest sum of products, with the query's head 0
    key, value = (rotate(x).astype(np.float32) for x in signs)
    cache = new(page_size=128)
    cache.append(key, value)
    stored = cache.quantized(0)
    assert all(set(np.unique(np.abs(x.data))) == {15} for x in stored)
    query = np.repeat(key[:, :, :1], H // G, 1)
    query[:, 1::2] *= -1
    assert_bits(cache, query)


@pytest.mark.slow
def test_zeros_and_what_is_not_finite():
    key, value = tokens(130)
    value[:], key[0, 0, 100, 3] = 0, np.nan
    value[1, 1, 7, 2], key[1, 0, 0] = -np.inf, 0
    caches = [new(device=device, page_size=128) for device in DEVICES]
    query = draw((B, H, 1, D), 9)
    for cache in caches:
        cache.append(key, value)
    assert_equal_states(*caches)
    here, there = (cache.decode(query, return_lse=True, splits=1) for cache in caches)
    assert_equal(here, there)
    out = there[0]
    assert np.isnan(out[0, :2]).all() and np.isnan(out[1, 2:]).all()
    assert not out[0, 2:].any() and not out[1, :2].any()  # blocks of zeros have scale 0


@pytest.mark.slow
@pytest.mark.parametrize("size", [1e-3, 1e18])
def test_extreme_scales(size):
    cache = new()
    key, value = tokens(150)
    value[:, :, ::3] *= 1e-6
    key[:, :, 5] = 0
    cache.append(key * np.float32(size), value * np.float32(size))
    assert_bits(cache, draw((B, H, 1, D), 9) * np.float32(size), 2)


@pytest.mark.slow
@pytest.mark.parametrize("smooth", [False, True])
def test_the_cpu_gives_the_same(smooth):
    """Token by token, with pages: states, steps, outputs, and what is read back."""
    caches = [new(device=device, smooth=smooth, page_size=128) for device in DEVICES]
    key, value = tokens(135)
    key[..., 3] += 30
    query = draw((B, H, 1, D), 3)
    for a, z in ((0, 126), (126, 127), (127, 128), (128, 129), (129, 134)):
        for cache in caches:
            cache.append(key[:, :, a:z], value[:, :, a:z])
        splits = 2 if z > 128 else 1
        assert_equal(*(c.decode(query, splits=splits, return_lse=True) for c in caches))
    step = [np.ascontiguousarray(x[:, :, 134:]) for x in (key, value)]
    assert_equal(*(c.step(query, *step, splits=2) for c in caches))
    assert_equal_states(*caches)
    assert_equal(*(cache.read(1) for cache in caches))


@pytest.mark.slow
def test_changes_of_sequences_and_states_between_devices():
    """Pages, shared and copied; cut within a page; a state goes from one device to the other."""
    found = []
    key, value = tokens(150)
    for device in DEVICES:
        cache = new(200, device, page_size=128)
        cache.append(key[:, :, :140], value[:, :, :140])
        cache.truncate([133, 140])
        cache.reorder([1, 0])
        cache.repeat(2)
        cache.reset(3)
        cache.share(0, 3, 130)
        cache.append(key[[1, 1, 0, 1], :, 140:], value[[1, 1, 0, 1], :, 140:], counts=[10, 3, 0, 1])
        assert cache.lengths.tolist() == [150, 143, 133, 131]
        cache.reserve(300)
        found.append(cache.copy())
    assert_equal_states(*found)
    query = draw((4, H, 1, D), 9)
    wanted = found[0].decode(query, splits=2)
    for source, device in zip(found, reversed(DEVICES), strict=True):
        other = new(300, device, b=4)
        other.load_state(source.state())
        np.testing.assert_array_equal(other.decode(query, splits=2), wanted)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"softcap": 3.0, "alibi_slopes": SLOPES, "mask": TREE}])
def test_a_ring(options):
    """More tokens than slots; the last rows with options, of which the mask hides new tokens."""
    caches = [new(1, device, window=20, sinks=3) for device in DEVICES]
    key, value = tokens(300)
    query = draw((B, H, 3, D), 2)
    for a, z in ((0, 97), (97, 134), (134, 135), (135, 290), (290, 300)):
        for cache in caches:
            cache.append(key[:, :, a:z], value[:, :, a:z])
        assert_equal(*(c.decode(query, splits=1, return_lse=True, **options) for c in caches))
    assert_equal_states(*caches)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [4, 12])
@pytest.mark.parametrize("smooth", [False, True])
def test_options_have_the_bits_of_the_cpu(smooth, heads):
    """More rows than a tile has too; a key that the mask hides is not finite."""
    query = draw((B, heads, 3, D), 5)
    key, value = tokens(150)
    value[:, :, 148] = np.nan
    slopes = np.resize(SLOPES, heads)
    options = {"softcap": 3.0, "alibi_slopes": slopes, "mask": TREE, "sinks": slopes}
    found = []
    for device in DEVICES:
        cache = new(200, device, smooth=smooth, page_size=128)
        cache.append(key, value)
        found.append(cache.decode(query, splits=2, return_lse=True, **options))
    assert_equal(*found)
    assert np.isfinite(found[1][0][:, :, 2]).all()


def test_half_of_the_bytes_are_read():
    """Traffic of a step, exactly: codes and scales in use, once, and the query once per block."""
    n, heads = 144, 8
    cache = new(page_size=16)
    cache.append(*tokens(n))
    cache.emulator.reports.clear()
    cache.decode(draw((B, heads, 1, D), 3), splits=1)
    _, decode, _ = cache.emulator.reports  # between the rotations of queries and outputs
    small = B * G * (THREADS * 4 + heads // G * D * 4)  # length, query
    table = B * G * n * 4 * (D // 32 + 1 + 1 / 2)  # a piece of a key, 16 slots of 8 rows, 4 scales
    assert decode.global_loaded == B * G * n * (D + 8) + small + table


def test_what_is_refused():
    with pytest.raises(UnsupportedError, match="head_dim: got 300; the CUDA kernels take 1 to 256"):
        new(d=300)
    with pytest.raises(UnsupportedError, match="value_in_key"):
        new(value_in_key=True)
    with pytest.raises(UnsupportedError, match=r"head_dim: got 256 .* sm_75 has 65536"):
        KVCache(1, 1, 256, 64, device="cuda-emulator:sm_75")
    assert KVCache(1, 1, 256, 64, "int4", device="cuda-emulator:sm_75").rotate
    with pytest.raises(UnsupportedError, match=r"decode over int8, int4, float16$"):
        KVCache(1, 1, 64, 64, "bfloat16", device="cuda-emulator:sm_75")
