"""Score and mask functions on an AArch64 machine, real or emulated: NEON and SVE kernels, decoding.

Against float64. `tools/aarch64/test.sh` compiles this job with few optimisations.
"""

import platform

import numpy as np
import pytest

import numflash
from numflash.flex import listing

pytestmark = pytest.mark.skipif(
    platform.machine() != "aarch64",
    reason="needs an AArch64 machine; make test-aarch64 emulates one",
)
H, S, D = 2, 150, 32
SLOPES = np.array([0.5, 0.03])
DOCUMENTS = np.arange(S) // 40
rng = np.random.default_rng(5)
QUERY, KEY, VALUE = (rng.standard_normal((1, H, S, D)).astype(np.float32) for _ in range(3))
CLOSE = {"float32": 5e-6, "int8": 0.06}


def score_mod(score, b, h, q, k):
    return 5 * np.tanh(score / 5) - SLOPES[h] * abs(q - k)


def mask_mod(b, h, q, k):
    return (q >= k) & ((DOCUMENTS[q] == DOCUMENTS[k]) | (k % 7 == 2))


def exact():
    h, q, k = np.arange(H)[:, None, None], np.arange(S)[:, None], np.arange(S)
    s = QUERY.astype(float) @ KEY.swapaxes(2, 3) / D**0.5
    s = np.where(mask_mod(0, h, q, k), score_mod(s, 0, h, q, k), -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return p @ VALUE / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("precision", CLOSE)
def test_functions_in_the_kernels(precision):
    mask = numflash.create_block_mask(mask_mod, None, None, S, S, BLOCK_SIZE=32)
    out = numflash.flex_attention(QUERY, KEY, VALUE, score_mod, mask, precision=precision)
    assert np.abs(out - exact()).max() <= CLOSE[precision]


@pytest.mark.parametrize("dtype", CLOSE)
def test_functions_in_decoding(dtype):
    cache = numflash.KVCache(1, H, D, S, dtype)
    cache.append(KEY, VALUE)
    out = cache.decode(QUERY[:, :, -2:], score_mod=score_mod, mask_mod=mask_mod)
    assert np.abs(out - exact()[:, :, -2:]).max() <= CLOSE[dtype]


def test_the_tile_uses_vectors():
    assert ".4s" in listing(score_mod, shape=(1, H, S, S), assembly=True)
