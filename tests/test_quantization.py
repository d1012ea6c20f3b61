from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from oracles import draw, qkv

import numflash
from numflash import validation
from numflash.errors import ArgumentError
from numflash.numerics.quantization import GRANULARITIES, quantize_problem
from numflash.validation.options import Options


def plain(x, axes):
    """Symmetric INT8 by its definition, float64: data and scale."""
    peak = np.abs(np.asarray(x, np.float64)).max(axes, keepdims=True)
    scale = np.where(peak == 0, 1, peak / 127)
    return np.rint(x / scale), scale


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 7, 16), (2, 3, 1030, 40), (1, 300, 128)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_scales_and_values(shape, granularity):
    x = draw(shape)
    t = numflash.quantize(x, granularity)
    if granularity == "block":
        pad = -shape[-2] % t.block
        blocks = np.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, pad), (0, 0)]).reshape(
            *shape[:-2], -1, t.block, shape[-1]
        )
        data, scale = plain(blocks, (-1, -2))
        data = data.reshape(*shape[:-2], -1, shape[-1])[..., : shape[-2], :]
        scale = scale[..., 0]
    else:
        data, scale = plain(x, {"row": -1, "channel": -2, "tensor": (-1, -2)}[granularity])
    assert t.data.dtype == np.int8 and t.scale.dtype == np.float32 and t.shape == shape
    np.testing.assert_allclose(t.scale, scale, rtol=1e-6)
    assert (np.abs(t.data - data) <= 1).all() and (
        t.data != data
    ).mean() < 1e-3  # ties fall either way in float32
    step = t.scale if granularity == "channel" else t.row_scale()[..., None]
    assert (np.abs(t.dequantize() - x) <= 0.5001 * step).all()


@settings(max_examples=60, deadline=None)
@given(
    arrays(
        np.float32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.floats(width=32)
    ),
    st.sampled_from(GRANULARITIES),
    st.booleans(),
)
@example(np.float32([[3.4028235e38], [0]]), "row", True)  # the mean back on it is beyond float32
def test_any_float_is_quantised(x, granularity, smooth):
    t = numflash.quantize(x, granularity, smooth)
    assert t.data.min() >= -127 and np.isfinite(t.scale).all() and (t.scale > 0).all()
    bad = ~np.isfinite(x).all(-1)
    np.testing.assert_array_equal(
        np.zeros(len(x), bool) if t.nonfinite is None else t.nonfinite, bad
    )
    assert (t.data[bad] == 0).all()
    assert np.isnan(t.dequantize()[bad]).all()


def test_zeros_get_scale_one():
    for granularity in GRANULARITIES:
        t = numflash.quantize(np.zeros((2, 3, 4), np.float32), granularity)
        assert (t.scale == 1).all() and not t.data.any()


def test_smoothing_takes_the_mean_of_each_channel():
    x = draw((3, 200, 16)) + 7 * draw((16,), 1)
    t = numflash.quantize(x, "row", smooth=True)
    np.testing.assert_allclose(t.offset[:, 0], x.mean(1), rtol=1e-5, atol=1e-5)
    assert np.abs(t.dequantize() - x).max() < 0.03
    assert (t.scale < numflash.quantize(x, "row").scale).mean() > 0.9


@pytest.mark.parametrize("length", [2, 4, 9])
def test_the_first_rows_are_finer(length):
    x = draw((2, length, 16))
    t = numflash.quantize(x)
    rows = t.finer_rows()
    assert rows.shape == (2, min(length, 4), 16) and rows.dtype == np.int16
    step = t.scale[:, :4].astype(np.float64) / 32
    assert (np.abs(rows * step - x[:, :4]) <= step * 0.501).all()
    assert np.array_equal(replace(t, low=None).finer_rows(), t.data[:, :4].astype(np.int16) * 32)


def test_other_dtypes_and_strides():
    import ml_dtypes

    x = draw((2, 6, 8))
    want = numflash.quantize(x.astype(np.float16).astype(np.float32))
    got = numflash.quantize(x.astype(np.float16))
    np.testing.assert_array_equal(got.data, want.data)
    np.testing.assert_array_equal(
        numflash.quantize(x.astype(ml_dtypes.bfloat16)).data,
        numflash.quantize(x.astype(ml_dtypes.bfloat16).astype(np.float32)).data,
    )
    part = x[:, ::-2, ::3]
    np.testing.assert_array_equal(
        numflash.quantize(part).data, numflash.quantize(np.ascontiguousarray(part)).data
    )


def test_padding_changes_no_scale():
    q, k, v = qkv(b=2, h=2, l=4, s=40, d=16)
    long = [np.concatenate([x, np.full_like(x[:, :, :9], 1e6)], 2) for x in (k, v)]
    short, padded = (
        quantize_problem(
            validation.problem(q, *kv, Options(precision="int8", key_lengths=[40, 13]))
        )
        for kv in ((k, v), long)
    )
    np.testing.assert_array_equal(short.value.scale, padded.value.scale)
    np.testing.assert_array_equal(short.key.offset, padded.key.offset)
    np.testing.assert_array_equal(short.key.data, padded.key.data[:, :, :40])
    assert not padded.key.data[:, :, 40:].any() and not padded.key.data[1, :, 13:].any()


def test_quantize_problem_is_quantize_qkv():
    q, k, v = qkv(b=2, h=4, l=9, s=30, d=16, hkv=2)
    p = quantize_problem(validation.problem(q, k, v, Options(enable_gqa=True, precision="int8")))
    for mine, other in zip((p.query, p.key, p.value), numflash.quantize_qkv(q, k, v), strict=True):
        np.testing.assert_array_equal(mine.data, other.data)
        np.testing.assert_array_equal(mine.scale, other.scale)
    assert (
        quantize_problem(
            validation.problem(q, k, v, Options(enable_gqa=True, precision="int8", softcap=3.0))
        ).key.offset
        is None
    )
    wide = quantize_problem(
        validation.problem(q, k, v, Options(enable_gqa=True, precision="int8", pv="fp32"))
    ).value
    np.testing.assert_array_equal(wide, v)


def test_nbytes():
    t = numflash.quantize(draw((2, 5, 8)), "row", smooth=True)
    assert t.nbytes == 2 * 5 * 8 + 2 * 5 * 4 + 2 * 8 * 4 + 2 * 4 * 8


def test_blocks_of_any_number_of_rows():
    scale = np.array([[0.5], [2.0]], np.float32)
    t = numflash.QuantizedTensor(np.ones((100, 8), np.int8), scale, "block", block=64)
    np.testing.assert_array_equal(t.row_scale(), np.repeat(np.float32([0.5, 2]), [64, 36]))


@pytest.mark.parametrize("granularity", ["row", "block", "channel", "tensor"])
def test_peaks_below_the_smallest_scale_count_as_zero(granularity):
    """Their scale would be subnormal, and its reciprocal infinite."""
    x = np.full((3, 16), 2.0**-101, np.float32)
    found = numflash.quantize(x, granularity)
    assert not found.data.any() and (found.scale == 1).all()


def test_a_quantised_tensor_prints_in_one_line():
    q, k, v = (draw((1, 2, 40, 16), n) for n in range(3))
    found = [repr(x) for x in numflash.quantize_qkv(q, k, v)]
    assert all("\n" not in x and "shape=(1, 2, 40, 16)" in x and len(x) < 200 for x in found)
    assert "with offset" in found[1]


def test_a_rotated_query_wants_rotated_keys():
    q, k, v = (draw((1, 2, 40, 64), n) for n in range(3))
    plain, turned = (numflash.quantize_qkv(q, k, v, rotate=rotate) for rotate in (False, True))
    assert "rotated" in repr(turned[0]) and "rotated" not in repr(plain[0])
    outs = [
        numflash.attention_int8(*each) for each in (plain, turned, plain)
    ]  # plans are known now
    assert np.abs(outs[1] - outs[0]).max() < 0.1
    for mixed in ((turned[0], *plain[1:]), (plain[0], *turned[1:])):
        with pytest.raises(
            ArgumentError, match=r"key: got rotated=(True|False) with a query of rotated="
        ):
            numflash.attention_int8(*mixed)
