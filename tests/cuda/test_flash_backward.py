"""The backward kernels in the emulator against float64 gradients.

Within twice the error of gradients by rounded weights.
"""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import ml_dtypes
from backward_checks import DTYPES, case, check, gradients, solve
from hypothesis import given, settings
from hypothesis import strategies as st

import numflash
from numflash.cuda import launch_backward
from numflash.cuda.arrays.calls import dense
from numflash.cuda.validate import compare
from numflash.cuda.validate.cases import gradient_operands, problem_of
from numflash.errors import UnsupportedError

HMMA = "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
slow = pytest.mark.slow


def test_the_oracle_has_the_gradients_of_attention():
    """Central differences of attention written out row by row."""
    q, k, v, do = (x.astype(np.float64) for x in case(h=2, hkv=1, l=5, s=7, d=4, dv=3))
    rng = np.random.default_rng(5)
    bias = np.where(rng.random((1, 2, 5, 7)) > 0.3, rng.standard_normal((1, 2, 5, 7)), -np.inf)
    options = {
        "attn_mask": bias,
        "window": (3, 2),
        "alignment": "lower_right",
        "softcap": 1.5,
        "sinks": np.array([0.1, 0.4]),
        "alibi_slopes": np.array([0.2, 0.3]),
    }
    out, lse, *found = gradients(q, k, v, do, **options)
    assert np.allclose(out, oracles.naive(q, k, v, **options)[0]) and np.allclose(
        lse, oracles.naive(q, k, v, **options)[1]
    )
    for n, mine in enumerate(found):
        for _ in range(6):
            at = tuple(rng.integers(0, mine.shape))
            step = np.zeros(mine.shape)
            step[at] = 1e-5
            ends = [
                oracles.naive(
                    *((x + sign * step) if m == n else x for m, x in enumerate((q, k, v))),
                    **options,
                )[0]
                for sign in (1, -1)
            ]
            assert np.isclose(((ends[0] - ends[1]) * do).sum() / 2e-5, mine[at], atol=1e-7)


@pytest.mark.parametrize("d", [pytest.param(d, marks=slow) for d in (32, 64, 96, 128, 256)])
def test_head_sizes(d):
    rows, *passes = check({"l": 70, "s": 130, "d": d})
    assert rows.tensor_operations == 0 and all(report.opcodes[HMMA] > 0 for report in passes)
    assert len(passes) == (
        3 if d == 256 else 2
    )  # at D = 256 dV and dK do not fit into registers together


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(
            {"b": 2, "h": 4, "hkv": 2, "l": 33, "s": 70, "d": 40, "dv": 64},
            {"is_causal": True},
            marks=slow,
        ),
        pytest.param({"h": 3, "l": 1, "s": 1, "d": 33, "dv": 35}, {}, marks=slow),
        pytest.param({"h": 3, "l": 1, "s": 1, "d": 5, "dv": 7}, {}, marks=slow),
        pytest.param({"h": 6, "hkv": 1, "l": 3, "s": 200, "d": 17, "dv": 33}, {}, marks=slow),
        pytest.param(
            {"h": 2, "l": 150, "s": 3, "d": 100, "dv": 20}, {"is_causal": True}, marks=slow
        ),
    ],
)
def test_odd_shapes(shape, options):
    check(shape, **options)


@slow
def test_bfloat16():
    check({"l": 70, "s": 70}, "bfloat16", is_causal=True)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=slow)])
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
def test_bands(dtype, l, s, options):
    check({"h": 2, "hkv": 1, "l": l, "s": s}, dtype, **options)


@slow
def test_tiles_outside_the_band_are_skipped():
    shape = {"l": 256, "s": 256}
    full, causal, window = (
        check(shape, **options) for options in ({}, {"is_causal": True}, {"window": (32, 0)})
    )
    for n, products in (
        (1, 4),
        (2, 3),
    ):  # dK and dV; dQ: what each computes, in products of 64 x 64 x 64
        assert full[n].tensor_flops == products * 16 * 2 * 64**3
        assert causal[n].tensor_flops == products * 10 * 2 * 64**3
        assert window[n].tensor_flops == products * 7 * 2 * 64**3


@slow
def test_grouped_heads_are_summed_in_the_pass_of_the_keys():
    reports = check({"h": 4, "hkv": 2, "l": 70, "s": 70}, is_causal=True)
    assert reports[1].blocks == 2 * 2 and reports[2].blocks == 4 * 2


@pytest.mark.slow
def test_key_lengths():
    q, k, v, do = case(b=3, h=2)
    options = {"key_lengths": np.array([13, 0, 50])}
    check({"b": 3, "h": 2}, **options)
    out, lse, *_ = gradients(q, k, v, do, **options)
    found, _ = solve(q, k, v, do, out, lse, **options)
    assert not found[0][1].any() and not any(x[0, :, 13:].any() or x[1].any() for x in found[1:])


@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 2.0},
        {"sinks": np.array([0.5, -1.0], np.float32)},
        {"scale": -0.3},
        {"scale": 0.0},
        pytest.param(
            {"softcap": 2.0, "is_causal": True, "attn_mask": np.zeros((1, 1, 40, 50), np.float32)},
            marks=slow,
        ),
        pytest.param(
            {"alibi_slopes": np.array([0.5, 0.1], np.float32), "is_causal": True}, marks=slow
        ),
    ],
)
def test_options(options):
    check({"h": 2}, **options)


@pytest.mark.parametrize(
    "kind", ["bool", *(pytest.param(x, marks=slow) for x in ("one for all heads", "float"))]
)
def test_masks(kind):
    rng = np.random.default_rng(3)
    seen = rng.random((1, 2, 40, 50)) > 0.5
    seen[0, 1, 7] = False  # a row that sees nothing
    seen[:, :, :, 5] = False  # a key that nobody sees
    mask = {
        "bool": seen,
        "one for all heads": seen[:, :1],
        "float": np.where(seen, rng.standard_normal(seen.shape), -np.inf).astype(np.float32),
    }[kind]
    check({"b": 2, "h": 2}, attn_mask=mask, is_causal=True, alignment="lower_right")


@slow
@pytest.mark.parametrize(
    ("arch", "dtype", "d"),
    [("sm_80", "float16", 256), ("sm_75", "float16", 128), ("sm_90a", "bfloat16", 128)],
)
def test_masks_of_wide_heads(arch, dtype, d):
    """In a narrow band most warps see nothing of most parts of a tile."""
    seen = np.random.default_rng(3).random((1, 2, 40, 50)) > 0.5
    check({"h": 2, "hkv": 1, "d": d}, dtype, arch, attn_mask=seen, window=(9, 3))


@pytest.mark.slow
def test_masks_of_grouped_heads():
    seen = np.random.default_rng(3).random((1, 4, 40, 50)) > 0.5
    check({"b": 2, "h": 4, "hkv": 2}, "bfloat16", attn_mask=seen)


def test_the_same_bits_under_every_schedule():
    q, k, v, do = case(h=2, hkv=1, l=70, s=90)
    out, lse, *_ = gradients(q, k, v, do, is_causal=True)
    first, _ = solve(q, k, v, do, out, lse, emulator={"schedule": "lockstep"}, is_causal=True)
    for seed in range(2):
        again, _ = solve(q, k, v, do, out, lse, emulator={"seed": seed}, is_causal=True)
        assert all(
            np.array_equal(a.view(np.uint16), b.view(np.uint16))
            for a, b in zip(first, again, strict=True)
        )


@slow
def test_what_is_not_finite_spoils_only_what_sees_it():
    q, k, v, do = case(l=40, s=40)
    out, lse, *expected = gradients(q, k, v, do, is_causal=True)
    lse = lse.copy()
    q[0, 0, 5, 3], v[0, 0, 30, 2], do[0, 0, 7, 1] = np.nan, np.inf, np.nan
    lse[0, 0, 5], out[0, 0, 5], out[0, 0, 30:] = (
        np.nan,
        np.nan,
        np.nan,
    )  # as the forward pass leaves them
    (dq, dk, dv), _ = solve(q, k, v, do, out, lse, is_causal=True)
    bad = np.isin(np.arange(40), [5, 7, *range(30, 40)])
    assert np.isnan(dq[0, 0, bad]).all() and np.isfinite(dq[0, 0, ~bad]).all()
    assert np.allclose(dq[0, 0, ~bad], expected[0][0, 0, ~bad], atol=4e-3)
    assert np.isnan(dk).all() and np.isnan(dv).all()  # the last rows see every key
    lse[0, 0, 30:], out[0, 0, 30:], do[0, 0, 30:] = np.nan, 0, 0
    v[0, 0, 30] = 0
    (dq, dk, dv), _ = solve(
        q,
        k,
        v,
        do,
        out,
        np.where(np.arange(40) < 30, lse, -np.inf),
        is_causal=True,
        attn_mask=np.arange(40)[:, None] < 30,
    )
    assert (
        np.isnan(dk[0, 0, :8]).all()
        and np.isnan(dv[0, 0, :8]).all()
        and np.isfinite(dk[0, 0, 8:]).all()
    )
    k[0, 0, 20, 0] = -np.inf  # a key that the first 20 rows do not see
    (dq, dk, dv), _ = solve(q, k, v, do, out, lse, is_causal=True)
    assert np.isnan(dq[0, 0, 20:30]).all() and np.isfinite(dq[0, 0, 8:20]).all()


def test_huge_scores():
    """Weights within a few bits of 0 or 1: dQ and dK are small differences of large numbers."""
    check({"s": 70}, magnify=100)


@slow
def test_turing():
    reports = check({"l": 70, "s": 90}, arch="sm_75", is_causal=True)
    assert (
        all(r.async_copied == 0 for r in reports)
        and reports[1].opcodes["mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32"] > 0
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "d"), [("sm_75", 128), ("sm_75", 256), ("sm_86", 256), ("sm_90a", 64)]
)
def test_tiles_of_other_cards(arch, d):
    check({"l": 70, "s": 90, "d": d}, arch=arch, is_causal=True)


def test_the_public_function():
    q, k, v, do = case(h=2, l=33, s=40)
    out, lse, *expected = gradients(q, k, v, do)
    heads_last = [x.swapaxes(1, 2) for x in (do, q, k, v, out.astype(np.float16))]
    found = numflash.attention_backward(
        *heads_last, lse.astype(np.float32).swapaxes(1, 2), layout="blhd", impl="cuda-emulator"
    )
    for x, right in zip(found, expected, strict=True):
        assert x.dtype == np.float16 and np.allclose(x.swapaxes(1, 2), right, atol=4e-3)
    dq, dk, dv = numflash.attention_backward(
        do[0, 0], q[0, 0], k[0, 0], v[0, 0], out[0, 0], lse[0, 0], impl="cuda-emulator"
    )
    assert (
        np.array_equal(dq, found[0][0, :, 0])
        and np.array_equal(dk, found[1][0, :, 0])
        and dv.shape == v[0, 0].shape
    )


def test_what_has_no_kernel_is_refused():
    def attempt(dtype, d, arch):
        x = np.zeros((1, 1, 4, d), dtype)
        solve(x, x, x, x, x.astype(np.float64), np.zeros((1, 1, 4)), arch)

    with pytest.raises(UnsupportedError, match="sm_75 has float16"):
        attempt(ml_dtypes.bfloat16, 8, "sm_75")
    with pytest.raises(UnsupportedError, match="head_dim: got 257"):
        attempt(np.float16, 257, "sm_80")
    x = np.zeros((4, 8), np.float16)
    with pytest.raises(UnsupportedError, match=r"lse: got 9000000\.0"):
        numflash.attention_backward(
            x, x, x, x, x, np.full(4, -9e6, np.float32), impl="cuda-emulator"
        )


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (3, 1), "key_lengths": np.array([9])},
        pytest.param(
            {"attn_mask": np.random.default_rng(1).random((1, 4, 13, 21)) > 0.5}, marks=slow
        ),
        pytest.param(
            {
                "attn_mask": np.random.default_rng(1)
                .standard_normal((1, 4, 13, 21))
                .astype(np.float32)
            },
            marks=slow,
        ),
        pytest.param(
            {"softcap": 1.5, "alibi_slopes": np.array([0.5, 0.1, 0.2, 0.3], np.float32)}, marks=slow
        ),
    ],
)
def test_float32(options):
    q, k, v = oracles.qkv(1, 4, 13, 21, 40, 72, 2)
    do = oracles.draw((1, 4, 13, 72), 3)
    out, lse, *expected = gradients(q, k, v, do, **options)
    found = numflash.attention_backward(
        do,
        q,
        k,
        v,
        out.astype(np.float32),
        lse.astype(np.float32),
        enable_gqa=True,
        impl="cuda-emulator",
        **options,
    )
    for x, right in zip(found, expected, strict=True):
        assert x.dtype == np.float32 and np.allclose(x, right, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "dtype", "in_place"),
    [
        ("sm_80", "float16", False),
        pytest.param("sm_90a", "bfloat16", True, marks=slow),
        pytest.param("sm_75", "float16", False, marks=slow),
        pytest.param(None, "float32", False, marks=slow),
    ],
)
def test_what_is_computed_from_the_lse(arch, dtype, in_place):
    """Scores have the gradient p * dLSE of it; a row that sees nothing has none."""
    kind = DTYPES.get(dtype, np.float32)
    q, k, v = (x.astype(kind) for x in oracles.qkv(1, 2, 33, 40, 64, 64, 1))
    do, grad_lse = oracles.draw((1, 2, 33, 64), 3).astype(kind), oracles.draw((1, 2, 33), 4)
    options = {"window": (20, 0), "alignment": "lower_right", "key_lengths": np.array([30])}
    out, lse, *_ = gradients(q, k, v, do, **options)
    assert np.isneginf(lse).any()
    want = oracles.naive_gradients(
        do, q, k, v, window=(20, 0), alignment="lower_right", key_lengths=[30], grad_lse=grad_lse
    )
    if arch is None:
        out, lse = out.astype(kind), lse.astype(kind)
        found = numflash.attention_backward(
            do,
            q,
            k,
            v,
            out,
            lse,
            grad_lse=grad_lse,
            enable_gqa=True,
            impl="cuda-emulator",
            **options,
        )
    else:
        found, _ = solve(
            q, k, v, do, out, lse, arch, in_place=in_place, grad_lse=grad_lse, **options
        )
    room = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}[dtype]
    for mine, right in zip(found, want, strict=True):
        off = np.abs(mine.astype(np.float64) - right).max()
        assert off <= room * np.abs(right).max(), off


def test_an_expanded_gradient_gets_memory():
    torch = pytest.importorskip("torch")
    expanded = torch.ones(()).expand(1, 2, 5, 8)
    heads_last = torch.ones(1, 5, 2, 8).transpose(1, 2)
    assert dense(expanded).is_contiguous() and torch.equal(dense(expanded), expanded)
    assert dense(heads_last) is heads_last


def test_validation_compares_with_float64_and_sees_a_wrong_card():
    problem = problem_of((1, 1, 1, 33, 40, 64), "float16", {})
    operands = gradient_operands(problem)
    emulated, _ = launch_backward.emulated(
        launch_backward.float_backward(problem, *operands, "sm_80")
    )
    for wrong, passed in ((1, True), (1.01, False), (np.nan, False)):
        card = emulated[0], emulated[1] * np.float16(wrong), emulated[2]
        for known in (emulated, None):
            row = compare.gradients(problem, operands, card, known)
            assert row["passed"] is passed and max(row["card_error"][::2]) < 1e-3


@pytest.mark.parametrize(("l", "s"), [(0, 5), (5, 0)])
def test_nothing(l, s):
    q, k, v, do = case(l=l, s=s)
    found, _ = solve(q, k, v, do, np.zeros(q.shape), np.full(q.shape[:3], -np.inf))
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape] and not any(
        x.any() for x in found
    )


@slow
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
    window = (1000, 1000) if left is None and right is None else (left, right)
    check({"h": 2, "hkv": 1, "l": l, "s": s}, seed=seed, window=window, alignment=alignment)
