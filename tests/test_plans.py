"""Equal calls after the first.

The same results, the same errors, nothing left over from other calls.
"""

import threading
import weakref
from dataclasses import replace

import numba
import numpy as np
import pytest
from oracles import naive, qkv

import numflash
from numflash.cpu import launch, launch_float
from numflash.dispatch import plan_store
from numflash.errors import ArgumentError, NumflashError
from numflash.jit import scratch
from numflash.validation import problem
from numflash.validation.options import Options

Q, K, V = qkv(b=2, h=4, l=37, s=53, d=24, hkv=2)


def both(*arrays, **options):
    """The first call's result, after the second's has proved equal."""
    plan_store._plans.plans.clear()
    first = numflash.attention(*arrays, **options)
    assert len(plan_store._plans.plans) == 1
    second = numflash.attention(*arrays, **options)
    pairs = [(first, second)] if isinstance(first, np.ndarray) else zip(first, second, strict=True)
    for a, b in pairs:
        assert np.array_equal(a, b) and a.dtype == b.dtype
    return first


@pytest.mark.parametrize("precision", ["float32", "float16", "bfloat16", "int8"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"window": (5, 2), "alignment": "lower_right"},
        {"softcap": 2.0, "scale": 0.3},
    ],
    ids=str,
)
def test_an_equal_call_gives_the_same_bits(precision, options):
    out = both(Q, K, V, enable_gqa=True, precision=precision, **options)
    want, _ = naive(Q, K, V, **options)
    assert abs(out - want).sum() < {"float32": 1e-5}.get(precision, 0.05) * abs(want).sum()


DRAW = np.random.default_rng(5)
B, H, L, S = 2, 4, 37, 53
# options that are arrays, each twice: of equal shapes, with other numbers
ARRAYS = {
    "mask": [{"attn_mask": DRAW.random((B, 1, L, S)) < p} for p in (0.7, 0.3)],
    "padding": [{"attn_mask": np.arange(S) < DRAW.integers(1, S, (B, 1, 1, 1))} for _ in "ab"],
    "bias of one key": [{"attn_mask": DRAW.standard_normal((H, L, 1))} for _ in "ab"],
    "bias": [{"attn_mask": DRAW.standard_normal((B, H, L, S)).astype(np.float32)} for _ in "ab"],
    "half bias": [{"attn_mask": DRAW.standard_normal((L, S)).astype(np.float16)} for _ in "ab"],
    "turned mask": [{"attn_mask": np.asfortranarray(DRAW.random((L, S)) < 0.6)} for _ in "ab"],
    "lengths": [{"key_lengths": np.array(x)} for x in ([53, 20], [7, 0])],
    "more keys": [{"key_lengths": np.array(x)} for x in ([3, 0], [53, 20])],
    "lengths and diagonal": [
        {"key_lengths": np.array(x), "alignment": "lower_right", "is_causal": True}
        for x in ([40, 50], [53, 12])
    ],
    "slopes": [{"alibi_slopes": DRAW.random(shape)} for shape in ((H,), (B, H))],
    "sinks": [{"sinks": DRAW.standard_normal(H)} for _ in "ab"],
    "all": [
        {
            "attn_mask": DRAW.random((B, 1, L, S)) < 0.8,
            "key_lengths": DRAW.integers(1, S, B),
            "alibi_slopes": DRAW.random(H),
            "sinks": DRAW.standard_normal(H),
            "softcap": 3.0,
        }
        for _ in "ab"
    ],
}


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_among_the_options_are_looked_at_in_every_call(name, precision):
    """A plan of the first ones, then calls with the others and the first: as calls without plans."""
    options = {"enable_gqa": True, "precision": precision, "return_lse": True}
    want = []
    for given in ARRAYS[name]:
        plan_store._plans.plans.clear()
        want.append(numflash.attention(Q, K, V, **options, **given))
        assert len(plan_store._plans.plans) == 1
        out, lse = naive(Q, K, V, **given)
        seen = np.isfinite(lse)
        limit = {"float32": 1e-5}.get(precision, 0.05) * abs(out).sum()
        assert abs(want[-1][0] - out).sum() < limit
        assert np.array_equal(seen, np.isfinite(want[-1][1]))
        assert abs(want[-1][1][seen] - lse[seen]).max() < {"float32": 1e-5}.get(precision, 0.1)
    plan_store._plans.plans.clear()
    for n in (0, 1, 0, 1):
        found = numflash.attention(Q, K, V, **options, **ARRAYS[name][n])
        for a, b in zip(found, want[n], strict=True):
            np.testing.assert_array_equal(a, b)
    del options["return_lse"]
    for n in (0, 0):
        found = numflash.attention(Q, K, V, **options, **ARRAYS[name][n])
        np.testing.assert_array_equal(found, want[n][0])


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_no_plan_keeps_a_mask(precision):
    mask = np.ones((L, S), bool)
    for _ in range(2):
        numflash.attention(Q, K, V, mask, enable_gqa=True, precision=precision)
    kept = weakref.ref(mask)
    del mask
    assert kept() is None


def test_wrong_arrays_among_the_options_of_an_equal_call():
    """Refused as in a first call, in the same words."""
    good = {
        "attn_mask": np.ones((L, S), bool),
        "key_lengths": np.array([3, 5]),
        "alibi_slopes": np.ones(H),
        "sinks": np.ones(H),
    }
    frozen = np.ones((B, 1, L, S), bool)
    frozen.flags.writeable = False
    wrong = (
        ("attn_mask", True),
        ("attn_mask", np.ones((L, S - 1), bool)),
        ("attn_mask", np.ones((1, B, 1, L, S), bool)),
        ("attn_mask", np.ones((L, S), np.int8)),
        ("attn_mask", object()),
        ("key_lengths", np.array([3, S + 1])),
        ("key_lengths", np.array([3.0, 5.0])),
        ("key_lengths", np.array([3])),
        ("alibi_slopes", np.full(H, np.nan)),
        ("sinks", np.ones(H + 1)),
        ("sinks", 1.0),
    )
    for name, value in wrong:
        words = []
        for planned in (False, True):
            plan_store._plans.plans.clear()
            if planned:
                numflash.attention(Q, K, V, enable_gqa=True, **good)
                numflash.attention(Q, K, V, enable_gqa=True, **good | {"attn_mask": frozen})
            with pytest.raises(NumflashError, match=name) as error:
                numflash.attention(Q, K, V, enable_gqa=True, **good | {name: value})
            words.append((type(error.value), str(error.value).split(" at 0x")[0]))
        assert words[0] == words[1]


@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_masks_of_rows_that_a_plan_cannot_compute(precision):
    """Rows again in float64, scores beyond int16: with the call's own mask, not the first one's."""
    q, k, v = qkv(b=1, h=2, l=9, s=150, d=24)
    masks = [DRAW.random((1, 1, 9, 150)) < 0.5 for _ in range(3)]
    numflash.attention(q, k, v, masks[0], precision=precision)
    for mask in masks[1:]:
        for factor in (1e6, 1e36):
            given = q * np.float32(factor), k, v, mask
            got = numflash.attention(*given, precision=precision)
            want = numflash.attention(*given, precision=precision, impl="reference")
            np.testing.assert_allclose(got, want, atol=1e-5 if precision == "float32" else 0)


def test_options_that_leave_no_plan():
    """A list, an array of one number: allowed, but not to look up by."""
    for options, plain in (
        ({"window": [5, 2]}, {"window": (5, 2)}),
        ({"scale": np.array(0.3)}, {"scale": 0.3}),
    ):
        out = numflash.attention(Q, K, V, enable_gqa=True, **options)
        assert np.array_equal(out, numflash.attention(Q, K, V, enable_gqa=True, **plain))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_sequences_cut_alike(precision, monkeypatch):
    """Packed sequences: equal bits, other cuts are other calls, also of the same array."""
    q, k, v = (x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in (Q, K, V))
    options = {"is_causal": True, "alignment": "lower_right", "enable_gqa": True}
    options |= {"return_lse": True, "precision": precision}
    kept = []
    keep = plan_store.PlanCache.keep
    monkeypatch.setattr(
        plan_store.PlanCache, "keep", lambda *args: kept.append(args[1]) or keep(*args)
    )
    cu_q, cu_k = np.array([0, 9, 9, 18, 74]), np.array([0, 30, 31, 61, 106])
    for _ in range(2):
        plan_store._plans.plans.clear()
        first = numflash.attention_varlen(q, k, v, cu_q, cu_k, **options)
        again = numflash.attention_varlen(q, k, v, cu_q, cu_k, **options)
        for a, b in zip(first, again, strict=True):
            assert np.array_equal(a, b)
        cu_q[1:3] += 1
    assert len(kept) == 2
    # neighbours of one length, whose rows are written where they belong
    neighbours = np.array([0, 37, 74]), np.array([0, 53, 106])
    first, again = (numflash.attention_varlen(q, k, v, *neighbours, **options) for _ in "ab")
    assert all(map(np.array_equal, first, again))
    with pytest.raises(ArgumentError, match="cu_seqlens_q"):
        numflash.attention_varlen(q, k, v, cu_q[:-1], cu_k, **options)
    with pytest.raises(ArgumentError, match="key"):
        numflash.attention_varlen(q, k[:, :1, :5], v, cu_q, cu_k, **options)


def test_arrays_of_any_kind():
    """Layouts, dimensions, dtypes, strides, read-only memory, foreign byte order; the lse too."""
    want, want_lse = naive(Q, K, V)
    options = {"enable_gqa": True, "return_lse": True}
    frozen = Q.copy()
    frozen.flags.writeable = False
    for query in (Q, frozen, np.asfortranarray(Q), Q.astype(">f4"), np.repeat(Q, 2, -1)[..., ::2]):
        for _ in range(2):  # one plan serves several of them
            out, lse = numflash.attention(
                query, K.astype(query.dtype), V.astype(query.dtype), **options
            )
            np.testing.assert_allclose(out, want, atol=1e-5)
            np.testing.assert_allclose(lse, want_lse, atol=1e-5)
    for layout in (lambda x: x.astype(np.float64), lambda x: x.astype(np.float16)):
        out, _ = both(*map(layout, (Q, K, V)), **options)
        assert out.dtype == (np.float16 if layout(Q).dtype == np.float16 else np.float32)
        np.testing.assert_allclose(out, want, atol=5e-3)
    swapped = [np.ascontiguousarray(x.swapaxes(1, 2)) for x in (Q, K, V)]
    out, lse = both(*swapped, layout="blhd", **options)
    assert out.flags.c_contiguous
    assert numflash.attention(*swapped, layout="blhd", **options)[0].flags.c_contiguous
    np.testing.assert_allclose(out.swapaxes(1, 2), want, atol=1e-5)
    np.testing.assert_allclose(lse.swapaxes(1, 2), want_lse, atol=1e-5)
    for n in (0, (0, 0)):
        out = both(Q[n], K[n], V[n], enable_gqa=True)
        np.testing.assert_allclose(out, want[n], atol=1e-5)


@pytest.mark.parametrize(
    "wrong",
    [
        {"is_causal": 1},
        {"enable_gqa": 1.0},
        {"window": (True, None)},
        {"scale": True},
        {"impl": "gpu"},
    ],
    ids=str,
)
def test_options_that_are_equal_but_not_allowed(wrong):
    """1 == True == 1.0: a plan for one of them is none for the others."""
    for good in ({}, {"is_causal": True}, {"window": (1, None)}, {"scale": 1.0}):
        numflash.attention(Q, K, V, **{"enable_gqa": True, **good})
    with pytest.raises(NumflashError, match=next(iter(wrong))):
        numflash.attention(Q, K, V, **{"enable_gqa": True, **wrong})


def test_what_scratch_memory_holds_does_not_matter(monkeypatch):
    """Every byte is 0xFF, NaN as a float, before each call."""
    take = scratch.Scratch.take

    def poisoned(self, nbytes):
        room = take(self, nbytes)
        room.array[:] = 0xFF
        return room

    cases = [(precision, dv) for precision in ("float32", "bfloat16", "int8") for dv in (24, 64)]
    arrays = {dv: qkv(b=2, h=4, l=37, s=53, d=24, dv=dv) for dv in (24, 64)}

    def solved():
        yield from (numflash.attention(*arrays[dv], precision=p, is_causal=True) for p, dv in cases)
        for rows in (5, 20, 37):
            q, k, v = qkv(b=2, h=4, l=rows, s=53, d=24)
            out, lse = numflash.attention(q, k, v, return_lse=True)
            yield from numflash.attention_backward(v[:, :, :rows], q, k, v, out, lse)

    want = list(solved())
    monkeypatch.setattr(scratch.Scratch, "take", poisoned)
    for found, expected in zip(solved(), want, strict=True):
        assert np.array_equal(found, expected)


def test_rows_that_float32_cannot_hold():
    q = Q.copy()
    q[0, 1, 5], q[1, 0, 3] = 1e30, -1e30
    plain = both(q, K * 1e10, V, enable_gqa=True)
    want, _ = naive(q, K * 1e10, V)
    np.testing.assert_allclose(plain, want, atol=1e-5)


@pytest.mark.parametrize("layout", ["bhld", "blhd"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["plain", "unheld", "few rows", "sinks"])
def test_bfloat16_results_are_those_of_float32_rounded(precision, layout, case):
    """Kernels round where they store; rows that float32 does not hold are written again."""
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    q, k, v = (x.astype(bfloat16) for x in qkv(b=2, h=3, l=40, s=70, d=24))
    if case == "unheld":
        k[0, 1, 5], v[1, 0, 7, 2] = bfloat16(1e38), bfloat16(np.nan)
    if case == "few rows":
        q = q[:, :, :2]
    if layout == "blhd":
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    options = {"precision": precision, "layout": layout}
    if case == "sinks":
        options["sinks"] = np.arange(3, dtype=np.float32)
    with np.errstate(all="ignore"):
        floats = numflash.attention(*(x.astype(np.float32) for x in (q, k, v)), **options)
    want = floats.astype(bfloat16)
    for _ in range(2):
        out = numflash.attention(q, k, v, **options)
        assert out.dtype == bfloat16
        same = out.view(np.uint16) == want.view(np.uint16)
        assert (same | np.isnan(floats) & np.isnan(out.astype(np.float32))).all()


def test_a_negative_scale_is_held_by_float32(monkeypatch):
    """The largest score times a negative scale is the smallest: no maximum to subtract."""
    q, k, v = qkv(b=1, h=1, l=12, s=64, d=16, dv=16)
    rows = launch_float.run_rows

    def in_float32(problem, options, double, *arrays):
        assert not double
        rows(problem, options, double, *arrays)

    monkeypatch.setattr(launch_float, "run_rows", in_float32)
    out = numflash.attention(q * 40, k, v, scale=-1.0)
    np.testing.assert_allclose(out, naive(q * -40, k, v, scale=1.0)[0], atol=1e-3)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_memory_of_a_long_sequence(precision):
    """Beyond inputs and output: 100 MB are allowed at 32768 keys."""
    x = np.broadcast_to(np.float32(1), (1, 1, 32768, 128))
    found = problem(x, x, x, Options(precision="int8" if precision == "int8" else "float32"))
    if precision == "bfloat16":
        bits = np.broadcast_to(np.uint16(0x3F80), x.shape)
        found = replace(found, query=bits, key=bits, value=bits, precision=precision)
    plan = launch.runner(found)
    if plan is None:
        pytest.skip("the portable kernels have no plans")
    assert plan.layout.nbytes < 100e6


def test_memory_that_no_address_reaches():
    x = np.broadcast_to(np.float32(1), (1, 1, 2**57, 1))
    with pytest.raises(MemoryError):
        numflash.attention(Q[:1, :1, :1, :1], x, x)


def test_plans_are_bounded(monkeypatch):
    monkeypatch.setattr("numflash.tiling.plan_cache.MOST", 3)
    plan_store._plans.plans.clear()
    for n in range(1, 8):
        numflash.attention(Q[:, :, :n], K, V, enable_gqa=True)
    assert len(plan_store._plans.plans) == 3
    for n in range(1, 8):
        out = numflash.attention(Q[:, :, :n], K, V, enable_gqa=True)
        np.testing.assert_allclose(out, naive(Q, K, V)[0][:, :, :n], atol=1e-5)


def test_scratch_memory_is_bounded_and_each_threads_own():
    own = scratch.Scratch()
    a = own.take(1000)
    b = own.take(1000)  # as from a signal handler, within the other call
    assert a.address != b.address and a.address % scratch.LINE == 0
    own.give(a)
    assert own.take(500) is a
    large = own.take(scratch.KEPT + 1)
    own.give(large)
    assert own.room is not large
    own.give(b)
    seen = []
    thread = threading.Thread(target=lambda: seen.append(own.room))
    thread.start()
    thread.join()
    assert seen == [None]


def test_threads_share_a_plan():
    """Several callers at once, and any number of threads below them: the same bits."""
    arrays = qkv(b=1, h=8, l=200, s=300, d=64)
    want = numflash.attention(*arrays)
    before = numba.get_num_threads()
    failures = []

    def call(threads):
        numba.set_num_threads(threads)
        for _ in range(20):
            if not np.array_equal(numflash.attention(*arrays), want):
                failures.append(threads)
        if numba.get_num_threads() != threads:
            failures.append("threads")

    callers = [threading.Thread(target=call, args=(1 + n % before,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not failures and numba.get_num_threads() == before


@pytest.mark.parametrize("ndim", [4, 3, 2])
@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True, "return_lse": True}, {"window": (5, 2), "alignment": "lower_right"}],
    ids=str,
)
def test_quantised_operands_leave_a_plan(ndim, options):
    q, k, v = (x[(0,) * (4 - ndim)] for x in qkv(b=1, h=2, l=37, s=153, d=24, dv=40))
    operands = numflash.quantize_qkv(q, k, v)
    plan_store._plans.plans.clear()
    first = numflash.attention_int8(*operands, **options)  # their parts are looked at
    want = numflash.attention_int8(*operands, impl="reference", **options)
    for _ in range(2):
        again = numflash.attention_int8(*operands, **options)
        for x in (first, again):
            for a, b in zip(x, want, strict=True):
                np.testing.assert_array_equal(a, b)
    assert len(plan_store._plans.plans) == 1


def test_strided_finer_digits_of_quantised_operands():
    """`low` is read by the plan of an equal call as contiguous memory, so that others take none."""
    q, k, v = numflash.quantize_qkv(*qkv(b=1, h=2, l=7, s=13, d=24))
    want = numflash.attention_int8(q, k, v)
    for name in ("key", "value"):
        given = {"query": q, "key": k, "value": v}
        low = np.repeat(given[name].low, 2, -1)[..., ::2]
        given[name] = replace(given[name], low=low)
        for _ in range(3):
            np.testing.assert_array_equal(numflash.attention_int8(**given), want)
            numflash.attention_int8(q, k, v)


@pytest.mark.parametrize("name", ["mask", "bias", "padding", "lengths", "slopes", "sinks", "all"])
def test_arrays_beside_quantised_operands(name):
    operands = numflash.quantize_qkv(*qkv(b=B, h=H, l=L, s=S, d=24))
    numflash.attention_int8(*operands)
    for given in (*ARRAYS[name], *ARRAYS[name]):
        found = numflash.attention_int8(*operands, return_lse=True, **given)
        want = numflash.attention_int8(*operands, return_lse=True, impl="reference", **given)
        np.testing.assert_array_equal(found[0], want[0])
        np.testing.assert_array_equal(found[1], want[1])


def test_quantised_operands_without_a_plan():
    """Scales of another kind, and rows that were not finite."""
    q, k, v = qkv(b=1, h=2, l=7, s=13, d=24)
    k[0, 0, 3, 5] = np.nan
    plain = numflash.quantize_qkv(q, k, v)
    other = plain[0], plain[1], numflash.quantize(v, "tensor")
    for operands, options in (
        (plain, {}),
        (other, {}),
        (other, {"key_lengths": [3]}),
        (other, {"softcap": 2.0}),
    ):
        plan_store._plans.plans.clear()
        for _ in range(3):
            got = numflash.attention_int8(*operands, **options)
            want = numflash.attention_int8(*operands, impl="reference", **options)
            np.testing.assert_array_equal(got, want)
        assert not plan_store._plans.plans
    for wrong in ({"is_causal": 1}, {"scale": True}, {"window": (True, None)}, {"layout": "bhld"}):
        q, k, v = numflash.quantize_qkv(*qkv(b=1, h=2, l=7, s=13, d=24))
        numflash.attention_int8(q, k, v)
        numflash.attention_int8(q, k, v, is_causal=True, scale=1.0, window=(1, None))
        with pytest.raises(NumflashError, match=next(iter(wrong))):
            numflash.attention_int8(q, k, v, **wrong)


def test_huge_scales_of_a_planned_call():
    """Equal shapes, but scores that leave int32, or float32: what the plan cannot compute."""
    q, k, v = qkv(b=1, h=2, l=7, s=150, d=24)
    numflash.attention(q, k, v, precision="int8")
    for factor in (1e6, 1e17, 1e36):
        got = numflash.attention(q * np.float32(factor), k, v, precision="int8")
        want = numflash.attention(q * np.float32(factor), k, v, precision="int8", impl="reference")
        np.testing.assert_array_equal(got, want)
    operands = numflash.quantize_qkv(q, k, v)
    numflash.attention_int8(*operands)
    numflash.attention_int8(*operands)
    for factor in (1e6, 1e33):
        huge = numflash.QuantizedTensor(
            operands[0].data, operands[0].scale * np.float32(factor), "row"
        )
        for _ in range(2):
            got = numflash.attention_int8(huge, *operands[1:])
        want = numflash.attention_int8(huge, *operands[1:], impl="reference")
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("query", "keys", "largest"),
    [
        (1e31, 1e-30, 1),  # a scale that is cut before products are scaled
        (1e3, 1e-6, 1e4),  # one key whose scores leave int32, beside others near 0
    ],
)
def test_quantised_operands_with_extreme_scales(query, keys, largest):
    q, k, v = (
        np.random.default_rng(n).standard_normal((1, 2, 150, 32), np.float32) for n in range(3)
    )
    k *= keys
    if largest > 1:
        q = np.abs(q)
        k[:, :, 7] = largest
    operands = (
        numflash.quantize(q * np.float32(query)),
        numflash.quantize(k),
        numflash.quantize(v, "channel"),
    )
    for _ in range(2):  # the second call finds a plan
        got = numflash.attention_int8(*operands, return_lse=True)
        want = numflash.attention_int8(*operands, return_lse=True, impl="reference")
        np.testing.assert_array_equal(got[0], want[0])
        np.testing.assert_array_equal(got[1], want[1])
