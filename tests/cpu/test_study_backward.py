"""Gradients of attention against float64: the closed form, finite differences of the oracle; equal bits on every thread count."""
import numpy as np
import pytest
from oracles import TAILS, draw, naive, qkv

from numflash import attention, reference, validation
from numflash.cpu import target
from numflash.cpu.float_tiles import FLOAT_ISAS
from numflash.cpu.study import backward as tiled
from numflash.cpu.study import backward_plain as plain
from numflash.cpu.threads import limit, most
from numflash.errors import ArgumentError, UnsupportedError

F = np.float32
ISAS = [isa for isa in target.available(target.FLOAT_ISAS) if isa in FLOAT_ISAS]
every_isa = pytest.mark.parametrize("isa", ISAS)


def exact(do, q, k, v, **options):
    """dQ, dK, dV in float64 with the whole score matrix in memory."""
    p = validation.problem(q, k, v, enable_gqa=True, **options)
    nb, nh, nkv, *_ = p.shape
    dq, dk, dv = (np.zeros(x.shape) for x in (q, k, v))
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    for b, h in np.ndindex(nb, nh):
        g = h * nkv // nh
        s = np.where(reference.visible(p, b, h), q[b, h] @ k[b, g].T * p.scale, -np.inf)
        top = s.max(-1, keepdims=True, initial=-1e300)
        w = np.exp(s - top)
        w = w / np.maximum(w.sum(-1, keepdims=True), 1e-300)
        dp = do[b, h] @ v[b, g].T
        ds = w * (dp - (w * dp).sum(-1, keepdims=True)) * p.scale
        dq[b, h], dk[b, g], dv[b, g] = ds @ k[b, g], dk[b, g] + ds.T @ q[b, h], dv[b, g] + w.T @ do[b, h]
    return dq, dk, dv


def close(found, wanted, q, k, v):
    """Within rounding of the largest gradient, and of scores as large as they are here."""
    scores = 1 + np.abs(q).max(initial=0) * np.abs(k).max(initial=0) * q.shape[-1] ** 0.5
    for name, a, b in zip(("dq", "dk", "dv"), found, wanted, strict=True):
        assert a.dtype == F and a.shape == b.shape
        assert np.abs(a - b).max(initial=0) <= 4e-7 * scores * max(1, np.abs(b).max(initial=0)), name


def ours(do, q, k, v, isa, **options):
    out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, **options)
    return tiled.backward(do, q, k, v, out, lse, isa, enable_gqa=True, **options)


@every_isa
@pytest.mark.parametrize("causal", [False, True])
def test_lengths_around_every_block_edge(isa, causal):
    for length, s in [*TAILS, (64, 144), (65, 145), (63, 143), (200, 290)]:
        for alignment in ("upper_left", "lower_right"):
            q, k, v = qkv(l=length, s=s, d=16)
            do = draw(q.shape, 9)
            options = {"is_causal": causal, "alignment": alignment}
            close(ours(do, q, k, v, isa, **options), exact(do, q, k, v, **options), q, k, v)


@every_isa
def test_head_dims_and_groups_of_heads(isa):
    for d, dv in [(1, 1), (3, 2), (16, 40), (40, 16), (64, 64), (72, 80), (128, 128), (100, 33)]:
        q, k, v = qkv(b=2, h=4, hkv=1 if d % 3 else 2, l=70, s=83, d=d, dv=dv)
        do = draw((2, 4, 70, dv), 9)
        close(ours(do, q, k, v, isa, is_causal=True), exact(do, q, k, v, is_causal=True), q, k, v)


@every_isa
def test_windows_key_lengths_scale_and_long_sequences(isa):
    for length, s, options in [(150, 400, {"window": (17, 9)}), (90, 300, {"key_lengths": np.array([0, 7])}),
                               (130, 130, {"scale": 2.0, "is_causal": True}), (300, 1000, {"window": (None, 3)}), (9, 0, {})]:
        q, k, v = qkv(b=2, l=length, s=s, d=16)
        do = draw(q.shape, 9)
        close(ours(do, q, k, v, isa, **options), exact(do, q, k, v, **options), q * options.get("scale", 1) * 4, k, v)


def test_a_gradient_is_what_the_oracle_changes_by():
    q, k, v = (x.astype(np.float64) for x in qkv(h=2, hkv=1, l=5, s=7, d=3))
    do = draw(q.shape, 9)
    found = ours(do, *(x.astype(F) for x in (q, k, v)), None, is_causal=True, alignment="lower_right")
    for x, gradient in zip((q, k, v), found, strict=True):
        for at in np.ndindex(x.shape):
            old, moved = x[at], []
            for step in (1e-6, -1e-6):
                x[at] = old + step
                moved.append((do * naive(q, k, v, is_causal=True, alignment="lower_right")[0]).sum())
            x[at] = old
            assert abs((moved[0] - moved[1]) / 2e-6 - gradient[at]) < 2e-6 * max(1, abs(gradient[at]))


@pytest.mark.parametrize("causal", [False, True])
def test_the_plain_kernel(causal):
    for shape in [{"l": 1}, {"l": 33, "s": 65, "d": 7}, {"b": 2, "h": 4, "hkv": 2, "l": 70, "s": 31},
                  {"l": 65, "s": 100, "d": 40, "dv": 3}]:
        q, k, v = qkv(**shape)
        do = draw((*q.shape[:3], v.shape[3]), 9)
        out, lse = attention(q, k, v, enable_gqa=True, return_lse=True, is_causal=causal)
        close(plain.backward(do, q, k, v, out, lse, causal), exact(do, q, k, v, is_causal=causal), q, k, v)


def test_what_nobody_sees_has_no_gradient_and_huge_scores_are_harmless():
    q, k, v = qkv(l=40, s=90, d=16)
    do = draw(q.shape, 9)
    dq, dk, dv = ours(do, q, k[:, :, :10], v[:, :, :10], None, is_causal=True, alignment="lower_right")
    assert not dq[:, :, :30].any() and dq[:, :, 31:].any()
    _, dk, dv = ours(do, q, k, v, None, key_lengths=np.array([33]))
    assert not dk[:, :, 33:].any() and not dv[:, :, 33:].any() and dv[:, :, :33].all()
    for factor in (-1e4, 1e4):                  # hidden scores far above, all scores far below the row's LSE of 0
        found = ours(do, q * F(factor), k, v, None, is_causal=True)
        assert all(np.isfinite(x).all() for x in found)


def test_equal_bits_at_every_thread_count_and_run():
    q, k, v = qkv(b=1, h=3, hkv=1, l=300, s=500, d=16)
    do = draw(q.shape, 9)
    first = ours(do, q, k, v, None)
    for threads in (1, most(), most()):
        with limit(threads):
            assert all(np.array_equal(a, b) for a, b in zip(first, ours(do, q, k, v, None), strict=True))


def test_strides_of_every_kind():
    q, k, v = qkv(b=2, h=3, l=50, s=60, d=24)
    do = draw(q.shape, 9)
    first = ours(do, q, k, v, None)
    turned = [np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3) for x in (do, q, k, v)]
    assert all(np.array_equal(a, b) for a, b in zip(first, ours(*turned, None), strict=True))


def test_bad_arguments_are_named():
    q, k, v = qkv(l=9, d=8)
    out, lse = attention(q, k, v, return_lse=True)
    with pytest.raises(ArgumentError, match=r"grad_out: got float32 of shape \(9,"):
        tiled.backward(np.zeros((9, 8), F), q, k, v, out, lse)
    with pytest.raises(ArgumentError, match="lse: got float64"):
        tiled.backward(out, q, k, v, out, lse.astype(np.float64))
    with pytest.raises(UnsupportedError, match="softcap = 3"):
        tiled.backward(out, q, k, v, out, lse, softcap=3.0)
    with pytest.raises(UnsupportedError, match="no gradient with mask"):
        tiled.backward(out, q, k, v, out, lse, attn_mask=np.ones((9, 9), bool))
    with pytest.raises(ArgumentError, match=r"isa.*mmx"):
        tiled.backward(out, q, k, v, out, lse, "mmx")
