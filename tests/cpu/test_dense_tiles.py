"""Tiles of masks and biases as the tiled gradient takes them out of the caller's memory."""

from typing import NamedTuple

import numpy as np
import pytest
from daily import between_slow

import numflash
from numflash.cpu.backward.dense_tiles import make_dense_tiles
from numflash.cpu.backward.flash_backward import Tile
from numflash.cpu.backward.operands import HIDDEN, KEYS, QUERIES
from numflash.cpu.backward.tiled import GradientPlan
from numflash.jit import guard, target
from numflash.jit.compiler import kernel

ISAS = [x for x in target.available(target.FLOAT_ISAS) if x != "portable"]
pytestmark = pytest.mark.skipif(not ISAS, reason="no instruction set with this kernel")
BEHIND = {np.uint8: 77, np.float32: 1e9}  # what stands in memory behind the last number
OF_NONE = {np.uint8: 0, np.float32: HIDDEN}
SHAPES = (2, 3, 70, 150), (1, 3, 1, 21), (2, 1, 64, 144), (1, 1, 70, 7), (1, 1, 1, 1)


class Masks(NamedTuple):
    """The fields that the functions read of `Semantics`."""

    mask: np.ndarray
    bias: np.ndarray
    has_mask: bool
    has_bias: bool


class Work(NamedTuple):
    """Those of a worker's `Scratch`."""

    mask: np.ndarray
    bias: np.ndarray


def functions(isa):
    """take_tile and keys_seen of one instruction set, on arrays."""
    take_tile, keys_seen = make_dense_tiles(isa)

    @kernel
    def run(options, at, key, tile, work):
        take_tile(options, at, key, tile, work)
        return keys_seen(options, tile, work)

    return run


def memory_of(x):
    """A copy of x with other numbers behind it."""
    kind = x.dtype.type
    room = np.full(x.size + 64 * QUERIES, BEHIND[kind], kind)
    room[: x.size] = x.ravel()
    return room[: x.size].reshape(x.shape)


def expected(x, at, key, tile):
    """(stop - first, columns): keys by queries; the last query stands for those behind it."""
    nb, nh, length, s = x.shape
    head = x[min(at[0], nb - 1), min(at[1], nh - 1)]
    rows = np.minimum(tile.query + np.arange(tile.columns), length - 1)
    keys = key + np.arange(tile.first, tile.stop)
    found = head[rows][:, np.minimum(keys, s - 1)].T.copy()
    found[keys >= s] = OF_NONE[x.dtype.type]
    return found


def masks(kind, rng):
    """Masks whose last row no query sees, so that what stands behind it shows."""
    for shape in SHAPES:
        x = np.where(rng.random(shape) < 0.5, 1, OF_NONE[kind]).astype(kind)
        x[..., -1:, :] = OF_NONE[kind]
        yield memory_of(x)


def tiles_of(length, s):
    """Of whole and part register tiles, with keys and queries behind the last one."""
    yield 0, Tile(0, QUERIES, 0, min(KEYS, -(-s // 6) * 6))
    yield s // 2, Tile(0, QUERIES, 0, 12)
    yield max(0, s - 3), Tile(max(0, length - 5), 16, 0, 6)
    if length in (1, 70):
        yield 0, Tile(64, 16, 6, 24)


@pytest.mark.parametrize("isa", between_slow(ISAS))
@pytest.mark.parametrize("kind", BEHIND)
def test_tiles_are_the_mask_transposed(kind, isa):
    """Every number, with tails of keys and queries, of masks that are broadcast; nothing that stands in
    memory behind them.
    """
    run, at = functions(isa), (1, 2)
    for x in masks(kind, np.random.default_rng(0)):
        arrays = [x if other is kind else np.zeros((0,) * 4, other) for other in BEHIND]
        options = Masks(*arrays, kind is np.uint8, kind is np.float32)
        for key, tile in tiles_of(*x.shape[2:]):
            work = Work(*(np.full(KEYS * QUERIES, y, other) for other, y in BEHIND.items()))
            span = run(options, at, key, tile, work)
            taken = work[[*BEHIND].index(kind)].reshape(KEYS, QUERIES)
            want = expected(x, at, key, tile)
            np.testing.assert_array_equal(taken[tile.first : tile.stop, : tile.columns], want)
            assert_outside_is_hidden(span, tile, want, OF_NONE[kind])


def assert_outside_is_hidden(span, tile, want, hidden):
    """No query sees a key outside of `span`, which begins and ends with whole register tiles."""
    seen = np.flatnonzero((want != hidden).any(1)) + tile.first
    begin, end = span
    if not seen.size:
        assert begin >= end
        return
    assert begin <= seen[0] and seen[-1] < end
    assert seen[0] - begin < 32 and end - seen[-1] <= 32


@pytest.mark.skipif(guard.ON, reason="equal calls keep no plan here")
def test_a_gradient_copies_no_mask(monkeypatch):
    """The numbers of its plan hold the address of the caller's own memory."""
    made = []
    set_arrays = GradientPlan.set_arrays
    monkeypatch.setattr(
        GradientPlan, "set_arrays", lambda self: made.append(self) or set_arrays(self)
    )
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 2, 80, 16), np.float32)
    for mask in (rng.random((80, 80)) < 0.5, rng.standard_normal((2, 80, 80)).astype(np.float32)):
        out, lse = numflash.attention(q, q, q, attn_mask=mask, return_lse=True)
        numflash.attention_backward(q, q, q, q, out, lse, attn_mask=mask)
        arrays = made[-1].arrays
        used = arrays.mask if mask.dtype == bool else arrays.bias
        assert used.ctypes.data == mask.ctypes.data
