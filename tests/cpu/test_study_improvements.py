"""The switched fused kernel has the integer model's bits, whatever is on.

The fused LayerNorm those of the separate passes.
"""

import numpy as np
import pytest
from daily import of_today
from oracles import draw, qkv

from numflash import quantize, reference, validation
from numflash.cpu.study import improvements
from numflash.cpu.study.layer_norm import layer_norm, layer_norm_quantize
from numflash.cpu.study.prepared import ISAS, prepare
from numflash.errors import UnsupportedError
from numflash.jit import target
from numflash.numerics.quantization import quantize_problem
from numflash.validation.options import Options

pytestmark = pytest.mark.slow  # kernels that only the course runs

F = np.float32
# half of them by the date: each takes the compiler four seconds
KINDS = of_today(
    [(exp2, pv) for exp2 in ("plain", "vectors") for pv in ("fp32", "bf16", "int8")], 2
)


def integer_model(operands, **options):
    return reference.integer_model(
        quantize_problem(
            validation.problem(*operands, Options(enable_gqa=True, precision="int8", **options))
        ),
        plain=True,
    )[0]


@pytest.fixture(scope="module")
def cases():
    try:
        return [
            (operands, causal, prepare(*operands, causal))
            for operands, causal in (
                (qkv(h=2, hkv=1, l=130, s=300, d=64), False),
                (qkv(b=2, h=2, l=97, s=300, d=40), True),
                (qkv(h=1, l=1, s=1, d=16), False),
                (qkv(h=1, l=50, s=20, d=128, dv=80), True),
                (qkv(h=4, hkv=2, l=257, d=16, dv=1), True),
            )
        ]
    except UnsupportedError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("exp2", "pv"), KINDS)
def test_every_switch_gives_attention(cases, exp2, pv):
    for operands, causal, prepared in cases:
        if pv not in prepared.values:
            pytest.skip(f"no {pv} on this target")
        found = prepared.run(exp2, pv)
        assert np.array_equal(found, prepared.run(exp2, pv, ahead=True))
        if pv == "int8":
            assert np.array_equal(found, integer_model(operands, is_causal=causal))
        else:
            wanted = integer_model(operands, is_causal=causal, pv="fp32")
            assert np.abs(found - wanted).max() <= (2.0**-7 if pv == "bf16" else 1e-6) * max(
                1, np.abs(wanted).max()
            )


def test_layer_norm_with_the_quantiser_inside():
    for length, d in [(1, 1), (3, 7), (130, 384), (65, 64)]:
        x = draw((length, d), 0) * F(3) + F(1)
        gamma = draw(d, 1)
        beta = draw(d, 2)
        x[0] = 0
        y = np.empty_like(x)
        data = np.empty(x.shape, np.int8)
        scale = np.empty(length, F)
        layer_norm(x, gamma, beta, y)
        wide = x.astype(np.float64)
        wide = (wide - wide.mean(1, keepdims=True)) / np.sqrt(
            wide.var(1, keepdims=True) + 1e-5
        ) * gamma + beta
        assert np.abs(y - wide).max() < 1e-5
        layer_norm_quantize(x, gamma, beta, data, scale)
        wanted = quantize(y, "row")
        assert np.array_equal(data, wanted.data) and np.array_equal(scale, wanted.row_scale())


def test_the_table():
    if not any(isa in target.available() for isa in ISAS):
        pytest.skip("no register tiles")
    found = improvements.measure(length=130, head_dim=32, heads=2, repeats=1)
    assert {g.name.split(",")[0] for g in found} >= {
        "vector code for exp2",
        "prefetching",
        "threads",
        "GQA",
        "fused LayerNorm",
        "causal skipping",
        "INT8 P.V",
        "all together",
    }
    assert all(
        g.before > 0 and g.after > 0 and g.as_dict()["measured"] == g.before / g.after
        for g in found
    )


def test_the_rate_of_the_tile_alone():
    assert all(rate > 0 for rate in improvements.tile_rates(repeats=1).values())
