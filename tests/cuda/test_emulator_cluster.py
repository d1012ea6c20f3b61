"""Clusters of blocks in the emulator: a tile that two blocks load half of each, for both.

The correct kernel, and next to it the faults that the emulator names.
"""

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from emulator_checks import FLOATS, fails, run

from numflash.cuda import emulate
from numflash.cuda.compile import Source
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.emulator import TensorMap
from numflash.cuda.instructions import ptx
from numflash.errors import ArgumentError

u32 = types.uint32
i32 = types.int32
u64 = types.uint64
SIGNATURE = types.void(u64, FLOATS)
TILES, TILE, HALF = 3, 1024, 512  # bytes of 8 and of 4 rows of 32 floats


def halves(
    start=True,
    end=True,
    mask=3,
    lanes=2,
    everywhere=True,
    rank=0,
):
    """In each block a thread loads its half of every tile into both blocks; 32 read the whole.

    A tile overwrites the one before once the readers of both blocks have arrived at the mbarriers
    of both.
    """

    def kernel(maps, y):
        shared = cuda.shared.array(1024, u32)
        t = cuda.threadIdx.x
        base = (ptx.shared_address(shared) + u32(1023)) & u32(0xFFFFFC00)
        full, empty = base + u32(TILE), base + u32(TILE + 8)
        own = ptx.cluster_rank()
        if t == 0:
            ptx.mbarrier_init(full, u32(1))
            ptx.mbarrier_init(empty, u32(2))
            ptx.fence_mbarrier_init()
        if start:
            ptx.cluster_arrive()
            ptx.cluster_wait()
        else:
            cuda.syncthreads()
        for k in range(TILES):
            if t == 32:
                ptx.mbarrier_wait(empty, u32((k & 1) ^ 1))
                ptx.mbarrier_expect(full, u32(TILE))
                ptx.tma_multicast_4d(
                    base + own * u32(HALF), maps, i32(0), i32(8 * k + 4 * i32(own)), i32(0), i32(0),
                    full, u32(mask),
                )  # fmt: skip
            if t < 32:
                ptx.mbarrier_wait(full, u32(k & 1))
                y[(cuda.blockIdx.x * TILES + k) * 32 + t] = ptx.load_shared_f32(base + u32(t * 32))
                cuda.syncwarp()
                to = ptx.cluster_address(empty, u32(t & 1) + u32(rank)) if everywhere else empty
                ptx.mbarrier_arrive_cluster(to, u32(t), u32(lanes))
        if end:
            ptx.cluster_arrive()
            ptx.cluster_wait()

    return kernel


def arguments(clusters=1):
    x = np.arange(8 * TILES * 32, dtype=np.float32).reshape(1, 1, 8 * TILES, 32)
    return [TensorMap(x, (1, 1, 4, 32), swizzle=0)], np.zeros(clusters * 64 * TILES, np.float32)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_tile_for_two_blocks(seed):
    """What comes from global memory is half of what is written to shared memory."""
    maps, y = arguments()
    report = run(halves(), maps, y, signature=SIGNATURE, arch="sm_90a", cluster=2, seed=seed)
    assert np.array_equal(y, np.tile(np.arange(0, 8 * TILES * 32, 8), 2))
    assert report.tma_copied == 2 * TILES * TILE
    assert report.global_loaded == TILES * TILE


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        # the other block's mbarriers may not be there yet
        ("race protocol", {"start": False}),
        # the other block may have ended when this one arrives at its mbarrier
        ("race", {"end": False}),
        # a half that the other block waits for, or that nobody can take
        ("deadlock", {"mask": 1}),
        ("protocol", {"mask": 7}),
        # nobody tells the other block that its tile has been read
        ("deadlock", {"lanes": 1}),
        ("race pending", {"everywhere": False}),
        ("protocol", {"rank": 1}),  # a block that the cluster does not have
    ],
)
def test_cluster_faults(kinds, options):
    fails(
        kinds, None, halves(**options), *arguments(), signature=SIGNATURE, arch="sm_90a", cluster=2
    )


def barriers(arrive=True, twice=False):
    def kernel(y):
        if arrive:
            ptx.cluster_arrive()
        if twice:
            ptx.cluster_arrive()
        ptx.cluster_wait()
        y[cuda.blockIdx.x] = ptx.cluster_rank()

    return kernel


def test_the_barrier_of_a_cluster():
    """Two clusters of three; threads that have ended are not waited for."""
    source = Source(barriers(), types.void(FLOATS), 64, cluster=3)
    y = np.full(6, -1, np.float32)
    emulate(source, 6, None, [y], arch="sm_90a")
    assert y.tolist() == [0, 1, 2, 0, 1, 2]
    with pytest.raises(ArgumentError, match="got 4 blocks along x; allowed: multiples of 3"):
        emulate(source, 4, None, [y], arch="sm_90a")


@pytest.mark.parametrize("options", [{"arrive": False}, {"twice": True}])
def test_barrier_faults(options):
    fails(
        "protocol",
        None,
        barriers(**options),
        np.zeros(2, np.float32),
        signature=types.void(FLOATS),
        arch="sm_90a",
        cluster=2,
    )
