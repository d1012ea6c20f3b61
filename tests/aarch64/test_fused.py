"""The whole fused INT8 kernel that ships, as one thread of SVE and NEON code, executed.

The bits of the integer model.
"""

import functools

import numba
import pytest

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash.cpu import launch_int8
from numflash.cpu.int8 import flash_int8, packing
from numflash.cpu.int8.flash_int8 import make_attend
from numflash.machinecode.emulator import Emulated

from .test_guest import has_the_bits_of_the_model


@functools.cache
def one_thread(isa, pv):
    """The kernel with its parallel loop run serially."""
    return numba.njit(make_attend(isa, pv).py_func, error_model="numpy")


@pytest.mark.parametrize(
    ("isa", "cpu", "bits", "pv"),
    [
        *(
            pytest.param("sve", "a64fx", bits, "int8", marks=pytest.mark.slow)
            for bits in (512, 256, 128)
        ),
        pytest.param("neon_dot", "neoverse-n1", 128, "int8", marks=pytest.mark.slow),
        pytest.param("sve", "neoverse-v1", 256, "int8", marks=pytest.mark.slow),
        *(
            pytest.param("sve", "a64fx", bits, "fp32", marks=pytest.mark.slow)
            for bits in (512, 256, 128)
        ),
    ],
)
def test_bits_of_the_integer_model(isa, cpu, bits, pv, monkeypatch):
    def emulated(isa, pv):
        def attend(*arguments):
            Emulated(
                one_thread(isa, pv), tuple(map(numba.typeof, arguments)), cpu, vector_bits=bits
            )(*arguments)

        return attend

    monkeypatch.setattr(
        launch_int8, "is_plain", lambda problem, isa: False
    )  # compiles for the host
    monkeypatch.setattr(packing, "running_lanes", lambda name: bits // 32)
    monkeypatch.setattr(flash_int8, "make_attend", emulated)
    has_the_bits_of_the_model(lambda problem: launch_int8.run(problem, isa), pv)
