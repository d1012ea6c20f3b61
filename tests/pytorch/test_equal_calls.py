"""Equal calls on tensors after the first: without PyTorch's dispatch where nobody needs it."""

import numpy as np
import pytest
from oracles import naive, qkv

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import DEFAULTS

import numflash
import numflash.torch as nt
from numflash.dispatch import plan_store
from numflash.dispatch.option_gradients import OPERANDS
from numflash.errors import ArgumentError, ArgumentTypeError, NumflashError
from numflash.jit import target
from numflash.torch import gradients, operator, sdpa
from numflash.torch.tensors import result_like

ARRAYS = qkv(b=2, h=4, l=37, s=53, d=24)
Q, K, V = (torch.from_numpy(x) for x in ARRAYS)
OPERATOR = "numflash::attention"
ATTENTION = torch.ops.numflash.attention.default


class Seen(TorchDispatchMode):
    """The operators that PyTorch dispatches."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.fixture
def direct(monkeypatch):
    """Calls that ran without the operator."""
    calls = []
    run = sdpa.without_operator

    def counted(*args):
        found = run(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(sdpa, "without_operator", counted)
    return calls


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}], ids=str)
def test_equal_calls_give_equal_bits(direct, precision, options):
    with torch.no_grad():
        for call in (nt.scaled_dot_product_attention, nt.attention):
            first = call(Q, K, V, precision=precision, **options)
            again = call(Q, K, V, precision=precision, **options)
            assert direct[-1]
            assert torch.equal(first, again) and first.dtype == again.dtype
    want, want_lse = naive(*ARRAYS, **options)
    assert abs(again.numpy() - want).sum() < 0.03 * abs(want).sum()
    _, lse = nt.attention(Q, K, V, precision=precision, return_lse=True, **options)
    assert direct[-1]
    np.testing.assert_allclose(lse, want_lse, atol=1e-5 if precision == "float32" else 0.05)


@pytest.mark.skipif(
    target.missing("avx512_bf16", target.BFLOAT16_ISAS), reason="no bfloat16 instructions"
)
def test_equal_calls_on_bfloat16_tensors(direct):
    """Of head sizes that are whole pairs; others are padded, so that no plan takes them in place."""
    half = [x.bfloat16() for x in (Q, K, V)]
    with torch.no_grad():
        first, again = (nt.attention(*half, is_causal=True, return_lse=True) for _ in range(2))
        assert direct[-1] and all(map(torch.equal, first, again))
        assert again[0].dtype == torch.bfloat16 and again[1].dtype == torch.float32
        odd = [x[..., :7].contiguous() for x in half]
        for _ in range(2):
            found = nt.attention(*odd, is_causal=True)
        assert direct[-1] is False and found.dtype == torch.bfloat16
    for mine, size in ((again[0], None), (found, 7)):
        want, _ = naive(*(x.float().numpy()[..., :size] for x in half), is_causal=True)
        assert np.abs(mine.float().numpy() - want).max() < 0.02


DRAW = np.random.default_rng(3)
TENSORS = {
    "mask": [{"attn_mask": DRAW.random((2, 1, 37, 53)) < p} for p in (0.7, 0.3)],
    "padding": [{"attn_mask": np.arange(53) < DRAW.integers(1, 53, (2, 1, 1, 1))} for _ in "ab"],
    "more keys": [{"attn_mask": np.arange(53) < np.full((2, 1, 1, 1), n)} for n in (5, 53)],
    "no padding": [{"attn_mask": np.arange(53) >= np.full((2, 1, 1, 1), n)} for n in (5, 9)],
    "holes": [{"attn_mask": np.arange(53) % n < np.full((2, 1, 1, 1), 1)} for n in (2, 3)],
    "bias": [{"attn_mask": DRAW.standard_normal((1, 4, 37, 53), np.float32)} for _ in "ab"],
    "lengths": [{"key_lengths": DRAW.integers(1, 53, 2)} for _ in "ab"],
    "slopes": [{"alibi_slopes": DRAW.random(4)} for _ in "ab"],
    "sinks": [{"sinks": DRAW.standard_normal(4)} for _ in "ab"],
}


@pytest.mark.parametrize("precision", ["float32", "int8"])
@pytest.mark.parametrize("name", TENSORS)
def test_tensors_among_the_options_are_looked_at_in_every_call(name, precision, direct):
    """The second call and those after it run without the operator, each with its own numbers."""
    want = []
    for given in TENSORS[name]:
        plan_store.runners.plans.clear()
        tensors = {n: torch.from_numpy(x) for n, x in given.items()}
        want.append(nt.attention(Q, K, V, precision=precision, return_lse=True, **tensors))
        out, _ = naive(*ARRAYS, **given)
        assert abs(want[-1][0].numpy() - out).sum() < 0.03 * abs(out).sum()
    plan_store.runners.plans.clear()
    for n in (0, 1, 0, 1):
        tensors = {x: torch.from_numpy(array) for x, array in TENSORS[name][n].items()}
        found = nt.attention(Q, K, V, precision=precision, return_lse=True, **tensors)
        assert torch.equal(found[0], want[n][0]) and torch.equal(found[1], want[n][1])
        if set(tensors) == {"attn_mask"}:
            assert torch.equal(
                nt.scaled_dot_product_attention(Q, K, V, precision=precision, **tensors),
                want[n][0],
            )
    assert direct[-1]


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_masks_of_sixteen_bits_are_widened_for_each_call(dtype, trained):
    """A kernel reads a float32 copy, which has to live as long as the call."""
    mask = torch.empty(4, 37, 53, dtype=dtype, requires_grad=trained)
    given = [x.to(dtype) for x in (Q, K, V)]
    torch.manual_seed(0)
    for _ in range(4):
        with torch.no_grad():
            mask.normal_()
        out = nt.attention(*given, attn_mask=mask)
        assert out.requires_grad is trained
        want, _ = naive(
            *(x.float().numpy() for x in given), attn_mask=mask.detach().float().numpy()
        )
        assert np.abs(out.detach().float().numpy() - want).max() < 0.02
        for _ in range(4 * trained):  # the last ones keep their numbers for the gradient
            nt.attention(*given, attn_mask=mask).sum().backward()


def test_masks_of_equal_calls_that_differ_in_more_than_their_numbers(direct):
    mask = torch.ones(37, 53, dtype=torch.bool)
    for _ in range(2):
        want = nt.scaled_dot_product_attention(Q, K, V, mask)
    assert direct[-1]
    bias = torch.zeros(37, 53, requires_grad=True)
    found = nt.scaled_dot_product_attention(Q, K, V, bias)
    found.sum().backward()
    torch.testing.assert_close(found.detach(), want)
    assert bias.grad.shape == (37, 53) and not direct[-1]
    rest = False, None, False, None, None, "upper_left", None, 0.0, None, None, None, None, "auto"
    operator.attention_operator(Q, K, V, mask.double(), *rest)  # which takes more dtypes
    for wrong, message in (
        ({"is_causal": True}, "attn_mask: got one together with is_causal"),
        ({"attn_mask": mask[:, :-1]}, "attn_mask: got shape"),
        ({"attn_mask": mask.double()}, "attn_mask: got dtype"),
        ({"attn_mask": mask.to("meta")}, "attn_mask"),
    ):
        with pytest.raises(RuntimeError, match=message):
            nt.scaled_dot_product_attention(Q, K, V, **{"attn_mask": mask, **wrong})
    sinks = torch.nn.Parameter(torch.zeros(4))
    for _ in range(2):
        assert nt.attention(Q, K, V, sinks=sinks).requires_grad
        with torch.no_grad():
            assert not nt.attention(Q, K, V, sinks=sinks).requires_grad
    assert direct[-1]


def test_whoever_looks_sees_the_operator(direct):
    for _ in range(2):
        nt.scaled_dot_product_attention(Q, K, V)
    assert direct[-1]
    with Seen() as seen:
        nt.scaled_dot_product_attention(Q, K, V)
    assert OPERATOR in seen.names
    with torch.profiler.profile() as profile:
        nt.scaled_dot_product_attention(Q, K, V)
    assert OPERATOR in {event.name for event in profile.events()}
    query = Q.clone().requires_grad_()
    assert nt.scaled_dot_product_attention(query, K, V).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert nt.scaled_dot_product_attention(Q, K, V).dtype == torch.bfloat16
    many = torch.stack((Q, Q))
    want = nt.scaled_dot_product_attention(Q, K, V)
    found = torch.func.vmap(lambda q: nt.scaled_dot_product_attention(q, K, V))(many)
    assert direct[-1] is False
    assert torch.equal(found, torch.stack((want, want)))


def test_tensors_that_are_not_their_memory(direct):
    """Lazily negated, and subclasses."""
    for _ in range(2):
        nt.scaled_dot_product_attention(Q, K, V)
    negative = nt.scaled_dot_product_attention(-Q, K, V)
    got = nt.scaled_dot_product_attention(torch._neg_view(Q), K, V)
    assert torch.equal(got, negative) and direct[-1] is False
    parameter = torch.nn.Parameter(Q)
    assert nt.scaled_dot_product_attention(parameter, K, V).requires_grad


def by_token(x):
    """As models have it: x.view(B, L, H, D).transpose(1, 2)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_more(x):
    """A third of what one projection gives for queries, keys and values, in the memory of tokens."""
    whole = torch.randn(x.shape[0], x.shape[2], 3, x.shape[1], x.shape[3]).to(x.dtype)
    whole[:, :, 1] = x.transpose(1, 2)
    return whole[:, :, 1].transpose(1, 2)


def columns_apart(x):
    return torch.stack((x, x * 0), -1).flatten(-2)[..., ::2]


def tokens_apart(x):
    """Heads together, and columns that no kernel reads in place: their copy lies otherwise."""
    return columns_apart(x.transpose(1, 2)).transpose(1, 2)


def within_words(x):
    """Rows that begin at every other place of a 16-bit number, as no kernel packs them."""
    return torch.nn.functional.pad(x, (1, 0))[..., 1:]


def expanded(x):
    return x[:, :1].expand(x.shape)


@pytest.mark.parametrize(
    "layout", [by_token, part_of_more, columns_apart, tokens_apart, within_words, expanded]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("length", [37, 1])
def test_equal_calls_on_tensors_of_any_layout(direct, length, dtype, layout):
    """The same bits as of contiguous tensors; results of tokens where PyTorch has them."""
    # heads that are whole squares of packing and a rest, and values that may be read in place
    arrays = qkv(b=2, h=4, l=length, s=53, d=40, dv=32)
    tensors = [layout(torch.from_numpy(x).to(dtype)) for x in arrays]
    for options in ({}, {"precision": "int8"}, {"sinks": torch.randn(4)}):
        contiguous = (x.contiguous() for x in tensors)
        want, want_lse = nt.attention(*contiguous, **options, return_lse=True)
        strides = result_like(tensors[0], 32, dtype).stride()  # which a compiled model expects
        for _ in range(2):
            out, lse = nt.attention(*tensors, **options, return_lse=True)
            assert torch.equal(out, want) and torch.equal(lse, want_lse)
            assert out.stride() == strides
        assert direct[-1]
        assert layout not in (by_token, part_of_more) or out.transpose(1, 2).is_contiguous()


def test_results_on_a_card_are_contiguous_and_a_compiler_is_told_so():
    with FakeTensorMode():
        tensors = [torch.empty(2, 7, 4, 16, device="cuda").transpose(1, 2) for _ in "qkv"]
        out, _ = ATTENTION(*tensors, *DEFAULTS.values())
    assert out.is_contiguous()


def test_results_in_the_memory_of_tokens_may_be_changed_in_place():
    """They are no views: PyTorch refuses to change a view that was made without gradients."""
    weight = torch.ones((), requires_grad=True)
    for _ in range(2):
        with torch.no_grad():
            out = nt.attention(*map(by_token, (Q, K, V)))
        assert out.transpose(1, 2).is_contiguous()
        out += weight
        assert out.requires_grad


@pytest.mark.parametrize("layout", [by_token, expanded, tokens_apart, within_words])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_results_lie_where_a_compiler_is_told(dtype, layout):
    """In the first call and in equal ones, whose queries are copied to be read."""
    tensors = [layout(x.to(dtype)) for x in (Q, K, V)]
    with FakeTensorMode() as mode:
        told = ATTENTION(*map(mode.from_tensor, tensors), *DEFAULTS.values())
    plan_store.runners.plans.clear()
    for _ in range(2):
        found = ATTENTION(*tensors, *DEFAULTS.values())
        assert [x.stride() for x in found] == [x.stride() for x in told]


def test_rows_that_float32_does_not_hold_in_tensors_of_models():
    """They are computed again, and written where the result is."""
    large = [x.clone() for x in (Q, K, V)]
    large[0][0, 1, 3] = 0
    large[0][0, 1, 3, :2] = large[1][0, 1, :, 0] = 1e20  # float32 has infinity minus infinity
    large[1][0, 1, :, 1] = -1e20
    want, want_lse = naive(*(x.numpy() for x in large))
    for _ in range(2):
        out, lse = nt.attention(*map(by_token, large), return_lse=True)
    assert out.transpose(1, 2).is_contiguous()
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


def test_options_that_are_equal_but_not_allowed():
    for _ in range(2):
        nt.attention(Q, K, V, is_causal=True, softcap=1.0)
    for wrong, error, message in (
        ({"alignment": 1}, ArgumentError, "alignment: got 1; allowed: "),
        ({"impl": "gpu"}, ArgumentError, "impl: got 'gpu'; allowed: "),
        ({"precision": "int4"}, ArgumentError, "precision: got 'int4'; allowed: "),
        ({"softcap": "1"}, ArgumentTypeError, "softcap: got "),
    ):
        with pytest.raises(error, match=message):
            nt.attention(Q, K, V, **{"is_causal": True, "softcap": 1.0, **wrong})
    with pytest.raises(NumflashError, match="enable_gqa"):
        nt.attention(Q, K[:, :2], V[:, :2])
    grouped = [
        nt.scaled_dot_product_attention(Q, K[:, :2], V[:, :2], enable_gqa=True) for _ in "ab"
    ]
    assert torch.equal(*grouped)
    with pytest.raises(NumflashError):
        nt.scaled_dot_product_attention(Q, K[:, :2], V[:, :2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_function_for_arrays_keeps_plans_for_tensors(dtype, monkeypatch):
    """`numflash.attention` on tensors: equal bits and kind, and the errors of the first call."""
    kept = []
    keep = plan_store.PlanCache.keep
    monkeypatch.setattr(
        plan_store.PlanCache, "keep", lambda *args: kept.append(args[1]) or keep(*args)
    )
    plan_store._plans.plans.clear()
    tensors = [x.to(dtype) for x in (Q, K, V)]
    first, again = (numflash.attention(*tensors) for _ in range(2))
    assert len(kept) == 1
    assert type(again) is torch.Tensor and again.dtype == dtype
    assert torch.equal(first, again)
    strided = [x.repeat_interleave(2, -1)[..., ::2] for x in tensors]
    assert torch.equal(first, numflash.attention(*strided))
    with pytest.raises(ArgumentError, match="key: the tensor requires grad"):
        numflash.attention(tensors[0], tensors[1].clone().requires_grad_(), tensors[2])
    with pytest.raises(NumflashError, match="meta"):
        numflash.attention(tensors[0], tensors[1].to("meta"), tensors[2])
    assert len(kept) == 1


@pytest.mark.parametrize("with_lse", [False, True])
@pytest.mark.parametrize("equal", [False, True])
def test_what_the_gradients_of_a_card_are_given(monkeypatch, with_lse, equal):
    """In a first call and in one that is equal to it; the operands' order is that of
    `cuda.arrays.calls.BACKWARD`.
    """
    grad_out, q, k, v, out, lse = (torch.full((1, 1, 2, 4), float(n)) for n in range(6))
    grad_lse = torch.full((1, 1, 2), 6.0) if with_lse else None
    asked, got = [], []

    def on_card(name, tensors, options):
        asked.extend(tensors)
        again = (lambda *x: got.extend(x) or x[:3]) if equal else None
        return "call", again

    def differentiate(arrays, *rest, call):
        got.extend(arrays)
        return arrays[1:4]

    monkeypatch.setattr(gradients, "on_card", on_card)
    monkeypatch.setattr(gradients.api, "differentiate", differentiate)
    found = gradients._on_card(
        (grad_out, q, k, v, out, lse), grad_lse, tuple(DEFAULTS.values()), False
    )
    assert [x.mean().item() for x in found[:3]] == [1, 2, 3] and found[3].numel() == 0
    assert [x.mean().item() for x in asked] == [1, 2, 3, 0, 4, 5, 6][: 6 + with_lse]
    given = [None if x is None else x.mean().item() for x in got]
    last = 6 if with_lse else None
    assert given == ([1, 2, 3, None, 0, 4, 5, last] if equal else [0, 1, 2, 3, 4, 5, last])


PADDED = [torch.arange(9) < n for n in (9, 4, 6)]


@pytest.mark.parametrize(
    "calls",
    [
        [{"key_lengths": torch.tensor([n])} for n in (9, 3, 5)],
        [
            {"key_lengths": torch.tensor([n]), "is_causal": True, "alignment": "lower_right"}
            for n in (5, 9, 2)
        ],
        [{"attn_mask": x[None, None, None]} for x in (*PADDED, torch.arange(9) % 2 == 0)],
        [{"attn_mask": x[None, None, None].float() - 2} for x in PADDED],
        [{"alibi_slopes": torch.tensor([x, 1.0])} for x in (0.1, 0.5, 0.0)],
        [{"sinks": torch.tensor([x, 1.0])} for x in (-1.0, 2.0)],
    ],
    ids=lambda calls: "-".join(calls[0]),
)
def test_gradients_follow_the_options_tensors(calls):
    """Of calls that differ in the numbers of their options' tensors alone; the first is the plainest."""
    plan_store.gradients.plans.clear()
    given = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]
    grad = torch.randn(1, 2, 9, 16)
    for options in calls:
        found = torch.autograd.grad(nt.attention(*given, **options), given, grad)
        arrays = [x.detach().numpy() for x in (grad, *given)]
        asked = {n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        results = numflash.attention(*arrays[1:], **asked, return_lse=True)
        want = numflash.attention_backward(*arrays, *results, **asked, wrt=[*OPERANDS])  # in full
        for x, y in zip(found, want, strict=True):
            np.testing.assert_array_equal(x, y)


def test_memory_that_was_freed_between_the_passes():
    """FSDP frees parameters so; PyTorch's own attention refuses it, too."""
    for number in range(3):
        q, k, v = (torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3))
        out = nt.attention(q, k, v)
        if number < 2:
            out.sum().backward()
    q.data.untyped_storage().resize_(0)
    calls = [lambda: out.sum().backward(), lambda: nt.attention(q, k, v)]  # equal to earlier ones
    calls += [lambda: nt.attention(q, k, v, scale=0.123)]
    for call in calls:
        with pytest.raises(ArgumentError, match="query: got a tensor whose memory was freed"):
            call()


@pytest.mark.parametrize("shape", [(2, 1, 1, 53), (1, 1, 37, 53)], ids=["padding", "mask"])
def test_masks_whose_memory_was_freed(shape):
    """In a first call and in one that is equal to an earlier one."""
    plan_store.runners.plans.clear()
    for _ in range(2):
        mask = torch.ones(shape, dtype=torch.bool)
        kept = mask.clone()
        mask.untyped_storage().resize_(0)
        with pytest.raises(ArgumentError, match="attn_mask: got a tensor whose memory was freed"):
            nt.attention(Q, K, V, mask)
        nt.attention(Q, K, V, kept)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_masks_that_hold_no_numbers_of_their_own():
    """Tensors with a negative bit hold the opposite of what stands in memory: plus infinity here."""
    plan_store.runners.plans.clear()
    hidden = torch.zeros(2, 1, 1, 53)
    hidden[..., 40:] = -torch.inf
    for _ in range(2):
        for wrong, words in (
            (torch._neg_view(hidden), "negative bit"),
            (hidden.to_sparse(), "torch.sparse_coo"),
            (torch.nested.as_nested_tensor(list(hidden)), "torch.strided"),
        ):
            with pytest.raises(ArgumentTypeError, match=f"attn_mask: got a tensor.*{words}"):
                nt.attention(Q, K, V, wrong)
        with pytest.raises(ArgumentError, match="attn_mask: got a tensor that stands for zeros"):
            nt.attention(Q, K, V, torch._efficientzerotensor(2, 1, 1, 53))
        nt.attention(Q, K, V, hidden)


@pytest.mark.parametrize("with_lse", [False, True])
def test_gradients_of_equal_calls(with_lse, monkeypatch):
    """They follow the tensors and the number of threads; rows that float32 cannot hold are computed
    again, and whoever asks for a gradient of the gradient is refused.
    """
    from numflash.cpu import launch_backward
    from numflash.jit.threads import most

    used = []
    run = launch_backward.tiled.GradientPlan.run

    def counted(plan, operands, strides=None):
        used.append(int(plan.numbers[launch_backward.tiled.Numbers._fields.index("workers")]))
        return run(plan, operands, strides)

    monkeypatch.setattr(launch_backward.tiled.GradientPlan, "run", counted)
    shape = 2, 4, 200, 64
    before = torch.get_num_threads()
    try:
        for threads, scale in ((1, 1), (1, 2), (2, 3), (1, 1e19), (1, 1)):
            torch.set_num_threads(threads)
            given = [scale * torch.randn(shape) for _ in range(3)]
            q, k, v = (x.requires_grad_() for x in given)
            out, lse = nt.attention(q, k, v, return_lse=True)
            grads = torch.randn(shape), torch.randn(lse.shape)
            results = (out, lse) if with_lse else (out,)
            found = torch.autograd.grad(results, (q, k, v), grads[: len(results)])
            assert used.pop() == min(threads, most())
            arrays = [x.detach().numpy() for x in (grads[0], q, k, v, out, lse, grads[1])]
            *arrays, of_lse = arrays
            of_lse = of_lse if with_lse else None
            want = numflash.attention_backward(*arrays, grad_lse=of_lse, wrt=[*OPERANDS])  # in full
            for x, y in zip(found, want, strict=True):
                np.testing.assert_array_equal(x, y)
    finally:
        torch.set_num_threads(before)
    out = nt.attention(q, k, v)
    with pytest.raises(NumflashError, match="derivatives"):
        torch.autograd.grad(out.sum(), q, create_graph=True)[0].sum().backward()
