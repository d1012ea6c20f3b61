"""Messages that name what was meant, and arrays of JAX."""

import sys
import types

import numpy as np
import pytest
from oracles import draw

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError

F = np.float32


def qkv(l=3, s=5, sv=None, b=2):
    return draw((b, 1, l, 4)), draw((b, 1, s, 4), 1), draw((b, 1, sv or s, 4), 2)


@pytest.mark.parametrize("flag", [True, False, np.True_])
def test_a_flag_in_the_place_of_the_mask(flag):
    for call in (
        lambda: numflash.attention(*qkv(), flag),
        lambda: numflash.attention(*qkv(), attn_mask=flag),
    ):
        with pytest.raises(
            ArgumentTypeError, match=r"attn_mask: got (np\.)?(True|False)_?.*is_causal"
        ):
            call()


@pytest.mark.parametrize("number", [0.125, 1, np.float32(2)])
def test_a_number_in_the_place_of_the_mask(number):
    with pytest.raises(ArgumentTypeError, match=r"attn_mask: got .*scale"):
        numflash.attention(*qkv(), number)


def test_arrays_without_dimensions_are_masks():
    q, k, v = qkv()
    np.testing.assert_array_equal(
        numflash.attention(q, k, v, np.array(True)), numflash.attention(q, k, v)
    )


def test_keys_and_values_of_other_lengths():
    q, k, v = qkv(l=6, s=6)
    with pytest.raises(ArgumentError, match=r"key: got 5 keys, shape .* where value has 6"):
        numflash.attention(q, k[:, :, :5], v)
    with pytest.raises(ArgumentError, match=r"value: got 5 keys, shape .* where key has 6"):
        numflash.attention(q, k, v[:, :, :5])


def test_swapped_axes_are_shown():
    q, k, v = qkv(l=6, s=6)
    with pytest.raises(
        ArgumentError, match=r"enable_gqa: .*query \(2, 6, 1, 4\) and key \(2, 1, 6, 4\)"
    ):
        numflash.attention(q.swapaxes(1, 2), k, v)


def test_a_list_among_arrays():
    q, k, v = qkv()
    with pytest.raises(ArgumentTypeError, match=r"key: got dtype float32; .*lists .* are float64"):
        numflash.attention(q.tolist(), k, v)


def test_arguments_of_functions_are_named():
    q, k, v = qkv()
    with pytest.raises(ArgumentTypeError, match=r"5 arguments \(score, b, h, q_idx, kv_idx\)"):
        numflash.flex_attention(q, k, v, lambda score, b, h: score)
    with pytest.raises(ArgumentTypeError, match=r"4 arguments \(b, h, q_idx, kv_idx\)"):
        numflash.create_block_mask(lambda q_idx, kv_idx: q_idx >= kv_idx, None, None, 8, 8)


@pytest.mark.parametrize("dtype", [bool, F])
def test_a_padding_mask(dtype):
    """(B, S), as tokenizers give it, aligns with (L, S) and not with the batch."""
    with pytest.raises(
        ArgumentError, match=r"attn_mask: got shape \(2, 5\).*mask\[:, None, None\].*key_lengths"
    ):
        numflash.attention(*qkv(), np.ones((2, 5), dtype))
    with pytest.raises(ArgumentError, match=r"attn_mask: got shape \(7, 5\)") as error:
        numflash.attention(*qkv(), np.ones((7, 5), dtype))
    assert "key_lengths" not in str(error.value)


class Stand:
    """A JAX array as far as numflash looks: DLPack without bfloat16, NumPy by __array__."""

    def __init__(self, array):
        self.array, self.dtype, self.shape = array, array.dtype, array.shape

    def __dlpack__(self, **_):
        raise BufferError("unsupported dtype in DLTensor.")

    def __dlpack_device__(self):
        return 1, 0

    def __array__(self, dtype=None, copy=None):
        return self.array

    def __array_namespace__(self):
        return sys.modules["jax_stand_in"]


@pytest.fixture
def jax_stand_in(monkeypatch):
    module = types.ModuleType("jax_stand_in")
    module.from_dlpack = lambda x: pytest.fail("bfloat16 cannot go back this way")
    module.asarray = Stand
    monkeypatch.setitem(sys.modules, "jax_stand_in", module)
    return module


def test_bfloat16_of_a_library_whose_dlpack_lacks_it(jax_stand_in):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    arrays = [x.astype(ml_dtypes.bfloat16) for x in qkv()]
    want, want_lse = numflash.attention(*arrays, return_lse=True)
    out, lse = numflash.attention(*map(Stand, arrays), return_lse=True)
    assert isinstance(out, Stand) and out.dtype == ml_dtypes.bfloat16 and isinstance(lse, Stand)
    np.testing.assert_array_equal(out.array, want)
    np.testing.assert_array_equal(lse.array, want_lse)


def test_bfloat16_of_jax():
    jax = pytest.importorskip("jax")
    arrays = [jax.numpy.asarray(x, jax.numpy.bfloat16) for x in qkv()]
    out, lse = numflash.attention(*arrays, return_lse=True)
    assert (
        isinstance(out, jax.Array)
        and out.dtype == jax.numpy.bfloat16
        and isinstance(lse, jax.Array)
    )
    want = numflash.attention(*map(np.asarray, arrays))
    np.testing.assert_array_equal(np.asarray(out), want)
    cache = numflash.KVCache(2, 1, 4, 100, "bfloat16")
    cache.append(*arrays[1:])
    assert cache.decode(arrays[0]).dtype == jax.numpy.bfloat16


def test_a_tracer_of_jax_gets_one_clear_error():
    jax = pytest.importorskip("jax")
    for transform in (jax.jit, jax.vmap, lambda f: jax.grad(lambda *x: f(*x).sum())):
        with pytest.raises(ArgumentTypeError, match=r"query: got a JAX tracer.*pure_callback"):
            transform(numflash.attention)(*map(jax.numpy.asarray, qkv()))


def test_a_tracer_without_jax():
    class Tracer(Stand):
        pass

    Tracer.__module__ = "jax._src.core"
    with pytest.raises(ArgumentTypeError, match=r"key: got a JAX tracer.*pure_callback"):
        numflash.attention(draw((1, 1, 3, 4)), Tracer(draw((1, 1, 3, 4))), draw((1, 1, 3, 4)))


@pytest.mark.parametrize("rotate", [False, True])
def test_quantize_qkv_names_the_operand(rotate):
    q, k, v = qkv()
    for operands, words in (
        ((q, k.astype(int), v), "key: got dtype int64"),
        ((q, k, None), "value: got None"),
        ((q, k[0, 0, 0], v), r"key: got shape \(4,\)"),
        ((q, k, v[..., :0]), "value: got shape"),
    ):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=words):
            numflash.quantize_qkv(*operands, rotate=rotate)


def test_what_is_allowed_is_all_that_is_taken():
    """And no more."""
    for call, names in (
        (lambda: numflash.explain((1, 2, 8, 8), impel="cpu"), ("return_lse", "impl")),
        (lambda: numflash.accuracy(*qkv(), variant=1), ("layout", "impl", "variants")),
        (lambda: numflash.accuracy(*(x.astype(np.uint16) for x in qkv())), ("bfloat16",)),
    ):
        with pytest.raises(ArgumentTypeError, match=f"allowed: .*{', '.join(names)}$"):
            call()
