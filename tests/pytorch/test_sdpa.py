"""PyTorch's function as numflash has it: values, shapes, and what is refused."""

import doctest
import math
import re
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from oracles import naive

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch_cases import BIAS, KEEP, SDPA, SHAPES, K, Q, V, draw, exact, qkv

import numflash.torch as nt
from numflash.errors import ArgumentTypeError


def test_the_docstring_of_the_module():
    assert doctest.testmod(nt).failed == 0


def test_the_examples_of_the_guide():
    text = Path(__file__).parents[2].joinpath("docs", "pytorch.md").read_text()
    space = {}
    examples = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 4
    for code in examples[: None if find_spec("transformers") else 3]:
        exec(code, space)
    assert space["q"].grad.shape == (1, 8, 128, 64)
    assert all(x.grad.shape == (300, 8, 64) for x in space["packed"])


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)]
)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"scale": -1.0},
        {"attn_mask": KEEP},
        {"attn_mask": KEEP[0, 0]},
        {"attn_mask": BIAS},
        {"attn_mask": KEEP[:, :1, :, :1]},
        {"attn_mask": BIAS[:1, :, :1]},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
def test_against_float64(dtype, tolerance, options):
    q, k, v = (x.to(getattr(torch, dtype)) for x in (Q, K, V))
    out = nt.scaled_dot_product_attention(q, k, v, **options)
    assert out.dtype == q.dtype
    want, _ = naive(
        *(x.double().numpy() for x in (q, k, v)),
        **{n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()},
    )
    np.testing.assert_allclose(out.double().numpy(), want, atol=tolerance)


@pytest.mark.parametrize(("q", "k", "v", "gqa"), SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_shapes_broadcast_as_pytorch_has_them(q, k, v, gqa, masked):
    q = draw(*q)
    k = draw(*k, seed=1)
    v = draw(*v, seed=2)
    mask = KEEP[0, 0] if masked else None
    out = nt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)
    want = exact(q, k, v, mask, enable_gqa=gqa)
    assert out.shape == want.shape
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=0)


def test_a_mask_over_five_dimensions():
    q = draw(3, 2, 4, 5, 8)
    k = draw(3, 2, 4, 7, 8, seed=1)
    v = draw(3, 2, 4, 7, 8, seed=2)
    for mask in (KEEP, KEEP[None, :, :1], torch.stack([KEEP, ~KEEP, KEEP])):
        torch.testing.assert_close(
            nt.scaled_dot_product_attention(q, k, v, mask).double(),
            exact(q, k, v, mask),
            atol=1e-6,
            rtol=0,
        )


@pytest.mark.parametrize(
    "cut",
    [
        lambda q, k, v: (q[:, :, :0], k, v),
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]),
        lambda q, k, v: (q[:0], k[:0], v[:0]),
        lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]),
        lambda q, k, v: (q, k, v[..., :0]),
        lambda q, k, v: (q[..., :0], k[..., :0], v),
    ],
)
def test_sizes_of_zero(cut):
    arrays = [x.clone().requires_grad_() for x in cut(Q, K, V)]
    for causal in (True, False):
        out = nt.scaled_dot_product_attention(*arrays, is_causal=causal)
        want = SDPA(*arrays, is_causal=causal)
        assert out.shape == want.shape
        torch.testing.assert_close(out, want)
    out.sum().backward()
    assert arrays[0].grad.shape == arrays[0].shape


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 4, 33, 16), (4, 33, 16), (33, 16)])
def test_gradients_of_no_keys_are_zero(dtype, shape):
    """PyTorch's own are memory that nobody has written."""
    query = torch.randn(*shape, dtype=dtype, requires_grad=True)
    key, value = (torch.randn(*shape[:-2], 0, 16, dtype=dtype, requires_grad=True) for _ in "kv")
    for _ in range(5):
        junk = [torch.full(shape, float("nan"), dtype=dtype) for _ in range(20)]
        del junk  # so that new memory holds NaN
        query.grad = None
        out = nt.scaled_dot_product_attention(query, key, value)
        assert out.shape == shape and not out.count_nonzero()
        out.backward(1e4 * torch.randn_like(out))
        assert query.grad.shape == shape and not query.grad.count_nonzero()
        assert key.grad.shape == key.shape and value.grad.shape == value.shape


@pytest.mark.parametrize("bias", [causal_lower_right, causal_upper_left])
def test_causal_biases(bias):
    want = SDPA(Q, K, V, bias(5, 7))
    with nt.use() as routed:
        out = SDPA(Q, K, V, bias(5, 7))
    assert routed.calls == 1
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)
    with pytest.raises(nt.SdpaError, match="CausalBias for 5 queries and 6 keys"):
        nt.scaled_dot_product_attention(Q, K, V, bias(5, 6))
    with pytest.raises(nt.SdpaError, match="is_causal"):
        nt.scaled_dot_product_attention(Q, K, V, bias(5, 7), is_causal=True)


def test_nan_behind_a_mask_stays_there():
    seen = torch.arange(7) != 3
    k, v = (x.masked_fill(~seen[:, None], math.nan) for x in (K, V))
    torch.testing.assert_close(
        nt.scaled_dot_product_attention(Q, k, v, seen.expand(5, 7)),
        SDPA(Q, K[:, :, seen], V[:, :, seen]),
        atol=1e-6,
        rtol=0,
    )


def test_rows_that_see_nothing_are_zero():
    mask = KEEP.clone()
    mask[:, :, 2] = False
    for m in (mask, torch.zeros_like(BIAS).masked_fill(~mask, -math.inf)):
        out = nt.scaled_dot_product_attention(Q, K, V, m)
        assert (out[:, :, 2] == 0).all()
        torch.testing.assert_close(out, SDPA(Q, K, V, m), atol=1e-6, rtol=0)


def test_int8():
    q, k, v = qkv(1, 4, 200, 200, 64)
    out = nt.scaled_dot_product_attention(q, k, v, precision="int8")
    assert out.dtype == torch.float32
    error = (out - exact(q, k, v)).abs().mean() / exact(q, k, v).abs().mean()
    assert 0.001 < error < 0.02  # not the float kernel, and within the integer pipeline's budget


BAD = {
    "causal and mask": (
        (Q, K, V),
        {"is_causal": True, "attn_mask": torch.ones(5, 7, dtype=torch.bool)},
        "attn_mask",
    ),
    "one dimension": ((Q[0, 0, 0], K[0, 0], V[0, 0]), {}, "query"),
    "heads": ((Q, K[:, :2], V[:, :2]), {}, "enable_gqa"),
    "heads that do not divide": (
        (draw(2, 5, 5, 8), K[:, :2], V[:, :2]),
        {"enable_gqa": True},
        "divisor",
    ),
    "batches": ((Q, draw(3, 4, 7, 8), draw(3, 4, 7, 8)), {}, "shapes"),
    "head dimensions": ((Q, K[..., :3], V), {}, "head_dim"),
    "dtypes": ((Q, K.double(), V), {}, "key"),
    "integers": ((Q.int(), K.int(), V.int()), {}, "dtype"),
    "mask of another dtype": ((Q, K, V), {"attn_mask": BIAS.double()}, "attn_mask"),
    "integer mask": ((Q, K, V), {"attn_mask": KEEP.int()}, "attn_mask"),
    "mask of another shape": ((Q, K, V), {"attn_mask": KEEP[..., :6]}, "attn_mask"),
    "mask larger than the result": ((Q[:1], K[:1], V[:1]), {"attn_mask": KEEP}, "attn_mask"),
    "mask of another batch over five dimensions": (
        (Q[None], K[None], V[None]),
        {"attn_mask": KEEP[None].expand(1, 2, -1, -1, -1).repeat(1, 2, 1, 1, 1)},
        r"attn_mask: got shape \(1, 4",
    ),
    "mask of six dimensions over five": (
        (Q[None], K[None], V[None]),
        {"attn_mask": KEEP[None, None]},
        "attn_mask: got shape",
    ),
    "heads of keys that do not divide the query's": (
        (torch.cat([Q, Q], 1)[:, :6], torch.cat([K, K], 1)[:, :4], torch.cat([V, V], 1)[:, :2]),
        {"enable_gqa": True},
        "key: got 4 heads",
    ),
    "more heads of keys than of the query": (
        (Q[:, :2], torch.cat([K, K], 1)[:, :4], V[:, :2]),
        {"enable_gqa": True},
        "key: got 4 heads",
    ),
    "device": ((Q.to("meta"), K, V), {}, "on cpu"),
    "sparse": ((Q.to_sparse(), K, V), {}, "layout"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_where_pytorch_has_them(case):
    arrays, options, word = BAD[case]
    with (
        pytest.raises(RuntimeError),
        torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ):
        SDPA(*arrays, **options)
    with pytest.raises(RuntimeError, match=word) as caught:
        nt.scaled_dot_product_attention(*arrays, **options)
    assert isinstance(caught.value, nt.SdpaError)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"dropout_p": 0.1}, "dropout_p"),
        ({"query": Q.double(), "key": K.double(), "value": V.double()}, "float64"),
        ({"precision": "int4"}, "precision"),
        ({"precision": "int8", "key": K.clone().requires_grad_()}, "int8"),
        ({"precision": "int8", "attn_mask": BIAS.clone().requires_grad_()}, "int8"),
        ({"value": V[:, :, :3]}, "value"),
    ],
)
def test_what_pytorch_takes_and_numflash_refuses(change, word):
    with pytest.raises(nt.SdpaError, match=word):
        nt.scaled_dot_product_attention(**{"query": Q, "key": K, "value": V, **change})


def test_what_is_no_tensor():
    with pytest.raises(ArgumentTypeError, match="query"):
        nt.scaled_dot_product_attention(Q.tolist(), K, V)
    with pytest.raises(TypeError):
        nt.scaled_dot_product_attention(
            Q, K, V, None, 0.0, False, None
        )  # scale is keyword-only, as PyTorch has it
