"""A KV cache held against lists of tokens.

Append, decode with options, step, share, reset, truncate, reorder, repeat, reserve, copy, states,
rings, pages, counts, full caches.
"""

from __future__ import annotations

import numpy as np

from numflash import KVCache
from numflash.errors import ArgumentError, CacheFullError

from . import oracle
from .arrays import laid_out, numbers, put
from .compare import WrongError, close, same_kind
from .decoded import INTEGERS, decoded, lost
from .oracle import EPS

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


def tokens(c: dict, op: dict, batch: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Key and value of an append; no value where it is in the key."""
    dv = c["dv"] or c["d"]
    draw = "normal" if c["draw"] == "huge" and c["dtype"] == "float16" else c["draw"]
    shared = c.get("value_in_key")
    key = numbers((batch, c["g"], op["n"], c["d"]), draw, op["seed"], "float32")
    value = numbers((batch, c["g"], op["n"], dv), draw, op["seed"] + 1, "float32")
    if "bad" in op:
        put(key if shared or op["bad"][0] == "k" else value, op["bad"][1])
    key = laid_out(key, op.get("view"))
    return key, None if shared else laid_out(value, op.get("view"))


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

    def append(
        self, held: KVCache, key: np.ndarray, value: np.ndarray | None, take: list[int]
    ) -> None:
        value = key[..., : self.dv] if value is None else value
        for b, n in enumerate(take):
            s = self.all[b]
            stored = "float32" if self.c["dtype"] in INTEGERS else self.c["dtype"]
            if self.c["smooth"] and n and not s.length:
                s.offset = offset_taken(self.c, held, b, key[b, :, :n])
            s.key = np.concatenate([s.key, oracle.rounded(key[b, :, :n], stored)], 1)
            s.value = np.concatenate([s.value, oracle.rounded(value[b, :, :n], stored)], 1)


def offset_taken(c: dict, held: KVCache, b: int, key: np.ndarray) -> np.ndarray:
    """(G, 1, D) what the cache takes from all keys of a sequence that began with key (G, n, D).

    Any vector changes no softmax. It must be the mean of the finite tokens but for the rounding of
    one row.
    """
    found = held.state()["offset"][b][:, None].astype(np.float64)
    tokens = key.astype(np.float64)
    finite = np.isfinite(tokens).all(2, keepdims=True)
    mean = np.where(finite, tokens, 0).sum(1, keepdims=True) / np.maximum(
        finite.sum(1, keepdims=True), 1
    )
    if key.shape[1] < SMOOTH:
        mean = np.zeros_like(mean)
    length = np.linalg.norm(np.where(finite[:, :1], tokens[:, :1] - mean, 0), axis=2)
    steps = 1 / 15 if c["dtype"] == "int4" else 0.51 / 127
    most = np.sqrt(c["d"]) * steps * length * (key.shape[1] >= SMOOTH)
    away = np.linalg.norm(found - mean, axis=2)
    if not (away <= most + 1e-5 * np.linalg.norm(np.abs(mean), axis=2) + 1e-5 * length).all():
        raise WrongError(f"sequence {b}: {away} from the mean of the keys; at most {most}")
    return found


def cache(c: dict) -> None:
    names = ("page_size", "pages", "window", "sinks", "value_in_key", "rotate")
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
            model.append(held, key, value, take)
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
    given = {n: c[n] for n in ("window", "sinks", "value_in_key", "rotate") if n in c}
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


def functions_of(op: dict, heads: int, sequence: int):
    """score_mod and mask_mod of a decode, and what the oracle makes of them for one sequence."""
    rng = np.random.default_rng(op["seed"] + 4)
    slopes = rng.uniform(-0.1, 1, heads).astype(np.float32)
    first = rng.integers(0, 60, 16).astype(np.int32)
    given: dict = {}
    made: dict = {}
    if op.get("score") == "slopes":
        given["score_mod"] = lambda s, b, h, q, k: s - slopes[h] * (q - k)
        made["score"] = lambda x, error, h, q, k: (
            x - slopes[h] * (q - k),
            error + 8 * EPS * (np.abs(x) + np.abs(slopes[h] * (q - k))),
        )
    elif op.get("score") == "halves":
        given["score_mod"] = lambda s, b, h, q, k: np.where(k % 3 == b % 2, s * 0.5, s * 2)
        made["score"] = lambda x, error, h, q, k: (
            np.where(k % 3 == sequence % 2, x * 0.5, x * 2),
            2 * error,
        )
    if op.get("sees") == "first":
        given["mask_mod"] = lambda b, h, q, k: (k >= first[b]) | (h == 1)
        made["sees"] = lambda h, q, k: (k >= first[sequence]) | (h == 1)
    elif op.get("sees") == "rows":
        given["mask_mod"] = lambda b, h, q, k: (q % 3 != 1) & (k > q - 40)
        made["sees"] = lambda h, q, k: (q % 3 != 1) & (k > q - 40) & (h >= 0)
    return given, made


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
        given.update(functions_of(op, c["queries"], 0)[0])
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
        model.append(held, key, value, [op["n"]] * batch)
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
            c,
            s,
            query[b].astype(np.float64),
            scale,
            {**o, **functions_of(op, c["queries"], b)[1]},
            tree,
        )
        close(f"out of sequence {b}", found[b], want, error, "float32")
        if lse is not None:
            close(f"lse of sequence {b}", lse[b], want_lse, lse_error, "float32")
