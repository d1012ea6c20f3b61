"""The whole fused INT8 kernel that ships, as one thread of SVE and NEON code, executed: the bits of the integer model."""
import functools

import numba
import numpy as np
import pytest
from oracles import qkv

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash import reference, validation
from numflash.aarch64.emulator import Emulated
from numflash.cpu import flash_int8, launch, packing
from numflash.cpu.flash_int8 import make_attend
from numflash.quantization import quantize_problem

from .test_guest import CASES


@functools.cache
def one_thread(isa, pv):
    """The kernel with its parallel loop run serially."""
    return numba.njit(make_attend(isa, pv).py_func, error_model="numpy")


@pytest.mark.parametrize("isa, cpu, bits, pv", [
    ("sve", "a64fx", 512, "int8"), ("sve", "a64fx", 256, "int8"), ("sve", "a64fx", 128, "int8"),
    pytest.param("neon_dot", "neoverse-n1", 128, "int8", marks=pytest.mark.slow),
    pytest.param("sve", "neoverse-v1", 256, "int8", marks=pytest.mark.slow),
    *(pytest.param("sve", "a64fx", bits, "fp32", marks=pytest.mark.slow) for bits in (512, 256, 128))])
def test_bits_of_the_integer_model(isa, cpu, bits, pv, monkeypatch):
    def emulated(isa, pv):
        def attend(*arguments):
            Emulated(one_thread(isa, pv), tuple(map(numba.typeof, arguments)), cpu, vector_bits=bits)(*arguments)
        return attend

    monkeypatch.setattr(packing, "running_lanes", lambda name: bits // 32)
    monkeypatch.setattr(flash_int8, "make_attend", emulated)
    for name, (shape, options) in CASES.items():
        problem = quantize_problem(validation.problem(*qkv(**shape), precision="int8", pv=pv, return_lse=True, **options))
        out, lse = reference.integer_model(problem)
        got, got_lse = launch.run_int8(problem, isa)
        if pv == "int8":
            np.testing.assert_array_equal(got, out, err_msg=name)
        else:
            np.testing.assert_allclose(got, out, rtol=0, atol=2e-6, err_msg=name)     # summed in another order
        np.testing.assert_array_equal(got_lse, lse, err_msg=name)
