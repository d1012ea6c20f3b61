"""The generated float32 functions of whole vectors against float64."""

import ctypes

import numpy as np
import pytest

from numflash.flex.fused import Fused
from numflash.flex.prepared import prepare

WHOLE = ctypes.c_int64
TILE = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4, *[WHOLE] * 7, *[ctypes.c_float] * 2)


def changed(score_mod, x):
    """`score_mod` of float32 values (n,) or (rows, n), as its tile function computes it."""
    fused = Fused(prepare(score_mod, None))
    y = x.copy()
    rows, n = np.atleast_2d(y).shape
    tiles = fused.tiles((1, 1, rows, n))
    tile = TILE(tiles.unmasked)
    tile(tiles.unmasked_frame, y.ctypes.data, None, None, n, rows, n, 0, 0, 0, 0, 1.0, 1.0)
    return y


def test_tanh_is_within_its_error_and_never_beyond_one():
    some = np.concatenate([np.linspace(0, 12, 1_200_007), np.logspace(-37, 1, 100_000)])
    x = np.concatenate([some, -some, [np.inf, -np.inf, 1e30]]).astype(np.float32)
    y = changed(lambda score, b, h, q, k: np.tanh(score), x)
    wanted = np.tanh(x.astype(np.float64))
    # 3.4e-7 without fused multiply-add, 2.9e-7 with it
    assert (np.abs(y - wanted) <= 3.4e-7 * np.abs(wanted)).all()
    assert np.abs(y).max() <= 1
    assert np.isnan(changed(lambda score, b, h, q, k: np.tanh(score), np.float32([np.nan])))[0]


@pytest.mark.parametrize("name", ["sin", "cos"])
def test_sine_is_within_its_error_up_to_many_turns_and_never_beyond_one(name):
    function = getattr(np, name)
    near_zeros = np.arange(-63_000, 63_000) * (np.pi / 2)
    some = [np.linspace(-10, 10, 1_000_003), np.linspace(-1e5, 1e5, 1_000_003), near_zeros]
    x = np.concatenate([*some, np.logspace(-37, 0, 10_000)]).astype(np.float32)
    y = changed(lambda score, b, h, q, k: function(score), x)
    wanted = function(x.astype(np.float64))
    assert (np.abs(y - wanted) <= 3e-7 * np.maximum(np.abs(wanted), 0.5)).all()
    far = np.float32([1e6, -3e7, 1e30, -3e38])
    assert np.abs(changed(lambda score, b, h, q, k: function(score), far)).max() <= 1
    none = np.float32([np.inf, -np.inf, np.nan])
    assert np.isnan(changed(lambda score, b, h, q, k: function(score), none)).all()


def test_sine_of_a_small_number_keeps_its_digits():
    x = np.concatenate([np.logspace(-37, 0, 100_000), [0.0]]).astype(np.float32)
    y = changed(lambda score, b, h, q, k: np.sin(score), x)
    assert (np.abs(y - np.sin(x.astype(np.float64))) <= 3e-7 * np.sin(x.astype(np.float64))).all()


@pytest.mark.parametrize("dtype", ["float32", "float16", "int8", "int32", "bool", "float64"])
@pytest.mark.parametrize(("n", "size"), [(64, 37), (75, 37), (64, 5), (48, 16)])
def test_a_table_that_ends_inside_a_vector(n, size, dtype):
    """Neighbours are read at once; an index before or behind the table is brought inside."""
    table = np.random.default_rng(0).integers(-100, 100, (1, size)).astype(dtype)
    row, column = np.arange(150)[:, None], np.arange(n)
    for name, score_mod, index in (
        ("along", lambda s, b, h, q, k: s + table[b, q + k - 90], row + column - 90),
        ("against", lambda s, b, h, q, k: s + table[b, q - k - 20], row - column - 20),
        ("in steps", lambda s, b, h, q, k: s + table[b, q - 2 * k], row - 2 * column),
        ("both ways", lambda s, b, h, q, k: s + table[b, abs(q - k) // 2], abs(row - column) // 2),
        ("mixed", lambda s, b, h, q, k: s + table[b, q * k % 19], row * column % 19),
        (
            "limited",
            lambda s, b, h, q, k: s + table[b, np.clip(q - k, -4, 4)],
            np.clip(row - column, -4, 4),
        ),
    ):
        inside = np.clip(np.where(index < 0, index + size, index), 0, size - 1)
        found = changed(score_mod, np.zeros((150, n), np.float32))
        np.testing.assert_array_equal(found, table[0][inside].astype(np.float32), name)
