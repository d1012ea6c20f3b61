"""INT8 scores with float values (pv="fp32").

The weights of the integer model, sums in each kernel's own order.
"""

import numpy as np
import pytest
from oracles import draw, qkv

from numflash import reference
from numflash.cpu import launch
from numflash.cpu.int8.blocks import value_rows
from numflash.cpu.int8.flash_int8 import query_rows
from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.jit import target
from numflash.numerics.quantization import quantize_problem
from numflash.validation import problem
from numflash.validation.options import Options

ISAS = target.available()
# queries around the heights of register tiles (6, 32) and query tiles (24, 48, 96), keys that are
# cut off in a block
SHAPES = [
    (70, 70, 64, None),
    (96, 96, 16, None),
    (33, 130, 16, 33),
    (7, 65, 5, 1),
    (100, 40, 16, 24),
]
OPTIONS = {
    "full": {},
    "causal": {"is_causal": True},
    "window": {"window": (9, 4)},
    "mask": {"attn_mask": draw((1, 1, 1, 40), 5) > 0, "only": 40},
    "lengths": {"key_lengths": [37], "alignment": "lower_right", "is_causal": True},
}


@pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=[] if isa in (ISAS[0], "portable") else pytest.mark.slow)
        for isa in ISAS
    ],
)
def test_float_values_are_those_of_the_integer_model(isa):
    """A part of a block that is no multiple of the tile's rows counts rows twice, and writes beyond
    the last one.
    """
    for l, s, d, dv in SHAPES:
        for options in OPTIONS.values():
            given = dict(options)
            if given.pop("only", s) != s:
                continue
            p = problem(
                *qkv(l=l, s=s, d=d, dv=dv),
                Options(precision="int8", pv="fp32", return_lse=True, **given),
            )
            p = quantize_problem(p)
            out, lse = launch.run(p, isa)
            exact, exact_lse = reference.integer_model(p)
            np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(lse, exact_lse)


@pytest.mark.parametrize("isa", [ISAS[0], "portable"])
def test_sums_of_huge_values_do_not_overflow(isa):
    """Three channels: near float32's largest number, around the limit of the units, ordinary; the
    last token is not finite, and the last but one row and those before it do not see it.
    """
    q, k, v = qkv(l=33, s=130, d=16, dv=33)
    v[..., ::3] = np.abs(v[..., ::3]) * np.float32(5e37)
    v[..., 1::3] *= np.float32(2.0**95)
    v[..., -1, :2] = np.nan, np.inf
    band = {"is_causal": True, "alignment": "lower_right"}
    p = problem(q, k, v, Options(precision="int8", pv="fp32", return_lse=True, **band))
    out, lse = launch.run(quantize_problem(p), isa)
    exact, exact_lse = reference.integer_model(quantize_problem(p))
    want, _ = reference.oracle(p)
    np.testing.assert_array_equal(lse, exact_lse)
    assert np.isnan(out[..., -1, :]).all() and np.isfinite(out[..., :-1, :]).all()
    size = np.abs(want[..., :-1, :]).max(-2, keepdims=True)
    np.testing.assert_allclose(out[..., :-1, :] / size, exact[..., :-1, :] / size, atol=1e-5)
    np.testing.assert_allclose(exact[..., :-1, :] / size, want[..., :-1, :] / size, atol=0.05)


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("pv", ["int8", "fp32"])
def test_query_tiles_are_whole_parts(isa, pv):
    rows = query_rows(isa, pv)
    assert rows > 0 and rows % value_rows(isa, pv) == 0
