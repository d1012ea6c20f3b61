"""Arrays whose last number is the last before memory that nobody may read."""

import sys

import pytest
from processes import run

AT_THE_END = """
import ctypes, mmap
import numpy as np
import numflash

page = mmap.PAGESIZE
memory = mmap.mmap(-1, 8 * page)
start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
protect = ctypes.CDLL(None).mprotect
protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
assert protect(start + 7 * page, page, 0) == 0

def at_the_end(x):
    whole = np.frombuffer(memory, x.dtype)[: 7 * page // x.itemsize]
    found = whole[whole.size - x.size :].reshape(x.shape)
    found[...] = x
    return found

rng = np.random.default_rng(0)
"""
MASKS = """
for length, s in ((20, 53), (33, 17), (70, 7), (2, 61), (1, 1)):
    q = rng.standard_normal((1, 2, length, 16), np.float32)
    k, v = (rng.standard_normal((1, 2, s, 16), np.float32) for _ in range(2))
    for mask in (rng.random((length, s)) < 0.7, rng.standard_normal((1, s), np.float32),
                 rng.standard_normal((length, s), np.float32)):
        mask.flat[::5] = mask.flat[::5] > 2 if mask.dtype == bool else -np.inf
        given = {"attn_mask": at_the_end(mask)}
        out, lse = numflash.attention(q, k, v, return_lse=True, **given)
        wanted = numflash.attention(q, k, v, return_lse=True, impl="reference", **given)
        assert np.abs(out - wanted[0]).max() < 1e-5, (length, s, mask.dtype)
        found = numflash.attention_backward(out, q, k, v, out, lse, **given)
        exact = numflash.attention_backward(out, q, k, v, *wanted, impl="reference", **given)
        for x, y in zip(found, exact):
            assert np.abs(x - y).max() < 1e-4, (length, s, mask.dtype)
print("read")
"""


QUERIES = """
from dataclasses import replace
for length in (1, 2, 5, 7, 50):
    for d in (64, 24):
        q, k, v = (rng.standard_normal((1, 2, n, d), np.float32) for n in (length, 40, 40))
        q, k, v = numflash.quantize_qkv(q, k, v)
        q = replace(q, data=at_the_end(q.data))
        out = numflash.attention_int8(q, k, v)
        assert (out == numflash.attention_int8(q, k, v, impl="reference")).all(), (length, d)
print("read")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="mprotect")
@pytest.mark.parametrize("code", [MASKS, QUERIES])
def test_no_kernel_reads_behind_its_arrays(code):
    assert run(AT_THE_END + code).stdout.strip() == "read"
