"""exp2 by FEXPA: the stated errors are the measured ones, and the SVE code has the bits of the
NumPy model.
"""

import numpy as np
import pytest
from numba import njit

from numflash.cpu.isa import fexpa
from numflash.errors import UnsupportedError
from numflash.measure import roofline

OCTAVE = -np.linspace(0, 1, 1 << 20).astype(np.float32)
ARGUMENTS = np.concatenate(
    [
        -np.arange(8192) / np.float32(64),
        OCTAVE[::997],
        -np.geomspace(1e-30, 126, 3001),
        [-0.0, -126.5, -127, -128, -1e4, -3e38, -np.inf],
    ]
).astype(np.float32)


@pytest.mark.parametrize("name", fexpa.EXP2_FLOAT)
def test_stated_error_is_the_measured_one(name):
    model, stated = fexpa.EXP2_FLOAT[name]
    error = model(OCTAVE) / np.exp2(OCTAVE.astype(np.float64)) - 1
    assert 0.9 * stated <= np.abs(error).max() <= stated
    if name == "fexpa-truncated":
        assert error.max() < 4e-6, "it falls short, but for the rounding of x + 127"


@pytest.mark.parametrize("name", fexpa.EXP2_FLOAT)
def test_whole_octaves_are_exact_and_what_is_far_below_vanishes(name):
    model = fexpa.EXP2_FLOAT[name][0]
    octaves = -np.arange(127, dtype=np.float32)
    np.testing.assert_array_equal(model(octaves), np.exp2(octaves))
    assert (model(np.float32([-127, -1e9, -np.inf])) == 0).all()


@pytest.fixture(scope="module")
def emulated():
    pytest.importorskip("unicorn")
    pytest.importorskip("elftools")
    from numflash.machinecode.emulator import Emulated

    return Emulated


def function(name):
    row = fexpa.exp2_row(name)

    @njit
    def exp2(x, y):
        row(x, y, x.size)

    return exp2, "void(float32[::1], float32[::1])"


@pytest.mark.parametrize("name", fexpa.EXP2_FLOAT)
@pytest.mark.parametrize("bits", [128, 256, 512])
def test_sve_code_has_the_bits_of_the_model(emulated, name, bits):
    row = emulated(*function(name), "a64fx", vector_bits=bits)
    assert "fexpa\t" in row.code.assembly
    for n in (ARGUMENTS.size, 0, 1, 17):
        y = np.full(n, 7, np.float32)
        row(ARGUMENTS[:n].copy(), y)
        np.testing.assert_array_equal(
            y.view(np.int32), fexpa.EXP2_FLOAT[name][0](ARGUMENTS[:n]).view(np.int32)
        )


def test_the_table_is_the_instructions_own(emulated):
    """All 64 fractions, so that not only their sizes but their last bits are the machine's."""
    x = -np.arange(64, dtype=np.float32) / 64
    y = np.zeros(64, np.float32)
    emulated(*function("fexpa"), "a64fx")(x, y)
    fractions = np.append(y[0], y[:0:-1] * 2).view(np.int32) & 0x7FFFFF
    np.testing.assert_array_equal(fractions, fexpa.TABLE)


def test_what_has_no_sve_is_refused(emulated):
    with pytest.raises(UnsupportedError, match="'sve' needs sve"):
        emulated(*function("fexpa"), "neoverse-n1")


def test_the_loop_that_measures_its_rate(emulated):
    """A FEXPA for each register and step, and nothing between them."""
    chain = roofline.fexpa_chain()
    run = emulated(lambda n, seed: chain(n, seed), "int32(int64, int32)", "a64fx")
    lines = run.trace(7, 1)
    assert sum(x.startswith("fexpa") for x in lines) == 7 * roofline.ACCUMULATORS
