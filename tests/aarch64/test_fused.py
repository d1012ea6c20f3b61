"""The whole fused INT8 kernel that ships, as one thread of SVE code, executed.

The bits of the integer model.
"""

import functools

import numba
import pytest
from daily import of_today

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numflash.cpu import launch_int8
from numflash.cpu.int8 import flash_int8, packing
from numflash.cpu.int8.flash_int8 import make_attend
from numflash.cpu.problem_arrays import at_address
from numflash.machinecode.codegen import TRIPLES
from numflash.machinecode.emulator import Emulated

from .test_guest import has_the_bits_of_the_model


@functools.cache
def one_thread(isa, pv):
    """The kernel with its parallel loop run serially."""
    return numba.njit(make_attend(isa, pv).py_func, error_model="numpy")


def in_place(results):
    """Where the result is, with an array for its address: the emulator maps no other memory."""
    out = results.out
    shape = len(results.m) // out.heads, out.heads, out.length, out.d
    return out._replace(start=at_address(out.start, shape, "=f4"))


# `make test-aarch64` compiles and runs it as A64FX (both kinds of P.V, 512 bits) and as Neoverse N1
MACHINES = [
    ("neoverse-v1", 256, "int8"),
    ("neoverse-v2", 128, "int8"),
    ("a64fx", 256, "fp32"),
    ("a64fx", 128, "fp32"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cpu", "bits", "pv"), of_today([m for m in MACHINES if m[0] in TRIPLES], 2)
)
def test_bits_of_the_integer_model(cpu, bits, pv, monkeypatch):
    def emulated(isa, pv):
        def attend(*arguments):
            types = tuple(map(numba.typeof, arguments))
            kernel = Emulated(one_thread(isa, pv), types, cpu, vector_bits=bits)
            *others, results = arguments
            kernel(*others, results._replace(out=in_place(results)))

        return attend

    monkeypatch.setattr(
        launch_int8, "is_plain", lambda problem, isa: False
    )  # compiles for the host
    monkeypatch.setattr(packing, "running_lanes", lambda name: bits // 32)
    monkeypatch.setattr(flash_int8, "make_attend", emulated)
    has_the_bits_of_the_model(lambda problem: launch_int8.run(problem, "sve"), pv)
