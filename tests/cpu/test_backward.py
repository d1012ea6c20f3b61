"""Gradients of attention, every kernel: float64, within twice the error of plain float32.

Finite differences; equal bits. Arrays and arguments: test_backward_arrays.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from gradient_checks import F, agrees, close, drawn, every_isa, float_isa, held, near, solve
from hypothesis import HealthCheck, given, settings
from oracles import TAILS, draw, naive, naive_gradients
from test_flash_float import SHAPES, make
from test_float_properties import problems

import numflash
from numflash import attention, attention_backward, reference
from numflash.jit.threads import limit, most


# ---- sizes and options
@every_isa
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_every_block_edge(isa, causal):
    for length, s in [*TAILS, (64, 144), (65, 145), (63, 143), (128, 6), (200, 290)]:
        for alignment in ("upper_left", "lower_right"):
            agrees(*drawn(l=length, s=s, d=16), isa, is_causal=causal, alignment=alignment)


@every_isa
def test_head_dims_and_groups_of_heads(isa):
    for d, dv in [
        (1, 1),
        (3, 2),
        (16, 40),
        (40, 16),
        (64, 80),
        (72, 72),
        (100, 33),
        (128, 128),
        (256, 256),
        (576, 512),
        (80, 1),
    ]:
        agrees(*drawn(b=2, h=4, hkv=1 if d % 3 else 2, l=40, s=75, d=d, dv=dv), isa, is_causal=True)
    agrees(*drawn(b=1, h=12, hkv=2, l=20, s=30, d=8), isa)


@every_isa
def test_windows_key_lengths_and_long_sequences(isa):
    for window in [(0, 0), (3, None), (None, 5), (17, 9), (100, 64), (1000, 1000)]:
        for alignment in ("upper_left", "lower_right"):
            agrees(
                *drawn(b=2, l=150, s=400, d=16),
                isa,
                window=window,
                alignment=alignment,
                key_lengths=np.array([333, 64]),
            )
    agrees(*drawn(b=3, l=9, s=70, d=16), isa, key_lengths=np.array([0, 1, 70]))
    agrees(*drawn(l=300, s=1000, d=16), isa, window=(None, 3), scale=2.0)


@every_isa
@pytest.mark.parametrize("shape", SHAPES)
def test_masks_of_every_shape_that_broadcasts(isa, shape):
    operands = drawn(b=2, h=3, l=70, s=300, d=16)
    seen = np.random.default_rng(5).random(shape) < 0.4
    agrees(*operands, isa, attn_mask=seen)
    agrees(*operands, isa, attn_mask=draw(shape), is_causal=True)
    agrees(*operands, isa, attn_mask=np.where(seen, draw(shape), F(-np.inf)))
    blocks = seen.copy()
    blocks[..., 64:256] = False
    agrees(*operands, isa, attn_mask=blocks)


@every_isa
def test_everything_at_once(isa):
    for softcap, slopes, bias, sinks in np.ndindex(2, 2, 2, 2):
        agrees(
            *drawn(b=2, h=4, hkv=2, l=61, s=283, d=40, dv=24),
            isa,
            attn_mask=draw((2, 1, 61, 283))
            if bias
            else np.random.default_rng(0).random((1, 4, 61, 283)) < 0.5,
            window=(100, 20),
            alignment="lower_right",
            key_lengths=np.array([283, 200]),
            softcap=2.5 * softcap,
            alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0]) if slopes else None,
            scale=0.7,
            sinks=np.array([0.5, -1.0, 3.0, 0.0]) if sinks else None,
        )


def combination(case, isa):
    query, key, value, options = case
    agrees(draw((*query.shape[:3], value.shape[3]), 9), query, key, value, isa, **options)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(problems())
def test_any_combination(case):
    combination(case, None)


@pytest.mark.slow
@every_isa
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=problems())
def test_any_combination_at_length(isa, case):
    combination(case, isa)


# ---- checks that know nothing of the formula
ALL = {
    "is_causal": True,
    "window": (4, None),
    "alignment": "lower_right",
    "softcap": 2.0,
    "sinks": np.array([0.5, -1.0]),
    "alibi_slopes": np.array([0.5, 0.1]),
    "attn_mask": np.where(draw((2, 5, 7)) > -1, draw((2, 5, 7)), F(-np.inf)),
    "scale": 0.8,
}


@float_isa
@pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all options"])
def test_a_gradient_is_what_the_oracle_changes_by(isa, options):
    operands = drawn(h=2, hkv=1, l=5, s=7, d=3)
    found = solve(*operands, isa, **options)
    do, *arrays = (x.astype(np.float64) for x in operands)
    for x, gradient in zip(arrays, found, strict=True):
        for at in np.ndindex(x.shape):
            old = x[at]
            moved = []
            for step in (1e-6, -1e-6):
                x[at] = old + step
                moved.append((do * naive(*arrays, **options)[0]).sum())
            x[at] = old
            assert abs((moved[0] - moved[1]) / 2e-6 - gradient[at]) < 2e-6 * max(
                1, abs(gradient[at])
            )


@pytest.mark.parametrize(
    ("h", "hkv", "options"),
    [(2, 1, {}), (2, 1, ALL), (2, 1, {"key_lengths": [3]}), (4, 2, {}), (6, 2, {})],
    ids=["plain", "all options", "padding", "groups", "larger groups"],
)
def test_the_reference_is_the_definition(h, hkv, options):
    do, q, k, v = drawn(h=h, hkv=hkv, l=5, s=7, d=3)
    problem = make(q, k, v, **options)
    found = reference.gradients(problem, do, *reference.oracle(problem), block=2)
    for mine, want in zip(found, naive_gradients(do, q, k, v, **options), strict=True):
        np.testing.assert_allclose(mine, want, rtol=1e-6, atol=1e-7)  # float32 slopes and biases


@pytest.mark.parametrize(("bias", "sink"), [(2.0**25, 2.0**25), (2.0**25, 0.0), (-(2.0**25), None)])
def test_the_reference_with_scores_far_from_zero(bias, sink):
    """An LSE as float32 holds it is off by ones there.

    The sink takes part when it is computed anew.
    """
    do, q, k, v = drawn(h=2, l=5, s=7, d=3)
    options = {
        "attn_mask": np.full((5, 7), bias, F),
        "sinks": None if sink is None else np.full(2, sink, F),
    }
    problem = make(q, k, v, **options)
    out, lse = reference.oracle(problem)
    found = reference.gradients(problem, do, out, lse.astype(F))
    for mine, want in zip(found, naive_gradients(do, q, k, v, **options), strict=True):
        np.testing.assert_allclose(mine, want, atol=1e-6)


def test_in_the_reference_too_what_is_hidden_never_leaks():
    do, q, k, v = drawn(h=1, l=5, s=5, d=3)

    def solved():
        problem = make(q, k, v, is_causal=True)
        return reference.gradients(problem, do, *reference.oracle(problem))[0]

    clean = solved()
    for x in (k, v):
        kept = x[:, :, 4].copy()
        x[:, :, 4] = np.nan
        found = solved()
        x[:, :, 4] = kept
        np.testing.assert_array_equal(found[:, :, :4], clean[:, :, :4])
        assert np.isnan(found[:, :, 4]).all()


@pytest.mark.parametrize("impl", ["reference", "cpu", "portable"])
def test_parts_of_the_keys_add_up_to_the_whole(impl):
    do, q, k, v = drawn(l=50, s=90, d=16)
    parts = [
        attention(q, x, y, return_lse=True)
        for x, y in ((k[:, :, :35], v[:, :, :35]), (k[:, :, 35:], v[:, :, 35:]))
    ]
    out, lse = numflash.merge_states(*parts[0], *parts[1])
    first, second = (
        attention_backward(do, q, k[:, :, cut], v[:, :, cut], out, lse, impl=impl)
        for cut in (slice(0, 35), slice(35, 90))
    )
    close(
        (
            first[0] + second[0],
            *(np.concatenate(x, 2) for x in zip(first[1:], second[1:], strict=True)),
        ),
        (do, q, k, v),
    )


# ---- what is hidden, and what is not finite
@every_isa
def test_what_nobody_sees_has_no_gradient(isa):
    do, q, k, v = drawn(l=40, s=90, d=16)
    mask = np.ones((40, 90), bool)
    mask[7] = mask[21] = mask[:, 30] = False
    for dense in (mask, np.where(mask, F(0), F(-np.inf))):
        dq, dk, dv = agrees(do, q, k, v, isa, attn_mask=dense)
        assert not dq[:, :, [7, 21]].any() and not dk[:, :, 30].any() and not dv[:, :, 30].any()
    dq, _, _ = agrees(
        do, q, k[:, :, :10], v[:, :, :10], isa, is_causal=True, alignment="lower_right"
    )
    assert not dq[:, :, :30].any() and dq[:, :, 31:].any()
    _, dk, dv = agrees(do, q, k, v, isa, key_lengths=np.array([33]))
    assert not dk[:, :, 33:].any() and not dv[:, :, 33:].any() and dv[:, :, :33].all()
    assert not any(
        x.any()
        for x in solve(do, q, k, v, isa, attn_mask=np.zeros((40, 90), bool), sinks=[0.0, 1.0])
    )


WAYS = ("mask", "bias", "padding", "causal", "window")


@every_isa
@pytest.mark.parametrize("way", WAYS)
def test_what_is_hidden_never_leaks(isa, way):
    """NaN and infinity in two keys.

    Rows that do not see them, and keys that only such rows see, keep their gradients.
    """
    do, q, k, v = drawn(l=200, s=200, d=16)
    mask = np.random.default_rng(1).random((200, 200)) < 0.7
    mask[:150, [3, 130]] = False
    options = {
        "mask": {"attn_mask": mask},
        "bias": {"attn_mask": np.where(mask, F(0), F(-np.inf))},
        "padding": {"key_lengths": np.array([3])},
        "causal": {"is_causal": True},
        "window": {"window": (2, 1)},
    }[way]
    problem = make(q, k, v, **options)
    seen = reference.visible(problem, 0, 0) & (
        True if problem.bias is None else problem.bias[0, 0] == 0
    )
    spoiled = seen[:, [3, 130]].any(1)
    safe = ~seen[spoiled].any(0)
    clean = solve(do, q, k, v, isa, **options)
    for bad in (np.nan, np.inf, -np.inf, 3e38):
        for which in (k, v):
            kept = which[:, :, [3, 130]].copy()
            which[:, :, [3, 130]] = bad
            dq, dk, dv = solve(do, q, k, v, isa, **options)
            which[:, :, [3, 130]] = kept
            assert np.abs(dq - clean[0])[:, :, ~spoiled].max() <= near(isa)
            assert max(
                np.abs(x - y)[:, :, safe].max(initial=0)
                for x, y in ((dk, clean[1]), (dv, clean[2]))
            ) <= near(isa)
            if np.isnan(bad) and spoiled.any():
                assert np.isnan(dq[:, :, spoiled]).all() and np.isnan(dk[:, :, [3, 130]]).any()


@every_isa
def test_a_row_that_is_not_finite_spoils_only_the_keys_it_sees(isa):
    operands = drawn(l=100, s=200, d=16)
    options = {"is_causal": True, "alignment": "lower_right", "window": (60, None)}
    clean = solve(*operands, isa, **options)
    for n in (0, 1):
        dirty = [x.copy() for x in operands]
        dirty[n][:, :, 60, 2] = np.nan
        found = solve(*dirty, isa, **options)
        assert (
            np.isnan(found[0][:, :, 60]).all() and np.isnan(found[2][:, :, 100:161]).any(-1).all()
        )
        assert np.abs(np.delete(found[0] - clean[0], 60, 2)).max() <= 1e-5
        for x, y in zip(found[1:], clean[1:], strict=True):
            assert np.abs(np.delete(x - y, np.s_[100:161], 2)).max() <= 1e-5


@every_isa
def test_keys_that_are_not_finite_and_scores_that_are(isa):
    """A softcap gives an infinite key a weight: its value has a gradient."""
    do, q, k, v = drawn(l=70, s=140, d=16)
    k[:, :, [3, 130], 2] = np.inf, -np.inf
    cap = 43.8126  # of which a product with its reciprocal is not 1
    problem = make(q, k, v, softcap=cap)
    with np.errstate(invalid="ignore"):  # infinity less infinity in the product that tanh takes
        want = reference.gradients(problem, do, *reference.oracle(problem))
    assert want[2][:, :, [3, 130]].all()
    for found, exact in zip(solve(do, q, k, v, isa, softcap=cap), want, strict=True):
        assert np.abs(found - exact).max() <= near(isa) * max(1, np.abs(exact).max())


@every_isa
def test_finite_inputs_never_give_nan(isa):
    do, q, k, v = drawn(l=30, s=140, d=16)
    for factor in (1e18, 3e38):
        big = F(factor)
        with np.errstate(over="ignore"):
            for operands in [
                (do, q * big, k, v),
                (do, q, k * big, v),
                (do, q * big, k * big, v),
                (do, q, k, v * big),
                (do * big, q, k, v),
                (do * big, q, k, v * big),
                (do * big, q * big, k * big, v * big),
            ]:
                operands = [np.clip(x, -3e38, 3e38).astype(F) for x in operands]
                for options in (
                    {},
                    {"is_causal": True},
                    {"softcap": 30.0},
                    {"scale": 1e30},
                    {"scale": 1e-30},
                ):
                    assert not any(np.isnan(x).any() for x in solve(*operands, isa, **options)), (
                        factor,
                        options,
                    )


@every_isa
def test_scores_that_float32_cannot_hold(isa):
    """Weights of 0 and 1, or rows whose biases are all the lowest float.

    Their LSE is computed anew, in float64.
    """
    do, q, k, v = drawn(l=40, s=90, d=16)
    (do, q, k, v, *big), _ = held((do, q, k, v, q * F(1e20), k * F(1e20)), isa)
    found = solve(do, *big, v, isa)
    winner = np.einsum("bhld,bhsd->bhls", *(x.astype(np.float64) for x in big)).argmax(-1)
    want = np.zeros(v.shape)
    for b, h, i in np.ndindex(winner.shape):
        want[b, h, winner[b, h, i]] += do[b, h, i]
    assert np.abs(found[2] - want).max() <= 1e-5 and not found[0].any() and not found[1].any()
    for bias in (np.finfo(F).min, -1e30):
        mask = np.zeros((40, 90), F)
        mask[5:9] = bias
        found = solve(do, q, k, v, isa, attn_mask=mask)
        wanted = naive_gradients(do, q, k, v)
        # as far as float64 holds bias + score: such rows see all keys alike
        flat = naive_gradients(do[:, :, 5:9], np.zeros_like(q[:, :, 5:9]), k, v)
        assert np.abs(np.delete(found[0] - wanted[0], np.s_[5:9], 2)).max() <= near(isa)
        rest = naive_gradients(np.delete(do, np.s_[5:9], 2), np.delete(q, np.s_[5:9], 2), k, v)
        assert np.abs(found[2] - rest[2] - flat[2]).max() <= near(isa)


# ---- equal bits
@every_isa
def test_equal_bits_at_every_thread_count_and_run(isa):
    do, q, k, v = drawn(b=1, h=6, hkv=2, l=300, s=500, d=16)
    k[0, 0, 7] = 1e30  # some rows are done again
    options = {"attn_mask": np.random.default_rng(0).random((300, 500)) < 0.5, "softcap": 20.0}
    first = solve(do, q, k, v, isa, **options)
    for threads in (1, most(), most()):
        with limit(threads):
            again = solve(do, q, k, v, isa, **options)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
