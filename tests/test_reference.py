"""The oracle against the definition written out once more; the integer model against its budgets.

The steps it yields.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import TAILS, draw, naive, qkv

import numflash
from numflash import reference, validation
from numflash.measure.metrics import errors
from numflash.numerics import fixedpoint as fx
from numflash.numerics.quantization import quantize_problem
from numflash.validation.options import Options

INF = np.float32(np.inf)


def solve(*arrays, **options):
    problem = validation.problem(*arrays, Options(**options))
    return reference.solve(quantize_problem(problem) if problem.precision == "int8" else problem)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": True, "alignment": "lower_right"},
    "window": {"window": (3, 1)},
    "window_left": {"window": (2, None)},
    "scale": {"scale": 0.7},
    "softcap": {"softcap": 1.5},
    "key_lengths": {"key_lengths": [9, 2]},
    "padded_lower_right": {"key_lengths": [9, 2], "window": (4, 0), "alignment": "lower_right"},
    "alibi": {"alibi_slopes": np.array([0.5, 0.1, 0.25, 1.0])},
    "sinks": {"sinks": np.array([0.5, -1.0, 3.0, 0.0])},
    "bool_mask": {"attn_mask": draw((7, 11)) > -0.5},
    "hidden_rows": {"attn_mask": np.zeros((1, 1, 7, 1), bool)},
    "bias": {"attn_mask": draw((2, 1, 7, 11))},
    "bias_inf": {"attn_mask": np.where(draw((4, 7, 11)) > 0, 0, -INF)},
    "all": {
        "attn_mask": draw((4, 7, 11)) * 3,
        "is_causal": True,
        "window": (5, None),
        "alignment": "lower_right",
        "softcap": 2.0,
        "alibi_slopes": np.array([0.5, 0.1, 0.25, 1.0]),
        "sinks": np.array([0.5, -1.0, 3.0, 0.0]),
        "key_lengths": [10, 3],
    },
}


@pytest.mark.parametrize("name", OPTIONS)
def test_oracle_is_the_definition(name):
    arrays = qkv(b=2, h=4, l=7, s=11, d=5, dv=3, hkv=2)
    out, lse = solve(*arrays, enable_gqa=True, **OPTIONS[name])
    exact, exact_lse = naive(*arrays, **OPTIONS[name])
    np.testing.assert_allclose(out, exact, rtol=1e-6, atol=1e-9)  # float32 slopes and biases
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", OPTIONS)
def test_integer_model_is_close_to_the_definition(name):
    arrays = qkv(b=2, h=4, l=7, s=11, d=5, dv=3, hkv=2)
    exact, exact_lse = naive(*arrays, **OPTIONS[name])
    for pv, limit in (("int8", 0.03), ("int16", 0.025), ("bf16", 0.022), ("fp32", 0.02)):
        out, lse = numflash.attention(
            *arrays,
            enable_gqa=True,
            precision="int8",
            pv=pv,
            impl="reference",
            return_lse=True,
            **OPTIONS[name],
        )
        assert errors(out, exact).relative_l1 <= limit if exact.any() else not out.any()
        np.testing.assert_allclose(lse, exact_lse, atol=0.05)


def test_not_finite_keys_spoil_only_rows_that_see_them():
    q, k, v = qkv(b=1, h=1, l=6, s=6, d=4)
    for bad in (np.nan, INF, -INF):
        for which in (k, v):
            spoiled = which.copy()
            spoiled[0, 0, 3, 1] = bad
            arrays = (q, spoiled, v) if which is k else (q, k, spoiled)
            for options in ({"is_causal": True}, {"is_causal": True, "precision": "int8"}):
                (out, lse), exact = solve(*arrays, **options), solve(q, k, v, **options)[0]
                assert np.isfinite(out[0, 0, :3]).all() and np.isfinite(lse[0, 0, :3]).all()
                if "precision" not in options:
                    np.testing.assert_array_equal(out[0, 0, :3], exact[0, 0, :3])
                    assert not np.isfinite(out[0, 0, 3:]).all()
                else:
                    assert np.isnan(out[0, 0, 3:]).all()


@pytest.mark.parametrize("bad", [np.nan, INF])
def test_a_float_mask_hides_keys_that_are_not_finite(bad):
    """-inf plus NaN or infinity would be NaN, in outputs and in gradients."""
    q, k, v = qkv(b=1, h=1, l=3, s=4, d=4)
    k[..., 1, :] = bad
    seen = np.array([True, False, True, True])
    bias = np.where(seen, np.float32(0.5), np.float32(-INF))
    found = solve(q, k, v, attn_mask=bias)
    exact = solve(q, k[..., seen, :], v[..., seen, :], attn_mask=bias[seen])
    for x, y in zip(found, exact, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    gradients = numflash.attention_backward(
        np.ones_like(v[..., :3, :]), q, k, v, *found, attn_mask=bias, impl="reference"
    )
    assert all(np.isfinite(x).all() for x in gradients)


def test_finite_inputs_never_give_nan():
    for size in (1e20, 1e36, 1e-38, 1e-45):
        q, k, v = (np.tanh(x) * np.float32(size) for x in qkv(b=1, h=1, l=9, s=40, d=8))
        for pv in ("int8", "int16", "bf16", "fp32"):
            out, lse = solve_int8(q, k, v, pv=pv)
            assert np.isfinite(out).all() and not np.isnan(lse).any(), (size, pv)


def solve_int8(*arrays, **options):
    return solve(*arrays, precision="int8", **options)


DATA = {
    "normal": lambda r, n, d: r.standard_normal((n, d)),
    "outliers": lambda r, n, d: (
        r.standard_normal((n, d)) + 10 * r.standard_normal((n, d)) * (r.random((n, d)) < 0.001)
    ),
    "flat": lambda r, n, d: r.random((n, d)) - 0.5,
}
BUDGETS = {
    ("normal", "int8"): 0.018,
    ("normal", "int16"): 0.0135,
    ("normal", "bf16"): 0.0100,
    ("normal", "fp32"): 0.0100,
    ("outliers", "int8"): 0.045,
    ("flat", "int8"): 0.007,
}


@pytest.mark.parametrize(("data", "pv"), BUDGETS)
def test_accuracy_budgets(data, pv):
    r = np.random.default_rng(0)
    q, k, v = (DATA[data](r, 2048, 128).astype(np.float32) for _ in range(3))
    out = solve_int8(q, k, v, pv=pv)[0]
    assert errors(out, solve(q, k, v)[0]).relative_l1 <= BUDGETS[data, pv]


def test_accuracy_with_biased_channels_needs_smoothing():
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((n, 128)).astype(np.float32) for n in (128, 2048, 2048))
    k[:, :8] += 10 * r.standard_normal(8)
    exact = solve(q, k, v)[0]
    assert errors(solve_int8(q, k, v)[0], exact).relative_l1 <= 0.019
    rough = (numflash.quantize(q), numflash.quantize(k), numflash.quantize(v, "channel"))
    assert (
        errors(reference.solve(validation.quantized_problem(*rough))[0], exact).relative_l1 > 0.04
    )


def test_accuracy_of_peaked_rows():
    r = np.random.default_rng(0)
    q, k, v = (r.standard_normal((n, 128)).astype(np.float32) for n in (128, 2048, 2048))
    assert errors(solve_int8(4 * q, k, v)[0], solve(4 * q, k, v)[0]).relative_l1 <= 0.028


def test_lse_takes_the_smoothing_back():
    q, k, v = qkv(l=20, s=50, d=32)
    k += 5
    exact = naive(q, k, v)[1]
    np.testing.assert_allclose(solve_int8(q, k, v)[1], exact, atol=0.15)
    assert np.abs(k.mean(2)).max() > 4, "what is taken back is not small"


@pytest.mark.parametrize(("l", "s"), TAILS)
def test_steps_are_what_the_model_adds_up(l, s):
    """The steps hold invariants that a reader can check.

    Weights, sums and octaves of each block.
    """
    arrays = qkv(h=1, l=l, s=s, d=16)
    problem = quantize_problem(
        validation.problem(
            *arrays, Options(precision="int8", is_causal=True, alignment="lower_right")
        )
    )
    stop = 0
    m = np.full(l, fx.MIN_OCTAVE)
    for step in reference.integer_steps(problem, 0, 0):
        assert step.first == stop and step.first < step.stop <= s
        stop = step.stop
        hidden = step.t == reference.HIDDEN
        assert (step.p[hidden] == 0).all()
        seen = ~hidden.all(1)
        largest, most = step.t[seen].max(1), step.p[seen].max(1, initial=0)
        unit, least = (256, 2040) if step.p.dtype == np.uint16 else (32, 233)  # of the first keys
        np.testing.assert_array_equal(step.octave[seen], -(-largest // 256))
        np.testing.assert_array_equal(step.top[seen], -(-largest // unit) * unit)
        assert (most >= least).all(), "the largest weight is just below what they refer to"
        m = np.maximum(m, step.octave)
        np.testing.assert_array_equal(step.m, m)
    assert stop == s
    np.testing.assert_array_equal(step.l == 0, step.m == fx.MIN_OCTAVE)


def sink(l=40, s=140, d=32):
    """A first token that takes most of every row's weight, with a small value."""
    q, k, v = qkv(h=1, l=l, s=s, d=d)
    q[..., 0] += 6
    k[..., 0, 0] += 7
    v[..., 0, :] *= np.float32(0.02)
    return q, k, v


@pytest.mark.parametrize("causal", [True, False])
def test_a_first_token_that_takes_nearly_all_the_weight(causal):
    """What the first keys' own step is for: without it most of these rows are noise."""
    problem = validation.problem(*sink(), Options(precision="int8", is_causal=causal))
    exact, _ = reference.oracle(problem)
    problem = quantize_problem(problem)
    size = np.abs(exact).sum(-1)
    off, plain = (
        (np.abs(reference.integer_model(problem, plain=plain)[0] - exact).sum(-1) / size).max()
        for plain in (False, True)
    )
    assert off < 0.06 and plain > 4 * off


def test_what_rounding_took_from_the_first_rows():
    """`low` has 5 more bits, and the model computes with them."""
    q, k, v = sink()
    for t, x in (
        (numflash.quantize(k, "row", smooth=True), k - k.mean(2, keepdims=True)),
        (numflash.quantize(v, "channel"), v),
    ):
        finer = (t.data[:, :, :4] + t.low / np.float32(32)) * t.scale[:, :, :4]
        step = np.broadcast_to(t.scale[:, :, :4], finer.shape)
        assert np.abs(t.low).max() <= 16 and t.low.any()
        assert (np.abs(finer - x[:, :, :4]) <= step * np.float32(1 / 64 + 1e-4)).all()
    assert numflash.quantize(k[:, :, :2]).low.shape == (1, 1, 2, 32)


def test_weights_of_a_row_add_up_to_one():
    q, k, _ = qkv(h=1, l=17, s=300, d=32)
    ones = np.ones((1, 1, 300, 32), np.float32)
    np.testing.assert_allclose(solve_int8(q, k, ones)[0], 1, rtol=1e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(1, 20), st.integers(0, 2**32 - 1))
def test_permuting_keys_of_one_block_changes_no_bit(l, s, d, seed):
    """But the first keys: these are a block of their own."""
    q, k, v = qkv(h=1, l=l, s=min(s, 128), d=d, seed=seed)
    first, rest = np.arange(k.shape[2])[:4], np.arange(k.shape[2])[4:]
    order = np.concatenate([first, np.random.default_rng(seed).permutation(rest)])
    # smoothing sums the keys in order: take it away so that both see the same integers
    qt = numflash.quantize(q)
    kt = numflash.quantize(k)
    vt = numflash.quantize(v, "channel")
    kp = numflash.quantize(k[:, :, order])
    vp = numflash.quantize(v[:, :, order], "channel")
    a, b = (
        reference.solve(validation.quantized_problem(qt, x, y)) for x, y in ((kt, vt), (kp, vp))
    )
    np.testing.assert_array_equal(a[0], b[0])
    np.testing.assert_array_equal(a[1], b[1])
