"""attention_backward through score and mask functions, against float64 and PyTorch's autograd."""

import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash.errors import ArgumentTypeError
from numflash.flex.evaluate import evaluate
from numflash.flex.prepared import prepare

SMOOTH = [
    (g.alibi, None), (g.softcap, g.causal), (g.distance_wave, g.documents), (g.checkerboard, g.prefix_lm),
    (g.relative_bias, g.nothing_for_some), (None, g.sliding_window), (g.softcap_rational, g.padded),
]  # fmt: skip


def gradients(score_mod, mask_mod, impl="auto", hkv=2, size=32, **options):
    q, k, v = g.operands(20, hkv=hkv)
    mask = mask_mod and numflash.create_block_mask(mask_mod, g.B, g.H, g.L, g.S, size)
    out, lse = numflash.flex_attention(
        q, k, v, score_mod, mask, enable_gqa=True, return_lse=True, **options
    )
    grad = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    return numflash.attention_backward(
        grad, q, k, v, out, lse, score_mod=score_mod, block_mask=mask, enable_gqa=True, impl=impl, **options
    )  # fmt: skip


def assert_close(found, wanted, tolerance=2e-5):
    for x, y in zip(found, wanted, strict=True):
        assert np.linalg.norm(x - y) < tolerance * np.linalg.norm(y)


@pytest.mark.parametrize(("score_mod", "mask_mod"), SMOOTH)
def test_gradients_are_those_of_float64(score_mod, mask_mod):
    wanted = gradients(score_mod, mask_mod, "reference")
    assert_close(gradients(score_mod, mask_mod), wanted)


@pytest.mark.parametrize(("score_mod", "mask_mod"), SMOOTH)
def test_gradients_by_bfloat16_products(score_mod, mask_mod):
    """Of float32 arrays, rounded first. By float32 products where the CPU multiplies no bfloat16."""
    wanted = gradients(score_mod, mask_mod, "reference", precision="bfloat16")
    assert_close(gradients(score_mod, mask_mod, precision="bfloat16"), wanted, 1e-2)


@pytest.mark.slow
def test_the_portable_kernel_and_built_in_options():
    options = {"softcap": 3.0, "is_causal": True}
    wanted = gradients(g.relative_bias, g.dilated, "reference", **options)
    for impl in ("auto", "portable"):
        assert_close(gradients(g.relative_bias, g.dilated, impl, **options), wanted)


def test_an_infinite_slope_of_a_hidden_score_is_not_met():
    def steep(score, b, h, q, k):
        return score / (q - k + 1.0)  # infinite at the first key that is_causal hides

    def guarded(score, b, h, q, k):
        return score / np.where(q >= k, q - k + 1.0, 1.0)

    assert_close(gradients(steep, None, is_causal=True), gradients(guarded, None, is_causal=True))


CHOICES = {  # the function, and its slope at scores s: 0 where a number was taken instead of the score
    "relu": (lambda s, b, h, q, k: np.sqrt(np.maximum(s, 0.0)), lambda s, q, k: s > 0),
    "where": (lambda s, b, h, q, k: np.sqrt(np.where(s > 0, s, 0.0)), lambda s, q, k: s > 0),
    "product": (
        lambda s, b, h, q, k: np.sqrt(np.where((s > 0) & (k % 2 == 0), s, 0.0) * 2.0 / 2.0),
        lambda s, q, k: (s > 0) & (k % 2 == 0),
    ),
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_infinite_slope_of_a_number_that_was_taken_instead_is_0(name):
    """As PyTorch has it, whose chain rule ends at the choice."""
    score_mod, taken = CHOICES[name]
    q, k, v = (x[:1, :1, :40].astype(np.float32) for x in g.operands(23))
    out, lse = numflash.flex_attention(q, k, v, score_mod, return_lse=True)
    grad = np.random.default_rng(3).standard_normal(out.shape).astype(np.float32)
    dq, dk, _ = numflash.attention_backward(grad, q, k, v, out, lse, score_mod=score_mod)
    q, k, v, grad = (x[0, 0].astype(np.float64) for x in (q, k, v, grad))
    scale, rows = q.shape[1] ** -0.5, np.arange(40)
    scores = q @ k.T * scale
    through = taken(scores, rows[:, None], rows)
    bent = np.sqrt(np.where(through, scores, 0))
    p = np.exp(bent) / np.exp(bent).sum(1, keepdims=True)
    dp = grad @ v.T
    ds = p * (dp - (p * dp).sum(1, keepdims=True))
    ds = np.where(through, ds * 0.5 / np.where(through, bent, 1), 0) * scale
    assert_close((dq[0, 0], dk[0, 0]), (ds @ k, ds.T @ q), 1e-4)


def test_a_power_whose_exponent_or_base_is_a_number():
    """log of a score below 0 is NaN, 0 to a power below 0 infinite: neither is met where nothing changes."""
    s = np.array([-2.0, -0.5, 0.5, 2.0])
    arguments = {"score": s, "b": 0, "h": 0, "q": 0, "k": 0}
    for score_mod, wanted in (
        (lambda s, b, h, q, k: s ** np.clip(s, -1.0, 1.0), [-0.25, np.nan, None, 1.0]),
        (lambda s, b, h, q, k: np.where(s > 0, s, 0.0) ** (s + 2.25), [0.0, 0.0, None, None]),
    ):
        recorded = prepare(score_mod, None)
        (found,) = evaluate(recorded.graph, (recorded.slope,), arguments)
        for x, y in zip(found, wanted, strict=True):
            assert y is None or x == y or (np.isnan(x) and np.isnan(y))


def test_gradients_are_those_of_torch():
    torch = pytest.importorskip("torch")
    q, k, v = g.operands(21)
    grad = np.random.default_rng(2).standard_normal(q.shape).astype(np.float32)

    def score_mod(score, b, h, q, k):
        bent = torch.nn.functional.silu(score) + torch.sqrt(torch.abs(score) + 1) + score**2 / 9
        return torch.where(q > k, bent, torch.clamp(score, -0.5, 0.5) * torch.exp(-score / 5))

    out, lse = numflash.flex_attention(q, k, v, score_mod, return_lse=True)
    found = numflash.attention_backward(grad, q, k, v, out, lse, score_mod=score_mod)
    leaves = [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in (q, k, v)]
    scores = leaves[0] @ leaves[1].transpose(-1, -2) / np.sqrt(g.D)
    _, _, i, j = (torch.as_tensor(x) for x in g.indices())
    weights = torch.softmax(score_mod(scores, 0, 0, i, j), -1)
    (weights @ leaves[2]).backward(torch.tensor(grad, dtype=torch.float64))
    assert_close(found, [x.grad.numpy() for x in leaves])


@pytest.mark.parametrize("name", ["score_mod", "block_mask"])
def test_an_array_in_the_place_of_a_function(name):
    q, k, v = g.operands(22)
    out, lse = numflash.flex_attention(q, k, v, return_lse=True)
    with pytest.raises(ArgumentTypeError, match=f"{name}: got ndarray"):
        numflash.attention_backward(out, q, k, v, out, lse, **{name: np.ones((2, 2))})


@pytest.mark.slow
def test_huge_scores_are_differentiated_in_float64():
    def huge(score, b, h, q, k):
        return score * 1e9

    found = gradients(huge, g.causal)
    wanted = gradients(huge, g.causal, "reference")
    assert_close(found[2:], wanted[2:])
    assert all(np.isfinite(x).all() for x in found)
