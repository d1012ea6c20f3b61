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
from numflash.cuda.device.arrangement import Arrangement, band_costs
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.hopper_schedule import make_place_in, make_rows_at


def listed(arranged: bool, cluster: int = 1) -> Source:
    """Each block writes (tile of rows, unit, block) at the place of each of its turns."""
    rows_at, place_in = make_rows_at(arranged), make_place_in(cluster)

    def kernel(to, order, row_tiles, units):
        turn = types.int32(0)
        while place_in(turn) < types.uint32(row_tiles * units):
            place = place_in(turn)
            rows, unit = rows_at(place, order, row_tiles)
            if cuda.threadIdx.x == 0:
                to[place, 0], to[place, 1], to[place, 2] = rows, unit, cuda.blockIdx.x
            turn += 1

    numbers = types.uint64, types.int32, types.int32
    return Source(kernel, types.void(types.int32[:, ::1], *numbers), 32)


def schedule(blocks, row_tiles, units, order=None, cluster=1):
    to = np.full((row_tiles * units, 3), -1, np.int32)
    arranged = order is not None
    kernel = compiled(listed, "sm_90a", "ptx", arranged=arranged, cluster=cluster)
    table = order if arranged else np.zeros(1, np.int32)
    emulate(kernel, blocks, None, [to, table, np.int32(row_tiles), np.int32(units)])
    return to


@pytest.mark.parametrize("sizes", [(7, 5), (1, 9), (4, 1)])
@pytest.mark.parametrize("blocks", [1, 4])
def test_every_tile_once_and_in_order(sizes, blocks):
    row_tiles, units = sizes
    every = [[rows, unit] for unit in range(units) for rows in range(row_tiles)]
    assert schedule(blocks, *sizes)[:, :2].tolist() == every
    costs = np.arange(row_tiles) + np.zeros((units, 1), int)
    found = schedule(blocks, *sizes, Arrangement(costs, 2)(blocks))
    assert sorted(found[:, :2].tolist(), key=lambda x: x[::-1]) == every
    section = found[:, 1] // 2  # whose keys are in L2 together
    assert (section[1:] >= section[:-1]).all()


def test_a_cluster_takes_neighbouring_rows_of_one_unit():
    """Each tile of rows once, an even one and the next by the two blocks of a cluster."""
    found = schedule(4, 6, 3, cluster=2)
    assert found[:, :2].tolist() == [[rows, unit] for unit in range(3) for rows in range(6)]
    assert (found[:, 2] % 2 == found[:, 0] % 2).all()
    assert (found[::2, 2] + 1 == found[1::2, 2]).all() and set(found[:, 2]) == {0, 1, 2, 3}


# D=128 of 8192, 4096, 1024 rows, D=256 of 8192; (units, together, tiles of rows)
@pytest.mark.parametrize("sizes", [(32, 8, 64), (64, 16, 32), (256, 64, 8), (16, 4, 64)])
def test_causal_work_is_spread_evenly(sizes):
    """A tile of rows r takes r + 2: the block that has most has 4 % more than its share."""
    units, together, row_tiles = sizes
    each = band_costs(
        (128 * row_tiles, 1, row_tiles),
        np.array([128 * row_tiles]),
        np.array([0]),
        (1 << 29, 0),
        (128, 128),
    )
    assert each.tolist() == [[row + 2 for row in range(row_tiles)]]
    costs = np.repeat(each, units, 0)
    order = Arrangement(costs, together)(132)
    work = np.bincount(np.arange(order.size) % 132, costs.reshape(-1)[order])
    assert work.max() <= 1.04 * work.mean()


@pytest.mark.parametrize("options", [
    {"is_causal": True, "alignment": "lower_right"},
    {"window": (70, 9), "key_lengths": np.array([200, 90])},
    {"window": (None, 30)},
])  # fmt: skip
@pytest.mark.parametrize("packed", [1, 4])
def test_the_host_counts_the_tiles_that_the_kernel_visits(options, packed):
    queries, keys, (block_q, block_k) = 333, 200, (128, 64)
    q, k = (np.zeros((2, packed, n, 64), np.float16) for n in (queries, keys))
    problem = problem_of(q, k, k, **options)
    row_tiles = -(-queries * packed // block_q)
    diagonal, lengths = operands.key_places(problem, keys)
    sides = operands.band(problem)[1:]
    rows = queries, packed, row_tiles
    found = band_costs(rows, lengths, diagonal, sides, (block_q, block_k))
    i, j = np.ogrid[:queries, :keys]
    for b in range(2):
        away = j - i - diagonal[b]
        seen = (away <= sides[1]) & (-away <= sides[0]) & (j < lengths[b])
        for t in range(row_tiles):
            some = seen[t * block_q // packed : -(-(t + 1) * block_q // packed)].any(0)
            tiles = np.flatnonzero(some) // block_k
            if tiles.size:
                assert found[b, t] == np.ptp(tiles) + 1 + 1
            else:  # one may be visited in vain
                assert found[b, t] in (1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("blocks", [1, 2])
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


TURNS = {
    "lengths": ({"b": 4, "l": 70, "s": 200, "d": 64}, {"key_lengths": np.array([200, 0, 130, 90])}),
    "causal": ({"b": 2, "l": 250, "s": 140, "d": 128}, {"is_causal": True}),
    "full": ({"b": 3, "l": 130, "s": 400, "d": 128}, {"key_lengths": np.array([400, 0, 70])}),
    "clusters": ({"b": 3, "l": 140, "s": 100, "d": 256}, {"key_lengths": np.array([100, 0, 40])}),
}


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name", ["lengths", *(pytest.param(x, marks=pytest.mark.slow) for x in TURNS if x != "lengths")]
)
def test_first_scores_beside_the_output_before(name, seed):
    """One block, or cluster, computes all tiles of rows, with keys and without: the same bits."""
    shape, options = TURNS[name]
    q, k, v = (x.astype(np.float16) for x in oracles.qkv(h=1, **shape, seed=seed))
    if name == "causal":
        options = {**options, "alignment": "lower_right"}
    found = []
    for every in (False, True):
        plan = launch_float.hopper_forward(problem_of(q, k, v, **options))
        assert (plan.cluster == 2) == (name == "clusters") and plan.grid[0] >= 4
        grid = plan.grid if every else (plan.cluster, 1, 1)
        out, lse, _ = operands.emulated(dataclasses.replace(plan, grid=grid), seed=seed)
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
