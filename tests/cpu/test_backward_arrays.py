"""Gradients: strides, layouts, dtypes and arrays of other libraries, empty ones, bad arguments."""

from __future__ import annotations

import numpy as np
import pytest
from gradient_checks import BFLOAT16_ISAS, ISAS, F, close, drawn, solve
from test_flash_float import make

from numflash import api, attention, attention_backward
from numflash.cpu.backward import call, plans
from numflash.cpu.backward.flash_backward import make_backward
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from numflash.interop import arrays as interop
from numflash.jit import guard

ULP = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


def test_strides_of_every_kind():
    operands = drawn(b=2, h=3, l=50, s=60, d=24)
    out, lse = attention(*operands[1:], return_lse=True)
    want = attention_backward(*operands, out, lse)

    def twisted(x):
        wide = np.zeros((*x.shape[:-1], 2 * x.shape[-1]), F)
        wide[..., ::2] = x
        return wide[..., ::2]

    for change in (
        np.asfortranarray,
        twisted,
        lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
        lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    ):
        found = attention_backward(*(change(x) for x in (*operands, out, lse)))
        assert all(np.array_equal(a, b) for a, b in zip(want, found, strict=True))
    ones = np.broadcast_to(F(1), out.shape)  # the gradient of out.sum()
    assert np.array_equal(
        attention_backward(ones, *operands[1:], out, lse)[2],
        attention_backward(ones.copy(), *operands[1:], out, lse)[2],
    )


@pytest.mark.skipif(ISAS[0] == "portable", reason="no register tiles here")
def test_read_only_arrays_compile_nothing_anew():
    operands = drawn(l=20, d=8)
    out, lse = attention(*operands[1:], return_lse=True)
    want = attention_backward(*operands, out, lse)
    known = len(make_backward(ISAS[0]).signatures)
    for x in (*operands, out, lse):
        x.flags.writeable = False
    assert all(
        np.array_equal(a, b)
        for a, b in zip(want, attention_backward(*operands, out, lse), strict=True)
    )
    assert len(make_backward(ISAS[0]).signatures) == known


def test_plans_belong_to_an_instruction_set_and_a_number_of_threads():
    problem = make(*drawn(l=20, d=8)[1:])
    for isa in [x for x in (*ISAS, *BFLOAT16_ISAS) if x != "portable"]:
        for workers in (1, 2, 1):
            plan = plans.plan_of(problem, isa, workers)
            numbers = call.Numbers(*plan.numbers[: call.NUMBERS])
            assert plan.call is call.make_call(isa) and numbers.workers == workers


def test_equal_calls_have_their_own_lengths_and_scales():
    """What a call leaves for the next one is not changed with its arrays, nor taken by others."""
    operands = drawn(b=2, l=20, s=70, d=8)
    lengths = np.array([70, 33])

    def check(**options):
        out, lse = attention(*operands[1:], return_lse=True, impl="reference", **options)
        found = attention_backward(*operands, out, lse, **options)
        close(found, operands, **options)

    check(key_lengths=lengths)
    lengths[:] = 5, 70
    for _ in range(2):
        check(key_lengths=lengths)
        check(key_lengths=np.array([70, 33]))
        check(is_causal=True, alignment="lower_right")
        check(is_causal=True)
        check(window=(4, 3))
        check(window=(9, 3))
        check()
        check(scale=0.7)
        check(softcap=3.0)


@pytest.mark.parametrize("impl", ["reference", "auto", "portable"])
@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_layouts_and_promotion(impl, layout, ndim):
    operands = drawn(b=2 if ndim == 4 else 1, h=1 if ndim == 2 else 4, l=6, s=9, d=8, dv=5)
    arrays = [
        (x if layout == "bhld" else x.swapaxes(1, 2))[(0,) * (4 - ndim)] if ndim > 2 else x[0, 0]
        for x in operands
    ]
    out, lse = attention(*arrays[1:], is_causal=True, return_lse=True, layout=layout)
    found = attention_backward(*arrays, out, lse, is_causal=True, layout=layout, impl=impl)
    assert all(
        x.shape == array.shape and x.dtype == F for x, array in zip(found, arrays[1:], strict=True)
    )
    turn = layout == "blhd" and ndim > 2
    back = [
        x.reshape(like.swapaxes(1, 2).shape).swapaxes(1, 2) if turn else x.reshape(like.shape)
        for x, like in zip(found, operands[1:], strict=True)
    ]
    close(back, operands, is_causal=True)


@pytest.mark.parametrize("impl", ["reference", "auto", "portable"])
@pytest.mark.parametrize("precision", ["float16", "bfloat16"])
def test_half_precision(impl, precision):
    import ml_dtypes

    dtype = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}[precision]
    operands = [x.astype(dtype) for x in drawn(b=2, h=4, hkv=2, l=70, s=83, d=40)]
    out, lse = attention(*operands[1:], enable_gqa=True, is_causal=True, return_lse=True)
    found = attention_backward(*operands, out, lse, enable_gqa=True, is_causal=True, impl=impl)
    assert all(x.dtype == dtype for x in found)
    close(
        [x.astype(F) for x in found],
        [x.astype(F) for x in operands],
        ULP[precision],
        is_causal=True,
    )
    if precision == "bfloat16":
        bits = attention_backward(
            *(x.view(np.uint16) for x in (*operands, out)),
            lse,
            enable_gqa=True,
            is_causal=True,
            precision=precision,
            impl=impl,
        )
        assert all(np.array_equal(x, y.view(np.uint16)) for x, y in zip(bits, found, strict=True))


def test_float64_and_torch():
    operands = drawn(l=20, d=8)
    out, lse = attention(*operands[1:], return_lse=True)
    want = attention_backward(*operands, out, lse)
    found = attention_backward(*(x.astype(np.float64) for x in (*operands, out, lse)))
    assert all(np.array_equal(a, b) and b.dtype == F for a, b in zip(want, found, strict=True))
    torch = pytest.importorskip("torch")
    found = attention_backward(*(torch.from_numpy(x) for x in (*operands, out, lse)))
    assert all(
        isinstance(b, torch.Tensor) and np.array_equal(a, b.numpy())
        for a, b in zip(want, found, strict=True)
    )
    found = attention_backward(
        *(torch.from_numpy(x).bfloat16() for x in (*operands, out)), torch.from_numpy(lse)
    )
    assert all(b.dtype == torch.bfloat16 for b in found)


@pytest.mark.parametrize("impl", ["reference", "auto", "portable"])
@pytest.mark.parametrize(("b", "l", "s"), [(0, 3, 4), (2, 0, 4), (2, 3, 0)])
def test_nothing_to_differentiate(impl, b, l, s):
    operands = [
        np.ones(shape, F) for shape in ((b, 2, l, 5), (b, 2, l, 8), (b, 2, s, 8), (b, 2, s, 5))
    ]
    out, lse = attention(*operands[1:], return_lse=True)
    for x, gradient in zip(
        operands[1:], attention_backward(*operands, out, lse, impl=impl), strict=True
    ):
        assert gradient.shape == x.shape and not gradient.any()


def test_bad_arguments_are_named():
    do, q, k, v = drawn(l=9, d=8)
    out, lse = attention(q, k, v, return_lse=True)
    for error, message, arrays, options in [
        (
            ArgumentError,
            r"grad_out: got shape \(9, 8\); allowed: \(1, 2, 9, 8\)",
            (do[0, 0], q, k, v, out, lse),
            {},
        ),
        (ArgumentError, r"out: got shape", (do, q, k, v, out[..., 1:], lse), {}),
        (ArgumentError, r"lse: got shape \(1, 2, 9, 1\)", (do, q, k, v, out, lse[..., None]), {}),
        (
            ArgumentTypeError,
            r"lse: got dtype float16",
            (do, q, k, v, out, lse.astype(np.float16)),
            {},
        ),
        (
            ArgumentError,
            r"grad_lse: got shape \(9,\); allowed: \(1, 2, 9\)",
            (do, q, k, v, out, lse),
            {"grad_lse": lse[0, 0]},
        ),
        (
            ArgumentTypeError,
            r"grad_lse: got dtype int32; allowed: float32, float64",
            (do, q, k, v, out, lse),
            {"grad_lse": lse.astype(np.int32)},
        ),
        (ArgumentTypeError, r"grad_out: got dtype int64", (do.astype(int), q, k, v, out, lse), {}),
        (
            ArgumentTypeError,
            r"out: got dtype uint16",
            (do, q, k, v, interop.convert(out, "bfloat16"), lse),
            {},
        ),
        (ArgumentError, r"key: got shape", (do, q, k[..., 1:], v, out, lse), {}),
        (ArgumentError, r"dropout_p: got 0.5", (do, q, k, v, out, lse), {"dropout_p": 0.5}),
        (ArgumentError, r"impl: got 'gpu'", (do, q, k, v, out, lse), {"impl": "gpu"}),
        (
            ArgumentError,
            r"attn_mask: got shape",
            (do, q, k, v, out, lse),
            {"attn_mask": np.ones((3, 3), bool)},
        ),
        (
            UnsupportedError,
            r"precision: got 'int8', which has no gradient",
            (do, q, k, v, out, lse),
            {"precision": "int8"},
        ),
    ]:
        with pytest.raises(error, match=message):
            attention_backward(*arrays, **options)
    with pytest.raises(ArgumentError, match=r"isa.*mmx"):
        solve(do, q, k, v, "mmx")


OPTION_ARRAYS = {
    "plain": lambda rng: {},
    "mask": lambda rng: {"attn_mask": rng.random((2, 1, 20, 70)) < 0.7},
    "bias": lambda rng: {"attn_mask": rng.standard_normal((20, 70))},
    "lengths": lambda rng: {
        "key_lengths": rng.integers(1, 70, 2),
        "is_causal": True,
        "alignment": "lower_right",
    },
    "slopes": lambda rng: {"alibi_slopes": rng.random(3)},
    "sinks": lambda rng: {"sinks": rng.standard_normal(3)},
}


@pytest.mark.parametrize("name", OPTION_ARRAYS)
@pytest.mark.parametrize("with_lse", [False, True])
def test_equal_calls_follow_their_arrays(name, with_lse, monkeypatch):
    """They have the bits of calls that are checked in full, and look at the options' numbers again; where
    float32 does not hold a row they are such calls.
    """
    plan_store._plans.plans.clear()
    rng = np.random.default_rng(3)
    full = []
    solve_backward = api.solve_backward
    monkeypatch.setattr(
        api, "solve_backward", lambda *x, **o: full.append(1) or solve_backward(*x, **o)
    )
    for scale in (1, 2, 1e19):
        operands = [F(scale) * x for x in drawn(b=2, h=3, l=20, s=70, d=8)]
        options = OPTION_ARRAYS[name](rng)
        results = attention(*operands[1:], return_lse=True, **options)
        of_lse = rng.standard_normal(results[1].shape).astype(F) if with_lse else None
        found = attention_backward(*operands, *results, grad_lse=of_lse, **options)
        doubles = [x.astype(np.float64) for x in (*operands, *results)]  # of which no plan is kept
        want = attention_backward(*doubles, grad_lse=of_lse, **options)
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(x, y)
    kept = ISAS[0] != "portable" and not guard.ON  # which looks at every call in full
    assert len(full) == (5 if kept else 6)


def test_equal_calls_are_refused_what_first_ones_are():
    operands = drawn(b=2, l=20, s=70, d=8)
    lengths = np.array([70, 30])
    out, lse = attention(*operands[1:], return_lse=True, key_lengths=lengths)
    for _ in range(2):
        attention_backward(*operands, out, lse, key_lengths=lengths)
    for options, error in (
        ({"key_lengths": np.array([70, 71])}, ArgumentError),
        ({"key_lengths": lengths.astype(float)}, ArgumentTypeError),
        ({"key_lengths": lengths, "is_causal": 2}, ArgumentTypeError),
    ):
        with pytest.raises(error, match=list(options)[-1]):
            attention_backward(*operands, out, lse, **options)
    for number, name in enumerate(("grad_out", "query", "key", "value", "out", "lse")):
        arrays = [*operands, out, lse]
        for wrong, error in ((arrays[number][:, :, 1:], ArgumentError), (None, ArgumentTypeError)):
            changed = [*arrays[:number], wrong, *arrays[number + 1 :]]
            with pytest.raises(error):
                attention_backward(*changed, key_lengths=lengths), name
