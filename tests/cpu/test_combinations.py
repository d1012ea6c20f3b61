"""Every option on every kernel of this machine that has code for it.

By pairs; in the slow tests a ninth of the table, another one each day, so that nine days walk the
whole. NUMFLASH_TABLE=all (`make table`) walks it at once, NUMFLASH_TABLE="3 5" repeats two parts.

INT8 is held to the bits of the integer model. The float kernels get the budget that the fuzzer's
own float64 oracle works out for every number of a result.
"""

from __future__ import annotations

import datetime
import functools
import os

import numpy as np
import pytest
from fuzz import oracle
from fuzz.compare import close
from option_table import PARTS, make, pairs, part, rows, slices

from numflash import merge, reference
from numflash.cpu import launch
from numflash.interop import widen
from numflash.jit import target
from numflash.quantization import quantize_problem

INT8 = [(isa, pv) for isa in target.available() for pv in ("int8", "fp32")]
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
# Of the whole table's 12960 rows, the integer model computes some 50 a second.
TODAY = slices(os.environ.get("NUMFLASH_TABLE"), datetime.date.today().toordinal())


@functools.lru_cache(4096)
def quantised(row, pv):
    """The row's problem on integers, and what the integer model makes of it."""
    problem = quantize_problem(make(dict(row), "int8", pv))
    return problem, *reference.integer_model(problem)


def joined(out, lse, row, heads):
    """The result with the row's sinks."""
    if not row["sinks"]:
        return out, lse
    return merge.apply_sinks(out, lse, np.linspace(-2, 3, heads, dtype=np.float32))


def int8_holds(isa, pv, table):
    for row in table:
        problem, out, lse = quantised(tuple(row.items()), pv)
        got, got_lse = joined(*launch.run(problem, isa), row, out.shape[1])
        out, lse = joined(out, lse, row, out.shape[1])
        np.testing.assert_array_equal(got_lse, lse, err_msg=repr(row))
        largest = np.abs(np.where(np.isfinite(out), out, 0)).max(initial=1)
        atol = 0 if pv == "int8" else 1e-5 * largest
        np.testing.assert_allclose(got, out, rtol=0, atol=atol, err_msg=repr(row))


@functools.lru_cache(4096)
def exact(row, precision):
    """The row's problem in floats, and what the float64 oracle makes of it."""
    problem = make(dict(row), precision)
    seen = {
        "attn_mask": problem.mask if problem.bias is None else problem.bias,
        "window": (problem.left, problem.right),
        "key_lengths": problem.key_lengths,
        "softcap": problem.softcap,
        "alibi_slopes": problem.alibi_slopes,
        "sinks": np.linspace(-2, 3, problem.shape[1]) if dict(row)["sinks"] else None,
        "alignment": "lower_right" if problem.diagonal.any() else "upper_left",
        "scale": problem.scale,
    }
    operands = (widen(x).astype(np.float64) for x in (problem.query, problem.key, problem.value))
    return problem, oracle.attention(*operands, seen, precision)


def floats_hold(precision, isa, table):
    for row in table:
        problem, want = exact(tuple(row.items()), precision)
        out, lse = joined(*launch.run(problem, isa), row, problem.shape[1])
        try:
            close("out", out, want.out, want.out_error, "float32")
            close("lse", lse, want.lse, want.lse_error, "float32")
        except Exception as error:
            raise AssertionError(f"{row}: {error}") from None


def test_the_pairs_are_all_of_them():
    missing = {(a, b) for row in rows() for a in row.items() for b in row.items()}
    for row in pairs():
        missing -= {(a, b) for a in row.items() for b in row.items()}
    assert not missing and len(pairs()) < 60


@pytest.mark.parametrize(("isa", "pv"), INT8)
def test_int8_by_pairs(isa, pv):
    int8_holds(isa, pv, pairs())


@pytest.mark.parametrize(("precision", "isa"), FLOATS)
def test_floats_by_pairs(precision, isa):
    floats_hold(precision, isa, pairs())


def test_the_parts_are_the_whole_table():
    assert sorted(map(repr, (row for n in range(PARTS) for row in part(n)))) == sorted(
        map(repr, rows())
    )
    assert {day for d in range(PARTS) for day in slices(None, 7 + d)} == set(range(PARTS))
    assert slices("all", 3) == list(range(PARTS)) and slices("2 4", 3) == [2, 4]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", TODAY)
@pytest.mark.parametrize("pv", ["int8", "fp32"])
def test_int8_in_the_whole_table(pv, number):
    for isa in target.available():
        int8_holds(isa, pv, part(number))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", TODAY)
@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16"])
def test_floats_in_the_whole_table(precision, number):
    for isa in [isa for name, isa in FLOATS if name == precision]:
        floats_hold(precision, isa, part(number))
