"""The emulator itself.

Arguments, results, vector lengths, instruction counts, and that its guards bite.
"""

import numpy as np
import pytest
from numba import njit

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from numba.extending import intrinsic
from unicorn import UC_HOOK_CODE

from numflash.errors import ArgumentError
from numflash.machinecode.codegen import TRIPLES
from numflash.machinecode.emulator import Emulated

DOT = "int32(int8[::1], int8[::1])"
TARGETS = [
    ("a64fx", 128),
    ("a64fx", 256),
    ("a64fx", 512),
    ("neoverse-v1", 256),
    ("neoverse-v2", 128),
    ("neoverse-n1", 128),
    ("cortex-a72", 128),
]


@intrinsic
def vector_bytes(typingctx):
    from llvmlite import ir
    from numba.core import cgutils, types

    def generate(context, builder, signature, arguments):
        i64 = ir.IntType(64)
        vscale = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(i64, []), "llvm.vscale.i64"
        )
        return builder.mul(builder.call(vscale, []), i64(16))

    return types.intp(), generate


@njit
def register_bytes():
    return vector_bytes()


@njit
def dot(a, b):
    s = np.int32(0)
    for i in range(a.shape[0]):
        s = np.add(s, np.multiply(np.int32(a[i]), np.int32(b[i])))
    return s


@njit
def affine(x, factor, whole, double, y):
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            y[i, j] = x[i, j] * factor + np.float32(whole) - np.float32(double)


@njit
def overruns(x):
    for i in range(x.size + 1):
        x[i] = 7


@njit
def copies(x, y):
    y[:] = x


@njit
def refuses(n):
    if n > 3:
        raise ValueError("too large")
    return n


@pytest.mark.parametrize("bits", [128, 256, 512, 1024, 2048])
def test_vector_length(bits):
    assert Emulated(register_bytes, "int64()", vector_bits=bits)() == bits // 8


@pytest.mark.parametrize("bits", [0, 64, 100, 384, 4096])
def test_no_vector_length(bits):
    with pytest.raises(ArgumentError, match=f"vector_bits: got {bits}; allowed: 128, 256"):
        Emulated(register_bytes, "int64()", vector_bits=bits)


@pytest.mark.parametrize(("cpu", "bits"), [t for t in TARGETS if t[0] in TRIPLES])
@pytest.mark.parametrize("n", [0, 1, 15, 64, 65, 257, 1000])
def test_dot_product_is_exact(cpu, bits, n):
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-128, 128, n).astype(np.int8) for _ in range(2))
    assert Emulated(dot, DOT, cpu, vector_bits=bits)(a, b) == a.astype(int) @ b.astype(int)


def test_every_kind_of_argument():
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    y = np.zeros((3, 4), np.float32)
    emulated = Emulated(
        affine, "void(float32[:, ::1], float32, int8, float64, float32[:, ::1])"
    )  # nine words on the stack
    assert emulated(x, 1.5, -3, 2.0, y) is None
    assert np.array_equal(y, x * np.float32(1.5) - 5)
    with pytest.raises(TypeError, match="got float64"):
        emulated(x.astype(np.float64), 1.5, -3, 2.0, y)


def test_instructions_are_counted_exactly():
    a = np.ones(4096, np.int8)
    counts = {}
    for bits in (128, 256, 512):
        emulated = Emulated(dot, DOT, vector_bits=bits)
        emulated(a, a, count=True)
        one_by_one = []
        hook = emulated._uc.hook_add(
            UC_HOOK_CODE,
            lambda uc, where, size, user, out=one_by_one: out.append(where),
            begin=0x1000000,
            end=0x2000000,
        )
        emulated._uc.ctl_flush_tb()
        counts[bits] = emulated.instructions
        emulated(a, a)
        emulated._uc.hook_del(hook)
        assert counts[bits] == len(one_by_one)
    assert counts[128] > 1.8 * counts[256] > 3.2 * counts[512]


def test_overruns_are_caught():
    with pytest.raises(RuntimeError, match=r"wrote past the end of an array of shape \(5,\)"):
        Emulated(overruns, "void(int8[::1])")(np.zeros(5, np.int8))


def test_memory_functions_work_and_others_are_refused():
    x = np.arange(100, dtype=np.int8)
    y = np.zeros(100, np.int8)
    emulated = Emulated(copies, "void(int8[::1], int8[::1])")
    emulated(x, y)
    assert np.array_equal(x, y) and "memcpy" in emulated.externals
    assert Emulated(njit(lambda n: np.ones(n, np.int32).sum()), "int64(int64)")(10) == 10
    with pytest.raises(RuntimeError, match="the code called log10"):
        Emulated(njit(lambda x: np.log10(x)), "float64(float64)")(10.0)


def test_exceptions_are_seen():
    emulated = Emulated(refuses, "int64(int64)")
    assert emulated(3) == 3
    with pytest.raises(RuntimeError, match="raised an exception"):
        emulated(4)
