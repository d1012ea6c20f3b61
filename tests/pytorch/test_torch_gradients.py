"""Gradients of numflash.torch: against PyTorch in float64, finite differences, and whole layers."""

import functools

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch_cases import BIAS, KEEP, SDPA, SHAPES, K, Q, V, draw, exact, gradients, qkv

import numflash.torch as nt
from numflash.dispatch import plan_store
from numflash.errors import UnsupportedError


def assert_gradients(arrays, budget, **options):
    found = gradients(nt.scaled_dot_product_attention, arrays, **options)
    want = gradients(exact, [x.double() for x in arrays], **options)
    for name, x, mine, right in zip("qkv", arrays, found, want, strict=True):
        assert mine.dtype == x.dtype and mine.shape == x.shape
        assert (mine.double() - right).abs().max() <= budget * right.abs().max(), name


@pytest.mark.parametrize(
    ("dtype", "budget"), [("float32", 2e-6), ("float16", 5e-3), ("bfloat16", 4e-2)]
)
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": KEEP}, {"attn_mask": BIAS}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_gradients_against_pytorch_in_float64(dtype, budget, options):
    assert_gradients([x.to(getattr(torch, dtype)) for x in (Q, K, V)], budget, **options)


@pytest.mark.parametrize(("q", "k", "v", "gqa"), SHAPES, ids=str)
def test_gradients_of_what_broadcasts(q, k, v, gqa):
    assert_gradients([draw(*q), draw(*k, seed=1), draw(*v, seed=2)], 2e-6, enable_gqa=gqa)


def test_gradients_of_tensors_as_models_have_them():
    """(B, L, H, D) in memory, and a gradient that is one number expanded."""
    q, k, v = (
        x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
        for x in qkv(l=130, s=130, d=16)
    )
    nt.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    SDPA(*doubles, is_causal=True).sum().backward()
    for mine, right in zip((q, k, v), doubles, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize(
    "options",
    [
        {"window": (2, 1), "alignment": "lower_right"},
        {"softcap": 1.5},
        {"key_lengths": torch.tensor([4, 2])},
        {"alibi_slopes": torch.tensor([0.5, 0.25])},
        {"sinks": torch.tensor([0.5, -0.5])},
        {"attn_mask": BIAS[:, :2, :3, :4]},
    ],
    ids=lambda o: "-".join(o),
)
def test_gradcheck(options):
    """Finite differences in float32: steps of 0.01 and a hundredth of the largest gradient."""
    arrays = [x.requires_grad_() for x in qkv(2, 2, 3, 4, 3, dv=2)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: nt.attention(q, k, v, **options), arrays, eps=1e-2, atol=2e-3, rtol=1e-2
    )


SCORE_SHAPES = [(9, 11), (11,), (4, 1, 11), (1, 4, 9, 11), (2, 1, 1, 11), (2, 4, 9, 11)]


@pytest.mark.parametrize("shape", SCORE_SHAPES, ids=str)
def test_gradients_of_masks(shape):
    tensors = [*qkv(2, 4, 9, 11, 16), draw(*shape, seed=5)]

    def step(function, tensors):
        leaves = [x.detach().requires_grad_() for x in tensors]
        (function(*leaves) * draw(2, 4, 9, 16, seed=6).to(leaves[0])).sum().backward()
        return [x.grad for x in leaves]

    want = step(SDPA, [x.double() for x in tensors])
    compiled = torch.compile(nt.scaled_dot_product_attention, backend="aot_eager")
    for function in (nt.scaled_dot_product_attention, compiled):
        for mine, right in zip(step(function, tensors), want, strict=True):
            torch.testing.assert_close(mine.double(), right, atol=2e-6, rtol=1e-5)
        if len(shape) != 3:  # compiled once
            break
    half = [x.bfloat16() for x in tensors]
    for mine, right in zip(step(nt.scaled_dot_product_attention, half), want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert (mine.double() - right).abs().max() < 0.05 * right.abs().max()
    mask = tensors[3].requires_grad_()  # alone
    nt.scaled_dot_product_attention(*tensors[:3], mask).sum().backward()
    assert mask.grad.shape == shape


def sunk(q, k, v, mask, sinks):
    scores = q @ k.mT / q.shape[-1] ** 0.5 + mask
    column = sinks[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1] @ v


def test_gradients_of_sinks_and_a_mask_in_every_way_of_calling():
    tensors = [*qkv(2, 4, 9, 11, 16), draw(4, 9, 11, seed=5), draw(4, seed=7)]

    def ours(q, k, v, mask, sinks):
        return nt.attention(q, k, v, mask, sinks=sinks)

    leaves = [x.double().requires_grad_() for x in tensors]
    grads = draw(3, 2, 4, 9, 16, seed=6)
    exact = sunk(*leaves)
    want = [torch.autograd.grad(exact, leaves, g.double(), retain_graph=True) for g in grads]
    leaves = [x.detach().requires_grad_() for x in tensors]
    ways = {
        "eager": ours,
        "compiled": torch.compile(ours, backend="aot_eager"),
        "again": lambda *x: checkpoint(ours, *x, use_reentrant=False),
    }
    for name, way in ways.items():
        found = torch.autograd.grad(way(*leaves), leaves, grads[0])
        for mine, right in zip(found, want[0], strict=True):
            torch.testing.assert_close(
                mine.double(), right, atol=2e-6, rtol=1e-5, msg=lambda m, name=name: f"{name}: {m}"
            )
    batch = torch.autograd.grad(ours(*leaves), leaves, grads, is_grads_batched=True)
    for mine, right in zip(batch, zip(*want, strict=True), strict=True):
        torch.testing.assert_close(mine.double(), torch.stack(right), atol=2e-6, rtol=1e-5)
    (first,) = torch.autograd.grad(ours(*leaves).sum(), leaves[4], create_graph=True)
    with pytest.raises(UnsupportedError, match="gradient of a gradient"):
        torch.autograd.grad(first.sum(), leaves[4])


def test_gradients_of_operands_with_the_negative_bit():
    numbers = torch.randn(2, 4, 9, 16, dtype=torch.complex64, requires_grad=True)
    query = numbers.conj().imag
    assert query.is_neg()
    k, v = qkv(2, 4, 9, 9, 16)[1:]
    found, want = (
        torch.autograd.grad(function(query, k, v).sum(), numbers, retain_graph=True)[0]
        for function in (nt.scaled_dot_product_attention, SDPA)
    )
    torch.testing.assert_close(found, want, atol=2e-6, rtol=1e-5)


def test_a_layer_trains_as_it_did():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
    x = draw(2, 30, 64)

    def steps():
        layer.zero_grad()
        (layer(x) ** 2 * draw(2, 30, 64, seed=5)).sum().backward()
        return [p.grad.clone() for p in layer.parameters()]

    want = steps()
    with nt.use() as routed:
        found = steps()
    assert routed.calls == 1
    for mine, right in zip(found, want, strict=True):
        torch.testing.assert_close(mine, right, atol=1e-4 * right.abs().max().item() + 1e-5, rtol=0)


def test_equal_bits_every_time():
    arrays = qkv(2, 4, 150, 150, 32)
    first = gradients(nt.scaled_dot_product_attention, arrays, is_causal=True)
    for mine, again in zip(
        first, gradients(nt.scaled_dot_product_attention, arrays, is_causal=True), strict=True
    ):
        assert torch.equal(mine, again)


def exact_with_lse(q, k, v, **options):
    """Output and LSE in float64."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    if options.get("score_mod"):
        at = [torch.arange(n) for n in scores.shape]
        scores = options["score_mod"](scores, None, None, at[2][:, None], at[3])
    if options.get("is_causal"):
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    if "sinks" in options:
        lse = torch.logaddexp(lse, options["sinks"].double()[:, None])
    return (scores - lse[..., None]).exp() @ v, lse


WAYS = {
    "attention": lambda *x, **o: nt.attention(*x, return_lse=True, **o),
    "flex_attention": lambda *x, **o: nt.flex_attention(*x, return_lse=True, **o),
    "torch.compile": torch.compile(
        lambda *x, **o: nt.attention(*x, return_lse=True, **o), backend="aot_eager", dynamic=False
    ),
    "checkpoint": lambda *x, **o: checkpoint(
        lambda *x: nt.attention(*x, return_lse=True, **o), *x, use_reentrant=False
    ),
}


@pytest.mark.parametrize(
    ("way", "options"),
    [(way, {}) for way in WAYS]
    + [("flex_attention", {"score_mod": lambda s, b, h, q, k: s * 2 + 0.1 * (q - k)})]
    + [("attention", {"is_causal": True, "sinks": draw(4, seed=5)}), ("attention", "trained")],
)
@pytest.mark.parametrize("parts", ["lse", "out and lse"])
def test_what_is_computed_from_the_lse(way, options, parts):
    """First calls and equal ones, with and without a gradient of the output."""
    trained = options == "trained"
    options = {"sinks": draw(4, seed=5)} if trained else options
    with_lse = draw(2, 4, 5, seed=6)

    def loss(out, lse):
        found = (lse.double() * with_lse).sum()
        return found if parts == "lse" else found + out.double().pow(2).sum()

    def derive(function, arrays):
        arrays = [x.clone().requires_grad_() for x in arrays]
        own = dict(options)
        if trained:
            own["sinks"] = own["sinks"].clone().requires_grad_()
            arrays.append(own["sinks"])
        result = loss(*function(*arrays[:3], **own))
        found = torch.autograd.grad(result, arrays, allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for x, g in zip(arrays, found, strict=True)]

    want = derive(exact_with_lse, [x.double() for x in (Q, K, V)])
    for _ in range(2):
        for mine, right in zip(derive(WAYS[way], (Q, K, V)), want, strict=True):
            torch.testing.assert_close(mine.double(), right.double(), atol=1e-5, rtol=0)


def test_results_that_nothing_is_computed_from():
    q = Q.clone().requires_grad_()
    for function in (nt.attention, nt.flex_attention):
        out, lse = function(q, K, V, return_lse=True)
        assert out.requires_grad and lse.requires_grad
        (found,) = torch.autograd.grad(lse.sum(), q, retain_graph=True)
        again, _ = torch.autograd.grad((out.sum() * 0 + lse.sum(), lse.sum()), (q, q))
        torch.testing.assert_close(again, 2 * found)


def test_no_second_derivative():
    q = Q.clone().requires_grad_()
    (first,) = torch.autograd.grad(
        nt.scaled_dot_product_attention(q, K, V).sum(), q, create_graph=True
    )
    assert torch.isfinite(first).all()
    with pytest.raises(UnsupportedError, match="gradient of a gradient"):
        torch.autograd.grad(first.sum(), q)


def forward_mode(function):
    with forward_ad.dual_level():
        return function(forward_ad.make_dual(Q, Q))


@pytest.mark.parametrize(
    "derive",
    [
        forward_mode,
        lambda f: torch.func.jvp(f, (Q,), (Q,)),
        lambda f: torch.func.grad(lambda q: f(q).sum())(Q),
        lambda f: torch.func.jacrev(f)(Q),
        lambda f: torch.vmap(torch.func.grad(lambda q: f(q).sum()))(Q[None]),
    ],
    ids=["dual numbers", "jvp", "grad", "jacrev", "vmap of grad"],
)
def test_derivatives_of_another_kind_are_refused(derive):
    """A tangent would become zero without a word."""
    for function in (nt.scaled_dot_product_attention, nt.attention):
        with pytest.raises(UnsupportedError, match="forward-mode"):
            derive(lambda q, f=function: f(q, K, V))
        with pytest.raises(UnsupportedError, match="forward-mode"):
            derive(lambda q, f=function: f(Q, K, V, q[..., :7]))  # as a mask


def test_transforms_without_derivatives():
    assert torch.equal(
        torch.vmap(lambda q: nt.scaled_dot_product_attention(q, K, V))(torch.stack([Q, 2 * Q]))[1],
        nt.scaled_dot_product_attention(2 * Q, K, V),
    )
    with forward_ad.dual_level():
        torch.testing.assert_close(
            nt.scaled_dot_product_attention(Q, K, V), SDPA(Q, K, V), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("which", range(3))
def test_one_operand_requires_a_gradient(which):
    arrays = [x.clone().requires_grad_(i == which) for i, x in enumerate((Q, K, V))]
    nt.scaled_dot_product_attention(*arrays, is_causal=True).pow(2).sum().backward()
    doubles = [x.detach().double().requires_grad_(i == which) for i, x in enumerate(arrays)]
    SDPA(*doubles, is_causal=True).pow(2).sum().backward()
    assert [x.grad is not None for x in arrays] == [i == which for i in range(3)]
    torch.testing.assert_close(arrays[which].grad.double(), doubles[which].grad, atol=1e-5, rtol=0)


def test_one_tensor_in_all_three_places():
    q = Q.clone().requires_grad_()
    double = Q.double().requires_grad_()
    nt.scaled_dot_product_attention(q, q, q).pow(2).sum().backward()
    SDPA(double, double, double).pow(2).sum().backward()
    torch.testing.assert_close(q.grad.double(), double.grad, atol=1e-4, rtol=0)


def test_a_result_changed_in_place_is_noticed():
    """The backward pass needs it as it was."""
    out = nt.scaled_dot_product_attention(Q.clone().requires_grad_(), K, V)
    out.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"sinks": torch.zeros(4), "attn_mask": KEEP}]
)
def test_a_first_call_in_a_checkpoint(options, dtype):
    """What it saves is what the equal call saves that is made again."""
    inputs = [x.to(dtype) for x in (Q, K, V)]
    plan_store.runners.plans.clear()
    call = functools.partial(nt.attention, **options)
    again = gradients(lambda *x: checkpoint(call, *x, use_reentrant=False), inputs)
    assert all(map(torch.equal, gradients(call, inputs), again))


def test_checkpointing_and_a_graph_used_twice():
    want = gradients(nt.scaled_dot_product_attention, (Q, K, V))
    again = gradients(
        lambda *x: checkpoint(nt.scaled_dot_product_attention, *x, use_reentrant=False), (Q, K, V)
    )
    assert all(map(torch.equal, want, again))
    q = Q.clone().requires_grad_()
    out = nt.scaled_dot_product_attention(q, K, V).sum()
    first = torch.autograd.grad(out, q, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, q)[0])


def test_a_batch_of_gradients():
    jacobian = torch.autograd.functional.jacobian
    q, k, v = qkv(b=1, h=2, l=2, s=3, d=4)
    found = jacobian(lambda x: nt.scaled_dot_product_attention(x, k, v), q, vectorize=True)
    want = jacobian(lambda x: exact(x, k, v), q.double())
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=0)
    with pytest.raises(UnsupportedError, match="a batch of gradients"):
        jacobian(lambda x: nt.flex_attention(x, k, v), q, vectorize=True)
    found = jacobian(lambda x: nt.attention(x, k, v, return_lse=True)[1], q, vectorize=True)
    want = jacobian(lambda x: exact_with_lse(x, k.double(), v.double())[1], q.double())
    torch.testing.assert_close(found.double(), want, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "derive",
    [
        lambda loss, q: torch.autograd.grad(loss, q),
        lambda loss, q: (loss.backward(inputs=q), q.grad)[1:],
        lambda loss, q: (torch.autograd.backward([loss], inputs=[q]), q.grad)[1:],
    ],
    ids=["grad", "Tensor.backward", "backward"],
)
def test_checkpoints_inside_use(derive):
    """What is computed again in the backward pass is answered by numflash, too."""
    q = Q.clone().requires_grad_()
    with nt.use() as outer, nt.use() as routed:
        out = checkpoint(lambda x: SDPA(x * 2, K, V) * 3, q, use_reentrant=False)
        (found,) = derive(out.sum(), q)
        SDPA(Q, K, V)
    assert (outer.calls, routed.calls) == (0, 2)
    (want,) = torch.autograd.grad(3 * exact(q * 2, K, V).sum(), q)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_under_autocast(dtype):
    q = Q.clone().requires_grad_()
    with torch.autocast("cpu", dtype=dtype):
        out = nt.scaled_dot_product_attention(q, K, V)
    out.float().pow(2).sum().backward()
    double = Q.double().requires_grad_()
    SDPA(double, K.double(), V.double()).pow(2).sum().backward()
    assert out.dtype == dtype and q.grad.dtype == torch.float32
    torch.testing.assert_close(q.grad.double(), double.grad, atol=0.05, rtol=0)


def test_the_operator_is_skipped_only_where_nothing_sees_it():
    """Equal bits with and without PyTorch's dispatch; a mode sees both operators."""
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v, grad = (torch.randn(1, 2, 40, 16) for _ in range(4))

    def gradients():
        x, y, z = (x.clone().requires_grad_() for x in (q, k, v))
        return torch.autograd.grad(nt.attention(x, y, z, is_causal=True), (x, y, z), grad)

    direct = gradients()
    with Watch():
        by_operator = gradients()
    assert all(map(torch.equal, direct, by_operator))
    assert {"numflash.attention.default", "numflash.attention_backward.default"} <= set(seen)


def test_a_gradient_of_a_lazily_negated_result():
    q = torch.randn(1, 2, 8, 16, requires_grad=True)
    (plain,) = torch.autograd.grad(nt.attention(q, q, q), q, -torch.ones(1, 2, 8, 16))
    (lazy,) = torch.autograd.grad(
        nt.attention(q, q, q), q, torch._neg_view(torch.ones(1, 2, 8, 16))
    )
    assert torch.equal(plain, lazy)
