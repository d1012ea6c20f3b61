"""The unfused INT8 pipeline of study.

Scores and weights for equality with integers in NumPy, probabilities against float64.
"""

import numpy as np
import pytest

from numflash.cpu.study import unfused, unfused_times
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target
from numflash.numerics import fixedpoint as fx

ISAS = [isa for isa in target.available() if isa in unfused.ISAS]
SHAPES = [(1, 1, 1), (5, 127, 3), (7, 128, 64), (50, 129, 4), (97, 200, 40)]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ISAS, reason="the target has no register tiles"),
]
each_isa = pytest.mark.parametrize("isa", ISAS)


def draw(length, keys, d, heads=1, kv_heads=1):
    rng = np.random.default_rng(length * keys)
    return rng.integers(-128, 128, (heads, length, d)).astype(np.int8), rng.integers(
        -128, 128, (kv_heads, keys, d)
    ).astype(np.int8)


def scores(q, k):
    return q.astype(np.int64) @ k.astype(np.int64).swapaxes(-1, -2)


def weights(s, scale, name):
    """The integer softmax in NumPy: Q16.16 weights, their sums, and float32 probabilities."""
    t = np.rint(s.astype(np.float32) * np.float32(scale)).astype(np.int64)
    e = fx.EXP2[name][0](np.minimum(t.max(1, keepdims=True) - t, 65535).astype(np.uint32)).astype(
        np.int64
    )
    l = e.sum(1)
    return e, l, e.astype(np.float32) * (np.float32(1) / l.astype(np.float32))[:, None]


def empty(ops):
    shape = ops.q.shape[1], ops.keys.start.shape[1]
    return np.zeros(shape, np.int32), np.full(shape[0], unfused.UNSEEN, np.int32)


@each_isa
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("buffers", [0, 1, 2])
def test_gemm_is_exact(isa, shape, buffers):
    q, k = draw(*shape)
    ops = unfused.operands(isa, q, k)
    s, top = empty(ops)
    unfused.make_gemm(isa, buffers)(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    np.testing.assert_array_equal(s[: shape[0], : shape[1]], scores(q[0], k[0]))


@each_isa
@pytest.mark.parametrize(("a", "b"), [(-128, -128), (-128, 127), (127, 127)])
def test_the_largest_products(isa, a, b):
    q = np.full((1, 6, 128), a, np.int8)
    k = np.full((1, 128, 128), b, np.int8)
    ops = unfused.operands(isa, q, k)
    s, top = empty(ops)
    unfused.make_gemm(isa)(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    assert (s == 128 * a * b).all()


@pytest.mark.parametrize("shape", [(50, 128, 64), (97, 256, 40)], ids=str)
def test_maxima_from_the_product(shape):
    q, k = draw(*shape)
    ops = unfused.operands(ISAS[0], q, k)
    s, top = empty(ops)
    unfused.make_gemm(ISAS[0], 0, True)(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    np.testing.assert_array_equal(top[: shape[0]], scores(q[0], k[0]).max(1))
    later = np.empty_like(top)
    unfused.maxima(s, shape[1], later)
    np.testing.assert_array_equal(top, later)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", [n for n in fx.EXP2 if n != "exact"])
def test_three_passes_and_strip(shape, name):
    """By passes over all of S and by strips of it: the same bits as NumPy."""
    q, k = draw(*shape)
    ops = unfused.operands(ISAS[0], q, k)
    scale = np.float32(0.02)
    rows = slice(shape[0])
    keys = slice(shape[1])
    s, top = empty(ops)
    e = np.zeros_like(s)
    p = np.zeros(s.shape, np.float32)
    l = np.zeros(len(s), np.int64)
    unfused.make_gemm(ISAS[0])(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    unfused.maxima(s, shape[1], top)
    unfused.make_exponentials(name)(s, shape[1], scale, top, e, l)
    unfused.normalise(e, shape[1], l, p)
    for got, want in zip(
        (e[rows, keys], l[rows], p[rows, keys]),
        weights(scores(q[0], k[0]), scale, name),
        strict=True,
    ):
        np.testing.assert_array_equal(got, want)
    strip = np.zeros_like(p)
    unfused.make_strip(ISAS[0], name)(
        ops.q[0], ops.keys.data[0], ops.keys.start[0], shape[1], scale, strip
    )
    np.testing.assert_array_equal(strip[rows, keys], p[rows, keys])


@pytest.mark.parametrize(
    ("name", "worst"), [("cubic", 0.003), ("quadratic", 0.006), ("line177", 0.16)]
)
def test_probabilities_against_float64(name, worst):
    """Relative error of the likely keys.

    Half a step of Q8.8 on either side of the fraction, and what exp2 adds.
    """
    q, k = draw(30, 300, 64)
    # scores of spread 1
    ops = unfused.operands(ISAS[0], q, k)
    scale = 256 * np.log2(np.e) / (74 * 74 * 8)
    p = np.zeros((30, ops.keys.start.shape[1]), np.float32)
    unfused.make_strip(ISAS[0], name)(
        ops.q[0], ops.keys.data[0], ops.keys.start[0], 300, np.float32(scale), p
    )
    x = scores(q[0], k[0]) * (scale / 256)
    exact = np.exp2(x - x.max(1, keepdims=True))
    exact /= exact.sum(1, keepdims=True)
    likely = exact > exact.max(1, keepdims=True) / 16
    assert 0.2 * worst < np.abs(p[:, :300] / exact - 1)[likely].max() <= worst


def test_row_sums_of_many_equal_keys():
    """65 536 equal keys overflow 32 bits."""
    s = np.zeros((1, 70000), np.int32)
    e = np.zeros_like(s)
    l = np.zeros(1, np.int64)
    unfused.make_exponentials("quadratic")(s, 70000, np.float32(1), np.zeros(1, np.int32), e, l)
    assert l[0] == 70000 * 65536


@each_isa
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (3, 1), (2, 2)])
def test_gqa(isa, heads, kv_heads):
    q, k = draw(19, 130, 20, heads, kv_heads)
    ops = unfused.operands(isa, q, k)
    s = np.zeros((heads, ops.q.shape[1], ops.keys.start.shape[1]), np.int32)
    unfused.make_gqa(isa)(ops.q, ops.keys.data, ops.keys.start, s)
    np.testing.assert_array_equal(s[:, :19, :130], scores(q, np.repeat(k, heads // kv_heads, 0)))


def test_the_table():
    times = unfused_times.measure(256, 64, repeats=1)
    for pipeline in ("three-pass", "two-pass", "strip"):
        assert sum(c.share for c in times.components if c.pipeline == pipeline) == pytest.approx(1)
    product = next(c for c in times.components if c.part == "product")
    assert times.softmax == pytest.approx(1 - product.share)
    assert times.gemm == pytest.approx(2 * 256**2 * 64 / product.seconds)
    assert set(unfused_times.measure_gqa(2, 1, 64, 64, 1)) == {
        f"{part} {name}" for part in ("packing", "product") for name in ("shared", "repeated")
    }


@pytest.mark.parametrize(
    ("q", "k", "message"),
    [
        ((1, 4, 8), (1, 4, 9), r"k: got \(1, 4, 9\) for q"),
        ((3, 4, 8), (2, 4, 8), "divisor of 3 heads"),
        ((1, 0, 8), (1, 4, 8), r"q: got int8 \(1, 0, 8\)"),
        ((4, 8), (1, 4, 8), "q: got int8"),
    ],
)
def test_bad_operands(q, k, message):
    with pytest.raises(ArgumentError, match=message):
        unfused.operands(ISAS[0], np.zeros(q, np.int8), np.zeros(k, np.int8))
    with pytest.raises(ArgumentError, match="q: got float32"):
        unfused.operands(ISAS[0], np.zeros((1, 4, 8), np.float32), np.zeros((1, 4, 8), np.int8))


@pytest.mark.parametrize("isa", [isa for isa in target.available() if isa not in unfused.ISAS])
def test_no_register_tiles(isa):
    assert unfused.best_isa() == ISAS[0]
    with pytest.raises(
        UnsupportedError, match=f"'{isa}' has no register tiles of 6 rows; allowed: 'avx512_vnni'"
    ):
        unfused.operands(isa, *draw(4, 4, 4))
