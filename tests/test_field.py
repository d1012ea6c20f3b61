"""What broke elsewhere, by name, and what must hold whatever the numbers are.

Every precision, every implementation here.

The threads are those that users of other attention libraries opened; nothing here is compared with
the code under test alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import naive, qkv

import numflash
from numflash.interop.arrays import convert, widen

PRECISIONS = {
    "float32": 2e-5,
    "float16": 4e-3,
    "bfloat16": 0.04,
    "int8": 0.15,
}  # largest error, of values N(0, 1)
IMPLS = ("reference", "portable", "cpu")
every_kind = pytest.mark.parametrize(
    ("precision", "impl"), [(p, i) for p in PRECISIONS for i in IMPLS]
)

HISTORY = {
    "SageAttention 23: head_dim 72 gives black video": {"l": 70, "s": 70, "d": 72},
    "sglang 28637: head_dim 80": {"l": 33, "s": 65, "d": 80},
    "flash-attention 1347: head_dim that is a multiple of nothing": {
        "l": 40,
        "s": 70,
        "d": 37,
        "dv": 53,
    },
    "SageAttention 19: one query gives NaN": {"l": 1, "s": 77, "d": 64},
    "one query and one key": {"l": 1, "s": 1, "d": 64},
    "SageAttention 26: wrong where there are more keys than queries": {"l": 40, "s": 150, "d": 64},
    "SageAttention 26: wrong where there are fewer keys than queries": {"l": 150, "s": 40, "d": 64},
    "flash-attention-minimal 2: wrong below one tile": {"l": 5, "s": 7, "d": 16},
    "pytorch 103749: a row that the mask hides gives NaN": {
        "l": 9,
        "s": 20,
        "d": 16,
        "attn_mask": np.arange(9)[:, None] % 3 > 0,
    },
    "flash-attention 2.1: causal with more keys than queries": {
        "l": 6,
        "s": 70,
        "d": 16,
        "is_causal": True,
        "alignment": "lower_right",
    },
    "flash-attention 2.1: causal with fewer keys than queries": {
        "l": 70,
        "s": 6,
        "d": 16,
        "is_causal": True,
        "alignment": "lower_right",
    },
}


def attend(q, k, v, precision, impl, **options):
    """out and lse in float32, from operands that are exact in the precision."""
    stored = "float32" if precision == "int8" else precision
    options = {"precision": precision, "impl": impl, "return_lse": True, **options}
    out, lse = numflash.attention(*(convert(x, stored) for x in (q, k, v)), **options)
    return np.asarray(widen(out), np.float32), lse


def exact_in(precision, *arrays):
    """The arrays rounded to the precision, as float32."""
    if precision not in ("float16", "bfloat16"):
        return arrays
    return tuple(np.asarray(widen(convert(x, precision)), np.float32) for x in arrays)


@every_kind
@pytest.mark.parametrize("name", HISTORY)
def test_history(name, precision, impl):
    case = dict(HISTORY[name])
    operands = exact_in(
        precision, *qkv(b=1, h=2, **{x: case.pop(x) for x in ("l", "s", "d", "dv") if x in case})
    )
    out, lse = attend(*operands, precision, impl, **case)
    want, want_lse = naive(*operands, **case)
    assert np.abs(out - want).max() <= PRECISIONS[precision]
    seen = np.isfinite(want_lse)
    assert np.array_equal(np.isfinite(lse), seen) and not out[~seen].any()
    assert np.abs(lse[seen] - want_lse[seen]).max(initial=0) <= (
        0.08 if precision == "int8" else 1e-4
    )


@every_kind
def test_history_nan_behind_the_mask(precision, impl):
    """pytorch 103963: NaN in a key or value that no row sees comes out."""
    q, k, v = exact_in(precision, *qkv(b=1, h=2, l=20, s=50, d=16))
    want, _ = naive(q, k[:, :, :40], v[:, :, :40])
    k[:, :, 40:], v[:, :, 40:] = np.nan, np.nan
    for hidden in ({"key_lengths": [40]}, {"attn_mask": np.arange(50) < 40}):
        out, _ = attend(q, k, v, precision, impl, **hidden)
        assert np.abs(out - want).max() <= PRECISIONS[precision], hidden


@st.composite
def cases(draw):
    """Operands of any small size, a precision and an implementation."""
    precision = draw(st.sampled_from(list(PRECISIONS)))
    impl = draw(st.sampled_from(IMPLS))
    size = st.one_of(st.integers(1, 20), st.integers(1, 150))
    operands = qkv(
        b=draw(st.integers(1, 2)),
        h=2,
        l=draw(size),
        s=draw(size),
        d=draw(st.integers(1, 80)),
        dv=draw(st.integers(1, 40)),
        seed=draw(st.integers(0, 2**20)),
    )
    return exact_in(precision, *operands), precision, impl


def near(mine, other, precision, times=2.0):
    """Two results that each may be off by the precision's error."""
    for a, b, room in zip(
        mine, other, (PRECISIONS[precision], 0.08 if precision == "int8" else 1e-4), strict=True
    ):
        assert np.abs(a - b).max(initial=0) <= times * room


invariant = settings(max_examples=40, deadline=None)


@invariant
@given(cases())
def test_keys_in_any_order(case):
    (q, k, v), precision, impl = case
    order = np.random.default_rng(0).permutation(k.shape[2])
    near(
        attend(q, k, v, precision, impl),
        attend(q, k[:, :, order], v[:, :, order], precision, impl),
        precision,
    )


@invariant
@given(cases(), st.floats(-20, 20))
def test_a_shift_of_all_scores_moves_the_lse_only(case, shift):
    (q, k, v), precision, impl = case
    out, lse = attend(q, k, v, precision, impl)
    near(
        (out, lse + np.float32(shift)),
        attend(q, k, v, precision, impl, attn_mask=np.full(1, shift, np.float32)),
        precision,
    )


@invariant
@given(cases(), st.floats(0, 1))
def test_keys_split_and_merged(case, where):
    (q, k, v), precision, impl = case
    cut = round(where * k.shape[2])
    parts = [
        attend(q, k[:, :, a], v[:, :, a], precision, impl) for a in (slice(cut), slice(cut, None))
    ]
    near(attend(q, k, v, precision, impl), numflash.merge_states(*parts[0], *parts[1]), precision)


@invariant
@given(cases(), st.integers(0, 200))
def test_a_window_that_grows_becomes_no_window(case, more):
    (q, k, v), precision, impl = case
    wide = max(q.shape[2], k.shape[2]) + more
    for one, other in zip(
        attend(q, k, v, precision, impl),
        attend(q, k, v, precision, impl, window=(wide, wide)),
        strict=True,
    ):
        assert np.array_equal(one, other)


@invariant
@given(cases(), st.integers(0, 150))
def test_a_row_does_not_depend_on_the_tile_that_it_is_in(case, first):
    """Block sizes: rows taken alone stand in other tiles than in the whole, and each implementation
    has blocks of its own.
    """
    (q, k, v), precision, impl = case
    first = min(first, q.shape[2] - 1)
    out, lse = attend(q, k, v, precision, impl)
    near(
        (out[:, :, first:], lse[:, :, first:]),
        attend(q[:, :, first:], k, v, precision, impl),
        precision,
        0 if precision == "int8" else 1,
    )
    for other in IMPLS:
        near((out, lse), attend(q, k, v, precision, other), precision)
