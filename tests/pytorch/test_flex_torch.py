"""numflash.torch.flex_attention against PyTorch's own, without a compiler."""

import warnings

import numpy as np
import pytest

torch = pytest.importorskip("torch")
flex = pytest.importorskip("torch.nn.attention.flex_attention")

from torch.utils.checkpoint import checkpoint

import numflash
import numflash.torch
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError

B = 2
H = 4
L = 70
D = 32
TABLE = torch.linspace(-1, 1, 2 * L)


def score_mod(score, b, h, q, k):
    return torch.tanh(score) * 2 + TABLE[q - k + L]


def mask_mod(b, h, q, k):
    return (q >= k) & (k + 30 > q)


def tensors(dtype=torch.float32):
    made = torch.Generator().manual_seed(1)
    sizes = (B, H, L, D), (B, 2, L, D), (B, 2, L, D)
    return [torch.randn(n, generator=made).to(dtype).requires_grad_() for n in sizes]


def torch_mask():
    return flex.create_block_mask(mask_mod, None, None, L, L, device="cpu", BLOCK_SIZE=32)


def eager(q, k, v):
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    i = torch.arange(L)[:, None]
    j = torch.arange(L)
    scores = score_mod(q @ k.transpose(-1, -2) / D**0.5, 0, 0, i, j)
    scores = scores.masked_fill(~mask_mod(0, 0, i, j), -torch.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def test_results_and_gradients_are_those_of_torch():
    q, k, v = tensors()
    out, lse = numflash.torch.flex_attention(
        q, k, v, score_mod, torch_mask(), enable_gqa=True, return_lse=True
    )
    found = torch.autograd.grad((out * out).sum(), (q, k, v))
    wanted_out, wanted_lse = eager(q, k, v)
    wanted = torch.autograd.grad((wanted_out * wanted_out).sum(), (q, k, v))
    assert torch.allclose(out, wanted_out, atol=3e-6)
    assert torch.allclose(lse, wanted_lse, atol=3e-6)
    for x, y in zip(found, wanted, strict=True):
        assert torch.linalg.norm(x - y) < 2e-5 * torch.linalg.norm(y)


def test_torch_itself_gives_the_same():
    q, k, v = (x.detach() for x in tensors())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = flex.flex_attention(q, k, v, score_mod, torch_mask(), enable_gqa=True)
    found = numflash.torch.flex_attention(q, k, v, score_mod, torch_mask(), enable_gqa=True)
    assert torch.allclose(found, wanted, atol=3e-6)


def test_a_mask_made_for_all_entries_of_a_function_that_tells_them_apart():
    q, k, v = (x.detach() for x in tensors())
    lengths = torch.tensor([20, L])

    def padded(b, h, q, k):
        return k < lengths[b]

    mask = flex.create_block_mask(padded, None, None, L, L, device="cpu", BLOCK_SIZE=32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = flex.flex_attention(q, k, v, None, mask, enable_gqa=True)
    found = numflash.torch.flex_attention(q, k, v, None, mask, enable_gqa=True)
    assert torch.allclose(found, wanted, atol=3e-6)


def test_our_own_block_masks_and_bfloat16():
    q, k, v = (x.detach() for x in tensors(torch.bfloat16))
    mask = numflash.create_block_mask(mask_mod, None, None, L, L, 16)
    out = numflash.torch.flex_attention(q, k, v, score_mod, mask, enable_gqa=True)
    assert out.dtype == torch.bfloat16
    assert torch.allclose(out.float(), eager(*(x.float() for x in (q, k, v)))[0], atol=3e-2)


def dense(q, k, v, function):
    """The function called on whole tensors; PyTorch's own has no backward pass on a CPU."""
    scores = q @ k.mT / q.shape[-1] ** 0.5
    b, h, i, j = torch.meshgrid(*map(torch.arange, scores.shape), indexing="ij")
    return function(scores, b, h, i, j).softmax(-1) @ v


TRAINED = {
    "table": (lambda t: lambda s, b, h, i, j: s + t[h, i - j + L], [(H, 2 * L)]),
    "temperature": (lambda a: lambda s, b, h, i, j: s * a, [()]),
    "made inside": (lambda a: lambda s, b, h, i, j: s * a.exp()[h] + a[0], [(H,)]),
    "made outside": (
        lambda a, c: (lambda t: lambda s, b, h, i, j: s + t[h, j])(torch.tanh(a @ c)),
        [(H, 3), (3, L)],
    ),
    "two": (
        lambda a, c: lambda s, b, h, i, j: torch.where(i > j, s * a[h], torch.tanh(s) * c[b, h, i]),
        [(H,), (B, H, L)],
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_captured_tensors(name):
    make, shapes = TRAINED[name]
    generator = torch.Generator().manual_seed(3)
    given = [torch.randn(shape, generator=generator) for shape in [(B, H, L, D)] * 3 + shapes]

    def step(function, dtype):
        q, k, v, *others = (x.to(dtype, copy=True).requires_grad_() for x in given)
        (function(q, k, v, make(*others)) * given[0].to(dtype)).sum().backward()
        return [x.grad for x in (q, k, v, *others)]

    want = step(dense, torch.float64)
    for _ in range(2):  # the second time nothing is left of the first graph
        found = step(numflash.torch.flex_attention, torch.float32)
        for mine, right in zip(found, want, strict=True):
            assert (mine.double() - right).abs().max() <= 5e-5 * right.abs().max()


def test_a_captured_tensor_trains_and_may_not_change_before_its_gradient():
    q, k, v = (x.detach() for x in tensors(torch.bfloat16))
    table = torch.zeros(H, L, dtype=torch.bfloat16, requires_grad=True)
    optimiser = torch.optim.SGD([table], lr=0.01)
    losses = []
    for _ in range(3):
        optimiser.zero_grad()
        out = numflash.torch.flex_attention(
            q, k, v, lambda score, b, h, q, k: score + table[h, k], enable_gqa=True
        )
        out.float().square().sum().backward()
        losses.append(out.float().square().sum().item())
        optimiser.step()
    assert losses[0] > losses[1] > losses[2] and table.grad.dtype == torch.bfloat16
    out = numflash.torch.flex_attention(
        q, k, v, lambda score, b, h, q, k: score + table[h, k], enable_gqa=True
    )
    with torch.no_grad():
        table += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.float().sum().backward()


@pytest.mark.parametrize("what", ["table", "number", "attribute", "mask"])
def test_gradients_are_of_the_function_as_it_was_called(what):
    """A loop over layers, whose functions name the loop's variable: it is another one by the time of
    `backward`.
    """

    class Layer:
        factor = 0.0

    def gradients(late):
        q, k, v = tensors()
        layer, loss = Layer(), 0
        tables = [torch.tensor(x, requires_grad=True) for x in ([0.1, 0.2, 1, 2], [3.0, 4, 2, 1])]
        for n, table in zip((3, 40), tables, strict=True):
            layer.factor = n / 10
            mask, score = None, None
            if what == "mask":
                late_mask = lambda b, h, i, j: i - j < n  # noqa: B023, E731
                mask = numflash.create_block_mask(
                    late_mask if late else lambda b, h, i, j, n=n: i - j < n, None, None, L, L
                )
            elif late:
                score = {
                    "table": lambda s, b, h, i, j: s * table[h],  # noqa: B023
                    "number": lambda s, b, h, i, j: s * n,  # noqa: B023
                    "attribute": lambda s, b, h, i, j: s * layer.factor,
                }[what]
            else:
                score = {
                    "table": lambda s, b, h, i, j, table=table: s * table[h],
                    "number": lambda s, b, h, i, j, n=n: s * n,
                    "attribute": lambda s, b, h, i, j, x=layer.factor: s * x,
                }[what]
            loss = (
                loss
                + (numflash.torch.flex_attention(q, k, v, score, mask, enable_gqa=True) ** 2).sum()
            )
        loss.backward()
        trained = tables if what == "table" else []
        return loss.detach(), *(x.grad for x in (q, k, v, *trained))

    for x, y in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(x, y)


def test_captured_arrays_may_not_change_before_the_gradient():
    q, k, v = tensors()
    table = torch.ones(H)
    out = numflash.torch.flex_attention(
        q, k, v, lambda s, b, h, i, j: s * table[h], enable_gqa=True
    )
    table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()
    steps = np.array([1, 2])  # which the code assumes to be small
    out = numflash.torch.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + steps[i % 2] * 100000 * i, enable_gqa=True
    )
    steps[:] = 1 << 40
    with pytest.raises(ArgumentError, match="changed before the gradients were computed"):
        out.sum().backward()


def test_checkpoints():
    def run(again):
        q, k, v = tensors()

        def call(q):
            return numflash.torch.flex_attention(q, k, v, score_mod, torch_mask(), enable_gqa=True)

        out = checkpoint(call, q, use_reentrant=False) if again else call(q)
        return torch.autograd.grad((out * out).sum(), (q, k, v))

    for x, y in zip(run(True), run(False), strict=True):
        assert torch.equal(x, y)


def test_a_block_mask_of_torchs_with_another_function():
    q, k, v = (x.detach() for x in tensors())
    mask = torch_mask()
    for width in (30, 10):
        mask.mask_mod = lambda b, h, i, j, width=width: (i >= j) & (j + width > i)
        found = numflash.torch.flex_attention(q, k, v, None, mask, enable_gqa=True)
        i, j = torch.arange(L)[:, None], torch.arange(L)
        seen = (i >= j) & (j + width > i)
        wanted = numflash.torch.attention(q, k, v, seen, enable_gqa=True)
        torch.testing.assert_close(found, wanted, atol=3e-6, rtol=0)


def test_gradients_of_captured_tensors_are_not_lost():
    weight = torch.nn.Parameter(torch.ones(H))
    q, k, v = (x.detach() for x in tensors())

    def score(s, b, h, i, j):
        return s * weight[h]

    cache = numflash.KVCache(B, 2, D, L, "float32")
    cache.append(k, v)
    rows = [x[0].transpose(0, 1) for x in (q, k, v)]
    options = {"score_mod": score, "enable_gqa": True}
    for call in (
        lambda: numflash.flex_attention(q, k, v, score, enable_gqa=True),
        lambda: numflash.attention_varlen(*rows, [0, L], [0, L], **options),
        lambda: cache.decode(q[:, :, :1], score_mod=score),
    ):
        with pytest.raises(ArgumentError, match=r"score_mod: captures a tensor that requires grad"):
            call()
        with torch.no_grad():
            call()
    limits = torch.nn.Parameter(torch.full((L,), 9.0))  # of a mask there is none to lose
    mask = numflash.create_block_mask(lambda b, h, i, j: i - j < limits[i], None, None, L, L)
    numflash.flex_attention(q, k, v, None, mask, enable_gqa=True)


def test_inside_compile_it_is_a_graph_break():
    q, k, v = (x.detach() for x in tensors())

    def layer(q, k, v):
        return numflash.torch.flex_attention(q * 2, k, v, score_mod, enable_gqa=True) + 1

    compiled = torch.compile(layer, backend="eager")
    assert torch.allclose(compiled(q, k, v), layer(q, k, v))


def test_errors():
    q, k, v = tensors()
    table = torch.randn(L, requires_grad=True)
    with pytest.raises(ArgumentError, match="rounding has no gradient"):
        numflash.torch.flex_attention(
            *(x.detach() for x in (q, q, q)),
            lambda score, b, h, q, k: score + table[k],
            precision="int8",
        )
    with pytest.raises(ArgumentTypeError, match="block_mask: got ndarray"):
        numflash.torch.flex_attention(q, q, q, None, np.zeros(3))
    with pytest.raises(UnsupportedError, match=r"torch\.func"):
        torch.vmap(lambda x: numflash.torch.flex_attention(x, x, x))(torch.randn(2, B, H, L, D))


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_what_is_refused_as_by_attention():
    """float64 would lose digits, and rounding to INT8 has no gradient."""
    q, k, v = tensors()
    with pytest.raises(ArgumentError, match=r"query: got dtype torch\.float64"):
        numflash.torch.flex_attention(q.double(), k.double(), v.double(), enable_gqa=True)
    with pytest.raises(ArgumentError, match=r"key: got torch\.float32"):
        numflash.torch.flex_attention(q.bfloat16(), k, v, enable_gqa=True)
    nested = torch.nested.nested_tensor([torch.ones(H, L, D)] * B, layout=torch.jagged)
    with pytest.raises(ArgumentError, match="query: got a nested tensor"):
        numflash.torch.scaled_dot_product_attention(nested, nested, nested)
    with pytest.raises(ArgumentTypeError, match=r"numflash\.torch\.flex_attention takes PyTorch's"):
        numflash.flex_attention(*(x.detach() for x in (q, k, v)), None, torch_mask(), None, True)
    with pytest.raises(ArgumentError, match="rounding has no gradient"):
        numflash.torch.flex_attention(q, k, v, enable_gqa=True, precision="int8")
    with torch.no_grad():
        numflash.torch.flex_attention(q, k, v, enable_gqa=True, precision="int8")
    with numflash.torch.use(fallback=True) as routed:
        found = flex.flex_attention(*(x.detach().double() for x in (q, k, v)), enable_gqa=True)
    assert found.dtype == torch.float64 and sum(routed.fallbacks.values()) == 1


def test_use_routes_torchs_function():
    q, k, v = (x.detach() for x in tensors())
    original = flex.flex_attention
    with numflash.torch.use() as routed:
        out = flex.flex_attention(q, k, v, score_mod, torch_mask(), enable_gqa=True)
        assert flex.flex_attention is not original
        with numflash.torch.use():
            flex.flex_attention(q, k, v, enable_gqa=True)
    assert routed.calls == 1
    assert flex.flex_attention is original
    assert torch.allclose(out, eager(q, k, v)[0], atol=3e-6)
    with pytest.raises(ArgumentTypeError), numflash.torch.use():
        flex.flex_attention(q[0], k, v)
    assert flex.flex_attention is original


def test_what_has_not_4_dimensions_is_shown():
    x = torch.zeros(2, 8, 16)
    for given, words in ((x, r"query: got shape \(2, 8, 16\)"), (x.numpy(), "query: got ndarray")):
        with pytest.raises(TypeError, match=words):
            numflash.torch.flex_attention(given, given, given)
