"""The ladder: float rungs against float64, integer rungs against the integer model's bits."""

import numpy as np
import pytest
from oracles import TAILS, draw, naive, qkv

from numflash.cpu.study import ladder
from numflash.errors import ArgumentError
from numflash.jit import target
from numflash.jit.threads import most
from numflash.numerics.quantization import quantize_problem
from numflash.reference import integer_model
from numflash.validation import describe
from numflash.validation.options import Options

pytestmark = pytest.mark.slow  # kernels that only the course runs

FLOATS = [rung.name for rung in ladder.LADDER if rung.precision == "float32"]
INTEGERS = [rung.name for rung in ladder.LADDER if rung.precision == "int8"]
VECTORS = [isa for isa in target.available() if isa != "portable"]


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize(("l", "s"), [*TAILS, (3, 1)])
def test_float_rungs(name, l, s):
    q, k, v = qkv(h=1, l=l, s=s, d=17, dv=5)
    exact, _ = naive(q, k, v)
    out = ladder.prepare(name, q[0, 0], k[0, 0], v[0, 0])()
    assert np.abs(out - exact[0, 0]).max() < 2e-6


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("size", [30.0, 1e-20])
def test_float_rungs_with_large_and_small_scores(name, size):
    q = draw((50, 16), 1)
    k = draw((70, 16), 2) * np.float32(size)
    v = draw((70, 16), 3)
    exact, _ = naive(*(x[None, None] for x in (q, k, v)))
    assert np.abs(ladder.prepare(name, q, k, v)() - exact[0, 0]).max() < 2e-5


def agree(name, isa, q, k, v):
    problem = quantize_problem(describe(q, k, v, Options(is_causal=name == "causal"), "int8"))
    workers = min(2, most()) if name in ("parallel", "causal") else 1
    out = ladder.prepare(name, q[0, 0], k[0, 0], v[0, 0], workers, isa)()
    np.testing.assert_array_equal(out, integer_model(problem, plain=True)[0][0, 0])


each_isa = pytest.mark.parametrize("isa", VECTORS)


@each_isa
@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize(
    ("l", "s", "d", "dv"),
    [(1, 1, 16, 16), (49, 257, 17, 5), (97, 128, 64, 70), (48, 129, 3, 64), (200, 200, 32, 32)],
)
def test_integer_rungs_give_the_bits_of_the_model(name, isa, l, s, d, dv):
    agree(name, isa, *qkv(h=1, l=l, s=s, d=d, dv=dv))


@each_isa
@pytest.mark.parametrize("name", INTEGERS)
def test_a_block_that_a_row_does_not_see_weighs_nothing(name, isa):
    """Rows 240 to 255 share a tile with rows that see keys from 256 on.

    Of their own keys one counts, 100 octaves below zero, so that hidden keys at -128 would show.
    """
    v = draw((1, 1, 512, 16))
    q = np.full((1, 1, 512, 16), 4.4, np.float32)
    k = np.where(np.arange(512) < 256, np.float32(-4.25), np.float32(4.25))[
        None, None, :, None
    ] * np.ones(16, np.float32)
    k[:, :, 0] = -3.95
    agree(name, isa, q, k, v)


@pytest.mark.skipif(not VECTORS, reason="no register tiles on this CPU")
def test_the_model_agrees_with_the_definition():
    """The bits above are those of attention.

    The causal rung against the row-by-row float64 definition.
    """
    q, k, v = qkv(h=1, l=200, s=200, d=32)
    exact, _ = naive(q, k, v, is_causal=True)
    out = ladder.prepare("causal", q[0, 0], k[0, 0], v[0, 0])()
    assert np.abs(out - exact[0, 0]).sum() / np.abs(exact).sum() < 0.03


@pytest.mark.skipif(not VECTORS, reason="no register tiles on this CPU")
def test_what_the_ladder_refuses():
    x = draw((8, 16))
    with pytest.raises(ArgumentError, match="octaves"):
        ladder.prepare("fused", 300 * x, 300 * x, x)
    with pytest.raises(ArgumentError, match="0 keys"):
        ladder.prepare("fused", x, x[:0], x[:0])
    with pytest.raises(ArgumentError, match="allowed: 'naive'"):
        ladder.prepare("fastest", x, x, x)


def test_climbing_checks_every_rung():
    climbed = list(ladder.climb(96, 16, repeats=1))
    assert [rung.name for rung, _, _ in climbed] == (list(ladder.NAMES) if VECTORS else FLOATS)
    assert all(seconds > 0 for _, seconds, _ in climbed)
