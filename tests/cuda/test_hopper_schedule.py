"""The static schedule of Hopper's float kernel: every tile of rows once, long ones spread evenly."""

import dataclasses

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from float_checks import compare, problem_of

from numflash.cuda import launch_float
from numflash.cuda.compile import Source, compiled
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.device import operands
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.hopper_schedule import make_number_in, make_rows_of


def listed(last_first: bool, cluster: int = 1) -> Source:
    """Each block writes (tile of rows, unit, block) for the number of each of its turns."""
    rows_of, number_in = make_rows_of(last_first), make_number_in(cluster)

    def kernel(to, row_tiles, units, together):
        turn = types.int32(0)
        while number_in(turn) < types.uint32(row_tiles * units):
            number = number_in(turn)
            rows, unit = rows_of(number, row_tiles, units, together)
            if cuda.threadIdx.x == 0:
                to[number, 0], to[number, 1], to[number, 2] = rows, unit, cuda.blockIdx.x
            turn += 1

    return Source(kernel, types.void(types.int32[:, ::1], *[types.int32] * 3), 32)


def schedule(last_first, blocks, row_tiles, units, together, cluster=1):
    to = np.full((row_tiles * units, 3), -1, np.int32)
    numbers = (np.int32(x) for x in (row_tiles, units, together))
    kernel = compiled(listed, "sm_90a", "ptx", last_first=last_first, cluster=cluster)
    emulate(kernel, blocks, None, [to, *numbers])
    return to


@pytest.mark.parametrize("sizes", [(7, 5, 2), (3, 4, 4), (1, 9, 3), (4, 1, 1), (6, 3, 1)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_every_tile_once_and_in_order(sizes, blocks):
    row_tiles, units, together = sizes
    for last_first in (False, True):
        found = schedule(last_first, blocks, *sizes)[:, :2].tolist()
        order = range(row_tiles)[:: -1 if last_first else 1]
        assert found == [
            [rows, unit]
            for first in range(0, units, together)
            for rows in order
            for unit in range(first, min(first + together, units))
        ]


def test_a_cluster_takes_neighbouring_rows_of_one_unit():
    """Each tile of rows once, an even one and the next by the two blocks of a cluster."""
    found = schedule(False, 4, 6, 3, 1, cluster=2)
    assert found[:, :2].tolist() == [[rows, unit] for unit in range(3) for rows in range(6)]
    assert (found[:, 2] % 2 == found[:, 0] % 2).all()
    assert (found[::2, 2] + 1 == found[1::2, 2]).all() and set(found[:, 2]) == {0, 1, 2, 3}


@pytest.mark.parametrize(("blocks", "sizes"), [(4, (8, 6, 6)), (5, (16, 4, 4)), (6, (9, 8, 4))])
def test_causal_work_is_spread_evenly(blocks, sizes):
    """A tile of rows r attends to r + 1 tiles of keys: no block has more than its share and one tile
    of the longest.
    """
    found = schedule(True, blocks, *sizes)
    work = np.bincount(found[:, 2], found[:, 0] + 1, minlength=blocks)
    assert work.max() <= work.sum() / blocks + sizes[0] / 2


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("blocks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_one_block_after_another_tile(blocks, seed):
    """Three tiles of rows, one of which attends to no key: the bits of one block for each."""
    shape = {"b": 1, "h": 1, "l": 300, "s": 300, "d": 128}
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(**shape, seed=seed))
    options = {"window": (0, 140), "alignment": "upper_left", "key_lengths": np.array([200])}
    found = []
    for most in (blocks, 3):
        launched = launch_float.hopper_forward(problem_of(q, k, v, **options))
        assert launched.persistent and launched.grid == (3, 1, 1)
        launched = dataclasses.replace(launched, grid=(most, 1, 1))
        out, lse, _ = operands.emulated(launched, seed=seed)
        compare(out, lse, q, k, v, **options)
        found.append((out.view(np.uint16), lse.view(np.uint32)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_units_that_share_l2():
    """Of 8 k keys and 128 channels 32 MB hold 8 heads' keys and values; never fewer than one."""
    q = np.zeros((1, 64, 1, 128), np.float16)
    for length, expected in ((8192, 8), (1 << 22, 1), (16, 64)):
        k = np.broadcast_to(q, (1, 64, length, 128))
        problem = problem_of(q, k, k, is_causal=True)
        assert launch_float.units_together(problem, 1) == expected
