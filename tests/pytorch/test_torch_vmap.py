"""`torch.vmap` of numflash.torch: one call for all samples, with the bits of a call for each."""

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

import numflash.torch as nt
from numflash.dispatch import backends, plan_store
from numflash.errors import ArgumentError

N, B, H, L, S, D = 3, 2, 4, 5, 9, 8
DRAW = torch.Generator().manual_seed(0)
Q, K, V = (torch.randn(N, B, h, n, D, generator=DRAW) for h, n in ((H, L), (2, S), (2, S)))
MASKS = ((S,), (L, S), (1, L, S), (1, 1, 1, S), (B, 1, 1, S), (B, H, L, S))
# name, one sample's shape, what is drawn
OPTIONS = (
    *(("attn_mask", shape, torch.randn) for shape in MASKS),
    ("attn_mask", (B, 1, 1, S), lambda *shape, **g: torch.rand(*shape, **g) > 0.3),
    ("key_lengths", (B,), lambda *shape, **g: torch.randint(S + 1, shape, **g)),
    ("alibi_slopes", (H,), torch.rand),
    ("alibi_slopes", (B, H), torch.rand),
    ("sinks", (H,), torch.rand),
)


def attend(q, k, v, **options):
    return nt.attention(q, k, v, enable_gqa=True, **options)


def one_by_one(function, dims, *tensors):
    samples = zip(
        *([x] * N if dim is None else x.unbind(dim) for x, dim in zip(tensors, dims, strict=True)),
        strict=True,
    )
    return torch.stack([function(*sample) for sample in samples])


@pytest.fixture
def solved(monkeypatch):
    """Batch sizes that were computed."""
    batches, solve = [], backends.solve

    def counted(problem, *rest):
        batches.append(len(problem.key_lengths))
        return solve(problem, *rest)

    monkeypatch.setattr(backends, "solve", counted)
    monkeypatch.setattr(plan_store.runners, "get", lambda call: None)  # equal calls go past `solve`
    return batches


@pytest.mark.parametrize("mapped", [True, False], ids=["mapped", "shared"])
@pytest.mark.parametrize(
    ("name", "shape", "draw"), OPTIONS, ids=[f"{name}{shape}" for name, shape, _ in OPTIONS]
)
def test_options_of_samples(solved, name, shape, draw, mapped):
    given = draw(*((N,) if mapped else ()), *shape, generator=DRAW)
    dims = 0, 0, 0, 0 if mapped else None

    def function(q, k, v, x):
        return attend(q, k, v, **{name: x})

    found = torch.vmap(function, in_dims=dims)(Q, K, V, given)
    calls = solved[:]
    assert torch.equal(found, one_by_one(function, dims, Q, K, V, given))
    # a sink belongs to all batch entries
    assert calls == ([B] * N if name == "sinks" and mapped else [N * B])


@pytest.mark.parametrize("dims", [(0, 0, 0), (0, None, None), (None, 0, 0), (3, 1, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"precision": "int8", "is_causal": True}], ids=str)
def test_operands_of_samples(dims, options):
    tensors = [
        x[0] if dim is None else x.movedim(0, dim) for x, dim in zip((Q, K, V), dims, strict=True)
    ]

    def function(q, k, v):
        return attend(q, k, v, **options)

    found = torch.vmap(function, in_dims=dims)(*tensors)
    assert torch.equal(found, one_by_one(function, dims, *tensors))


def test_vmap_of_vmap():
    twice = torch.stack((Q, 2 * Q))
    inner = torch.vmap(attend)
    found = torch.vmap(inner, in_dims=(0, None, None))(twice, K, V)
    assert torch.equal(found, torch.stack([inner(x, K, V) for x in twice]))


def test_what_one_sample_may_not_be_is_refused():
    for name, shape in (("attn_mask", (L, S + 1)), ("key_lengths", (1,)), ("alibi_slopes", (1, H))):
        given = torch.ones(N, *shape, dtype=torch.int64 if name == "key_lengths" else torch.float32)
        with pytest.raises(ArgumentError, match=name):
            torch.vmap(lambda q, k, v, x, name=name: attend(q, k, v, **{name: x}))(Q, K, V, given)


def test_gradients_of_samples():
    """Of a mapped call, and many gradients of one call."""
    found, want = ([x.clone().requires_grad_() for x in (Q, K, V)] for _ in range(2))
    torch.vmap(attend)(*found).pow(2).sum().backward()
    one_by_one(attend, (0, 0, 0), *want).pow(2).sum().backward()
    for mine, right in zip(found, want, strict=True):
        assert torch.equal(mine.grad, right.grad)
    inputs = [x[0].clone().requires_grad_() for x in (Q, K, V)]
    out = attend(*inputs)
    grads = torch.randn(N, *out.shape, generator=DRAW)
    many = torch.autograd.grad(out, inputs, grads, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(out, inputs, g, retain_graph=True) for g in grads]
    mapped = torch.vmap(lambda g: torch.autograd.grad(out, inputs, g, retain_graph=True))(grads)
    for found in (many, mapped):
        for mine, right in zip(found, zip(*each, strict=True), strict=True):
            assert torch.equal(mine, torch.stack(right))
