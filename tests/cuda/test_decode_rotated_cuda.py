"""An INT8 cache on a card that rotates rows, in the emulator: the bits of the CPU's."""

import numpy as np
import pytest
from oracles import draw

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from numflash.cache.kvcache import KVCache
from numflash.cuda.compile import compiled
from numflash.cuda.emulator import emulate
from numflash.cuda.kernels.decode_rotate import decode_rotate
from numflash.numerics.rotation import rotate

DEVICES = ("cpu", "cuda-emulator")


@pytest.mark.slow
@pytest.mark.parametrize("d", [5, 16, 48, 64, 80, 96, 128, 192, 256])
def test_rows(d):
    x = draw((7, d)).astype(np.float32)
    x[0], x[1, d // 2], x[2, 3] = 3e38, np.inf, -3e38
    found = x.copy()
    kernel = compiled(decode_rotate, "sm_80", "ptx", d=d, smooth=False)
    emulate(kernel, (2, 1, 1), None, [(found, 0), (7, 1)])
    np.testing.assert_array_equal(found, rotate(x))


@pytest.mark.slow
@pytest.mark.parametrize(("d", "dv", "smooth"), [(64, 96, True), (80, 7, False)])
def test_the_cpu_gives_the_same(d, dv, smooth):
    options = {"value_dim": dv, "rotate": True, "smooth": smooth}
    caches = [KVCache(2, 2, d, 300, device=device, **options) for device in DEVICES]
    key, value = draw((2, 2, 135, d)), draw((2, 2, 135, dv), 1)
    key[..., 3] += 30
    query = draw((2, 4, 1, d), 3)
    for a, z in ((0, 127), (127, 128), (128, 135)):
        for cache in caches:
            cache.append(key[:, :, a:z], value[:, :, a:z])
        for splits in (1, 2):
            here, there = (c.decode(query, splits=splits, return_lse=True) for c in caches)
            for x, y in zip(here, there, strict=True):
                np.testing.assert_array_equal(x, y)
    for x, y in zip(*(cache.read(1) for cache in caches), strict=True):
        np.testing.assert_array_equal(x, y)
    steps = [
        cache.step(query, key[:, :, :1].astype(np.float32), value[:, :, :1].astype(np.float32))
        for cache in caches
        for _ in range(2)
    ]
    np.testing.assert_array_equal(steps[1], steps[3])
