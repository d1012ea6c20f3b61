"""Every bad argument gives one exception that names it, says what came and what is allowed."""

import dataclasses
import inspect

import numpy as np
import pytest
from oracles import draw, naive, naive_gradients, qkv

import numflash
from numflash import validation
from numflash.errors import ArgumentError, ArgumentTypeError, NumflashError, UnsupportedError
from numflash.interop.arguments import real
from numflash.numerics.quantization import QuantizedTensor
from numflash.validation.options import DEFAULT, NAMES, Options

Q, K, V = qkv(b=2, h=4, l=5, s=7, d=8, hkv=4)


def quantised(x, granularity="row", smooth=False):
    """A tensor made without a kernel: cases are collected in every process, where nothing should
    be compiled.
    """
    *heads, n, d = x.shape
    scale = (*heads, n, 1) if granularity == "row" else (*heads, 1, d)
    return QuantizedTensor(
        np.ones(x.shape, np.int8),
        np.full(scale, 0.01, np.float32),
        granularity,
        np.full((*heads, 1, d), 0.5, np.float32) if smooth else None,
        low=np.zeros((*heads, min(n, 4), d), np.int8),
    )


QT, KT, VT = quantised(Q), quantised(K, smooth=True), quantised(V, "channel")

BAD = [
    # argument named, what to change, class
    ("query", {"query": Q.astype(np.int32)}, ArgumentTypeError),
    ("query", {"query": Q.astype(np.complex64)}, ArgumentTypeError),
    ("query", {"query": "text"}, ArgumentTypeError),
    ("query", {"query": None}, ArgumentTypeError),
    ("query", {"query": [[1.0], [2.0, 3.0]]}, ArgumentTypeError),
    ("query", {"query": np.ndarray}, ArgumentTypeError),
    ("query", {"query": {}}, ArgumentTypeError),
    ("query", {"query": np.float32(1)}, ArgumentError),
    ("query", {"query": np.ma.masked_array(Q)}, ArgumentTypeError),
    ("query", {"query": Q.view(np.uint16)}, ArgumentTypeError),
    ("query", {"query": Q[0, 0, 0], "key": K[0, 0, 0], "value": V[0, 0, 0]}, ArgumentError),
    ("query", {"query": Q[None], "key": K[None], "value": V[None]}, ArgumentError),
    ("query", {"query": Q[..., :0], "key": K[..., :0]}, ArgumentError),
    ("query", {"query": Q[:, :0], "key": K[:, :0], "value": V[:, :0]}, ArgumentError),
    (
        "query",
        {"query": draw((1, 1, 2, 577)), "key": draw((1, 1, 2, 577)), "value": draw((1, 1, 2, 8))},
        ArgumentError,
    ),
    ("key", {"key": K.astype(np.float64)}, ArgumentTypeError),
    ("key", {"key": K[0]}, ArgumentError),
    ("key", {"key": K[:1]}, ArgumentError),
    ("key", {"key": K[..., :6]}, ArgumentError),
    ("key", {"key": K[:, :3], "value": V[:, :3], "enable_gqa": True}, ArgumentError),
    ("enable_gqa", {"key": K[:, :2], "value": V[:, :2]}, ArgumentError),
    ("enable_gqa", {"enable_gqa": "yes"}, ArgumentTypeError),
    ("value", {"value": V.astype(np.float16)}, ArgumentTypeError),
    ("value", {"value": V[:, :, :6]}, ArgumentError),
    ("value", {"value": V[:, :2]}, ArgumentError),
    ("value", {"value": V[..., :0]}, ArgumentError),
    ("value", {"value": draw((2, 4, 7, 577))}, ArgumentError),
    ("attn_mask", {"attn_mask": np.ones((5, 7), np.int64)}, ArgumentTypeError),
    ("attn_mask", {"attn_mask": np.ones((5, 6), bool)}, ArgumentError),
    ("attn_mask", {"attn_mask": np.ones((3, 1, 5, 7), bool)}, ArgumentError),
    ("attn_mask", {"attn_mask": np.ones((1, 2, 4, 5, 7), bool)}, ArgumentError),
    ("attn_mask", {"attn_mask": "causal"}, ArgumentTypeError),
    ("dropout_p", {"dropout_p": 0.1}, ArgumentError),
    ("dropout_p", {"dropout_p": None}, ArgumentTypeError),
    ("is_causal", {"is_causal": 1}, ArgumentTypeError),
    ("scale", {"scale": np.nan}, ArgumentError),
    ("scale", {"scale": np.inf}, ArgumentError),
    ("scale", {"scale": 10**400}, ArgumentError),
    ("scale", {"scale": -1e31}, ArgumentError),
    ("scale", {"scale": 1e-31}, ArgumentError),
    ("scale", {"scale": "1"}, ArgumentTypeError),
    ("scale", {"scale": True}, ArgumentTypeError),
    ("scale", {"scale": np.ones(4)}, ArgumentTypeError),
    ("scale", {"scale": [[1], [1, 2]]}, ArgumentTypeError),
    ("scale", {"scale": np.array("one")}, ArgumentTypeError),
    ("window", {"window": 3}, ArgumentTypeError),
    ("window", {"window": memoryview(bytearray(2))}, ArgumentTypeError),
    ("window", {"window": (1, 2, 3)}, ArgumentTypeError),
    ("window", {"window": (1.5, None)}, ArgumentTypeError),
    ("window", {"window": (True, 0)}, ArgumentTypeError),
    ("window", {"window": (-1, 0)}, ArgumentError),
    ("alignment", {"alignment": "bottom_right"}, ArgumentError),
    ("key_lengths", {"key_lengths": np.array([3.0, 4.0])}, ArgumentTypeError),
    ("key_lengths", {"key_lengths": np.array([3])}, ArgumentError),
    ("key_lengths", {"key_lengths": np.array([3, 8])}, ArgumentError),
    ("key_lengths", {"key_lengths": np.array([-1, 3])}, ArgumentError),
    ("key_lengths", {"key_lengths": np.array([[3], [4]])}, ArgumentError),
    ("key_lengths", {"key_lengths": np.array(3)}, ArgumentError),
    ("softcap", {"softcap": -1.0}, ArgumentError),
    ("softcap", {"softcap": 2e4, "precision": "int8"}, ArgumentError),
    ("alibi_slopes", {"alibi_slopes": np.full(4, 1e21)}, ArgumentError),
    ("softcap", {"softcap": np.nan}, ArgumentError),
    ("softcap", {"softcap": 1e39}, ArgumentError),
    ("softcap", {"softcap": 1e-46}, ArgumentError),
    ("softcap", {"softcap": None}, ArgumentTypeError),
    ("alibi_slopes", {"alibi_slopes": np.ones(3)}, ArgumentError),
    ("alibi_slopes", {"alibi_slopes": np.array([1, 2, np.nan, 3])}, ArgumentError),
    ("alibi_slopes", {"alibi_slopes": np.ones(4, complex)}, ArgumentTypeError),
    ("sinks", {"sinks": np.ones((2, 4))}, ArgumentError),
    ("sinks", {"sinks": np.array([0, np.inf, 0, 0])}, ArgumentError),
    ("sinks", {"sinks": np.array([0, np.inf, 0, 0], np.float16)}, ArgumentError),
    ("precision", {"precision": "int4"}, ArgumentError),
    ("precision", {"precision": np.float32}, ArgumentError),
    ("pv", {"pv": "int8"}, ArgumentError),
    ("pv", {"pv": "fp16", "precision": "int8"}, ArgumentError),
    ("layout", {"layout": "bdhl"}, ArgumentError),
    ("return_lse", {"return_lse": None}, ArgumentTypeError),
    ("impl", {"impl": "gpu"}, ArgumentError),
]


@pytest.mark.parametrize(
    ("name", "change", "error"), BAD, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD)]
)
def test_bad_argument(name, change, error):
    with pytest.raises(error) as caught:
        numflash.attention(**{"query": Q, "key": K, "value": V, **change})
    message = str(caught.value)
    assert message.startswith(f"{name}:"), message
    assert "allowed:" in message or "got" in message
    assert isinstance(caught.value, NumflashError)


@pytest.mark.parametrize(
    ("call", "arguments", "option"),
    [
        ("attention", (Q, K, V), "colour"),
        ("attention_int8", (QT, KT, VT), "layout"),
        ("explain", (Q,), "colour"),
        ("attention_int8", (QT, KT, VT), "precision"),
        ("accuracy", (Q, K, V), "precision"),
        ("attention_varlen", (Q[0], Q[0], Q[0], [0, 2], [0, 2]), "attn_mask"),
        ("attention_varlen", (Q[0], Q[0], Q[0], [0, 2], [0, 2]), "convert_operands"),
    ],
)
def test_unknown_keyword(call, arguments, option):
    with pytest.raises(TypeError, match=rf"\b{call}\b.*") as caught:
        getattr(numflash, call)(*arguments, **{option: False})
    assert option in str(caught.value)


def test_what_came_is_said():
    for x, words in (
        (None, "got None"),
        ({}, "got dict"),
        (np.ndarray, "got <class 'numpy.ndarray'>"),
    ):
        with pytest.raises(ArgumentTypeError, match=words):
            numflash.quantize(x)


@pytest.mark.parametrize(
    "options", [{"scale": 1e-30}, {"scale": 1e30}, {"softcap": 1e-30}, {"softcap": 1e30}]
)
def test_the_largest_and_smallest_factors(options):
    """At the ends of what is allowed the result is that of float64, and nothing overflows on the
    way.
    """
    with np.errstate(over="raise", invalid="raise", divide="raise"):
        out, lse = numflash.attention(Q, K, V, return_lse=True, **options)
        grads = numflash.attention_backward(V[:, :, :5], Q, K, V, out, lse, **options)
    np.testing.assert_allclose(out, naive(Q, K, V, **options)[0], atol=1e-6)
    if options != {"scale": 1e30}:  # there a rounding of dP is worth more than the gradient
        for mine, want in zip(grads, naive_gradients(V[:, :, :5], Q, K, V, **options), strict=True):
            np.testing.assert_allclose(mine, want, atol=1e-5 * max(np.abs(want).max(), 1e-30))
    if max(options.values()) < 1:
        out = numflash.attention(Q, K, V, precision="int8", **options)
        np.testing.assert_allclose(out, naive(Q, K, V, **options)[0], atol=0.05)


def test_error_classes_are_also_the_usual_ones():
    assert issubclass(ArgumentError, ValueError)
    assert issubclass(ArgumentTypeError, TypeError)
    assert issubclass(UnsupportedError, RuntimeError)


def change(t, **fields):
    from dataclasses import replace

    return replace(t, **fields)


BAD_INT8 = [
    ("query", {"query": Q}, ArgumentTypeError),
    ("query.granularity", {"query": quantised(Q, "channel")}, ArgumentError),
    ("key.granularity", {"key": quantised(K, "channel")}, ArgumentError),
    ("value.granularity", {"value": quantised(V, "row")}, ArgumentError),
    ("query.data", {"query": change(QT, data=QT.data.astype(np.int16))}, ArgumentTypeError),
    ("query.scale", {"query": change(QT, scale=QT.scale[..., :3, :])}, ArgumentError),
    ("query.scale", {"query": change(QT, scale=QT.scale.astype(np.float64))}, ArgumentError),
    ("query.scale", {"query": change(QT, scale=[1.0])}, ArgumentError),
    ("query.scale", {"query": change(QT, scale=None)}, ArgumentError),
    ("query.data", {"query": change(QT, data=QT.data.tolist())}, ArgumentTypeError),
    ("key.data", {"key": change(KT, data=KT.data[None])}, ArgumentTypeError),
    ("key.data", {"key": change(KT, data=np.ma.masked_array(KT.data))}, ArgumentTypeError),
    ("query.block", {"query": change(QT, granularity="block", block=0)}, ArgumentError),
    ("query.block", {"query": change(QT, granularity="block", block="128")}, ArgumentError),
    ("key.offset", {"key": change(KT, offset=KT.offset.tolist())}, ArgumentError),
    ("key.offset", {"key": change(KT, offset=KT.offset * np.float32(np.nan))}, ArgumentError),
    ("query.nonfinite", {"query": change(QT, nonfinite=np.zeros((2, 4, 5)))}, ArgumentError),
    ("query.scale", {"query": change(QT, scale=-QT.scale)}, ArgumentError),
    ("key.scale", {"key": change(KT, scale=KT.scale * np.float32(np.nan))}, ArgumentError),
    ("query.offset", {"query": change(QT, offset=KT.offset)}, ArgumentError),
    ("value.offset", {"value": change(VT, offset=KT.offset)}, ArgumentError),
    ("key.offset", {"key": change(KT, offset=KT.offset[..., :3])}, ArgumentError),
    ("key.low", {"key": change(KT, low=np.zeros((2, 4, 5), np.int8))}, ArgumentError),
    ("value.low", {"value": change(VT, low=np.full_like(VT.low, 17))}, ArgumentError),
    ("key.nonfinite", {"key": change(KT, nonfinite=np.zeros(3, bool))}, ArgumentError),
    ("key", {"key": quantised(K[0])}, ArgumentError),
    ("key", {"key": quantised(K[..., :4])}, ArgumentError),
    ("pv", {"pv": "float"}, ArgumentError),
    ("impl", {"impl": 3}, ArgumentError),
    ("is_causal", {"is_causal": "no"}, ArgumentTypeError),
]


@pytest.mark.parametrize(
    ("name", "change", "error"), BAD_INT8, ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD_INT8)]
)
def test_bad_quantised_argument(name, change, error):
    with pytest.raises(error) as caught:
        numflash.attention_int8(**{"query": QT, "key": KT, "value": VT, **change})
    assert str(caught.value).startswith(f"{name}:"), caught.value


def test_only_a_whole_quantised_tensor_is_not_looked_at_again():
    bad = change(KT, scale=-KT.scale)
    good = change(KT)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"key\.scale"):
            numflash.attention_int8(QT, bad, VT)
        numflash.attention_int8(QT, good, VT)
    assert good.checked and not bad.checked and not change(good, scale=bad.scale).checked
    with pytest.raises(ArgumentError, match=r"value\.granularity"):
        numflash.attention_int8(QT, good, good)
    with pytest.raises(ArgumentError, match=r"query\.offset"):
        numflash.attention_int8(good, good, VT)


BAD_VARLEN = [
    ("query", {"query": draw((2, 9, 4, 8))}, ArgumentError),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 4, 8]}, ArgumentError),
    ("cu_seqlens_q", {"cu_seqlens_q": [1, 4, 9]}, ArgumentError),
    ("cu_seqlens_q", {"cu_seqlens_q": [0, 5, 4, 9]}, ArgumentError),
    ("cu_seqlens_q", {"cu_seqlens_q": [0.0, 9.0]}, ArgumentTypeError),
    ("cu_seqlens_k", {"cu_seqlens_k": [[0, 9]]}, ArgumentError),
    ("cu_seqlens_k", {"cu_seqlens_k": [0, 9]}, ArgumentError),
    ("attn_mask", {"attn_mask": None}, ArgumentTypeError),
    ("layout", {"layout": "bhld"}, ArgumentTypeError),
    ("window", {"window": 1}, ArgumentTypeError),
]


@pytest.mark.parametrize(
    ("name", "change", "error"),
    BAD_VARLEN,
    ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD_VARLEN)],
)
def test_bad_varlen_argument(name, change, error):
    x = draw((9, 4, 8))
    arguments = {
        "query": x,
        "key": x,
        "value": x,
        "cu_seqlens_q": [0, 4, 9],
        "cu_seqlens_k": [0, 2, 9],
        **change,
    }
    with pytest.raises(error) as caught:
        numflash.attention_varlen(**arguments, impl="reference")
    assert str(caught.value).startswith(f"{name}:"), caught.value


BAD_MERGE = [
    ("out_b", {"out_b": draw((2, 3, 4))}, ArgumentError),
    ("out_b", {"out_b": draw((2, 3, 5)).astype(np.float64)}, ArgumentTypeError),
    ("lse_a", {"lse_a": draw((2, 4))}, ArgumentError),
    ("lse_b", {"lse_b": np.zeros((2, 3), int)}, ArgumentTypeError),
    ("out_a", {"out_a": np.zeros((2, 3, 5), bool)}, ArgumentTypeError),
    ("out_a", dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"), 1.0), ArgumentError),
]


@pytest.mark.parametrize(
    ("name", "change", "error"),
    BAD_MERGE,
    ids=[f"{n}-{i}" for i, (n, _, _) in enumerate(BAD_MERGE)],
)
def test_bad_merge_argument(name, change, error):
    arguments = {
        "out_a": draw((2, 3, 5)),
        "lse_a": draw((2, 3)),
        "out_b": draw((2, 3, 5)),
        "lse_b": draw((2, 3)),
        **change,
    }
    with pytest.raises(error) as caught:
        numflash.merge_states(**arguments)
    assert str(caught.value).startswith(f"{name}:"), caught.value


def test_bad_quantize_argument():
    for x, options, error in (
        (Q.astype(np.int8), {}, ArgumentTypeError),
        (Q[0, 0, 0], {}, ArgumentError),
        (Q, {"granularity": "token"}, ArgumentError),
        (Q, {"smooth": "no"}, ArgumentTypeError),
        (Q[..., :0], {}, ArgumentError),
    ):
        with pytest.raises(error):
            numflash.quantize(x, **options)


class TestProblem:
    """What the builder makes of good arguments."""

    def test_defaults(self):
        p = validation.problem(Q, K, V)
        assert p.shape == (2, 4, 4, 5, 7, 8, 8)
        assert p.scale == 1 / np.sqrt(8)
        assert (p.left, p.right, p.mask, p.bias, p.alibi_slopes, p.sinks) == (None,) * 6
        assert p.key_lengths.tolist() == [7, 7] and p.diagonal.tolist() == [0, 0]
        assert (p.precision, p.pv, p.softcap, p.return_lse) == ("float32", "int8", 0.0, False)

    def test_no_copies_of_float32_operands(self):
        p = validation.problem(
            Q.transpose(0, 2, 1, 3),
            K.transpose(0, 2, 1, 3),
            V.transpose(0, 2, 1, 3),
            Options(layout="blhd"),
        )
        assert np.shares_memory(p.query, Q) and p.query.strides == Q.strides

    def test_masks_are_views(self):
        masks = (
            np.ones((5, 7), bool),
            *(np.zeros(shape, np.float32) for shape in ((4, 1, 7), (2, 1, 1, 7), ())),
        )
        for mask in masks:
            p = validation.problem(Q, K, V, Options(mask))
            seen = p.mask if mask.dtype == bool else p.bias
            assert seen.shape == (2, 4, 5, 7) and np.shares_memory(seen, mask)
            assert (p.mask is None) != (p.bias is None)

    def test_read_only_inputs_are_typed_like_others(self):
        q = Q.copy()
        q.flags.writeable = False
        p = validation.problem(q, K, V, Options(np.broadcast_to(np.float32(0), (5, 7))))
        assert p.query.flags.writeable and p.bias.flags.writeable and np.shares_memory(p.query, q)

    def test_causal_is_a_window(self):
        assert (lambda p: (p.left, p.right))(
            validation.problem(Q, K, V, Options(is_causal=True, window=(3, 9)))
        ) == (3, 0)
        assert (lambda p: (p.left, p.right))(
            validation.problem(Q, K, V, Options(window=(10**30, None)))
        ) == (12, None)

    def test_diagonal(self):
        p = validation.problem(Q, K, V, Options(alignment="lower_right", key_lengths=[7, 2]))
        assert p.diagonal.tolist() == [2, -3] and p.diagonal.dtype == np.int64

    @pytest.mark.parametrize("layout", ["bhld", "blhd"])
    def test_promotion(self, layout):
        assert validation.problem(Q[0, 0], K[0, 0], V[0, 0], Options(layout=layout)).shape == (
            1,
            1,
            1,
            5,
            7,
            8,
            8,
        )
        q, k, v = (x[0] if layout == "bhld" else x[0].swapaxes(0, 1) for x in (Q, K, V))
        p = validation.problem(q, k, v, Options(layout=layout))
        assert p.shape == (1, 4, 4, 5, 7, 8, 8) and (p.query == Q[:1]).all()

    def test_storage_of_each_precision(self):
        for precision, dtype in (
            ("float32", np.float32),
            ("float16", np.float16),
            ("bfloat16", np.uint16),
            ("int8", np.float64),
        ):
            p = validation.problem(
                *(x.astype(np.float64) for x in (Q, K, V)), Options(precision=precision)
            )
            assert p.query.dtype == p.key.dtype == p.value.dtype == dtype

    def test_alibi_per_head_or_per_batch_and_head(self):
        slopes = np.arange(4)
        for given in (
            slopes,
            np.stack([slopes, slopes]),
            *(slopes.astype(dtype) for dtype in (np.uint16, np.float16, ">f8")),
        ):
            p = validation.problem(Q, K, V, Options(alibi_slopes=given))
            assert (
                p.alibi_slopes.dtype == np.float32
                and (p.alibi_slopes == slopes).all()
                and p.alibi_slopes.shape == (2, 4)
            )


def test_options_are_those_of_attention_and_frozen():
    """In the same order, with the same defaults: `attention` hands them over by position."""
    taken = list(inspect.signature(numflash.attention).parameters.values())[3:-1]
    assert [p.name for p in taken] == list(NAMES)
    for p in taken:
        assert getattr(DEFAULT, p.name) == ((None, None) if p.name == "window" else p.default)
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.scale = 2.0


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 10**400])
def test_a_number_must_be_finite(value):
    with pytest.raises(ArgumentError, match=r"unified_max: got .*; allowed: finite"):
        real("unified_max", value)
