"""INT8 forward in the emulator: the bits of the integer model, for every option."""

import functools
from dataclasses import replace

import numpy as np
import oracles
import pytest
from int8_checks import near_the_model, problem_of, same_bits, same_bits_of

pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")

from hypothesis import given, settings
from hypothesis import strategies as st

from numflash import tiling, validation
from numflash.cuda import emulate, launch_int8
from numflash.cuda.compile import Source, compile_source
from numflash.cuda.compile.target import cuda, types
from numflash.cuda.kernels import int8_weights
from numflash.cuda.kernels.int8_softmax import below_octave, rounded_up
from numflash.cuda.kernels.scores import softcap_exact
from numflash.errors import UnsupportedError
from numflash.numerics import fixedpoint as fx
from numflash.numerics.quantization import QuantizedTensor
from numflash.validation.options import Options


@pytest.mark.parametrize(
    ("l", "s"),
    [
        (70, 300),
        *(
            pytest.param(*x, marks=pytest.mark.slow)
            for x in ((1, 1), (5, 127), (16, 128), (17, 129))
        ),
    ],
)
def test_tails(l, s):
    report = same_bits(*oracles.qkv(b=1, h=1, l=l, s=s, d=64))
    assert report.shared_conflicts == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        {"b": 2, "h": 4, "hkv": 2, "l": 33, "s": 200, "d": 40, "dv": 72},
        {"b": 1, "h": 2, "l": 20, "s": 140, "d": 128},
        {"b": 1, "h": 1, "l": 20, "s": 140, "d": 5, "dv": 3},
    ],
)
def test_shapes(shape):
    same_bits(*oracles.qkv(**shape))


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True},
        {"is_causal": True, "alignment": "lower_right"},
        {"window": (30, 2)},
        {"window": (None, 9), "alignment": "lower_right"},
    ],
)
def test_bands(options):
    same_bits(*oracles.qkv(b=1, h=2, hkv=1, l=70, s=270, d=64), **options)


def test_key_lengths():
    same_bits(*oracles.qkv(b=3, h=1, l=40, s=150, d=64), key_lengths=np.array([13, 0, 150]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "count"),
    [("sm_80", 0), ("sm_80", 3), ("sm_90a", 0)],
)
def test_keys_from_the_middle_of_a_sequence(arch, count):
    problem = problem_of(*oracles.qkv(b=1, h=1, l=20, s=150, d=64), is_causal=True)
    same_bits_of(replace(problem, first_keys=count), arch)


@pytest.mark.slow
def test_masks():
    rng = np.random.default_rng(3)
    seen = rng.random((1, 2, 40, 150)) > 0.5
    seen[0, 1, 7] = False
    same_bits(*oracles.qkv(b=2, h=2, l=40, s=150, d=64), attn_mask=seen)
    bias = np.where(seen[:, :1], rng.standard_normal(seen[:, :1].shape), -np.inf).astype(np.float32)
    same_bits(*oracles.qkv(b=2, h=2, l=40, s=150, d=64), attn_mask=bias)


@pytest.mark.parametrize("factor", [1e-30, 30.0, 1e18])
def test_extreme_scores(factor):
    q, k, v = oracles.qkv(b=1, h=1, l=40, s=150, d=64)
    same_bits(q * np.float32(factor), k, v)


@pytest.mark.parametrize("arch", ["sm_80", pytest.param("sm_90a", marks=pytest.mark.slow)])
def test_a_whole_block_out_of_range(arch):
    """The second block hides no key: rows beyond the range of scores, on both sides, and NaN."""
    q, k, v = oracles.qkv(b=1, h=2, hkv=1, l=40, s=300, d=64)
    q *= np.float32(10.0) ** np.array([0, 7, 9, 18, 30], np.float32).repeat(8)[:, None]
    k[0, 0, 128:256] = np.abs(k[0, 0, 128:256])
    q[0, 0, 24] = -np.abs(q[0, 0, 24])
    q[0, 0, 25] = np.abs(q[0, 0, 25])
    same_bits(q, k, v, arch=arch, window=(None, 290))
    q[0, 0, 10], k[0, 0, 200] = np.nan, np.inf
    same_bits(q, k, v, arch=arch, window=(190, 290), alignment="lower_right")


def test_rows_that_are_not_finite():
    q, k, v = oracles.qkv(b=1, h=2, hkv=1, l=40, s=150, d=64)
    q[0, 0, 3], k[0, 0, 30], v[0, 0, 35, 2] = np.nan, np.inf, np.nan
    same_bits(q, k, v, is_causal=True)


def test_saturated_operands():
    q, k, v = (
        np.full((1, 1, n, 64), x, np.float32) for n, x in ((40, 3.0), (150, -5.0), (150, 7.0))
    )
    k[..., ::2] = 5.0
    same_bits(q, k, v)


@pytest.mark.parametrize(
    "arch", ["sm_80", *(pytest.param(x, marks=pytest.mark.slow) for x in ("sm_75", "sm_90a"))]
)
def test_all_of_int8(arch):
    """`quantize` never gives -128, a caller's own operands may."""
    rng = np.random.default_rng(0)

    def operand(n, shape, granularity):
        data = rng.choice([-128, 127, 5], (1, 1, n, 64)).astype(np.int8)
        return QuantizedTensor(data, np.full(shape, 0.01, np.float32), granularity)

    query = operand(70, (1, 1, 70, 1), "row")
    key = operand(150, (1, 1, 150, 1), "row")
    value = operand(150, (1, 1, 1, 64), "channel")
    same_bits_of(
        validation.quantized_problem(query, key, value, Options(return_lse=True)),
        arch,
    )


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param(
            {"b": 1, "h": 2, "hkv": 1, "l": 20, "s": 140, "d": 200, "dv": 256},
            {"is_causal": True, "alignment": "lower_right"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"b": 1, "h": 1, "l": 70, "s": 300, "d": 64, "dv": 256},
            {"softcap": 2.0, "window": (150, 9)},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"b": 2, "h": 1, "l": 5, "s": 3, "d": 256, "dv": 20},
            {"alibi_slopes": np.array([0.5], np.float32)},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_pairs_of_warps(shape, options):
    """Beyond 128 channels two warps share 16 rows.

    As many products as one would need, half of them each.

    Per block of keys a warp arrives at three barriers of the whole block and one of its pair.
    """
    report = same_bits(*oracles.qkv(**shape), **options)
    d = tiling.padded(shape["d"], tiling.SWIZZLED_HEAD_DIMS)
    dv = tiling.padded(shape["dv"], tiling.CUDA_HEAD_DIMS)
    warps = report.blocks * report.threads // 32
    first = warps * (d // 32)  # products of the first keys: every warp for its rows
    blocks, rest = divmod(
        report.tensor_operations - first, (d // 32) * 8 + (dv // 16) * 4
    )  # of keys, that a warp has visited
    assert rest == 0 and report.barriers == 4 * blocks >= 4 * warps and report.shared_conflicts == 0


@pytest.mark.parametrize(
    "shape",
    [
        {"b": 1, "h": 2, "l": 20, "s": 140, "d": 64},  # the kernel of `test_all_of_int8`
        pytest.param(
            {"b": 1, "h": 2, "hkv": 1, "l": 20, "s": 140, "d": 64}, marks=pytest.mark.slow
        ),
        pytest.param(
            {"b": 1, "h": 1, "l": 20, "s": 140, "d": 256, "dv": 72}, marks=pytest.mark.slow
        ),
    ],
)
def test_turing(shape):
    report = same_bits(*oracles.qkv(**shape), arch="sm_75", is_causal=True, alignment="lower_right")
    assert report.async_copied == 0 and report.shared_conflicts == 0
    assert {name for name in report.opcodes if name.startswith("mma")} == {
        f"mma.sync.aligned.m8n8k16.row.col.s32.{a}.s8.s32" for a in ("s8", "u8")
    }


@pytest.mark.parametrize(
    ("arch", "shape", "options"),
    [
        (
            "sm_80",
            {"l": 37, "d": 64, "dv": 40},
            {"is_causal": True, "key_lengths": np.array([0, 150])},
        ),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("sm_75", {"l": 20, "d": 64}, {"window": (30, 2), "alignment": "lower_right"}),
                ("sm_75", {"l": 20, "d": 200, "dv": 256}, {"softcap": 2.0}),
                ("sm_80", {"l": 20, "d": 256, "dv": 72}, {"window": (150, 9)}),
                ("sm_80", {"l": 1, "s": 1, "d": 128}, {}),
                ("sm_89", {"l": 70, "d": 128}, {"alibi_slopes": np.float32([0.5, 0.1])}),
                ("sm_90a", {"l": 70, "d": 64}, {"is_causal": True}),
            )
        ),
    ],
)
def test_weights_of_two_bytes(arch, shape, options):
    """pv "int16": the head sizes and cards that its kernels differ on; a pair of query heads."""
    q, k, v = oracles.qkv(**{"b": 2, "h": 2, "hkv": 1, "s": 150, **shape})
    if "is_causal" in options:
        k[1, 0, 30], v[1, 0, 35, 2] = np.inf, np.nan
    report = same_bits(q, k, v, arch=arch, pv="int16", **options)
    assert report.shared_conflicts == 0


def close_to_the_model(q, k, v, **options):
    return near_the_model(problem_of(q, k, v, pv="fp32", **options))


@pytest.mark.parametrize(
    "shape",
    [
        {"b": 1, "h": 2, "hkv": 1, "l": 33, "s": 200, "d": 40, "dv": 70},
        pytest.param({"b": 1, "h": 2, "l": 20, "s": 300, "d": 128}, marks=pytest.mark.slow),
        pytest.param(
            {"b": 1, "h": 2, "l": 20, "s": 140, "d": 40, "dv": 200}, marks=pytest.mark.slow
        ),
    ],
)
def test_float_values(shape):
    q, k, v = oracles.qkv(**shape)
    v[..., 1] *= np.float32(1e37)  # sums of which would overflow
    report = close_to_the_model(q, k, v, is_causal=True, alignment="lower_right")
    assert (
        report.shared_conflicts == 0
        and report.opcodes["mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"] > 0
    )


@pytest.mark.slow
def test_float_values_of_any_size():
    q, k, v = oracles.qkv(b=1, h=2, l=20, s=150, d=64)
    v *= np.float32(10.0) ** np.random.default_rng(1).integers(-30, 30, v.shape).astype(np.float32)
    v[0, 0, 40, 3], k[0, 1, 50] = np.inf, np.nan
    close_to_the_model(q, k, v, is_causal=True, softcap=3.0)


def test_what_is_refused():
    problem = problem_of(*oracles.qkv(b=1, h=1, l=4, s=4, d=8), pv="fp32")
    with pytest.raises(
        UnsupportedError, match=r"no TF32 products; allowed there: 'int8' and 'int16'"
    ):
        launch_int8.int8_forward(problem, "sm_75")
    problem = problem_of(*oracles.qkv(b=1, h=1, l=4, s=4, d=8), pv="bf16")
    with pytest.raises(UnsupportedError, match="pv: got 'bf16' on a card; allowed there: 'int8'"):
        launch_int8.int8_forward(problem, "sm_80")


@pytest.mark.slow
def test_extreme_options():
    """Biases and slopes beyond float32's range in Q8.8.

    What is infinite hides nothing but -inf itself.
    """
    q, k, v = oracles.qkv(b=1, h=1, l=20, s=150, d=64)
    bias = np.random.default_rng(2).choice(
        np.array([3e38, -3e38, 0.0, 1.0, -np.inf], np.float32), (1, 1, 20, 150)
    )
    same_bits(q * np.float32(1e18), k, v, attn_mask=bias, alibi_slopes=np.array([1e20], np.float32))


@functools.cache
def weights_kernel(turing):
    four_bytes = int8_weights.make_bytes(turing)

    def kernel(x, reference, out):
        i = cuda.grid(1)
        w, base = cuda.local.array(4, types.float32), int8_weights.base_of(reference[i], 2.0**-12)
        u, planes = cuda.local.array(4, types.float32), cuda.local.array(2, types.uint32)
        for k in range(4):
            u[k] = int8_weights.below(x[4 * i + k], base)
            w[k] = int8_weights.weight_steps(u[k])
        out[0, i] = four_bytes(w[0], w[1], w[2], w[3])
        int8_weights.two_planes(u, planes, 0, 1)
        out[5, i], out[6, i] = planes[0], planes[1]
        base = int8_weights.base_of(reference[i], 2.0**-11)
        for k in range(4):
            out[1 + k, i] = int8_weights.weight_q16(int8_weights.below(x[4 * i + k], base))

    kinds = types.float32[::1], types.int32[::1], types.uint32[:, ::1]
    return compile_source(Source(kernel, types.void(*kinds), 1024), "sm_80", "ptx")


def weights_of(x, reference, turing=False):
    """Weights as bytes, in Q16.16 and of 15 bits of scores x, float32, four of which refer to the same."""
    out = np.zeros((7, x.size // 4), np.uint32)
    arguments = [x, reference.astype(np.int32), out]
    emulate(weights_kernel(turing), x.size // 4096, None, arguments)
    high, low = (plane.view(np.uint8).astype(np.uint16) for plane in out[5:])
    return out[0].view(np.uint8), out[1:5].T.reshape(-1), high * np.uint16(256) + low


def is_exp2(x, references):
    """Weights of x, four to a reference, against the shared definition of t = rint(x)."""
    y = np.minimum(references.repeat(4).astype(np.int64) - np.rint(x).astype(np.int64), 65535)
    for turing in (False, True):
        byte, wide, fifteen = weights_of(x, references, turing)
        assert np.array_equal(byte, fx.exp2_p8(y.astype(np.uint16)))
        assert np.array_equal(wide, fx.exp2_quadratic(y.astype(np.uint32)))
        # from 16 octaves on `exp2_w15` is 0 as well
        assert np.array_equal(fifteen, fx.exp2_w15(y.astype(np.uint16)))


@pytest.mark.parametrize(
    "reference", [0, 1 << 28, (1 << 28) - 32, 13 * 256 + 96, 5000 * 32, -(1 << 28)]
)  # within T_LIMIT
def test_weights_are_the_definitions(reference):
    """Every Q8.8 distance of 16 bits, as a whole score."""
    references = np.full(1 << 14, reference)
    x = (reference - np.arange(1 << 16)).astype(np.float32)
    is_exp2(np.where(x < -fx.T_LIMIT, -fx.T_LIMIT, x), references)


def test_weight_of_a_score_between():
    """Every tie between two distances that weigh something, and the floats next to it.

    Far below, and hidden: nothing.
    """
    references = np.array([0, 8, -3, 5601, 32000, -4000, 98765, -(1 << 13)]).repeat(4096) * 32
    ties = references - (np.tile(np.arange(4096), 8) + 0.5)
    ties = ties.astype(np.float32)  # exact: 21 bits and a half
    for x in (
        ties,
        np.nextafter(ties, np.float32(np.inf)),
        np.nextafter(ties, -np.float32(np.inf)),
    ):
        is_exp2(x, references[::4])
    x = np.random.default_rng(0).choice(np.float32([-np.inf, -1e30, -(2.0**29), -1e7]), 4096)
    assert not any(w.any() for w in weights_of(x, np.zeros(1024)))


def test_eighths_of_an_octave_are_the_shared_definition():
    def kernel(top, out):
        i = cuda.grid(1)
        out[i] = below_octave(rounded_up(top[i], 32))

    top = np.arange(-(1 << 9), 1 << 9, dtype=np.int32)
    out = np.zeros(top.size, np.float32)
    kinds = types.int32[::1], types.float32[::1]
    emulate(Source(kernel, types.void(*kinds), 1024), 1, None, [top, out])
    assert np.array_equal(out, fx.below_octave((top + 31) & -32))


def test_softcap_is_the_shared_definition():
    def kernel(x, out):
        i = cuda.grid(1)
        out[i] = softcap_exact(x[i], types.float32(7386))

    x = np.concatenate(
        [np.linspace(-30, 30, 4090), [0.0, -0.0, np.inf, -np.inf, 1e-30, -1e-30]]
    ).astype(np.float32)
    out = np.zeros_like(x)
    floats = types.Array(types.float32, 1, "C")
    emulate(Source(kernel, types.void(floats, floats), 1024), 4, None, [x, out])
    assert np.array_equal(out.view(np.int32), fx.softcap(x, np.float32(7386)).view(np.int32))


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    l=st.integers(1, 80),
    s=st.integers(1, 300),
    left=st.integers(0, 300),
    right=st.integers(0, 90),
    seed=st.integers(0, 99),
)
def test_random_windows(l, s, left, right, seed):
    same_bits(*oracles.qkv(b=1, h=1, l=l, s=s, d=64, seed=seed), seed=seed, window=(left, right))
