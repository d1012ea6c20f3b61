"""Few rows over many keys: parts of the keys and their merging, in the emulator against float64."""

import ml_dtypes
import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from combinations import in_memory
from float_checks import DTYPES, compare, problem_of

import numflash
from numflash.cuda import launch_split
from numflash.cuda.arrays import forward
from numflash.cuda.compile import compiled
from numflash.cuda.device import operands
from numflash.cuda.validate.on_the_card import Planned
from numflash.flex.attention import with_functions

slow = pytest.mark.slow


def full(shape, dtype):
    """Memory that holds NaN."""
    return np.full(shape, 0x7F7F if np.dtype(dtype) == np.uint16 else np.nan, dtype)


def attend(problem, number, arch="sm_80", turned=False):
    """out, LSE and the launches for keys in this number of parts."""
    nb, nh, _, length, _, _, dv = problem.shape
    kind = problem.query.dtype
    out = full((nb, length, nh, dv) if turned else (nb, nh, length, dv), kind)
    results = out.swapaxes(1, 2) if turned else out, full((nb, nh, length), np.float32)
    steps = launch_split.forward(problem, arch, number, results, full)
    for step in steps:
        operands.emulated(in_memory(step))
    return *results, steps


def check(number=3, dtype="float16", arch="sm_80", turned=False, shape=None, **options):
    sizes = {"b": 1, "h": 4, "hkv": 2, "l": 3, "s": 400, "d": 64} | (shape or {})
    q, k, v = (x.astype(DTYPES[dtype]) for x in oracles.qkv(**sizes))
    out, lse, steps = attend(problem_of(q, k, v, **options), number, arch, turned)
    sinks = options.pop("sinks", None)
    if sinks is None:
        compare(out, lse, q, k, v, **options)
        return steps
    out = (out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out).astype(np.float64)
    expected, expected_lse = oracles.naive(q, k, v, sinks=sinks, **options)
    assert np.allclose(out, expected, atol=3e-3) and np.allclose(lse, expected_lse, atol=1e-4)
    return steps


RANDOM = np.random.default_rng(7)
SEEN = RANDOM.random((1, 4, 3, 400)) > 0.5
SEEN[0, 1, 2] = False  # a row that sees nothing
SEEN[0, :, 1, :300] = False  # nothing in two of three parts
SINKS = np.array([-3.0, 0.5, 4.0, 60.0], np.float32)
BIAS = np.where(SEEN, RANDOM.standard_normal(SEEN.shape), -np.inf).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"attn_mask": SEEN}, marks=slow),
        {"attn_mask": BIAS, "softcap": 5.0, "alibi_slopes": np.array([0.1, 0.2, 0.4, 0.8], "f4")},
        pytest.param(
            {"is_causal": True, "alignment": "lower_right", "key_lengths": np.array([313])},
            marks=slow,
        ),
        pytest.param({"window": (150, 20), "alignment": "lower_right"}, marks=slow),
        pytest.param(
            {"window": (150, 20), "shape": {"b": 3}, "key_lengths": np.array([0, 1, 400])},
            marks=slow,
        ),
        pytest.param({"sinks": SINKS, "key_lengths": np.array([0])}, marks=slow),
        pytest.param({"sinks": SINKS, "attn_mask": SEEN}, marks=slow),
    ],
)
def test_options(options):
    check(**options)


@pytest.mark.parametrize("number", [2, 7, 33, 64])
def test_any_number_of_parts(number):
    """More than there are tiles of keys, more than a warp has lanes, as many as it holds."""
    check(number, shape={"s": 1100, "l": 1})


def test_parts_that_outweigh_the_others():
    """By more than float32 holds: shares refer to the largest LSE of all 64 parts."""
    changed = {"softcap": 5.0, "alibi_slopes": np.zeros(4, np.float32)}
    for heavy in (slice(5), slice(-5, None)):
        bias = np.zeros((1, 1, 1, 1100), np.float32)
        bias[..., heavy] = 300
        check(64, shape={"s": 1100, "l": 1}, attn_mask=bias, **changed)


@pytest.mark.parametrize(
    ("shape", "dtype", "arch"),
    [
        pytest.param(
            {"d": 40, "dv": 72, "h": 6, "hkv": 2, "l": 11}, "bfloat16", "sm_80", marks=slow
        ),
        ({"d": 64, "b": 2, "h": 5, "hkv": 5, "l": 19}, "float16", "sm_75"),
        pytest.param({"h": 8, "hkv": 1, "l": 17, "s": 700}, "float16", "sm_90a", marks=slow),
        pytest.param({"d": 128, "h": 6, "hkv": 2, "l": 33}, "bfloat16", "sm_90a", marks=slow),
        pytest.param({"d": 256, "h": 2, "hkv": 1, "l": 1}, "bfloat16", "sm_80", marks=slow),
        pytest.param({"d": 96, "h": 2, "hkv": 2, "l": 65}, "float16", "sm_80", marks=slow),
        pytest.param({"d": 32, "h": 3, "hkv": 1, "l": 2}, "float16", "sm_80", marks=slow),
    ],
)
def test_shapes(shape, dtype, arch):
    check(4, dtype, arch, turned=True, shape=shape)


@slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "alignment": "lower_right", "key_lengths": np.array([599])},
        {"window": (400, 20), "sinks": np.ones(4, np.float32)},
        {"softcap": 5.0, "alibi_slopes": np.ones(4, np.float32)},
        {"key_lengths": np.array([0])},
    ],
)
def test_options_on_hopper(options):
    check(5, arch="sm_90a", shape={"l": 40, "s": 700}, **options)


def test_a_value_that_is_not_finite_spoils_the_rows_that_see_it():
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=4, hkv=2, l=2, s=400, d=64))
    v[0, 0, 399, 5] = np.nan
    k[0, 1, 130] = np.nan
    out, lse, _ = attend(problem_of(q, k, v), 3)
    assert np.isnan(out[0, :2, :, 5]).all() and np.isfinite(out[0, :2, :, :5]).all()
    assert (
        np.isnan(out[0, 2:]).all() and np.isnan(lse[0, 2:]).all() and np.isfinite(lse[0, :2]).all()
    )


def parts(b=1, h=8, hkv=8, l=1, s=32768, arch="sm_80", multiprocessors=132, **options):
    zeros = [np.broadcast_to(np.float16(0), (b, n, m, 64)) for n, m in ((h, l), (hkv, s), (hkv, s))]
    return launch_split.parts_of(problem_of(*zeros, **options), arch, multiprocessors)


def test_when_keys_are_split():
    assert parts() > 16 and parts(h=32) == parts()  # heads of a group are rows of one tile
    assert parts(b=64) == 1 and parts(b=64, multiprocessors=1000) > 1
    assert parts(l=4096) == 1
    assert parts(l=128, arch="sm_90a") > 8 and parts(l=128, h=80, hkv=80, arch="sm_90a") == 1
    causal = {"is_causal": True}
    assert parts(**causal) == 1 and parts(**causal, alignment="lower_right") == parts()
    assert parts(window=(100, 0), alignment="lower_right") == 1
    assert parts(key_lengths=np.array([100])) == 1


def test_a_card_splits_the_keys_of_few_rows():
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=4, hkv=2, l=2, s=600, d=64))
    results = np.zeros(q.shape, np.float16), np.zeros(q.shape[:3], np.float32)
    for s, names in ((600, ["flash_float", "merge_parts"]), (300, ["flash_float"])):
        problem = problem_of(q, k[:, :, :s], v[:, :, :s])
        steps = forward.launches(problem, "float16", Planned("sm_90a"), results, np.zeros)
        assert [x.factory.__name__ for x in steps] == names


@slow
def test_machine_code_for_turing():
    """The emulator takes instructions of later cards, their assembler does not."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=2, hkv=1, l=2, s=600, d=64))
    results = np.zeros(q.shape, np.float16), np.zeros(q.shape[:3], np.float32)
    for step in launch_split.forward(problem_of(q, k, v), "sm_75", 2, results, full):
        compiled(step.factory, "sm_75", "cubin", **step.constants)


@slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_functions_and_block_masks(arch):
    """The listed tiles of keys are shared out as all tiles are; some parts have none."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=2, h=4, hkv=2, l=40, s=700, d=64))
    score = lambda x, b, h, i, j: x + 0.01 * (j - i) + 0.5 * h  # noqa: E731
    seen = lambda b, h, i, j: ((j >= 520 + i) & (j < 650)) | (j < 20 * b)  # noqa: E731
    mask = numflash.create_block_mask(seen, 2, None, 40, 700, BLOCK_SIZE=16)
    problem = with_functions(problem_of(q, k, v), score, mask, "cuda-emulator")
    out, lse, steps = attend(problem, 5, arch)
    assert steps[0].constants["listed"] and steps[0].constants["split"]
    scores = (q.astype(float) @ np.repeat(k, 2, 1).swapaxes(2, 3).astype(float)) / 8
    b, h, i, j = np.ogrid[:2, :4, :40, :700]
    scores = np.where(seen(b, h, i, j), score(scores, b, h, i, j), -np.inf)
    total = np.exp(scores).sum(-1, keepdims=True)
    expected = np.exp(scores) / total @ np.repeat(v, 2, 1).astype(float)
    assert np.allclose(out, expected, atol=4e-3) and np.allclose(
        lse, np.log(total)[..., 0], atol=1e-4
    )


@slow
def test_a_part_that_a_row_does_not_see_stays_out():
    """What is not finite among keys that a mask hides is in no part that the row sees."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=2, l=2, s=400, d=64))
    seen = np.arange(400) < 192  # the first of two parts: six tiles of 64 keys, then the last one
    hidden = v.copy()
    hidden[..., 300, 7] = np.nan
    found = [
        attend(problem_of(q, k, x, attn_mask=seen[None, None, None]), 2)[:2] for x in (v, hidden)
    ]
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
