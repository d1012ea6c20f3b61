"""More batch entries than a grid's last axis takes: they go along its first one.

The emulator has no such limit, so a smaller one is set; every kernel of a grid with batch entries
is run, with two tiles of rows and two heads.
"""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import backward_checks
import float_checks
import int8_checks
import test_quantized

import numflash
from numflash.cuda import launch_float, launch_int8
from numflash.cuda.arrays import quantized
from numflash.cuda.device import operands
from numflash.cuda.launch import plan
from numflash.errors import UnsupportedError

slow = pytest.mark.slow


@pytest.fixture(autouse=True)
def two_entries(monkeypatch):
    """A grid takes two batch entries."""
    monkeypatch.setattr(operands, "MOST_BLOCKS", (1 << 20, 65535, 2))


def qkv(**shape):
    return oracles.qkv(**({"b": 3, "h": 2, "l": 70, "s": 70, "d": 32} | shape))


@slow
@pytest.mark.parametrize("options", [{"is_causal": True}, {}])
def test_halves(options):
    q, k, v = (x.astype(np.float16) for x in qkv())
    launch = launch_float.float_forward(float_checks.problem_of(q, k, v, **options), "sm_80")
    assert launch.grid == (2, 2, 3) and launch.blocks(4) == (6, 2, 1)
    float_checks.compare(*operands.emulated(launch)[:2], q, k, v, **options)


def test_float32():
    q, k, v = (x.astype(np.float32) for x in qkv(l=10, s=20))
    launch = launch_float.float32_forward(float_checks.problem_of(q, k, v), "sm_80")
    assert launch.blocks(4)[2] == 1
    float_checks.compare(*operands.emulated(launch)[:2], q, k, v)


@slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_int8(arch):
    q, k, v = qkv(l=150)
    problem = int8_checks.problem_of(q, k, v, is_causal=True)
    assert launch_int8.int8_forward(problem, arch).blocks(4)[2] == 1
    int8_checks.same_bits(q, k, v, arch=arch, is_causal=True)


@slow
def test_int8_of_floats():
    """Statistics, quantise, results."""
    problem = test_quantized.problem_of(*qkv(l=30, s=140))
    test_quantized.same_bits(problem, "sm_80")


@slow
def test_gradients():
    backward_checks.check({"b": 3, "h": 2, "l": 70, "s": 70, "d": 32}, is_causal=True)


@slow
def test_float32_gradients():
    q, k, v, do = (
        x.astype(np.float32) for x in (*qkv(l=10, s=20), oracles.draw((3, 2, 10, 32), 3))
    )
    out, lse, *expected = backward_checks.gradients(q, k, v, do)
    given = do, q, k, v, out.astype(np.float32), lse.astype(np.float32)
    for mine, right in zip(
        numflash.attention_backward(*given, impl="cuda-emulator"), expected, strict=True
    ):
        assert np.abs(mine - right).max() <= 2e-5 * np.abs(right).max()


def test_what_no_grid_holds(monkeypatch):
    q, k, v = (x.astype(np.float16) for x in qkv())
    launch = launch_float.float_forward(float_checks.problem_of(q, k, v), "sm_80")
    for limits in ((5, 65535, 2), (6, 1, 2)):
        monkeypatch.setattr(operands, "MOST_BLOCKS", limits)
        with pytest.raises(UnsupportedError, match=r"2 heads and 3 batch entries; allowed"):
            launch.blocks(4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_rows_that_32_bits_do_not_number(arch):
    """On a card of 141 GB, with heads of 8 channels: 8 GB of log-sum-exps."""
    one = np.zeros((1, 1, 1, 8), np.float16)

    def launch(length):
        q = np.lib.stride_tricks.as_strided(one, (1 << 15, 1, length, 8), (16, 16, 16, 2))
        k = np.lib.stride_tricks.as_strided(one, (1 << 15, 1, 1, 8), (16, 16, 16, 2))
        results = q, np.lib.stride_tricks.as_strided(one.view(np.float32), q.shape[:3], (4, 4, 4))
        return plan(float_checks.problem_of(q, k, k), arch, results)

    assert launch((1 << 16) - 1)
    with pytest.raises(UnsupportedError, match=r"query: got 2147483648 rows.*: 2147483647$"):
        launch(1 << 16)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("lengths", [(70, (1 << 29) + 1), ((1 << 29) + 1, 70), (70, 1 << 31)])
def test_sequences_that_32_bits_do_not_number(arch, lengths):
    one = np.zeros((1, 1, 1, 8), np.float16)
    q, k = (np.lib.stride_tricks.as_strided(one, (1, 1, n, 8), (16, 16, 16, 2)) for n in lengths)
    results = q, np.lib.stride_tricks.as_strided(one.view(np.float32), q.shape[:3], (4, 4, 4))
    options = {"is_causal": True, "alignment": "lower_right"}
    with pytest.raises(UnsupportedError, match=r"rows and \d+ keys of a head.*: 536870912$"):
        plan(float_checks.problem_of(q, k, k, **options), arch, results)


@pytest.mark.parametrize(("dv", "most"), [(64, 4194304), (256, 2097152)])
def test_heads_that_32_bits_do_not_number(dv, most):
    """Their first keys, eight rows of bytes each, or four of values."""
    one = np.zeros((1, 1, 1, 256), np.float32)
    q, v = (
        np.lib.stride_tricks.as_strided(one, ((most >> 4) + 1, 16, 1, n), (0, 0, 0, 4))
        for n in (64, dv)
    )
    problem = test_quantized.problem_of(q, q, v)
    scratch = np.broadcast_to(np.zeros(1, np.uint8), quantized.scratch_bytes(problem, "sm_80"))
    with pytest.raises(UnsupportedError, match=rf"key: got {most + 16} heads .*: {most}$"):
        quantized.plan(problem, "sm_80", "float32", (v, v[..., 0]), scratch)
