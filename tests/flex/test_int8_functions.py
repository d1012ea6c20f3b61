"""flex_attention in INT8.

Scores go through the functions in float32, weights and sums are integers.
"""

import numpy as np
import pytest

import numflash
from flex import gallery as g
from numflash import validation
from numflash.cpu import launch
from numflash.errors import UnsupportedError
from numflash.flex.attention import with_functions
from numflash.flex.prepared import prepare
from numflash.flex.soft_cap import soft_cap
from numflash.jit import target
from numflash.validation.options import Options

CLOSE = 0.05  # relative L1 of the output
IMPLS = ["cpu", "portable"]


def block_mask(mask_mod, size=32):
    return numflash.create_block_mask(mask_mod, g.B, g.H, g.L, g.S, BLOCK_SIZE=size)


def close(found, wanted):
    (out, lse), (exact, exact_lse) = found, wanted
    assert np.abs(out - exact).sum() <= CLOSE * np.abs(exact).sum()
    assert np.array_equal(np.isinf(lse), np.isinf(exact_lse))
    seen = np.isfinite(exact_lse)
    assert np.abs(lse[seen] - exact_lse[seen]).max(initial=0) <= 0.08


@pytest.mark.parametrize("impl", IMPLS)
def test_functions_give_what_float64_gives(impl):
    q, k, v = g.operands(1, hkv=2)
    for n, score_mod in enumerate(g.SCORES):
        mask_mod = g.MASKS[n % len(g.MASKS)]
        found = numflash.flex_attention(
            q, k, v, score_mod, block_mask(mask_mod), enable_gqa=True,
            return_lse=True, precision="int8", impl=impl,
        )  # fmt: skip
        close(found, g.oracle(q, k, v, score_mod, mask_mod))


@pytest.mark.parametrize("impl", IMPLS)
def test_a_causal_mask_function_has_the_bits_of_the_option(impl):
    q, k, v = g.operands(2)
    options = {"precision": "int8", "impl": impl, "return_lse": True}
    wanted = numflash.attention(q, k, v, is_causal=True, **options)
    for size in (128, 32, (48, 20)):
        found = numflash.flex_attention(q, k, v, None, block_mask(g.causal, size), **options)
        assert all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))
    window = numflash.flex_attention(
        q, k, v, None, block_mask(g.causal), window=(30, None), **options
    )
    wanted = numflash.attention(q, k, v, is_causal=True, window=(30, None), **options)
    assert all(np.array_equal(x, y) for x, y in zip(window, wanted, strict=True))


CAP = 3.0
CAPS = [  # one soft cap
    lambda s, *at: CAP * np.tanh(s / CAP),
    lambda s, *at: np.tanh((1 / CAP) * s) * CAP,
    lambda s, *at: np.tanh(s / CAP) / (1 / CAP),
    lambda s, *at: 1.5 * (np.tanh(s * 0.5 / 1.5) * 2),
]
NO_CAPS = [
    lambda s, *at: -CAP * np.tanh(s / -CAP),
    lambda s, *at: CAP * np.tanh(s / -CAP),
    lambda s, *at: CAP * np.tanh(s / 3.000001),
    lambda s, *at: CAP * np.tanh((s + 1e-6) / CAP),
    lambda s, *at: CAP * np.tanh(s / CAP) + 1e-6,
    lambda s, b, h, q, k: CAP * np.tanh(s / CAP) * (h + 1),
    lambda s, b, h, q, k: CAP * np.tanh(k / CAP),
    lambda s, *at: CAP / np.tanh(s / CAP),
    lambda s, *at: CAP * np.tanh(CAP / s),
    lambda s, *at: CAP * np.sin(s / CAP),
    lambda s, *at: 1e5 * np.tanh(s / 1e5),
    lambda s, *at: np.tanh(s / 0) * 0,
    lambda s, *at: s * CAP,
]


def test_which_functions_are_a_soft_cap():
    caps = [soft_cap(prepare(f, None).score) for f in CAPS]
    assert np.allclose(caps, CAP, rtol=1e-15)
    assert [soft_cap(prepare(f, None).score) for f in NO_CAPS] == [0.0] * len(NO_CAPS)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_soft_cap_function_has_the_bits_of_the_option(impl):
    q, k, v = (3 * x for x in g.operands(8))
    options = {"precision": "int8", "impl": impl, "return_lse": True}

    def equal(score_mod, cap=CAP):
        wanted = numflash.attention(q, k, v, softcap=cap, **options)
        found = numflash.flex_attention(q, k, v, score_mod, **options)
        return all(np.array_equal(x, y) for x, y in zip(found, wanted, strict=True))

    for score_mod in CAPS:
        assert equal(score_mod)
    for cap in (CAP, 4.0):  # a captured number

        def captured(score, b, h, q, k, cap=cap):
            return cap * np.tanh(score / cap)

        assert equal(captured, cap=cap)
    assert not equal(NO_CAPS[3])
    packed = [x[0].swapaxes(0, 1) for x in (q, k, v)]
    starts = np.array([0, 60, 150])
    run = {"precision": "int8", "impl": impl}
    found = numflash.attention_varlen(*packed, starts, starts, score_mod=CAPS[0], **run)
    wanted = numflash.attention_varlen(*packed, starts, starts, softcap=CAP, **run)
    assert np.array_equal(found, wanted)


@pytest.mark.parametrize("impl", IMPLS)
def test_what_the_mask_hides_stays_out(impl):
    q, k, v = g.operands(3)
    key, value = k.copy(), v.copy()
    key[:, :, 20], value[:, :, 21] = np.nan, np.inf
    hidden = [20, 21]

    def mask_mod(b, h, q, k):
        return (k != 20) & (k != 21) & (q != 40)

    run = {"precision": "int8", "impl": impl, "return_lse": True}
    out, lse = numflash.flex_attention(q, key, value, g.alibi, block_mask(mask_mod), **run)
    value[:, :, hidden] = 0
    close((out, lse), g.oracle(q, k, value, g.alibi, mask_mod))
    assert not out[:, :, 40].any()
    assert (lse[:, :, 40] == -np.inf).all()
    out = numflash.flex_attention(q, key, v, g.alibi, **{**run, "return_lse": False})
    assert np.isnan(out).all()
    huge = numflash.flex_attention(q, k, v, lambda s, *at: s * 1e30, precision="int8", impl=impl)
    assert np.isfinite(huge).all()


def test_packed_sequences_and_values_in_float32():
    q, k, v = (x[0].swapaxes(0, 1).copy() for x in g.operands(4))
    lengths = [60, 90]
    starts = np.array([0, 60, 150])
    found = numflash.attention_varlen(
        q, k, v, starts, starts, score_mod=g.relative_bias, precision="int8", pv="fp32"
    )
    for start, n in zip(starts, lengths, strict=False):
        part = [x[None, start : start + n].swapaxes(1, 2) for x in (q, k, v)]
        exact, _ = g.oracle(*part, g.relative_bias)
        exact = exact[0].swapaxes(0, 1)
        assert np.abs(found[start : start + n] - exact).sum() <= CLOSE * np.abs(exact).sum()


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"alibi_slopes": np.ones(g.H)}, {"impl": "reference"}], ids=str
)
def test_what_integers_do_not_take(options):
    q, k, v = g.operands(5)
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        numflash.flex_attention(q, k, v, g.softcap, precision="int8", **options)


def test_options_without_a_function_are_those_of_attention():
    q, k, v = g.operands(5)
    for options in ({"softcap": 3.0}, {"alibi_slopes": np.ones(g.H)}):
        found = numflash.flex_attention(q, k, v, precision="int8", enable_gqa=True, **options)
        wanted = numflash.attention(q, k, v, precision="int8", enable_gqa=True, **options)
        np.testing.assert_array_equal(found, wanted)


TABLE = np.geomspace(1e-3, 1, 1300, dtype=np.float32).reshape(2, 650)  # slopes of rows
BITS = {  # that stay in int16, leave it upwards or downwards, hide whole rows, and give NaN
    "alibi": g.alibi,
    "steep": lambda s, b, h, q, k: s - 2.0 * abs(q - k),
    "high": lambda s, b, h, q, k: s * 300.0,
    "low": lambda s, b, h, q, k: np.where(q % 3 == 0, s - 1e4, s),
    "hides": lambda s, b, h, q, k: np.where((q + k // 128) % 3 == 0, -np.inf, s),
    "nan": lambda s, b, h, q, k: np.where((q == 7) & (k > 200), np.nan, s),
}


@pytest.mark.parametrize("name", BITS)
def test_one_pass_has_the_bits_of_plain_loops(name):
    bits_of_all(name, target.available(target.ISAS)[:1])


@pytest.mark.parametrize("mask_mod", [None, g.causal, lambda b, h, q, k: abs(q - k) < 150])
@pytest.mark.parametrize("options", [{}, {"window": (200, 90)}], ids=["", "window"])
def test_blocks_that_need_no_mask_have_the_bits_of_plain_loops(mask_mod, options):
    """On AMX they go through the stream, the others one by one; the last block is not whole."""
    q, k, v = (np.random.default_rng(7).standard_normal((1, 2, 700, 32), np.float32),) * 3
    mask = mask_mod and numflash.create_block_mask(mask_mod, None, None, 650, 700)
    options = Options(precision="int8", return_lse=True, **options)
    problem = validation.problem(q[:, :, :650], k, v, options)
    problem = with_functions(
        problem, lambda s, b, h, q, k: s - TABLE[h, q] * abs(q - k), mask, "cpu"
    )
    best = target.available(target.ISAS)[0]
    (out, lse), wanted = (launch.run(problem, isa) for isa in (best, "portable"))
    assert np.array_equal(out, wanted[0])
    assert np.array_equal(lse, wanted[1])


@pytest.mark.slow
def test_one_pass_has_the_same_bits_on_every_instruction_set():
    for name in BITS:
        bits_of_all(name, target.available(target.ISAS)[1:])


def bits_of_all(name, isas):
    wanted = with_bits(name, "portable")
    for isa in isas:
        found = with_bits(name, isa)
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(found, wanted, strict=True))


def with_bits(name, isa):
    """out and lse of a function of `BITS` on an instruction set; on AMX the two tiles wait for one run
    of the stream.
    """
    rng = np.random.default_rng(6)
    q, k, v = (rng.standard_normal((1, 2, n, 64), dtype=np.float32) for n in (70, 400, 400))
    options = Options(precision="int8", return_lse=True)
    problem = with_functions(validation.problem(q, k, v, options), BITS[name], None, "cpu")
    with numflash.num_threads(1):
        return launch.run(problem, isa)
