"""Rotation by Hadamard matrices: against the matrix in float64, and what it does to INT8."""

import numpy as np
import pytest
from oracles import draw, naive

import numflash
from numflash.errors import ArgumentTypeError
from numflash.numerics.rotation import block_of, rotate


def hadamard(n):
    """The matrix by its definition: the sign of entry (i, j) is the parity of i & j."""
    signs = [[(-1) ** bin(i & j).count("1") for j in range(n)] for i in range(n)]
    return np.array(signs, float) / np.sqrt(n)


def turned(x):
    """Sums and differences in the order that gives the bits, in float32."""
    n = block_of(x.shape[1])
    x = x * np.float32(n**-0.5)
    half = 1
    while half < n:
        pairs = x.reshape(len(x), -1, 2, half)
        low, high = pairs[:, :, 0], pairs[:, :, 1]
        x = np.stack([low + high, low - high], 2).reshape(x.shape)
        half *= 2
    return x


@pytest.mark.parametrize("d", [7, 24, 80, 96, 64, 128])
def test_against_the_matrix(d):
    x = draw((300, d), 1)
    matrix = np.kron(np.eye(d // block_of(d)), hadamard(block_of(d)))
    found = rotate(x)
    np.testing.assert_array_equal(found, turned(x))
    np.testing.assert_allclose(found, x @ matrix, rtol=0, atol=4e-6)
    np.testing.assert_allclose(rotate(found), x, rtol=0, atol=4e-6)


def test_finite_rows_stay_finite():
    x = draw((4, 64))
    x[0], x[1, 3], x[2, 5] = 3e38, np.nan, np.inf
    found = rotate(x)
    assert np.isfinite(found[0]).all() and found[0, 0] == np.finfo(np.float32).max
    assert np.isnan(found[1]).any() and not np.isfinite(found[2]).any()
    assert np.isfinite(found[3]).all()


def relative(key, rotated):
    """Error of causal INT8 attention over keys (1, H, 300, 64), with the integer model's bits."""
    query, value = draw((1, 2, 300, 64)), draw((1, 2, 300, 64), 2)
    tensors = numflash.quantize_qkv(query, key, value, rotate=rotated)
    out, lse = numflash.attention_int8(*tensors, is_causal=True, return_lse=True)
    again = numflash.attention_int8(*tensors, is_causal=True, impl="reference")
    np.testing.assert_array_equal(out, again)
    exact, exact_lse = naive(query, key, value, is_causal=True)
    assert np.abs(lse - exact_lse).mean() < 0.1
    return np.abs(out - exact).sum() / np.abs(exact).sum()


def test_large_channels_cost_less():
    key = draw((1, 2, 300, 64), 1)
    key[..., [3, 40]] *= 20
    assert relative(key, True) <= 0.6 * relative(key, False)
    key = draw((1, 2, 300, 64), 1)
    assert relative(key, True) <= 1.1 * relative(key, False)


def test_bad_argument():
    x = draw((1, 1, 4, 8))
    with pytest.raises(ArgumentTypeError, match="rotate"):
        numflash.quantize_qkv(x, x, x, rotate=1)
