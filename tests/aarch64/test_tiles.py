"""The register tiles and the row softmax that ship, as SVE and NEON code, executed.

Equal bits at every vector length.
"""

import llvmlite.binding as llvm
import numpy as np
import pytest
from numba import njit

pytest.importorskip("unicorn")
pytest.importorskip("elftools")

from aarch64.tile_kernels import (
    CENTRE,
    KEY,
    STRIDE,
    changed_function,
    packed_keys,
    precise_function,
    score_function,
    softmax_function,
    value_function,
)
from numflash.cpu.int8 import microkernels, packing
from numflash.cpu.isa.isas import VECTOR_ISAS, lanes_of
from numflash.errors import UnsupportedError
from numflash.machinecode import assembly
from numflash.machinecode.codegen import TRIPLES
from numflash.machinecode.emulator import Emulated
from numflash.numerics import fixedpoint
from numflash.tiling import KEY_BLOCK

# Both instruction sets by default, with the shortest and the longest vectors; those between, and what
# another scheduler makes of the same source, are slow.
MACHINES = [
    ("sve", "a64fx", 128),
    ("sve", "a64fx", 512),
    ("neon_dot", "neoverse-n1", 128),
]
OTHERS = [
    ("sve", "a64fx", 256),
    ("sve", "neoverse-v1", 256),
    ("sve", "neoverse-v2", 128),
    ("neon_dot", "neoverse-v1", 128),
]
on_every_machine = pytest.mark.parametrize(
    ("isa", "cpu", "bits"),
    [*MACHINES, *(pytest.param(*m, marks=pytest.mark.slow) for m in OTHERS if m[1] in TRIPLES)],
)
F = np.float32


@on_every_machine
@pytest.mark.parametrize("mr", microkernels.ROWS)
@pytest.mark.parametrize(("d", "extreme"), [(4, False), (64, False), (128, True)])
def test_score_tile(isa, cpu, bits, mr, d, extreme):
    rng = np.random.default_rng(d)
    panel = VECTOR_ISAS[isa].nv * bits // 32
    q, k = (rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (mr, panel))
    if extreme:
        q = np.where(q > 0, 127, -127).astype(np.int8)
        k = np.where(k > 0, 127, -127).astype(np.int8)
    ck = rng.random(panel).astype(np.float32)
    cq = rng.random(mr).astype(np.float32)
    keys = packed_keys(isa, k, bits)
    x = np.full((mr, STRIDE), 99, np.int16)
    Emulated(*score_function(isa, mr), cpu, vector_bits=bits)(
        q, keys.data[0], keys.start[0], ck, cq, x
    )
    exact = ((q.astype(np.int32) @ k.astype(np.int32).T).astype(np.float32) * ck) * cq[:, None]
    want = np.clip(np.rint(exact), -32768, 32767).astype(np.int16)
    assert extreme <= (np.abs(exact).max() > 32768)  # the extreme case saturates
    assert np.array_equal(x[:, :panel], want) and (x[:, panel:] == 99).all()


@on_every_machine
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize(
    ("cap", "slope", "has_bias", "has_mask", "base", "d"),
    [
        (0, 0, False, False, 0, 4),
        (7386, 0, False, False, 0, 32),
        (0, 9.5, False, True, -1024, 8),
        (0, 0, True, False, -65536, 64),
        (7386, -9.5, True, True, 0, 32),
    ],
)
def test_changed_tile(isa, cpu, bits, wide, cap, slope, has_bias, has_mask, base, d):
    mr = 4
    rng = np.random.default_rng(d)
    panel = VECTOR_ISAS[isa].nv * bits // 32
    q, k = (rng.integers(-127, 128, (n, d)).astype(np.int8) for n in (mr, panel))
    ck = np.r_[np.zeros(KEY), rng.random(panel)].astype(np.float32)
    cq = rng.random(mr).astype(np.float32) * F(1e-4 if cap else 1)
    shift = rng.standard_normal(mr).astype(np.float32)
    bias = 10 * rng.standard_normal((mr - 1, panel)).astype(np.float32)
    bias[0, :4] = -np.inf, np.finfo(np.float32).min, np.nan, 3e38
    mask = rng.integers(0, 3, (mr - 1, panel)).astype(np.uint8)
    bases = np.array([base, 0, base, base - 256], np.int32)
    keys = packed_keys(isa, k, bits)
    x = np.full((mr, STRIDE), 99, np.float32 if wide else np.int16)
    start = np.r_[np.zeros(KEY, np.int32), keys.start[0]]
    function = changed_function(isa, mr, wide, cap > 0, slope != 0, has_bias, has_mask)
    numbers = np.array([F(cap) * fixedpoint.CAP_UNIT, slope], F)
    Emulated(*function, cpu, vector_bits=bits)(
        q, keys.data[0], start, ck, cq, x, shift, numbers, bases, bias, mask
    )
    want = ((q.astype(np.int32) @ k.astype(np.int32).T).astype(np.float32) * ck[KEY:]) * cq[:, None]
    if cap:
        want = fixedpoint.softcap(want + shift[:, None], F(cap))
    if slope:
        want = want - F(slope) * np.abs(
            CENTRE + np.arange(mr)[:, None] - KEY - np.arange(panel)
        ).astype(np.float32)
    own = [*range(mr - 1), mr - 2]  # the last row has no bias and no mask of its own
    if has_bias:
        rows = bias[own]
        with np.errstate(over="ignore"):
            want = np.where(
                rows == -np.inf,
                rows,
                np.maximum(want + rows * fixedpoint.LOG2E_Q8, fixedpoint.LOWEST),
            )
    if not wide:
        want = (
            np.where(want < 32767, np.rint(np.minimum(want, 32767).astype(np.float64)), 32767)
            - bases[:, None]
        )
        want = np.clip(want, -32768, 32767)
    if has_mask:
        want = np.where(mask[own] != 0, want, -np.inf if wide else -32768)
    np.testing.assert_array_equal(x[:, :panel], want)
    assert (x[:, panel:] == 99).all()


@on_every_machine
def test_wide_scores_are_cut_and_keep_nan(isa, cpu, bits):
    panel = VECTOR_ISAS[isa].nv * bits // 32
    q = np.full((2, 4), 127, np.int8)
    k = np.full((panel, 4), 127, np.int8)
    ck = np.full(panel, 2.0**100, np.float32)
    cq = np.array([2.0**20, -(2.0**20)], np.float32)
    ck[1], ck[2] = np.nan, 0
    keys = packed_keys(isa, k, bits)
    x = np.zeros((2, STRIDE), np.float32)
    ck = np.r_[np.zeros(KEY), ck].astype(np.float32)
    start = np.r_[np.zeros(KEY, np.int32), keys.start[0]]
    function = changed_function(isa, 2, True, False, False, False, False)
    Emulated(*function, cpu, vector_bits=bits)(
        q,
        keys.data[0],
        start,
        ck,
        cq,
        x,
        np.zeros(2, F),
        np.zeros(2, F),
        np.zeros(2, np.int32),
        np.zeros((1, 1), F),
        np.zeros((1, 1), np.uint8),
    )
    want = np.tile(np.array([fixedpoint.T_LIMIT, -fixedpoint.T_LIMIT])[:, None], panel)
    want[:, 1], want[:, 2] = np.nan, 0
    assert np.array_equal(x[:, :panel], want, equal_nan=True)


@on_every_machine
@pytest.mark.parametrize(
    ("mr", "nv"), [(6, 4), (4, 4), (2, 4), (6, 2), (6, 1)]
)  # those that the kernel uses
@pytest.mark.parametrize("extreme", [False, True])
def test_value_tile(isa, cpu, bits, mr, nv, extreme):
    rng = np.random.default_rng(mr)
    columns = nv * bits // 32
    p = rng.integers(0, 256, (mr, KEY_BLOCK)).astype(np.uint8)
    v = rng.integers(-127, 128, (KEY_BLOCK, columns)).astype(np.int8)
    if extreme:
        p[:], v[:] = 255, np.where(v > 0, 127, -127)
    scale = np.exp2(-np.arange(mr, dtype=np.float32))
    o = rng.standard_normal((mr, columns)).astype(np.float32)
    want = o + (p.astype(np.float64) @ v.astype(np.float64)).astype(np.float32) * scale[:, None]
    Emulated(*value_function(isa, mr, nv), cpu, vector_bits=bits)(
        p, packing.pack_values(isa, v[None], bits // 32)[0], scale, p.sum(1, dtype=np.int32), o
    )
    assert np.array_equal(o, want.astype(np.float32))


@on_every_machine
@pytest.mark.parametrize("keys", [KEY_BLOCK // 2, KEY_BLOCK])
def test_row_softmax(isa, cpu, bits, keys):
    rng = np.random.default_rng(keys)
    x = np.full((8, STRIDE), -7, np.int16)
    x[:, :keys] = rng.normal(0, 600, (8, keys)).round()
    x[1, :keys], x[2, :keys], x[3, :keys] = 0, 32767, np.linspace(-32768, 32512, keys)
    x[4, :keys], x[5, 1:keys], x[6, :keys] = -32768, fixedpoint.MASKED, np.arange(-keys, 0) * 16
    p = np.full(x.shape, 77, np.uint8)
    octave = np.zeros(8, np.int32)
    total = np.zeros(8, np.int32)
    sums = np.zeros(8 * bits // 32, np.int32)
    Emulated(*softmax_function(isa, keys), cpu, vector_bits=bits)(
        x, p, octave, np.zeros(8, np.int16), sums, total
    )
    top = (x[:, :keys].max(1).astype(np.int32) + 255) >> 8
    weights = fixedpoint.exp2_p8(
        (top[:, None] * 256 - x[:, :keys].astype(np.int32)).astype(np.uint16)
    )
    assert (
        np.array_equal(octave, top)
        and np.array_equal(p[:, :keys], weights)
        and (p[:, keys:] == 77).all()
    )
    assert np.array_equal(total, weights.sum(1, dtype=np.int32))


@on_every_machine
@pytest.mark.parametrize(
    ("pv", "keys"), [("fp32", KEY_BLOCK // 2), ("fp32", KEY_BLOCK), ("bf16", KEY_BLOCK)]
)
def test_row_weights_of_float_values(isa, cpu, bits, pv, keys):
    """The weights of pv="fp32" and "bf16".

    Integers as exact float32 times the row's power of two, and their integer sum.
    """
    rng = np.random.default_rng(keys)
    x = np.full((6, STRIDE), -7, np.int16)
    top = np.array([0, 32512, 256, -256, 32512, 1024], np.int16)
    x[:, :keys] = rng.normal(-600, 600, (6, keys)).round().clip(None, top[:, None])
    x[1, :keys], x[2, :keys], x[3, :keys] = np.linspace(-32768, 32512, keys), 256, fixedpoint.MASKED
    x[4, :keys] = 32512 - np.arange(keys) * 65
    scale = np.exp2(-np.arange(6, dtype=np.float32))
    p = np.full(x.shape, 77, np.float32)
    sums = np.zeros(6 * bits // 32, np.int32)
    Emulated(*precise_function(isa, keys, pv), cpu, vector_bits=bits)(x, top, scale, p, sums)
    distance = top[:, None].astype(np.uint32) - x[:, :keys].astype(np.uint32)
    exp2 = fixedpoint.exp2_quadratic if pv == "fp32" else fixedpoint.exp2_bf16
    weights = exp2(distance & np.uint32(0xFFFF))
    one = fixedpoint.WEIGHT_ONE[pv] / fixedpoint.SUM_UNIT[pv]
    assert weights[2].min() == one and weights[3].max() == 0 < weights[0].max()
    assert np.array_equal(
        p[:, :keys],
        weights.astype(np.float32) * np.float32(fixedpoint.SUM_UNIT[pv]) * scale[:, None],
    )
    assert (p[:, keys:] == 77).all()
    assert np.array_equal(sums.reshape(6, -1).sum(1), weights.sum(1, dtype=np.int64))


@pytest.mark.skipif(
    llvm.llvm_version_info < (20,), reason="older LLVM spills an accumulator on NEON"
)
@on_every_machine
def test_hot_loops_hold_nothing_else(isa, cpu, bits):
    """24 dot products, 4 loads of columns, 6 of rows, and loop control per step.

    No spill, nothing widened.
    """
    lanes = "z.s" if isa == "sve" else "v.4s"
    for function, dot in ((score_function(isa, 6), "sdot"), (value_function(isa, 6, 4), "udot")):
        loop = assembly.hot_loop(Emulated(*function, cpu, vector_bits=bits).code.assembly)
        counts = assembly.histogram(loop.instructions)
        steps = counts[f"{dot} {lanes}"] // 24
        assert counts[f"{dot} {lanes}"] == 24 * steps > 0
        assert len(loop.instructions) <= 45 * steps
        assert not any(map(assembly.is_stack, loop.instructions)) and not any(
            map(assembly.is_lanes64, loop.instructions)
        )


@on_every_machine
def test_softmax_stays_in_narrow_lanes(isa, cpu, bits):
    loop = assembly.hot_loop(
        Emulated(*softmax_function(isa, KEY_BLOCK), cpu, vector_bits=bits).code.assembly
    )
    assert not any(map(assembly.is_lanes64, loop.instructions))
    assert not any(map(assembly.is_integer_division, loop.instructions))


@pytest.mark.parametrize(
    ("isa", "cpu", "feature"),
    [
        ("sve", "neoverse-n1", "sve"),
        ("neon_dot", "a64fx", "dotprod"),
        ("sve", "cortex-a72", "sve"),
        ("avx512_vnni", "a64fx", "avx512f"),
        ("sve", "haswell", "sve"),
        ("avx512_vnni", "haswell", "avx512f"),
    ],
)
def test_an_instruction_set_that_the_target_lacks_is_an_error(isa, cpu, feature):
    """LLVM would abort the process."""
    lanes = lanes_of(isa)
    score = score_function(isa, 6)
    value = value_function(isa, 6, 4)
    softmax = softmax_function(isa, KEY_BLOCK)
    for function in (score, value, softmax, (njit(lambda: lanes()), "int64()")):
        with pytest.raises(
            UnsupportedError, match=f"{isa}.* needs .*{feature}.* target '{cpu}' lacks"
        ):
            Emulated(*function, cpu)
