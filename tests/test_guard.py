"""NUMFLASH_GUARD=1.

What is written or read beyond what is right becomes an error that names the buffer.
"""

import numpy as np
import pytest
from daily import isas_of_today
from processes import start

from numflash.jit import target

PLANTED = """
import numpy as np
from numflash.errors import GuardError
from numflash.jit import guard
from numflash.jit.compiler import inline, kernel
from numflash.jit.memory import arrays_together, fresh, zeros
from numflash.jit.parallel import over_tasks

@inline
def task(n, to, fault, out):
    names = (5,), np.int32, "the first", (5,), np.int32, "the third"
    (first, third), second = arrays_together(*names), zeros((7,), np.float32, "the second")
    third[0] = 0
    data = first[:0]                              # Numba checks no bounds
    for i in range(5 if fault != 1 else 4):
        first[i] = i
    if fault == 2:
        data[5] = 9
    if fault == 3:
        second[:0][-1 - to] = 2                   # before its start
    out[n] = first[4] + second[3] + (data[6] if fault == 4 else 0)

@kernel
def run(fault, out):
    over_tasks(task, out.size, (0, fault, out))

def call(fault):
    out = fresh((3,), np.int64)
    run(fault, out[:2] if fault == 5 else out)
    return out

for fault in range(6):
    try:
        print(fault, guard.guarded(call)(fault).tolist())
    except GuardError as error:
        print(fault, error)
"""

LEFT_OUT = [isa for isa in target.available() if isa not in isas_of_today(target.available())]
# not the kernels that only the course runs, what reads machine code, and the accuracy of kernels
# that other files enter
SUITE = (
    "tests/cpu",
    "tests/test_quantization.py",
    "tests/flex/test_int8_functions.py",
    "--ignore-glob=*/test_study_*.py",
    "--ignore=tests/cpu/test_int8_code.py",
    "--ignore=tests/cpu/test_int8_float_values.py",
    "--ignore=tests/cpu/test_decode_smooth.py",
    "-k",
    " and ".join(f"not {name}" for name in ("cuda", *LEFT_OUT)),
)


def guarded(*command, timeout):
    return start(*command, timeout=timeout, NUMFLASH_GUARD="1").stdout


def test_planted_faults_are_found_and_the_buffer_named(tmp_path):
    (tmp_path / "planted.py").write_text(PLANTED)
    lines = guarded(str(tmp_path / "planted.py"), timeout=300).splitlines()
    assert lines[0] == "0 [4, 4, 4]"
    assert "the first: int32: read before it was written" in lines[1]
    assert "the first: int32: written behind its end, from byte 0 on" in lines[2]
    assert "the second: float32: written before its start" in lines[3]
    assert "the first: int32: read beyond its ends" in lines[4]
    assert (
        "call (planted.py, line 28): int64 (3,): read before it was written, or never" in lines[5]
    )


def test_arrays_together_are_apart_and_aligned():
    from numflash.jit.compiler import kernel
    from numflash.jit.memory import arrays_together

    @kernel
    def make(n):
        a, b, c = arrays_together((n,), np.uint8, "a", (0,), np.int16, "b", (n, 3), np.float64, "c")
        a[:], c[:] = 1, 2
        return a.copy(), b.size, c.copy(), a.ctypes.data, c.ctypes.data

    for n in (1, 63, 64, 65):
        a, empty, c, first, last = make(n)
        assert (a.tolist(), empty, c.tolist()) == ([1] * n, 0, [[2.0] * 3] * n)
        assert first % 64 == last % 64 == 0
        assert abs(last - first) >= n


def test_arrays_together_keep_the_constants_of_each_caller():
    from numflash.jit.compiler import inline, kernel
    from numflash.jit.memory import arrays_together

    def sized(constant):
        @inline
        def size(n):
            (x,) = arrays_together((n, constant), np.float32, "of a constant")
            return x.shape, x.strides

        return size

    wide, narrow = sized(16), sized(8)

    @kernel
    def sizes(n):
        (x,) = arrays_together((n, 2), np.float32, "of a constant")
        (y,) = arrays_together((n, 3), np.float32, "of a constant")
        return wide(n), narrow(n), (x.shape, x.strides), (y.shape, y.strides)

    assert sizes(5) == tuple(((5, n), (4 * n, 4)) for n in (16, 8, 2, 3))


def test_without_the_variable_functions_stay_as_they_are():
    from numflash.jit import guard, memory

    if guard.ON:
        pytest.skip("NUMFLASH_GUARD is set")

    def function():
        return 1

    assert guard.guarded(function) is guard.checked(function) is function
    assert memory.fresh is np.empty


REMOVED = """
import numpy as np
from numflash.cpu.int8 import flash_int8
from numflash.cpu.isa.isas import VECTOR_ISAS
flash_int8.value_rows = lambda isa, pv: VECTOR_ISAS[isa].rows[-1]
import numflash
from numflash.errors import GuardError
q = np.random.default_rng(0).standard_normal((1, 2, 128, 64)).astype(np.float32)
try:
    numflash.attention(q, q, q, precision="int8", pv="fp32", window=(30, 4))
except GuardError as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif("amx_int8" not in target.available(), reason="the CPU has no AMX")
def test_rows_that_are_written_twice_are_found(tmp_path):
    """P.V in parts of 32 rows, which tiles of 6 rows overrun.

    Heap damage that no result of a small call shows.
    """
    (tmp_path / "removed.py").write_text(REMOVED)
    assert "INT8 output tile: float32: written behind its end" in guarded(
        str(tmp_path / "removed.py"), timeout=600
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_kernels_pass_under_guard():
    guarded("-m", "pytest", "-q", "-x", "-n0", "-p", "no:cacheprovider", *SUITE, timeout=1700)
