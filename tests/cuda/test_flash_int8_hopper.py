"""The INT8 kernel of sm_90a (wgmma on bytes, TMA) in the emulator.

The bits of the integer model, for every option.
"""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from hypothesis import given, settings
from hypothesis import strategies as st
from int8_checks import problem_of, same_bits

from numflash.cuda import launch
from numflash.cuda.device import operands


def check(q, k, v, **options):
    report = same_bits(q, k, v, arch="sm_90a", **options)
    assert report.async_copied == 0 and report.tma_copied > 0 and report.shared_conflicts == 0
    assert {name.split(".")[-2:][0] for name in report.opcodes if name.startswith("wgmma.mma")} == {
        "s8",
        "u8",
    }
    assert not any(name.startswith("ldmatrix") for name in report.opcodes)
    assert {name for name in report.opcodes if name.startswith("mma")} == {
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32"  # the first keys
    }
    return report


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_ring_of_blocks(seed):
    """Nine blocks turn the ring of four more than twice.

    Neither the last rows nor the last keys fill theirs.
    """
    report = check(*oracles.qkv(b=1, h=1, l=240, s=1100, d=64), seed=seed)
    # 4 warpgroups of the 6 have rows; one counts as four warps, and all take the first keys
    warps, first_keys = 6 * 4, 64 // 32
    products = 4 * 4 * (9 * 64 // 32 + 9 * 128 // 32)
    assert report.tensor_operations == products + warps * first_keys


@pytest.mark.parametrize(
    "shape",
    [
        {"b": 2, "h": 6, "hkv": 1, "l": 40, "s": 200, "d": 40, "dv": 70},
        pytest.param(
            {"b": 1, "h": 16, "hkv": 2, "l": 17, "s": 140, "d": 100}, marks=pytest.mark.slow
        ),
    ],
)
def test_packed_heads(shape):
    """Two heads of the group of six, and all eight of a group, lie beside each other in the rows."""
    report = check(
        *oracles.qkv(**shape),
        is_causal=True,
        alignment="lower_right",
        key_lengths=np.arange(shape["b"]) * 90 + 13,
    )
    packed = {6: 2, 16: 8}[shape["h"]]
    assert report.blocks == shape["b"] * shape["h"] // packed * -(-shape["l"] * packed // 192)


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"b": 1, "h": 2, "l": 70, "s": 300, "d": 128},
        {"b": 1, "h": 1, "l": 70, "s": 300, "d": 256},
        {"b": 1, "h": 1, "l": 70, "s": 300, "d": 32, "dv": 129},
        {"b": 1, "h": 1, "l": 65, "s": 1, "d": 1},
        {"b": 1, "h": 1, "l": 65, "s": 20, "d": 200, "dv": 3},
    ],
)
def test_sizes(shape):
    check(*oracles.qkv(**shape))


@pytest.mark.slow
@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e18])
def test_extreme_scores(factor):
    q, k, v = oracles.qkv(b=1, h=1, l=70, s=150, d=64)
    check(q * np.float32(factor), k, v)


def test_rows_that_are_not_finite():
    q, k, v = oracles.qkv(b=1, h=1, l=70, s=150, d=64)
    q[0, 0, 3], k[0, 0, 30], v[0, 0, 35, 2] = np.nan, np.inf, np.nan
    check(q, k, v)


def test_saturated_operands():
    q, k, v = (
        np.full((1, 1, n, 64), x, np.float32) for n, x in ((70, 3.0), (150, -5.0), (150, 7.0))
    )
    k[..., ::2] = 5.0
    check(q, k, v)


def test_plan_chooses_the_kernel():
    def kernel(arch="sm_90a", pv="int8", **shape):
        q, k, v = oracles.qkv(b=1, s=70, d=64, **shape)
        return launch.plan(problem_of(q, k, v, pv=pv), arch).factory.__name__

    assert kernel(h=1, l=65) == kernel(h=8, hkv=2, l=17) == "flash_int8_hopper"
    assert kernel(h=1, l=64) == kernel(h=8, hkv=2, l=16) == "flash_int8", (
        "so few rows fill no tile of 128"
    )
    assert kernel(h=1, l=65, pv="fp32") == kernel("sm_80", h=1, l=65) == "flash_int8"
    assert kernel(h=1, l=65, pv="int16") == "flash_int8"


def test_rows_are_packed_as_a_view():
    """Query i of head h is row packed * i + h % packed of pack h // packed; nothing is copied."""
    q = np.arange(2 * 6 * 5 * 16, dtype=np.int8).reshape(2, 6, 5, 16)
    assert [operands.packed_heads(n) for n in (1, 2, 6, 7, 8, 256)] == [1, 2, 2, 1, 8, 64]
    rows = operands.packed_rows(q, 2)
    assert rows.shape == (2, 3, 5, 2, 16) and np.shares_memory(rows, q)
    assert all((rows[1, h // 2, i, h % 2] == q[1, h, i]).all() for h in range(6) for i in range(5))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    l=st.integers(65, 200),
    s=st.integers(1, 600),
    left=st.integers(0, 300),
    right=st.integers(0, 90),
    seed=st.integers(0, 99),
)
def test_random_windows(l, s, left, right, seed):
    check(*oracles.qkv(b=1, h=1, l=l, s=s, d=64, seed=seed), seed=seed, window=(left, right))
