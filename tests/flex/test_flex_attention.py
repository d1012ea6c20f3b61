"""flex_attention against float64 and against PyTorch's eager flex_attention."""

import functools
import warnings

import numba
import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError

F = np.float32
CLOSE = {"float32": 4e-6, "bfloat16": 4e-2, "float16": 4e-3}


def block_mask(mask_mod, length=g.L, s=g.S, size=32):
    return numflash.create_block_mask(mask_mod, g.B, g.H, length, s, BLOCK_SIZE=size)


def close(found, wanted, precision="float32"):
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    assert np.abs(out.astype(np.float64) - wanted_out).max() < CLOSE[precision]
    assert np.array_equal(np.isinf(lse), np.isinf(wanted_lse))
    seen = np.isfinite(wanted_lse)
    assert np.abs(lse[seen] - wanted_lse[seen]).max(initial=0) < 3 * CLOSE[precision]


@pytest.mark.parametrize("score_mod", g.SCORES, ids=lambda f: f.__name__)
def test_score_functions_give_what_float64_gives(score_mod):
    q, k, v = g.operands()
    close(
        numflash.flex_attention(q, k, v, score_mod, return_lse=True), g.oracle(q, k, v, score_mod)
    )


@pytest.mark.parametrize("mask_mod", g.MASKS, ids=lambda f: f.__name__)
def test_mask_functions_give_what_float64_gives(mask_mod):
    q, k, v = g.operands(1, hkv=2)
    found = numflash.flex_attention(
        q, k, v, g.alibi, block_mask(mask_mod), enable_gqa=True, return_lse=True
    )
    close(found, g.oracle(q, k, v, g.alibi, mask_mod))


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_half_precisions(precision):
    q, k, v = g.operands(2)
    found = numflash.flex_attention(
        q, k, v, g.relative_bias, block_mask(g.documents), return_lse=True, precision=precision
    )
    close(found, g.oracle(q, k, v, g.relative_bias, g.documents), precision)


@pytest.mark.parametrize("impl", ["portable", "reference"])
def test_every_implementation_agrees(impl):
    q, k, v = g.operands(3, length=40, s=70)
    mask = block_mask(g.local_and_sinks, 40, 70, (16, 8))
    found = numflash.flex_attention(q, k, v, g.softcap, mask, return_lse=True, impl=impl)
    close(found, g.oracle(q, k, v, g.softcap, g.local_and_sinks))


@pytest.mark.parametrize("size", [(1, 7), (48, 20), 300])
def test_any_block_size(size):
    q, k, v = g.operands(4, length=100)
    mask = block_mask(g.sliding_window, 100, size=size)
    found = numflash.flex_attention(q, k, v, None, mask, return_lse=True)
    close(found, g.oracle(q, k, v, None, g.sliding_window))


def test_built_in_options_follow_the_functions():
    q, k, v = g.operands(5)
    mask = block_mask(g.dilated)
    found = numflash.flex_attention(
        q,
        k,
        v,
        g.relative_bias,
        mask,
        is_causal=True,
        window=(40, None),
        softcap=4.0,
        return_lse=True,
    )

    def capped(score, *at):
        return 4.0 * np.tanh(g.relative_bias(score, *at) / 4.0)

    _, _, i, j = g.indices()
    close(found, g.oracle(q, k, v, capped, g.dilated, hidden=(j > i) | (j < i - 40)))


def test_equal_bits_at_one_and_two_threads():
    q, k, v = g.operands(6)
    run = functools.partial(numflash.flex_attention, q, k, v, g.t5_bias, block_mask(g.documents))
    threads = numba.get_num_threads()
    found = []
    try:
        for n in (1, min(2, numba.config.NUMBA_NUM_THREADS)):
            numba.set_num_threads(n)
            found.append(run(return_lse=True))
    finally:
        numba.set_num_threads(threads)
    assert all(np.array_equal(x, y) for x, y in zip(*found, strict=True))


def test_hidden_blocks_send_no_row_to_float64(monkeypatch):
    from numflash.cpu import launch_float

    def refuse(*args):
        raise AssertionError("rows are computed again in float64")

    monkeypatch.setattr(launch_float, "run_rows", refuse)
    q, k, v = g.operands(15, length=1000, s=1000)

    def window(b, h, q, k):
        return (q >= k) & (q - k < 256) & (q % 97 != 5)

    for size in (128, 32):
        numflash.flex_attention(q, k, v, None, block_mask(window, 1000, 1000, size))


def test_unseen_nan_stays_out_and_huge_scores_are_kept():
    q, k, v = g.operands(7)
    k[:, :, 120:], v[:, :, 120:] = np.nan, np.inf

    def seen(b, h, q, k):
        return k < 120

    found = numflash.flex_attention(q, k, v, g.alibi, block_mask(seen), return_lse=True)
    close(found, g.oracle(q, k[:, :, :120], v[:, :, :120], g.alibi))
    q, k, v = g.operands(8)

    def huge(score, b, h, q, k):
        return score * 1e37

    out = numflash.flex_attention(q, k, v, huge)
    assert np.abs(out - g.oracle(q, k, v, huge)[0]).max() < 1e-6


LOWEST = float(np.finfo(np.float32).min)
BIAS = np.where(np.arange(g.S) < 9, F(LOWEST), F(0)).astype(np.float32)


@pytest.mark.parametrize(
    ("kind", "impl"),
    [
        *((kind, impl) for kind in ("number", "array") for impl in ("auto", "portable")),
        ("number", "cuda-emulator"),
        *(  # kernels of their own
            pytest.param(*x, marks=pytest.mark.slow)
            for x in (
                ("array", "cuda-emulator"),
                ("number", "cuda-emulator:sm_90a"),
                ("array", "cuda-emulator:sm_90a"),
            )
        ),
    ],
)
def test_the_lowest_number_hides_no_key(kind, impl):
    """A row of nothing else is the mean of all values, as in PyTorch; -inf gives 0."""
    bias = BIAS if kind == "array" else None
    q, k, v = g.operands(8)
    precision = "float16" if "cuda" in impl else "float32"

    def lowest(score, b, h, q, k):
        return np.where((k <= q) & (k >= 9), score, LOWEST) if bias is None else score + bias[k]

    exact = numflash.flex_attention(q, k, v, lowest, impl="reference")
    kept = q[:, :, :9], k[:, :, :9], v[:, :, :9]  # with the bias nothing but these keys
    if bias is None:
        np.testing.assert_allclose(exact[:, :, :9].sum(), 9 * v.mean(2).sum(), rtol=1e-5)
    else:
        lowest_alone = numflash.flex_attention(*kept, lowest, impl=impl, precision=precision)
        tied = np.broadcast_to(v[:, :, :9].mean(2, keepdims=True), lowest_alone.shape)
        assert np.abs(lowest_alone - tied).max() < CLOSE[precision]
    options = [{"precision": precision}] + [{"precision": "int8"}] * (impl == "auto")
    for chosen in options:
        out = numflash.flex_attention(q, k, v, lowest, impl=impl, **chosen)
        assert np.abs(out - exact).max() < CLOSE.get(chosen["precision"], 0.1)
    if impl == "auto":
        out, lse = numflash.flex_attention(q, k, v, lowest, return_lse=True)
        found = numflash.attention_backward(out, q, k, v, out, lse, score_mod=lowest)
        wanted = numflash.attention_backward(
            out, q, k, v, out, lse, score_mod=lowest, impl="reference"
        )
        for mine, right in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, right, atol=2e-5)


def test_a_captured_number_that_becomes_the_lowest():
    """Code for numbers far from the limit is not that for the lowest, in either order."""
    q, k, v = g.operands(8)

    def bent(low):
        return lambda s, b, h, i, j: np.where((j <= i) & (j >= 9), s + np.sin(i * 0.1), low)

    def straight(low):
        return lambda s, b, h, i, j: np.where((j <= i) & (j >= 9), s + np.cos(i * 0.1), low)

    for made, lows in ((bent, (-3.25, LOWEST, -2.5)), (straight, (LOWEST, -3.25, LOWEST))):
        for low in lows:
            exact = numflash.flex_attention(q, k, v, made(low), impl="reference")
            assert np.abs(numflash.flex_attention(q, k, v, made(low)) - exact).max() < 4e-6


def test_captured_arrays_and_numbers_are_read_anew():
    q, k, v = g.operands(9)
    table = np.zeros(g.S, np.float64)
    held = {"factor": 1.0}

    def biased(score, b, h, q, k):
        return score * held["factor"] + factor * table[k]

    for value in (1.0, 0.5):
        factor = value
        for held["factor"] in (1.0, 0.25):
            table[:50] -= 1.0  # in place
            found = numflash.flex_attention(q, k, v, biased, return_lse=True)
            close(found, g.oracle(q, k, v, biased))


def test_a_changed_number_compiles_nothing():
    from numflash.flex import machine

    q, k, v = g.operands(10, length=8, s=8)

    def compiled_with(factor):
        numflash.flex_attention(q, k, v, lambda score, b, h, q, k: score * factor + 0.125)
        return len(machine._known)

    assert compiled_with(0.25) == compiled_with(0.75) == compiled_with(3.0)


def test_layouts_dimensions_and_kinds_come_back():
    q, k, v = (x[0] for x in g.operands(11))
    out, lse = numflash.flex_attention(q, k, v, g.alibi, return_lse=True)
    assert out.shape == q.shape
    assert lse.shape == q.shape[:2]
    turned = numflash.flex_attention(
        *(x.swapaxes(0, 1)[None] for x in (q, k, v)), g.alibi, layout="blhd"
    )
    assert np.array_equal(turned[0].swapaxes(0, 1), out)


def test_nothing_to_compute():
    q, k, v = g.operands(12)
    empty = numflash.flex_attention(q[:, :, :0], k, v, g.alibi)
    assert empty.shape == (g.B, g.H, 0, g.D)


def test_errors_name_the_argument():
    q, k, v = g.operands(13)
    with pytest.raises(ArgumentError, match="block_mask: got one for"):
        numflash.flex_attention(q, k, v, None, block_mask(g.causal, 64, 64))
    with pytest.raises(ArgumentTypeError, match="block_mask: got function"):
        numflash.flex_attention(q, k, v, None, g.causal)
    with pytest.raises(ArgumentTypeError, match=r"mask_mod: .*create_block_mask"):
        numflash.flex_attention(q, k, v, mask_mod=g.causal)
    with pytest.raises(ArgumentTypeError, match="score_mod: got int"):
        numflash.flex_attention(q, k, v, 3)
    with pytest.raises(ArgumentTypeError, match="dropout_p: flex_attention does not take it"):
        numflash.flex_attention(q, k, v, dropout_p=0.0)
    with pytest.raises(UnsupportedError, match="cuda-emulator"):
        numflash.flex_attention(q, k, v, g.alibi, precision="int8", impl="cuda-emulator")
    short = np.zeros(10, np.float32)
    with pytest.raises(ArgumentError, match=r"shape \(10,\) is indexed by k"):
        numflash.flex_attention(q, k, v, lambda score, b, h, q, k: score + short[k])


def test_torch_functions_against_torch():
    torch = pytest.importorskip("torch")
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    q, k, v = (torch.from_numpy(x) for x in g.operands(14, hkv=2, length=70, s=90))
    documents = torch.arange(90) // 20
    table = torch.randn(g.H, 200, dtype=torch.bfloat16)
    lengths = torch.tensor([60, 90])

    def mask_mod(b, h, q, k):
        return ((documents[q] == documents[k]) | (k < 7)) & (k < lengths[b])

    def score_mod(score, b, h, q, k):
        return torch.nn.functional.gelu(torch.tanh(score) * 3 + table[h, q - k + 90].float())

    theirs = flex.create_block_mask(mask_mod, g.B, None, 70, 90, device="cpu", BLOCK_SIZE=16)
    ours = numflash.create_block_mask(mask_mod, g.B, None, 70, 90, BLOCK_SIZE=16)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = flex.flex_attention(q, k, v, score_mod, theirs, enable_gqa=True, return_lse=True)
    found = numflash.flex_attention(q, k, v, score_mod, ours, enable_gqa=True, return_lse=True)
    assert isinstance(found[0], torch.Tensor)
    assert all(torch.allclose(x, y, atol=3e-6, rtol=0) for x, y in zip(found, wanted, strict=True))


def test_sequences_packed_behind_each_other():
    cu_q = np.array([0, 40, 41, 131])
    cu_k = np.array([0, 60, 90, 150])
    made = np.random.default_rng(16)
    q = made.standard_normal((131, g.H, g.D)).astype(np.float32)
    k, v = (made.standard_normal((150, 2, g.D)).astype(np.float32) for _ in "kv")
    own = np.array([0.0, 0.5, -0.25])

    def score_mod(score, b, h, q, k):
        return score + own[b] * (q - k) * 0.1

    def mask_mod(b, h, q, k):
        return (k - q < 20) & ((k + b) % 3 > 0)

    out, lse = numflash.attention_varlen(
        q, k, v, cu_q, cu_k, enable_gqa=True, score_mod=score_mod, mask_mod=mask_mod, return_lse=True
    )  # fmt: skip
    for n in range(3):
        rows = slice(cu_q[n], cu_q[n + 1])
        keys = slice(cu_k[n], cu_k[n + 1])
        one = [x[None].swapaxes(1, 2) for x in (q[rows], k[keys], v[keys])]
        at = [np.array([[[[n]]]]), *g.indices(one[0].shape[2], one[1].shape[2])[1:]]
        wanted = g.oracle(
            *one, lambda s, *_, at=at: score_mod(s, *at), lambda *_, at=at: mask_mod(*at)
        )
        found = out[rows].swapaxes(0, 1)[None], lse[rows].swapaxes(0, 1)[None]
        close(found, wanted)
