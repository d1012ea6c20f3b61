"""Every option on every kernel of this machine that has code for it.

The default tests run all pairs of settings: on the best instruction set and in plain loops, the latter
with pv="int16" too. The slow tests run them on the instruction sets between (for INT8 on half of them, by
the date), with the other `pv`, by the date too, and every seventh row of the whole table, by the date, in
which any three settings meet; TABLE=whole runs all.
Each row is computed without and with attention sinks.

INT8 is held to the bits of the integer model. The float kernels get the budget that the fuzzer's
own float64 oracle works out for every number of a result.
"""

from __future__ import annotations

import functools
import itertools

import numba
import numpy as np
import pytest
from daily import isas_of_today, of_today
from fuzz import oracle
from fuzz.compare import close
from option_table import LEVELS, make, pairs, rows

from numflash import reference
from numflash.cpu import launch
from numflash.interop.arrays import widen
from numflash.jit import target
from numflash.numerics import merge
from numflash.numerics.fixedpoint import FLOAT_VALUES
from numflash.numerics.quantization import quantize_problem

PARTS = 7  # of the whole table, which a day has one of
BEST, PLAIN = target.available()[0], target.available()[-1]
INT8 = [(isa, "int8") for isa in isas_of_today(target.available())]
OTHERS = [(BEST, "int16"), (BEST, "fp32"), (PLAIN, "fp32"), (BEST, "bf16")]
FLOATS = [
    (precision, isa)
    for precision, isas in (
        ("float32", target.FLOAT_ISAS),
        ("float16", target.FLOAT_ISAS),
        ("bfloat16", target.BFLOAT16_ISAS),
    )
    for isa in target.available(isas)
    if precision == "float32" or isa not in target.FLOAT_ISAS or isa == target.available(isas)[0]
]
OFTEN = {
    *((BEST, "int8"), (PLAIN, "int8"), (PLAIN, "int16")),
    *(("float32", isa) for isa in (target.available(target.FLOAT_ISAS)[0], "portable")),
    ("float16", target.available(target.FLOAT_ISAS)[0]),
    ("bfloat16", target.available(target.BFLOAT16_ISAS)[0]),
}


def rest_slow(cases):
    """Those of `OFTEN` by default."""
    return [pytest.param(*x, marks=() if x in OFTEN else pytest.mark.slow) for x in cases]


@pytest.fixture
def one_thread():
    """A problem of the table is too small for a second thread to pay."""
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)


def sinks(heads):
    """One score for each head, of an extra key of value 0."""
    return np.linspace(-2, 3, heads, dtype=np.float32)


def joined(out, lse, extra):
    """Copies of both with a sink for each head."""
    both = out.copy(), lse.copy()
    merge.apply_sinks(*both, extra)
    return both


@functools.lru_cache(64)
def quantised(row, pv):
    """The row's problem on integers, and what the integer model makes of it."""
    problem = quantize_problem(make(dict(row), "int8", pv))
    return problem, *reference.integer_model(problem)


def int8_holds(isa, pv, row, run=launch.run):
    """`run(problem, isa)` -> (out, lse), here or on another machine."""
    problem, *want = quantised(tuple(row.items()), pv)
    got = run(problem, isa)
    extra = sinks(problem.shape[1])
    for (out, lse), (got_out, got_lse) in (
        (want, got),
        (joined(*want, extra), joined(*got, extra)),
    ):
        np.testing.assert_array_equal(got_lse, lse, err_msg=repr(row))
        largest = np.abs(np.where(np.isfinite(out), out, 0)).max(initial=1)
        atol = 1e-5 * largest if pv in FLOAT_VALUES else 0
        np.testing.assert_allclose(got_out, out, rtol=0, atol=atol, err_msg=repr(row))


@functools.lru_cache(64)
def exact(row, precision):
    """The row's problem in floats; out, lse and their errors of the float64 oracle, without and
    with sinks.
    """
    problem = make(dict(row), precision)
    seen = {
        "attn_mask": problem.mask if problem.bias is None else problem.bias,
        "window": (problem.left, problem.right),
        "key_lengths": problem.key_lengths,
        "softcap": problem.softcap,
        "alibi_slopes": problem.alibi_slopes,
        "alignment": "lower_right" if problem.diagonal.any() else "upper_left",
        "scale": problem.scale,
    }
    operands = [widen(x).astype(np.float64) for x in (problem.query, problem.key, problem.value)]
    found = oracle.attention(*operands, seen, precision)
    want = found.out, found.lse, found.out_error, found.lse_error
    with np.errstate(all="ignore"):
        with_sinks = oracle.with_sinks(*want, sinks(problem.shape[1]).astype(np.float64))
    return problem, (want, with_sinks)


def floats_hold(precision, isa, row, run=launch.run):
    problem, wanted = exact(tuple(row.items()), precision)
    got = run(problem, isa)
    with_sinks = joined(*got, sinks(problem.shape[1]))
    for want, (out, lse) in zip(wanted, (got, with_sinks), strict=True):
        try:
            close("out", out, want[0], want[2], "float32")
            close("lse", lse, want[1], want[3], "float32")
        except Exception as error:
            raise AssertionError(f"{row}: {error}") from None


def test_the_pairs_are_all_of_them():
    missing = {(a, b) for row in rows() for a in row.items() for b in row.items()}
    for row in pairs():
        missing -= {(a, b) for a in row.items() for b in row.items()}
    assert not missing and len(pairs()) < 60


def test_any_three_settings_meet_every_day():
    every = {
        (*zip(names, values, strict=True),)
        for names in itertools.combinations(LEVELS, 3)
        for values in itertools.product(*(LEVELS[name] for name in names))
    }
    for day in range(PARTS):
        part = rows()[day::PARTS]
        assert every == {x for row in part for x in itertools.combinations(row.items(), 3)}


@pytest.mark.parametrize(
    ("isa", "pv"), rest_slow(dict.fromkeys([*INT8, (PLAIN, "int16"), *of_today(OTHERS, 4)]))
)
def test_int8_by_pairs(isa, pv):
    for row in pairs():
        int8_holds(isa, pv, row)


@pytest.mark.parametrize(("precision", "isa"), rest_slow(FLOATS))
def test_floats_by_pairs(precision, isa):
    for row in pairs():
        floats_hold(precision, isa, row)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pv", ["int8", "int16", "bf16", "fp32"])
def test_int8_in_the_whole_table(pv, one_thread):
    isas = target.available() if pv == "int8" else isas_of_today(target.available())
    for row in of_today(rows(), PARTS):
        for isa in isas:
            int8_holds(isa, pv, row)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_floats_in_the_whole_table(precision, one_thread):
    for row in of_today(rows(), PARTS):
        for isa in [isa for name, isa in FLOATS if name == precision]:
            floats_hold(precision, isa, row)
