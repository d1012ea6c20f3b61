"""The exp2 + FMLA kernels of study.

Every combination against float64, weights at their limits, and the table's own arithmetic.
"""

import numpy as np
import pytest

from numflash.cpu.study import exp2_benchmark as bench
from numflash.errors import ArgumentError

pytestmark = pytest.mark.slow  # kernels that only the course runs

COMBINATIONS = list(bench.combinations())


@pytest.mark.parametrize("combination", COMBINATIONS, ids=" ".join)
@pytest.mark.parametrize("shape", [(4, 16, 64), (16, 64, 64), (8, 144, 128)], ids=str)
def test_against_float64(combination, shape):
    name, exp2, broadcast = combination
    s, scale, top, v = bench.draw(*shape, seed=3)
    p, o = bench.compute(name, exp2, broadcast, s, scale, top, v)
    exact = np.exp2(s * np.float64(scale) - np.float64(top))
    assert np.abs(p / exact - 1).max() <= bench.WORST[exp2]
    if name == "exp2":
        assert not o.any()
        return
    want = p.astype(np.float64) @ v  # the product itself, whatever the exp2
    assert np.abs(o - want).max() <= 1e-6 * (p.astype(np.float64) @ np.abs(v)).max()


@pytest.mark.parametrize(
    ("exp2", "stated"), [("accurate", 2e-7), ("fast", 2.75e-3), ("ultra", 0.5)]
)
def test_weights_over_many_octaves(exp2, stated):
    """x from 0 down to far below the last octave.

    The stated error is the real one, and nothing wraps around.
    """
    s = -np.arange(4 * 40000, dtype=np.int32).reshape(4, -1)
    v = np.zeros((s.shape[1], 64), np.float32)
    p, _ = bench.compute("exp2", exp2, "register", s, 2.0**-10, 0.0, v)
    exact = np.exp2(np.maximum(s * 2.0**-10, -125))
    worst = np.abs(p / exact - 1).max()
    assert 0.7 * stated <= worst <= stated
    assert (np.diff(p.ravel()) <= 0).all(), "a lower score never weighs more"
    lowest, _ = bench.compute(
        "exp2", exp2, "register", np.full((4, 16), -(1 << 31), np.int32), 1.0, 0.0, v[:16]
    )
    assert np.allclose(lowest, 2.0**-125, rtol=1e-6, atol=0)


def test_both_broadcasts_give_the_same_bits():
    s, scale, top, v = bench.draw(16, 64)
    for name in ("fused", "fused4"):
        register, memory = (
            bench.compute(name, "accurate", broadcast, s, scale, top, v)[1]
            for broadcast in bench.BROADCASTS
        )
        np.testing.assert_array_equal(register, memory)


def test_ranking_errors():
    s = np.array([[3, 1, 2, 1]])
    assert bench.ranking_errors(s, np.array([[0.9, 0.1, 0.5, 0.1]])) == 0  # equal scores may tie
    assert bench.ranking_errors(s, np.array([[0.9, 0.1, 0.1, 0.1]])) == 2 / 5  # 2 ties with both 1s
    assert bench.ranking_errors(s, np.array([[0.1, 0.9, 0.5, 0.9]])) == 1


def test_the_table():
    rows = bench.measure((4,), (64,))
    assert [(r.kernel, r.exp2, r.broadcast) for r in rows] == COMBINATIONS
    assert all(
        r.seconds > 0 and r.cycles > 0 and (r.share > 0) == (r.kernel != "exp2") for r in rows
    )
    assert all((r.ranking_errors > 0.05) == (r.exp2 == "ultra") for r in rows), (
        "only 2**floor loses the order"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "best"}, "name: got 'best'; allowed: 'fused'"),
        ({"exp2": "table"}, "exp2: got 'table'; allowed: 'accurate'"),
        ({"broadcast": "dup"}, "broadcast: got 'dup'"),
        ({"s": np.zeros((3, 64), np.int32)}, r"s: got shape \(3, 64\)"),
        ({"s": np.zeros((4, 17), np.int32)}, r"s: got shape \(4, 17\)"),
        ({"s": np.zeros((0, 64), np.int32)}, "s: got shape"),
        ({"v": np.zeros((64, 24), np.float32)}, r"v: got shape \(64, 24\); allowed: \(64, D\)"),
        ({"v": np.zeros((32, 64), np.float32)}, r"v: got shape \(32, 64\)"),
    ],
)
def test_bad_arguments(changes, message):
    s, scale, top, v = bench.draw(4, 64)
    given = {
        "name": "gemm",
        "exp2": "accurate",
        "broadcast": "memory",
        "s": s,
        "scale": scale,
        "top": top,
        "v": v,
        **changes,
    }
    with pytest.raises(ArgumentError, match=message):
        bench.compute(**given)
