"""The public calls end to end: layouts, dtypes, semantics, packed sequences, empty problems."""

import itertools
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import TAILS, draw, naive, qkv
from test_reference import OPTIONS

import numflash.cpu
import numflash.cuda
from numflash import validation
from numflash.errors import UnsupportedError
from numflash.measure.data import minilm
from numflash.measure.metrics import errors
from numflash.validation.options import Options

LIMIT = {"float32": 1e-5, "int8": 0.03}
IMPLS = [("reference", "float32"), ("reference", "int8"), ("cpu", "float32"), ("cpu", "int8")]


def same(mine, other):
    """Equal bits, out and lse."""
    for a, b in zip(mine, other, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("impl", "precision"), IMPLS)
@pytest.mark.parametrize("name", OPTIONS)
def test_semantics(name, impl, precision):
    arrays = qkv(b=2, h=4, l=7, s=11, d=5, dv=3, hkv=2)
    exact, exact_lse = naive(*arrays, **OPTIONS[name])
    out, lse = numflash.attention(
        *arrays, enable_gqa=True, precision=precision, impl=impl, return_lse=True, **OPTIONS[name]
    )
    assert (
        out.dtype == lse.dtype == np.float32
        and out.shape == exact.shape
        and lse.shape == exact_lse.shape
    )
    assert errors(out, exact).relative_l1 <= LIMIT[precision] if exact.any() else not out.any()
    np.testing.assert_allclose(lse, exact_lse, atol=1e-5 if precision == "float32" else 0.05)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("ndim", [2, 3, 4])
def test_layouts_and_promotion(layout, ndim):
    heads = 1 if ndim == 2 else 4
    q, k, v = qkv(b=2 if ndim == 4 else 1, h=heads, l=6, s=9, d=8, dv=5)
    exact, exact_lse = numflash.attention(
        q, k, v, is_causal=True, return_lse=True, impl="reference"
    )
    given_arrays = [
        (x if layout == "bhld" else x.swapaxes(1, 2))[(0,) * (4 - ndim)] if ndim > 2 else x[0, 0]
        for x in (q, k, v)
    ]
    out, lse = numflash.attention(
        *given_arrays, is_causal=True, return_lse=True, layout=layout, impl="reference"
    )
    assert out.shape == (*given_arrays[0].shape[:-1], 5) and lse.shape == given_arrays[0].shape[:-1]
    back = (
        out.reshape(exact.shape)
        if layout == "bhld" or ndim == 2
        else out.reshape(q.shape[0], 6, heads, 5).swapaxes(1, 2)
    )
    np.testing.assert_array_equal(back, exact)
    back = (
        lse.reshape(exact_lse.shape)
        if layout == "bhld" or ndim == 2
        else lse.reshape(q.shape[0], 6, heads).swapaxes(1, 2)
    )
    np.testing.assert_array_equal(back, exact_lse)


@pytest.mark.parametrize(("b", "l", "s"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (2, 0, 0)])
@pytest.mark.parametrize("impl", ["reference", "cpu", "portable"])
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_nothing_to_attend_to(b, l, s, impl, precision):
    arrays = [np.ones(shape, np.float32) for shape in ((b, 2, l, 8), (b, 2, s, 8), (b, 2, s, 5))]
    out, lse = numflash.attention(*arrays, return_lse=True, impl=impl, precision=precision)
    assert (
        out.shape == (b, 2, l, 5)
        and lse.shape == (b, 2, l)
        and not out.any()
        and (lse == -np.inf).all()
    )
    out, lse = numflash.attention(
        *arrays, return_lse=True, impl=impl, precision=precision, sinks=[1.0, 2.0]
    )
    assert s or (not out.any() and (lse == np.array([1.0, 2.0])[None, :, None]).all())


def test_lse_only_on_request():
    q, k, v = qkv()
    assert isinstance(numflash.attention(q, k, v, impl="reference"), np.ndarray)
    assert isinstance(numflash.attention(q, k, v, impl="reference", sinks=[0.0, 1.0]), np.ndarray)


@pytest.mark.parametrize(("l", "s"), TAILS)
@pytest.mark.parametrize("pv", ["int8", "fp32"])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_quantised_call_is_the_float_call(l, s, pv, impl):
    """And on the CPU both are the integer model: to the bit, with float values to rounding."""
    q, k, v = qkv(h=4, hkv=2, l=l, s=s, d=24)
    kept = numflash.quantize_qkv(q, k, v)
    if pv == "fp32":
        kept = (*kept[:2], numflash.quantize(v, "row"))
        v = kept[2].dequantize()
    options = {
        "enable_gqa": True,
        "pv": pv,
        "return_lse": True,
        "is_causal": True,
        "alignment": "lower_right",
    }
    found = numflash.attention_int8(*kept, impl=impl, **options)
    same(found, numflash.attention(q, k, v, precision="int8", impl=impl, **options))
    exact = numflash.attention_int8(*kept, impl="reference", **options)
    if pv == "int8":
        same(found, exact)
    else:
        np.testing.assert_allclose(found[0], exact[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("granularity", ["row", "block", "tensor"])
@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_key_granularities(granularity, smooth, impl):
    q, k, v = qkv(l=40, s=300, d=32)
    out = numflash.attention_int8(
        numflash.quantize(q, granularity),
        numflash.quantize(k, granularity, smooth),
        numflash.quantize(v, "tensor"),
        impl=impl,
    )
    assert errors(out, naive(q, k, v)[0]).relative_l1 < 0.035


def test_quantised_promotion():
    q, k, v = (x[0, 0] for x in qkv(l=5, s=6, d=8))
    out, lse = numflash.attention_int8(
        *numflash.quantize_qkv(q, k, v), return_lse=True, impl="reference"
    )
    assert out.shape == (5, 8) and lse.shape == (5,)


VARLEN = {
    "plain": {},
    "causal": {"is_causal": True},
    "lower_right": {"is_causal": True, "alignment": "lower_right", "window": (4, None)},
    "rest": {
        "softcap": 2.0,
        "alibi_slopes": [0.1, 0.2],
        "sinks": [1.0, 0.5],
        "scale": 0.3,
        "window": (3, 3),
    },
}


@pytest.mark.parametrize(("impl", "precision"), IMPLS)
@pytest.mark.parametrize("name", VARLEN)
def test_varlen_is_the_loop(name, impl, precision):
    lengths_q = [3, 3, 3, 1, 0, 40, 7, 7]
    lengths_k = [5, 5, 2, 9, 4, 33, 0, 7]
    cu_q, cu_k = (np.concatenate([[0], np.cumsum(n)]) for n in (lengths_q, lengths_k))
    q = draw((cu_q[-1], 2, 16))
    k = draw((cu_k[-1], 2, 16), 1)
    v = draw((cu_k[-1], 2, 8), 2)
    options = {"impl": impl, "precision": precision, "return_lse": True, **VARLEN[name]}
    out, lse = numflash.attention_varlen(q, k, v, cu_q, cu_k, **options)
    assert out.shape == (64, 2, 8) and lse.shape == (64, 2)
    for n in range(len(lengths_q)):
        rows = slice(cu_q[n], cu_q[n + 1])
        keys = slice(cu_k[n], cu_k[n + 1])
        one, one_lse = numflash.attention(q[rows], k[keys], v[keys], layout="blhd", **options)
        np.testing.assert_array_equal(out[rows], one)
        np.testing.assert_array_equal(lse[rows], one_lse)


@pytest.mark.parametrize("lengths", [[5, 5, 3], [3, 5, 5], [5, 3, 5], [5, 5, 5]])
@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_varlen_of_lengths_that_are_nearly_equal(lengths, impl):
    """Sequences of one length lie side by side and are not copied.

    Those of other lengths are gathered.
    """
    cu = np.cumsum([0, *lengths])
    q, k, v = (draw((cu[-1], 2, 16), seed) for seed in range(3))
    out = numflash.attention_varlen(q, k, v, cu, cu, is_causal=True, impl=impl)
    for a, b in itertools.pairwise(cu):
        one = naive(*(x[None, a:b].swapaxes(1, 2) for x in (q, k, v)), is_causal=True)[0]
        np.testing.assert_allclose(out[a:b], one[0].swapaxes(0, 1), rtol=1e-4, atol=1e-5)


def test_varlen_of_equal_lengths_that_lie_apart():
    """The short ones share a call of their own, with the long one's rows between them."""
    cu = np.cumsum([0, 5, 300, 5])
    q, k, v = (draw((310, 2, 16), seed) for seed in range(3))
    parts = [
        problem.shape[0]
        for problem, _ in validation.sequences(
            validation.problem(q, k, v, Options(layout="blhd")), cu, cu, "upper_left"
        )
    ]
    assert parts == [1, 2]
    out = numflash.attention_varlen(q, k, v, cu, cu, impl="reference")
    for a, b in itertools.pairwise(cu):
        one = numflash.attention(q[a:b], k[a:b], v[a:b], layout="blhd", impl="reference")
        np.testing.assert_array_equal(out[a:b], one)


def test_varlen_of_nothing():
    x = draw((0, 2, 8))
    assert numflash.attention_varlen(x, x, x, [0], [0], impl="reference").shape == (0, 2, 8)
    assert numflash.attention_varlen(x, x, x, [0, 0], [0, 0], impl="reference").shape == (0, 2, 8)


def test_splitting_keys_and_merging():
    q, k, v = qkv(l=30, s=200, d=32)
    whole = numflash.attention(q, k, v, precision="float32", return_lse=True, impl="reference")
    parts = [
        numflash.attention(q, k[:, :, cut], v[:, :, cut], return_lse=True, impl="reference")
        for cut in (slice(77), slice(77, None))
    ]
    for mine, other in zip(numflash.merge_states(*parts[0], *parts[1]), whole, strict=True):
        np.testing.assert_allclose(mine, other, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 140),
    st.integers(1, 40),
    st.integers(1, 40),
    st.booleans(),
    st.tuples(st.none() | st.integers(0, 50), st.none() | st.integers(0, 50)),
    st.sampled_from(["upper_left", "lower_right"]),
    st.sampled_from([0.0, 3.0]),
    st.integers(0, 99),
)
def test_int8_kernels_give_the_bits_of_the_model(
    b, l, s, d, dv, causal, window, alignment, softcap, seed
):
    arrays = qkv(b=b, h=2, l=l, s=s, d=d, dv=dv, seed=seed)
    options = {
        "is_causal": causal,
        "window": window,
        "alignment": alignment,
        "softcap": softcap,
        "precision": "int8",
        "return_lse": True,
    }
    same(
        numflash.attention(*arrays, **options),
        numflash.attention(*arrays, impl="reference", **options),
    )


@pytest.mark.parametrize("impl", ["reference", "cpu"])
def test_real_activations(impl):
    found = numflash.accuracy(*minilm(), impl=impl, variants=["int8"])
    assert found["int8"].relative_l1 <= 0.009 and found["int8"].worst_row <= 0.06
    found = numflash.accuracy(*minilm(), impl=impl, variants=["int8"], is_causal=True)
    assert found["int8"].relative_l1 <= 0.010 and found["int8"].worst_row <= 0.12
    assert (
        numflash.accuracy(*minilm(), impl="reference", variants=["int8, pv fp32"])[
            "int8, pv fp32"
        ].relative_l1
        <= 0.013
    )


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "limit"), [("int8", 0.03), ("float32", 1e-5)])
def test_160_thousand_keys(precision, limit):
    """Quantised kernels of the field turned to noise here.

    Sums must not overflow, however many keys.
    """
    q, k, v = qkv(h=1, l=3, s=160_000, d=64)
    for queries in (q, 0 * q):  # weights that differ, weights that are all equal
        exact, exact_lse = numflash.attention(
            queries, k, v + 0.5, impl="reference", return_lse=True
        )
        out, lse = numflash.attention(queries, k, v + 0.5, precision=precision, return_lse=True)
        assert errors(out, exact).relative_l1 < limit
        np.testing.assert_allclose(lse, exact_lse, atol=0.02 if precision == "int8" else 1e-4)


CHOICES = {
    "cpu": ("cpu", {}),
    "portable": ("cpu", {"isa": "portable"}),
    "cuda": ("cuda", {"emulator": None}),
    "cuda-emulator": ("cuda", {"emulator": "sm_80"}),
}


@pytest.mark.parametrize("impl", CHOICES)
def test_an_explicit_choice_never_falls_back(impl, monkeypatch):
    """The only backend that is asked is the one that is named, and what it cannot do is an error."""
    asked = []

    def refuse(device):
        def run(problem, results=None, **options):
            asked.append((device, options))
            raise UnsupportedError("cannot run here")

        return run

    for package in (numflash.cpu, numflash.cuda):
        device = package.__name__.removeprefix("numflash.")
        launcher = SimpleNamespace(run=refuse(device))
        monkeypatch.setattr(package, "launch", launcher, raising=False)
    with pytest.raises(UnsupportedError, match="cannot run here"):
        numflash.attention(*qkv(), impl=impl)
    assert asked == [CHOICES[impl]]


def test_a_backend_that_cannot_be_loaded(monkeypatch):
    monkeypatch.delattr(numflash.cuda, "launch", raising=False)
    monkeypatch.setitem(sys.modules, "numflash.cuda.launch", None)
    with pytest.raises(UnsupportedError, match="impl: got 'cuda', which cannot be loaded here"):
        numflash.attention(*qkv(), impl="cuda")


def test_the_reference_never_falls_back(monkeypatch):
    for package in (numflash.cpu, numflash.cuda):
        monkeypatch.setattr(package, "launch", None, raising=False)
    numflash.attention(*qkv(), impl="reference")


def test_import_compiles_and_loads_nothing():
    code = "import sys, numflash; numflash.__all__; dir(numflash); assert 'numba' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_public_names():
    assert set(numflash.__all__) == {*numflash._PUBLIC, "__version__"} and numflash.__version__
    for name in numflash._PUBLIC:
        assert callable(getattr(numflash, name)) and getattr(numflash, name).__doc__, name
    with pytest.raises(AttributeError, match="nonsense"):
        _ = numflash.nonsense


def test_modules_that_are_named_in_docs_are_there_at_once():
    """In a process that has imported nothing else."""
    code = "import numflash; print(numflash.errors.CacheFullError.__name__, numflash.reference.oracle.__name__)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["CacheFullError", "oracle"]
