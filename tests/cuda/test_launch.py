"""`attention` through the emulator, and what is said where no GPU is."""

import numpy as np
import oracles
import pytest

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

import numflash
from numflash import errors
from numflash.cache.engine import StateError
from numflash.cuda.device import arch_of, current_device
from numflash.cuda.emulator import EmulatorError
from numflash.cuda.validate import run as validate
from numflash.errors import DriverError, UnsupportedError


def test_attention_in_the_emulator():
    q, k, v = oracles.qkv(b=1, h=2, l=70, s=90, d=64, dtype=np.float16)
    out, lse = numflash.attention(q, k, v, is_causal=True, return_lse=True, impl="cuda-emulator")
    expected, expected_lse = oracles.naive(q, k, v, is_causal=True)
    assert (
        out.dtype == np.float16
        and np.allclose(out, expected, atol=2e-3)
        and np.allclose(lse, expected_lse, atol=1e-4)
    )


def test_int8_has_the_bits_of_the_model():
    q, k, v = oracles.qkv(b=1, h=1, l=70, s=140, d=64)
    out = numflash.attention(q, k, v, precision="int8", impl="cuda-emulator")
    assert np.array_equal(out, numflash.attention(q, k, v, precision="int8", impl="reference"))


@pytest.mark.parametrize(
    ("arch", "dtype"),
    [
        ("sm_80", np.float32),
        pytest.param("sm_80", np.float16, marks=pytest.mark.slow),
        pytest.param("sm_90a", np.float16, marks=pytest.mark.slow),
    ],
)
def test_softcap_whose_tanh_would_be_wrong(dtype, arch):
    """cap * tanh(score / cap) of float kernels is off by 1e-7 of the cap: by 0.1 for a cap of 1e6."""
    q, k, v = oracles.qkv(b=1, h=1, l=8, s=24, d=64, dtype=dtype)
    impl = f"cuda-emulator:{arch}"
    out, lse = numflash.attention(q, k, v, softcap=1e4, return_lse=True, impl=impl)
    expected, expected_lse = oracles.naive(q, k, v, softcap=1e4)
    assert np.abs(out - expected).max() < 3e-3 and np.abs(lse - expected_lse).max() < 3e-3
    for cap in (1.01e4, 1e6, 1e30):
        with pytest.raises(UnsupportedError, match=r"softcap: got .* 0 to 10000"):
            numflash.attention(q, k, v, softcap=cap, impl=impl)
        with pytest.raises(UnsupportedError, match=r"softcap: got .* 0 to 10000"):
            numflash.attention_backward(out, q, k, v, out, lse, softcap=cap, impl=impl)


def test_without_a_gpu():
    try:
        current_device()
    except UnsupportedError:
        q = np.zeros((1, 1, 2, 8), np.float16)
        assert validate.main([]) == 2
        with pytest.raises(UnsupportedError, match=r"no usable GPU here .*'cuda-emulator' runs"):
            numflash.attention(q, q, q, impl="cuda")
        with pytest.raises(UnsupportedError, match=r"^device: got 'cuda', [^:]*\(there is no"):
            numflash.KVCache(1, 2, 32, 64, device="cuda")  # it has no impl
    else:
        pytest.skip("a GPU is here")


def test_architecture_of_a_card():
    found = [
        arch_of(*cc)
        for cc in ((7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0), (12, 1))
    ]
    assert found == [
        "sm_75",
        "sm_80",
        "sm_86",
        "sm_86",
        "sm_89",
        "sm_90a",
        "sm_100",
        "sm_120",
        "sm_120",
    ]
    with pytest.raises(UnsupportedError, match=r"compute capability 7\.0"):
        arch_of(7, 0)


def test_every_exception_is_listed_with_the_others():
    """`numflash.errors` is where a caller looks for what may be raised."""
    for found in (DriverError, EmulatorError, StateError):
        assert issubclass(found, errors.NumflashError) and found.__module__ == "numflash.errors"
