"""numflash.torch under torch.compile: one graph, with gradients, and routed."""

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

from torch._dynamo.testing import CompileCounterWithBackend
from torch_cases import KEEP, SDPA, K, Q, V, draw, gradients, qkv

import numflash.torch as nt
from numflash.tiling.plan_cache import forget_plans


def test_compile_in_one_graph():
    def model(q, k, v, mask):
        return nt.scaled_dot_product_attention(q * 2, k, v, mask) + nt.scaled_dot_product_attention(
            q, k, v, is_causal=True
        )

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(Q, K, V, KEEP), model(Q, K, V, KEEP))
    longer = qkv(l=9, s=11)  # another length: the same function, perhaps compiled for any length
    torch.testing.assert_close(compiled(*longer, None), model(*longer, None))


def test_inductor_in_one_graph():
    """PyTorch's own code generator around the operator, forward and backward."""
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler as error:
        pytest.skip(f"Inductor needs a C++ compiler: {error}")

    def model(q, k, v):
        return torch.relu(nt.scaled_dot_product_attention(q * 2, k + 1, v, is_causal=True)) ** 2

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="inductor")
    for mine, right in zip(
        gradients(compiled, (Q, K, V)), gradients(model, (Q, K, V)), strict=True
    ):
        torch.testing.assert_close(mine, right, atol=1e-5, rtol=1e-5)


def test_training_compiles_in_one_graph():
    def model(q, k, v):
        return nt.scaled_dot_product_attention(q * 2, k, v, is_causal=True) ** 2

    torch._dynamo.reset()
    eager = gradients(model, (Q, K, V))
    for mine, right in zip(
        gradients(torch.compile(model, fullgraph=True, backend="aot_eager"), (Q, K, V)),
        eager,
        strict=True,
    ):
        torch.testing.assert_close(mine, right)


def test_numflashs_own_functions_are_graph_breaks():
    """On tensors too: what looks up their plans and kernels is not traced, whether there are some."""
    import numflash

    cache = numflash.KVCache(1, 2, 16, 100, "float32")
    q, rows = draw(1, 2, 32, 16), [draw(32, 2, 16) for _ in range(3)]
    calls = [
        lambda x: numflash.attention(x, x, x) * 2,
        lambda x: numflash.flex_attention(x, x, x, lambda s, b, h, i, j: s * 2) * 2,
        lambda x: numflash.attention_varlen(*rows, [0, 32], [0, 32]) * 2,
        lambda x: (cache.append(x, x), cache.decode(x[:, :, :1]), cache.truncate(0))[1] * 2,
        lambda x: (cache.step(x, x, x), cache.truncate(0))[0] * 2,
    ]
    for call in calls:
        torch._dynamo.reset()
        forget_plans()
        compiled = torch.compile(call, backend="eager")
        assert torch.equal(compiled(q), call(q))
        assert torch.equal(compiled(q), call(q))


def test_compiled_models_are_routed_inside_the_context_only():
    compiled = torch.compile(lambda q: SDPA(q * 1, q, q), fullgraph=True, backend="aot_eager")
    compiled(Q)
    with nt.use() as routed:
        out = compiled(Q)
    assert routed.calls == 1
    torch.testing.assert_close(out, SDPA(Q, Q, Q), atol=1e-6, rtol=0)


def test_many_compiled_calls_in_one_block_are_compiled_once(caplog):
    """PyTorch gives up after 8 times. float64 goes to PyTorch, which is logged."""
    for dtype, words in ((torch.float32, ""), (torch.float64, "got dtype torch.float64")):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(lambda q: SDPA(q * 1, q, q), fullgraph=True, backend=counter)
        x = Q.to(dtype)
        with nt.use(fallback=True) as routed:
            for _ in range(10):
                out = compiled(x)
        torch.testing.assert_close(out, SDPA(x, x, x), atol=1e-6, rtol=0)
        assert (routed.calls, routed.fallbacks.total()) == ((0, 1) if words else (1, 0))
        assert counter.frame_count <= 2 and caplog.text.count("takes over") == bool(words)
        assert words in caplog.text


def test_multihead_attention_inside_the_compiler():
    """Traced, it breaks the graph and is routed outside of it."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True).eval()
    x = draw(2, 10, 64)
    before = torch.backends.mha.get_fastpath_enabled()
    try:
        with torch.no_grad():
            want = layer(x)
            torch.backends.mha.set_fastpath_enabled(False)
            with nt.use() as routed:
                torch.testing.assert_close(
                    torch.compile(layer, backend="eager")(x), want, atol=1e-5, rtol=0
                )
            assert routed.calls == 1
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def test_fused_layers_inside_the_compiler(caplog):
    """PyTorch's fused layer, which no mode sees in a graph, is not put into one inside of `use`."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    x = draw(2, 10, 64)
    fused = torch._transformer_encoder_layer_fwd
    with torch.inference_mode():
        want = model(x)
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()
            compiled = torch.compile(model, backend=backend)
            assert torch.equal(compiled(x), want)
            with nt.use(precision="int8") as routed:
                out = compiled(x)
            torch.testing.assert_close(out, want, atol=0.02, rtol=0)
            assert not torch.allclose(out, want, atol=1e-5, rtol=0)  # it was INT8
            assert routed.calls and not routed.fallbacks
            assert torch._transformer_encoder_layer_fwd is fused and torch.equal(compiled(x), want)
    assert "takes over" not in caplog.text


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler asks for it itself
def test_compiled_layers_that_train_return_no_weights(caplog):
    """Compiled code counts once, so the second layer changes no count."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True, dropout=0.0)
    compiled = torch.compile(torch.nn.TransformerEncoder(layer, 2), backend="aot_eager")
    with nt.use() as routed:
        compiled(draw(2, 10, 64)).sum().backward()
    assert routed.calls == 1 and not routed.fallbacks and "takes over" not in caplog.text
