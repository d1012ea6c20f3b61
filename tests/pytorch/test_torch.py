"""numflash.torch: PyTorch's function, its gradients, its compiler, and whole models routed."""
import doctest
import math
import re
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from oracles import naive

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch.nn.attention.bias import causal_lower_right, causal_upper_left  # noqa: E402

import numflash.torch as nt  # noqa: E402
from numflash.cpu import launch  # noqa: E402
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError  # noqa: E402

SDPA = torch.nn.functional.scaled_dot_product_attention
CAUSAL_AND_MASK = {"is_causal": True, "attn_mask": torch.ones(5, 7, dtype=torch.bool)}


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(b=2, h=4, l=5, s=7, d=8, dv=None, hkv=None, dtype=torch.float32):
    shapes = (b, h, l, d), (b, hkv or h, s, d), (b, hkv or h, s, dv or d)
    return tuple(draw(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes))


Q, K, V = qkv()
KEEP = torch.rand(2, 4, 5, 7, generator=torch.Generator().manual_seed(3)) > 0.4
BIAS = draw(2, 4, 5, 7, seed=4)


def exact(q, k, v, attn_mask=None, **options):
    """PyTorch's own, in float64."""
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        attn_mask = attn_mask.double()
    return SDPA(q.double(), k.double(), v.double(), attn_mask, **options)


# ---- values --------------------------------------------------------------------------------------------------------------------
def test_the_docstring_of_the_module():
    assert doctest.testmod(nt).failed == 0


def test_the_examples_of_the_guide():
    text = Path(__file__).parents[2].joinpath("docs", "pytorch.md").read_text()
    space, examples = {}, re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(examples) == 3
    for code in examples[:None if find_spec("transformers") else 2]:
        exec(code, space)
    assert space["out"].shape == (1, 8, 128, 64) and space["q"].grad.shape == (1, 8, 128, 64)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-6), ("float16", 2e-3), ("bfloat16", 2e-2)])
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"scale": -1.0}, {"attn_mask": KEEP}, {"attn_mask": KEEP[0, 0]}, {"attn_mask": BIAS},
    {"attn_mask": KEEP[:, :1, :, :1]}, {"attn_mask": BIAS[:1, :, :1]}], ids=lambda o: "-".join(o) or "plain")
def test_against_float64(dtype, tolerance, options):
    q, k, v = (x.to(getattr(torch, dtype)) for x in (Q, K, V))
    out = nt.scaled_dot_product_attention(q, k, v, **options)
    assert out.dtype == q.dtype
    want, _ = naive(*(x.double().numpy() for x in (q, k, v)),
                    **{n: x.numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()})
    np.testing.assert_allclose(out.double().numpy(), want, atol=tolerance)


SHAPES = [  # query, key, value, enable_gqa
    ((5, 8), (7, 8), (7, 3), False), ((4, 5, 8), (4, 7, 8), (4, 7, 8), False), ((2, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8), False),
    ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8), False), ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), False),
    ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), False), ((2, 4, 5, 8), (1, 4, 7, 8), (2, 1, 7, 8), False),
    ((2, 4, 5, 8), (4, 7, 8), (7, 8), False), ((3, 2, 4, 5, 8), (3, 2, 4, 7, 8), (3, 2, 4, 7, 8), False),
    ((3, 2, 4, 5, 8), (1, 2, 4, 7, 8), (2, 4, 7, 8), False), ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), True),
    ((2, 4, 5, 8), (2, 2, 7, 8), (2, 1, 7, 8), True), ((4, 5, 8), (2, 7, 8), (2, 7, 8), True),
    ((2, 4, 5, 8), (1, 2, 7, 8), (1, 2, 7, 8), True), ((3, 2, 4, 5, 8), (3, 2, 2, 7, 8), (3, 2, 2, 7, 3), True)]


@pytest.mark.parametrize(("q", "k", "v", "gqa"), SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_shapes_broadcast_as_pytorch_has_them(q, k, v, gqa, masked):
    q, k, v = draw(*q), draw(*k, seed=1), draw(*v, seed=2)
    mask = KEEP[0, 0] if masked else None
    out = nt.scaled_dot_product_attention(q, k, v, mask, enable_gqa=gqa)
    want = exact(q, k, v, mask, enable_gqa=gqa)
    assert out.shape == want.shape
    torch.testing.assert_close(out.double(), want, atol=1e-6, rtol=0)


def test_a_mask_over_five_dimensions():
    q, k, v = draw(3, 2, 4, 5, 8), draw(3, 2, 4, 7, 8, seed=1), draw(3, 2, 4, 7, 8, seed=2)
    for mask in (KEEP, KEEP[None, :, :1], torch.stack([KEEP, ~KEEP, KEEP])):
        torch.testing.assert_close(nt.scaled_dot_product_attention(q, k, v, mask).double(), exact(q, k, v, mask), atol=1e-6, rtol=0)


@pytest.mark.parametrize("cut", [
    lambda q, k, v: (q[:, :, :0], k, v), lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), lambda q, k, v: (q[:0], k[:0], v[:0]),
    lambda q, k, v: (q[:, :0], k[:, :0], v[:, :0]), lambda q, k, v: (q, k, v[..., :0]),
    lambda q, k, v: (q[..., :0], k[..., :0], v)])
def test_sizes_of_zero(cut):
    arrays = [x.clone().requires_grad_() for x in cut(Q, K, V)]
    for causal in (True, False):
        out, want = nt.scaled_dot_product_attention(*arrays, is_causal=causal), SDPA(*arrays, is_causal=causal)
        assert out.shape == want.shape
        torch.testing.assert_close(out, want)
    out.sum().backward()
    assert arrays[0].grad.shape == arrays[0].shape


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
    torch.testing.assert_close(nt.scaled_dot_product_attention(Q, k, v, seen.expand(5, 7)),
                               SDPA(Q, K[:, :, seen], V[:, :, seen]), atol=1e-6, rtol=0)


def test_rows_that_see_nothing_are_zero():
    mask = KEEP.clone()
    mask[:, :, 2] = False
    for m in (mask, torch.zeros_like(BIAS).masked_fill(~mask, -math.inf)):
        out = nt.scaled_dot_product_attention(Q, K, V, m)
        assert (out[:, :, 2] == 0).all()
        torch.testing.assert_close(out, SDPA(Q, K, V, m), atol=1e-6, rtol=0)


def test_trailing_padding_becomes_key_lengths(monkeypatch):
    """A mask of one row for all queries: with the diagonal at the front nothing changes, at the back the mask must stay one."""
    seen, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda problem, **options: seen.append(problem) or run(problem, **options))
    lengths = torch.tensor([7, 4])
    mask = (torch.arange(7) < lengths[:, None])[:, None, None].expand(2, 4, 5, 7)
    holes = mask.clone()
    holes[1, :, :, 1] = False
    for attn_mask, becomes, options in (
            (mask, True, {}), (mask, True, {"is_causal": True}), (mask, False, {"is_causal": True, "alignment": "lower_right"}),
            (mask.contiguous(), False, {}), (holes[:, :1, :1], False, {}), (mask[1:, :1, :1], False, {})):
        out = nt.attention(Q, K, V, attn_mask, **options)
        assert (seen[-1].mask is None) == becomes
        want, _ = naive(Q, K, V, attn_mask.expand(2, 4, 5, 7).numpy(), **options)
        np.testing.assert_allclose(out, want, atol=1e-6)


def test_options_beyond_pytorch():
    options = {"window": (2, 1), "alignment": "lower_right", "softcap": 3.0}
    tensors = {"key_lengths": torch.tensor([7, 4]), "alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.0]),
               "sinks": torch.tensor([0.0, 1.0, -1.0, 0.5])}
    out, lse = nt.attention(Q, K, V, return_lse=True, **options, **tensors)
    want, want_lse = naive(Q, K, V, **options, **{n: x.numpy() for n, x in tensors.items()})
    np.testing.assert_allclose(out, want, atol=1e-6)
    np.testing.assert_allclose(lse, want_lse, atol=1e-5)


def test_int8():
    q, k, v = qkv(1, 4, 200, 200, 64)
    out = nt.scaled_dot_product_attention(q, k, v, precision="int8")
    assert out.dtype == torch.float32
    error = (out - exact(q, k, v)).abs().mean() / exact(q, k, v).abs().mean()
    assert 0.001 < error < 0.02                          # not the float kernel, and within the integer pipeline's budget


# ---- refusals ------------------------------------------------------------------------------------------------------------------
BAD = {
    "causal and mask": ((Q, K, V), CAUSAL_AND_MASK, "attn_mask"),
    "one dimension": ((Q[0, 0, 0], K[0, 0], V[0, 0]), {}, "query"),
    "heads": ((Q, K[:, :2], V[:, :2]), {}, "enable_gqa"),
    "heads that do not divide": ((draw(2, 5, 5, 8), K[:, :2], V[:, :2]), {"enable_gqa": True}, "divisor"),
    "batches": ((Q, draw(3, 4, 7, 8), draw(3, 4, 7, 8)), {}, "shapes"),
    "head dimensions": ((Q, K[..., :3], V), {}, "head_dim"),
    "dtypes": ((Q, K.double(), V), {}, "key"),
    "integers": ((Q.int(), K.int(), V.int()), {}, "dtype"),
    "mask of another dtype": ((Q, K, V), {"attn_mask": BIAS.double()}, "attn_mask"),
    "integer mask": ((Q, K, V), {"attn_mask": KEEP.int()}, "attn_mask"),
    "mask of another shape": ((Q, K, V), {"attn_mask": KEEP[..., :6]}, "attn_mask"),
    "mask larger than the result": ((Q[:1], K[:1], V[:1]), {"attn_mask": KEEP}, "attn_mask"),
    "device": ((Q.to("meta"), K, V), {}, "on cpu"),
    "sparse": ((Q.to_sparse(), K, V), {}, "layout"),
}


@pytest.mark.parametrize("case", BAD)
def test_errors_where_pytorch_has_them(case):
    arrays, options, word = BAD[case]
    with pytest.raises(RuntimeError), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        SDPA(*arrays, **options)
    with pytest.raises(RuntimeError, match=word) as caught:
        nt.scaled_dot_product_attention(*arrays, **options)
    assert isinstance(caught.value, nt.SdpaError)


@pytest.mark.parametrize(("change", "word"), [
    ({"dropout_p": 0.1}, "dropout_p"), ({"query": Q.double(), "key": K.double(), "value": V.double()}, "float64"),
    ({"attn_mask": BIAS.clone().requires_grad_()}, "attn_mask"), ({"precision": "int4"}, "precision"),
    ({"precision": "int8", "key": K.clone().requires_grad_()}, "int8"), ({"value": V[:, :, :3]}, "value")])
def test_what_pytorch_takes_and_numflash_refuses(change, word):
    with pytest.raises(nt.SdpaError, match=word):
        nt.scaled_dot_product_attention(**{"query": Q, "key": K, "value": V, **change})


def test_what_is_no_tensor():
    with pytest.raises(ArgumentTypeError, match="query"):
        nt.scaled_dot_product_attention(Q.tolist(), K, V)
    with pytest.raises(TypeError):
        nt.scaled_dot_product_attention(Q, K, V, None, 0.0, False, None)         # scale is keyword-only, as PyTorch has it


@pytest.mark.parametrize("name", ["attn_mask", "alibi_slopes", "sinks"])
def test_no_gradient_is_lost_silently(name):
    x = (BIAS if name == "attn_mask" else torch.zeros(4)).clone().requires_grad_()
    with pytest.raises(ArgumentError, match=f"{name}.*requires grad"):
        nt.attention(Q, K, V, **{name: x})
    with torch.no_grad():
        nt.attention(Q, K, V, **{name: x})


# ---- no copies, threads --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_kernels_read_the_tensors_themselves(monkeypatch, dtype):
    """Also expanded and transposed ones, and masks."""
    seen, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda problem, **options: seen.append(problem) or run(problem, **options))
    q, k, v = (x.to(dtype) for x in (Q.transpose(1, 2).contiguous().transpose(1, 2), K[:1], V[:1]))
    nt.scaled_dot_product_attention(q, k, v, KEEP)
    for taken, given in ((seen[0].query, q), (seen[0].key, k), (seen[0].value, v), (seen[0].mask, KEEP)):
        assert taken.ctypes.data == given.data_ptr() and taken.itemsize == given.element_size()
    assert seen[0].query.strides == tuple(n * q.element_size() for n in q.stride()) and seen[0].key.strides[0] == 0


def test_the_result_is_the_array_that_the_kernel_wrote(monkeypatch):
    written, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda problem, **options: written.append(run(problem, **options)) or written[0])
    out, lse = nt.attention(Q, K, V, return_lse=True)
    assert out.data_ptr() == written[0][0].ctypes.data and lse.data_ptr() == written[0][1].ctypes.data


def test_threads_follow_pytorch(monkeypatch):
    import numba
    seen, run, outer = [], launch.run, numba.get_num_threads()
    monkeypatch.setattr(launch, "run", lambda problem, **options: seen.append(numba.get_num_threads()) or run(problem, **options))
    for n in (1, 2, 3):
        torch.set_num_threads(n)
        nt.scaled_dot_product_attention(Q, K, V)
    most = nt.threads.most()
    assert seen == [min(n, most) for n in (1, 2, 3)] and numba.get_num_threads() == outer


def test_threads_of_pytorch_stay_as_they_are():
    """Numba's first parallel kernel of a process would reset them (P29)."""
    code = ("import torch, numflash.torch; torch.set_num_threads(1); q = torch.randn(1, 1, 8, 16)\n"
            "numflash.torch.scaled_dot_product_attention(q, q, q); assert torch.get_num_threads() == 1")
    subprocess.run([sys.executable, "-c", code], check=True)


def test_import_numflash_leaves_torch_alone():
    code = "import sys, numflash; numflash.attention; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


# ---- PyTorch's machinery -------------------------------------------------------------------------------------------------------
DEFAULTS = {"attn_mask": None, "is_causal": False, "scale": None, "enable_gqa": False, "left": None, "right": None,
            "alignment": "upper_left", "key_lengths": None, "softcap": 0.0, "alibi_slopes": None, "sinks": None, "precision": None,
            "pv": None, "impl": "auto"}


@pytest.mark.parametrize("options", [
    {}, {"is_causal": True, "scale": 0.5}, {"attn_mask": KEEP}, {"attn_mask": BIAS}, {"left": 2, "right": 1, "softcap": 2.0},
    {"key_lengths": torch.tensor([7, 3]), "sinks": torch.zeros(4)}, {"precision": "int8"}], ids=lambda o: "-".join(o) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_forward_pass(options, dtype):
    arrays = (x.to(dtype) for x in (Q, K, V))
    torch.library.opcheck(torch.ops.numflash.attention.default, (*arrays, *{**DEFAULTS, **options}.values()))


def test_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, want = nt.scaled_dot_product_attention(Q, K.bfloat16(), V, BIAS), SDPA(Q, K.bfloat16(), V, BIAS)
    assert out.dtype == want.dtype == torch.bfloat16
    torch.testing.assert_close(out, want, atol=2e-2, rtol=0)


def test_compile_in_one_graph():
    def model(q, k, v, mask):
        return nt.scaled_dot_product_attention(q * 2, k, v, mask) + nt.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, K, V, KEEP), model(Q, K, V, KEEP))
    longer = qkv(l=9, s=11)                              # another length: the same function, perhaps compiled for any length
    torch.testing.assert_close(compiled(*longer, None), model(*longer, None))


# ---- routing -------------------------------------------------------------------------------------------------------------------
def test_use_nests_and_ends():
    with nt.use() as outer:
        SDPA(Q, K, V)
        with nt.use(precision="int8") as inner:
            SDPA(Q, K, V)
        SDPA(Q, K, V)
        with pytest.raises(ZeroDivisionError), nt.use() as failed:
            SDPA(Q, K, V)
            1 / 0  # noqa: B018
        SDPA(Q, K, V)
    SDPA(Q, K, V)
    assert (outer.calls, inner.calls, failed.calls) == (3, 1, 1)


def test_use_holds_for_its_own_thread():
    inside, leave, counts = threading.Event(), threading.Event(), []

    def other():
        with nt.use() as mine:
            inside.set()
            leave.wait(30)
            SDPA(Q, K, V)
        counts.append(mine.calls)

    thread = threading.Thread(target=other)
    thread.start()
    assert inside.wait(30)
    with nt.use() as here:
        SDPA(Q, K, V)
        leave.set()
        thread.join()
    assert here.calls == 1 and counts == [1]


def test_use_raises_or_falls_back():
    q = Q.double()
    want = SDPA(q, q, q)
    with nt.use(), pytest.raises(nt.SdpaError, match="float64"):
        SDPA(q, q, q)
    with nt.use(fallback=True) as routed:
        for _ in range(2):
            torch.testing.assert_close(SDPA(q, q, q), want)
        SDPA(Q, K, V)
    assert routed.calls == 1 and list(routed.fallbacks.values()) == [2] and "float64" in next(iter(routed.fallbacks))


@pytest.mark.parametrize("fallback", [False, True])
def test_a_real_mistake_is_an_error_either_way(fallback):
    with nt.use(fallback=fallback), pytest.raises(RuntimeError):
        SDPA(Q, K[..., :3], V)


@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention(grad):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x, pad = draw(2, 30, 64), torch.arange(30) >= torch.tensor([[30], [21]])
    with torch.set_grad_enabled(grad):
        want = model(x, x, x, key_padding_mask=pad, need_weights=False)[0]
        with nt.use() as routed:
            out = model(x, x, x, key_padding_mask=pad, need_weights=False)[0]
            model(x, x, x, need_weights=True)                  # returns the weights, so there is nothing to route
    assert routed.calls == 1
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)


def test_transformer_encoder_and_decoder():
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2).eval()
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(64, 4, batch_first=True), 2).eval()
    x, y, causal = draw(2, 30, 64), draw(2, 20, 64, seed=1), torch.nn.Transformer.generate_square_subsequent_mask(20)
    with torch.no_grad():
        want = decoder(y, encoder(x), tgt_mask=causal, tgt_is_causal=True)
        with nt.use() as routed:
            out = decoder(y, encoder(x), tgt_mask=causal, tgt_is_causal=True)
    assert routed.calls == 6
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


def test_compiled_models_are_routed_inside_the_context_only():
    compiled = torch.compile(lambda q: SDPA(q * 1, q, q), fullgraph=True, backend="aot_eager")
    compiled(Q)
    with nt.use() as routed:
        out = compiled(Q)
    assert routed.calls == 1
    torch.testing.assert_close(out, SDPA(Q, Q, Q), atol=1e-6, rtol=0)


def test_multihead_attention_inside_the_compiler():
    """Traced, it breaks the graph and is routed outside of it; PyTorch's fused layer, which cannot be routed, is refused."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
    x, before = draw(2, 10, 64), torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            want = layer(x)
            torch.backends.mha.set_fastpath_enabled(False)
            with nt.use() as routed:
                torch.testing.assert_close(torch.compile(layer, backend="eager")(x), want, atol=1e-5, rtol=0)
            assert routed.calls == 1
            torch._dynamo.reset()
            torch.backends.mha.set_fastpath_enabled(True)
            compiled = torch.compile(layer, backend="eager")
            with nt.use(), pytest.raises(UnsupportedError, match=r"torch\.compile"):
                compiled(x)
            with nt.use(fallback=True):
                torch.testing.assert_close(compiled(x), want, atol=1e-5, rtol=0)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# ---- gradients -----------------------------------------------------------------------------------------------------------------
def gradients(function, arrays, **options):
    """Of a sum of outputs with uneven weights, with respect to each array."""
    arrays = [x.detach().clone().requires_grad_() for x in arrays]
    out = function(*arrays, **options)
    (out * draw(*out.shape, seed=9).to(out.dtype)).sum().backward()
    return [x.grad for x in arrays]


def assert_gradients(arrays, budget, **options):
    found = gradients(nt.scaled_dot_product_attention, arrays, **options)
    want = gradients(exact, [x.double() for x in arrays], **options)
    for name, x, mine, right in zip("qkv", arrays, found, want, strict=True):
        assert mine.dtype == x.dtype and mine.shape == x.shape
        assert (mine.double() - right).abs().max() <= budget * right.abs().max(), name


@pytest.mark.parametrize(("dtype", "budget"), [("float32", 2e-6), ("float16", 5e-3), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("options", [
    {}, {"is_causal": True}, {"scale": 0.3}, {"attn_mask": KEEP}, {"attn_mask": BIAS}], ids=lambda o: "-".join(o) or "plain")
def test_gradients_against_pytorch_in_float64(dtype, budget, options):
    assert_gradients([x.to(getattr(torch, dtype)) for x in (Q, K, V)], budget, **options)


@pytest.mark.parametrize(("q", "k", "v", "gqa"), SHAPES, ids=str)
def test_gradients_of_what_broadcasts(q, k, v, gqa):
    assert_gradients([draw(*q), draw(*k, seed=1), draw(*v, seed=2)], 2e-6, enable_gqa=gqa)


def test_gradients_of_tensors_as_models_have_them():
    """(B, L, H, D) in memory, and a gradient that is one number expanded."""
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in qkv(l=130, s=130, d=16))
    nt.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    doubles = [x.detach().double().requires_grad_() for x in (q, k, v)]
    SDPA(*doubles, is_causal=True).sum().backward()
    for mine, right in zip((q, k, v), doubles, strict=True):
        torch.testing.assert_close(mine.grad.double(), right.grad, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:Input #")
@pytest.mark.parametrize("options", [
    {"window": (2, 1), "alignment": "lower_right"}, {"softcap": 1.5}, {"key_lengths": torch.tensor([4, 2])},
    {"alibi_slopes": torch.tensor([0.5, 0.25])}, {"sinks": torch.tensor([0.5, -0.5])}, {"attn_mask": BIAS[:, :2, :3, :4]}],
    ids=lambda o: "-".join(o))
def test_gradcheck(options):
    """Finite differences in float32: steps of 0.01 and a hundredth of the largest gradient."""
    arrays = [x.requires_grad_() for x in qkv(2, 2, 3, 4, 3, dv=2)]
    assert torch.autograd.gradcheck(lambda q, k, v: nt.attention(q, k, v, **options), arrays, eps=1e-2, atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("options", [{}, {"attn_mask": BIAS, "softcap": 2.0}, {"left": 2, "key_lengths": torch.tensor([7, 3])}],
                         ids=lambda o: "-".join(o) or "plain")
def test_opcheck_with_gradients(options):
    arrays = [x.clone().requires_grad_() for x in (Q, K, V)]
    torch.library.opcheck(torch.ops.numflash.attention.default, (*arrays, *{**DEFAULTS, **options}.values()))


def test_opcheck_of_the_backward_pass():
    out, lse = nt.attention(Q, K, V, return_lse=True)
    arguments = torch.ones_like(out), Q, K, V, out, lse, *DEFAULTS.values()
    torch.library.opcheck(torch.ops.numflash.attention_backward.default, arguments)


def test_training_compiles_in_one_graph():
    def model(q, k, v):
        return nt.scaled_dot_product_attention(q * 2, k, v, is_causal=True) ** 2

    torch._dynamo.reset()
    eager = gradients(model, (Q, K, V))
    for mine, right in zip(gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), (Q, K, V)), eager, strict=True):
        torch.testing.assert_close(mine, right)


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
    for mine, again in zip(first, gradients(nt.scaled_dot_product_attention, arrays, is_causal=True), strict=True):
        assert torch.equal(mine, again)


def test_no_second_derivative_and_none_of_the_lse():
    q = Q.clone().requires_grad_()
    out, lse = nt.attention(q, K, V, return_lse=True)
    assert out.requires_grad and not lse.requires_grad
    (first,) = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(first.sum(), q)
    with pytest.raises(RuntimeError):
        torch.func.grad(lambda q: nt.scaled_dot_product_attention(q, K, V).sum())(Q)


# ---- CUDA, as far as it goes without a card ------------------------------------------------------------------------------------
def test_shapes_on_a_card_are_known_without_one():
    from torch._subclasses.fake_tensor import FakeTensorMode
    with FakeTensorMode():
        q, k = (torch.empty(shape, device="cuda", dtype=torch.float16) for shape in ((2, 4, 5, 64), (2, 2, 7, 64)))
        out, lse = nt.attention(q, k, k, enable_gqa=True, return_lse=True)
    assert out.device.type == "cuda" and out.shape == (2, 4, 5, 64) and out.dtype == torch.float16
    assert lse.shape == (2, 4, 5) and lse.dtype == torch.float32


def test_tensors_on_a_card_are_handed_on_as_they_are(monkeypatch):
    """A stand-in for a CUDA tensor reaches `numflash.attention` itself, and no CPU thread is set for it."""
    class OnCard:
        is_cuda, shape = True, (1, 1, 4, 16)

        def detach(self):
            return self

    q, seen = OnCard(), []
    monkeypatch.setattr(nt.api, "attention", lambda *tensors, **options: seen.append((tensors, options)))
    monkeypatch.setattr(nt.threads, "limit", None)
    nt._call(nt.api.attention, q, q, q, **nt._options(tuple({**DEFAULTS, "left": 3}.values()), q), return_lse=True)
    (tensors, options), = seen
    assert all(x is q for x in tensors) and options["window"] == (3, None) and options["return_lse"] and options["impl"] == "auto"
