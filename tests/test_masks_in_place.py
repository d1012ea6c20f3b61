"""Equal calls whose masks lie where an earlier one's did: its plan serves again, its numbers do not."""

import weakref

import numpy as np
import pytest
from oracles import naive, naive_gradients, qkv

import numflash
from numflash.cpu import plan
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError, NumflashError
from numflash.jit import guard, target

F = np.float32
B, H, L, S = 2, 4, 20, 53
ARRAYS = qkv(b=B, h=H, l=L, s=S, d=24)
GRADIENT = np.random.default_rng(1).standard_normal((B, H, L, 24), F)
OPTIONS = {
    "mask": lambda rng: {"attn_mask": rng.random((B, 1, L, S)) < 0.7},
    "bias": lambda rng: {"attn_mask": rng.standard_normal((H, L, S), F)},
    "lengths": lambda rng: {"key_lengths": rng.integers(1, S, B)},
    "slopes": lambda rng: {"alibi_slopes": rng.random(H)},
    "sinks": lambda rng: {"sinks": rng.standard_normal(H)},
    "all": lambda rng: {
        "attn_mask": rng.random((L, S)) < 0.7,
        "key_lengths": rng.integers(1, S, B),
        "alibi_slopes": rng.random((B, H)),
        "sinks": rng.standard_normal(H),
    },
}
planned = pytest.mark.skipif(
    guard.ON or target.require(None, target.FLOAT_ISAS) == "portable",
    reason="equal calls keep no plan here",
)


@pytest.fixture(autouse=True)
def no_plans():
    plan_store._plans.plans.clear()


@pytest.fixture
def looks(monkeypatch):
    """How often plans looked at the options' arrays in full."""
    calls = []
    described = plan.described
    monkeypatch.setattr(plan, "described", lambda *x: calls.append(1) or described(*x))
    return calls


def attention(**options):
    return numflash.attention(*ARRAYS, return_lse=True, **options)


def check(found, **options):
    want = naive(*ARRAYS, **options)
    for x, y in zip(found, want, strict=True):
        np.testing.assert_allclose(x, y, atol=1e-5)


def gradients(**options):
    return numflash.attention_backward(GRADIENT, *ARRAYS, *attention(**options), **options)


@planned
@pytest.mark.parametrize("name", OPTIONS)
def test_known_arrays_are_followed(name, looks):
    """Written anew in place, and looked at in full only where that is needed."""
    rng = np.random.default_rng(3)
    options = OPTIONS[name](rng)
    for _ in range(4):
        for x, fresh in zip(options.values(), OPTIONS[name](rng).values(), strict=True):
            x[...] = fresh
        check(attention(**options), **options)
        attention(**options)  # after a call that needed more memory, whose plan is new
        before = len(looks)
        attention(**options)
        assert len(looks) == before
    held = {x: y.copy() for x, y in options.items()}
    for x, y in zip(gradients(**options), gradients(**held), strict=True):
        np.testing.assert_array_equal(x, y)


def test_masks_that_kernels_read_in_a_copy():
    rng = np.random.default_rng(6)
    turned = np.asfortranarray(rng.random((L, S)) < 0.7)
    half = rng.standard_normal((L, S)).astype(np.float16)
    for _ in range(4):
        check(attention(attn_mask=turned), attn_mask=turned)
        check(attention(attn_mask=half), attn_mask=half)
        turned[...], half[...] = rng.random((L, S)) < 0.7, rng.standard_normal((L, S))


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_views_that_begin_at_one_place(precision):
    """Of other strides, shapes and dtypes: what is read is each view's own."""
    memory = np.random.default_rng(4).integers(0, 2, (2 * L, 2 * S)).astype(np.uint8).view(bool)
    views = {
        "rows": memory.ravel()[: L * S].reshape(L, S),
        "every second row": memory.ravel()[: 2 * L * S].reshape(L, 2, S)[:, 0],
        "part of rows": memory[:L, :S],
        "every second key": memory[:L, ::2],
        "one row": memory[0, :S],
        "turned": np.lib.stride_tricks.as_strided(memory, (L, S), (1, L)),
    }
    for _ in range(3):
        for mask in views.values():
            out = numflash.attention(*ARRAYS, attn_mask=mask, precision=precision)
            want, _ = naive(*ARRAYS, attn_mask=mask)
            assert np.abs(out - want).max() < (1e-5 if precision == "float32" else 0.2)
    for wrong in (memory.view(np.uint8)[:L, :S], memory[:L, : S + 1], np.ma.array(views["rows"])):
        with pytest.raises(NumflashError, match="attn_mask: got"):
            numflash.attention(*ARRAYS, attn_mask=wrong, precision=precision)


def test_rows_that_float32_does_not_hold_read_the_mask_where_it_is():
    q, k, v = ARRAYS
    mask = np.random.default_rng(5).random((L, S)) < 0.7
    for _ in range(3):
        out = numflash.attention(F(1e20) * q, F(1e20) * k, v, attn_mask=mask)
        want, _ = naive(F(1e20) * q, F(1e20) * k, v, attn_mask=mask)
        np.testing.assert_allclose(out, want, atol=1e-5)
        mask[...] = ~mask


def test_wrong_lengths_after_right_ones():
    for _ in range(3):
        attention(key_lengths=np.array([S, 3]))
    for wrong in ([S, -1], [S + 1, 3], [3.0, 3.0], [3]):
        with pytest.raises(NumflashError, match="key_lengths: got"):
            attention(key_lengths=np.array(wrong))
    for wrong in ([np.nan] * H, [np.inf] * H):
        with pytest.raises(ArgumentError, match="alibi_slopes: got"):
            attention(alibi_slopes=np.array(wrong))


def test_the_diagonal_follows_lengths_and_alignment():
    """Of as many keys as queries: with all of them, both alignments have one plan of gradients."""
    arrays = [x[:, :, :L] for x in ARRAYS]
    for lengths in ([L, L], [12, 7], [L, L]):
        for alignment in ("upper_left", "lower_right"):
            options = {"key_lengths": np.array(lengths), "is_causal": True, "alignment": alignment}
            want = naive_gradients(GRADIENT, *arrays, **options)
            for _ in range(3):
                results = numflash.attention(*arrays, return_lse=True, **options)
                found = numflash.attention_backward(GRADIENT, *arrays, *results, **options)
                for x, y in zip(found, want, strict=True):
                    np.testing.assert_allclose(x, y, atol=1e-4)


@planned
@pytest.mark.parametrize("rows", [L, 2])
@pytest.mark.parametrize("name", ["mask", "bias", "all"])
def test_gradients_of_a_known_mask_are_followed(name, rows, looks):
    """Of tiles and of few rows: what was written in place is read, and from the third call on nothing is looked at in full."""
    rng = np.random.default_rng(7)
    q, grad = (np.ascontiguousarray(x[:, :, :rows]) for x in (ARRAYS[0], GRADIENT))
    arrays = q, *ARRAYS[1:]
    options = OPTIONS[name](rng)
    options["attn_mask"] = np.ascontiguousarray(options["attn_mask"][..., :rows, :])
    results = numflash.attention(*arrays, return_lse=True, **options)
    for call in range(4):
        before = len(looks)
        found = numflash.attention_backward(grad, *arrays, *results, **options)
        assert call < 2 or len(looks) == before
        held = {x: y.copy() for x, y in options.items()}
        want = numflash.attention_backward(grad, *arrays, *results, impl="portable", **held)
        for x, y in zip(found, want, strict=True):
            np.testing.assert_allclose(x, y, atol=1e-4)
        options["attn_mask"][...] = OPTIONS[name](rng)["attn_mask"][..., :rows, :]
        results = numflash.attention(*arrays, return_lse=True, impl="reference", **options)


@planned
def test_what_is_kept_is_bounded_and_holds_no_mask():
    masks = [
        np.ones((L, S), bool) for _ in range(12)
    ]  # at once, so that each has a place of its own
    for n, mask in enumerate(masks):
        mask[:, n] = False
        for _ in range(2):
            check(attention(attn_mask=mask), attn_mask=mask)
    (kept,) = plan_store._plans.plans.values()
    assert 0 < len(kept.runner.others) <= plan.MOST_OTHERS
    gone = [weakref.ref(x) for x in masks]
    del mask, masks
    assert not any(x() is not None for x in gone)
