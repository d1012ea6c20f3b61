from dataclasses import replace

import numpy as np
import pytest
from oracles import naive, qkv

from numflash import validation
from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.cpu.study import reference_float32
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target, threads
from numflash.machinecode import codegen
from numflash.measure import phases, roofline
from numflash.validation.options import Options


@pytest.mark.slow
def test_roof_is_plausible():
    """Order of magnitude only: a timed bound would fail on a busy machine."""
    roof = roofline.measure(1)
    assert 1e9 < roof.float32 < 1e13 and 1e9 < roof.int8 < 1e14
    assert 1e8 < roof.read < 1e13 and 1e8 < roof.copy < 1e13
    assert roof.isa == target.available()[0] and "GOP/s" in str(roof)


@pytest.mark.parametrize(
    ("isa", "instruction", "length"), [("avx512_vnni", "vpdpbusd", 1), ("avx2", "vpmaddwd", 2)]
)
def test_peak_loop_is_nothing_but_the_instruction(isa, instruction, length):
    """AVX2's is a product and an addition, which for Zen 5 LLVM makes one instruction of.

    No product is left out as one that is known already.
    """
    from numba import njit, types

    if isa not in target.available():
        pytest.skip(f"the target has no {' '.join(target.missing(isa))}")
    step = roofline.int8_step(VECTOR_ISAS[isa])
    chain = roofline._chain(VECTOR_ISAS[isa], roofline.I32, types.int32, step)
    run = njit(lambda n, seed: chain(n, seed))
    run(np.int64(3), np.int32(1))
    text = "\n".join(run.inspect_asm().values())
    loop = codegen.assembly.hot_loop(text)
    if any("vpdpwssd" in line for line in loop.instructions):
        instruction, length = "vpdpwssd", 1
    dots = sum(instruction in line for line in loop.instructions)
    assert dots % roofline.ACCUMULATORS == 0 and dots, loop
    assert len(loop.instructions) - length * dots <= 4


def test_memory_kernels_read_and_copy():
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    y = np.zeros_like(x)
    out = np.zeros(3, np.float32)
    roofline.read_memory(x, 3, out)
    roofline.copy_memory(x, 3, y)
    assert out.sum() == x.sum() and (y == x).all()


@pytest.mark.parametrize("isa", [i for i in VECTOR_ISAS if i in target.available()][:1])
def test_phases_compute_the_attention(isa):
    """The kernel with all parts on computes the attention that the whole kernel computes.

    Else its parts mean nothing.
    """
    from numflash.numerics.quantization import quantize_problem
    from numflash.reference import combined_scale, integer_steps
    from numflash.tiling import tiling

    arrays = qkv(h=1, l=128, s=256, d=64)
    problem = quantize_problem(validation.problem(*arrays, Options(precision="int8")))
    isa_data = VECTOR_ISAS[isa]
    block_q = tiling(isa).block_q
    cq, ck = combined_scale(problem.query, problem.key, problem.scale)
    keys = phases.pack_keys(isa, problem.key.data[0], np.ascontiguousarray(ck[0]))
    values = phases.pack_values(isa, problem.value.data[0])
    operand = np.uint8 if isa_data.group == 4 else np.int16
    q = (problem.query.data[0, 0, :block_q].astype(np.int16) + isa_data.q_offset).astype(operand)
    o = np.zeros((block_q, 64), np.float32)
    phases.make_phases(isa, 4)(q, cq[0, 0, :block_q].copy(), keys, values, o)
    *_, last = integer_steps(replace(problem, first_keys=0), 0, 0)
    np.testing.assert_array_equal(o, last.o[:block_q])


def test_phases_refuse_what_does_not_fill_the_tiles():
    isa = next((i for i in VECTOR_ISAS if i in target.available()), None)
    if isa is None:
        pytest.skip("the target has no register tiles")
    with pytest.raises(ArgumentError, match="L = 100"):
        phases.measure(isa, 100, 128)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("workers", [1, 2])
def test_float32_reference(causal, workers):
    if workers > threads.most():
        pytest.skip("one core")
    q, k, v = qkv(b=2, h=4, hkv=2, l=30, s=41, d=24, dv=10)
    problem = validation.problem(q, k, v, Options(is_causal=causal, enable_gqa=True))
    np.testing.assert_allclose(
        reference_float32.run(problem, workers), naive(q, k, v, is_causal=causal)[0], atol=1e-5
    )


def test_float32_reference_refuses_the_rest():
    q, k, v = qkv()
    for options in (
        {"softcap": 1.0},
        {"window": (1, None)},
        {"sinks": [0, 0]},
        {"key_lengths": [3]},
        {"precision": "float16"},
        {"window": (None, 2)},
    ):
        with pytest.raises(UnsupportedError, match="full and causal attention in float32 only"):
            reference_float32.run(validation.problem(q, k, v, Options(**options)))
