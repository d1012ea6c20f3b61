"""The CUDA backward kernels in the emulator against float64 gradients."""

import ml_dtypes
import numpy as np
import oracles

from numflash import validation
from numflash.cuda import launch_backward
from numflash.validation.options import Options

POISON = 7  # what a launch leaves out stays
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
PLAIN = {
    "window": None,
    "alignment": "upper_left",
    "key_lengths": None,
    "softcap": 0.0,
    "alibi_slopes": None,
    "sinks": None,
}


def gradients(
    q,
    k,
    v,
    do,
    rounded=lambda x: x,
    attn_mask=None,
    is_causal=False,
    scale=None,
    window=(None, None),
    alignment="upper_left",
    key_lengths=None,
    softcap=0.0,
    alibi_slopes=None,
    sinks=None,
):
    """out, lse, dq, dk, dv in float64, whole score matrices in memory.

    `rounded` is applied to weights and their gradients.
    """
    q, k, v, do = (np.asarray(x, np.float64) for x in (q, k, v, do))
    (nb, nh, length, d), (nkv, s) = q.shape, k.shape[1:3]
    group, scale, left, right = (
        nh // nkv,
        d**-0.5 if scale is None else scale,
        *(window or (None, None)),
    )
    keys = k.repeat(group, 1)
    values = v.repeat(group, 1)
    x = np.einsum("bhld,bhsd->bhls", q, keys) * scale
    slope = np.ones_like(x)
    if softcap:
        t = np.tanh(x / softcap)
        x = softcap * t
        slope = 1 - t * t
    count = np.full(nb, s) if key_lengths is None else key_lengths
    i = np.arange(length)[:, None]
    j = np.arange(s)
    centre = i + (count - length if alignment == "lower_right" else 0 * count)[:, None, None, None]
    if alibi_slopes is not None:
        x = x - np.asarray(alibi_slopes)[..., None, None] * abs(centre - j)
    hidden = np.broadcast_to(j >= count[:, None, None, None], x.shape).copy()
    hidden |= j > centre + (0 if is_causal else s + length if right is None else right)
    if left is not None:
        hidden |= j < centre - left
    if attn_mask is not None:
        hidden |= ~attn_mask if attn_mask.dtype == bool else attn_mask == -np.inf
        x = x + (0 if attn_mask.dtype == bool else attn_mask)
    x[hidden] = -np.inf
    if sinks is not None:
        x = np.concatenate(
            [x, np.broadcast_to(np.asarray(sinks)[:, None, None], (*x.shape[:3], 1))], -1
        )
    top = np.where(np.isneginf(x).all(-1), 0, x.max(-1, initial=-np.inf))
    weights = np.exp(x - top[..., None])
    total = weights.sum(-1)
    p = (weights / np.where(total == 0, 1, total)[..., None])[..., :s]
    with np.errstate(divide="ignore"):
        lse = top + np.log(total)
    out = p @ values
    delta = (do * rounded(out)).sum(-1, keepdims=True)
    ds = rounded(p * (do @ values.swapaxes(2, 3) - delta) * slope)
    dk = scale * (ds.swapaxes(2, 3) @ q)
    dv = rounded(p).swapaxes(2, 3) @ do

    def summed(x):
        return x.reshape(nb, nkv, group, *x.shape[2:]).sum(2)

    return out, lse, scale * (ds @ keys), summed(dk), summed(dv)


def case(b=1, h=1, l=40, s=50, d=64, dv=None, hkv=None, dtype="float16", seed=0):
    q, k, v = (x.astype(DTYPES[dtype]) for x in oracles.qkv(b, h, l, s, d, dv, hkv, seed))
    return q, k, v, oracles.draw((b, h, l, dv or d), seed + 3).astype(DTYPES[dtype])


def solve(
    q, k, v, do, out, lse, arch="sm_80", emulator=None, in_place=False, grad_lse=None, **options
):
    """Gradients as arrays of the operands' dtype, and the reports.

    `in_place` : operands are taken as they are, as arrays on a card
    """
    kind = q.dtype
    given = {**PLAIN, **options}
    mask, causal, scale = (
        given.pop(n, x) for n, x in (("attn_mask", None), ("is_causal", False), ("scale", None))
    )
    problem = validation.problem(
        q,
        k,
        v,
        Options(mask, 0.0, causal, scale, True, precision=kind.name, return_lse=True, **given),
    )
    bits = np.uint16 if kind.name == "bfloat16" else np.float16
    given = problem, do.view(bits), out.astype(kind).view(bits), lse.astype(np.float32), arch
    results = None
    if in_place:
        stats = np.full(launch_backward.statistics_shape(problem), np.nan, np.float32)
        results = (*(np.full(x.shape, POISON, bits) for x in (q, k, v)), stats)
    work = launch_backward.float_backward(*given, results, grad_lse)
    found, reports = launch_backward.emulated(work, **(emulator or {}))
    return [x.view(kind) for x in found], reports


def check(shape=None, dtype="float16", arch="sm_80", seed=0, magnify=1, **options):
    """Compiling dominates.

    Cases share kernels where they can (head sizes up to 64, the same group, options and band).
    """
    kind = DTYPES[dtype]
    q, k, v, do = case(**(shape or {}), dtype=dtype, seed=seed)
    q *= kind(magnify)
    out, lse, *expected = gradients(q, k, v, do, **options)
    rough = gradients(q, k, v, do, lambda x: x.astype(kind).astype(np.float64), **options)[2:]
    found, reports = solve(q, k, v, do, out, lse, arch, {"seed": seed}, **options)
    eps = float(ml_dtypes.finfo(kind).eps)
    for mine, right, low in zip(found, expected, rough, strict=True):
        largest = np.abs(right).max(initial=0)
        # the last term: dP - D is 0 for a row that sees one key, but for float32's rounding of both
        budget = 2 * np.abs(low - right).max(initial=0) + eps * (largest + 1e-3) + 2.0**-18
        assert np.abs(mine.astype(np.float64) - right).max(initial=0) <= budget
    nothing = np.isneginf(lse)
    assert not found[0][nothing].any()
    assert not any(
        name.startswith(("atom", "red.")) for report in reports for name in report.opcodes
    )
    assert all(report.shared_conflicts == 0 for report in reports)
    return reports
