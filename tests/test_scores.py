"""`numflash.numerics.scores` against float64, written out here.

Neither the kernels' functions nor the oracle's are used to check them.
"""

from __future__ import annotations

import math
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from numflash.numerics import scores
from numflash.numerics.quantization import QuantizedTensor, quantize

RNG = np.random.default_rng(7)


def tensors(heads=4, kv_heads=2, smooth=True, granularity="row"):
    query = RNG.standard_normal((2, heads, 9, 24)).astype(np.float32)
    key = (RNG.standard_normal((2, kv_heads, 11, 24)) + 3).astype(np.float32)
    q = quantize(query, granularity=granularity)
    return q, quantize(key, granularity=granularity, smooth=smooth)


@pytest.mark.parametrize("granularity", ["row", "block", "tensor"])
@pytest.mark.parametrize(("scale", "softcap"), [(0.2, 0.0), (-0.2, 0.0), (0.2, 30.0)])
def test_combined_scale_turns_integer_products_into_octaves(granularity, scale, softcap):
    """(S * ck) * cq is scale * q . k in units of log2 / 256, or of the cap."""
    q, k = tensors(2, 2, smooth=False, granularity=granularity)
    cq, ck = scores.combined_scale(q, k, scale, softcap)
    products = np.einsum("bhld,bhsd->bhls", q.data.astype(np.float64), k.data.astype(np.float64))
    exact = products * q.row_scale().astype(np.float64)[..., None]
    exact *= k.row_scale().astype(np.float64)[:, :, None, :]
    unit = scale / softcap if softcap else scale * math.log2(math.e) * 256
    found = products * ck[:, :, None, :] * cq[:, :, :, None]
    np.testing.assert_allclose(found, exact * unit, rtol=2e-6, atol=1e-6 * abs(unit))
    assert cq.dtype == ck.dtype == np.float32 and cq.shape == (2, 2, 9) and ck.shape == (2, 2, 11)
    assert scores.score_unit(scale, softcap) == pytest.approx(unit, rel=1e-15)


def test_a_scale_that_is_too_large_is_limited_and_one_of_a_bad_row_is_nan():
    data = np.ones((1, 1, 3, 4), np.int8)
    bad = np.array([[[False, True, False]]])
    huge = np.full((1, 1, 3, 1), 3e38, np.float32)
    q = QuantizedTensor(data, huge, "row", nonfinite=bad)
    k = QuantizedTensor(data, huge, "row", nonfinite=~bad)
    cq, ck = scores.combined_scale(q, k, 1.0)
    assert np.isnan(cq[bad]).all() and (cq[~bad] == np.float32(2.0**100)).all()
    assert np.isnan(ck[~bad]).all() and (ck[bad] == np.float32(2.0**100)).all()
    negative, _ = scores.combined_scale(q, k, -1.0)
    assert (negative[~bad] == np.float32(-(2.0**100))).all()
    with np.errstate(over="ignore"):
        assert not np.isnan(cq * np.float32(2.0**31 - 1))[~bad].any()


def test_row_shift_is_what_smoothing_took_from_each_score():
    q, k = tensors()
    shift = scores.row_shift(q, k.offset, 0.3)
    query = q.dequantize().astype(np.float64)
    for b, h, i in np.ndindex(2, 4, 9):
        terms = 0.3 * query[b, h, i] * k.offset[b, h // 2, 0].astype(np.float64)
        # terms may cancel; each was rounded to float32
        assert abs(shift[b, h, i] - terms.sum()) <= 1e-6 * np.abs(terms).sum()
    assert scores.row_shift(q, None, 0.3) is None


def test_cap_shift_is_the_row_shift_in_units_of_the_cap():
    q, k = tensors()
    problem = SimpleNamespace(query=q, key=k, scale=0.3, softcap=5.0)
    np.testing.assert_allclose(
        scores.cap_shift(problem), scores.row_shift(q, k.offset, 0.3) / 5.0, rtol=1e-6
    )
    far = SimpleNamespace(query=q, key=k, scale=1e30, softcap=1e-30)
    assert np.isfinite(scores.cap_shift(far)).all()


def test_log_sum_exp_in_octaves_is_the_natural_one():
    m = np.array([[[0, -3, 12, 5]]], np.int32)
    l = np.array([[[1.0, 700.5, 3e4, 0.0]]], np.float32)
    shift = np.array([[[0.5, -2.0, 0.0, 1.0]]])
    found = scores.log_sum_exp(m, l, shift, 255)
    for j in range(3):
        want = math.log(2.0 ** int(m[0, 0, j]) * float(l[0, 0, j]) / 255) + shift[0, 0, j]
        assert found[0, 0, j] == pytest.approx(want, rel=1e-6)
    assert found[0, 0, 3] == -np.inf
    assert scores.log_sum_exp(m, l, None, 255)[0, 0, 0] == pytest.approx(
        math.log(1 / 255), rel=1e-6
    )


def test_largest_is_zero_of_nothing():
    assert scores.largest(np.zeros((0, 3), np.float32)) == 0.0
    assert scores.largest(np.array([0.25, 7.5], np.float32)) == 7.5


@pytest.mark.parametrize(
    "module", ["cpu.launch", "cpu.launch_decode", "cpu.launch_backward", "cache.kvcache"]
)
def test_no_kernel_reaches_the_oracle(module):
    """Importing what runs the kernels loads everything that they need.

    `reference` must not be part of it.
    """
    code = f"import sys, numflash.{module}; sys.exit('numflash.reference' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0
