"""Gradients of equal calls on tensors on the CPU: layouts, dtypes and masks that models have."""

import itertools

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch_cases import DEFAULTS, SDPA

import numflash.torch as nt
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError
from numflash.jit import target
from numflash.torch import gradients

B, H, L, D = 2, 4, 70, 24
BACKWARD = torch.ops.numflash.attention_backward.default
BUDGETS = {torch.float32: 2e-6, torch.float16: 6e-3, torch.bfloat16: 5e-2}

needs_tiles = pytest.mark.skipif(
    not target.available(target.FLOAT_ISAS)[:-1], reason="no register tiles here"
)


def heads_together(x):
    """(B, L, H, D) in memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def of_three(x):
    """One of three tensors that a linear layer has written side by side."""
    b, h, length, d = x.shape
    packed = x.new_zeros(b, length, 3, h, d)
    packed[:, :, 1] = x.transpose(1, 2)
    return packed[:, :, 1].transpose(1, 2)


LAYOUTS = {
    "contiguous": torch.clone,
    "heads together": heads_together,
    "of three": of_three,
    "sequence first": lambda x: x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3),
    "columns first": lambda x: x.mT.contiguous().mT,
    "every other channel": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "a batch expanded": lambda x: x[:1].expand(x.shape),
}
MASKS = {
    "no mask": lambda dtype: {},
    "causal": lambda dtype: {"is_causal": True},
    "padding": lambda dtype: {  # of one key the gradient of the query is 0, and none of its size
        "attn_mask": torch.arange(L) < torch.randint(2, L, (B, 1, 1, 1)),
    },
    "mask": lambda dtype: {
        "attn_mask": (torch.rand(B, 1, L, L) < 0.7) | torch.eye(L, dtype=torch.bool)
    },
    "a row hidden": lambda dtype: {
        "attn_mask": torch.arange(L)[:, None] != torch.randint(L, (B, 1, 1, 1))
    },
    "bias": lambda dtype: {"attn_mask": torch.randn(1, H, L, L, dtype=dtype)},
}


def drawn(layout, dtype, kv_heads=H, length=L):
    """Query, key, value and a gradient of the output."""
    shapes = (B, H, length, D), *[(B, kv_heads, length, D)] * 2, (B, H, length, D)
    return [layout(torch.randn(shape).to(dtype)) for shape in shapes]


def exact(operands, grad, **options):
    """The gradients by PyTorch in float64."""
    mask = options.pop("attn_mask", None)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    leaves = [x.detach().double().requires_grad_() for x in operands]
    return torch.autograd.grad(SDPA(*leaves, mask, **options), leaves, grad.double())


def ours(operands, grad, **options):
    leaves = [x.detach().requires_grad_() for x in operands]
    return torch.autograd.grad(nt.attention(*leaves, **options), leaves, grad)


@pytest.fixture
def in_full(monkeypatch):
    """The calls that are checked in full; nothing is known before."""
    plan_store.gradients.plans.clear()
    seen = []
    check = gradients._in_full
    monkeypatch.setattr(
        gradients, "_in_full", lambda *arguments: seen.append(arguments) or check(*arguments)
    )
    return seen


@needs_tiles
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_calls_follow_their_numbers(layout, dtype, mask, in_full):
    """Against float64, the first call and the next ones, which have other numbers; these go straight
    to the kernel.
    """
    for number in (1, 2, 3):
        *operands, grad = drawn(LAYOUTS[layout], dtype)
        options = MASKS[mask](dtype)
        found = ours(operands, grad, **options)
        wanted = exact(operands, grad, **options)
        for x, like, want in zip(found, operands, wanted, strict=True):
            assert x.dtype == dtype and x.shape == like.shape
            assert (x.double() - want).abs().max() <= BUDGETS[dtype] * want.abs().max()
        assert len(in_full) == 1, number


@needs_tiles
@pytest.mark.parametrize("mask", ["no mask", "padding", "mask", "bias"])
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "heads together", "a batch expanded"])
def test_equal_calls_of_few_rows_follow_their_numbers(layout, dtype, mask, in_full):
    """The last three queries alone, which have a kernel of their own."""
    for _ in range(3):
        query, key, value, grad = drawn(LAYOUTS[layout], dtype)
        operands, grad = (query[:, :, -3:], key, value), grad[:, :, -3:]
        options = {
            n: x[..., -3:, :] if x.shape[2] > 1 else x for n, x in MASKS[mask](dtype).items()
        }
        found = ours(operands, grad, **options)
        wanted = exact(operands, grad, **options)
        for x, want in zip(found, wanted, strict=True):
            assert (x.double() - want).abs().max() <= BUDGETS[dtype] * want.abs().max()
    assert len(in_full) == 1


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients_lie_as_their_tensors_do(layout, dtype, in_full):
    """So that the backward pass of a view copies nothing; a compiler is told the same of the first call
    and of equal ones.
    """
    *operands, grad = drawn(LAYOUTS[layout], dtype)
    with torch.no_grad():
        out, lse = nt.attention(*operands, return_lse=True)
    arguments = grad, *operands, out, lse, *DEFAULTS.values()
    with FakeTensorMode() as mode:
        taken = (mode.from_tensor(x) if isinstance(x, torch.Tensor) else x for x in arguments)
        told = [(x.shape, x.stride(), x.dtype) for x in BACKWARD(*taken)]
    for _ in range(2):
        found = BACKWARD(*arguments)
        assert [(x.shape, x.stride(), x.dtype) for x in found] == told
    assert all(x.stride(3) == 1 for x in found[:3])
    for x, like in zip(found, operands, strict=False):
        if layout in ("contiguous", "heads together", "sequence first"):
            assert x.stride() == like.stride()


def test_views_of_a_gradient_copy_nothing():
    """The gradient of tokens is what the kernel has written, or what it was rounded to."""
    for dtype in BUDGETS:
        for _ in range(2):
            tokens = [torch.randn(B, L, H, D).to(dtype).requires_grad_() for _ in range(3)]
            operands = [x.transpose(1, 2) for x in tokens]
            out = nt.attention(*operands)
            out.retain_grad()
            written = []
            for x in operands:
                x.register_hook(lambda g, written=written: written.append(g.data_ptr()))
            out.sum().backward()
            assert {x.grad.data_ptr() for x in tokens} == set(written)


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize(("kv_heads", "length"), [(H, L), (1, L), (2, 600)])
def test_layouts_do_not_change_bits(dtype, kv_heads, length, in_full):
    """Of heads that share keys, and of keys that several workers share, too."""
    *operands, grad = drawn(torch.clone, dtype, kv_heads, length)
    options = {"enable_gqa": True, "is_causal": True}
    first = ours(operands, grad, **options)
    for layout in LAYOUTS:
        if layout == "a batch expanded":
            continue
        changed = [LAYOUTS[layout](x) for x in operands]
        for own, of_grad in itertools.product((operands, changed), (grad, LAYOUTS[layout](grad))):
            found = ours(own, of_grad, **options)
            assert all(map(torch.equal, found, first)), layout
    number = torch.ones((), dtype=dtype)  # the gradient of a sum
    found = [
        ours(operands, x, **options) for x in (number.expand(grad.shape), number.repeat(grad.shape))
    ]
    assert all(map(torch.equal, *found))


@needs_tiles
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("scale", [1.0, 1e18])
def test_trained_masks_of_equal_calls(trained, scale, in_full):
    """With rows that float32 does not hold, too, which are computed in full after all."""
    for number in (1, 2):
        *operands, grad = drawn(heads_together, torch.float32)
        operands[0] *= scale if number == 2 else 1
        operands[1] *= scale if number == 2 else 1
        operands[0][:, :, 5:] = 0.0
        bias = torch.randn(H, L, L, requires_grad=trained)
        leaves = [*(x.requires_grad_() for x in operands), *[bias] * trained]
        found = torch.autograd.grad(nt.attention(*operands, bias), leaves, grad)
        doubles = [x.detach().double().requires_grad_() for x in (*operands, bias)]
        out = SDPA(*doubles)
        wanted = torch.autograd.grad(out, doubles[: len(leaves)], grad.double())
        for mine, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), want, rtol=1e-4, atol=1e-5 * want.abs().max())
    assert len(in_full) == (1 if scale == 1 else 2)


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out", "out", "lse", "grad_lse"])
def test_memory_that_was_freed(name, dtype):
    """Is refused in equal calls as in the first one, by the argument's name."""
    for call in ("equal", "first"):
        *operands, grad = (torch.randn(1, 2, 9, 16).to(dtype) for _ in range(4))
        out, lse = nt.attention(*operands, return_lse=True)
        given = dict(zip(("grad_out", "query", "key", "value"), (grad, *operands), strict=True))
        given |= {"out": out, "lse": lse}
        of_lse = {"grad_lse": torch.randn(lse.shape)}
        wanted = *DEFAULTS.values(), False, False
        BACKWARD(*given.values(), *wanted, *of_lse.values())
        if call == "first":
            plan_store.gradients.plans.clear()
        # NumPy has not seen the memory of these
        given, of_lse = ({n: x.clone() for n, x in of.items()} for of in (given, of_lse))
        (given | of_lse)[name].untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match=f"{name}: got a tensor whose memory was freed"):
            BACKWARD(*given.values(), *wanted, *of_lse.values())


@pytest.mark.parametrize("name", ["grad_out", "out", "lse", "grad_lse", "sinks"])
def test_memory_that_was_freed_before_the_gradient_of_sinks(name):
    """PyTorch, which computes that gradient, would read it."""
    given = {n: torch.randn(1, 2, 9, 16) for n in ("grad_out", "query", "key", "value", "out")}
    given |= {"lse": torch.randn(1, 2, 9)}
    options, of_lse = DEFAULTS | {"sinks": torch.randn(2)}, torch.randn(1, 9, 2).mT
    freed = given | options | {"grad_lse": of_lse}
    freed[name].untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match=f"{name}: got a tensor whose memory was freed"):
        BACKWARD(*given.values(), *options.values(), False, True, of_lse)


def test_options_that_require_grad():
    """Masks and sinks of equal calls have gradients; slopes, and what INT8 rounds, are refused in each."""
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    mask, sinks, slopes = torch.randn(2, 9, 9), torch.randn(2), torch.rand(2)

    def call(trained, **options):
        return nt.attention(
            q,
            k,
            v,
            sinks=sinks,
            **{name: x.requires_grad_() for name, x in trained.items()},
            **options,
        )

    for _ in range(2):
        found = [
            torch.autograd.grad(call({"attn_mask": mask}).sum(), x)[0]
            for x in (mask, sinks.requires_grad_())
        ]
    assert type(call({"attn_mask": mask}).grad_fn).__name__ == "_KnownBackward"
    assert [x.shape for x in found] == [mask.shape, sinks.shape]
    sinks.requires_grad_(False)
    plain = {"alibi_slopes": slopes}, {"attn_mask": mask.detach(), "precision": "int8"}
    trained = {"alibi_slopes": slopes.clone()}, {"attn_mask": mask}
    for options, asked, name in zip(plain, trained, ("alibi_slopes", "precision"), strict=True):
        for _ in range(2):
            call({}, **options)
        others = {n: x for n, x in options.items() if n not in asked}
        with pytest.raises(ArgumentError, match=f"{name}: got .* require"):
            call(asked, **others)
