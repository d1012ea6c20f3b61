"""Gradients of scores, float masks, sinks and captured arrays, and of the LSE as well as of the output:
float64, finite differences, arguments.

The scores' own are checked with every kernel and option in test_backward.py.
"""

from __future__ import annotations

import numpy as np
import pytest
from gradient_checks import F, agrees, drawn, every_isa, solve
from oracles import draw, naive, naive_gradients

import numflash
from numflash import attention, attention_backward
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError

B, H, L, S = 2, 4, 37, 150
ALL = ("query", "key", "value", "attn_mask", "sinks", "scores")
IMPLS = pytest.mark.parametrize("impl", ["auto", "portable", "reference"])
OPTIONS = {
    "sinks": draw(H, 7),
    "softcap": 2.0,
    "window": (40, 100),
    "key_lengths": np.array([150, 99]),
    "enable_gqa": True,
}


@every_isa
def test_asking_for_scores_changes_no_other_gradient(isa):
    operands = drawn(b=2, h=4, hkv=2, l=70, s=300, d=24)
    scores = np.zeros((2, 4, 70, 300), F)
    for options in ({}, {"softcap": 1.5, "attn_mask": draw((70, 300))}):
        with_scores = solve(*operands, isa, scores=scores, **options)
        for x, y in zip(solve(*operands, isa, **options), with_scores, strict=True):
            assert np.array_equal(x, y)


@every_isa
def test_rows_that_float32_does_not_hold(isa):
    """Their scores' gradients come from the float64 pass; zeros where they attend to nothing."""
    do, q, k, v = drawn(l=20, s=150, d=8)
    q[0, 0, 3] *= F(1e18)
    k[0, 0, 17] *= F(1e16)
    scores = np.zeros((1, 2, 20, 150), F)
    solve(do, q, k, v, isa, scores=scores, is_causal=True)
    wanted = naive_gradients(do, q, k, v, is_causal=True, with_scores=True)[3]
    far = np.isfinite(wanted) & (np.abs(wanted) > 1e-6)
    far[0, 0, 17:] = False  # rows whose scores are differences of huge numbers
    assert np.abs(scores - wanted)[far].max() < (0.1 if isa and "bf16" in isa else 1e-4)
    assert not scores[:, :, np.triu_indices(20, 1, 150)[0], np.triu_indices(20, 1, 150)[1]].any()


@IMPLS
@pytest.mark.parametrize(
    "shape", [(S,), (L, 1), (L, S), (H, 1, S), (1, H, L, S), (B, 1, 1, S), (B, H, L, S)]
)
def test_masks_of_every_shape_that_broadcasts(impl, shape):
    do, q, k, v = drawn(b=B, h=H, hkv=2, l=L, s=S, d=16)
    mask = draw(shape, 5)
    mask[..., ::7] = -np.inf
    options = {**OPTIONS, "attn_mask": mask}
    out, lse = attention(q, k, v, return_lse=True, **options)
    _, _, _, of_mask, of_sinks, scores = attention_backward(
        do, q, k, v, out, lse, impl=impl, wrt=ALL, **options
    )
    known = {name: x for name, x in options.items() if name != "enable_gqa"}
    wanted = naive_gradients(do, q, k, v, **known, with_scores=True)[3]
    np.testing.assert_allclose(scores, wanted, atol=2e-6)
    whole = wanted.reshape(1, *wanted.shape)
    of_shape = (*(1,) * (5 - len(shape)), *shape)
    axes = tuple(n for n in range(5) if of_shape[n] < whole.shape[n])
    assert of_mask.shape == shape and of_mask.dtype == F
    np.testing.assert_allclose(of_mask, whole.sum(axes).reshape(shape), atol=2e-5)
    step = 1e-4
    for h in range(H):
        there, back = OPTIONS["sinks"].astype(float), OPTIONS["sinks"].astype(float)
        there[h] += step
        back[h] -= step
        if impl == "auto" and shape == (L, S):
            rise = naive(q, k, v, **{**known, "sinks": there})[0]
            fall = naive(q, k, v, **{**known, "sinks": back})[0]
            slope = ((rise - fall) * do).sum() / (2 * step)
            np.testing.assert_allclose(of_sinks[h], slope, rtol=1e-4, atol=1e-5)


@every_isa
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "softcap": 2.0, "sinks": draw(4, 7)},
        {"attn_mask": draw((70, 300)), "key_lengths": np.array([300, 0])},
    ],
    ids=["plain", "causal, soft cap, sinks", "mask, a sequence without keys"],
)
def test_what_is_computed_from_the_lse(isa, options):
    operands = drawn(b=2, h=4, hkv=2, l=70, s=300, d=24)
    agrees(*operands, isa, grad_lse=draw((2, 4, 70), 11), **options)


@IMPLS
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
def test_the_lse_of_the_public_function(impl, layout):
    """The output has no gradient: that of sinks by finite differences, rows beyond float32 too."""
    do, q, k, v = drawn(b=B, h=H, hkv=2, l=L, s=S, d=16)
    q[0, 0, 3] *= F(1e18)
    k[0, 0, 17] *= F(1e16)
    grad_lse = draw((B, H, L), 11)
    known = {name: x for name, x in OPTIONS.items() if name != "enable_gqa"}
    wanted = naive_gradients(0 * do, q, k, v, grad_lse=grad_lse, **known)
    turned = (lambda x: x.swapaxes(1, 2)) if layout == "blhd" else (lambda x: x)
    operands = [turned(x) for x in (q, k, v)]
    out, lse = attention(*operands, return_lse=True, layout=layout, impl=impl, **OPTIONS)
    found = attention_backward(
        turned(0 * do),
        *operands,
        out,
        lse,
        grad_lse=turned(grad_lse),
        layout=layout,
        impl=impl,
        wrt=("query", "key", "value", "sinks"),
        **OPTIONS,
    )
    for mine, want in zip(found, wanted, strict=False):
        np.testing.assert_allclose(turned(mine), want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    step = 1e-4
    for h in range(2 if (impl, layout) == ("auto", "bhld") else 1):
        there, back = OPTIONS["sinks"].astype(float), OPTIONS["sinks"].astype(float)
        there[h] += step
        back[h] -= step
        rise, fall = (naive(q, k, v, **{**known, "sinks": x})[1] for x in (there, back))
        slope = ((rise - fall) * grad_lse).sum() / (2 * step)
        np.testing.assert_allclose(found[3][h], slope, rtol=1e-4, atol=1e-5)


def test_a_gradient_of_the_lse_that_is_not_finite():
    """Spoils its row and the keys that this attends to, and nothing else."""
    do, q, k, v = drawn(l=20, s=150, d=8)
    out, lse = attention(q, k, v, return_lse=True, is_causal=True)
    grad_lse = np.zeros((1, 2, 20), F)
    grad_lse[0, 1, 4] = np.inf
    found = attention_backward(do, q, k, v, out, lse, grad_lse=grad_lse, is_causal=True)
    plain = attention_backward(do, q, k, v, out, lse, is_causal=True)
    spoiled = [np.zeros(x.shape[:3], bool) for x in (q, k, v)]
    spoiled[0][0, 1, 4] = True
    spoiled[1][0, 1, :5] = True
    for mine, want, hit in zip(found, plain, spoiled, strict=True):
        assert not np.isfinite(mine[hit]).any()
        np.testing.assert_allclose(mine[~hit], want[~hit], atol=1e-5)


def test_sinks_that_take_all_or_nothing():
    """A sink far above every score has weight 1 and gradient 0 - 0; one far below, weight 0."""
    do, q, k, v = drawn(b=2, h=3, l=9, s=20, d=8)
    for size in (1e4, -1e4, 1e20):
        sinks = np.full(3, size, F)
        out, lse = attention(q, k, v, sinks=sinks, return_lse=True)
        (found,) = attention_backward(do, q, k, v, out, lse, sinks=sinks, wrt=("sinks",))
        np.testing.assert_array_equal(found, 0)
    lengths = np.array([0, 20])  # rows that see the sink alone
    sinks = np.zeros(3, F)
    out, lse = attention(q, k, v, sinks=sinks, key_lengths=lengths, return_lse=True)
    some = {"sinks": sinks, "key_lengths": lengths, "wrt": ["sinks", "value"]}
    found, dv = attention_backward(do, q, k, v, out, lse, **some)
    assert np.isfinite(found).all() and found.any() and not dv[0].any()


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_kinds_and_layouts(dtype, layout):
    import ml_dtypes

    dtype = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    do, q, k, v = drawn(b=2, h=3, l=9, s=20, d=8)
    arrays = [x if layout == "bhld" else x.swapaxes(1, 2) for x in (q, k, v)]
    mask, sinks = draw((3, 9, 20)).astype(dtype), draw(3).astype(dtype)
    options = {"attn_mask": mask, "sinks": sinks, "layout": layout}
    out, lse = attention(*arrays, return_lse=True, **options)
    grad = do if layout == "bhld" else do.swapaxes(1, 2)
    found = attention_backward(grad, *arrays, out, lse, wrt=ALL[3:], **options)
    result = np.float32 if dtype == np.float64 else dtype
    shapes = [(3, 9, 20), (3,), (2, 3, 9, 20)]
    assert [x.shape for x in found] == shapes
    assert [x.dtype for x in found] == [result, result, np.float32]
    np.testing.assert_allclose(found[0].astype(F), found[2].sum(0), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("sizes", [(0, 2, 3, 4), (2, 2, 0, 4), (2, 2, 3, 0)])
def test_nothing_to_differentiate(sizes):
    b, h, l, s = sizes
    q, k = np.ones((b, h, l, 8), F), np.ones((b, h, s, 8), F)
    options = {"attn_mask": np.zeros((l, s), F), "sinks": np.zeros(h, F)}
    out, lse = attention(q, k, k, return_lse=True, **options)
    found = attention_backward(out, q, k, k, out, lse, wrt=ALL, **options)
    assert [x.shape for x in found] == [q.shape, k.shape, k.shape, (l, s), (h,), (b, h, l, s)]
    assert not any(x.any() for x in found)
    table = np.ones((4, 4), F)
    for function in (lambda s, b, h, i, j: s + table[i, j], lambda s, b, h, i, j: s * table[h, h]):
        out, lse = numflash.flex_attention(q, k, k, function, return_lse=True)
        (of_table,) = attention_backward(out, q, k, k, out, lse, score_mod=function, wrt=(table,))
        assert of_table.shape == (4, 4) and not of_table.any()


# ---- captured arrays
TABLE, FULL, ONE = draw((H, 200), 1), draw((B, H, L, S), 2), np.array(0.6, F)
FUNCTIONS = {
    "table": (lambda s, b, h, i, j: s + TABLE[h, i - j + 160], TABLE, {}),
    "from the end": (lambda s, b, h, i, j: s + TABLE[h, -1 - (i + j)], TABLE, {}),
    "twice": (lambda s, b, h, i, j: s * TABLE[h, i] + TABLE[h, i] ** 2, TABLE, {}),
    "clamped": (lambda s, b, h, i, j: s + TABLE[h, i * 9], TABLE, {}),
    "one for all": (lambda s, b, h, i, j: s + TABLE[h - h, 3] * (i - j), TABLE, {}),
    "full": (lambda s, b, h, i, j: np.where(i > j, s, s + FULL[b, h, i, j]), FULL, {}),
    "scalar": (lambda s, b, h, i, j: np.tanh(s * ONE) / ONE, ONE, {}),
    "under a cap": (lambda s, b, h, i, j: s + TABLE[h, j], TABLE, {"softcap": 1.5}),
    "causal": (lambda s, b, h, i, j: s + TABLE[h, i - j], TABLE, {"is_causal": True}),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_captured_arrays_against_finite_differences(name, monkeypatch):
    function, array, options = FUNCTIONS[name]
    do, q, k, v = drawn(b=B, h=H, l=L, s=S, d=8)
    monkeypatch.setattr("numflash.flex.captured_arrays.SCORES", 4 * S)  # several rounds

    def loss():
        out = numflash.flex_attention(q, k, v, function, impl="reference", **options)
        return (out.astype(np.float64) * do).sum()

    out, lse = numflash.flex_attention(q, k, v, function, return_lse=True, **options)
    dq, found = attention_backward(
        do, q, k, v, out, lse, score_mod=function, wrt=("query", array), **options
    )
    (alone,) = attention_backward(
        do, q, k, v, out, lse, score_mod=function, wrt=("query",), **options
    )
    assert np.array_equal(dq, alone)
    assert found.shape == array.shape and found.dtype == F
    changed = np.argwhere(found)  # and one that nothing depends on, if there is one
    places = [*changed[:: max(1, len(changed) // 3)], *np.argwhere(found == 0)[:1]]
    for place in map(tuple, places):
        before, values = array[place], []
        for step in (F(0.01), F(-0.01)):
            array[place] = before + step
            values.append(loss())
        array[place] = before
        slope = (values[0] - values[1]) / 0.02
        np.testing.assert_allclose(found[place], slope, rtol=5e-3, atol=5e-4)


# ---- arguments
def test_what_has_no_gradient_is_named():
    do, q, k, v = drawn(l=9, d=8)
    out, lse = attention(q, k, v, return_lse=True)
    table, numbers = draw(20), np.arange(20)

    def plus(score, b, h, i, j):
        return score + table[i] + numbers[j]

    mask, sinks = np.zeros((9, 9), F), np.zeros(2, F)
    wrong = [
        ("query", {}, ArgumentTypeError, "wrt: got 'query'"),
        (3, {}, ArgumentTypeError, "wrt: got 3"),
        (("bias",), {}, ArgumentError, "wrt: got 'bias'; allowed: 'query'"),
        (("sinks",), {}, ArgumentError, "wrt: got 'sinks', which is None"),
        (("attn_mask",), {}, ArgumentError, "wrt: got 'attn_mask', which is None"),
        (("attn_mask",), {"attn_mask": mask == 0}, ArgumentError, "which is bool"),
        (
            (table,),
            {},
            ArgumentError,
            r"ndarray of shape \(20,\), which score_mod does not index by",
        ),
        ((draw(20),), {"score_mod": plus}, ArgumentError, "which score_mod does not index by"),
        ((numbers,), {"score_mod": plus}, ArgumentError, "captured array of dtype int64"),
        (
            ("attn_mask",),
            {"attn_mask": mask, "impl": "cuda-emulator"},
            UnsupportedError,
            "gradient of a float mask",
        ),
    ]
    for wrt, options, error, message in wrong:
        with pytest.raises(error, match=message):
            attention_backward(do, q, k, v, out, lse, wrt=wrt, **options)
    assert attention_backward(do, q, k, v, out, lse, sinks=sinks, wrt=()) == ()
    agrees(do, q, k, v)
