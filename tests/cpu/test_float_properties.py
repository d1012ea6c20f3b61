"""Any combination of options against the float64 oracle, and what must stay the same whatever the
numbers are.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_flash_float import agrees, make

import numflash
from numflash.cpu import launch_float
from numflash.jit import target

F = np.float32
BEST = target.available(target.FLOAT_ISAS)[0]
KERNELS = [
    ("float32", BEST),
    ("float16", BEST),
    ("bfloat16", target.available(target.BFLOAT16_ISAS)[0]),
]


@st.composite
def problems(draw):
    """Operands and options from the whole space.

    Sizes around every block edge, any mix of what hides or changes scores.
    """
    count = st.one_of(
        st.integers(1, 20), st.integers(1, 140), st.sampled_from([63, 64, 65, 256, 257, 300])
    )
    length = draw(count)
    s = draw(count)
    b = draw(st.integers(1, 2))
    group = draw(st.integers(1, 3))
    hkv = draw(st.integers(1, 2))
    d = draw(st.one_of(st.integers(1, 40), st.sampled_from([64, 72, 80, 128])))
    dv = draw(st.integers(1, 80))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = F(draw(st.sampled_from([1.0, 0.01, 4.0])))
    h = group * hkv
    query, key, value = (
        rng.standard_normal(shape).astype(F)
        for shape in ((b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv))
    )
    side = st.one_of(st.none(), st.integers(0, 80))
    options = {
        "is_causal": draw(st.booleans()),
        "window": (draw(side), draw(side)),
        "alignment": draw(st.sampled_from(["upper_left", "lower_right"])),
        "softcap": draw(st.sampled_from([0.0, 0.0, 1.5, 30.0])),
    }
    if draw(st.booleans()):
        options["key_lengths"] = rng.integers(0, s + 1, b)
    if draw(st.booleans()):
        options["alibi_slopes"] = rng.random(h)
    kind = draw(st.sampled_from(["none", "mask", "bias", "hidden bias"]))
    if kind != "none":
        shape = tuple(n if draw(st.booleans()) else 1 for n in (b, h, length, s))
        seen = rng.random(shape) < draw(st.sampled_from([0.05, 0.5, 0.95]))
        bias = rng.standard_normal(shape).astype(F)
        options["attn_mask"] = {
            "mask": seen,
            "bias": bias,
            "hidden bias": np.where(seen, bias, F(-np.inf)),
        }[kind]
    return query * size, key, value, options


def check(case, kernel):
    (query, key, value, options), (precision, isa) = case, kernel
    agrees(make(query, key, value, precision, **options), isa)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.sampled_from(KERNELS))
def test_any_combination(case, kernel):
    check(case, kernel)


@pytest.mark.slow
@settings(max_examples=800, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problems(),
    st.sampled_from([*KERNELS, *(("float32", isa) for isa in target.available(target.FLOAT_ISAS))]),
)
def test_any_combination_at_length(case, kernel):
    check(case, kernel)


def results(query, key, value, **options):
    return launch_float.run(make(query, key, value, **options))


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_keys_may_come_in_any_order(case):
    query, key, value, _ = case
    order = np.random.default_rng(0).permutation(key.shape[2])
    for one, other in zip(
        results(query, key, value),
        results(query, key[:, :, order], value[:, :, order]),
        strict=True,
    ):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.floats(-50, 50))
def test_a_shift_of_all_scores_changes_the_lse_only(case, shift):
    query, key, value, options = case
    options = {**options, "attn_mask": None}
    out, lse = results(query, key, value, **options)
    shifted, moved = results(query, key, value, **{**options, "attn_mask": np.full(1, shift, F)})
    seen = np.isfinite(lse)
    assert np.allclose(out, shifted, rtol=1e-3, atol=1e-4) and np.allclose(
        lse[seen] + F(shift), moved[seen], rtol=1e-5, atol=1e-4
    )


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems(), st.floats(0, 1))
def test_parts_of_the_keys_merge_to_the_whole(case, where):
    query, key, value, _ = case
    cut = round(where * key.shape[2])
    if cut in (0, key.shape[2]):
        return
    whole = results(query, key, value)
    parts = [
        results(query, x, y)
        for x, y in ((key[:, :, :cut], value[:, :, :cut]), (key[:, :, cut:], value[:, :, cut:]))
    ]
    for one, other in zip(whole, numflash.merge_states(*parts[0], *parts[1]), strict=True):
        assert np.allclose(one, other, rtol=1e-4, atol=1e-5)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_a_window_as_wide_as_everything_is_no_window(case):
    query, key, value, _ = case
    wide = query.shape[2] + key.shape[2]
    for one, other in zip(
        results(query, key, value), results(query, key, value, window=(wide, wide)), strict=True
    ):
        assert np.array_equal(one, other)


def test_weights_of_a_row_sum_to_one():
    query, key = (
        np.random.default_rng(i).standard_normal((1, 2, 130, 32)).astype(F) for i in (0, 1)
    )
    assert np.allclose(
        results(query, key, np.ones((1, 2, 130, 3), F), is_causal=True)[0], 1, atol=1e-6
    )


@pytest.mark.slow
def test_160_thousand_keys():
    rng = np.random.default_rng(0)
    query, key, value = (
        rng.standard_normal((1, 1, n, 64)).astype(F) for n in (3, 160_000, 160_000)
    )
    for precision, isa in KERNELS:
        agrees(make(query, key, value, precision), isa, budget=4)
