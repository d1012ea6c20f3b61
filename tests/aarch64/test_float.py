"""The float32 kernel that ships becomes code for every AArch64 CPU.

An operation of another machine would end the process.
"""

import functools

import numpy as np
import pytest
from daily import of_today
from numba import njit

import numflash
from numflash.cpu.floats import flash_float, float_rows, float_tiles
from numflash.jit import target
from numflash.machinecode import assembly, codegen

CPUS = [name for name, triple in codegen.TRIPLES.items() if triple == codegen.AARCH64]


@functools.cache
def code_for(isa, cpu):
    """The fused float32 kernel of an instruction set as code of a CPU."""
    x = np.ones((1, 1, 2, 3), np.float32)
    numflash.attention(x, x, x)  # the types of its arguments, as this machine's kernel met them
    here = flash_float.make_attend(target.available(target.FLOAT_ISAS)[0], "float32")
    return codegen.compile_for(
        flash_float.make_attend(isa, "float32"), here.signatures[0], codegen.Target.named(cpu)
    )


MACHINES = [
    ("sve512", "a64fx"),
    ("sve256", "neoverse-v1"),
    *(("neon", cpu) for cpu in CPUS if cpu not in ("a64fx", "neoverse-v1")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("isa", "cpu"), of_today(MACHINES, 2))
def test_the_float_kernel_compiles_to_fused_multiply_adds(isa, cpu):
    """With SVE, 24 scalable FMLA a turn, and none of NEON in any loop of the kernel."""
    code = code_for(isa, cpu)
    # of the kernel itself: score functions are called by address and have loops of their own
    loops = [x for x in assembly.loops(code.assembly) if "flash_float" in x.function]
    multiply = "fmla z.s" if isa.startswith("sve") else "fmla v.4s"
    counts = [assembly.histogram(x.instructions) for x in loops]
    products = [x.get(multiply, 0) for x in counts]
    most, _, hot = max(
        (n, x.depth, x.instructions) for n, x in zip(products, loops, strict=True)
    )  # the innermost
    assert most >= 24
    if isa.startswith("sve"):
        assert not any("fmla v.4s" in x for x in counts)
    for unwanted in ("is_float64", "is_call", "is_integer_division", "is_lanes64", "is_stack"):
        assert not any(map(getattr(assembly, unwanted), hot)), unwanted


F = np.float32
ARRAY = "float32[::1]"
KEYS = 40


def draw(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(
    ("isa", "bits"), [("sve512", 512), ("sve256", 256), ("sve", 512), ("sve", 256), ("sve", 128)]
)
def test_scalable_tiles_give_the_products(isa, bits):
    """6 rows times 4 vectors, executed; P.V also with the length read by the code ("sve")."""
    pytest.importorskip("unicorn")
    from numflash.machinecode.emulator import Emulated

    width = bits // 8  # four vectors of float32
    a, b = draw(6, KEYS), draw(KEYS, width, seed=1)
    value = float_tiles.value_tile(isa, 4)

    @njit
    def values(p, v, o):
        value(p, 0, KEYS, v, 0, width, KEYS, o, 0, width)

    o = draw(6, width, seed=2)
    wanted = o + a.astype(np.float64) @ b
    run = Emulated(values, f"void({ARRAY}, {ARRAY}, {ARRAY})", "a64fx", vector_bits=bits)
    run(a.reshape(-1), b.reshape(-1), o.reshape(-1))
    np.testing.assert_allclose(o, wanted, rtol=0, atol=2e-5)
    assert assembly.histogram(run.code.assembly.splitlines()).get("fmla v.4s", 0) == 0
    if isa == "sve":
        return
    score = float_tiles.score_tile(isa, 4)

    @njit
    def scores(q, k, x):
        score(q, 0, KEYS, k, 0, KEYS, x, 0, width)

    x = np.zeros((6, width), np.float32)
    run = Emulated(scores, f"void({ARRAY}, {ARRAY}, {ARRAY})", "a64fx", vector_bits=bits)
    run(a.reshape(-1), b.reshape(-1), x.reshape(-1))
    np.testing.assert_allclose(x, a.astype(np.float64) @ b, rtol=0, atol=2e-5)


@pytest.mark.parametrize(("isa", "bits"), [("sve512", 512), ("sve256", 256)])
def test_scalable_rows(isa, bits):
    """Softmax, masks, biases, slopes and soft caps of one row, executed: NaN and -inf included."""
    pytest.importorskip("unicorn")
    from numflash.machinecode.emulator import Emulated

    lanes, count = bits // 32, 3
    n = lanes * count
    weights, top, exceeds = (
        make(isa) for make in (float_rows.row_weights, float_rows.row_max, float_rows.row_exceeds)
    )
    cap, slopes, bias, mask, some = (
        make(isa)
        for make in (
            float_rows.row_softcap,
            float_rows.row_alibi,
            float_rows.row_bias,
            float_rows.row_mask,
            float_rows.any_byte,
        )
    )

    @njit
    def rows(x, seen, p, l, capped, sloped, biased, masked, found):
        found[0] = top(x, 0, count)
        found[1] = exceeds(x, 0, count, F(2), F(100))
        found[2] = exceeds(x, 0, count, F(2), F(1))
        found[3] = some(seen, 0, count)
        weights(x, 0, count, F(2), F(3), p, 0, l, 0)
        cap(capped, 0, count, F(1.5))
        slopes(sloped, 0, count, F(0.25), 7)
        bias(biased, 0, count, x, 0)
        mask(masked, 0, count, seen, 0)

    x = draw(n)
    x[3] = -np.inf
    seen = (draw(n, seed=1) > 0).astype(np.uint8)
    p, l, found = np.zeros(n, np.float32), np.zeros(lanes, np.float32), np.zeros(4, np.float32)
    capped, sloped, biased, masked = (draw(n, seed=s) for s in (2, 3, 4, 5))
    capped[0], masked[int(np.flatnonzero(seen)[0])] = 1e-6, np.nan
    before = [y.astype(np.float64) for y in (capped, sloped, biased, masked)]
    run = Emulated(
        rows,
        f"void({ARRAY}, uint8[::1], {', '.join([ARRAY] * 7)})",
        "a64fx",
        vector_bits=bits,
    )
    run(x, seen, p, l, capped, sloped, biased, masked, found)
    assert list(found) == [x.max(), 0, 1, 1]
    exact = np.exp2(2 * x.astype(np.float64) - 3)
    np.testing.assert_allclose(p, exact, rtol=5e-7)
    np.testing.assert_allclose(l, exact.reshape(count, lanes).sum(0), rtol=1e-6)
    np.testing.assert_allclose(capped, 1.5 * np.tanh(before[0] / 1.5), rtol=1e-6, atol=0)
    np.testing.assert_allclose(sloped, before[1] - 0.25 * abs(7 - np.arange(n)), atol=1e-6)
    np.testing.assert_allclose(biased, before[2] + x * np.log2(np.e), rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(masked, np.where(seen, before[3], -np.inf).astype(np.float32))
    p[:], seen[:] = 0, 0
    x[:], x[5] = -3e38, np.nan
    run(x, seen, p, l, capped, sloped, biased, masked, found)
    assert np.isnan(p[5]) and np.isnan(l).sum() == 1 and not np.delete(p, 5).any()
    assert found[3] == 0
