"""Options of decoding on CUDA in the emulator: soft caps, ALiBi, masks, sinks, rings, smoothing, a constant
maximum.
"""

import numpy as np
import pytest
from oracles import draw, naive

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from decode_checks import TOLERANCE, B, D, G, H, expected, filled, new, relative, reports, tokens

from numflash.cache.kvcache import KVCache
from numflash.cuda.kernels.decode_pieces import THREADS


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


@pytest.mark.slow
@pytest.mark.parametrize(("phi", "readings"), [(0.0, 1), (40.0, 2), (-40.0, 2)])
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


def test_a_call_takes_the_options_that_it_is_given():
    """Not those that the same prepared call had before."""
    cache, key, value = filled(20, "float16")
    query = draw((B, H, 1, D), 5)
    for softcap in (1.5, 0.5):
        out = cache.decode(query, softcap=softcap)
        exact, _ = expected(query, key, value, softcap=softcap)
        assert relative(out, exact) <= TOLERANCE["float16"]


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
