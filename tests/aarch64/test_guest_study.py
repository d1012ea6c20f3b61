"""Every study module and the bench scripts that use them, on an AArch64 machine, real or emulated.

Figures of an emulator mean nothing; that the code of the notes about the A64FX (docs/sources.md)
runs there, and is right, does.
"""

import importlib.util
import platform
from pathlib import Path

import numba
import numpy as np
import pytest
from oracles import qkv

from numflash import attention, reference, validation
from numflash.cpu.isa.isas import running_lanes
from numflash.cpu.study import (
    backward_plain,
    exp2_benchmark,
    half_tiles,
    ladder,
    reference_float32,
    register_tile,
    split_decode,
    unfused,
    unfused_times,
)
from numflash.cpu.study.layer_norm import layer_norm, layer_norm_quantize
from numflash.cpu.study.prepared import prepare
from numflash.jit import target
from numflash.measure.contenders import Case, contenders
from numflash.measure.roofline import Roof
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
    known = "backward_plain exp2_benchmark exp2_values fused half_tiles improvements ladder ladder_float ladder_int8 layer_norm "
    known += "prepared reference_float32 register_tile registers split_decode unfused unfused_times"
    assert {x.stem for x in folder.glob("*.py")} - {"__init__"} == set(known.split())


def test_the_eight_improvements():
    """The switched kernel with SVE's tiles: bits of the integer model (fp32 P.V: test_emulated_kernels).

    Without prefetching, as the bench script below has it: one kernel for both.
    """
    arrays = qkv(h=2, hkv=1, l=60, s=140, d=40)
    prepared = prepare(*arrays, False)
    if "sve" in target.available():
        assert prepared.isa == "sve"
    options = Options(enable_gqa=True, precision="int8")
    problem = quantize_problem(validation.problem(*arrays, options))
    exact = reference.integer_model(problem, plain=True)[0]
    np.testing.assert_array_equal(prepared.run("vectors", "int8"), exact)


def run_attention(module):
    """The INT8 kernel as a contender, and its parts."""
    module.roof = lambda: Roof("sve", 1, 1.0, 1.0, 1.0, 1.0)
    ours = next(c for c in contenders() if "int8" in c.name)
    module.bench_attention(Benchmark(), ours, Case(40, 32, True))
    module.bench_parts(Benchmark(), 128, 64)


def run_backward(module):
    module.CASES = {"tiny": (1, 20, 16, True)}
    module.bench_forward_and_backward(Benchmark(), "tiny", module.tiled)


def run_decode(module):
    module.bench_decode(Benchmark(), (2, 1, 40, 32), "int8", 1)


def run_exp2_values(module):
    """One of its kernels; tests/cpu/test_study_exp2.py runs all of them, on the host."""
    module.bench_exp2_values(Benchmark(), ("fused", "fast", "register"), 4, 64)


def run_float(module):
    module.CASES = {"tiny": (1, 70, 16, False)}
    module.bench_float(Benchmark(), "float32", "tiny", module.ours)
    with pytest.raises(pytest.skip.Exception, match="could not import 'torch'"):
        module.bench_float(Benchmark(), "float32", "tiny", module.pytorch)


def run_improvements(module):
    module.LENGTH, module.HEAD_DIM = 50, 40
    module.bench_fused(Benchmark(), "INT8 P.V", 1, False, 1)


def run_short(module):
    module.bench_short(lambda call: call(), (1, 1, 16, 64), "int8, compiled")
    with pytest.raises(pytest.skip.Exception, match="no such way"):
        module.bench_short(Benchmark(), (1, 1, 16, 64), "PyTorch")


def run_unfused(module):
    """The table over L, and grouped heads, as far as the emulator gets: each part once."""
    module.D = 32
    module.unfused_times = Once(unfused_times)
    module.bench_unfused(Benchmark(), 128, "line177")
    module.bench_gqa(Benchmark())


class Once:
    """`unfused_times` with one round, of a small shape."""

    def __init__(self, module):
        self.module = module

    def measure(self, length, d, exp2):
        times = self.module.measure(length, d, exp2, 1)
        assert {c.pipeline for c in times.components} == {"three-pass", "two-pass", "strip"}
        return times

    def measure_gqa(self):
        times = self.module.measure_gqa(2, 1, 64, 32, 1)
        assert set(times) >= {"product shared"}
        return times


SCRIPTS = {f.__name__.removeprefix("run_"): f for f in (
    run_attention, run_backward, run_decode, run_exp2_values, run_float, run_improvements,
    run_short, run_unfused,
)}  # fmt: skip


def test_every_bench_script_is_here():
    """The one left needs PyTorch, for which there is no emulated machine, and says so."""
    known = {x.stem.removeprefix("bench_") for x in BENCHMARKS.glob("bench_*.py")}
    assert known == {*SCRIPTS, "torch"}
    with pytest.raises(pytest.skip.Exception, match=r"pip install 'numflash\[torch\]'"):
        bench("bench_torch")


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_bench_script(name):
    SCRIPTS[name](bench(f"bench_{name}"))


def test_the_fused_layer_norm():
    x = np.random.default_rng(0).standard_normal((5, 32), F)
    data, scale, y = np.empty(x.shape, np.int8), np.empty(5, F), np.empty_like(x)
    ones = np.ones(32, F)
    layer_norm(x, ones, 0 * ones, y)
    layer_norm_quantize(x, ones, 0 * ones, data, scale)
    np.testing.assert_allclose(y.mean(1), 0, atol=1e-6)
    assert np.abs(data * scale[:, None] - y).max() <= scale.max()


def test_the_unfused_pipeline():
    """The product is exact."""
    isa = unfused.best_isa()
    rng = np.random.default_rng(0)
    q, k = (rng.integers(-127, 128, (1, 50, 20)).astype(np.int8) for _ in range(2))
    ops = unfused.operands(isa, q, k)
    s = np.zeros((ops.q.shape[1], ops.keys.start.shape[1]), np.int32)
    top = np.full(len(s), unfused.UNSEEN, np.int32)
    unfused.make_gemm(isa)(ops.q[0], ops.keys.data[0], ops.keys.start[0], s, top)
    np.testing.assert_array_equal(s[:50, :50], q[0].astype(np.int32) @ k[0].T.astype(np.int32))


def test_values_in_halves():
    """One tile of FP16 sums, where the machine has scalable vectors."""
    if "sve" not in target.available():
        pytest.skip("half_tiles is SVE's")
    tile, lanes = half_tiles.make_value_tile(), running_lanes("sve")

    @numba.njit(error_model="numpy")
    def values(p, v, o):
        tile(p, 0, p.shape[1], v, 0, v.shape[1], p.shape[1], o, 0, o.shape[1])

    rng = np.random.default_rng(0)
    p, v = rng.random((6, 64), F), rng.standard_normal((64, 8 * lanes), F)
    o = np.ones((6, 8 * lanes), F)
    values(p.astype(np.float16).view(np.uint16), half_tiles.pack(v, lanes), o)
    wanted = p.astype(np.float64) @ v.astype(np.float64)
    error = np.abs(o - 1 - wanted).sum() / np.abs(wanted).sum()
    assert error <= 1.5 * half_tiles.relative_error(p, v) < 4e-3


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
