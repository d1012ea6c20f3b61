import itertools
import tracemalloc

import numpy as np
import pytest
from oracles import qkv

import numflash
from numflash import reference, validation
from numflash.dispatch.explanation import visible_share
from numflash.errors import ArgumentError, UnsupportedError
from numflash.jit import target
from numflash.tiling import using
from numflash.validation.options import Options

OPTIONS = [
    {},
    {"is_causal": True},
    {"is_causal": True, "alignment": "lower_right"},
    {"window": (2, 1)},
    {"window": (None, 0)},
    {"key_lengths": [3, 0]},
    {"key_lengths": [11, 4], "window": (1, 3), "alignment": "lower_right"},
]


WINDOWS = [
    {"window": (a, b), "alignment": way, "key_lengths": [11, 2]}
    for a, b, way in itertools.product(
        (None, 0, 3, 20), (None, 0, 2, 20), ("upper_left", "lower_right")
    )
]


@pytest.mark.parametrize("options", OPTIONS + WINDOWS)
def test_visible_share_is_what_the_oracle_sees(options):
    problem = validation.problem(*qkv(b=2, l=7, s=11, d=4), Options(**options))
    seen = np.mean([reference.visible(problem, b, 0) for b in range(2)])
    assert visible_share(problem) == pytest.approx(seen)


def test_counts():
    e = numflash.explain((1, 2, 4096, 128), precision="int8")
    assert e.operations == 4 * 2 * 4096 * 4096 * 128
    assert e.traffic == 3 * 2 * 4096 * 128 + 4 * 2 * 4096 * 128
    assert e.scores_bytes == 2 * 4 * 4096**2
    assert e.intensity == pytest.approx(4 * 2 * 4096**2 * 128 / e.traffic)
    assert e.roof(1e15, 1e9) == (pytest.approx(e.intensity * 1e9), "memory")
    assert e.roof(1e9, 1e12) == (1e9, "compute")
    text = str(e)
    for part in ("4096 queries x 4096 keys", "head_dim 128", "never stored", "working set"):
        assert part in text
    assert e.as_dict()["shape"]["heads"] == 2 and "weights (pv='int8'): 8 bits" in text
    e = numflash.explain((1, 2, 4096, 128), precision="int8", pv="bf16")
    assert e.as_dict()["pv"] == "bf16" and "weights (pv='bf16'): bfloat16" in str(e)
    e = numflash.explain((2, 4, 5, 8), (2, 2, 9, 8), (2, 2, 9, 3), enable_gqa=True)
    assert e.operations == 2 * 2 * 4 * 5 * 9 * (8 + 3)
    assert e.traffic == 4 * (2 * 4 * 5 * 8 + 2 * 2 * 9 * (8 + 3) + 2 * 4 * 5 * 3)


def test_causal_is_about_half():
    full, causal = (
        numflash.explain((1, 1, 1024, 64), is_causal=c).operations for c in (False, True)
    )
    assert causal / full == pytest.approx(0.5, abs=0.001)


def test_arrays_and_shapes_agree():
    q, k, v = qkv(l=5, s=9, d=8, dv=3)
    by_shapes = numflash.explain(q.shape, k.shape, v.shape)
    assert (
        numflash.explain(q, k, v)
        == by_shapes
        == numflash.explain(*map(list, (q.shape, k.shape, v.shape)))
    )


def test_bad_arguments():
    with pytest.raises(ArgumentError, match="window"):
        numflash.explain((1, 1, 4, 4), window=(-1, 0))
    with pytest.raises(ArgumentError, match="impl"):
        numflash.explain((1, 1, 4, 4), impl="tpu")
    for shape in (
        (-1, 2, 3, 4),
        (1.5, 2),
        ("a", "b"),
        (1 << 40, 1, 4, 4),
        (1, 1, 1 << 32, 64),
        (1 << 20, 1 << 31, 1 << 31, 64),
    ):
        with pytest.raises(ArgumentError, match="key: got"):
            numflash.explain((1, 1, 4, 4), shape)


@pytest.mark.parametrize(
    ("best", "precision", "name"),
    [
        (("amx_int8", "amx_bf16", "avx512"), "int8", "amx_int8-int8"),
        (("amx_int8", "amx_bf16", "avx512"), "bfloat16", "amx_bf16-bfloat16"),
        (("amx_int8", "amx_bf16", "avx512"), "float32", "avx512-float32"),
        (("avx512_vnni", "avx512_bf16", "avx512"), "bfloat16", "avx512_bf16-bfloat16"),
        (("avx_vnni", "avx2", "avx2"), "float16", "avx2-float32"),
        (("sve", "sve512", "sve512"), "bfloat16", "sve512-float32"),
        (("neon_dot", "neon", "neon"), "float32", "neon-float32"),
        (("portable", "portable", "portable"), "bfloat16", "portable-float32"),
    ],
)
def test_the_tiling_is_that_of_the_kernels_of_the_precision(monkeypatch, best, precision, name):
    """Integers, bfloat16 and float32 have instruction sets of their own, so a machine has three tilings."""
    kinds = (target.ISAS, target.BFLOAT16_ISAS, target.FLOAT_ISAS)
    kernels = {id(isas): isa for isas, isa in zip(kinds, best, strict=True)}
    monkeypatch.setattr(target, "require", lambda isa, isas=target.ISAS: kernels[id(isas)])
    assert numflash.explain((1, 2, 64, 64), precision=precision).tiling.name == name


def test_changed_tilings_are_explained():
    with using("avx2", "float32", block_q=48):
        e = numflash.explain((1, 2, 64, 64), impl="portable")
    assert (e.isa, e.tiling.block_q) == ("portable", 1)
    isa = target.require(None, target.FLOAT_ISAS)
    if isa != "portable":
        with using(isa, "float32", block_q=48):
            assert numflash.explain((1, 2, 64, 64)).tiling.block_q == 48


def test_vectors_of_sve_are_as_long_as_the_machines(monkeypatch):
    monkeypatch.setattr(target, "require", lambda isa, isas=target.ISAS: "sve")
    for bits, lanes in ((128, 4), (256, 8), (512, 16), (2048, 16)):
        monkeypatch.setattr("numflash.dispatch.explanation.scalable_bits", lambda n=bits: n)
        assert numflash.explain((1, 2, 64, 64), precision="int8").tiling.lanes == lanes


def test_a_shape_takes_no_memory():
    """2^30 queries: one byte for each would be a gigabyte."""
    tracemalloc.start()
    e = numflash.explain((1, 1, 1 << 30, 64), is_causal=True)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1e6 and e.visible == pytest.approx(0.5)


def test_cuda_kernels_are_explained_by_their_shared_memory():
    pytest.importorskip("numba_cuda", reason="needs the cuda extra: pip install 'numflash[cuda]'")
    e = numflash.explain((1, 2, 4096, 128), precision="float16", impl="cuda-emulator")
    assert (e.isa, e.tiling.name) == (
        "sm_80",
        "sm_80-float16",
    ) and "49 % of the shared memory of a block (163 KiB" in str(e)
    assert e.as_dict()["working_set"] == {"Q, then O": 16384, "K tile": 32768, "V tile": 32768}
    assert (
        numflash.explain(
            (1, 2, 64, 96), pv="fp32", precision="int8", impl="cuda-emulator"
        ).tiling.name
        == "sm_80-int8-fp32"
    )
    assert (
        numflash.explain(
            (1, 2, 64, 96), pv="int16", precision="int8", impl="cuda-emulator:sm_90a"
        ).tiling.name
        == "sm_80-int8"
    )
    with pytest.raises(UnsupportedError, match="pv: got 'bf16' on a card"):
        numflash.explain((1, 2, 64, 96), pv="bf16", precision="int8", impl="cuda-emulator")
