"""The kernel of few rows of queries, against float64: every option, parts of the keys, what float32 cannot
hold.
"""

from dataclasses import replace

import numpy as np
import pytest
from oracles import naive, qkv

import numflash
from numflash.cpu import launch_float
from numflash.cpu.launch_float import FEW_ROWS_BY, FloatPlan
from numflash.interop.arrays import convert, widen
from numflash.jit import target
from numflash.tiling import threads as tiling_threads
from numflash.validation import problem
from numflash.validation.options import Options

DRAW = np.random.default_rng(8)
ISAS = [isa for isa in target.available(target.FLOAT_ISAS) if isa in FEW_ROWS_BY]
BFLOAT16 = [isa for isa in target.available(target.BFLOAT16_ISAS) if isa in FEW_ROWS_BY]
pytestmark = pytest.mark.skipif(not ISAS, reason="no instruction set with this kernel")
SHAPES = (  # one row, tails of vectors and blocks, an uneven number of rows, V narrower and wider than WIDE
    {"b": 1, "h": 1, "l": 1, "s": 1, "d": 16, "dv": 16},
    {"b": 2, "h": 4, "hkv": 2, "l": 2, "s": 77, "d": 32, "dv": 48},
    {"b": 1, "h": 9, "hkv": 3, "l": 1, "s": 700, "d": 64, "dv": 64},
    {"b": 1, "h": 7, "hkv": 1, "l": 1, "s": 130, "d": 128, "dv": 80},
    {"b": 1, "h": 2, "hkv": 1, "l": 1, "s": 90, "d": 40, "dv": 72},  # whole vectors of eight only
)


@pytest.fixture(autouse=True)
def rows_and_keys(monkeypatch):
    """However few keys there are."""
    monkeypatch.setattr(tiling_threads, "FEW_ROWS", dict.fromkeys(tiling_threads.FEW_ROWS, 1))


def options(b, h, l, s):
    """Every option by itself, and many at once."""
    mask = DRAW.random((b, 1, l, s)) < 0.5
    mask[..., : s // 3] = False
    bias = DRAW.standard_normal((h, l, s)).astype(np.float32)
    bias[:, :, ::3] = -np.inf
    lengths = DRAW.integers(0, s + 1, b)
    slopes = DRAW.random(h)
    return {
        "none": {},
        "causal": {"is_causal": True, "alignment": "lower_right"},
        "window": {"window": (20, 1), "alignment": "lower_right"},
        "rows beyond the keys": {"window": (0, 0)},
        "mask": {"attn_mask": mask},
        "no key": {"attn_mask": np.zeros((l, s), bool)},
        "bias": {"attn_mask": bias},
        "lengths": {"key_lengths": lengths},
        "softcap": {"softcap": 2.0},
        "slopes": {"alibi_slopes": slopes, "alignment": "lower_right"},
        "scale": {"scale": -0.7},
        "many": {
            "attn_mask": mask,
            "key_lengths": lengths,
            "softcap": 3.0,
            "alibi_slopes": slopes,
            "is_causal": True,
            "alignment": "lower_right",
        },
    }


def attend(isa, q, k, v, precision=None, **given):
    found = problem(q, k, v, Options(enable_gqa=True, precision=precision, **given))
    assert FloatPlan(found, isa).parts
    return launch_float.run(found, isa)


@pytest.mark.parametrize(
    "isa", [*ISAS[:1], *(pytest.param(x, marks=pytest.mark.slow) for x in ISAS[1:])]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_option(isa, shape):
    q, k, v = qkv(**shape)
    for name, given in options(shape["b"], shape["h"], shape["l"], shape["s"]).items():
        out, lse = attend(isa, q, k, v, **given)
        want, want_lse = naive(q, k, v, **given)
        np.testing.assert_allclose(out, want, atol=3e-6, err_msg=name)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    "isa", [*BFLOAT16[:1], *(pytest.param(isa, marks=pytest.mark.slow) for isa in BFLOAT16[1:])]
)
def test_bfloat16(isa):
    for shape in SHAPES:
        arrays = [widen(convert(x, "bfloat16")) for x in qkv(**shape)]
        given = {"is_causal": True, "alignment": "lower_right"}
        out, lse = attend(isa, *arrays, precision="bfloat16", **given)
        want, want_lse = naive(*arrays, **given)
        np.testing.assert_allclose(out, want, atol=3e-6)  # weights are not rounded
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS[:1])
def test_a_row_float32_cannot_hold_is_done_again(isa):
    """Products beyond float32, of either sign, and a bias; the rows beside them stay as they are."""
    shape = {"b": 1, "h": 2, "hkv": 1, "l": 2, "s": 150, "d": 32}
    q, k, v = qkv(**shape)
    plain, _ = attend(isa, q, k, v)
    q[0, 0, 1] *= 1e30
    q[0, 1, 0] *= -1e30
    huge = k.copy()
    huge[0, 0, 70] *= 1e10
    for key in (k * np.float32(1e10), huge):
        out, lse = attend(isa, q, key, v)
        want, want_lse = naive(q, key, v)
        np.testing.assert_allclose(out, want, atol=3e-6)
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(lse, want_lse.astype(np.float32), rtol=1e-6)
    for h, i in ((0, 0), (1, 1)):
        np.testing.assert_array_equal(attend(isa, q, k, v)[0][0, h, i], plain[0, h, i])
    q, k = np.zeros((1, 1, 1, 32), np.float32), np.zeros((1, 1, 9, 32), np.float32)
    q[..., [0, 16]], q[..., 1:5] = 3e38, 1.5e38
    k[0, 0, 5, [0, 16]], k[0, 0, 5, 1:5] = -1, 1  # -6e38 + 6e38 in one lane and in four
    out, _ = attend(isa, q, k, v[:, :, :9])
    np.testing.assert_allclose(out[0, 0, 0], v[0, 0, :9].mean(0), atol=1e-6)
    bias = np.full((2, 150), np.finfo(np.float32).min, np.float32)
    bias[1:, 140:] = 0
    out, _ = attend(isa, *qkv(**shape), attn_mask=bias)
    want, _ = naive(*qkv(**shape), attn_mask=bias)
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("isa", ISAS[:1])
def test_what_is_hidden_and_not_finite_stays_out(isa):
    shape = {"b": 1, "h": 2, "hkv": 1, "l": 2, "s": 150, "d": 32}
    q, k, v = qkv(**shape)
    mask = np.ones((2, 150), bool)
    mask[0, [3, 149]], mask[1, 80] = False, False
    want = attend(isa, q, k, v, attn_mask=mask)
    bad_k, bad_v = k.copy(), v.copy()
    bad_k[0, 0, 3, 5], bad_v[0, 0, 149, 7] = np.nan, np.inf
    out, lse = attend(isa, q, bad_k, bad_v, attn_mask=mask)
    np.testing.assert_allclose(out[0, :, 0], want[0][0, :, 0], atol=3e-6)
    np.testing.assert_allclose(lse[0, :, 0], want[1][0, :, 0], atol=1e-5)
    assert np.isnan(out[0, :, 1]).any(-1).all()  # which sees both
    short = attend(isa, q, k[:, :, :100], v[:, :, :100])
    k[0, 0, 100:], v[0, 0, 100:] = np.nan, np.inf
    long = attend(isa, q, k, v, key_lengths=[100])
    np.testing.assert_allclose(long[0], short[0], atol=1e-6)


def test_parts_and_threads_change_no_bit():
    q, k, v = qkv(b=1, h=2, hkv=1, l=2, s=1500, d=64)
    found = problem(q, k, v, Options(enable_gqa=True))
    assert FloatPlan(found, ISAS[0]).parts > 2
    want, want_lse = naive(q, k, v)
    results = []
    for threads in (1, numflash.get_num_threads()):
        with numflash.num_threads(threads):
            results.append(numflash.attention(q, k, v, enable_gqa=True, return_lse=True))
    for out, lse in results:
        np.testing.assert_allclose(out, want, atol=3e-6)
        np.testing.assert_allclose(lse, want_lse, atol=1e-5)
        np.testing.assert_array_equal(out, results[0][0])


def test_functions():
    q, k, v = qkv(b=2, h=4, hkv=2, l=2, s=200, d=32)
    table = DRAW.standard_normal(400).astype(np.float32)
    out = numflash.flex_attention(
        q,
        k,
        v,
        lambda score, b, h, i, j: score * 0.5 + table[j - i + 100],
        enable_gqa=True,
        block_mask=numflash.create_block_mask(lambda b, h, i, j: j % 7 != 3, 2, 4, 2, 200),
    )
    i, j = np.arange(2)[:, None], np.arange(200)
    bias = np.where(j % 7 != 3, table[j - i + 100], -np.inf).astype(np.float32)
    want, _ = naive(q, k, v, attn_mask=bias, scale=0.5 / 32**0.5)
    np.testing.assert_allclose(out, want, atol=3e-6)


def test_which_rows_are_few():
    """More rows, head sizes that are no whole vectors, and other CPUs' vectors take the register tiles."""
    for shape, few in (
        ({"h": 32, "hkv": 1, "l": 1, "d": 64}, True),
        ({"h": 2, "hkv": 2, "l": 2, "d": 64}, True),
        ({"h": 2, "hkv": 2, "l": 3, "d": 64}, False),
        ({"h": 1, "l": 1, "d": 24}, True),
        ({"h": 1, "l": 1, "d": 20}, False),
        ({"h": 1, "l": 1, "d": 64, "dv": 20}, False),
    ):
        found = problem(*qkv(b=1, s=20, **shape), Options(enable_gqa=True))
        assert bool(launch_float.parts_of(found, "avx512")) is few
        assert launch_float.parts_of(found, "neon") == 0
    empty = replace(
        problem(*qkv(b=1, h=1, l=1, s=1, d=64), Options()), key_lengths=np.zeros(1, np.int64)
    )
    out, lse = launch_float.run(empty, ISAS[0])
    assert not out.any() and (lse == -np.inf).all()


def test_heads_of_a_group_that_see_other_parts_of_the_keys():
    """A part that ends within a vector, none of whose keys the second head sees."""
    q, k, v = qkv(b=1, h=2, hkv=1, l=1, s=1030, d=32)
    found = problem(q, k, v, Options(enable_gqa=True))
    assert FloatPlan(found, ISAS[0]).parts == 4  # of 258 keys
    mask = numflash.create_block_mask(lambda b, h, i, j: (h == 0) | (j >= 900), 1, 2, 1, 1030)
    out = numflash.flex_attention(q, k, v, None, mask, enable_gqa=True)
    seen = np.arange(1030) >= np.array([0, 900])[None, :, None, None]
    want, _ = naive(q, k, v, attn_mask=seen)
    np.testing.assert_allclose(out, want, atol=3e-6)


def test_rows_of_keys_in_the_same_sets_of_the_cache():
    """Rows 4096 bytes apart, as those of a head beside others: copied, with the same bits."""
    q, k, v = qkv(b=1, h=32, hkv=16, l=1, s=150, d=64)
    want = numflash.attention(q, k, v, enable_gqa=True)
    beside = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in (q, k, v)]
    assert beside[1].strides[2] == 4096
    np.testing.assert_array_equal(numflash.attention(*beside, enable_gqa=True), want)
    np.testing.assert_allclose(want, naive(q, k, v)[0], atol=3e-6)


def test_more_rows_of_large_operands():
    """Three and four rows of float32 over keys and values of 10 MB or more."""
    q, k, v = qkv(b=1, h=4, l=4, s=10240, d=32)
    found = problem(q, k, v, Options())
    assert launch_float.parts_of(found, "avx512") == 2
    assert launch_float.parts_of(found, "avx512_bf16") == 0
    out = numflash.attention(q, k, v)
    np.testing.assert_allclose(out, naive(q, k, v)[0], atol=3e-6)
