"""The operator under numflash.torch.

Options beyond PyTorch's, PyTorch's own checks of it, and cards as far as it goes.
"""

import copy
import pickle
import threading

import numpy as np
import pytest
from oracles import naive

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch_cases import BIAS, DEFAULTS, KEEP, SDPA, K, Q, V

import numflash.torch as nt
from numflash.cpu import launch
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError
from numflash.torch import operator, sdpa


def test_trailing_padding_becomes_key_lengths(monkeypatch):
    """A mask whose rows are alike, of any dtype and layout, as the ones that layers of PyTorch's make.

    With the diagonal at the front nothing changes, at the back the mask must stay one.
    """
    seen = []
    run = launch.run
    monkeypatch.setattr(
        launch, "run", lambda problem, **options: seen.append(problem) or run(problem, **options)
    )
    monkeypatch.setattr(plan_store.runners, "get", lambda call: None)  # equal calls go past `run`
    lengths = torch.tensor([7, 4])
    mask = (torch.arange(7) < lengths[:, None])[:, None, None].expand(2, 4, 5, 7)
    holes = mask.clone()
    holes[1, :, :, 1] = False
    one_row = mask.clone()
    one_row[1, 3, 4, 2:] = False
    bias = torch.zeros(mask.shape).masked_fill(~mask, -torch.inf)
    tiny = bias.clone()
    tiny[1, 3, 4, 1] = 1e-45
    for attn_mask, becomes, options in (
        (mask, True, {}),
        (mask, True, {"is_causal": True}),
        (mask, False, {"is_causal": True, "alignment": "lower_right"}),
        (mask.contiguous(), True, {}),
        (mask[1:, :1, :1], True, {}),
        (bias, True, {}),
        (bias[:, :, :1], True, {"is_causal": True}),
        (bias.half(), True, {}),
        (bias[:, :1].bfloat16(), True, {}),
        (torch.zeros(1, 4, 1, 7), True, {}),
        (holes[:, :1, :1], False, {}),
        (one_row, False, {}),
        (tiny, False, {}),
        (bias - 1, False, {}),
        (bias.nan_to_num(), False, {}),
        (bias.clone().requires_grad_(), False, {}),
        (mask.contiguous().transpose(2, 3)[:, :, :1].transpose(2, 3).expand_as(mask), False, {}),
    ):
        half = attn_mask.dtype in (torch.float16, torch.bfloat16)
        given = [x.to(attn_mask.dtype) if half else x for x in (Q, K, V)]
        out = nt.attention(*given, attn_mask, **options).detach().float()
        assert (seen[-1].mask is None and seen[-1].bias is None) == becomes
        numbers = attn_mask.detach().expand(2, 4, 5, 7)
        numbers = numbers if numbers.dtype == torch.bool else numbers.float()
        want, _ = naive(Q, K, V, numbers.numpy(), **options)
        np.testing.assert_allclose(out, want, atol=0.03 if half else 1e-6)


@pytest.mark.parametrize("shape", [(2, 3, 1, 7), (2, 1, 4, 7), (2, 4, 2, 7), (3, 1, 1, 7)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_padding_that_does_not_fit_is_refused(shape, dtype):
    seen = torch.arange(7) < 4
    numbers = seen if dtype is torch.bool else torch.zeros(7).masked_fill(~seen, -torch.inf)
    for mask in (numbers.expand(shape), numbers.repeat(*shape[:3], 1)):
        for call in (nt.attention, nt.scaled_dot_product_attention):
            for _ in range(2):  # after a call with a mask that fits, too
                with pytest.raises(ValueError, match="attn_mask: got shape"):
                    call(Q, K, V, mask)
                call(Q, K, V, numbers.expand(2, 4, 5, 7))


def test_no_queries_and_a_mask():
    out = nt.attention(Q[:, :, :0], K, V, torch.ones(2, 4, 0, 7, dtype=torch.bool))
    assert tuple(out.shape) == (2, 4, 0, V.shape[3])


def test_options_beyond_pytorch():
    options = {"window": (2, 1), "alignment": "lower_right", "softcap": 3.0}
    tensors = {
        "key_lengths": torch.tensor([7, 4]),
        "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
        "sinks": torch.tensor([0.0, 1.0, -1.0, 0.5]),
    }
    out, lse = nt.attention(Q, K, V, return_lse=True, **options, **tensors)
    want, want_lse = naive(Q, K, V, **options, **{n: x.numpy() for n, x in tensors.items()})
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_no_gradient_is_lost_silently():
    x = torch.zeros(4, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"alibi_slopes.*requires grad"):
        nt.attention(Q, K, V, alibi_slopes=x)
    with torch.no_grad():
        nt.attention(Q, K, V, alibi_slopes=x)
    for name, x in (("attn_mask", BIAS), ("sinks", torch.zeros(4))):
        with pytest.raises(ArgumentError, match="rounding has no gradient"):
            nt.attention(Q, K, V, precision="int8", **{name: x.clone().requires_grad_()})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": KEEP},
        {"attn_mask": BIAS},
        {"left": 2, "right": 1, "softcap": 2.0},
        {"key_lengths": torch.tensor([7, 3]), "sinks": torch.zeros(4)},
        {"precision": "int8"},
    ],
    ids=lambda o: "-".join(o) or "plain",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_forward_pass(options, dtype):
    arrays = (x.to(dtype) for x in (Q, K, V))
    torch.library.opcheck(
        torch.ops.numflash.attention.default, (*arrays, *{**DEFAULTS, **options}.values())
    )


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's own, from PyTorch 2.15 on
@pytest.mark.parametrize(
    "options",
    [{}, {"attn_mask": BIAS, "softcap": 2.0}, {"left": 2, "key_lengths": torch.tensor([7, 3])}],
    ids=lambda o: "-".join(o) or "plain",
)
def test_opcheck_with_gradients(options):
    arrays = [x.clone().requires_grad_() for x in (Q, K, V)]
    torch.library.opcheck(
        torch.ops.numflash.attention.default, (*arrays, *{**DEFAULTS, **options}.values())
    )


def test_opcheck_of_the_backward_pass():
    trained = DEFAULTS | {"attn_mask": BIAS, "sinks": torch.zeros(4)}
    for options, wanted in ((DEFAULTS, (False, False)), (trained, (True, True))):
        given = {name: options[name] for name in ("attn_mask", "sinks")}
        out, lse = nt.attention(Q, K, V, return_lse=True, **given)
        arguments = torch.ones_like(out), Q, K, V, out, lse, *options.values(), *wanted
        torch.library.opcheck(torch.ops.numflash.attention_backward.default, arguments)


def test_an_equal_gradient_call_takes_the_results_that_the_first_one_takes():
    """Which are looked at again: other shapes are refused, other strides and dtypes are read."""
    out, lse = nt.attention(Q, K, V, return_lse=True)
    given = {"grad_out": torch.randn(out.shape), "out": out, "lse": lse}

    def gradients(**changed):
        x = given | changed
        operator = torch.ops.numflash.attention_backward.default
        options = *DEFAULTS.values(), False, False
        return operator(x["grad_out"], Q, K, V, x["out"], x["lse"], *options)

    first = gradients()
    assert all(map(torch.equal, gradients(), first))
    for name, wrong in (("grad_out", out[:, :, 1:]), ("out", out[..., 1:]), ("lse", lse[:, :1])):
        with pytest.raises(ArgumentError, match=f"{name}: got shape"):
            gradients(**{name: wrong.contiguous()})
    turned = {name: x.mT.contiguous().mT for name, x in given.items()}
    assert all(map(torch.equal, gradients(**turned), first))
    wide = {name: given[name].double() for name in ("grad_out", "out")}
    assert all(map(torch.equal, gradients(**wide), first))


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = nt.scaled_dot_product_attention(Q, K.bfloat16(), V, BIAS)
        want = SDPA(Q, K.bfloat16(), V, BIAS)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, atol=2e-2, rtol=0)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ArgumentError, match="float64"):
        nt.scaled_dot_product_attention(
            Q.double(), K.double(), V.double()
        )  # autocast leaves float64 alone


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attend, self.mixed = nt.scaled_dot_product_attention, torch.nn.Linear(8, 8)

    def forward(self, x):
        x = self.mixed(x)
        return self.attend(x, x, x, is_causal=True)


def test_models_are_copied_pickled_exported_and_traced():
    layer = Layer().eval()
    want = layer(Q)
    assert torch.equal(copy.deepcopy(layer)(Q), want) and torch.equal(
        pickle.loads(pickle.dumps(layer))(Q), want
    )
    assert torch.equal(torch.export.export(layer, (Q,)).module()(Q), want)
    error = pickle.loads(pickle.dumps(nt.SdpaError("query: got 1; allowed: 2")))
    assert isinstance(error, nt.SdpaError) and "query: got 1" in str(error)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[..., ::2],
        lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
        lambda x: x.flip(1),
        lambda x: torch.complex(x, x).conj().imag,
        lambda x: x[:, :, 1:3],
        lambda x: x[:1].expand(2, -1, -1, -1),
    ],
    ids=["every other channel", "columns first", "flipped", "negated view", "slice", "expanded"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_of_any_strides(change, dtype):
    q, k, v = (change(x).to(dtype) for x in (Q, K, V))
    want, _ = naive(*(x.resolve_neg().double().numpy() for x in (q, k, v)))
    out = nt.scaled_dot_product_attention(q, k, v)
    np.testing.assert_allclose(out.double(), want, atol=1e-6 if dtype == torch.float32 else 2e-2)


def test_threads_of_python_at_once():
    want = nt.scaled_dot_product_attention(Q, K, V)
    wrong = []

    def work():
        wrong.extend(
            1 for _ in range(20) if not torch.equal(nt.scaled_dot_product_attention(Q, K, V), want)
        )

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_shapes_on_a_card_are_known_without_one():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q, k = (
            torch.empty(shape, device="cuda", dtype=torch.float16)
            for shape in ((2, 4, 5, 64), (2, 2, 7, 64))
        )
        out, lse = nt.attention(q, k, k, enable_gqa=True, return_lse=True)
    assert out.device.type == "cuda" and out.shape == (2, 4, 5, 64) and out.dtype == torch.float16
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_tensors_on_a_card_are_handed_on_as_they_are(monkeypatch):
    """A stand-in for a CUDA tensor reaches what is behind `numflash.attention` itself, and no CPU
    thread is set for it.
    """

    class OnCard:
        is_cuda = True
        shape = (1, 1, 4, 16)

        def detach(self):
            return self

    q = OnCard()
    seen = []
    monkeypatch.setattr(operator.api, "attend", lambda *arguments: seen.append(arguments))
    monkeypatch.setattr(operator, "pytorch_threads", None)
    operator.attention_operator._init_fn(
        q, q, q, *{**DEFAULTS, "left": 3, "precision": "int8"}.values()
    )
    ((*tensors, options, impl, call),) = seen
    assert all(x is q for x in tensors) and impl == "auto" and options.precision == "int8"
    assert call is None  # of a tensor there would be a key for the next call
    assert options.window == (3, None) and options.return_lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_equal_calls_follow_their_tensors(dtype):
    """The second call finds its problem, and has no array of the first, nor its mask; other options are
    others.
    """
    plan_store.gradients.plans.clear()
    for number in (1.0, 3.0):
        seen = torch.rand(2, 1, 40, 40) < number / 4
        padding = (torch.arange(40) < 10 * number).expand(2, 1, 1, 40)
        bias = torch.randn(1, 4, 40, 40, dtype=dtype)
        for changed in (
            {},
            {"is_causal": True},
            {"attn_mask": seen | torch.eye(40, dtype=torch.bool)},
            {"attn_mask": padding},
            {"attn_mask": bias},
        ):
            q, v = (number * torch.randn(2, 4, 40, 16, dtype=dtype) for _ in range(2))
            k = torch.randn(2, 2, 40, 16, dtype=dtype)
            given = [x.requires_grad_() for x in (q, k, v[:, :2].contiguous())]
            options = {**changed, "enable_gqa": True}
            grad = torch.randn(2, 4, 40, 16, dtype=dtype)
            found = torch.autograd.grad(sdpa.attention(*given, **options), given, grad)
            exact = [x.detach().double().requires_grad_() for x in given]
            if "attn_mask" in changed and changed["attn_mask"].dtype == dtype:
                options["attn_mask"] = bias.double()
            out = sdpa.PYTORCH(*exact, **options)
            wanted = torch.autograd.grad(out, exact, grad.double())
            room = 1e-5 if dtype is torch.float32 else 0.1
            for x, y in zip(found, wanted, strict=True):
                torch.testing.assert_close(x.double(), y, rtol=room, atol=room * y.abs().max())
    assert len(plan_store.gradients.plans) == 4  # one for both masks
    kept = [x.problem for x in plan_store.gradients.plans.values()]
    assert all(x.mask is x.bias is None for x in kept)
    assert all(not any(x.strides) for of in kept for x in (of.query, of.key, of.value))


@pytest.mark.parametrize("precision", [None, "bfloat16", "float16"])
def test_gradients_of_equal_calls_have_equal_bits(precision):
    """Whatever the tensors are rounded to."""
    given = [torch.randn(1, 2, 40, 16).requires_grad_() for _ in range(3)]
    grad = torch.randn(1, 2, 40, 16)
    first, second = (
        torch.autograd.grad(nt.attention(*given, precision=precision), given, grad) for _ in "12"
    )
    assert all(map(torch.equal, first, second))


def test_equal_calls_give_equal_bits_and_follow_their_tensors():
    """The second one is prepared; others of the same shapes are not mistaken for it."""
    plan_store.runners.plans.clear()
    q, k, v = (torch.randn(1, 2, 40, 16) for _ in range(3))
    first = sdpa.attention(q, k, v, is_causal=True, return_lse=True)
    assert len(plan_store.runners.plans) == 1
    second = sdpa.attention(q, k, v, is_causal=True, return_lse=True)
    assert all(map(torch.equal, first, second))
    other = sdpa.attention(q * 2, k, v, is_causal=True)
    torch.testing.assert_close(other, sdpa.PYTORCH(q * 2, k, v, is_causal=True))
    x, y, z = (x.clone().requires_grad_() for x in (q, k, v))
    torch.autograd.backward(sdpa.attention(x, y, z, is_causal=True).sum())
    found = torch.autograd.grad(sdpa.PYTORCH(x, y, z, is_causal=True).sum(), (x, y, z))
    for a, b in zip((x, y, z), found, strict=True):
        torch.testing.assert_close(a.grad, b)
    turned = q.transpose(2, 3).contiguous().transpose(2, 3)  # not contiguous: not by the plan
    assert torch.equal(sdpa.attention(turned, k, v, is_causal=True), first[0])


@pytest.mark.parametrize(("length", "keys"), [(0, 5), (5, 0)])
def test_a_mask_without_elements(length, keys):
    """There is nothing to read key lengths from; a row without keys is 0."""
    q, k, v = (torch.randn(2, 2, n, 8) for n in (length, keys, keys))
    mask = torch.ones(2, 1, min(length, 1), keys, dtype=torch.bool)
    out = sdpa.attention(q, k, v, attn_mask=mask)
    assert out.shape == q.shape and not out.any()
