"""The float32 kernel in the emulator, against float64, for every option."""
import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import numflash


def check(shape, **options):
    q, k, v = oracles.qkv(**shape)
    out, lse = numflash.attention(q, k, v, enable_gqa=True, return_lse=True, impl="cuda-emulator", **options)
    expected, expected_lse = oracles.naive(q, k, v, **options)
    seen = np.isfinite(expected_lse)
    assert out.dtype == np.float32 and np.allclose(out, expected, atol=3e-6)
    assert np.array_equal(seen, np.isfinite(lse)) and np.allclose(lse[seen], expected_lse[seen], atol=3e-6, rtol=1e-6)


@pytest.mark.parametrize("shape", [{"b": 2, "h": 4, "hkv": 2, "l": 7, "s": 21, "d": 40, "dv": 72}, {"b": 1, "h": 1, "l": 1,
                                                                                                    "s": 1, "d": 1}])
def test_shapes(shape):
    check(shape)


@pytest.mark.parametrize("options", [
    {"is_causal": True}, {"is_causal": True, "alignment": "lower_right"}, {"window": (3, 1)}, {"key_lengths": np.array([9])},
    pytest.param({"softcap": 1.5}, marks=pytest.mark.slow),
    pytest.param({"alibi_slopes": np.array([0.5, 0.1], np.float32)}, marks=pytest.mark.slow)])
def test_options(options):
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32}, **options)


def test_masks():
    rng = np.random.default_rng(1)
    seen = rng.random((1, 2, 13, 21)) > 0.5
    seen[0, 1, 4] = False
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32}, attn_mask=seen)
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32},
          attn_mask=np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32))


def test_hidden_values_that_are_not_finite():
    q, k, v = oracles.qkv(b=1, h=1, l=8, s=8, d=32)
    v[0, 0, 5], k[0, 0, 6] = np.nan, np.inf
    out = numflash.attention(q, k, v, is_causal=True, impl="cuda-emulator")
    assert np.isfinite(out[0, 0, :5]).all() and np.isnan(out[0, 0, 5]).all()
