"""Every study module and the bench scripts that use them, on an AArch64 machine, real or emulated.

Figures of an emulator mean nothing; that the code of the notes about the A64FX (docs/sources.md)
runs there, and is right, does.
"""

import importlib.util
import platform
from pathlib import Path

import numpy as np
import pytest
from oracles import qkv

from numflash import attention, reference, validation
from numflash.cpu.study import (
    backward_plain,
    exp2_benchmark,
    improvements,
    ladder,
    reference_float32,
    register_tile,
    split_decode,
    unfused,
    unfused_times,
)
from numflash.jit import target
from numflash.numerics.quantization import quantize_problem
from numflash.validation.options import Options

pytestmark = pytest.mark.skipif(
    platform.machine() != "aarch64",
    reason="needs an AArch64 machine; make test-aarch64 emulates one",
)
F = np.float32
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


class Benchmark:
    """pytest-benchmark's fixture, which calls once and times nothing."""

    def __init__(self):
        self.extra_info, self.stats, self.group = {}, None, ""

    def pedantic(self, call, args=(), **options):
        return call(*args)


def bench(name):
    """A bench script as a module."""
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_study_module_is_here():
    """A new one needs a line in this file."""
    folder = Path(ladder.__file__).parent
    known = "backward_plain exp2_benchmark exp2_values fused half_tiles improvements ladder ladder_float ladder_int8 "
    known += "reference_float32 register_tile registers split_decode unfused unfused_times"
    assert {x.stem for x in folder.glob("*.py")} - {"__init__"} == set(known.split())


def test_the_eight_improvements():
    """The switched kernel with SVE's tiles: bits of the integer model (fp32 P.V: test_emulated_kernels).

    Without prefetching, as the bench script below has it: one kernel for both.
    """
    arrays = qkv(h=2, hkv=1, l=60, s=140, d=40)
    prepared = improvements.prepare(*arrays, False)
    if "sve" in target.available():
        assert prepared.isa == "sve"
    options = Options(enable_gqa=True, precision="int8")
    problem = quantize_problem(validation.problem(*arrays, options))
    exact = reference.integer_model(problem, first_keys=False)[0]
    np.testing.assert_array_equal(prepared.run("vectors", "int8"), exact)


def test_the_bench_script_of_the_improvements(monkeypatch):
    module = bench("bench_improvements")
    monkeypatch.setattr(module, "LENGTH", 50)
    monkeypatch.setattr(module, "HEAD_DIM", 40)
    module.bench_fused(Benchmark(), "INT8 P.V", 1, False, 1)


def test_the_fused_layer_norm():
    x = np.random.default_rng(0).standard_normal((5, 32), F)
    data, scale, y = np.empty(x.shape, np.int8), np.empty(5, F), np.empty_like(x)
    ones = np.ones(32, F)
    improvements.layer_norm(x, ones, 0 * ones, y)
    improvements.layer_norm_quantize(x, ones, 0 * ones, data, scale)
    np.testing.assert_allclose(y.mean(1), 0, atol=1e-6)
    assert np.abs(data * scale[:, None] - y).max() <= scale.max()


def test_the_exp2_benchmark():
    """One of its kernels; tests/cpu/test_study_exp2.py runs all of them, on the host."""
    combination = "fused", "fast", "register"
    bench("bench_exp2_values").bench_exp2_values(Benchmark(), combination, 4, 64)


def test_the_unfused_pipeline():
    """The product is exact.

    The table over L, and grouped heads, by their bench script's functions.
    """
    isa = unfused.best_isa()
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-127, 128, (1, 50, 20)).astype(np.int8) for _ in range(2))
    ops = unfused.operands(isa, q, k)
    s = np.zeros((ops.q.shape[1], ops.keys.start.shape[1]), np.int32)
    top = np.full(len(s), unfused.UNSEEN, np.int32)
    unfused.make_gemm(isa)(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    np.testing.assert_array_equal(s[:50, :50], q[0].astype(np.int32) @ k[0].T.astype(np.int32))
    times = unfused_times.measure(128, 32, "line177", 1)
    assert {c.pipeline for c in times.components} == {"three-pass", "two-pass", "strip"}
    assert set(unfused_times.measure_gqa(2, 1, 64, 32, 1)) >= {"product shared"}


@pytest.mark.parametrize("name", ["naive", "fused"])
def test_the_ladder(name):
    """A rung of `ladder_float` and one of `ladder_int8`."""
    q, k, v = (x[0, 0] for x in qkv(l=30, d=32))
    got = ladder.prepare(name, q, k, v)()
    exact = reference.oracle(validation.problem(q, k, v, Options()))[0][0, 0]
    assert np.abs(got - exact).sum() < 0.05 * np.abs(exact).sum()


def test_the_rest():
    """The register tile, split decoding, the plain backward and the float32 reference kernel."""
    assert exp2_benchmark.measure_clock() > 0
    isa = next(x for x in target.available() if x != "portable")
    register_tile.make_product(isa, 6, 2)
    q, k, v = qkv(l=9, d=16)
    out, lse = attention(q, k, v, return_lse=True, impl="reference")
    problem = validation.problem(q, k, v, Options())
    np.testing.assert_allclose(reference_float32.run(problem, 1), out, rtol=0, atol=1e-5)
    gradients = backward_plain.backward(out, q, k, v, out, lse, False)
    assert all(np.isfinite(x).all() for x in gradients)
    decoded = split_decode.split_decode(q[0, :, 0], k[0], v[0], 2)
    assert np.isfinite(np.asarray(decoded)).all()
