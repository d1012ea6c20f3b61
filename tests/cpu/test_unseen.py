"""What a row does not see never reaches it.

NaN beside rows that see nothing, bad tokens beside good ones, unseen huge scores.
"""

import numpy as np
import pytest
from oracles import draw, naive

import numflash
from numflash.cache.kvcache import KVCache
from numflash.cpu import launch, launch_backward
from numflash.jit import target
from numflash.validation import problem
from numflash.validation.options import Options

F = np.float32
ISAS = target.available(target.FLOAT_ISAS)
FLOATS = [
    pytest.param("float32", isa, marks=pytest.mark.slow if isa in ISAS[1:-1] else ())
    for isa in ISAS
]
FLOATS += [("bfloat16", isa) for isa in target.available(target.BFLOAT16_ISAS) if "bf16" in isa]
BAND = {
    "lower right": {"is_causal": True, "alignment": "lower_right"},
    "window": {"window": (None, -0 + 3), "key_lengths": [9]},
}


@pytest.mark.parametrize(("precision", "isa"), FLOATS)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_rows_that_see_nothing_beside_rows_that_see_nan(precision, isa, bad):
    """Fault: rows of one register tile share the keys that any of them sees, and 0 * NaN is NaN."""
    q = draw((1, 2, 51, 16))
    k = draw((1, 2, 20, 16), 1)
    v = draw((1, 2, 20, 16), 2)
    v[0, :, 0, 3] = bad
    out, lse = launch.run(
        problem(
            q,
            k,
            v,
            Options(is_causal=True, alignment="lower_right", precision=precision, return_lse=True),
        ),
        isa,
    )
    assert not out[:, :, :31].any() and (lse[:, :, :31] == -np.inf).all(), (
        "31 rows stand before the first key"
    )
    assert np.isfinite(lse[:, :, 31:]).all() and not np.isfinite(out[:, :, 31:, 3]).any()
    assert np.isfinite(np.delete(out, 3, 3)).all()


@pytest.mark.parametrize(
    "impl", ["cpu", "portable", pytest.param("cuda-emulator", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("precision", ["float32", "float16", "int8"])
def test_the_smallest_case_of_it(impl, precision):
    ones = np.ones((2, 4), np.float16 if precision == "float16" else F)
    value = np.array([[np.nan, 1, 1, 1]], ones.dtype)
    out = numflash.attention(
        ones,
        ones[:1],
        value,
        is_causal=True,
        alignment="lower_right",
        precision=precision,
        impl=impl,
    )
    assert out[0].tolist() == [0, 0, 0, 0] and np.isnan(out[1, 0])


@pytest.mark.parametrize("ring", [{}, {"window": 60, "sinks": 2}], ids=["all keys", "ring"])
@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("device", ["cpu", "cuda-emulator"])
def test_a_bad_token_that_is_not_seen_costs_no_accuracy(device, which, ring):
    """The scale that it leaves behind is not the largest of its block.

    Values are small, as activations are.
    """
    key = draw((1, 1, 70, 64))
    value = draw((1, 1, 70, 64), 1) * F(0.01)
    # tiles of rows that other tests have
    query = draw((1, 4 if device == "cpu" else 2, 2, 64), 2)
    bad = [key.copy(), value.copy()]
    bad[which == "value"][0, 0, 69] = np.nan
    out = []
    for tokens in ((key, value), bad):
        cache = KVCache(1, 1, 64, 300, device=device, **ring)
        cache.append(*tokens)
        out.append(cache.decode(query))
    assert np.isnan(out[1][0, :, 1]).all()
    np.testing.assert_array_equal(out[0][0, :, 0], out[1][0, :, 0])


def test_a_bad_token_that_has_left_the_window():
    """It lies in the ring until its slot is written again."""
    key = draw((1, 1, 160, 64))
    value = draw((1, 1, 160, 64), 1) * F(0.01)
    query = draw((1, 2, 1, 64), 2)
    out = []
    for bad in (False, True):
        cache = KVCache(1, 1, 64, 1, window=100)
        tokens = key.copy(), value.copy()
        if bad:
            tokens[1][0, 0, 40] = np.inf
        for n in range(0, 160, 32):
            cache.append(*(x[:, :, n : n + 32] for x in tokens))
        out.append(cache.decode(query))
    np.testing.assert_array_equal(*out)


@pytest.mark.parametrize("device", ["cpu", "cuda-emulator"])
def test_values_of_zero_cost_no_accuracy(device):
    """Rows of zeros (padding) have no scale of their own either."""
    key = draw((1, 1, 70, 64))
    value = draw((1, 1, 70, 64), 1) * F(0.01)
    query = draw((1, 2, 1, 64), 2)
    value[0, 0, 30:40] = 0
    cache = KVCache(1, 1, 64, 300, device=device)
    cache.append(key, value)
    exact = naive(query, key, value)[0]
    assert np.abs(cache.decode(query) - exact).sum() < 0.03 * np.abs(exact).sum()
    assert cache.quantized(0)[1].scale[0, 30] == 1, "as quantize() has it"


@pytest.mark.parametrize("bad", [False, True])
def test_a_block_of_nothing_but_zeros(bad):
    key = draw((1, 1, 200, 64))
    value = draw((1, 1, 200, 64), 1)
    query = draw((1, 2, 1, 64), 2)
    value[0, 0, :128] = 0
    if bad:
        key[0, 0, 100] = np.nan
    cache = KVCache(1, 1, 64, 300)
    cache.append(key, value)
    exact = naive(query, key, value)[0]
    out = cache.decode(query)
    assert np.isnan(out).all() if bad else np.abs(out - exact).sum() < 0.03 * np.abs(exact).sum()


def test_a_bad_token_does_not_switch_smoothing_off():
    """The channel means are those of the finite tokens."""
    key = draw((1, 1, 40, 16))
    value = draw((1, 1, 40, 16), 1)
    query = draw((1, 1, 2, 16), 2)
    key[..., 3] += 30
    errors = []
    for bad in (False, True):
        tokens = key.copy()
        if bad:
            tokens[0, 0, 39] = np.nan
        cache = KVCache(1, 1, 16, 300, smooth=True)
        cache.append(tokens, value)
        exact = naive(query[:, :, :1], key[:, :, :39], value[:, :, :39])[0]
        errors.append(np.abs(cache.decode(query)[:, :, :1] - exact).sum() / np.abs(exact).sum())
    assert errors[1] < 1.2 * errors[0]


def test_decode_rows_that_see_nothing_beside_scores_that_overflow():
    """A row before the sequence shares a tile with one whose scores float32 cannot hold."""
    cache = KVCache(1, 1, 8, 300, "float32")
    key = np.full((1, 1, 1, 8), 1e25, F)
    value = draw((1, 1, 1, 8))
    cache.append(key, value)
    out, lse = cache.decode(np.full((1, 1, 2, 8), 1e25, F), return_lse=True)
    assert not out[0, 0, 0].any() and lse[0, 0, 0] == -np.inf
    np.testing.assert_allclose(out[0, 0, 1], value[0, 0, 0], rtol=1e-6)


def test_a_ring_whose_first_rows_see_nothing_beside_scores_that_overflow():
    cache = KVCache(1, 1, 1, 1, "float32", window=1, sinks=1)
    key = np.array([-1e38, 1e38], F).reshape(1, 1, 2, 1)
    cache.append(key, key)
    out, lse = cache.decode(np.full((1, 2, 4, 1), 2, F), return_lse=True)
    assert not out[0, 0, :2].any() and (lse[0, 0, :2] == -np.inf).all()
    np.testing.assert_allclose(out[0, 0, 2:, 0], key[0, 0, :, 0], rtol=1e-6)


def test_nothing_held():
    """Reading a sequence without tokens."""
    for options in ({}, {"page_size": 128}, {"window": 5}):
        cache = KVCache(2, 3, 4, 100, value_dim=6, **options)
        assert [x.shape for x in cache.read(0)] == [(3, 0, 4), (3, 0, 6)]
        assert [x.shape for x in cache.quantized(1)] == [(3, 0, 4), (3, 0, 6)]
    assert [x.shape for x in KVCache(1, 3, 4, 100, "float16").read(0)] == [(3, 0, 4), (3, 0, 4)]
    cache = KVCache(1, 3, 4, 100, device="cuda-emulator")
    assert [x.shape for x in cache.read(0)] == [(3, 0, 4), (3, 0, 4)]


def test_a_huge_value_that_left_the_window_costs_precision_until_it_is_replaced():
    """INT8 weighs the values of a block by the largest among them: see docs/kvcache.md."""
    key, value = draw((1, 1, 400, 16)), draw((1, 1, 400, 16), 1)
    value[0, 0, 20] = 1e30
    query = draw((1, 2, 1, 16), 2)
    cache = KVCache(1, 1, 16, 1, "int8", window=64)
    cache.append(key[:, :, :100].copy(), value[:, :, :100].copy())
    assert np.abs(cache.decode(query)).max() < 5, "nothing of the huge value itself"
    cache.append(key[:, :, 100:300].copy(), value[:, :, 100:300].copy())
    want, _ = naive(query, key[:, :, 236:300], value[:, :, 236:300])
    assert np.abs(cache.decode(query) - want).sum() < 0.05 * np.abs(want).sum()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("length", [4, 13, 20])
def test_masks_of_keys_that_no_row_sees(isa, length):
    """Fault: the gradient's tiles are whole vectors of queries, and those behind the last one saw a key that
    causal attention hides from all rows.
    """
    s = length + 12
    q, grad = draw((1, 1, length, 20)), draw((1, 1, length, 20), 1)
    k, v = draw((1, 1, s, 20), 2), draw((1, 1, s, 20), 3)
    for bad in (np.nan, np.inf, 3e38):
        mask = np.zeros((1, s), F)
        mask[0, length + 1] = bad
        asked = problem(q, k, v, Options(attn_mask=mask, is_causal=True, precision="float32"))
        out, lse = launch.run(asked, isa)
        _, *found = launch_backward.run(asked, grad, out, lse, isa=isa)
        for x in found:
            assert np.isfinite(x).all() and not x[:, :, length:].any()
