"""On an AArch64 machine, real or emulated (`make test-aarch64`).

What it is taken for, and the bits of INT8 attention on it.
"""

import os
import platform

import numba
import numpy as np
import pytest
from oracles import draw, naive, qkv

import numflash
from numflash import reference, validation
from numflash.cache.kvcache import KVCache
from numflash.cpu import launch
from numflash.cpu.decode import tiles
from numflash.cpu.int8 import softmax_vectors
from numflash.cpu.isa.isas import running_lanes
from numflash.errors import UnsupportedError
from numflash.interop.arrays import convert, widen
from numflash.jit import target
from numflash.machinecode.codegen import Target, code_generator
from numflash.numerics import quantization
from numflash.numerics.quantization import quantize_problem
from numflash.numerics.rotation import rotate as rotated
from numflash.reference import int4
from numflash.tiling import KEY_BLOCK
from numflash.validation.options import Options

pytestmark = pytest.mark.skipif(
    platform.machine() != "aarch64",
    reason="needs an AArch64 machine; make test-aarch64 emulates one",
)

EMULATED = os.environ.get("GUEST_CPU")
# GUEST_CPU -> (instruction sets, best first; int32 lanes of the best; vectors of float caches)
EXPECTED = {
    "a64fx": (["sve", "portable"], 16, "sve512"),
    "neoverse-v1": (["sve", "neon_dot", "portable"], 8, "sve256"),
    "neoverse-v2": (["sve", "neon_dot", "portable"], 4, "portable"),
    "neoverse-n1": (["neon_dot", "portable"], 4, "portable"),
}
CASES = {
    "full": ({"l": 30, "s": 140, "d": 64}, {}),
    "causal": ({"l": 70, "s": 70, "d": 20, "dv": 36}, {"is_causal": True}),
    "grouped": ({"h": 4, "hkv": 2, "l": 5, "s": 130, "d": 33}, {"enable_gqa": True}),
    "one": ({"l": 1, "s": 1, "d": 1}, {}),
    "mask": ({"l": 9, "s": 200, "d": 16}, {"window": (40, 17), "softcap": 2.0}),
}


@pytest.mark.skipif(not EMULATED, reason="the emulated machine is known by this variable")
def test_the_machine_is_detected():
    isas, lanes, floats = EXPECTED[EMULATED]
    assert target.cpu_name() == EMULATED
    assert target.available() == isas and running_lanes(isas[0]) == lanes
    assert tiles.tile(isas[0], "float32").isa == floats


def test_what_the_machine_lacks_is_refused():
    for isa in set(target.ISAS) - set(target.available()):
        with pytest.raises(UnsupportedError, match=f"isa: '{isa}' needs"):
            target.require(isa)


def test_llvm_outside_makes_the_same_code(monkeypatch):
    """Every answer of the native process, while a function is compiled, is what LLVM makes here."""
    compile_outside = pytest.importorskip("compile_outside")
    ask = compile_outside.OUTSIDE.ask
    answers = []

    def asked(*request):
        answers.append((request, ask(*request)))
        return answers[-1][1]

    monkeypatch.setattr(compile_outside.OUTSIDE, "ask", asked)
    octaves = softmax_vectors.block_tops(target.available()[0], KEY_BLOCK)
    numba.njit("(int16[::1], int32[::1], int16[::1])")(
        lambda x, octave, octave_q8: octaves(x, 0, KEY_BLOCK, octave, octave_q8, 0)
    )
    assert {kind for (kind, _, _), _ in answers} == {"parse", "optimise", "object"}
    for (kind, described, code), answer in answers:
        generator = code_generator(Target(*described))
        assert compile_outside.work(generator, kind, code) == answer


KERNELS = [(isa, pv) for isa in target.available() for pv in ("int8", "fp32")]


def has_the_bits_of_the_model(run, pv):
    """Every case by `run(problem)` -> (out, lse): equal bits.

    With float values their sums are rounded in another order.
    """
    for name, (shape, options) in CASES.items():
        arrays = qkv(**shape)
        if name == "mask":  # a query that is not finite: NaN, where vectors convert NaN to 0, too
            arrays[0][0, 0, 5, 3] = np.nan
        problem = quantize_problem(
            validation.problem(
                *arrays, Options(precision="int8", pv=pv, return_lse=True, **options)
            )
        )
        out, lse = reference.integer_model(problem)
        got, got_lse = run(problem)
        np.testing.assert_allclose(got, out, rtol=0, atol=0 if pv == "int8" else 2e-6, err_msg=name)
        np.testing.assert_array_equal(got_lse, lse, err_msg=name)


@pytest.mark.parametrize(("isa", "pv"), KERNELS)
def test_bits_of_the_integer_model(isa, pv):
    has_the_bits_of_the_model(lambda problem: launch.run(problem, isa), pv)


def test_float_attention():
    for name, (shape, options) in CASES.items():
        arrays = qkv(**shape)
        exact = naive(*arrays, **{k: v for k, v in options.items() if k != "enable_gqa"})[0]
        got = numflash.attention(*arrays, **options)
        np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6, err_msg=name)


def decode_and_compare(dtype="int8", rotate=False):
    """Append to a cache of integers and decode, with padded channels, a partial block and values of
    very different size.
    """
    cache = KVCache(1, 2, 36, 300, dtype, value_dim=20, rotate=rotate)
    key = draw((1, 2, 150, 36))
    value = draw((1, 2, 150, 20), 1)
    query = draw((1, 12, 1, 36), 2)
    value[:, :, ::3] *= 1e-3
    cache.append(key, value)
    k, v = cache.quantized(0)
    for stored, x in ((k, key[0]), (v, value[0])):
        quantize = int4.quantize if dtype == "int4" else quantization.quantize
        x = rotated(x) if rotate else x
        np.testing.assert_array_equal(stored.data, quantize(x).data)
    for splits in (1, 2):
        sizes = k, v, 36**-0.5, np.ones((1, 150), bool), splits
        if dtype == "int4":
            exact = int4.decode(query[0], *sizes)[0]
        elif rotate:
            exact = reference.rotated_decode(query[0], *sizes)[0]
        else:
            exact = reference.integer_decode(reference.decode_query(query[0]), *sizes)[0]
        np.testing.assert_array_equal(cache.decode(query, splits=splits)[0], exact)


def decode_floats(dtype, latents=False):
    """Append to a cache of floats and decode: against float64 on the numbers that are stored.

    `latents`: values are the first channels of the keys.
    """
    shared = {"value_in_key": True} if latents else {}
    cache = KVCache(1, 2, 70, 300, dtype, value_dim=36, **shared)
    key, value, query = draw((1, 2, 150, 70)), draw((1, 2, 150, 36), 1), draw((1, 12, 2, 70), 2)
    if latents:
        value = key[..., :36]
    for first, last in ((0, 149), (149, 150)):  # many tokens at a time, and one
        some = key[:, :, first:last], value[:, :, first:last]
        cache.append(*some[: 1 if latents else 2])
    k, v = (convert(x[0], dtype) for x in (key, value))
    k, v = (np.repeat(widen(x).astype(np.float64), 6, 0) for x in (k, v))
    scores = query[0] @ k.transpose(0, 2, 1) * 70**-0.5
    scores[:, 0, 149] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = weights / weights.sum(-1, keepdims=True) @ v
    for splits in (1, 2):
        got = cache.decode(query, splits=splits)[0]
        np.testing.assert_allclose(got, exact, rtol=0, atol=3e-6)


def test_decode_has_the_bits_of_the_integer_model():
    decode_and_compare()


# (dtype, latents)
FLOAT_CACHES = [
    ("float32", False),
    ("float16", False),
    ("bfloat16", True),
    ("bfloat16", False),
    ("float32", True),
]


@pytest.mark.parametrize(("dtype", "latents"), FLOAT_CACHES)
def test_decode_over_floats(dtype, latents):
    decode_floats(dtype, latents)
