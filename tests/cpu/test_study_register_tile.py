"""Register tiles of every shape against integers of unlimited size."""

import numpy as np
import pytest

from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.cpu.study.register_tile import make_product, pack
from numflash.jit import target

pytestmark = pytest.mark.slow  # kernels that only the course runs

VECTORS = [isa for isa in target.available() if isa != "portable"]


@pytest.mark.parametrize("isa", VECTORS)
@pytest.mark.parametrize(("mr", "nv"), [(1, 1), (6, 4), (4, 2), (8, 4)])
@pytest.mark.parametrize("channels", [4, 128])
def test_the_last_block_is_the_product(isa, mr, nv, channels):
    rng = np.random.default_rng(mr)
    a = rng.integers(0, 128, (48, channels))
    k = rng.integers(-128, 128, (256, channels), np.int8)
    a[5], k[130], k[131] = 127, -128, 127  # as large as they get
    c = np.zeros((24, 128), np.int32)
    make_product(isa, mr, nv)(
        a.astype(np.uint8 if VECTOR_ISAS[isa].group == 4 else np.int16), pack(isa, k, nv), c
    )
    np.testing.assert_array_equal(c, a[24:] @ k[128:].T.astype(np.int64))
