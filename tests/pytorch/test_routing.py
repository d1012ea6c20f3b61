"""`numflash.torch.use`: calls and models of PyTorch answered by numflash."""

import subprocess
import sys
import threading
import types

import pytest

torch = pytest.importorskip("torch", reason="needs the torch extra: pip install 'numflash[torch]'")

import torch.nn.attention.flex_attention as torch_flex
from torch.overrides import TorchFunctionMode
from torch_cases import SDPA, K, Q, V, draw

import numflash
import numflash.torch as nt
from numflash.errors import ArgumentError
from numflash.torch.rebinding import Rebinding


def test_use_nests_and_ends():
    with nt.use() as outer:
        SDPA(Q, K, V)
        with nt.use(precision="int8") as inner:
            SDPA(Q, K, V)
        SDPA(Q, K, V)
        with pytest.raises(ZeroDivisionError), nt.use() as failed:  # noqa: PT012
            SDPA(Q, K, V)
            1 / 0  # noqa: B018
        SDPA(Q, K, V)
    SDPA(Q, K, V)
    assert (outer.calls, inner.calls, failed.calls) == (3, 1, 1)


@pytest.mark.parametrize("pv", ["int8", "int16", "bf16", "fp32"])
def test_use_passes_the_weights_of_int8(pv):
    query, key, value = (x.numpy() for x in (Q, K, V))
    seen = torch.ones(Q.shape[2], K.shape[2], dtype=torch.bool).tril(2)
    with torch.no_grad(), nt.use("int8", fallback=True, pv=pv) as routed:
        found = SDPA(Q, K, V), SDPA(Q, K, V, attn_mask=seen), torch_flex.flex_attention(Q, K, V)
    assert routed.calls == 3 and not routed.fallbacks
    assert repr(routed) == "<numflash.torch.use: 3 calls, 0 fallbacks>"
    plain, masked = (
        numflash.attention(query, key, value, mask, precision="int8", pv=pv)
        for mask in (None, seen.numpy())
    )
    for x, y in zip(found, (plain, masked, plain), strict=True):
        assert (x.numpy() == y).all()


COMPILED = torch.compile(torch_flex.flex_attention, backend="eager")


def test_what_compile_has_made_of_flex_attention_is_routed():
    global COMPILED
    made, wanted = COMPILED, nt.flex_attention(Q, K, V)
    with nt.use() as routed, nt.use() as inner:
        assert torch.equal(COMPILED(Q, K, V), wanted)
    assert (routed.calls, inner.calls) == (0, 1) and COMPILED is made
    COMPILED = None  # names may hold something else in the next block
    with nt.use() as routed:
        torch_flex.flex_attention(Q, K, V)
    assert routed.calls == 1 and COMPILED is None
    COMPILED = made
    with nt.use() as routed:
        COMPILED(Q, K, V)
    assert routed.calls == 1


def test_modules_that_change_between_blocks(monkeypatch):
    """Blocks remember what the last one has found."""

    def routed(module):
        with nt.use() as inside:
            module.attend(Q, K, V)
        assert module.attend is torch_flex.flex_attention
        return inside.calls

    first, second = types.ModuleType("first"), types.ModuleType("second")
    first.attend = torch_flex.flex_attention
    monkeypatch.setitem(sys.modules, "first", first)
    assert routed(first) == routed(first) == 1
    monkeypatch.setitem(sys.modules, "second", second)
    with nt.use():
        pass
    second.attend = torch_flex.flex_attention  # a name more
    assert routed(second) == routed(first) == 1
    monkeypatch.delitem(sys.modules, "first")
    assert routed(second) == 1
    monkeypatch.setitem(sys.modules, "first", first)
    assert routed(first) == 1
    third = types.ModuleType("first")  # as reloaded, with as many modules as before
    third.attend = torch_flex.flex_attention
    monkeypatch.setitem(sys.modules, "first", third)
    assert routed(third) == routed(second) == 1


def test_a_block_looks_through_modules_that_have_changed_only(monkeypatch):
    looked = []
    look_in = Rebinding._look_in

    def counted(self, names, listing):
        looked.append(names)
        look_in(self, names, listing)

    monkeypatch.setattr(Rebinding, "_look_in", counted)
    with nt.use():
        pass
    looked.clear()
    with nt.use():
        pass
    main = vars(sys.modules["__main__"])
    assert all(names is main for names in looked)


def test_use_refuses_weights_without_int8():
    for given in ({"pv": "int16"}, {"precision": "float32", "pv": "int16"}, {"pv": "int4"}):
        with pytest.raises(ArgumentError, match="pv: got"):
            nt.use(**given)


def test_use_holds_for_its_own_thread():
    inside = threading.Event()
    leave = threading.Event()
    counts = []

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
    assert (
        routed.calls == 1
        and list(routed.fallbacks.values()) == [2]
        and "float64" in next(iter(routed.fallbacks))
    )


def test_reasons_that_differ_in_a_length_are_not_kept_without_end(monkeypatch):
    monkeypatch.setattr(nt.routing, "MOST_REASONS", 2)
    wide = torch.zeros(1, 1, 1, 600)
    with nt.use(fallback=True) as routed:
        for length in range(1, 6):
            SDPA(wide.expand(1, 1, length, 600), wide, wide)
    assert [*routed.fallbacks.values()] == [1, 1, 3]


@pytest.mark.parametrize("fallback", [False, True])
def test_a_real_mistake_is_an_error_either_way(fallback):
    with nt.use(fallback=fallback), pytest.raises(RuntimeError):
        SDPA(Q, K[..., :3], V)


@pytest.mark.parametrize("grad", [False, True])
def test_multihead_attention(grad):
    torch.manual_seed(0)
    model = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = draw(2, 30, 64)
    pad = torch.arange(30) >= torch.tensor([[30], [21]])
    with torch.set_grad_enabled(grad):
        want = model(x, x, x, key_padding_mask=pad, need_weights=False)[0]
        with nt.use() as routed:
            out = model(x, x, x, key_padding_mask=pad, need_weights=False)[0]
            model(x, x, x, need_weights=True)  # returns the weights, so there is nothing to route
    assert routed.calls == 1
    torch.testing.assert_close(out, want, atol=1e-6, rtol=0)


def test_transformer_encoder_and_decoder():
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(64, 4, batch_first=True), 2
    ).eval()
    decoder = torch.nn.TransformerDecoder(
        torch.nn.TransformerDecoderLayer(64, 4, batch_first=True), 2
    ).eval()
    x = draw(2, 30, 64)
    y = draw(2, 20, 64, seed=1)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(20)
    with torch.no_grad():
        want = decoder(y, encoder(x), tgt_mask=causal, tgt_is_causal=True)
        with nt.use() as routed:
            out = decoder(y, encoder(x), tgt_mask=causal, tgt_is_causal=True)
    assert routed.calls == 6
    torch.testing.assert_close(out, want, atol=1e-5, rtol=0)


def test_a_wrong_precision_is_refused_where_it_is_given():
    with pytest.raises(ArgumentError, match="precision: got 'int9'"):
        nt.use(precision="int9", fallback=True)


def test_multi_head_attention_that_returns_weights_is_counted():
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True).eval()
    x = torch.randn(1, 5, 16)
    with nt.use() as routed, torch.no_grad():
        layer(x, x, x, need_weights=False)
        assert routed.calls == 1 and not routed.fallbacks
        layer(x, x, x)
    assert routed.calls == 1 and "need_weights=False" in next(iter(routed.fallbacks))


def test_a_block_that_ctrl_c_ended_before_it_began_changes_nothing(monkeypatch):
    """Ctrl-C after PyTorch's function was replaced, or before that was counted."""
    q = draw(1, 2, 8, 16)
    original = torch_flex.flex_attention

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(TorchFunctionMode, "__enter__", interrupted)
        with pytest.raises(KeyboardInterrupt), nt.use():
            pass
    assert torch_flex.flex_attention is original
    nt.routing._flex._inside += 1  # an interrupt right after the count
    try:
        with nt.use() as routed:
            torch_flex.flex_attention(q, q, q)
        assert routed.calls == 1
    finally:
        nt.routing._flex._inside -= 1
        with nt.use():
            pass
    assert torch_flex.flex_attention is original


def test_a_signal_handler_may_call_while_a_lock_is_held():
    from numflash.flex import prepared
    from numflash.tiling.plan_cache import PlanCache

    for lock in (nt.routing._flex._lock, prepared._lock, PlanCache()._lock):
        with lock:
            assert lock.acquire(blocking=False)
            lock.release()


def test_pytorchs_compiler_is_not_loaded_where_nothing_is_compiled():
    """It takes a second, half of what PyTorch itself takes."""
    code = (
        "import sys, torch, numflash.torch as nt\n"
        "q = torch.randn(1, 1, 4, 16, requires_grad=True)\n"
        "with nt.use(): torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()\n"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
