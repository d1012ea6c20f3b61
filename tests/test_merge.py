from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import draw, naive, qkv

import numflash


def parts(q, k, v, cuts):
    edges = [0, *cuts, k.shape[2]]
    return [
        tuple(x.astype(np.float32) for x in naive(q, k[:, :, a:z], v[:, :, a:z]))
        for a, z in pairwise(edges)
    ]


def test_two_parts_are_the_whole():
    q, k, v = qkv(l=5, s=20, d=8)
    (a, b), (out, lse) = parts(q, k, v, [7]), naive(q, k, v)
    got = numflash.merge_states(*a, *b)
    np.testing.assert_allclose(got[0], out, atol=1e-6)
    np.testing.assert_allclose(got[1], lse, atol=1e-6)
    assert got[0].dtype == got[1].dtype == np.float32
    # the form of the T4 architecture forgets the division by the sum of the weights: far off
    top = np.maximum(a[1], b[1])
    undivided = a[0] * np.exp(a[1] - top)[..., None] + b[0] * np.exp(b[1] - top)[..., None]
    assert np.abs(undivided - out).max() > 0.1


def test_rounding_is_no_error_whatever_numpy_is_told():
    q, k, v = qkv(h=2, l=3, s=5, d=4)
    out, lse = (x.astype(np.float32) for x in naive(q, k, v))
    with np.errstate(all="raise"):
        far, _ = numflash.merge_states(out, lse, out * 2, lse - 120)
        numflash.attention(q, k, v, sinks=np.array([-120.0, 0]))
        numflash.attention(*(x.astype(np.float64) * 1e-300 for x in (q, k, v)))
    np.testing.assert_array_equal(far, out)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(0, 1000))
def test_any_split_in_any_order(cuts, seed):
    q, k, v = qkv(h=1, l=3, s=30, d=4, seed=seed)
    pieces = parts(q, k, v, sorted(cuts))
    out, lse = naive(q, k, v)
    left = pieces[0]
    for piece in pieces[1:]:
        left = numflash.merge_states(*left, *piece)
    right = pieces[-1]
    for piece in reversed(pieces[:-1]):
        right = numflash.merge_states(*piece, *right)
    for got in (left, right):
        np.testing.assert_allclose(got[0], out, atol=2e-6)
        np.testing.assert_allclose(got[1], lse, atol=2e-6)


def test_nothing_is_the_zero():
    out = draw((2, 3, 4))
    lse = draw((2, 3))
    nothing = np.full((2, 3, 4), np.nan, np.float32), np.full((2, 3), -np.inf, np.float32)
    for got in (
        numflash.merge_states(out, lse, *nothing),
        numflash.merge_states(*nothing, out, lse),
    ):
        np.testing.assert_array_equal(got[0], out)
        np.testing.assert_array_equal(got[1], lse)
    both = numflash.merge_states(*nothing, *nothing)
    assert not both[0].any() and (both[1] == -np.inf).all()


def test_huge_lse_does_not_overflow():
    out = numflash.merge_states(
        np.ones((1, 2), np.float32),
        np.array([3e4], np.float32),
        np.zeros((1, 2), np.float32),
        np.array([2.9e4], np.float32),
    )
    assert (out[0] == 1).all() and out[1] == 3e4


@pytest.mark.parametrize("dtype", [np.float16, "bfloat16", np.float64])
def test_dtype_is_kept(dtype):
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
    out = draw((2, 3, 4)).astype(dtype)
    lse = draw((2, 3))
    got = numflash.merge_states(out, lse, out, lse)
    assert got[0].dtype == dtype and got[1].dtype == np.float32
    np.testing.assert_allclose(got[0].astype(float), out.astype(float), rtol=0.01)


def test_torch():
    torch = pytest.importorskip("torch")
    out = torch.randn(2, 3, 4)
    lse = torch.randn(2, 3)
    got = numflash.merge_states(out, lse, out, lse)
    assert isinstance(got[0], torch.Tensor) and torch.allclose(got[0], out, atol=1e-6)
    assert torch.allclose(got[1], lse + np.log(2), atol=1e-6)
