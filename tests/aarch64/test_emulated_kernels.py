"""The kernels for SVE and NEON in emulated AArch64 Pythons, held against what runs here.

The option table by pairs; in the slow tests a part of the whole table by the date, or with
TABLE=whole all of it, on plain loops and in half precisions, too: the integer model and the oracle
run here (`tests/cpu/test_combinations.py`), the kernels there. Score functions, and decoding.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from daily import WHOLE, of_today
from flex import gallery as g
from flex import test_flex_attention as floats
from flex import test_int8_functions as integers
from option_table import pairs, rows
from test_combinations import floats_hold, int8_holds

import numflash
from numflash.cpu import launch

from . import test_guest
from .guest import ENVIRONMENT, Guest

pytestmark = [
    pytest.mark.skipif(not ENVIRONMENT, reason="needs an emulated Python: make test-aarch64"),
    pytest.mark.timeout(3000),
]
A64FX, N1 = "a64fx", "neoverse-n1"
# (machine, instruction set)
INT8 = [(A64FX, "sve"), (N1, "neon_dot")]
FLOATS = [(A64FX, "sve512"), (N1, "neon")]
# LLVM makes other code of plain loops on each machine
PORTABLE = [(A64FX, "portable"), (N1, "portable")]
# of the whole table, which a day has one of
PARTS = 20


@pytest.fixture(scope="module")
def guests():
    started = {cpu: Guest(cpu) for cpu in (A64FX, N1)}
    yield started
    for guest in started.values():
        guest.close()


def hold(check, kernels, rows, guests):
    """`check` each row on each (machine, instruction set); while they compute, the next rows' model."""

    def one(row):
        for cpu, isa in kernels:
            check(isa, row, lambda *args, cpu=cpu: guests[cpu].call(launch.run, *args))

    with ThreadPoolExecutor(len(guests) + 1) as pool:
        assert len(list(pool.map(one, rows))) == len(rows) > 0


def hold_int8(pv, kernels, rows, guests):
    hold(lambda isa, row, run: int8_holds(isa, pv, row, run), kernels, rows, guests)


def hold_floats(precision, kernels, rows, guests):
    hold(lambda isa, row, run: floats_hold(precision, isa, row, run), kernels, rows, guests)


@pytest.mark.parametrize("pv", ["int8", "int16", "fp32"])
@pytest.mark.parametrize(("cpu", "isa"), INT8)
def test_int8_by_pairs(cpu, isa, pv, guests):
    hold_int8(pv, [(cpu, isa)], pairs(), guests)


@pytest.mark.parametrize(("cpu", "isa"), FLOATS)
def test_floats_by_pairs(cpu, isa, guests):
    hold_floats("float32", [(cpu, isa)], pairs(), guests)


@pytest.mark.slow
@pytest.mark.parametrize("pv", ["int8", "fp32"])
def test_int8_in_the_table(pv, guests):
    hold_int8(pv, INT8 + PORTABLE * WHOLE, of_today(rows(), PARTS), guests)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"] if WHOLE else ["float32"])
def test_floats_in_the_table(precision, guests):
    portable = PORTABLE * (WHOLE and precision == "float32")
    hold_floats(precision, FLOATS + portable, of_today(rows(), PARTS), guests)


@pytest.mark.parametrize(("cpu", "isa"), INT8)
def test_a_query_that_is_not_finite(cpu, isa, guests):
    test_guest.has_the_bits_of_the_model(
        lambda problem: guests[cpu].call(launch.run, problem, isa), "int8"
    )


@pytest.mark.parametrize("cpu", [A64FX, N1])
def test_public_calls(cpu, guests):
    guests[cpu].call(test_guest.test_float_attention)


@pytest.mark.parametrize("cpu", [A64FX])
def test_decode_has_the_bits_of_the_integer_model(cpu, guests):
    guests[cpu].call(test_guest.decode_and_compare)


@pytest.mark.parametrize(("dtype", "latents"), test_guest.FLOAT_CACHES[: 5 if WHOLE else 3])
def test_decode_over_floats(dtype, latents, guests):
    guests[A64FX].call(test_guest.decode_floats, dtype, latents)


@pytest.mark.parametrize(("cpu", "isa"), INT8)
def test_functions_of_int8_have_the_bits_of_plain_loops(cpu, isa, guests):
    for name in integers.BITS:
        wanted = integers.with_bits(name, "portable")
        found = guests[cpu].call(integers.with_bits, name, isa)
        for got, exact in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(got, exact, err_msg=name)


def attend(score_mod, mask_mod, options):
    """flex_attention on the gallery's operands: out and lse."""
    mask = numflash.create_block_mask(mask_mod, g.B, g.H, g.L, g.S, BLOCK_SIZE=32)
    return numflash.flex_attention(*g.operands(), score_mod, mask, return_lse=True, **options)


@pytest.mark.parametrize("cpu", [A64FX, N1])
def test_functions_give_what_float64_gives(cpu, guests):
    for score_mod, mask_mod in (
        (g.relative_bias, g.documents),
        (g.distance_wave, g.dilated),
        (g.t5_bias, g.nothing_for_some),
        (g.softcap, g.local_and_sinks),
    ):
        exact = g.oracle(*g.operands(), score_mod, mask_mod)
        for close, options in (floats.close, {}), (integers.close, {"precision": "int8"}):
            close(guests[cpu].call(attend, score_mod, mask_mod, options), exact)
