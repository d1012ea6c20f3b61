"""The gradients of sm_90a's own kernel, TMA and wgmma, in the emulator against float64."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import backward_checks
from backward_checks import DTYPES, case, gradients, solve

from numflash import validation
from numflash.cuda import launch_backward
from numflash.cuda.device import operands
from numflash.cuda.launch_backward_hopper import shape_of
from numflash.cuda.validate.cases import PLAIN
from numflash.validation.options import Options

slow = pytest.mark.slow
WIDE = pytest.param(128, marks=slow)


@pytest.fixture(autouse=True)
def several_turns(monkeypatch):
    """Two blocks, which compute one tile of rows after the other."""
    monkeypatch.setattr(operands, "EMULATED_BLOCKS", 2)


def check(shape, dtype="float16", **options):
    reports = backward_checks.check(shape, dtype, "sm_90a", **options)
    assert len(reports) == 3 and all(x.tma_copied and not x.async_copied for x in reports[1:])
    return reports


@slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("d", [128, 64])
def test_ring_of_tiles(d, seed):
    """More tiles of queries and of keys than stages, the last ones and the last blocks not full."""
    check({"l": 300 if d == 128 else 600, "s": 400 if d == 128 else 560, "d": d}, seed=seed)


@pytest.mark.parametrize("d", [64, WIDE])
@pytest.mark.parametrize(
    ("l", "s", "options"),
    [
        pytest.param(150, 150, {"is_causal": True}, marks=slow),
        pytest.param(70, 290, {"is_causal": True, "alignment": "lower_right"}, marks=slow),
        (290, 50, {"is_causal": True, "alignment": "lower_right"}),  # rows that see nothing
        pytest.param(150, 300, {"window": (40, 3)}, marks=slow),
        # tiles that all rows see between two edges
        pytest.param(300, 330, {"window": (170, 150)}, marks=slow),
        (70, 150, {"window": (None, 9), "key_lengths": np.array([150, 0])}),
    ],
)
def test_bands_of_grouped_heads(d, l, s, options):
    check(
        {"b": 2 if "key_lengths" in options else 1, "h": 2, "hkv": 1, "l": l, "s": s, "d": d},
        **options,
    )


@slow
@pytest.mark.parametrize("d", [64, 128])
def test_what_lies_beyond_the_keys_is_not_read(d):
    """Keys and values that are NaN there, and results that are all written."""
    lengths = np.array([70, 0, 230])
    q, k, v, do = case(b=3, h=2, hkv=1, l=130, s=230, d=d)
    out, lse, *expected = gradients(q, k, v, do, key_lengths=lengths)
    for entry, count in enumerate(lengths):
        k[entry, :, count:], v[entry, :, count:] = np.nan, np.nan
    found, _ = solve(q, k, v, do, out, lse, "sm_90a", in_place=True, key_lengths=lengths)
    for mine, right in zip(found, expected, strict=True):
        assert np.allclose(mine, right, atol=4e-3)
    assert not found[0][1].any()
    assert not any(x[n, :, count:].any() for x in found[1:] for n, count in enumerate(lengths))


@slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"h": 3, "l": 1, "s": 1, "d": 33, "dv": 35}, {}),
        ({"h": 6, "hkv": 1, "l": 3, "s": 200, "d": 17, "dv": 33}, {}),
        ({"h": 2, "l": 150, "s": 3, "d": 100, "dv": 72}, {"is_causal": True}),
        ({"h": 2}, {"sinks": np.array([0.5, -1.0], np.float32)}),
        ({"h": 2}, {"scale": -0.3}),
        ({"s": 70}, {"magnify": 100}),
    ],
)
def test_odd_shapes_and_scales(shape, options):
    check(shape, **options)


@slow
@pytest.mark.parametrize("d", [64, 128])
def test_bfloat16(d):
    check({"b": 2, "h": 2, "l": 150, "s": 150, "d": d}, "bfloat16", is_causal=True)


def test_the_same_bits_under_every_schedule():
    q, k, v, do = case(h=2, hkv=1, l=140, s=290)
    out, lse, *_ = gradients(q, k, v, do, is_causal=True)
    found = [
        solve(q, k, v, do, out, lse, "sm_90a", emulator, is_causal=True)[0]
        for emulator in ({"schedule": "lockstep"}, {"seed": 0}, {"seed": 1})
    ]
    for again in found[1:]:
        for a, b in zip(found[0], again, strict=True):
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=slow)])
def test_tiles_outside_the_band_are_skipped(causal):
    """Of queries before the block's first key, and of keys behind the block's last query."""
    length, blocks = 384, range(0, 384, 128)
    reports = check({"h": 2, "hkv": 1, "l": length, "s": length}, is_causal=causal)
    for report, which, products in zip(reports[1:], ("kv", "q"), (4, 3), strict=True):
        columns = shape_of(which, "float16", 64)["columns"]
        tiles = -(-length // columns)
        seen = {
            "kv": [tiles - first // columns * causal for first in blocks],
            "q": [-(-(first + 128) // columns) if causal else tiles for first in blocks],
        }
        multiplied = 128 * columns * 64
        assert report.tensor_flops == 2 * products * 2 * sum(seen[which]) * multiplied


def problem_of(shape=(1, 2, 1, 70, 90), d=64, dv=None, dtype="float16", **options):
    b, h, hkv, length, s = shape
    q, k, v = (
        np.zeros(x, DTYPES[dtype])
        for x in ((b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv or d))
    )
    return validation.problem(
        q, k, v, Options(**PLAIN | {"precision": dtype, "enable_gqa": True} | options)
    )


@pytest.mark.parametrize(
    ("problem", "options", "own"),
    [
        ({}, {}, True),
        ({"d": 40, "dv": 64, "is_causal": True, "key_lengths": np.array([9])}, {}, True),
        ({"d": 96, "dtype": "bfloat16"}, {}, True),
        ({"d": 64, "dv": 65}, {}, False),
        ({"d": 129}, {}, False),
        ({"softcap": 2.0}, {}, False),
        ({"attn_mask": np.ones((1, 1, 70, 90), bool)}, {}, False),
        ({"attn_mask": np.ones((1, 1, 70, 90), np.float32)}, {}, False),
        ({"alibi_slopes": np.ones(2, np.float32)}, {}, False),
        ({"shape": (1, 2, 1, 0, 90)}, {}, False),
        ({}, {"older": True}, False),
        ({}, {"arch": "sm_80"}, False),
    ],
)
def test_what_the_kernel_takes(problem, options, own):
    made = problem_of(**problem)
    out = np.zeros((*made.query.shape[:3], made.shape[6]), made.query.dtype)
    lse = np.zeros(made.query.shape[:3], np.float32)
    work = launch_backward.float_backward(made, out, out, lse, **{"arch": "sm_90a", **options})
    names = {x.factory.__name__ for x in work.launches} - {"backward_rows"}
    assert names == {"backward_hopper" if own else "flash_backward"}


def test_broadcast_gradients_on_a_card_have_no_tensor_map():
    """A stride of 0 is none that TMA takes."""
    made = problem_of()
    out, lse = np.zeros((1, 2, 70, 64), np.float16), np.zeros((1, 2, 70), np.float32)
    grad = np.broadcast_to(out[:, :1], out.shape)
    stats = np.zeros(launch_backward.statistics_shape(made), np.float32)
    results = (*(np.zeros_like(x) for x in (made.query, made.key, made.value)), stats)
    for given, name in ((out, "backward_hopper"), (grad, "flash_backward")):
        work = launch_backward.float_backward(made, given, out, lse, "sm_90a", results)
        assert {x.factory.__name__ for x in work.launches[1:]} == {name}
