"""Scalars of the integer pipeline.

Errors as stated, continuity at the octave, equal bits in NumPy and in the JIT.
"""

from fractions import Fraction

import numpy as np
import pytest
from numba import njit

from numflash.numerics import fixedpoint as fx
from numflash.numerics.fused import multiply_add

F = np.float32
ALL = np.arange(65536)


@pytest.mark.parametrize("name", fx.EXP2)
def test_stated_error_is_the_measured_one(name):
    exp2, stated = fx.EXP2[name]
    y = np.arange(256, dtype=np.uint32)
    exact = 65536 * np.exp2(y / -256.0)
    worst = np.abs(exp2(y).astype(np.float64) / exact - 1).max()
    assert worst <= stated
    assert worst >= 0.6 * stated, "the stated error is not a loose bound"


def test_straight_line_jumps_at_the_octave():
    """18 % from the end of one octave to the start of the next.

    The quadratic is continuous there.
    """
    jump = lambda f: float(f(np.uint32(256))) / float(f(np.uint32(257)))  # noqa: E731
    assert (
        jump(fx.exp2_line177) > 1.1
        or float(fx.exp2_line177(np.uint32(255))) / float(fx.exp2_line177(np.uint32(256))) > 1.1
    )
    assert jump(fx.exp2_quadratic) < 1.01


@pytest.mark.parametrize("name", [n for n in fx.EXP2 if n != "ultra"])
def test_exp2_halves_each_octave_and_vanishes(name):
    exp2 = fx.EXP2[name][0]
    for octave in range(17):
        assert abs(int(exp2(np.uint32(256 * octave))) - 65536 / 2**octave) <= 1
    assert int(exp2(np.uint32(65535))) == 0


def test_p8_is_the_rounded_exponential():
    p = fx.exp2_p8(ALL.astype(np.uint16)).astype(np.float64)
    exact = 255 * np.exp2(-ALL / 256)
    assert p[0] == 255 and (p[ALL >= 16 * 256] == 0).all()
    assert np.abs(p - exact).max() <= 0.5 + 0.0028 * 255
    assert (np.diff(p) <= 0).all(), "never grows with distance"


@pytest.mark.parametrize(
    ("function", "given", "result"),
    [
        *(
            pytest.param(fx.EXP2[name][0], np.uint32, np.uint32, id=name)
            for name in fx.EXP2
            if name != "exact"
        ),
        pytest.param(fx.exp2_p8, np.uint16, np.uint8, id="p8"),
    ],
)
def test_jit_gives_the_bits_of_numpy(function, given, result):
    scalar = njit(function)

    @njit
    def run(y):
        out = np.empty(y.size, result)
        for i in range(y.size):
            out[i] = scalar(y[i])
        return out

    y = ALL.astype(given)
    np.testing.assert_array_equal(run(y), function(y))


def test_interpreted_scalars_agree_with_arrays():
    with np.errstate(over="ignore"):
        for y in (0, 1, 127, 128, 255, 256, 257, 4095, 4096, 65535):
            assert fx.exp2_p8(np.uint16(y)) == fx.exp2_p8(np.array([y], np.uint16))[0]
            assert fx.exp2_quadratic(np.uint32(y)) == fx.exp2_quadratic(np.array([y], np.uint32))[0]


def test_softcap():
    x = np.concatenate(
        [
            np.linspace(-60, 60, 100001),
            np.linspace(-7, 7, 100001),
            [0, -0.0, 1e-18, 1e30, -1e30, np.inf],
        ]
    ).astype(np.float32)
    got = fx.softcap(x, np.float32(1))
    want = np.tanh(x.astype(np.float64))
    assert (np.abs(got - want) <= 9.1e-6 * np.abs(want)).all()
    assert (np.abs(got) <= 1).all() and (got == -fx.softcap(-x, np.float32(1))).all()
    assert np.isnan(fx.softcap(np.float32(np.nan), np.float32(1)))
    half = np.abs(fx.softcap(x, np.float32(150) * fx.LOG2E_Q8) - 150 * 256 / np.log(2) * want).max()
    assert 0.4 < half < 0.51  # units of 1/256 octave at a cap of 150
    jitted = njit(error_model="numpy")(fx.softcap)
    np.testing.assert_array_equal(
        np.array([jitted(v, np.float32(20)) for v in x[::50]]), fx.softcap(x[::50], np.float32(20))
    )


def test_eighths_below_an_octave():
    """What a block's sums are multiplied by, to a bit of float32, also of a top that has wrapped."""
    top = np.arange(-(1 << 15), (1 << 15) + 32, 32)
    exact = 2.0 ** (top / 256 - -(-top // 256))
    assert (np.abs(fx.below_octave(top) / exact - 1) < 2.0**-23).all()
    np.testing.assert_array_equal(fx.below_octave(top.astype(np.int16)), fx.below_octave(top))


def test_a_fused_multiply_add_rounds_once():
    """Against exact fractions: sums of any two sizes, and those that lie half way between floats."""
    rng = np.random.default_rng(0)
    a, b, c = (rng.standard_normal(300).astype(np.float32) for _ in range(3))
    c *= np.exp2(rng.integers(-30, 60, 300)).astype(np.float32)
    one, half = np.float32(1), np.float32(2.0**-24)
    ties = [
        (one + half * 2, half * (one - half), one),
        (one - half, half, one),
        (half, half, -half),
    ]
    ties += [(half, -(one - half), one + 2 * half), (half, one + 2 * half, one)]
    a, b, c = (
        np.append(x, [t[n] for t in ties]).astype(np.float32) for n, x in enumerate((a, b, c))
    )
    found = multiply_add(a, b, c).astype(np.float32)
    for x, y, z, near in zip(a, b, c, found, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        for other in (np.nextafter(near, F(-np.inf)), np.nextafter(near, F(np.inf))):
            off, beside = (abs(Fraction(float(n)) - exact) for n in (near, other))
            assert off < beside or (off == beside and near.view(np.int32) % 2 == 0)


def test_the_weight_of_the_octave_itself_is_one():
    """255 is 1.0 as a weight of 8 bits: what a log-sum-exp divides by."""
    assert fx.exp2_p8(np.uint16(0)) == fx.P_ONE == 255
    assert fx.exp2_p16(np.uint16(0)) == fx.P_WIDE == 255 * 256
    assert fx.exp2_quadratic(np.uint32(0)) == fx.ONE_Q16 == 65536


def test_bfloat16_weights():
    """Near 255 * 2**-y, of 8 significant bits, 0 from 16 octaves on."""
    y = np.arange(65536, dtype=np.uint32)
    found = fx.exp2_bf16(y)
    exact = 255 * 2.0**15 * np.exp2(y / -256.0)
    near = y < 16 * 256
    assert (np.abs(found - exact) <= (2.0**-8 + 2e-4) * exact)[near].all() and not found[
        ~near
    ].any()
    bits = found[near].astype(np.float32).view(np.uint32)
    assert not (bits & np.uint32(0xFFFF)).any()


def test_a_block_far_below_the_maximum_is_scaled_by_a_normal_number():
    assert fx.EIGHTHS.min() * np.float32(2.0**-fx.MOST_BELOW) >= np.finfo(np.float32).tiny
