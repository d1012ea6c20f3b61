"""The TMA and wgmma kernel for sm_90a in the emulator, against float64."""

import dataclasses

import ml_dtypes
import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from float_checks import compare, problem_of

from numflash.cuda import launch, launch_float
from numflash.cuda.device import operands


def check(shape, overlap=True, dtype=np.float16, seed=0, **options):
    q, k, v = (x.astype(dtype) for x in oracles.qkv(**shape, seed=seed))
    out, lse, report = operands.emulated(
        launch_float.hopper_forward(problem_of(q, k, v, **options), overlap), seed=seed
    )
    compare(out, lse, q, k, v, **options)
    return report


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
def test_ring_of_tiles(overlap, seed):
    """Five tiles turn the ring of two stages more than twice."""
    report = check({"b": 1, "h": 1, "l": 130, "s": 600, "d": 64}, overlap, seed=seed)
    assert report.tma_copied > 0 and report.async_copied == 0


@pytest.mark.slow
def test_head_sizes():
    check({"b": 1, "h": 1, "l": 70, "s": 200, "d": 128}, is_causal=True)
    check({"b": 1, "h": 2, "hkv": 1, "l": 70, "s": 200, "d": 256, "dv": 200})


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (100, 3)},
        {"window": (None, 3), "key_lengths": np.array([150, 0])},
    ],
)
def test_bands(options):
    check({"b": 2, "h": 2, "hkv": 1, "l": 200, "s": 300, "d": 64}, **options)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [True, False])
def test_a_band_with_two_edges(overlap):
    """Two tiles at its end, one or two that all rows attend to, two at its beginning."""
    options = {"window": (400, 3), "alignment": "lower_right"}
    check({"b": 1, "h": 2, "hkv": 1, "l": 96, "s": 600, "d": 64}, overlap, **options)


@pytest.mark.parametrize(
    ("shape", "tile"),
    [
        ({"b": 1, "h": 1, "l": 130, "s": 520, "d": 128}, (128, 176)),  # three of keys
        ({"b": 1, "h": 2, "hkv": 1, "l": 180, "s": 200, "d": 64}, (192, 128)),  # two of rows
    ],
)
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_tiles_of_other_sizes(shape, tile, seed):
    """11 steps of 16 keys; three warpgroups that take turns. The last tiles are not full."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(**shape, seed=seed))
    launched = launch_float.hopper_forward(problem_of(q, k, v))
    assert (launched.constants["block_q"], launched.constants["block_k"]) == tile
    out, lse, _ = operands.emulated(launched, seed=seed)
    compare(out, lse, q, k, v)


@pytest.mark.parametrize(
    ("rows", "keys", "d", "options", "tile"),
    [
        (128, 128, 64, {}, (128, 128)),
        (192, 192, 64, {}, (192, 128)),  # one tile of rows instead of two
        (256, 4096, 64, {}, (128, 128)),
        (4096, 4096, 64, {}, (192, 128)),
        (1024, 1024, 64, {"is_causal": True}, (128, 128)),
        (2048, 2048, 64, {"is_causal": True}, (192, 128)),
        (1024, 256, 128, {}, (128, 128)),
        (1024, 320, 128, {}, (128, 176)),  # two tiles of keys instead of three
        (64, 8192, 128, {}, (128, 176)),
        (64, 8192, 128, {"key_lengths": np.array([256, 200])}, (128, 128)),
        (64, 8192, 128, {"window": (300, None)}, (128, 128)),
        (64, 8192, 128, {"softcap": 2.0}, (128, 128)),
    ],
)
def test_the_tile_that_hides_least(rows, keys, d, options, tile):
    q, k = (np.zeros((2, 2, n, d), np.float16) for n in (rows, keys))
    launched = launch_float.hopper_forward(problem_of(q, k, k, **options))
    assert (launched.constants["block_q"], launched.constants["block_k"]) == tile
    assert launched.constants["queries"] == (1 if tile == (128, 176) else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ({"b": 1, "h": 1, "l": 500, "s": 400, "d": 128}, {}),
        ({"b": 2, "h": 2, "hkv": 1, "l": 65, "s": 200, "d": 256}, {}),
        ({"b": 2, "h": 1, "l": 200, "s": 300, "d": 128}, {"key_lengths": np.array([200, 0])}),
    ],
)
@pytest.mark.parametrize("seed", [0, 1])
def test_clusters_change_no_bit(shape, options, seed):
    """Two blocks take two turns; keys and values come from global memory once for both."""
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(**shape, seed=seed))
    plan = launch_float.hopper_forward(problem_of(q, k, v, **options))
    assert plan.grid == (4, 1, 1)
    plan, found = dataclasses.replace(plan, grid=(2, 1, 1)), []
    for blocks in (1, 2):
        constants = plan.constants | {"cluster": blocks}
        out, lse, report = operands.emulated(
            dataclasses.replace(plan, constants=constants, cluster=blocks), seed=seed
        )
        compare(out, lse, q, k, v, **options)
        found.append((out.view(np.uint16), lse.view(np.uint32), report))
    (out, lse, alone), (same, same_lse, together) = found
    np.testing.assert_array_equal(out, same)
    np.testing.assert_array_equal(lse, same_lse)
    seen = np.count_nonzero(options.get("key_lengths", np.ones(2)))  # Q comes with keys only
    tiles_of_q = 2 * seen * plan.constants["block_q"] * shape["d"] * 2
    keys_and_values = alone.tma_copied - tiles_of_q
    assert together.tma_copied == alone.tma_copied
    assert alone.global_loaded - together.global_loaded == keys_and_values // 2


@pytest.mark.parametrize(
    ("shape", "options", "expected"),
    [
        ((129, 256, 256), {}, 2),
        ((128, 256, 256), {}, 1),  # one tile of rows
        ((300, 256, 256), {}, 1),  # three
        ((129, 200, 256), {}, 2),
        ((129, 128, 128), {}, 1),
        ((129, 128, 256), {}, 1),
        ((129, 256, 256), {"is_causal": True}, 1),
        ((129, 256, 256), {"softcap": 2.0}, 1),
    ],
)
def test_what_is_computed_in_clusters(shape, options, expected):
    """A card with an odd number of multiprocessors leaves one of them out."""
    length, d, dv = shape
    q, v = (np.zeros((1, 4, length, n), np.float16) for n in (d, dv))
    plan = launch_float.hopper_forward(problem_of(q, q, v, **options))
    assert plan.cluster == plan.constants["cluster"] == expected
    assert plan.blocks(7)[0] % expected == 0 and plan.blocks(1) == (expected, 1, 1)


def test_one_key():
    check({"b": 1, "h": 1, "l": 1, "s": 1, "d": 64})


def zeros(shape=(1, 1, 1, 4, 4), **options):
    b, h, hkv, l, s = shape
    q = np.zeros((b, h, l, 64), np.float16)
    k = np.zeros((b, hkv, s, 64), np.float16)
    return problem_of(q, k, k, **options)


def test_plan_chooses_the_kernel():
    kernel = lambda problem, arch="sm_90a": launch.plan(problem, arch).factory.__name__  # noqa: E731
    assert kernel(zeros()) == kernel(zeros((1, 8, 2, 65, 65))) == "flash_hopper"
    assert (
        kernel(zeros(softcap=3.0))
        == kernel(zeros(alibi_slopes=np.ones(1, np.float32)))
        == "flash_hopper"
    )
    assert (
        kernel(zeros((1, 8, 2, 16, 65))) == "flash_float"
        and kernel(zeros((1, 8, 2, 17, 65))) == "flash_hopper"
    )
    assert kernel(zeros((1, 8, 2, 1, 65))) == "flash_float", (
        "the four heads of a group fill a tile together"
    )
    assert kernel(zeros(), "sm_80") == "flash_float"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"mask": True}])
def test_what_the_sm_80_kernel_does_on_hopper(options):
    """Built for sm_90a and run.

    The few queries of a group's heads, which fill no tile of 128 rows.
    """
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=4, hkv=2, l=9, s=100, d=64))
    seen = np.random.default_rng(1).random((9, 100)) > 0.5 if "mask" in options else None
    options = {name: x for name, x in options.items() if name != "mask"}
    problem = problem_of(q, k, v, seen, True, alignment="lower_right", **options)
    launched = launch.plan(problem, "sm_90a")
    assert (launched.factory.__name__, launched.arch, launched.grid) == (
        "flash_float",
        "sm_90a",
        (1, 2, 1),
    )
    out, lse, _ = operands.emulated(launched)
    expected, expected_lse = oracles.naive(
        q, k, v, attn_mask=seen, is_causal=True, alignment="lower_right", **options
    )
    assert np.allclose(out, expected, atol=2e-3) and np.allclose(lse, expected_lse, atol=3e-5)


def random_mask(*shape):
    rng = np.random.default_rng(3)
    seen = rng.random(shape) > 0.3
    seen[..., 7:8, :] = False  # a row that sees nothing
    return np.where(seen, rng.standard_normal(shape), -np.inf).astype(np.float32)


@pytest.mark.slow
def test_options_with_packed_heads():
    """Two of a group's three times two heads lie beside each other in the rows."""
    check(
        {"b": 2, "h": 6, "hkv": 1, "l": 50, "s": 200, "d": 64},
        attn_mask=random_mask(2, 6, 50, 200),
        softcap=2.0,
        is_causal=True,
        alignment="lower_right",
    )


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_taking_turns_changes_no_bit(causal, seed):
    """Five tiles, the last query tile not full, with and without a band.

    The order of issue is all that `ping_pong` changes.
    """
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(b=1, h=1, l=300, s=600, d=64))
    problem = problem_of(q, k, v, is_causal=causal)
    found = []
    for turns in (False, True):
        plan = launch_float.hopper_forward(problem)
        out, lse, _ = operands.emulated(
            dataclasses.replace(plan, constants=plan.constants | {"ping_pong": turns}), seed=seed
        )
        found.append((out.view(np.uint16), lse))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    ("l", "s", "dtype", "d", "options"),
    [
        (  # tiles of 192 rows, which take turns
            140,
            300,
            np.float16,
            64,
            {"window": (9, 0), "alignment": "lower_right", "key_lengths": np.array([100])},
        ),
        pytest.param(
            *(60, 170, ml_dtypes.bfloat16, 64),
            {"softcap": 2.0, "is_causal": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            60,
            170,
            np.float16,
            256,
            {
                "attn_mask": random_mask(1, 4, 60, 170),
                "softcap": 2.0,
                "is_causal": True,
                "alibi_slopes": np.linspace(0.1, 1, 4, dtype=np.float32),
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sinks_join_on_the_card(l, s, dtype, d, options):
    """With results given, as for arrays on a card, the kernel adds the sinks itself.

    A row that sees nothing has the sink's LSE.
    """
    q, k, v = (x.astype(dtype) for x in oracles.qkv(b=1, h=4, hkv=2, l=l, s=s, d=d))
    options = {"sinks": np.array([-3.0, 0.5, 4.0, 60.0], np.float32), **options}
    problem = problem_of(q, k, v, **options)
    launched = launch_float.hopper_forward(
        problem, results=(np.zeros(q.shape, problem.query.dtype), np.zeros(q.shape[:3], np.float32))
    )
    assert launched.constants["sinks"] and launched.constants["packed"] == 2
    out, lse, _ = operands.emulated(launched)
    expected, expected_lse = oracles.naive(q, k, v, **options)
    out = (out.view(ml_dtypes.bfloat16) if out.dtype == np.uint16 else out).astype(np.float64)
    assert (expected == 0).all(-1).any() == ("is_causal" not in options or "attn_mask" in options)
    assert np.allclose(out, expected, atol=8 * float(ml_dtypes.finfo(dtype).eps)) and np.allclose(
        lse, expected_lse, atol=1e-4
    )


def test_heads_packed_into_192_rows():
    """128 heads share keys: 64 of them fill a tile of 64 * 3 rows, which 128 do not divide."""
    launched = launch_float.hopper_forward(zeros((1, 128, 1, 6, 5)))
    box = launched.args[0][0][0].box
    assert launched.constants["packed"] == 64 and box[2] * box[3] == 192
