"""What the compiler makes of the portable INT8 kernel for AArch64, and that the code is right at
every vector length.
"""

import llvmlite.binding as llvm
import numpy as np
import pytest
from daily import of_today

from numflash.cpu.int8 import portable
from numflash.machinecode import assembly, codegen
from numflash.numerics import fixedpoint
from numflash.tiling import KEY_BLOCK

# SVE and NEON by default
CPUS = [
    pytest.param(cpu, marks=() if cpu in ("a64fx", "neoverse-n1") else pytest.mark.slow)
    for cpu in ("a64fx", "neoverse-v1", "neoverse-v2", "neoverse-n1")
    if cpu in codegen.TRIPLES
]

loops_become_dot_products = pytest.mark.skipif(
    llvm.llvm_version_info < (20,), reason="LLVM does so since release 20"
)


def busy_loops(code):
    """Innermost loops with half the vector instructions of the busiest or more.

    Not the remainders.
    """
    loops = assembly.loops(code.assembly)
    sizes = [sum(map(assembly.is_vector, loop.instructions)) for loop in loops]
    return [loop for loop, size in zip(loops, sizes, strict=True) if 2 * size >= max(sizes)]


@loops_become_dot_products
@pytest.mark.parametrize("cpu", CPUS)
@pytest.mark.parametrize("kernel", ["portable-scores", "portable-values"])
def test_products_are_dot_products(kernel, cpu):
    """4 x 4 sums: 16 SDOT for 8 loads, no extension, no multiply-add, no spill."""
    found = codegen.histogram(kernel, cpu)
    dots = sum(n for kind, n in found["instructions"].items() if kind.startswith("sdot "))
    assert dots % 16 == 0 and dots >= 16
    assert found["total"] <= 2 * dots
    assert found["stack"] == found["lanes64"] == 0
    assert not any(
        kind.startswith(("mla", "mul", "smull", "sshll", "sunpk", "tbl"))
        for kind in found["instructions"]
    )


@loops_become_dot_products
@pytest.mark.parametrize("cpu", CPUS)
def test_softmax_neither_widens_to_64_bits_nor_divides_nor_calls(cpu):
    for loop in busy_loops(codegen.compile_kernel("portable-softmax", cpu)):
        for test in (
            assembly.is_lanes64,
            assembly.is_integer_division,
            assembly.is_float64,
            assembly.is_call,
        ):
            assert not any(map(test, loop.instructions)), (test.__name__, loop)


@loops_become_dot_products
@pytest.mark.parametrize("cpu", CPUS)
def test_softmax_works_in_narrow_lanes(cpu):
    """The weights are made in 16-bit lanes.

    Only the high half of a product may take 32-bit ones.
    """
    counts = codegen.histogram("portable-softmax", cpu)["instructions"]
    assert any(kind.endswith((" z.h", " v.8h")) for kind in counts)


@loops_become_dot_products
@pytest.mark.slow
@pytest.mark.parametrize("cpu", of_today(CPUS, 2))
def test_the_whole_kernel_keeps_its_dot_products(cpu):
    """The same in the parallel kernel that ships; both products may share one copy of the loop."""
    loops = assembly.loops(codegen.compile_kernel("portable", cpu).assembly)
    products = [
        loop
        for loop in loops
        if sum(line.startswith("sdot ") for line in loop.instructions) >= 16
        and not any(".h" in line for line in loop.instructions)
    ]  # LLVM's remainder loop: SDOT of 16-bit operands
    assert products
    for loop in products:
        assert not any(map(assembly.is_lanes64, loop.instructions))


@pytest.fixture(scope="module")
def emulated():
    pytest.importorskip("unicorn")
    pytest.importorskip("elftools")
    from numflash.machinecode.emulator import Emulated

    return Emulated


MACHINES = [
    (cpu, bits)
    for cpu, bits in (
        ("a64fx", 128),
        ("a64fx", 256),
        ("a64fx", 512),
        ("neoverse-v1", 256),
        ("neoverse-v2", 128),
        ("neoverse-n1", 128),
        ("cortex-a72", 128),
    )
    if cpu in codegen.TRIPLES
]


@pytest.mark.parametrize(("cpu", "bits"), MACHINES)
@pytest.mark.parametrize("d", [1, 20, 64, 128])
def test_scores(emulated, cpu, bits, d):
    rng = np.random.default_rng(d)
    q, k = (rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (8, KEY_BLOCK))
    ck = rng.random(KEY_BLOCK).astype(np.float32)
    cq = rng.random(8).astype(np.float32)
    x = np.zeros((8, KEY_BLOCK), np.float32)
    emulated(
        portable.score_block, codegen.KERNELS["portable-scores"].signature, cpu, vector_bits=bits
    )(q, k, ck, cq, x)
    exact = (q.astype(np.int32) @ k.astype(np.int32).T).astype(np.float32)
    assert np.array_equal(x, (exact * ck) * cq[:, None])


@pytest.mark.parametrize(("cpu", "bits"), MACHINES)
def test_softmax(emulated, cpu, bits):
    rng = np.random.default_rng(0)
    softmax = emulated(
        portable.softmax_row, codegen.KERNELS["portable-softmax"].signature, cpu, vector_bits=bits
    )
    for x in (
        -rng.integers(0, 3000, KEY_BLOCK),
        np.full(KEY_BLOCK, fixedpoint.MASKED),
        -np.arange(KEY_BLOCK) * 256,
        np.zeros(KEY_BLOCK),
    ):
        x = x.astype(np.int16)
        p = np.zeros(KEY_BLOCK, np.int8)
        total = softmax(x, 0, p)
        weights = fixedpoint.exp2_p8((-x.astype(np.int32)).astype(np.uint16))
        assert np.array_equal(p.astype(np.int16) + 128, weights) and total == weights.sum(
            dtype=np.int32
        )


@pytest.mark.parametrize(("cpu", "bits"), MACHINES)
@pytest.mark.parametrize("extreme", [False, True])
def test_values(emulated, cpu, bits, extreme):
    rng = np.random.default_rng(1)
    weights = rng.integers(0, 256, (4, KEY_BLOCK))
    v = rng.integers(-127, 128, (12, KEY_BLOCK)).astype(np.int8)
    if extreme:
        weights[:], v[:] = 255, np.where(v > 0, 127, -127)
    scale = np.exp2(-np.arange(4, dtype=np.float32))
    o = rng.standard_normal((4, 12)).astype(np.float32)
    want = o + (weights @ v.T.astype(np.int64)).astype(np.float32) * scale[:, None]
    emulated(
        portable.value_block, codegen.KERNELS["portable-values"].signature, cpu, vector_bits=bits
    )((weights - 128).astype(np.int8), v, scale, o)
    assert np.array_equal(o, want.astype(np.float32))
