"""Wrong arguments of the functions on tensors: one clear error each, whoever observes the call."""

import contextlib
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

import numflash.torch as nt
from numflash.errors import ArgumentError, ArgumentTypeError, NumflashError

SDPA = torch.nn.functional.scaled_dot_product_attention
Q = torch.randn(2, 4, 9, 16)
TENSORS = ("attn_mask", "key_lengths", "alibi_slopes", "sinks")
WRONG = [
    ({"window": 5}, r"window: got 5; allowed: \(left, right\)"),
    ({"window": (1, 2, 3)}, r"window: got \(1, 2, 3\)"),
    ({"window": (1.5, 2)}, r"window: got \(1.5, 2\); allowed: integers"),
    ({"window": (True, 2)}, r"window: got \(True, 2\)"),
    ({"window": (-1, 2)}, r"window: got \(-1, 2\); allowed: 0 or more"),
    ({"impl": None}, "impl: got None; allowed: 'auto'"),
    ({"softcap": "3"}, "softcap: got '3'; allowed: a number"),
    ({"scale": "1"}, "scale: got '1'; allowed: a number"),
    ({"scale": [1]}, r"scale: got \[1\]"),
    ({"is_causal": None}, "is_causal: got None; allowed: True or False"),
    ({"is_causal": "x"}, "is_causal: got 'x'"),
    ({"enable_gqa": 1}, "enable_gqa: got 1; allowed: True or False"),
    ({"return_lse": 1}, "return_lse: got 1; allowed: True or False"),
    ({"precision": 5}, "precision: got 5; allowed: 'float32'"),
    ({"precision": ["int8"]}, "precision: got "),
    ({"precision": np.ones(2)}, "precision: got array"),
    ({"alignment": np.ones(2)}, "alignment: got array"),
    ({"scale": np.array("1")}, "scale: got array"),
    ({"scale": [[1], [2, 3]]}, r"scale: got \[\[1\]"),
    ({"pv": 5}, "pv: got 5"),
    ({"alignment": None}, "alignment: got None"),
    *(({name: [1]}, f"{name}: got list; allowed: a tensor, or None") for name in TENSORS),
    *(({name: np.ones(4, "f")}, f"{name}: got ndarray") for name in TENSORS),
]
OF_PYTORCH = [
    case for case in WRONG if set(case[0]) <= {"attn_mask", "scale", "is_causal", "enable_gqa"}
]


@pytest.mark.parametrize("observed", [False, True])
@pytest.mark.parametrize(("options", "message"), WRONG)
def test_wrong_options(options, message, observed):
    """A profiler wants the registered operator, whose dispatcher has its own words."""
    watch = torch.profiler.profile if observed else contextlib.nullcontext
    nt.attention(Q, Q, Q)  # an equal call, whose checks would be skipped
    nt.scaled_dot_product_attention(Q, Q, Q)
    with watch():
        with pytest.raises(NumflashError, match=message):
            nt.attention(Q, Q, Q, **options)
        if set(options) <= {"attn_mask", "scale", "is_causal", "enable_gqa", "precision", "pv"}:
            with pytest.raises(NumflashError, match=message):
                nt.scaled_dot_product_attention(Q, Q, Q, **options)


def test_wrong_options_of_one_function():
    for options in ({"return_lse": np.ones(2)}, {"return_aux": True}):
        with pytest.raises(ArgumentTypeError, match=f"{next(iter(options))}: got"):
            nt.flex_attention(Q, Q, Q, **options)
    with pytest.raises(ArgumentTypeError, match="dropout_p: got array"):
        nt.scaled_dot_product_attention(Q, Q, Q, dropout_p=np.ones(2))


@pytest.mark.parametrize(("options", "message"), OF_PYTORCH)
def test_wrong_options_fall_back(options, message):
    """PyTorch parses its arguments before a mode sees the call, so the call is made directly."""
    routed = nt.use(fallback=True)
    out = routed.answer(
        nt.scaled_dot_product_attention, lambda *_, **__: "PyTorch's", (Q, Q, Q), options
    )
    assert out == "PyTorch's"
    (reason,) = routed.fallbacks
    assert re.match(message, reason)


@pytest.mark.parametrize("observed", [False, True])
def test_windows_beyond_every_integer(observed):
    watch = torch.profiler.profile if observed else contextlib.nullcontext
    with watch():
        for window in ((2**70, 2**70), [np.int64(20), None]):
            torch.testing.assert_close(nt.attention(Q, Q, Q, window=window), nt.attention(Q, Q, Q))


def test_other_layouts_after_an_equal_call():
    x = Q.to_mkldnn()
    for function in (nt.scaled_dot_product_attention, nt.attention):
        function(Q, Q, Q)
        with pytest.raises(nt.SdpaError, match=r"query: got a tensor of layout torch\._mkldnn"):
            function(x, x, x)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout):
    parts = [torch.randn(4, n, 16) for n in (3, 5)]
    if layout is torch.strided:
        nested = torch.nested.nested_tensor(parts)
    else:
        swapped = [x.transpose(0, 1) for x in parts]
        nested = torch.nested.nested_tensor(swapped, layout=layout).transpose(1, 2)
    for function in (nt.scaled_dot_product_attention, nt.attention):
        with pytest.raises(nt.SdpaError, match="query: got a nested tensor; allowed: dense"):
            function(nested, nested, nested)
    with pytest.raises(ArgumentError, match="key: got a nested tensor"):
        nt.scaled_dot_product_attention(Q, nested, Q)
    with nt.use(fallback=True) as routed:
        found = SDPA(nested, nested, nested)
    assert routed.fallbacks.total() == 1 and routed.calls == 0
    for got, x in zip(found.unbind(), parts, strict=True):
        torch.testing.assert_close(got, SDPA(x[None], x[None], x[None])[0])
