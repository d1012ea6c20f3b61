"""One check for each kind of case.

Make its arrays, call numflash, hold the result against the oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import numflash
from numflash import QuantizedTensor
from numflash.errors import ArgumentError
from numflash.interop.arrays import RESULTS

from . import oracle
from .arrays import array, laid_out
from .compare import WrongError, close, inside, same_kind
from .oracle import Expected, Quantized

OWN = {"float32": "float32", "float64": "float32", "float16": "float16", "bfloat16": "bfloat16"}


def make_mask(m: dict, shape: tuple[int, int, int, int]) -> np.ndarray:
    """A mask that broadcasts to (B, H, L, S)."""
    b, h, length, s = shape
    sizes = {"b": b, "h": h, "l": length, "s": s, "1": 1}
    shape = tuple(sizes[a] for a in m["axes"])
    rng = np.random.default_rng(m["seed"])
    seen = rng.random(shape) < m["share"]
    if m["kind"] == "blocks":
        seen = np.broadcast_to(
            rng.random((*shape[:-1], -(-shape[-1] // 32))) < m["share"],
            (*shape[:-1], -(-shape[-1] // 32)),
        )
        seen = np.repeat(seen, 32, -1)[..., : shape[-1]]
    if m["kind"] in ("bool", "blocks"):
        found = seen
    else:
        x = rng.standard_normal(shape) * (1 if m["kind"] != "inf" else 0)
        hidden = np.finfo(m["dtype"]).min if m["kind"] == "lowest" else -np.inf
        found = np.where(seen, x, hidden if m["kind"] != "float" else 10 * x).astype(m["dtype"])
    return laid_out(np.ascontiguousarray(found), m.get("view") if found.size else None)


def make_options(o: dict, b: int, h: int, length: int, s: int) -> tuple[dict, dict]:
    """Options for numflash, and for the oracle."""
    given: dict[str, Any] = {}
    for name, x in o.items():
        if name == "attn_mask":
            given[name] = make_mask(x, (b, h, length, s))
        elif name == "alibi_slopes":
            shape = (b, h) if x["batch"] else (h,)
            given[name] = (
                np.random.default_rng(x["seed"]).uniform(-0.2, 1, shape) * x["size"]
            ).astype(np.float32)
        elif name == "sinks":
            given[name] = (np.random.default_rng(x["seed"]).uniform(-1, 1, h) * x["size"]).astype(
                np.float32
            )
        elif name == "key_lengths":
            given[name] = np.array(x, np.int64)
        elif name == "window":
            given[name] = tuple(x)
        else:
            given[name] = x
    return given, dict(given)


def with_other_arrays(given: dict, s: int) -> dict | None:
    """Options with other numbers in their arrays, for a call that leaves a plan for the one that is
    checked; None if there are no arrays.
    """
    arrays = {name: x for name, x in given.items() if isinstance(x, np.ndarray)}
    if not arrays:
        return None
    others = {name: np.flip(x).copy() for name, x in arrays.items()}
    if "key_lengths" in arrays:
        longer = int(arrays["key_lengths"].sum()) % 3  # than the ones that are checked, or shorter
        others["key_lengths"] = (
            arrays["key_lengths"] // 2 if longer == 0 else np.full(len(arrays["key_lengths"]), s)
        )
    return {**given, **others}


def four(shape: tuple[int, int, int, int], ndim: int, layout: str) -> tuple[int, ...]:
    """(B, H, L, D) as the caller's array has it."""
    b, h, n, d = shape
    full = (b, h, n, d) if layout == "bhld" else (b, n, h, d)
    return full[4 - ndim :] if ndim > 2 else (n, d)


def as_bhld(x: np.ndarray, layout: str, tail: int = 1) -> np.ndarray:
    """What came or went in the caller's layout as (B, H, L, ...)."""
    lead = x.ndim - tail
    if layout == "blhd":
        x = x[None, :, None] if lead == 1 else x[None] if lead == 2 else x
        return x.swapaxes(1, 2)
    return x.reshape((1,) * (3 - lead) + x.shape)


def operands(c: dict, names: str = "qkv") -> list[np.ndarray]:
    shapes = {
        "q": (c["b"], c["h"], c["l"], c["d"]),
        "k": (c["b"], c["g"], c["s"], c["d"]),
        "v": (c["b"], c["g"], c["s"], c["dv"]),
    }
    return [array(four(shapes[n], c["ndim"], c["layout"]), c[n], c["dtype"]) for n in names]


def expected(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, o: dict, precision: str, pv: str | None
) -> Expected:
    if precision != "int8":
        return oracle.attention(*(oracle.rounded(x, precision) for x in (q, k, v)), o, precision)
    q, k, v = (oracle.rounded(x, "float32") for x in (q, k, v))
    counts = o.get("key_lengths", [k.shape[2]] * k.shape[0])
    smooth = not (o.get("softcap") or o.get("changes scores"))
    keys = oracle.quantized(k, -1, counts, smooth=smooth, finer=pv not in oracle.FLOAT_VALUES)
    if pv in oracle.FLOAT_VALUES:
        exists = np.arange(k.shape[2]) < np.asarray(counts).reshape(-1, 1)
        bad = ~np.isfinite(v).all(-1) & exists[:, None]
        values = Quantized(np.where(np.isfinite(v), v, 0), np.ones(1), 0.0, bad, 0.0, False)
    else:
        values = oracle.quantized(v, -2, counts, finer=True)
    return oracle.attention_int8(oracle.quantized(q, -1), keys, values, o, pv or "int8")


def held(
    found: Expected, out: np.ndarray, lse: np.ndarray, v: np.ndarray, dtype: str, precision: str
) -> None:
    close("out", out, found.out, found.out_error, dtype)
    close("lse", lse, found.lse, found.lse_error, "float32")
    h = out.shape[1]
    room = {"int8": 0.02, "bfloat16": 0.02, "float16": 2e-3}.get(precision, 1e-4)
    if dtype in ("float16", "bfloat16"):
        room = max(room, 0.02)
    inside("out", out, oracle.heads(v, h), room)


def attention(c: dict) -> None:
    q, k, v = operands(c)
    precision = c["precision"] or OWN[c["dtype"]]
    given, o = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    extra = {name: c[name] for name in ("precision", "pv") if c.get(name)}
    extra |= {"enable_gqa": c["g"] != c["h"], "layout": c["layout"], "impl": c["impl"]}
    before = [x.copy() for x in (q, k, v)]
    others = with_other_arrays(given, c["s"])
    if others:
        numflash.attention(q, k, v, **others, **extra, return_lse=True)
    out, lse = numflash.attention(q, k, v, **given, **extra, return_lse=True)
    for x, old in zip((q, k, v), before, strict=True):
        if x.tobytes() != old.tobytes():
            raise AssertionError("an input was written to")
    kept = "float32" if c["dtype"] == "float64" else c["dtype"]
    same_kind("out", out, (*q.shape[:-1], v.shape[-1]), kept)
    same_kind("lse", lse, q.shape[:-1], "float32")
    q, k, v = (as_bhld(x, c["layout"]) for x in (q, k, v))
    found = expected(q, k, v, o, precision, c.get("pv"))
    stored = oracle.rounded(v, "float32" if precision == "int8" else precision)
    held(found, as_bhld(out, c["layout"]), as_bhld(lse, c["layout"], 0), stored, kept, precision)


def low_rows(shape: tuple[int, ...], layout: str, seed: int) -> np.ndarray:
    """What rounding took from the first rows, in memory of a layout."""
    b, h, n, d = shape
    low = np.random.default_rng(seed).integers(-16, 17, (b, h, min(n, oracle.FIRST), d))
    return laid_out(low.astype(np.int8), None if layout == "plain" else [layout, seed % 4])


def spoil(t: QuantizedTensor, how: str) -> QuantizedTensor:
    """A tensor whose `low` does not fit."""
    low = np.zeros((*t.shape[:2], min(t.shape[2], oracle.FIRST), t.shape[3]), np.int8)
    wrong = {
        "rows": np.zeros((*low.shape[:2], low.shape[2] + 1, low.shape[3]), np.int8),
        "channels": low[..., :-1],
        "dtype": low.astype(np.int16),
        "size": low + np.int8(17),
    }
    return replace(t, low=wrong[how])


def tensor(c: dict, i: int, shape: tuple[int, ...]) -> tuple[QuantizedTensor, Quantized]:
    """A QuantizedTensor, and what the oracle makes of it; i: 0, 1, 2 for query, key, value."""
    granularity, seed = c["granularity"][i], c["seed"] + i
    rng = np.random.default_rng(seed)
    b, h, n, d = shape
    data = rng.integers(-128 if seed % 3 == 0 else -127, 128, shape).astype(np.int8)
    rows = {"row": n, "block": -(-n // 128), "channel": 1, "tensor": 1}[granularity]
    scales = rng.uniform(0.5, 1, (b, h, rows, d if granularity == "channel" else 1))
    scales = (scales * c["scales"][i]).astype(np.float32)
    shift = None
    if i == 1 and c["offset"]:
        shift = rng.standard_normal((b, h, 1, d)).astype(np.float32)
    marked = (rng.random((b, h, n)) < 0.1) if c["bad"][i] and granularity == "row" else None
    layout = c.get("low", [None] * 3)[i]
    low = None if layout is None else low_rows(shape, layout, seed)
    t = QuantizedTensor(data, scales, granularity, shift, marked, low=low)
    full = np.repeat(scales, 128, 2)[:, :, :n] if granularity == "block" else scales
    hidden = np.zeros((b, h, n), bool) if marked is None else marked
    known = data.astype(np.float64)
    if low is not None and i and c["pv"] not in oracle.FLOAT_VALUES:
        known[:, :, : low.shape[2]] += low / oracle.FINER
    offset = 0.0 if shift is None else shift.astype(float)
    return t, Quantized(known, full.astype(np.float64), offset, hidden, 0.0, False)


def quantised(c: dict) -> None:
    shapes = (
        (c["b"], c["h"], c["l"], c["d"]),
        (c["b"], c["g"], c["s"], c["d"]),
        (c["b"], c["g"], c["s"], c["dv"]),
    )
    made = [tensor(c, i, shape) for i, shape in enumerate(shapes)]
    given, o = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    call = {**given, "pv": c["pv"], "enable_gqa": c["g"] != c["h"], "return_lse": True}
    tensors = [t for t, _ in made]
    if "wrong low" in c:
        i, how = c["wrong low"]
        tensors[i] = spoil(tensors[i], how)
        if how != "size" or tensors[i].low.size:
            return refused_low(["query", "key", "value"][i], tensors, call)
    others = with_other_arrays(given, c["s"])
    if others:
        numflash.attention_int8(*tensors, **call | others)
    out, lse = numflash.attention_int8(*tensors, **call)
    same_kind("out", out, (*shapes[0][:3], c["dv"]), "float32")
    same_kind("lse", lse, shapes[0][:3], "float32")
    found = oracle.attention_int8(*(x for _, x in made), o, c["pv"])
    close("out", out, found.out, found.out_error, "float32")
    close("lse", lse, found.lse, found.lse_error, "float32")


def refused_low(name: str, tensors: list[QuantizedTensor], call: dict) -> None:
    try:
        numflash.attention_int8(*tensors, **call)
    except ArgumentError as error:
        if f"{name}.low" not in str(error):
            raise WrongError(f"the message does not name {name}.low: {error}") from None
    else:
        raise WrongError(f"a wrong {name}.low was accepted")


def varlen(c: dict) -> None:
    at = [np.concatenate([[0], np.cumsum(c[f"lengths_{n}"])]).astype(np.int32) for n in "qk"]
    shapes = {
        "q": (at[0][-1], c["h"], c["d"]),
        "k": (at[1][-1], c["g"], c["d"]),
        "v": (at[1][-1], c["g"], c["dv"]),
    }
    q, k, v = (array(shapes[n], c[n], c["dtype"]) for n in "qkv")
    precision = c["precision"] or OWN[c["dtype"]]
    given, o = make_options(c["options"], 1, c["h"], 1, 1)
    extra = {name: c[name] for name in ("precision", "pv") if c.get(name)}
    out, lse = numflash.attention_varlen(
        q, k, v, *at, **given, **extra, enable_gqa=c["g"] != c["h"], return_lse=True
    )
    same_kind("out", out, (*q.shape[:2], c["dv"]), c["dtype"])
    same_kind("lse", lse, q.shape[:2], "float32")
    for n in range(len(at[0]) - 1):
        rows = slice(at[0][n], at[0][n + 1])
        keys = slice(at[1][n], at[1][n + 1])
        if rows.start == rows.stop:
            continue
        one = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        found = expected(*one, o, precision, c.get("pv"))
        stored = oracle.rounded(one[2], "float32" if precision == "int8" else precision)
        held(
            found,
            out[rows].swapaxes(0, 1)[None],
            lse[rows].swapaxes(0, 1)[None],
            stored,
            c["dtype"],
            precision,
        )
    if c.get("do") and c["precision"] in (
        None,
        "float32",
    ):  # which round no gradient of another kind
        varlen_gradients(c, (q, k, v), at, given, o, out, lse)


def varlen_gradients(
    c: dict,
    operands: tuple,
    at: list[np.ndarray],
    given: dict,
    o: dict,
    out: np.ndarray,
    lse: np.ndarray,
) -> None:
    """Those of each packed sequence; only of finite operands."""
    do = array(out.shape, c["do"], c["dtype"])
    of_lse = np.random.default_rng(c["do"]["seed"]).standard_normal(lse.shape).astype(np.float32)
    extra = {"precision": c["precision"]} if c.get("precision") else {}
    found = numflash.attention_varlen_backward(
        do, *operands, out, lse, *at, grad_lse=of_lse, **given, **extra, enable_gqa=c["g"] != c["h"]
    )
    precision = c["precision"] or OWN[c["dtype"]]
    for name, got, like in zip(("dq", "dk", "dv"), found, operands, strict=True):
        same_kind(name, got, like.shape, c["dtype"])
    for n in range(len(at[0]) - 1):
        rows, keys = (slice(x[n], x[n + 1]) for x in at)
        if rows.start == rows.stop or keys.start == keys.stop:
            continue
        named = zip((*operands, do, out), (rows, keys, keys, rows, rows), strict=True)
        q, k, v, grad, result = (
            oracle.rounded(x[cut].swapaxes(0, 1)[None], c["dtype"]) for x, cut in named
        )
        if not all(np.isfinite(x).all() for x in (q, k, v, grad)):
            continue
        q, k, v, grad = (oracle.rounded(x, precision) for x in (q, k, v, grad))
        states = (x[rows].T[None].astype(np.float64) for x in (lse, of_lse))
        own, own_gradient = states
        if (np.abs(own[np.isfinite(own)]) > 2.0**20).any():  # who wins is a matter of the last bit
            continue
        want, error = oracle.gradients(q, k, v, grad, o, result, own, precision, own_gradient)
        for name, x, cut, right, e in zip(
            ("dq", "dk", "dv"), found, (rows, keys, keys), want, error, strict=False
        ):
            got = x[cut].swapaxes(0, 1)[None]
            e = e + np.where(np.isfinite(right), 0, np.inf)
            close(name, got, np.where(np.isfinite(right), right, 0), e, c["dtype"])


def merge(c: dict) -> None:
    a, b = (array((*c["shape"], c["dv"]), c[n], c["dtype"]) for n in "ab")
    states = []
    for like in c["lse"]:
        rng = np.random.default_rng(like["seed"])
        x = rng.standard_normal(c["shape"]) * like["size"]
        special = rng.random(c["shape"]) < like["special"]
        x = np.where(special, np.where(rng.random(c["shape"]) < 0.7, -np.inf, np.inf), x)
        states.append(np.asarray(x, c["lse_dtype"]))
    out, lse = numflash.merge_states(a, states[0], b, states[1])
    same_kind("out", out, a.shape, c["dtype"])
    same_kind("lse", lse, tuple(c["shape"]), c["lse_dtype"])
    with np.errstate(all="ignore"):
        la, lb = (x.astype(np.float64) for x in states)
        top = np.maximum(la, lb)
        low = np.minimum(la, lb)
        want = np.where(np.isinf(top), top, top + np.log1p(np.exp(low - top)))
        share_a, share_b = (
            np.where(low == top, 0.5, np.where(np.isinf(top), own == top, 1 / (1 + np.exp(away))))
            for own, away in ((la, lb - la), (lb, la - lb))
        )
        share_a, share_b = (np.where(top == -np.inf, 0, x)[..., None] for x in (share_a, share_b))
        fa, fb = (np.asarray(x).astype(np.float64) for x in (a, b))
        merged = np.where(share_a == 0, 0, share_a * fa) + np.where(share_b == 0, 0, share_b * fb)
        # a share too small for float32 may hide what is not finite
        tiny = ((share_a > 0) & (share_a < 1e-30) & ~np.isfinite(fa)) | (
            (share_b > 0) & (share_b < 1e-30) & ~np.isfinite(fb)
        )
        small = 64 * oracle.EPS * (np.abs(share_a * fa) + np.abs(share_b * fb))
        small = small + oracle.TINY * (np.abs(fa) + np.abs(fb))
        off = 8 * oracle.EPS * np.abs(la - lb)[..., None] * np.minimum(share_a, share_b)
        error = small + np.where(np.isfinite(off), off, 0) * (np.abs(fa) + np.abs(fb))
        error = np.where(np.isnan(error), 0, error)
    close("out", out, merged, np.where(tiny, np.inf, error), c["dtype"])
    close(
        "lse",
        lse,
        want,
        16 * oracle.EPS * (1 + np.where(np.isfinite(want), np.abs(want), 0)),
        c["lse_dtype"],
    )


def backward(c: dict) -> None:
    q, k, v = operands(c)
    do = array(four((c["b"], c["h"], c["l"], c["dv"]), c["ndim"], c["layout"]), c["do"], c["dtype"])
    given, o = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    call = {**given, "enable_gqa": c["g"] != c["h"], "layout": c["layout"], "impl": c["impl"]}
    out, lse = numflash.attention(q, k, v, **call, return_lse=True)
    mask = given.get("attn_mask")
    floats = mask is not None and mask.dtype.kind == "f"
    others = [name for name, x in (("attn_mask", floats), ("sinks", "sinks" in given)) if x]
    of_lse = None
    if c.get("grad_lse"):
        draw = np.random.default_rng(c["do"]["seed"])
        of_lse = (c["grad_lse"] * draw.standard_normal(lse.shape)).astype(np.float32)
    *found, scores = numflash.attention_backward(
        do,
        q,
        k,
        v,
        out,
        lse,
        grad_lse=of_lse,
        **call,
        wrt=("query", "key", "value", *others, "scores"),
    )
    for name, got in zip(others, found[3:], strict=True):
        same_kind(
            name,
            got,
            given[name].shape,
            RESULTS.get(given[name].dtype.name, given[name].dtype.name),
        )
    summed = dict(zip(others, found[3:], strict=True))
    found = found[:3]
    for name, got, like in zip(("dq", "dk", "dv"), found, (q, k, v), strict=True):
        same_kind(name, got, like.shape, c["dtype"])
    four_d = [as_bhld(x, c["layout"]) for x in (q, k, v, do, out)]
    q, k, v, do, out = (oracle.rounded(x, c["dtype"]) for x in four_d)
    if not all(np.isfinite(x).all() for x in (q, k, v, do)):
        return unseen(c, found, (q, k, v, do), o)
    lse = as_bhld(lse, c["layout"], 0).astype(np.float64)
    if of_lse is not None:
        of_lse = as_bhld(of_lse, c["layout"], 0).astype(np.float64)
    want, error = oracle.gradients(q, k, v, do, o, out, lse, OWN[c["dtype"]], of_lse)
    results = [*(as_bhld(x, c["layout"]) for x in found), scores]
    dtypes = c["dtype"], c["dtype"], c["dtype"], "float32"
    names = "dq", "dk", "dv", "scores"
    for name, got, dtype, x, e in zip(names, results, dtypes, want, error, strict=True):
        e = e + np.where(np.isfinite(x), 0, np.inf)
        close(name, got, np.where(np.isfinite(x), x, 0), e, dtype)
    if not np.isfinite(scores).all():
        return
    if "attn_mask" in summed:
        got = summed["attn_mask"]
        axes, wide = axis_of(got.shape, scores.shape), scores.astype(np.float64)
        total, terms = (x.sum(axes).reshape(got.shape) for x in (wide, np.abs(wide)))
        close("attn_mask", got, total, terms * 1e-6, got.dtype.name)
    if "sinks" in summed and np.isfinite(lse).all():
        weight = np.exp(np.minimum(given["sinks"][:, None] - lse, 0))
        added = np.zeros(lse.shape) if of_lse is None else of_lse
        terms = weight * ((do * out).sum(-1) - added)
        room = 1e-6 * (weight * (np.abs(do * out).sum(-1) + np.abs(added))).sum((0, 2))
        close("sinks", summed["sinks"], -terms.sum((0, 2)), room, "float32")


def axis_of(small: tuple[int, ...], large: tuple[int, ...]) -> tuple[int, ...]:
    """The axes of a shape along which an array of a smaller one is repeated."""
    whole = (1,) * (len(large) - len(small)) + small
    return tuple(n for n in range(len(large)) if whole[n] != large[n])


def unseen(c: dict, found: tuple, operands: tuple, o: dict) -> None:
    """NaN and infinity reach the gradients of rows that see them and of the keys that these see,
    never those of others.
    """
    q, k, v, do = operands
    seen, _ = oracle.seen_keys((*q.shape[:3], k.shape[2]), o)
    bad = ~np.isfinite(k).all(-1) | ~np.isfinite(v).all(-1)
    row = (seen & oracle.heads(bad[..., None], q.shape[1])[..., 0][..., None, :]).any(-1)
    row |= (~np.isfinite(q).all(-1) | ~np.isfinite(do).all(-1)) & seen.any(-1)
    key = (seen & row[..., None]).any(2)
    key = key.reshape(key.shape[0], k.shape[1], q.shape[1] // k.shape[1], key.shape[2]).any(2)
    for name, got, reached in zip(("dq", "dk", "dv"), found, (row, key, key), strict=True):
        got = as_bhld(got, c["layout"]).astype(np.float64)
        spoiled = np.isnan(got).any(-1) & ~reached
        if spoiled.any():
            raise WrongError(
                f"{name}{np.argwhere(spoiled)[0].tolist()}: got NaN from what it does not see"
            )
