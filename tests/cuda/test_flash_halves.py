"""float16 and bfloat16 forward kernels in the emulator against float64.

Within twice the error of rounded attention.
"""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import ml_dtypes
from float_checks import DTYPES, compare, problem_of
from hypothesis import given, settings
from hypothesis import strategies as st

from numflash.cuda import launch, launch_float
from numflash.cuda.device import operands
from numflash.errors import UnsupportedError


def solve(q, k, v, arch="sm_80", seed=0, **options):
    out, lse, report = operands.emulated(
        launch_float.float_forward(problem_of(q, k, v, **options), arch), seed=seed
    )
    return (
        (out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out).astype(np.float64),
        lse,
        report,
    )


def check(shape, dtype="float16", arch="sm_80", seed=0, **options):
    q, k, v = (x.astype(DTYPES[dtype]) for x in oracles.qkv(**shape, seed=seed))
    out, lse, report = operands.emulated(
        launch_float.float_forward(problem_of(q, k, v, **options), arch), seed=seed
    )
    compare(out, lse, q, k, v, **options)
    return report


@pytest.mark.parametrize(
    "d", [64, *(pytest.param(d, marks=pytest.mark.slow) for d in (32, 96, 128, 256))]
)
def test_head_sizes(d):
    report = check({"b": 1, "h": 1, "l": 65, "s": 130, "d": d})
    assert report.shared_conflicts == 0
    assert report.opcodes["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"b": 2, "h": 4, "hkv": 2, "l": 33, "s": 70, "d": 40, "dv": 64},
        {"b": 1, "h": 3, "l": 1, "s": 1, "d": 5, "dv": 7},
        {"b": 1, "h": 1, "l": 3, "s": 200, "d": 17, "dv": 33},
    ],
)
def test_odd_shapes(shape):
    check(shape)


@pytest.mark.parametrize(
    ("l", "s", "options"),
    [
        (70, 70, {"is_causal": True}),
        (70, 150, {"is_causal": True, "alignment": "lower_right"}),
        (170, 50, {"is_causal": True, "alignment": "lower_right"}),
        (70, 150, {"window": (17, 3)}),
        (70, 150, {"window": (None, 9)}),
        (150, 150, {"window": (20, 0), "is_causal": True}),
        (70, 70, {"window": (None, 40), "alignment": "lower_right"}),
    ],
)
def test_bands(l, s, options):
    check({"b": 1, "h": 2, "l": l, "s": s, "d": 64}, **options)


def test_tiles_outside_the_band_are_skipped():
    full = check({"b": 1, "h": 1, "l": 256, "s": 256, "d": 64})
    causal = check({"b": 1, "h": 1, "l": 256, "s": 256, "d": 64}, is_causal=True)
    window = check({"b": 1, "h": 1, "l": 256, "s": 256, "d": 64}, window=(32, 0))
    assert causal.tensor_operations * 16 == full.tensor_operations * 10  # 10 of 16 tiles of 64 x 64
    assert window.tensor_operations * 16 == full.tensor_operations * 7


def test_key_lengths():
    check({"b": 3, "h": 2, "l": 40, "s": 50, "d": 64}, key_lengths=np.array([13, 0, 50]))


@pytest.mark.slow
def test_an_axis_of_one_element_has_any_stride():
    """Rows that do not exist are copied from aligned addresses, too."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=1, l=70, s=1, d=64))
    k, v = (np.lib.stride_tricks.as_strided(x, x.shape, (146, 146, 146, 2)) for x in (k, v))
    compare(*solve(q, k, v)[:2], q, k, v)
    compare(*solve(k, q, q)[:2], k, q, q)


@pytest.mark.slow
def test_softcap():
    check({"b": 1, "h": 2, "l": 40, "s": 50, "d": 64}, softcap=2.0)


def random_mask():
    rng = np.random.default_rng(3)
    seen = rng.random((1, 2, 40, 50)) > 0.5
    seen[0, 1, 7] = False  # a row that sees nothing
    return seen, rng


def test_masks():
    seen, _ = random_mask()
    check({"b": 2, "h": 2, "l": 40, "s": 50, "d": 64}, attn_mask=seen)
    check({"b": 2, "h": 2, "l": 40, "s": 50, "d": 64}, attn_mask=seen[:, :1])


@pytest.mark.slow
def test_biases():
    seen, rng = random_mask()
    bias = np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32)
    bias[0, 0, 9], bias[0, 0, 10, ::2] = (
        np.finfo(np.float32).min,
        np.finfo(np.float32).min,
    )  # a row that sees all keys alike
    check({"b": 2, "h": 2, "l": 40, "s": 50, "d": 64}, attn_mask=bias)


def test_a_mask_that_is_part_of_a_larger_one():
    """Only the part is copied, so its strides are not those of the caller's array."""
    seen = np.random.default_rng(4).random((1, 3, 80, 120)) > 0.5
    check({"b": 2, "h": 2, "l": 40, "s": 50, "d": 64}, attn_mask=seen[:, 1:2, ::2, 5:55])
    check({"b": 1, "h": 2, "l": 40, "s": 50, "d": 64}, attn_mask=seen[:, :2, 3:43, 5:105:2])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_sinks_join_on_the_card(dtype):
    """With results given, as for arrays on a card, the kernel adds the sinks itself.

    A row that sees nothing has the sink's LSE.
    """
    q, k, v = (x.astype(dtype) for x in oracles.qkv(b=1, h=4, hkv=2, l=40, s=70, d=64))
    sinks = np.array([-3.0, 0.5, 4.0, 60.0], np.float32)
    options = {
        "sinks": sinks,
        "window": (9, 0),
        "alignment": "lower_right",
        "key_lengths": np.array([30]),
    }
    results = np.zeros((1, 4, 40, 64), dtype), np.zeros((1, 4, 40), np.float32)
    launched = launch.plan(problem_of(q, k, v, **options), "sm_80", results)
    out, lse, _ = operands.emulated(launched)
    expected, expected_lse = oracles.naive(q, k, v, **options)
    assert launched.constants["sinks"] and (expected[0, 0, :10] == 0).all()
    assert np.allclose(out, expected, atol=2e-3 if dtype == "float16" else 3e-6) and np.allclose(
        lse, expected_lse, atol=3e-5
    )


def test_huge_scores_and_hidden_nonfinite():
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=1, l=40, s=70, d=64))
    q *= np.float16(1000)
    v[0, 0, 60], v[0, 0, 65, 3], k[0, 0, 66] = np.nan, np.inf, np.nan
    out, lse, _ = solve(q, k, v, is_causal=True)
    expected, expected_lse = oracles.naive(q, np.nan_to_num(k), np.nan_to_num(v), is_causal=True)
    assert np.allclose(out, expected, atol=2e-3) and np.allclose(lse, expected_lse, rtol=1e-5)
    out, _, _ = solve(q, k, v)
    assert np.isnan(out).all(-1).all()  # every row sees the keys that are not finite


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("scale", [1e9, 1e30])
def test_huge_scales(arch, scale):
    """One key has all of a row's weight, and scores are far apart in float32."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=1, l=70, s=70, d=64))
    problem = problem_of(q, k, v, scale=scale)
    out, lse, _ = operands.emulated(launch.plan(problem, arch))
    compare(out, lse, q, k, v, scale=scale)


@pytest.mark.slow
def test_turing():
    report = check({"b": 1, "h": 2, "l": 130, "s": 150, "d": 64}, arch="sm_75", is_causal=True)
    check(
        {"b": 1, "h": 2, "hkv": 1, "l": 40, "s": 50, "d": 256},
        arch="sm_75",
        is_causal=True,
        softcap=9.0,
    )
    assert (
        report.async_copied == 0
        and report.opcodes["mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"] > 0
    )
    q = np.zeros((1, 1, 4, 8), ml_dtypes.bfloat16)
    with pytest.raises(UnsupportedError, match="sm_75 has float16"):
        launch_float.float_forward(problem_of(q, q, q), "sm_75")


def test_wide_heads_are_refused():
    q = np.zeros((1, 1, 4, 257), np.float16)
    with pytest.raises(UnsupportedError, match="head_dim: got 257"):
        launch_float.float_forward(problem_of(q, q, q), "sm_80")


def test_an_l4_tile_in_a_second():
    """256 x 256 at D = 64 is the size that notebooks emulate.

    The report says how long it took (no timed pass or fail).
    """
    report = check({"b": 1, "h": 1, "l": 256, "s": 256, "d": 64})
    assert report.seconds > 0 and report.blocks == 4 and "warp-instructions" in str(report)


def test_bfloat16():
    check({"b": 1, "h": 1, "l": 70, "s": 70, "d": 64}, "bfloat16")


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(
    l=st.integers(1, 80),
    s=st.integers(1, 150),
    left=st.none() | st.integers(0, 90),
    right=st.none() | st.integers(0, 90),
    alignment=st.sampled_from(["upper_left", "lower_right"]),
    seed=st.integers(0, 99),
)
def test_random_bands(l, s, left, right, alignment, seed):
    window = None if left is None and right is None else (left, right)
    check(
        {"b": 1, "h": 1, "l": l, "s": s, "d": 64},
        seed=seed,
        window=window or (1000, 1000),
        alignment=alignment,
    )
