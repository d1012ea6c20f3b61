"""A KV cache held against lists of tokens.

Append, decode with options, step, share, reset, truncate, reorder, repeat, reserve, copy, states,
rings, pages, counts, full caches.
"""

from __future__ import annotations

import numpy as np

from numflash import KVCache
from numflash.errors import ArgumentError, CacheFullError
from numflash.reference import int4

from . import oracle
from .arrays import laid_out, numbers, put
from .compare import WrongError, close, same_kind
from .oracle import EPS

INTEGERS = {"int8": 127, "int4": 15}  # the largest number of a row
SMOOTH = 16  # tokens of a first append from which channel means are taken


class Sequence:
    """What one sequence of the cache must hold.

    Tokens as they came, and where its channel means come from.
    """

    def __init__(self, g: int, d: int, dv: int) -> None:
        self.key, self.value = np.zeros((g, 0, d)), np.zeros((g, 0, dv))
        self.offset = np.zeros((g, 1, d))
        self.peak = 0  # the most tokens it has had: a ring drops what is far behind

    @property
    def length(self) -> int:
        return self.key.shape[1]

    def copy(self, n: int) -> Sequence:
        other = Sequence(self.key.shape[0], self.key.shape[2], self.value.shape[2])
        other.key, other.value, other.offset = self.key[:, :n], self.value[:, :n], self.offset
        other.peak = max(self.peak, self.length)
        return other


def tokens(c: dict, op: dict, batch: int) -> tuple[np.ndarray, np.ndarray]:
    dv = c["dv"] or c["d"]
    draw = "normal" if c["draw"] == "huge" and c["dtype"] == "float16" else c["draw"]
    key = numbers((batch, c["g"], op["n"], c["d"]), draw, op["seed"], "float32")
    value = numbers((batch, c["g"], op["n"], dv), draw, op["seed"] + 1, "float32")
    if "bad" in op:
        put(key if op["bad"][0] == "k" else value, op["bad"][1])
    return laid_out(key, op.get("view")), laid_out(value, op.get("view"))


class Model:
    def __init__(self, c: dict) -> None:
        self.c, self.dv = c, c["dv"] or c["d"]
        self.all = [self.empty() for _ in range(c["b"])]
        self.most = c["max_length"]

    def empty(self) -> Sequence:
        return Sequence(self.c["g"], self.c["d"], self.dv)

    def full(self, take: list[int]) -> bool:
        return self.c.get("window") is None and any(
            s.length + t > self.most for s, t in zip(self.all, take, strict=True)
        )

    def append(self, key: np.ndarray, value: np.ndarray, take: list[int]) -> None:
        for b, n in enumerate(take):
            s = self.all[b]
            stored = "float32" if self.c["dtype"] in INTEGERS else self.c["dtype"]
            if self.c["smooth"] and n and not s.length:
                s.offset = np.zeros_like(s.offset)
            if self.c["smooth"] and not s.length and n >= SMOOTH:
                with np.errstate(all="ignore"):
                    mean = (
                        key[b, :, :n].astype(np.float64).mean(1, keepdims=True).astype(np.float32)
                    )
                s.offset = np.where(np.isfinite(mean), mean, 0).astype(np.float64)
            s.key = np.concatenate([s.key, oracle.rounded(key[b, :, :n], stored)], 1)
            s.value = np.concatenate([s.value, oracle.rounded(value[b, :, :n], stored)], 1)


def visible(c: dict, s: int, length: int) -> np.ndarray:
    """(L, S) bool: which tokens the last L see."""
    at = s - length + np.arange(length)[:, None]
    held = np.arange(s)
    seen = held <= at
    if c.get("window") is not None:
        seen &= (held > at - c["window"]) | (held < c["sinks"])
    return seen


def rows_int8(x: np.ndarray, offset: np.ndarray | float = 0.0):
    """(H, N, D) float64 as INT8 with a scale per row, dequantised; the scales.

    Rows that are not finite.
    """
    found = oracle.quantized((x - offset).astype(np.float32)[None], -1)
    bad = ~np.isfinite(x).all(-1)
    return (
        np.where(bad[..., None], 0, found.value[0]),
        np.where(bad, 0, found.scale[0, ..., 0]),
        bad,
    )


def rotated(x: np.ndarray) -> np.ndarray:
    """Rows times their Hadamard matrices, float64."""
    return x @ hadamard(x.shape[-1])


def hadamard(d: int) -> np.ndarray:
    """(D, D): blocks of the largest power of two that divides D."""
    block = d & -d
    h = np.ones((1, 1))
    while len(h) < block:
        h = np.block([[h, h], [h, -h]])
    return np.kron(np.eye(d // block), h / np.sqrt(block))


def rows_int4(x: np.ndarray, offset: np.ndarray | float = 0.0):
    """The same in 4 bits, of rotated rows, by the definition; `rows_int8` says the rest."""
    with np.errstate(all="ignore"):
        found = int4.quantize((x - offset).astype(np.float32))
    bad = ~np.isfinite(x).all(-1)
    scale = np.where(bad, 0, found.scale[..., 0]).astype(np.float64)
    return found.data * scale[..., None], scale, bad


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

    o : softcap, alibi_slopes and sinks, as for `oracle.attention`;  mask : (L, L) bool or None, of
        the new tokens
    """
    h, length, d = query.shape
    seen = visible(c, s.length, length)
    if mask is not None:
        new = min(length, s.length)
        if new:
            seen[:, s.length - new :] &= mask[:, length - new :]
    away = (np.arange(s.length) - (s.length - length + np.arange(length)[:, None]))[None, None]
    seen = np.broadcast_to(seen, (h, length, s.length))
    cap = o.get("softcap", 0.0)
    int8 = c["dtype"] in INTEGERS
    four_bits = c["dtype"] == "int4"
    rows = rows_int4 if four_bits else rows_int8
    spoiled = np.zeros((h, length), bool)
    with np.errstate(all="ignore"):
        if int8:
            key, k_scale, bad_k = rows(s.key, s.offset)
            value, v_scale, bad_v = rows(s.value)
            bad_q = ~np.isfinite(query).all(-1)
            q = np.where(bad_q[..., None], 0, query)
            q = rotated(q) if four_bits else q
            key, value, v_scale = (
                oracle.heads(x[None], h)[0] for x in (key, value, v_scale[..., None])
            )
            bad = oracle.heads((bad_k | bad_v)[None, ..., None], h)[0, ..., 0]
            spoiled = (seen & bad[:, None]).any(-1) | (bad_q & seen.any(-1))
            offset = oracle.heads(s.offset[None], h)[0]
            offset = rotated(offset) if four_bits else offset
            query = rotated(np.where(bad_q[..., None], np.nan, query)) if four_bits else query
            dots = (q @ key.swapaxes(1, 2)) * scale
            x = np.clip(dots, -oracle.INT8_LIMIT, oracle.INT8_LIMIT)
            error = 0.0014 + 12 * EPS * np.abs(x)
            # a query is rounded to 15 bits and a sign
            top = np.abs(q).max(-1, keepdims=True, initial=0) / (25000 if four_bits else 30000)
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
            x = (np.where(np.isfinite(q), q, 0) @ key.swapaxes(1, 2)) * scale
            error = (d + 10) * EPS * (np.abs(q) @ np.abs(key).swapaxes(1, 2)) * abs(
                scale
            ) + 8 * EPS * np.abs(x)
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
    if four_bits:  # sums of the errors of rotated values, and the rounding of rotations
        turn = hadamard(out.shape[-1])
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


def cache(c: dict) -> None:
    names = ("page_size", "pages", "window", "sinks")
    given = {n: c[n] for n in names if n in c}
    held = KVCache(
        c["b"],
        c["g"],
        c["d"],
        c["max_length"],
        c["dtype"],
        value_dim=c["dv"],
        smooth=c["smooth"],
        **given,
    )
    model = Model(c)
    for number, op in enumerate(c["ops"]):
        try:
            held = apply(c, op, held, model)
        except WrongError as error:
            raise WrongError(f"op {number} ({op['op']}): {error}") from None
        if held.lengths.tolist() != [s.length for s in model.all]:
            raise WrongError(
                f"op {number} ({op['op']}): lengths {held.lengths.tolist()}, expected {[s.length for s in model.all]}"
            )


def apply(c: dict, op: dict, held: KVCache, model: Model) -> KVCache:
    """Do one operation to the cache and to the model; the cache to go on with."""
    batch = len(model.all)
    if op["op"] == "append":
        key, value = tokens(c, op, batch)
        take = [op["n"]] * batch
        counts = {}
        if "counts" in op:
            take = np.resize(op["counts"], batch).tolist()
            counts = {"counts": np.array(take)}
        if admitted(c, held, model, take, lambda: held.append(key, value, **counts)):
            model.append(key, value, take)
    elif op["op"] == "reset":
        which = None if op["which"] is None else np.atleast_1d(op["which"]) % batch
        held.reset(which)
        for b in range(batch) if which is None else which:
            model.all[b] = model.empty()
    elif op["op"] == "share":
        if "page_size" in c:  # a restored state has no pages
            share(op, held, model)
    elif op["op"] == "truncate":
        truncate(c, op, held, model)
    elif op["op"] in ("reorder", "repeat"):
        reorder(c, op, held, model)
    elif op["op"] == "reserve":
        held.reserve(op["tokens"])
        if "window" not in c:
            model.most = max(model.most, op["tokens"])
    elif op["op"] == "copy":
        return held.copy()
    elif op["op"] == "state":
        return restored(c, held, model)
    else:
        attend(c, op, held, model)
    return held


def truncate(c: dict, op: dict, held: KVCache, model: Model) -> None:
    lengths = [
        int(s.length * part)
        for s, part in zip(model.all, np.resize(op["parts"], len(model.all)), strict=True)
    ]
    try:
        held.truncate(lengths[0] if len(lengths) == 1 else lengths)
    except ArgumentError:
        room = c["sinks"] + c["window"] + 64 if "window" in c else np.inf
        if all(max(s.peak, s.length) <= room for s in model.all):
            raise
    except CacheFullError:
        if c.get("pages") is None:
            raise
    else:
        model.all = [s.copy(n) for s, n in zip(model.all, lengths, strict=True)]
        for s in model.all:
            s.peak = 0 if s.length <= c.get("sinks", 0) else s.peak


def reorder(c: dict, op: dict, held: KVCache, model: Model) -> None:
    batch = len(model.all)
    if op["op"] == "repeat":
        index = np.arange(batch).repeat(op["times"] if batch <= 3 else 1)
    else:
        index = np.array(op["index"]) % batch
    try:
        if op["op"] == "repeat":
            held.repeat(len(index) // batch)
        else:
            held.reorder(index)
    except CacheFullError:
        if c.get("pages") is None:
            raise
    else:
        model.all = [model.all[i].copy(model.all[i].length) for i in index]


def restored(c: dict, held: KVCache, model: Model) -> KVCache:
    """Another cache, filled with the state of this one."""
    given = {n: c[n] for n in ("window", "sinks") if n in c}
    other = KVCache(
        len(model.all), c["g"], c["d"], model.most, c["dtype"], value_dim=c["dv"], smooth=c["smooth"], **given,
    )  # fmt: skip
    other.load_state(held.state())
    for n in ("page_size", "pages"):
        c.pop(n, None)
    return other


def admitted(c: dict, held: KVCache, model: Model, take: list[int], call) -> bool:
    """Whether tokens were taken; a full cache must refuse them and stay as it is."""
    free = held.free_pages
    try:
        call()
    except CacheFullError:
        if not model.full(take) and "page_size" not in c:
            raise WrongError("the cache says that it is full, and is not") from None
        if held.free_pages != free:
            raise WrongError("pages were lost by an append that was refused") from None
        return False
    if model.full(take):
        raise WrongError(f"tokens beyond max_length were taken: {take}")
    return True


def share(op: dict, held: KVCache, model: Model) -> None:
    a = op["source"] % len(model.all)
    b = op["target"] % len(model.all)
    source = model.all[a]
    n = source.length if op["length"] is None else op["length"]
    try:
        held.share(a, b, op["length"])
    except ArgumentError:
        if a != b and not model.all[b].length and n <= source.length:
            raise
    except CacheFullError:
        return
    else:
        model.all[b] = source.copy(n)


def decode_options(op: dict, heads: int, batch: int, length: int):
    """softcap, alibi_slopes and sinks of a decode, and the mask (B, L, L) of its new tokens."""
    rng = np.random.default_rng(op["seed"] + 3)
    o = {"softcap": op["softcap"]} if op.get("softcap") else {}
    if op.get("alibi"):
        o["alibi_slopes"] = (rng.uniform(-0.2, 1, heads) * op["alibi"]).astype(np.float32)
    if op.get("joins"):
        o["sinks"] = (rng.uniform(-1, 1, heads) * op["joins"]).astype(np.float32)
    return o, rng.random((batch, length, length)) < 0.6 if op.get("mask") else None


def attend(c: dict, op: dict, held: KVCache, model: Model) -> None:
    length = op["l"]
    batch = len(model.all)
    draw = "normal" if c["draw"] in ("huge", "zeros") else c["draw"]
    query = numbers((batch, c["queries"], length, c["d"]), draw, op["seed"] + 2, "float32")
    shape = (*query.shape[:3], model.dv)
    given = {name: op[name] for name in ("splits", "scale") if op[name] is not None}
    out = np.full(shape, np.nan, np.float32) if op["out"] else None
    o, mask = decode_options(op, c["queries"], batch, length)
    if op["op"] == "decode":
        given.update(o)
        if mask is not None:
            given["mask"] = mask[0] if batch == 1 else mask
    if op["op"] == "step":
        key, value = tokens(c, op, batch)
        got: list = []
        if not admitted(
            c,
            held,
            model,
            [op["n"]] * batch,
            lambda: got.append(held.step(query, key, value, out=out, **given)),
        ):
            return
        model.append(key, value, [op["n"]] * batch)
        found = got[0]
        lse = None
    else:
        try:
            both = held.decode(query, out=out, return_lse=True, **given)
        except ArgumentError:
            if not any(lost(c, s, length).any() for s in model.all):
                raise
            return
        found, lse = both
        if not op["lse"]:
            lse, found = None, held.decode(query, out=out, **given)
    if out is not None and found is not out:
        raise WrongError("out was not returned")
    same_kind("out", found, shape, "float32")
    scale = c["d"] ** -0.5 if op["scale"] is None else op["scale"]
    for b, s in enumerate(model.all):
        tree = None if mask is None else mask[b]
        want, want_lse, error, lse_error = decoded(
            c, s, query[b].astype(np.float64), scale, o, tree
        )
        close(f"out of sequence {b}", found[b], want, error, "float32")
        if lse is not None:
            close(f"lse of sequence {b}", lse[b], want_lse, lse_error, "float32")
