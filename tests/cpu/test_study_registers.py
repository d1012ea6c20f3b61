"""Registers as values.

Each operation against NumPy, at lengths below, at and above a machine's register, and its machine
code.
"""

import numpy as np
import pytest
from numba import njit
from numba.core.errors import TypingError

from numflash.cpu.study import exp2_values, unfused
from numflash.cpu.study import registers as r
from numflash.machinecode import assembly, codegen

pytestmark = pytest.mark.slow  # kernels that only the course runs

X = np.linspace(-9.5, 9.75, 64, dtype=np.float32)


def run(operation, n=64):
    """operation(x) -> Lanes, on the first n of X."""
    load = r.make_load(n)

    @njit
    def kernel(x, out):
        r.put(operation(load(x, 0)), out, 0)

    out = np.empty(n, np.float32)
    kernel(X, out)
    return out


@pytest.mark.parametrize("n", [4, 16, 64])
def test_operations(n):
    x = X[:n]
    two = np.float32(2)
    half = np.float32(0.5)
    np.testing.assert_array_equal(
        run(njit(lambda v: r.fma(v, v, half)), n), (x.astype(float) ** 2 + 0.5).astype(np.float32)
    )
    np.testing.assert_array_equal(run(njit(lambda v: r.fma(two, v, half)), n), 2 * x + half)
    np.testing.assert_array_equal(run(njit(lambda v: r.subtract(half, v)), n), half - x)
    np.testing.assert_array_equal(run(njit(lambda v: r.at_least(v, half)), n), np.maximum(x, half))
    np.testing.assert_array_equal(run(njit(lambda v: r.nearest(v)), n), np.rint(x))
    np.testing.assert_array_equal(run(njit(lambda v: r.floor(v)), n), np.floor(x))
    np.testing.assert_array_equal(
        run(njit(lambda v: r.times_power(half, r.floor(v))), n), 0.5 * 2 ** np.floor(x)
    )
    np.testing.assert_array_equal(
        run(njit(lambda v: r.fma(r.lane(v, n - 1), v, half)), n),
        (x.astype(float) * x[n - 1] + 0.5).astype(np.float32),
    )


@pytest.mark.parametrize(("rows", "columns"), [(4, 1), (4, 4), (1, 16)])
def test_blocks_of_a_matrix(rows, columns):
    s = np.arange(200, dtype=np.int32).reshape(10, 20) - 100
    load = r.make_load_block(rows, columns)

    @njit
    def kernel(s, out):
        r.put(load(s, 3 * 20 + 2, 20), out, 0)

    out = np.empty(rows * columns, np.float32)
    kernel(s, out)
    np.testing.assert_array_equal(out, s[3 : 3 + rows, 2 : 2 + columns].ravel())


def test_zeros_and_memory():
    zeros = r.make_zeros(16)

    @njit
    def kernel(x, out):
        r.put(zeros(), x, 0)
        r.keep_in_memory()
        out[0] = x[15]

    out = np.ones(1, np.float32)
    kernel(np.ones(16, np.float32), out)
    assert out[0] == 0


@pytest.mark.parametrize("wrong", [lambda v, x: r.fma(v, x, v), lambda v, x: r.subtract(x, x)])
def test_what_is_no_register(wrong):
    operation = njit(wrong)
    load = r.make_load(16)

    @njit
    def kernel(x):
        return r.lane(operation(load(x, 0), x), 0)

    with pytest.raises(TypingError):
        kernel(X)


@pytest.mark.skipif(exp2_values.BEST != "avx512", reason="the tile is made for AVX-512")
def test_the_product_stays_in_registers():
    code = codegen.compile_for(
        exp2_values.gemm,
        "void(float32[:, ::1], float32[:, ::1], float32[:, ::1])",
        codegen.Target.named("sapphirerapids"),
    )
    counts = [
        (assembly.histogram(loop.instructions).get("vfmadd231ps zmm", 0), loop)
        for loop in assembly.loops(code.assembly)
    ]
    multiply_adds, hot = max(counts, key=lambda pair: pair[0])
    assert multiply_adds in (16, 32)
    assert (
        not any(map(assembly.is_stack, hot.instructions))
        and len(hot.instructions) < 2 * multiply_adds
    )


@pytest.mark.parametrize(
    ("isa", "cpu", "kind"), [("sve", "a64fx", "sdot z.s"), ("neon_dot", "neoverse-n1", "sdot v.4s")]
)
def test_integer_scores_on_arm(isa, cpu, kind):
    code = codegen.compile_for(
        unfused.make_gemm(isa),
        "void(int8[:, ::1], int8[::1], int32[::1], int32[:, ::1], int32[::1])",
        codegen.Target.named(cpu),
    )
    hot = codegen.report(code)
    assert hot["instructions"][kind] % 24 == 0 and hot["calls"] == 0
