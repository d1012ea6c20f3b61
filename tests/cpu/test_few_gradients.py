"""The gradient of few rows of queries, against float64: every option, parts of the keys, what float32 cannot
hold.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from gradient_checks import F, agrees, close, drawn, held, near, solve
from oracles import draw, naive_gradients
from test_few_rows import BFLOAT16, ISAS, options
from test_flash_float import make

from numflash import attention, attention_backward
from numflash.cpu.backward import few_plan, plans
from numflash.jit.threads import limit, most
from numflash.tiling import threads as tiling_threads

pytestmark = pytest.mark.skipif(not ISAS, reason="no instruction set with this kernel")
SHAPES = (  # one row, tails of vectors and blocks, an uneven number of rows, V narrower and wider than WIDE
    {"b": 1, "h": 1, "l": 1, "s": 1, "d": 16, "dv": 16},
    {"b": 2, "h": 4, "hkv": 2, "l": 2, "s": 77, "d": 32, "dv": 48},
    {"b": 1, "h": 9, "hkv": 3, "l": 1, "s": 700, "d": 64, "dv": 64},
    {"b": 1, "h": 2, "hkv": 1, "l": 7, "s": 131, "d": 128, "dv": 80},
    {"b": 1, "h": 2, "hkv": 1, "l": 3, "s": 90, "d": 40, "dv": 72},  # whole vectors of eight only
)
EVERY_ISA = [*ISAS[:1], *(pytest.param(x, marks=pytest.mark.slow) for x in ISAS[1:])]


@pytest.fixture(autouse=True)
def however_few_keys(monkeypatch):
    monkeypatch.setattr(tiling_threads, "FEW_GRADIENT_KEYS", 1)


@pytest.fixture
def tiled(monkeypatch):
    """Problems that the tiles compute after the kernel of few rows, one entry for each."""
    made = []
    tiles = few_plan.GradientPlan

    def counted(*arguments):
        made.append(arguments)
        return tiles(*arguments)

    monkeypatch.setattr(few_plan, "GradientPlan", counted)
    return made


@pytest.mark.parametrize("isa", EVERY_ISA)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_option(isa, shape, tiled):
    operands = drawn(**shape)
    for name, given in options(shape["b"], shape["h"], shape["l"], shape["s"]).items():
        assert plans.parts_of(make(*operands[1:]), isa) > 0, name
        agrees(*operands, isa, **given)
    sinks = draw(shape["h"], 3)
    agrees(*operands, isa, sinks=sinks, grad_lse=draw(operands[0].shape[:3], 4))
    assert not tiled


@pytest.mark.parametrize("isa", EVERY_ISA)
def test_parts_of_keys_that_some_rows_do_not_see(isa, tiled):
    """Bounds of windows and lengths at every place of a vector and of a block."""
    operands = drawn(b=2, h=2, hkv=1, l=5, s=800, d=16)
    assert plans.parts_of(make(*operands[1:]), isa) == 3
    for left in (0, 15, 16, 63, 300):
        for length in (1, 17, 265, 272, 799):
            agrees(
                *operands, isa, window=(left, 0), alignment="lower_right", key_lengths=[length, 800]
            )
    assert not tiled


@pytest.mark.parametrize("isa", BFLOAT16[:1])
def test_bfloat16_operands_are_not_rounded_on_the_way(isa):
    (do, q, k, v), _ = held(drawn(b=1, h=4, hkv=2, l=2, s=300, d=32), isa)
    assert plans.parts_of(make(q, k, v, "bfloat16"), isa)
    close(solve(do, q, k, v, isa), (do, q, k, v))


@pytest.mark.parametrize("isa", ISAS[:1])
@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3e38])
def test_what_is_hidden_never_leaks(isa, softcap, bad, tiled):
    """NaN and infinity in keys that no row sees, by a mask or a length, and zeros as their gradients.

    One head sees none of the last keys: the tiles, which compute these calls again, leave its scores there.
    """
    do, q, k, v = drawn(b=1, h=2, hkv=1, l=2, s=150, d=32)
    mask = np.ones((2, 2, 150), bool)
    mask[..., [3, 77]] = False
    mask[0, :, 64:] = False
    given = {"attn_mask": mask, "key_lengths": np.array([120]), "softcap": softcap}
    want = solve(do, q, k, v, isa, **given)
    for x in (k, v):
        kept = x.copy()
        x[:, :, 120:] = bad
        for mine, clean in zip(solve(do, q, k, v, isa, **given), want, strict=True):
            np.testing.assert_array_equal(mine, clean)
        assert not tiled
        x[:, :, [3, 77]] = bad
        scores = np.zeros((1, 2, 2, 150), F)
        for mine, clean in zip(solve(do, q, k, v, isa, scores=scores, **given), want, strict=True):
            assert np.abs(mine - clean).max() <= near(isa)
        assert np.isfinite(scores).all() and not scores[..., 3].any()
        x[:] = kept
        tiled.clear()


@pytest.mark.parametrize("isa", ISAS[:1])
def test_rows_that_float32_does_not_hold_go_to_the_tiles(isa, tiled):
    do, q, k, v = drawn(b=1, h=2, hkv=1, l=2, s=150, d=32)
    solve(do, q, k, v, isa)
    assert not tiled
    for operands in (
        (do, q * F(1e30), k, v),
        (do * F(1e35), q, k, v),
        (do * F(1e20), q, k * F(1e12), v * F(1e12)),
        (do * F(1e20), q * F(1e12), k, v * F(1e12)),
    ):
        tiled.clear()
        found = solve(*operands, isa)
        assert tiled
        wanted = naive_gradients(*operands)
        for mine, want in zip(found, wanted, strict=True):
            assert np.abs(mine - want).max() <= 1e-5 * max(1, np.abs(want).max())


@pytest.mark.parametrize("isa", ISAS[:1])
def test_sums_beyond_float32_in_between_go_to_the_tiles(isa, tiled):
    do, q, k, v = drawn(b=1, h=2, hkv=1, l=2, s=150, d=32)
    q[..., [0, 16]] = 1e20
    k[..., [0, 16]], k[:, :, 5] = 0, 0
    k[:, :, 5, [0, 16]] = 3e19, -3e19  # a score of 3e39 - 3e39
    found, want = solve(do, q, k, v, isa), naive_gradients(do, q, k, v)
    assert tiled
    np.testing.assert_allclose(found[2], want[2], atol=1e-5)
    tiled.clear()
    do, q, k, v = drawn(b=1, h=2, hkv=1, l=2, s=150, d=32)
    q[..., 0], k[..., 0] = 0, 1e30  # a dQ of 1e40 * (sum of ds), which is 0
    found = solve(do * F(1e10), q, k, v, isa)
    assert tiled and all(np.isfinite(x).all() for x in found)


@pytest.mark.parametrize("isa", ISAS[:1])
def test_rows_that_see_nothing_stay_here(isa, tiled):
    """Whatever they hold, and beside rows that see keys."""
    do, q, k, v = drawn(b=2, h=2, hkv=1, l=3, s=150, d=32)
    given = {"is_causal": True, "alignment": "lower_right", "key_lengths": np.array([2, 150])}
    q[0, :, 0] = np.nan
    do[0, :, 0] = np.inf
    dq, dk, dv = solve(do, q, k, v, isa, **given)
    assert not tiled and not dq[0, :, 0].any()
    do[0, :, 0] = q[0, :, 0] = 0
    close((dq, dk, dv), (do, q, k, v), **given)


def test_equal_bits_at_every_thread_count():
    do, q, k, v = drawn(b=1, h=4, hkv=2, l=2, s=1500, d=64)
    assert plans.parts_of(make(q, k, v), ISAS[0]) > 2
    first = solve(do, q, k, v)
    close(first, (do, q, k, v))
    for threads in (1, most()):
        with limit(threads):
            again = solve(do, q, k, v)
        assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))


def test_any_strides_and_masks_of_equal_calls():
    """Rows by token, and a mask whose numbers change from one call to the next."""
    do, q, k, v = (x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in drawn(l=2, s=200, d=64))
    for seed in (1, 2):
        mask = draw((2, 200), seed)
        out, lse = attention(q, k, v, mask, return_lse=True)
        found = attention_backward(do, q, k, v, out, lse, attn_mask=mask)
        close(found, (do, q, k, v), attn_mask=mask)


@pytest.mark.parametrize("isa", ISAS[:1])
def test_rows_of_keys_in_the_same_sets_of_the_cache(isa):
    """Rows 4096 bytes apart are copied, with the same bits."""
    do, q, k, v = drawn(b=1, h=32, hkv=16, l=1, s=150, d=64, dv=128)
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True)
    dense = [do, q, k, v, out]
    beside = [x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in dense]
    assert beside[2].strides[2] == 4096
    results = []
    for do, q, k, v, out in (dense, beside, beside[:3] + dense[3:], dense[:3] + beside[3:]):
        given = [np.full(x.shape, np.nan, F) for x in (q, k, v)]
        arrays = q, k, v, do, out, *given
        strides = np.array([step for x in arrays for step in x.strides[:3]], np.int64)
        places = [x.ctypes.data for x in (*arrays[:5], lse)]
        plan = plans.plan_of(make(q, k, v), isa, 1)
        assert plan.run([*places, 0, *(x.ctypes.data for x in given), 0], strides) is None
        results.append(given)
    close(results[0], dense[:4])
    for other in results[1:]:
        for x, y in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(x, y)


def test_which_gradients_are_of_few_rows():
    """More rows, head sizes that are no whole vectors, score functions and other CPUs' vectors take the
    tiles.
    """
    for shape, few in (
        ({"h": 32, "hkv": 1, "l": 1, "d": 64}, True),
        ({"h": 2, "l": 8, "d": 64}, True),
        ({"h": 2, "l": 13, "d": 64}, False),
        ({"h": 1, "l": 1, "d": 24}, True),
        ({"h": 1, "l": 1, "d": 20}, False),
        ({"h": 1, "l": 1, "d": 64, "dv": 20}, False),
    ):
        problem = make(*drawn(b=1, s=20, **shape)[1:])
        assert bool(plans.parts_of(problem, "avx512")) is few
        assert plans.parts_of(problem, "neon") == 0
        assert plans.parts_of(replace(problem, functions=object()), "avx512") == 0
