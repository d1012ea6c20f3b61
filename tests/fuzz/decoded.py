"""What one sequence of a KV cache must give for its last tokens, in float64, with bounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from . import codes, oracle
from .oracle import EPS

if TYPE_CHECKING:
    from .caches import Sequence

INTEGERS = {"int8": 127, "int4": 15}  # the largest number of a row


def visible(c: dict, s: int, length: int) -> np.ndarray:
    """(L, S) bool: which tokens the last L see."""
    at = s - length + np.arange(length)[:, None]
    held = np.arange(s)
    seen = held <= at
    if c.get("window") is not None:
        seen &= (held > at - c["window"]) | (held < c["sinks"])
    return seen


def matrices(c: dict) -> int:
    """Most channels of the Hadamard matrices that the cache's rows are rotated by, 1 for none."""
    if c["dtype"] != "int4" and not c.get("rotate"):
        return 1
    if not c.get("value_in_key"):
        return codes.WHOLE
    dv = c["dv"] or c["d"]  # the values are rotated where they are part of the keys, too
    return min(c["d"] & -c["d"], dv & -dv)


def rows_int8(x: np.ndarray, offset: np.ndarray | float = 0.0, most: int = 1):
    """(H, N, D) float64 as INT8 with a scale per row, rotated by matrices of at most `most`
    channels and dequantised; the scales; rows that are not finite.
    """
    found = oracle.quantized(codes.turned((x - offset).astype(np.float32), most)[None], -1)
    bad = ~np.isfinite(x).all(-1)
    return (
        np.where(bad[..., None], 0, found.value[0]),
        np.where(bad, 0, found.scale[0, ..., 0]),
        bad,
    )


def rows_int4(x: np.ndarray, offset: np.ndarray | float = 0.0, most: int = codes.WHOLE):
    """The same in 4 bits, rotated by the largest matrices; `rows_int8` says the rest."""
    with np.errstate(all="ignore"):
        data, scale, _ = codes.quantized((x - offset).astype(np.float32))
    bad = ~np.isfinite(x).all(-1)
    scale = np.where(bad, 0, scale)
    return np.where(bad[..., None], 0, data) * scale[..., None], scale, bad


def lost(c: dict, s: Sequence, length: int) -> np.ndarray:
    """(L,) bool: rows behind a truncation whose window a ring may no longer hold."""
    at = s.length - length + np.arange(length)
    if c.get("window") is None or s.peak <= s.length:
        return np.zeros(length, bool)
    first = np.maximum(at - c["window"] + 1, c["sinks"])
    return (first < s.peak - c["window"] - 64) & (at >= first)


def decoded(
    c: dict, s: Sequence, query: np.ndarray, scale: float, o: dict, mask: np.ndarray | None
):
    """out (H, L, Dv), lse (H, L) of one sequence and their bounds.

    o : softcap, alibi_slopes and sinks, as for `oracle.attention`; score and sees, as
        `caches.functions_of` makes them
    mask : (L, L) bool or None, of the new tokens
    """
    h, length, d = query.shape
    seen = visible(c, s.length, length)
    if mask is not None:
        new = min(length, s.length)
        if new:
            seen[:, s.length - new :] &= mask[:, length - new :]
    at_row = s.length - length + np.arange(length)
    away = (np.arange(s.length) - at_row[:, None])[None, None]
    seen = np.broadcast_to(seen, (h, length, s.length))
    at = np.arange(h)[:, None, None], at_row[:, None], np.arange(s.length)
    if "sees" in o:
        seen = seen & o["sees"](*at)
    cap = o.get("softcap", 0.0) or "score" in o or "sees" in o  # keys keep their means
    int8 = c["dtype"] in INTEGERS
    four_bits = c["dtype"] == "int4"
    tiles = c.get("value_in_key") and c["dtype"] == "bfloat16"  # of AMX, where there are any
    rows = rows_int4 if four_bits else rows_int8
    most = matrices(c)
    turns = most > 1
    spoiled = np.zeros((h, length), bool)
    with np.errstate(all="ignore"):
        if int8:
            key, k_scale, bad_k = rows(s.key, s.offset, most)
            shared = c.get("value_in_key")
            value, v_scale, bad_v = (
                (key[..., : s.value.shape[2]], k_scale, bad_k)
                if shared
                else rows(s.value, most=most)
            )
            bad_q = ~np.isfinite(query).all(-1)
            q = np.where(bad_q[..., None], 0, query)
            q = codes.rotated(q, most)
            key, value, v_scale = (
                oracle.heads(x[None], h)[0] for x in (key, value, v_scale[..., None])
            )
            bad = oracle.heads((bad_k | bad_v)[None, ..., None], h)[0, ..., 0]
            spoiled = (seen & bad[:, None]).any(-1) | (bad_q & seen.any(-1))
            offset = oracle.heads(s.offset[None], h)[0]
            offset = codes.rotated(offset, most)
            if turns:
                query = codes.rotated(np.where(bad_q[..., None], np.nan, query), most)
            dots = (q @ key.swapaxes(1, 2)) * scale
            x = np.clip(dots, -oracle.INT8_LIMIT, oracle.INT8_LIMIT)
            error = 0.0014 + 12 * EPS * np.abs(x)
            # a query is rounded to whole numbers up to 16256, beside codes up to 127
            steps = 220 if four_bits else 25000 if turns else 30000
            top = np.abs(q).max(-1, keepdims=True, initial=0) / steps
            error = error + top * np.abs(key).sum(-1)[:, None] * abs(scale)
            if c["smooth"] and cap:
                shift = (query @ offset.swapaxes(1, 2)) * scale
                error = error + 8 * EPS * np.abs(shift)
                error = error + np.abs(((query - q) @ offset.swapaxes(1, 2)) * scale)
                x = x + shift
            if c["smooth"]:
                step = oracle.heads(k_scale[None, ..., None], h)[0, ..., 0]
                error = error + 2 * step[:, None] * np.abs(q).max(-1, keepdims=True) * abs(scale)
        else:
            key, value = (oracle.heads(y[None], h)[0] for y in (s.key, s.value))
            q = query
            # a token of which one part is not finite is not finite
            bad = ~(np.isfinite(key).all(-1) & np.isfinite(value).all(-1))
            spoiled = (seen & bad[:, None]).any(-1) | (~np.isfinite(query).all(-1) & seen.any(-1))
            key, value = (np.where(bad[..., None], 0, y) for y in (key, value))
            q = np.where(np.isfinite(q), q, 0)
            x = (q @ key.swapaxes(1, 2)) * scale
            error = (d + 10) * EPS * (np.abs(q) @ np.abs(key).swapaxes(1, 2)) * abs(
                scale
            ) + 8 * EPS * np.abs(x)
            if tiles:  # the query is rounded to bfloat16 first
                off = np.abs(q - oracle.rounded(q, "bfloat16"))
                error = error + (off @ np.abs(key).swapaxes(1, 2)) * abs(scale)
                error = error + d * oracle.TINY * (
                    np.abs(q).max(initial=0) + np.abs(key).max(initial=0)
                ) * abs(scale)
        if "score" in o:
            x, error = o["score"](x, error, *at)
        x, error = (y[0] for y in oracle.changed(x[None], error[None], seen[None], away, o))
        if int8 and o:  # rounded again, and clipped
            error = error + 0.0014
            clipped = (np.abs(x) > oracle.INT8_LIMIT) & seen
            x = np.where(seen, np.clip(x, -oracle.INT8_LIMIT, oracle.INT8_LIMIT), -np.inf)
        p, lse = oracle.softmax(x[None], None)
        p = p[0]
        lse = lse[0]
        out = p @ value
        off = np.where(p > 1e-30, error, 0).max(-1, initial=0)
        far = np.where(seen & (p <= 1e-30), error, 0).max(-1, initial=0)
        delta = p * (np.expm1(np.minimum(2 * off, 50)) * 2 + (s.length + 60) * EPS)[..., None]
        if int8:
            peaks = oracle.block_peaks(p)
            delta = delta + peaks / 255 * 1.1 + 0.0045 * p
            # a value's share of the largest scale of its block is folded into its weight, which is
            # then rounded; unseen tokens of a ring's slots share blocks in an order of their own:
            # the largest scale anywhere bounds them all
            top = oracle.block_peaks(np.where(np.isfinite(v_scale[..., 0]), v_scale[..., 0], 0))
            if c.get("window") is not None:
                top = np.broadcast_to(v_scale[..., 0].max(-1, keepdims=True, initial=0), top.shape)
                peaks = np.broadcast_to(p.max(-1, keepdims=True, initial=0), p.shape)
            coarse = np.where(seen, peaks * top[:, None], 0) * INTEGERS[c["dtype"]] * 1.1 / 255
            out_error = coarse.sum(-1)[..., None]
        else:
            out_error = 0.0
            delta = delta + oracle.TINY  # weights below may be 0
        if tiles:
            delta = delta + p * 2 * oracle.EPS_OF["bfloat16"]
        delta = np.where(seen, delta, 0)
        total = delta.sum(-1)
        out_error = out_error + delta @ np.abs(value) + total[..., None] * np.abs(out)
        out_error = out_error / np.maximum(1 - total, 0.05)[..., None]
        lse = lse + 0.0
        if int8 and c["smooth"] and not cap:
            shift = np.einsum("hld,hd->hl", q, offset[:, 0]) * scale
            lse = lse + shift
            total = total + 4 * EPS * np.abs(shift) + np.abs(shift) * 1e-6
            # the offset meets the query as it came
            total = total + np.abs(np.einsum("hld,hd->hl", query - q, offset[:, 0]) * scale)
        lse_error = total / np.maximum(1 - total, 0.05) + off + 8 * EPS * np.abs(lse) + 1e-6
        unsure = (far > 5) | (off > 5) | lost(c, s, length)
        if int8 and o:
            unsure |= clipped.any(-1)
    if turns:  # sums of the errors of rotated values, and the rounding of rotations
        turn = codes.hadamard(out.shape[-1], most)
        out_error = (out_error + 20 * EPS * np.abs(out)) @ np.abs(turn) + 1e-37
        out = np.where(np.isfinite(out), out, 0) @ turn
    out_error = np.where(unsure[..., None], np.inf, out_error)
    lse_error = np.where(unsure, np.inf, lse_error)
    some = seen.any(-1)
    out = np.where(spoiled[..., None], np.nan, np.where(some[..., None], out, 0))
    lse = np.where(spoiled, np.nan, np.where(some, lse, -np.inf))
    if o.get("sinks") is not None:
        with np.errstate(all="ignore"):
            sinks = np.asarray(o["sinks"], np.float64)
            return oracle.with_sinks(out, lse, out_error, lse_error, sinks)
    return out, lse, out_error, lse_error
