"""INT8 scores with float values (pv="fp32" and "bf16").

The weights of the integer model, sums in each kernel's own order.
"""

import numba
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
    ("isa", "pv"),
    [
        pytest.param(isa, pv, marks=[] if isa in first else pytest.mark.slow)
        for pv, first in (("fp32", ISAS[:1]), ("bf16", ()))
        for isa in ISAS
    ],
)
def test_float_values_are_those_of_the_integer_model(isa, pv):
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
                Options(precision="int8", pv=pv, return_lse=True, **given),
            )
            p = quantize_problem(p)
            out, lse = launch.run(p, isa)
            exact, exact_lse = reference.integer_model(p)
            np.testing.assert_allclose(out, exact, rtol=1e-5, atol=1e-5)
            np.testing.assert_array_equal(lse, exact_lse)


@pytest.mark.parametrize(
    ("isa", "pv"),
    [
        (ISAS[0], "fp32"),
        pytest.param(ISAS[0], "bf16", marks=pytest.mark.slow),
        pytest.param("portable", "fp32", marks=pytest.mark.slow),
    ],
)
def test_sums_of_huge_values_do_not_overflow(isa, pv):
    """Three channels: near float32's largest number, around the limit of the units, ordinary; the
    last token is not finite, and the last but one row and those before it do not see it.
    """
    q, k, v = qkv(l=33, s=130, d=16, dv=33)
    v[..., ::3] = np.abs(v[..., ::3]) * np.float32(5e37)
    v[..., 1::3] *= np.float32(2.0**95)
    v[..., -1, :2] = np.nan, np.inf
    band = {"is_causal": True, "alignment": "lower_right"}
    p = problem(q, k, v, Options(precision="int8", pv=pv, return_lse=True, **band))
    out, lse = launch.run(quantize_problem(p), isa)
    exact, exact_lse = reference.integer_model(quantize_problem(p))
    want, _ = reference.oracle(p)
    np.testing.assert_array_equal(lse, exact_lse)
    assert np.isnan(out[..., -1, :]).all() and np.isfinite(out[..., :-1, :]).all()
    size = np.abs(want[..., :-1, :]).max(-2, keepdims=True)
    np.testing.assert_allclose(out[..., :-1, :] / size, exact[..., :-1, :] / size, atol=1e-5)
    np.testing.assert_allclose(exact[..., :-1, :] / size, want[..., :-1, :] / size, atol=0.05)


def naive(p):
    """float64 attention of quantised query and key, and the mean of |values|."""
    (q, k), v = (x.data * np.float64(x.row_scale())[..., None] for x in (p.query, p.key)), p.value
    s = np.einsum("bhld,bhsd->bhls", q, k) * p.scale
    w = np.exp(s - s.max(-1, keepdims=True))
    w /= w.sum(-1, keepdims=True)
    return w @ v, w @ np.abs(v)


@pytest.mark.slow
def test_bfloat16_weights_and_values_are_near_the_exact_ones():
    """By themselves, not by way of the model.

    Scores lose 2**-9 octaves, exp2 0.27 %, weights and values 2**-8 and 2**-9. One row sees one key
    that is 20 octaves above all others.
    """
    q, k, v = qkv(l=33, s=300, d=64, dv=48)
    k[..., 7, :] = 3.5 * q[..., 5, :]
    p = quantize_problem(problem(q, k, v, Options(precision="int8", pv="bf16")))
    out, _ = launch.run(p, ISAS[0])
    exact, size = naive(p)
    assert (np.abs(out - exact) <= 2 * (0.0014 + 0.0027 + 2.0**-8 + 2.0**-9) * size).all()
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        assert np.array_equal(out, launch.run(p, ISAS[0])[0])
    finally:
        numba.set_num_threads(before)


@pytest.mark.parametrize("isa", VECTOR_ISAS)
@pytest.mark.parametrize("pv", ["int8", "int16", "bf16", "fp32"])
def test_query_tiles_are_whole_parts(isa, pv):
    rows = query_rows(isa, pv)
    assert rows > 0 and rows % value_rows(isa, pv) == 0
