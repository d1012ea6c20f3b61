"""What the compiler makes of the INT8 kernel.

No integer division and no double precision in a hot loop, sums in registers.
"""

import pytest
from oracles import qkv

from numflash import validation
from numflash.cpu import launch
from numflash.cpu.int8 import flash_int8
from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.jit import target
from numflash.machinecode import assembly, codegen
from numflash.numerics.quantization import quantize_problem
from numflash.validation.options import Options

DOT = {
    "avx512_vnni": "vpdpbusd",
    "avx_vnni": "vpdpbusd",
    "avx2": "vpmaddwd",
    "sve": "dot",
    "neon_dot": "dot",
}


ISA = next(
    (isa for isa in target.available() if isa != "amx_int8"), "portable"
)  # matrix tiles have tests of their own


@pytest.fixture(scope="module")
def code():
    if ISA not in VECTOR_ISAS:
        pytest.skip("the target has no register tiles")
    launch.run(
        quantize_problem(validation.problem(*qkv(l=5, d=64), Options(precision="int8"))), ISA
    )
    attend = flash_int8.make_attend(ISA, "int8")
    return codegen.compile_for(
        attend, attend.nopython_signatures[0].args, codegen.Target.named("host")
    ).assembly


@pytest.mark.slow
def test_no_division_and_no_float64_in_a_loop_that_works_on_vectors(code):
    for loop in assembly.loops(code):
        # a loop over blocks of keys counts as innermost where LLVM puts its inner loops out of line
        if 8 * sum(map(assembly.is_vector, loop.instructions)) > len(loop.instructions):
            bad = [
                i
                for i in loop.instructions
                if assembly.is_integer_division(i) or assembly.is_float64(i)
            ]
            assert not bad, (loop.function, bad)


@pytest.mark.slow
def test_no_float64_anywhere(code):
    """But for the bounds of `prange`, which Numba itself compares as doubles, once per worker."""
    bounds = ["vcvtusi2sd", "vcvtsi2sd", "vmovsd", "vucomisd", "ucvtf", "scvtf", "fcmp"]
    if ISA in ("avx2", "avx_vnni"):  # no instruction converts uint64
        bounds += ["vsubpd", "vaddsd", "vunpckhpd"]
    found = [
        i
        for body in assembly.functions(code).values()
        for i in body
        if assembly.is_float64(i) and not i.startswith(tuple(bounds))
    ]
    assert not found, found


@pytest.mark.slow
def test_product_loops_are_loads_and_dots(code):
    """The two 6-row tiles.

    No vector is spilled (a row stride may be: one load beside twelve dots), nothing is called, and
    nearly all instructions are dots, on AVX2 a product and an addition each.
    """
    most = 3.5 if VECTOR_ISAS[ISA].group == 2 else 2.2
    dots = [sum(DOT[ISA] in i for i in loop.instructions) for loop in assembly.loops(code)]
    tile = 6 * VECTOR_ISAS[ISA].nv
    products = [
        loop
        for loop, n in zip(assembly.loops(code), dots, strict=True)
        if n and n % tile == 0 and not any("vpsrlvw" in i for i in loop.instructions)
    ]
    assert len(products) >= 2
    best = sorted(
        products,
        key=lambda loop: len(loop.instructions) / sum(DOT[ISA] in i for i in loop.instructions),
    )[:2]
    for loop in best:
        n = sum(DOT[ISA] in i for i in loop.instructions)
        assert not any(assembly.is_call(i) for i in loop.instructions)
        on_stack = [i for i in loop.instructions if assembly.is_stack(i)]
        assert not any(map(assembly.is_vector, on_stack)) and len(on_stack) <= n / 12, on_stack
        assert len(loop.instructions) <= most * n, assembly.histogram(loop.instructions)


def test_the_checks_can_fail():
    import numpy as np
    from numba import njit

    @njit
    def bad(x, n):
        for i in range(x.size):
            x[i] = np.float32(x[i] * 0.3 + (i // n))

    found = codegen.compile_for(
        bad, "void(float32[::1], int64)", codegen.Target.named("host")
    ).assembly
    loops = [i for loop in assembly.loops(found) for i in loop.instructions]
    assert any(map(assembly.is_integer_division, loops)) and any(map(assembly.is_float64, loops))
