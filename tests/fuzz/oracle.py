"""What is right, in float64, with the error that rounding may leave.

Written for the fuzzer alone, it shares no code with numflash.

Scores of every head are held at once. A bound is worked out for every number of a result, from how
far each score can be off (E): weights then change by factors up to exp(2 E), so an output moves by
no more than expm1(2 E) sum(p |v - out|).
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

LOG2E = np.log2(np.e)
INT8_LIMIT = 2.0**28 / 256 / LOG2E  # precision "int8" clips scores here
KEY_BLOCK = 128
FIRST, FINER = 4, 32  # keys and values of a sequence that are rounded to 1/32 of a step
LARGEST = float(np.finfo(np.float32).max)
TINY = 2.0**-112  # float weights below may be 0, and so may what bfloat16 has below 2**-126
NO_SCALE = 2.0**-100  # peaks below count as zero in the integer pipeline
EPS = 2.0**-24
BFLOAT16 = 2.0**-8  # a rounding, or two of them
FLOAT_VALUES = ("bf16", "fp32")  # pv of INT8 attention whose values are floats
SUBNORMAL = 2.0**-149  # float32's smallest step
EPS_OF = {"float32": 2.0**-24, "float64": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass
class Expected:
    """out (B, H, L, Dv) and lse (B, H, L), how far they may be off, and which entries nothing is
    said about.
    """

    out: np.ndarray
    lse: np.ndarray
    out_error: np.ndarray
    lse_error: np.ndarray
    p: np.ndarray  # (B, H, L, S) weights of a row, summing to one
    scores: np.ndarray  # (B, H, L, S), -inf where hidden
    error: np.ndarray  # (B, H, L, S) how far they may be off
    slope: np.ndarray | float  # what a softcap makes of a small change of a score


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """The numbers as `dtype` stores them, in float64."""
    with np.errstate(over="ignore", under="ignore"):
        x = np.asarray(x)
        if dtype == "bfloat16":
            x = x.astype(np.float32).astype(ml_dtypes.bfloat16)
        elif dtype == "float16":
            x = x.astype(np.float16)
        else:
            x = x.astype(np.float32)
        return x.astype(np.float64)


def seen_keys(shape: tuple[int, ...], o: dict) -> tuple[np.ndarray, np.ndarray]:
    """(B, H, L, S) bool which keys a row sees, and (B, 1, L, S) how far they are from the diagonal."""
    b, h, length, s = shape
    counts = np.asarray(o.get("key_lengths", [s] * b), np.int64).reshape(b, 1, 1, 1)
    diagonal = counts - length if o.get("alignment") == "lower_right" else np.zeros_like(counts)
    away = np.arange(s) - (np.arange(length)[:, None] + diagonal)
    left, right = o.get("window") or (None, None)
    right = 0 if o.get("is_causal") else right
    seen = np.broadcast_to(np.arange(s) < counts, (b, h, length, s)).copy()
    if left is not None:
        seen &= away >= -left
    if right is not None:
        seen &= away <= right
    mask = o.get("attn_mask")
    if mask is not None:
        seen &= mask if mask.dtype == bool else np.asarray(mask, np.float64) != -np.inf
    return seen, away


def changed(s: np.ndarray, error: np.ndarray, seen: np.ndarray, away: np.ndarray, o: dict):
    """Scores and their error after softcap, ALiBi and bias."""
    cap = o.get("softcap", 0.0)
    if cap:
        tanh = np.tanh(s / cap)
        s = cap * tanh
        error = np.minimum(error, 2 * cap) + 4e-6 * cap + 8 * EPS * np.abs(s)
    slopes = o.get("alibi_slopes")
    if slopes is not None:
        slopes = np.broadcast_to(np.asarray(slopes, np.float64), seen.shape[:2])[..., None, None]
        s = s - slopes * np.abs(away)
        error = error + 4 * EPS * np.abs(slopes * away)
    mask = o.get("attn_mask")
    if mask is not None and mask.dtype != bool:
        with np.errstate(over="ignore"):
            bias = np.where(seen, np.asarray(mask, np.float32).astype(np.float64), 0)
        s = s + bias
        error = error + 4 * EPS * np.abs(bias)
    return np.where(seen, s, -np.inf), np.where(seen, error + 4 * EPS * np.abs(s), 0)


def heads(x: np.ndarray, h: int) -> np.ndarray:
    """Keys or values of every query head."""
    return np.repeat(x, h // x.shape[1], 1) if x.shape[1] != h else x


def product(p: np.ndarray, v: np.ndarray) -> np.ndarray:
    """p.v where a weight of 0 hides NaN and infinity."""
    finite = np.isfinite(v)
    out = p @ np.where(finite, v, 0)
    if not finite.all():
        some = (p > 0).astype(np.float64)
        up, down, nan = (some @ kind for kind in (v == np.inf, v == -np.inf, np.isnan(v)))
        out = (
            out
            + np.where(up > 0, np.inf, 0)
            - np.where(down > 0, np.inf, 0)
            + np.where(nan > 0, np.nan, 0)
        )
    return out


def softmax(s: np.ndarray, sinks: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Weights that sum to one with the sinks' share, and the log-sum-exp."""
    top = s.max(-1, keepdims=True, initial=-np.inf)
    if sinks is not None:
        sinks = np.asarray(sinks, np.float64)[None, :, None, None]
        top = np.maximum(top, sinks)
    shift = np.where(top == -np.inf, 0, top)
    p = np.where(s == -np.inf, 0, np.exp(s - shift))
    total = p.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks - shift)
    lse = (shift + np.log(total))[..., 0]
    return p / np.where(total == 0, 1, total), lse


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: dict, precision: str = "float32"
) -> Expected:
    """Float attention of operands (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv) that are rounded
    already.
    """
    b, h, length, d = q.shape
    k = heads(k, h)
    v = heads(v, h)
    scale = d**-0.5 if o.get("scale") is None else o["scale"]
    seen, away = seen_keys((b, h, length, k.shape[2]), o)
    with np.errstate(all="ignore"):
        s = (q @ k.swapaxes(2, 3)) * scale
        size = (np.abs(q) @ np.abs(k).swapaxes(2, 3)) * abs(scale)
        flushed = 0.0  # bfloat16 instructions take subnormal operands for zeros
        if precision == "bfloat16":
            flushed = d * TINY * (np.abs(q).max(initial=0) + np.abs(k).max(initial=0)) * abs(scale)
        error = (d + 6) * EPS * size + flushed
        if "functions" in o:  # of flex_attention
            s, error, seen = o["functions"](s, error, seen)
        s, error = changed(s, error, seen, away, o)
        p, lse = softmax(s, o.get("sinks"))
        weight = 2 * EPS_OF["bfloat16"] if precision == "bfloat16" else (k.shape[2] + 40) * EPS
        out = product(p, v)
        # a weight that is subnormal, or 0 by less than 80 octaves, may be 0 or not
        some = np.where(s > s.max(-1, keepdims=True, initial=-np.inf) - 800, np.maximum(p, TINY), p)
        faint = np.isfinite(product(np.where(p > 1e-30, p, 0), v)) & ~np.isfinite(product(some, v))
        near = s > s.max(-1, keepdims=True, initial=-np.inf) - 70
        off = np.where(near, error, 0).max(-1, initial=0)
        if o.get("sinks") is not None:  # they join by the lse, which float32 has rounded
            own = softmax(s, None)[1]
            off = off + 4 * EPS * np.where(np.isfinite(own), np.abs(own) + np.abs(lse), 0)
        # a sum of many terms of both signs, each rounded
        spread = np.abs(p) @ np.where(np.isfinite(v), np.abs(v), 0)
        out_error = (np.expm1(np.minimum(2 * off, 50))[..., None] * 2 + weight) * spread
        out_error = out_error + np.where(np.isfinite(v), np.abs(v), 0).sum(2)[:, :, None] * TINY
        hidden = np.where((s > -np.inf) & ~near, error, 0).max(-1, initial=0)
        out_error = out_error + np.where(hidden > 10, np.inf, 0)[..., None]
        # float32 may know the weight as 0, or as more than 0 where its score is known to no digit
        unsure = (np.isfinite(s) & ~near & (error > 10)).astype(np.float64) @ ~np.isfinite(v) > 0
        out_error = np.where(faint | unsure, np.nan, out_error)
        lse_error = off + hidden + (k.shape[2] + 40) * EPS + 4 * EPS * np.abs(lse)
    return Expected(out, lse, out_error, lse_error, p, s, error, slope_of(q, k, scale, o))


@np.errstate(all="ignore")
def slope_of(q: np.ndarray, k: np.ndarray, scale: float, o: dict) -> np.ndarray | float:
    cap = o.get("softcap", 0.0)
    if not cap:
        return 1.0
    return 1 - np.tanh((q @ k.swapaxes(2, 3)) * scale / cap) ** 2


def with_sinks(out, lse, out_error, lse_error, sinks):
    """A result and its bounds after one more key of score `sinks` (..., H) and value 0 has joined."""
    sink = sinks[..., None]
    total = np.logaddexp(lse, sink)
    share = np.where(lse == -np.inf, 0, np.exp(lse - total))
    digits = 8 * EPS * (np.abs(lse) + np.abs(sink))
    change = np.expm1(np.minimum(lse_error + digits, 50)) * share * (1 - share) * 2
    out_error = out_error * share[..., None] + (change[..., None] + TINY) * np.abs(out)
    out = out * share[..., None]
    return out, total, out_error, lse_error + digits


# ---- the integer pipeline
@dataclass
class Quantized:
    """data * scale + offset, float64; `bad` rows held what is not finite; `loose`.

    Its rounding cannot be foretold.
    """

    data: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | float
    bad: np.ndarray
    step: np.ndarray | float  # scale where an entry may have been rounded the other way
    loose: bool

    @property
    def value(self) -> np.ndarray:
        return self.data * self.scale


def quantized(
    x: np.ndarray,
    axis: int,
    counts: np.ndarray | None = None,
    smooth: bool = False,
    finer: bool = False,
) -> Quantized:
    """Symmetric INT8 of x (B, H, N, D) float32 values.

    One scale per row (axis -1) or per channel (axis -2). With `finer` the first rows have 5 more
    bits, as fractions.

    counts (B,): rows that exist; the others stand as zeros and do not count.
    """
    x = x.astype(np.float32)
    n = x.shape[2]
    exists = np.ones((x.shape[0], 1, n, 1), bool)
    if counts is not None:
        exists = (np.arange(n) < np.asarray(counts)[:, None])[:, None, :, None]
    bad = ~np.isfinite(x).all(-1, keepdims=True) & exists
    clean = np.where(bad | ~exists, np.float32(0), x)
    offset = np.zeros((1, 1, 1, 1), np.float32)
    loose = False
    step = 0.0
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        if smooth and n:
            total = clean.sum(2, keepdims=True, dtype=np.float64)
            loose = bool((np.abs(clean).sum(2, dtype=np.float64) > 1e38).any())
            offset = (total / np.maximum(exists.sum(2, keepdims=True), 1)).astype(np.float32)
            clean = np.where(
                bad | ~exists, np.float32(0), np.clip(x - offset, -LARGEST, LARGEST)
            ).astype(np.float32)
        peak = np.abs(clean).max(axis, keepdims=True, initial=0)
        usable = peak > np.float32(NO_SCALE)
        scale = np.where(usable, peak / np.float32(127), np.float32(1)).astype(np.float32)
        factor = np.where(
            usable, np.float32(127) / np.where(usable, peak, np.float32(1)), np.float32(0)
        )
        steps = clean * factor.astype(np.float32)
        data = np.rint(steps)
        if finer:
            data[:, :, :FIRST] = np.rint(steps[:, :, :FIRST] * np.float32(FINER)) / FINER
    if smooth:
        step = scale.astype(np.float64)
    return Quantized(
        data.astype(np.float64),
        scale.astype(np.float64),
        offset.astype(np.float64),
        bad[..., 0],
        step,
        loose,
    )


def block_peaks(p: np.ndarray) -> np.ndarray:
    """(..., S): the largest weight of each key's block of 128."""
    s = p.shape[-1]
    blocks = -(-s // KEY_BLOCK)
    padded = np.zeros((*p.shape[:-1], blocks * KEY_BLOCK))
    padded[..., :s] = p
    peaks = padded.reshape(*p.shape[:-1], blocks, KEY_BLOCK).max(-1)
    return np.repeat(peaks, KEY_BLOCK, -1)[..., :s]


def weight_errors(p: np.ndarray, pv: str) -> np.ndarray:
    """How far weights may be off: rounded in units of their block's largest, from a polynomial.

    With pv "int8" and "int16" the first keys are a block of their own, of 12 bits.
    """
    if pv in FLOAT_VALUES:
        return block_peaks(p) * 1.1 / 32768 + (0.0045 + (2.0**-8 if pv == "bf16" else 0)) * p
    rest = p.copy()
    rest[..., :FIRST] = 0
    unit = 1.1 / 255 if pv == "int8" else 2.1 / 32640  # rounded to the nearest; cut off
    error = block_peaks(rest) * unit + 0.0045 * p
    first = p[..., :FIRST]
    error[..., :FIRST] = first.max(-1, keepdims=True, initial=0) * 2.1 / 4080 + 0.0045 * first
    return error


def moved(delta: np.ndarray, v: np.ndarray, out: np.ndarray) -> np.ndarray:
    """How far weights that are off by delta (..., L, S) move out (..., L, Dv), a mean of v.

    sum(delta |v - out|), and for all but the first keys the larger sum(delta (|v| + |out|)).
    """
    first, rest = delta[..., :FIRST], delta[..., FIRST:]
    far = rest @ np.abs(v[..., FIRST:, :]) + rest.sum(-1)[..., None] * np.abs(out)
    for j in range(first.shape[-1]):
        far = far + first[..., j, None] * np.abs(v[..., None, j, :] - out)
    return far


def attention_int8(q: Quantized, k: Quantized, v: Quantized, o: dict, pv: str) -> Expected:
    """The integer pipeline's result to within the rounding of its scores and weights.

    Rows that see a bad key are NaN.
    """
    b, h, length, d = q.data.shape
    scale = d**-0.5 if o.get("scale") is None else o["scale"]
    qv = q.value
    kv = heads(k.value, h)
    vv = heads(v.value, h)
    seen, away = seen_keys((b, h, length, kv.shape[2]), o)
    with np.errstate(all="ignore"):
        dots = (qv @ kv.swapaxes(2, 3)) * scale
        cap = o.get("softcap", 0.0)
        limit = 2.0**28 * cap if cap else INT8_LIMIT
        near = np.clip(dots, -limit, limit)
        means = np.broadcast_to(
            heads(k.offset * np.ones((1, k.data.shape[1], 1, 1)), h), (b, h, 1, d)
        ).swapaxes(2, 3)
        shift = (qv @ means) * scale
        # terms that cancel leave what float64 rounded, here and in the kernel
        cancelled = d * 2.0**-52 * (np.abs(qv) @ np.abs(means)) * abs(scale)
        step = (
            heads(k.step * np.ones((1, 1, 1, 1)), h)[..., 0][..., None, :]
            if np.ndim(k.step)
            else 0.0
        )
        error = 8 * EPS * np.abs(near) + 2 * step * np.abs(qv).max(
            -1, keepdims=True, initial=0
        ) * abs(scale)
        if cap:
            error = error + 8 * EPS * np.abs(shift) + cancelled
        s = near + shift if cap else near
        if "functions" in o:
            s, error, seen = o["functions"](s, error, seen)
        s, error = changed(s, error, seen, away, o)
        lost = (np.abs(s) > INT8_LIMIT) & seen  # clipped after the options, too
        s = np.where(seen, np.clip(s, -INT8_LIMIT, INT8_LIMIT), -np.inf)
        error = np.where(seen, error + 0.0014 + 4 * EPS * np.abs(s), 0)
        own, own_lse = softmax(s, None)
        if not cap:
            own_lse = own_lse + shift[..., 0]
        out = own @ vv
        delta = weight_errors(own, pv)
        off = np.where(own > 1e-12, error, 0).max(-1, initial=0)
        delta = delta + own * np.expm1(np.minimum(2 * off, 50))[..., None]
        far = np.where((s > -np.inf) & (own <= 1e-12), error, 0).max(-1, initial=0)
        delta = np.where(seen, delta, 0)
        total = delta.sum(-1)
        spread = moved(delta, vv, out)
        room = np.maximum(1 - total, 0.05)[..., None]
        rounded_values = 2.0**-8 if pv == "bf16" else 1e-5  # or sums
        out_error = (
            spread / room
            + rounded_values * (own @ np.abs(vv))
            + TINY * np.abs(vv).sum(2)[:, :, None]
        )
        if np.ndim(v.step):
            out_error = out_error + 2 * heads(v.step, h)
        lse_error = (
            total / room[..., 0]
            + off
            + 20 * EPS * np.abs(own_lse)
            + 1e-5
            + 8 * EPS * np.abs(shift[..., 0])
            + cancelled[..., 0]
        )
        unsure = (far > 5) | k.loose | lost.any(-1)
        out_error = np.where(
            unsure[..., None] | (np.abs(dots) > limit).any(-1)[..., None], np.inf, out_error
        )
        lse_error = np.where(unsure, np.inf, lse_error)
        spoiled = (seen & heads((k.bad | v.bad)[..., None], h)[..., 0][..., None, :]).any(-1)
        spoiled |= q.bad & seen.any(-1)
        out = np.where(spoiled[..., None], np.nan, out)
        own_lse = np.where(spoiled, np.nan, own_lse)
        own_lse = np.where(seen.any(-1), own_lse, -np.inf)
        out = np.where(seen.any(-1)[..., None], out, 0)
        if o.get("sinks") is not None:
            out, own_lse, out_error, lse_error = with_sinks(
                out, own_lse, out_error, lse_error, np.asarray(o["sinks"], np.float64)[None, :]
            )
    return Expected(out, own_lse, out_error, lse_error, own, s, error, 1.0)


# ---- gradients
@np.errstate(all="ignore")
def gradients(
    q,
    k,
    v,
    do,
    o: dict,
    out_given: np.ndarray,
    lse_given: np.ndarray,
    precision: str,
    grad_lse: np.ndarray | None = None,
):
    """dq, dk, dv, gradients of the scores that the softmax takes, and the bounds of all, of operands as
    for `attention`.

    Out and lse as the caller passes them; grad_lse (B, H, L), None for 0.
    """
    h = q.shape[1]
    d = q.shape[3]
    scale = d**-0.5 if o.get("scale") is None else o["scale"]
    found = attention(q, k, v, o, precision)
    kh = heads(k, h)
    vh = heads(v, h)
    with np.errstate(all="ignore"):
        # an lse of few digits says nothing: the weights are computed anew
        lse_given = np.where(np.abs(lse_given) >= 2.0**22, found.lse, lse_given)
        p = np.where(found.scores == -np.inf, 0, np.exp(found.scores - lse_given[..., None]))
        p = np.where(np.isfinite(lse_given)[..., None], p, 0)
        dp = do @ vh.swapaxes(2, 3)
        delta = (do * out_given).sum(-1, keepdims=True)
        if grad_lse is not None:
            delta = delta - grad_lse[..., None]
        of_scores = p * (dp - delta)
        ds = of_scores * found.slope * scale
        dq = ds @ kh
        dkh = ds.swapaxes(2, 3) @ q
        dvh = p.swapaxes(2, 3) @ do
        off = found.error + 4 * EPS * np.abs(lse_given)[..., None] + 64 * EPS
        terms = q.shape[2] + k.shape[2] + d + v.shape[3]
        factor = 2 * np.expm1(np.minimum(off, 50)) + (terms + 60) * EPS
        size = np.abs(do) @ np.abs(vh).swapaxes(2, 3) + (np.abs(do) * np.abs(out_given)).sum(
            -1, keepdims=True
        )
        if grad_lse is not None:
            size = size + np.abs(grad_lse)[..., None]
        e_p = p * factor
        e_scores = p * size * factor
        e_ds = (p * size * factor + p * size * (8e-6 if o.get("softcap") else 0)) * abs(scale)
        largest = sum(np.abs(x).max(initial=0) for x in (q, k, v, do))
        # products below float32's normal numbers; a large scale makes their steps larger, too
        e_ds = e_ds + terms * TINY * largest + terms * SUBNORMAL * max(largest, 1.0) * abs(scale)
        e_scores = e_scores + terms * TINY * largest + terms * SUBNORMAL * max(largest, 1.0)
        e_p = e_p + terms * TINY
        if precision == "bfloat16":  # operands of the last three products are rounded to it
            e_p, e_ds = e_p + np.abs(p) * BFLOAT16, e_ds + np.abs(ds) * BFLOAT16
        e_dq = e_ds @ np.abs(kh)
        e_dk = e_ds.swapaxes(2, 3) @ np.abs(q)
        e_dv = e_p.swapaxes(2, 3) @ np.abs(do)

    def grouped(x):
        return x.reshape(x.shape[0], k.shape[1], h // k.shape[1], *x.shape[2:]).sum(2)

    return (
        (dq, grouped(dkh), grouped(dvh), of_scores),
        (e_dq, grouped(e_dk), grouped(e_dv), e_scores),
    )
