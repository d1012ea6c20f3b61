"""INT8 attention of float arrays on a card: quantised, computed and written by kernels.

In the emulator, against the integer model.
"""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from combinations import in_memory
from int8_checks import OPTIONS

from numflash import reference, validation
from numflash.cuda.arrays import quantized
from numflash.cuda.device import operands
from numflash.cuda.launch_int8 import int8_forward
from numflash.interop.arrays import Imported, convert, widen
from numflash.numerics import merge, quantization
from numflash.validation.options import Options


def problem_of(q, k, v, dtype="float32", attn_mask=None, is_causal=False, scale=None, **options):
    """The problem of arrays as they lie on a card: bits of `dtype`."""
    given = Options(attn_mask, 0.0, is_causal, scale, True, **{**OPTIONS, **options})
    stored = (Imported(convert(x, dtype), dtype, None) for x in (q, k, v))
    return validation.problem_of(tuple(stored), given)


def on_the_card(problem, arch, dtype="float32", transposed=False, seed=0):
    """out, lse, the launches and the reports; memory is full of garbage before."""
    nb, nh, _, length, _, _, dv = problem.shape
    kind = np.uint16 if dtype == "bfloat16" else dtype
    shape = (nb, length, nh, dv) if transposed else (nb, nh, length, dv)
    out, lse = np.full(shape, 7, kind), np.full((nb, nh, length), 7, np.float32)
    out = out.swapaxes(1, 2) if transposed else out
    scratch = np.full(quantized.scratch_bytes(problem, arch), 0x7F, np.uint8)
    steps = quantized.plan(problem, arch, dtype, (out, lse), scratch)
    reports = [operands.emulated(in_memory(step), seed=seed)[-1] for step in steps]
    return out, lse, steps, reports


def bits(x):
    return np.where(np.isnan(x), np.float32(np.nan), x).astype(np.float32).view(np.int32)


def same_bits(problem, arch, dtype="float32", **options):
    """The output is the model's to the bit, rounded once to the dtype.

    The LSE, in float32, is near its float64 one; the operands are those that the host makes.
    """
    out, lse, steps, _ = on_the_card(problem, arch, dtype, **options)
    plain = quantization.quantize_problem(problem)
    expected, expected_lse = reference.integer_model(plain)
    rounded = widen(convert(expected, dtype)).astype(np.float32)
    assert np.array_equal(bits(widen(out).astype(np.float32)), bits(rounded))
    assert np.allclose(lse, expected_lse, rtol=2e-6, atol=2e-5, equal_nan=True)
    same_operands(int8_forward(plain, arch), steps[2])


def same_operands(host, card):
    """Two launches of one kernel with operands of equal bits; what the host leaves zeros is
    written by the kernel, or not read.
    """
    assert host.constants == card.constants and host.grid == card.grid
    pairs = [
        (a, b)
        for a, b in zip(flat(host), flat(card), strict=True)
        if isinstance(a, np.ndarray) and a.any()
    ]
    assert len(pairs) >= 9
    for a, b in pairs:
        assert np.array_equal(raw(a), raw(b))


def raw(x):
    """The bytes of each row, those of any NaN alike: a host's float mask comes as bytes."""
    x = bits(x) if x.dtype == np.float32 else x
    return np.ascontiguousarray(x).view(np.uint8)


def flat(launch):
    """Arrays of a launch, those of tensor maps too."""
    for group in launch.args:
        for x in group:
            yield from (m.array for m in x) if isinstance(x, list) else (x,)


def test_a_short_sequence():
    """Fewer keys than a sequence has first ones."""
    q, k, v = oracles.qkv(b=1, h=2, hkv=1, l=70, s=3, d=64)  # a kernel of test_flash_int8.py
    same_bits(problem_of(q, k, v, is_causal=True), "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_odd_sizes(arch):
    """Tails of rows, keys and channels, one KV head for two, short sequences, a mean to take off,
    any strides.
    """
    q, k, v = oracles.qkv(b=2, h=2, hkv=1, l=70, s=201, d=40)
    lengths = np.array([201, 3])
    problem = problem_of(q, k + 3, v[..., :37], is_causal=True, key_lengths=lengths)
    same_bits(problem, arch, transposed=True)


def at_scales(x, lowest=-150, highest=127):
    """Rows of x from the smallest numbers to the largest, some of zeros."""
    rows = np.random.default_rng(1).integers(lowest, highest, x.shape[:-1])[..., None]
    with np.errstate(over="ignore"):
        return np.where(rows % 5 == 0, 0, np.clip(np.ldexp(x, rows), -3e38, 3e38)).astype(
            np.float32
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
def test_numbers_of_every_size(part):
    """Peaks whose scale would leave float32, differences that overflow, cuts of scales."""
    operands = list(oracles.qkv(h=1, l=20, s=140, d=32))
    operands[part] = at_scales(operands[part])
    problem = problem_of(*operands)
    out, _, steps, _ = on_the_card(problem, "sm_80")
    plain = quantization.quantize_problem(problem)
    expected, _ = reference.integer_model(plain)
    assert np.array_equal(bits(out), bits(expected))
    same_operands(int8_forward(plain, "sm_80"), steps[2])


@pytest.mark.slow
def test_a_difference_from_the_mean_beyond_float32():
    """It is the largest number."""
    q, k, v = oracles.qkv(h=1, l=3, s=3, d=20)
    k[0, 0, :, 7] = 3e38, -3e38, 3e38
    problem = problem_of(q, k, v)
    _, _, steps, _ = on_the_card(problem, "sm_80")
    same_operands(int8_forward(quantization.quantize_problem(problem), "sm_80"), steps[2])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(3))
@pytest.mark.parametrize("worst", [np.nan, np.inf, -np.inf])
def test_rows_that_are_not_finite(part, worst):
    """They make the rows NaN that attend to them, and touch no mean and no scale of others.

    What lies beyond the length of a sequence is not looked at.
    """
    operands = oracles.qkv(h=1, l=20, s=140, d=32)
    operands[part][0, 0, [7, 19], 5] = worst
    if part:
        operands[part][0, 0, 135:] = worst
    lengths = np.array([135])
    problem = problem_of(*operands, is_causal=True, key_lengths=lengths)
    same_bits(problem, "sm_80")
    out, *_ = on_the_card(problem, "sm_80")
    assert np.isnan(out).any() and not np.isnan(out[0, 0, :7]).any()


@pytest.mark.slow
def test_the_order_of_the_mean():
    """More keys than a chunk: sums of each in float32, of all in float64."""
    q, k, v = oracles.qkv(h=1, l=3, s=2100, d=16)
    k = k * np.float32(1e4) + np.float32(12345.678)
    same_bits(problem_of(q, k, v), "sm_80")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "dtype", "options"),
    [
        ("sm_80", "float16", {"softcap": 3.0, "alibi_slopes": np.array([0.5, 0.1])}),
        ("sm_80", "bfloat16", {"window": (30, 5), "alignment": "lower_right"}),
        ("sm_75", "bfloat16", {"is_causal": True}),
        ("sm_75", "float16", {"pv": "int16"}),
        ("sm_90a", "bfloat16", {"attn_mask": "float"}),
        ("sm_90a", "float16", {"is_causal": True, "window": (50, 0)}),
    ],
)
def test_options_and_dtypes(arch, dtype, options):
    """On sm_75 of odd head sizes, whose rows are read element by element."""
    q, k, v = oracles.qkv(h=2, hkv=1, l=75, s=133, d=61 if arch == "sm_75" else 64)
    if options.get("attn_mask") == "float":
        options = {"attn_mask": oracles.draw((75, 133), 9, np.float32)}
    same_bits(problem_of(q, k, v, dtype, **options), arch, dtype)


@pytest.mark.slow
def test_sinks_and_rows_without_keys():
    """As `merge.apply_sinks` to float32's rounding; a row that sees nothing is 0 and -inf."""
    q, k, v = oracles.qkv(h=2, l=6, s=9, d=32)
    sinks = np.array([0.7, -2.0], np.float32)
    given = {"is_causal": True, "key_lengths": np.array([0])}
    for options in ({}, given):
        problem = problem_of(q, k, v, sinks=sinks, **options)
        out, lse, *_ = on_the_card(problem, "sm_80")
        plain = quantization.quantize_problem(problem)
        expected = reference.integer_model(plain)
        merge.apply_sinks(*expected, sinks)
        assert np.allclose(out, expected[0], rtol=1e-6, atol=0)
        assert np.allclose(lse, expected[1], rtol=1e-6, atol=1e-6)
    assert not out.any() and np.array_equal(lse, expected[1])
    _, lse, *_ = on_the_card(problem_of(q, k, v, **given), "sm_80")
    assert (lse == -np.inf).all()
