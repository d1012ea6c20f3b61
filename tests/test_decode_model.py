"""The error of the integer model of decoding against float64, on random numbers and on real
activations: that of its storage in 8 bits, and little more.
"""

import numpy as np
import pytest

from numflash import reference
from numflash.measure.data import minilm
from numflash.numerics import fixedpoint as fx
from numflash.numerics import quantization


def exact(query, key, value):
    """Attention of heads of their own in float64; query (H, L, D), key and value (Hkv, S, D)."""
    group = query.shape[0] // key.shape[0]
    key, value = (np.repeat(x, group, 0).astype(np.float64) for x in (key, value))
    s = query.astype(np.float64) @ key.swapaxes(1, 2) * query.shape[2] ** -0.5
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ value / p.sum(-1, keepdims=True)


def relative(query, key, value):
    k, v = (quantization.quantize(x) for x in (key, value))
    seen = np.ones((query.shape[1], key.shape[1]), bool)
    q = reference.decode_query(query)
    out, _, _ = reference.integer_decode(q, k, v, query.shape[2] ** -0.5, seen)
    wanted = exact(query, key, value)
    return np.abs(out - wanted).sum() / np.abs(wanted).sum()


@pytest.mark.parametrize("n", [4096, 32768])
def test_random_numbers(n):
    rng = np.random.default_rng(n)
    query, key, value = (
        rng.standard_normal(shape, np.float32) for shape in ((1, 16, 128), (1, n, 128), (1, n, 128))
    )
    assert relative(query, key, value) <= 0.0100  # 0.0095; with weights and query in 8 bits 0.0195


def test_real_activations():
    query, key, value = (x.astype(np.float32) for x in minilm())
    assert relative(query[:, -64:], key, value) <= 0.0062  # 0.0189 with 8 bits


def test_the_query_in_two_planes():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 5, 40), np.float32)
    x[0, 0], x[1, 1] = 0, 1e-35
    x[2, 2, 7], x[2, 3] = np.nan, -3e38
    q = reference.decode_query(x)
    high = (q.data.astype(np.int32) + 64) >> 7
    low = q.data - 128 * high
    assert np.abs(high).max() == 127 and low.min() >= -64 and low.max() <= 63
    assert q.nonfinite is not None and q.nonfinite.sum() == 1 and q.nonfinite[2, 2]
    good = ~q.nonfinite & (np.abs(x).max(-1) > 1e-30)
    error = np.abs(q.dequantize()[good] - x[good]).max(-1) / np.abs(x[good]).max(-1)
    assert error.max() <= 0.501 / fx.QUERY_ONE
    assert not q.data[0, 0].any() and not q.data[1, 1].any() and q.scale[0, 0] == 1


def test_units():
    """Four sums fit 16 bits; products of whole blocks and of the widest query fit int32."""
    assert fx.W_ONE == fx.P_WIDE >> 1 and fx.SUM_ONE == fx.P_WIDE >> 2 and 4 * fx.SUM_ONE < 1 << 16
    assert 128 * 128 * fx.W_ONE < 1 << 31 and 512 * 128 * fx.QUERY_ONE < 1 << 31
    assert float(np.float32(fx.KEY_SCALE_LIMIT) * np.float32(2**31)) < np.inf
