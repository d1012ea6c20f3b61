"""The float32 kernel in the emulator, against float64, for every option."""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from float_checks import compare

import numflash


def check(shape, **options):
    q, k, v = oracles.qkv(**shape)
    out, lse = numflash.attention(
        q, k, v, enable_gqa=True, return_lse=True, impl="cuda-emulator", **options
    )
    assert out.dtype == lse.dtype == np.float32
    compare(out, lse, q, k, v, **options)


@pytest.mark.parametrize(
    "shape",
    [
        {"b": 2, "h": 4, "hkv": 2, "l": 7, "s": 21, "d": 40, "dv": 72},
        {"b": 1, "h": 1, "l": 1, "s": 1, "d": 1},
    ],
)
def test_shapes(shape):
    check(shape)


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (3, 1)},
        {"key_lengths": np.array([9])},
    ],
)
def test_options(options):
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32}, **options)


def test_masks():
    rng = np.random.default_rng(1)
    seen = rng.random((1, 2, 13, 21)) > 0.5
    seen[0, 1, 4] = False
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32}, attn_mask=seen)
    bias = np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32)
    bias[0, 0, 9] = np.finfo(np.float32).min  # a row that sees all keys alike
    check({"b": 1, "h": 2, "l": 13, "s": 21, "d": 32}, attn_mask=bias)


def test_hidden_values_that_are_not_finite():
    q, k, v = oracles.qkv(b=1, h=1, l=8, s=8, d=32)
    v[0, 0, 5], k[0, 0, 6] = np.nan, np.inf
    out = numflash.attention(q, k, v, is_causal=True, impl="cuda-emulator")
    assert np.isfinite(out[0, 0, :5]).all() and np.isnan(out[0, 0, 5]).all()
