"""numflash.torch.attention_varlen: gradients of packed sequences by autograd."""

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

import numpy as np
from torch.utils.checkpoint import checkpoint
from torch_cases import draw

import numflash.torch as nt
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError

LENGTHS = (5, 1, 33, 33)
CU = torch.tensor([0, 5, 6, 39, 72], dtype=torch.int32)
Q, K, V = (draw(72, heads, 16, seed=n) for n, heads in enumerate((4, 2, 2)))
SINKS = draw(4, seed=5)


def one_by_one(q, k, v, sinks):
    """Output and LSE of each sequence with `numflash.torch.attention`."""
    found = []
    for a, b in zip(CU[:-1].tolist(), CU[1:].tolist(), strict=True):
        one = (x[a:b].transpose(0, 1)[None] for x in (q, k, v))
        found.append(
            nt.attention(*one, is_causal=True, enable_gqa=True, sinks=sinks, return_lse=True)
        )
    return (torch.cat([x[n][0].transpose(0, 1) for x in found]) for n in (0, 1))


def packed(q, k, v, sinks, **options):
    return nt.attention_varlen(
        q, k, v, CU, CU, is_causal=True, enable_gqa=True, sinks=sinks, return_lse=True, **options
    )


def in_a_checkpoint(*arrays):
    return checkpoint(packed, *arrays, use_reentrant=False)


def derive(function, arrays, of=("out", "lse")):
    arrays = [x.clone().requires_grad_() for x in arrays]
    out, lse = function(*arrays)
    loss = 0
    if "out" in of:
        loss = loss + (out.float() * draw(*out.shape, seed=9)).sum()
    if "lse" in of:
        loss = loss + (lse * draw(*lse.shape, seed=10)).sum()
    found = torch.autograd.grad(loss, arrays, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(arrays, found, strict=True)]


@pytest.mark.parametrize(
    "function", [packed, in_a_checkpoint, torch.compile(packed, backend="eager")]
)
@pytest.mark.parametrize("of", [("out",), ("lse",), ("out", "lse")])
def test_gradients_are_those_of_each_sequence(function, of):
    want = derive(one_by_one, (Q, K, V, SINKS), of)
    for _ in range(2):
        for mine, right in zip(derive(function, (Q, K, V, SINKS), of), want, strict=True):
            torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precisions(dtype):
    arrays = [x.to(dtype) for x in (Q, K, V)]
    want = derive(one_by_one, (*arrays, SINKS))
    for mine, right in zip(derive(packed, (*arrays, SINKS)), want, strict=True):
        assert mine.dtype == right.dtype
        torch.testing.assert_close(mine.float(), right.float(), atol=5e-2, rtol=5e-2)


def test_functions_are_those_of_the_call():
    """Names that a function uses may change before the gradients are computed; arrays may not."""
    factor, table = 2.0, np.arange(40, dtype=np.float32) / 40
    arrays = [x.clone().requires_grad_() for x in (Q, K, V)]

    def score_mod(score, b, h, i, j):
        return score * factor + table[j]

    out = nt.attention_varlen(*arrays, CU, CU, enable_gqa=True, score_mod=score_mod)
    want = torch.autograd.grad(out.sum(), arrays, retain_graph=True)
    factor = -5.0
    for mine, right in zip(torch.autograd.grad(out.sum(), arrays), want, strict=True):
        assert torch.equal(mine, right)
    out = nt.attention_varlen(*arrays, CU, CU, enable_gqa=True, score_mod=score_mod)
    lengths = CU.clone()
    again = nt.attention_varlen(*arrays, lengths, lengths, enable_gqa=True)
    want = torch.autograd.grad(again.sum(), arrays, retain_graph=True)
    lengths[1] = 2
    for mine, right in zip(torch.autograd.grad(again.sum(), arrays), want, strict=True):
        assert torch.equal(mine, right)


def test_pytorchs_function_inside_use():
    """On a CPU, where PyTorch's own does not run; the diagonal ends in the lower right corner."""
    home = pytest.importorskip("torch.nn.attention.varlen", reason="needs PyTorch 2.10")
    theirs = home.varlen_attn
    keys = torch.tensor([0, 8, 8, 48, 81], dtype=torch.int32)
    k, v = draw(81, 2, 16, seed=7), draw(81, 2, 16, seed=8)
    q = Q.clone().requires_grad_()
    for window, options in (
        ((-1, -1), {}),
        ((-1, 0), {"is_causal": True}),
        ((6, 0), {"window": (6, 0)}),
        ((4, 2), {"window": (4, 2)}),
    ):
        with nt.use() as routed:
            out = home.varlen_attn(q, k, v, CU, keys, 33, 40, window_size=window, enable_gqa=True)
            aux = home.AuxRequest(lse=True)
            again, lse = home.varlen_attn(
                q, k, v, CU, keys, 33, 40, window_size=window, enable_gqa=True, return_aux=aux
            )
        assert routed.calls == 2 and torch.equal(out, again) and lse.shape == (72, 4)
        want, want_lse = nt.attention_varlen(
            q, k, v, CU, keys, enable_gqa=True, alignment="lower_right", return_lse=True, **options
        )
        assert torch.equal(out, want) and torch.equal(lse, want_lse)
    (found,) = torch.autograd.grad((out * out).sum(), q)
    assert torch.isfinite(found).all() and home.varlen_attn is theirs
    with nt.use(), pytest.raises(UnsupportedError, match="seqused_k: got one; allowed: None"):
        home.varlen_attn(q, k, v, CU, keys, 33, 40, enable_gqa=True, seqused_k=keys[1:])
    for wrong in ((1, 2, 3), 5):
        with (
            nt.use(),
            pytest.raises(ArgumentTypeError, match=r"window_size: got .*; allowed: \(left"),
        ):
            home.varlen_attn(q, k, v, CU, keys, 33, 40, enable_gqa=True, window_size=wrong)
    with nt.use(precision="int8"), torch.no_grad():
        rough = home.varlen_attn(q, k, v, CU, keys, 33, 40, enable_gqa=True)
    exact = nt.attention_varlen(q, k, v, CU, keys, enable_gqa=True)
    assert 0 < (rough - exact).abs().mean() < 0.03


def test_inference_and_what_is_refused():
    with torch.no_grad():
        out = nt.attention_varlen(Q, K, V, CU, CU, enable_gqa=True, precision="int8")
    assert out.shape == Q.shape and not out.requires_grad
    q = Q.clone().requires_grad_()
    with pytest.raises(ArgumentError, match="precision: got 'int8' with inputs that require grad"):
        nt.attention_varlen(q, K, V, CU, CU, enable_gqa=True, precision="int8")
    slopes = torch.ones(4, requires_grad=True)
    with pytest.raises(ArgumentError, match="alibi_slopes: got a tensor that requires grad"):
        nt.attention_varlen(q, K, V, CU, CU, enable_gqa=True, alibi_slopes=slopes)
    table = torch.ones(40, requires_grad=True)
    for trained in (q, Q):
        with pytest.raises(ArgumentError, match="score_mod"):
            nt.attention_varlen(
                trained, K, V, CU, CU, enable_gqa=True, score_mod=lambda s, b, h, i, j: s + table[j]
            )
    with pytest.raises(ArgumentTypeError, match="query: got ndarray; allowed: a tensor"):
        nt.attention_varlen(Q.numpy(), K, V, CU, CU, enable_gqa=True)
    with pytest.raises(ArgumentTypeError, match="attn_mask"):
        nt.attention_varlen(q, K, V, CU, CU, enable_gqa=True, attn_mask=None)
    out = nt.attention_varlen(q, K, V, CU, CU, enable_gqa=True)
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(UnsupportedError, match="gradient of a gradient"):
        torch.autograd.grad(first.sum(), q)
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(lambda x: nt.attention_varlen(x, K, V, CU, CU, enable_gqa=True))(Q[None])


@pytest.mark.parametrize("impl", ["cpu", "portable", "reference"])
def test_gradients_of_each_implementation(impl):
    arrays = Q, K, V, SINKS
    found = derive(lambda *x: packed(*x, impl=impl), arrays)
    for mine, right in zip(found, derive(one_by_one, arrays), strict=True):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [torch.from_numpy, np.array])
def test_gradients_take_the_slopes_of_the_call(kind):
    numbers = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    arrays = [x.clone().requires_grad_() for x in (Q, K, V)]
    found = []
    for factor in (1, 50):
        slopes = kind(numbers.copy())
        out, _ = packed(*arrays, None, alibi_slopes=slopes)
        slopes *= factor
        found.append(torch.autograd.grad(out.sum(), arrays))
    for mine, right in zip(*found, strict=True):
        torch.testing.assert_close(mine, right, atol=0, rtol=0)


def test_gradients_with_the_negative_bit():
    q, k, v = (x.clone().requires_grad_() for x in (Q, K, V))
    for function in (
        lambda: packed(q, k, v, None),
        lambda: nt.flex_attention(
            *(x.transpose(0, 1)[None] for x in (q, k, v)), enable_gqa=True, return_lse=True
        ),
    ):
        for x in function():
            grad = torch.view_as_complex(draw(*x.shape, 2, seed=3)).conj().imag
            assert grad.is_neg()
            mine, right = (
                torch.autograd.grad(x, (q, k), g, retain_graph=True)
                for g in (grad, grad.resolve_neg())
            )
            for a, b in zip(mine, right, strict=True):
                torch.testing.assert_close(a, b, atol=0, rtol=0)
