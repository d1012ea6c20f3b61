"""The float32 kernel that ships becomes code for every AArch64 CPU.

An operation of another machine would end the process.
"""

import numpy as np
import pytest

import numflash
from numflash.cpu.floats import flash_float
from numflash.jit import target
from numflash.machinecode import assembly, codegen

CPUS = [name for name, triple in codegen.TRIPLES.items() if triple == codegen.AARCH64]


@pytest.mark.parametrize(
    "cpu", ["a64fx", *(pytest.param(cpu, marks=pytest.mark.slow) for cpu in CPUS if cpu != "a64fx")]
)
def test_the_float_kernel_compiles_to_fused_multiply_adds(cpu):
    x = np.ones((1, 1, 2, 3), np.float32)
    numflash.attention(x, x, x)  # the types of its arguments, as this machine's kernel met them
    here = flash_float.make_attend(target.available(target.FLOAT_ISAS)[0], "float32")
    code = codegen.compile_for(
        flash_float.make_attend("neon", "float32"), here.signatures[0], codegen.Target.named(cpu)
    )
    # of the kernel itself: score functions are called by address and have loops of their own
    loops = [x for x in assembly.loops(code.assembly) if "flash_float" in x.function]
    products = [assembly.histogram(x.instructions).get("fmla v.4s", 0) for x in loops]
    hot = loops[products.index(max(products))].instructions
    assert max(products) >= 24
    for unwanted in ("is_float64", "is_call", "is_integer_division", "is_lanes64"):
        assert not any(map(getattr(assembly, unwanted), hot)), unwanted
