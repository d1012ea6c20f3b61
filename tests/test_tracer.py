"""Counts that can be checked by hand, and kernels whose results must be those of the compiled code."""

import numpy as np
import pytest
from oracles import draw, naive, qkv

from numflash.course.tracer import Traffic, trace
from numflash.cpu.study import ladder_float
from numflash.errors import ArgumentError
from numflash.jit.compiler import inline, kernel

F = np.float32


@kernel
def add(x, y, out):
    for i in range(out.size):
        out[i] = x[i] + y[i]


@inline
def total(row):
    s = F(0)
    for i in range(row.size):
        s += row[i]
    return s


@kernel
def columns_then_rows(x, out):
    for c in range(x.shape[1]):
        for r in range(x.shape[0]):
            out[0] = x[r, c]
    for r in range(x.shape[0]):
        out[0] = total(x[r])


def test_one_pass():
    """40 floats are 3 lines of 64 bytes; each comes once, and the changed ones go back once."""
    x = draw((40,), 1)
    y = draw((40,), 2)
    out = np.zeros(40, F)
    report = trace(add, x, y, out)
    assert report.arrays == {
        "x": Traffic(40, 0, 3, 3, 0),
        "y": Traffic(40, 0, 3, 3, 0),
        "out": Traffic(0, 40, 3, 3, 3),
    }
    assert (
        report.moved == (9 + 3) * 64
        and report.bytes_of("out") == 6 * 64
        and not report.bytes_of("s")
    )
    assert report.total == Traffic(80, 40, 9, 9, 3)
    np.testing.assert_array_equal(out, x + y)


def test_the_cache_forgets_the_oldest_line():
    """Six rows of one line, 16 columns.

    A cache of four lines (one of them out's) loses every row before it comes again by columns; by
    rows it misses once a row. A cache of seven lines misses each row once in all.
    """
    x = draw((6, 16))
    out = np.zeros(1, F)
    small, large = (trace(columns_then_rows, x, out, cache=n * 64) for n in (4, 7))
    assert small.arrays["x"] == Traffic(192, 0, 6, 6 * 16 + 6, 0)
    assert large.arrays["x"] == Traffic(192, 0, 6, 6, 0)
    assert large.arrays["out"] == Traffic(0, 16 * 6 + 6, 1, 1, 1)


def test_a_changed_line_goes_back_each_time_it_leaves():
    @kernel
    def zigzag(x, n):
        for _ in range(n):
            x[0] = F(1)
            x[16] = F(2)

    x = np.zeros(32, F)
    assert trace(zigzag, x, 5, cache=64).arrays["x"] == Traffic(0, 10, 2, 10, 10)
    assert trace(zigzag, x, 5, cache=128).arrays["x"] == Traffic(0, 10, 2, 2, 2)


def test_slices_and_events():
    @kernel
    def fill(x):
        x[1, 2:4] = F(3)
        x[0] = x[1]

    x = np.zeros((2, 4), F)
    report = trace(fill, x, line=16)
    np.testing.assert_array_equal(x, [[0, 0, 3, 3]] * 2)
    assert report.arrays["x"] == Traffic(4, 6, 2, 2, 2)
    np.testing.assert_array_equal(
        report.events[:, :3], [[0, 1, 1]] * 2 + [[0, 1, 0]] * 4 + [[0, 0, 1]] * 4
    )
    np.testing.assert_array_equal(report.events[:, 3], [1, 0, 0, 0, 0, 0, 1, 0, 0, 0])


def test_naive_attention_by_hand():
    """Q.K^T loads L S D of each.

    The softmax loads each score 3 times (maximum, weight, sum and scale read what they write).
    """
    q, k, v = (x[0, 0] for x in qkv(h=1, l=3, s=5, d=4, dv=2))
    s = np.empty((3, 5), F)
    o = np.empty((3, 2), F)
    report = trace(ladder_float.naive, q, k, v, F(0.5 * np.log2(np.e)), s, o)
    assert {n: (t.loads, t.stores) for n, t in report.arrays.items()} == {
        "q": (60, 0),
        "k": (60, 0),
        "v": (30, 0),
        "s": (15 * 5, 15 * 3),
        "o": (30, 6 + 30),
    }
    exact, _ = naive(q[None, None], k[None, None], v[None, None])
    assert np.abs(o - exact[0, 0]).max() < 1e-6


@pytest.mark.parametrize("name", ["naive", "online", "tiled", "packed"])
def test_a_traced_kernel_computes_what_it_computes(name):
    q, k, v = (x[0, 0] for x in qkv(h=1, l=9, s=11, d=4))
    exact, _ = naive(q[None, None], k[None, None], v[None, None])
    scale = F(0.5 * np.log2(np.e))
    o = np.empty((9, 4), F)
    tile = (np.empty((4, 4), F), np.empty(4, F), np.empty(4, F))
    if name == "packed":
        k, unpacked = np.empty((3, 4, 4), F), k
        trace(ladder_float.pack, unpacked, k)
    {
        "naive": lambda: trace(ladder_float.naive, q, k, v, scale, np.empty((9, 11), F), o),
        "online": lambda: trace(ladder_float.online, q, k, v, scale, o),
        "tiled": lambda: trace(ladder_float.make_tiled(4, 4), q, k, v, scale, *tile, o),
        "packed": lambda: trace(ladder_float.make_packed(4, 4), q, k, v, scale, *tile, o),
    }[name]()
    assert np.abs(o - exact[0, 0]).max() < 1e-6


def test_what_the_tracer_refuses():
    x = np.zeros((4, 4), F)
    with pytest.raises(ArgumentError, match="kernel: got function"):
        trace(lambda x: None, x)
    with pytest.raises(ArgumentError, match="x: got an array that is not contiguous"):
        trace(add, x.T, x, x)
    with pytest.raises(ArgumentError, match="cache, line: got 32 and 64"):
        trace(add, x, x, x, cache=32)

    @kernel
    def whole(x):
        return np.exp(x)

    with pytest.raises(ArgumentError, match="element by element"):
        trace(whole, x)
