"""Gradients of packed sequences: each one's own, whatever lies beside it."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import draw, naive_gradients

import numflash
from numflash.errors import ArgumentError, ArgumentTypeError, UnsupportedError
from numflash.jit import threads

F = np.float32
# one row, no rows, no keys, long, and some of one length, which are a batch
Q_LENGTHS, K_LENGTHS = (1, 12, 0, 9, 70, 12, 12), (3, 12, 5, 0, 150, 12, 12)
CU_Q, CU_K = (np.concatenate([[0], np.cumsum(x)]) for x in (Q_LENGTHS, K_LENGTHS))
TOTAL_Q, TOTAL_K = int(CU_Q[-1]), int(CU_K[-1])
IMPLS = pytest.mark.parametrize(
    ("impl", "precision"),
    [
        ("auto", "float32"),
        ("portable", "float32"),
        ("reference", "float32"),
        pytest.param("cuda-emulator", "float16", marks=pytest.mark.slow),
    ],
)


def operands(dtype=F):
    shapes = (TOTAL_Q, 4, 16), (TOTAL_K, 2, 16), (TOTAL_K, 2, 24), (TOTAL_Q, 4, 24)
    q, k, v, do = (draw(x, n).astype(dtype) for n, x in enumerate(shapes))
    return do, q, k, v


def sequence(n, *arrays):
    """Arrays of queries, keys, values, gradients of sequence n as (1, H, L, D)."""
    of_queries, of_keys = slice(CU_Q[n], CU_Q[n + 1]), slice(CU_K[n], CU_K[n + 1])
    places = of_queries, of_queries, of_keys, of_keys
    return [x[at].swapaxes(0, 1)[None] for x, at in zip(arrays, places, strict=True)]


@IMPLS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True, "alignment": "lower_right", "softcap": 3.0},
        {"window": (20, 4), "sinks": draw(4, 7)},
    ],
    ids=["plain", "causal, soft cap", "window, sinks"],
)
def test_each_sequence_has_its_own(impl, precision, options):
    """A neighbour's NaN, which fills a batch up, reaches no gradient of another sequence."""
    do, q, k, v = operands(precision)
    spoiled = 1
    given = {**options, "enable_gqa": True, "impl": impl}
    for x, cu in ((q, CU_Q), (k, CU_K)):
        x[cu[spoiled]] = np.nan
    grad_lse = draw((TOTAL_Q, 4), 11)
    out, lse = numflash.attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, **given)
    found = numflash.attention_varlen_backward(
        do, q, k, v, out, lse, CU_Q, CU_K, grad_lse=grad_lse, **given
    )
    for x, like in zip(found, (q, k, v), strict=True):
        assert x.shape == like.shape and x.dtype == like.dtype
    room = 1e-5 if precision == "float32" else 1e-2
    for n, (rows, keys) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True)):
        _, *mine = sequence(n, do, *found)
        if n == spoiled:
            continue
        if not rows or not keys:
            assert not any(x.any() for x in mine)
            continue
        of_lse = grad_lse[CU_Q[n] : CU_Q[n + 1]].T[None]
        want = naive_gradients(*sequence(n, do, q, k, v), grad_lse=of_lse, **options)
        for x, right in zip(mine, want, strict=True):
            np.testing.assert_allclose(x, right, atol=room * max(1, np.abs(right).max()))


def test_sinks_and_functions():
    do, q, k, v = operands()
    sinks, table = draw(4, 7), draw(200, 8)
    given = {"sinks": sinks, "enable_gqa": True, "score_mod": lambda s, b, h, i, j: s + table[j]}
    out, lse = numflash.attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, **given)
    *found, of_sinks = numflash.attention_varlen_backward(
        do, q, k, v, out, lse, CU_Q, CU_K, wrt=("query", "key", "value", "sinks"), **given
    )
    total = np.zeros(4)
    for n, (rows, keys) in enumerate(zip(Q_LENGTHS, K_LENGTHS, strict=True)):
        if not rows:
            continue
        one = sequence(n, do, q, k, v)
        bias = np.broadcast_to(table[:keys], (rows, keys))
        options = {"sinks": sinks, "attn_mask": bias}
        if keys:
            want = naive_gradients(*one, **options)
            for x, right in zip(sequence(n, do, *found)[1:], want, strict=True):
                np.testing.assert_allclose(x, right, atol=1e-5 * max(1, np.abs(right).max()))
        there = numflash.attention(*one[1:], enable_gqa=True, return_lse=True, **options)
        *_, own = numflash.attention_backward(
            *one, *there, enable_gqa=True, wrt=("query", "sinks"), **options
        )
        total += own
    np.testing.assert_allclose(of_sinks, total, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
def test_equal_bits_at_every_number_of_threads():
    do, q, k, v = operands()
    out, lse = numflash.attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, enable_gqa=True)
    found = []
    for n in (1, 2):
        with numflash.num_threads(n):
            found.append(
                numflash.attention_varlen_backward(
                    do, q, k, v, out, lse, CU_Q, CU_K, enable_gqa=True
                )
            )
    assert all(map(np.array_equal, *found))


def test_nothing_to_differentiate():
    x = np.zeros((0, 2, 8), F)
    for cu in ([0], [0, 0]):
        found = numflash.attention_varlen_backward(x, x, x, x, x, x[..., 0], cu, cu)
        assert [g.shape for g in found] == [x.shape] * 3


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ArgumentError, r"grad_out: got shape", {"grad_out": np.zeros((2, 4, 24), F)}),
        (ArgumentError, r"lse: got shape", {"lse": np.zeros((4, TOTAL_Q), F)}),
        (ArgumentError, r"grad_lse: got shape", {"grad_lse": np.zeros(4, F)}),
        (ArgumentError, r"cu_seqlens_q: got", {"cu_seqlens_q": CU_Q[:-1]}),
        (ArgumentTypeError, r"cu_seqlens_k: got dtype", {"cu_seqlens_k": CU_K.astype(F)}),
        (ArgumentError, r"query: got shape", {"query": np.zeros((1, TOTAL_Q, 4, 16), F)}),
        (ArgumentTypeError, r"attn_mask", {"attn_mask": None}),
        (ArgumentError, r"wrt: got 'scores'; allowed of packed", {"wrt": ("scores",)}),
        (ArgumentError, r"wrt: got 'attn_mask'; allowed of packed", {"wrt": ("attn_mask",)}),
        (ArgumentError, r"wrt: got an object of type ndarray; allowed", {"wrt": (CU_Q,)}),
        (ArgumentTypeError, r"wrt: got 'query'; allowed: a tuple", {"wrt": "query"}),
        (ArgumentError, r"wrt: got 'sinks', which is None", {"wrt": ("sinks",)}),
        (UnsupportedError, r"precision: got 'int8'", {"precision": "int8"}),
        (ArgumentError, r"impl: got 'gpu'", {"impl": "gpu"}),
    ],
)
def test_bad_arguments_are_named(error, message, changes):
    do, q, k, v = operands()
    out, lse = numflash.attention_varlen(q, k, v, CU_Q, CU_K, return_lse=True, enable_gqa=True)
    names = "grad_out", "query", "key", "value", "out", "lse", "cu_seqlens_q", "cu_seqlens_k"
    given = dict(zip(names, (do, q, k, v, out, lse, CU_Q, CU_K), strict=True))
    with pytest.raises(error, match=message):
        numflash.attention_varlen_backward(**{**given, **changes}, enable_gqa=True)
