"""Scores beyond float32 in merges, sinks and the log-sum-exp, and an overflow that would cancel."""

import warnings

import numpy as np
import pytest
from oracles import draw

import numflash
from numflash.numerics import merge

F = np.float32
LARGEST = np.finfo(F).max


def full(x, *shape):
    return np.full(shape, x, F)


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("impl", ["cpu", "portable", "reference"])
def test_sinks_beside_scores_that_overflow(precision, impl):
    q = full(1e38, 1, 1, 3, 4)
    v = draw((1, 1, 3, 4))
    out, lse = numflash.attention(
        q, q, v, sinks=[0.0], precision=precision, impl=impl, return_lse=True
    )
    np.testing.assert_allclose(out, np.broadcast_to(v.mean(2, keepdims=True), v.shape), atol=0.02)
    assert (lse > 1e4).all()


@pytest.mark.parametrize("dtype", [F, np.float64])
def test_merging_with_an_infinite_lse(dtype):
    """An LSE of +inf is a sum that float32 does not hold.

    It outweighs every finite one, and equals another.
    """
    a = np.ones((4, 2), dtype)
    b = np.full((4, 2), 3, dtype)
    la = np.array([np.inf, 0, np.inf, -np.inf], dtype)
    lb = np.array([0, np.inf, np.inf, np.inf], dtype)
    out, lse = numflash.merge_states(a, la, b, lb)
    assert out[:, 0].tolist() == [1, 3, 2, 3] and (lse == np.inf).all()
    out, lse = numflash.merge_states(
        a, np.array([np.nan, 0, 0, 0], dtype), b, np.array([np.inf, np.nan, 0, 0], dtype)
    )
    assert np.isnan(out[:2]).all() and np.isnan(lse[:2]).all() and (out[2:] == 2).all()


def test_no_warning_leaves_a_merge():
    value = draw((1, 1, 3, 4))
    value[0, 0, 1, 2] = np.inf
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = numflash.attention(full(100, 1, 1, 3, 4), full(1, 1, 1, 3, 4), value, sinks=[1000.0])
        assert not out.any(), "the sink takes all"
        merge.join(np.array([[np.inf, np.nan]], F), np.array([0.0], F))
        merge.weights(np.array([np.inf, -np.inf, np.nan], F), np.array([np.inf, -np.inf, 0], F))


def test_no_warning_leaves_the_integer_model():
    x = draw((1, 1, 40, 16))
    value = full(LARGEST, 1, 1, 40, 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = numflash.attention(x, x, value, precision="int8", impl="reference")
    assert np.isinf(out).any(), "a product that overflows"


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("impl", ["cpu", "portable", "reference"])
def test_a_row_that_sees_keys_has_an_lse_above_minus_infinity(precision, impl):
    """-inf is for rows that see nothing: a merge drops them."""
    q = full(1e38, 1, 1, 3, 4)
    v = draw((1, 1, 5, 4))
    for key in (
        full(-1e38, 1, 1, 5, 4),
        np.concatenate([full(-1e38, 1, 1, 4, 4), full(-3e38, 1, 1, 1, 4)], 2),
    ):
        out, lse = numflash.attention(q, key, v, precision=precision, impl=impl, return_lse=True)
        assert (lse == -LARGEST).all() or (np.isfinite(lse).all() and (lse < -1e5).all())
        merged, _ = numflash.merge_states(out, lse, np.zeros_like(out), np.full_like(lse, -np.inf))
        np.testing.assert_array_equal(merged, out)


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_the_same_of_a_cache(dtype):
    cache = numflash.KVCache(1, 1, 4, 300, dtype, smooth=dtype == "int8")
    cache.append(full(-1e38, 1, 1, 20, 4), draw((1, 1, 20, 4)))
    out, lse = cache.decode(full(1e38, 1, 2, 1, 4), return_lse=True)
    assert np.isfinite(lse).all() and (lse < -1e5).all() and out.any(-1).all()


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("impl", ["cpu", "portable"])
def test_a_key_whose_partial_sums_overflow_keeps_its_weight(impl, precision):
    """Sums that leave float32 on their way, and would come back.

    Some of these rows see such a key.
    """
    rng = np.random.default_rng(0)
    k = (
        np.sign(rng.standard_normal((3000, 1, 4, 64))) * rng.uniform(5e37, 1e38, (3000, 1, 4, 64))
    ).astype(F)
    q = full(1, 3000, 1, 1, 64)
    v = rng.standard_normal((3000, 1, 4, 3)).astype(F)
    for given in (k, -k):
        found, exact = (
            numflash.attention(q, given, v, impl=by, precision=precision, return_lse=True)
            for by in (impl, "reference")
        )
        np.testing.assert_allclose(found[0], exact[0], rtol=1e-5)
        np.testing.assert_allclose(found[1], exact[1], rtol=1e-5)


def test_an_overflow_that_would_cancel_is_noticed():
    """Partial sums of q.k reach -inf and stay there.

    The key would get weight 0 in a row that is finite.
    """
    big = F(1.8e19)
    q = full(0, 1, 1, 7, 64)
    q[..., :8] = big
    k = draw((1, 1, 33, 64)) * F(1e-19)
    k[0, 0, 5] = 0
    k[0, 0, 5, :4], k[0, 0, 5, 4:8] = -big, big
    v = draw((1, 1, 33, 64))
    for impl in ("cpu", "portable"):
        out = numflash.attention(q, k, v, impl=impl)
        np.testing.assert_allclose(
            out, numflash.attention(q, k, v, impl="reference"), rtol=1e-4, atol=1e-5
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [F, np.float16])
def test_scores_that_cuda_does_not_hold(dtype):
    """On CUDA no row is done again: scores of 1e8 are right, larger ones right or NaN."""
    pytest.importorskip("numba_cuda")
    q, v = np.ones((1, 1, 3, 16), dtype), draw((1, 1, 3, 16)).astype(dtype)
    q[0, 0, 1] = 0
    want = np.array([[1, 0, 1], [1, 1, 1], [1, 0, 1]]) / [[2], [3], [2]] @ v[0, 0].astype(F)
    for scale in (1e7, 1e12, 1e30):
        out = numflash.attention(q, q, v, scale=scale, impl="cuda-emulator")[0, 0].astype(F)
        right = np.isclose(out, want, atol=2e-3)
        assert (right | np.isnan(out)).all() and right[1].all()
        assert right.all() or scale > 1e9
