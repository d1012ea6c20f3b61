"""flex_attention: score and mask functions, fused into the kernels, against the same functions
called with float64 arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import numflash

from . import oracle
from .arrays import array
from .checks import OWN, as_bhld, expected, four, held, make_options
from .compare import same_kind
from .oracle import EPS


def score_function(c: dict) -> tuple[Callable | None, Callable]:
    """The score function of a case, and what it makes of errors of scores.

    f(error, score before).
    """
    rng = np.random.default_rng(c["seed"])
    slopes = rng.uniform(-0.1, 1, c["h"]).astype(np.float32)
    table = rng.standard_normal((c["h"], c["l"] + c["s"] + 1)).astype(np.float32)
    keys, cap = c["s"], c["number"]

    def wave(error, score):
        return error + np.where(np.abs(score) < 1e3, np.minimum(3 * error + 1e-5, 2), 2)

    found: dict[str, tuple[Callable | None, Callable]] = {
        "none": (None, lambda error, score: error),
        "slopes": (lambda s, b, h, q, k: s - slopes[h] * abs(q - k), lambda error, score: error),
        "table": (lambda s, b, h, q, k: s + table[h, q - k + keys], lambda error, score: error),
        "tanh": (
            lambda s, b, h, q, k: cap * np.tanh(s / cap),
            lambda error, score: np.minimum(error, 2 * cap) + 4e-6 * cap,
        ),
        "where": (
            lambda s, b, h, q, k: np.where(q % 2 == k % 2, s * 0.5, np.where(k % 3 == 0, s * 2, s)),
            lambda error, score: 2 * error,
        ),
        "causal": (
            lambda s, b, h, q, k: np.where(q >= k, s, -np.inf),
            lambda error, score: error,
        ),
        "wave": (lambda s, b, h, q, k: s + np.sin(s * 3.0), wave),
    }
    return found[c["score"]]


def mask_function(c: dict) -> Callable | None:
    rng = np.random.default_rng(c["seed"] + 1)
    width = c["width"]
    prefix = rng.integers(0, c["s"] + 1, c["b"])
    lengths = rng.integers(0, c["s"] + 1, c["b"]).astype(np.int32)
    documents = np.sort(rng.integers(0, 4, max(c["l"], c["s"])))
    found: dict[str, Callable | None] = {
        "none": None,
        "window": lambda b, h, q, k: (q >= k) & (q - k <= width),
        "prefix": lambda b, h, q, k: (k < prefix[b]) | (q >= k),
        "documents": lambda b, h, q, k: (documents[q] == documents[k]) & ((q >= k) | (h == 0)),
        "lengths": lambda b, h, q, k: k < lengths[b],
        "rows": lambda b, h, q, k: (q % 5 != 2) & (k > q - width),
    }
    return found[c["mask"]]


def flex(c: dict) -> None:
    shapes = {
        "q": (c["b"], c["h"], c["l"], c["d"]),
        "k": (c["b"], c["g"], c["s"], c["d"]),
        "v": (c["b"], c["g"], c["s"], c["dv"]),
    }
    q, k, v = (array(four(shapes[n], 4, c["layout"]), c[n], c["dtype"]) for n in "qkv")
    precision = c["precision"] or OWN[c["dtype"]]
    given, o = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    score, moved = score_function(c)
    mask = mask_function(c)
    block = mask and numflash.create_block_mask(
        mask, c["b"], c["h"], c["l"], c["s"], BLOCK_SIZE=c["block"]
    )
    extra = {name: c[name] for name in ("precision", "pv") if c.get(name)}
    out, lse = numflash.flex_attention(
        q, k, v, score, block, enable_gqa=c["g"] != c["h"], return_lse=True, layout=c["layout"], impl=c["impl"],
        **given, **extra,
    )  # fmt: skip
    kept = "float32" if c["dtype"] == "float64" else c["dtype"]
    same_kind("out", out, (*q.shape[:-1], v.shape[-1]), kept)
    same_kind("lse", lse, q.shape[:-1], "float32")
    at = np.ix_(*(np.arange(n) for n in (c["b"], c["h"], c["l"], c["s"])))

    def functions(s, error, seen):
        error = moved(error, s)
        if score is not None:
            s = np.broadcast_to(score(s, *at), s.shape)
            error = error + 8 * EPS * (1 + np.abs(np.where(np.isfinite(s), s, 0)))
            error = error + (8 * EPS * max(c["l"], c["s"]) if c["score"] == "slopes" else 0)
        if mask is not None:
            seen = seen & mask(*at)
        # a score of -inf is hidden, a soft cap after it or not
        return s, error, seen & (s != -np.inf)

    q, k, v = (as_bhld(x, c["layout"]) for x in (q, k, v))
    o = {**o, "functions": functions, "changes scores": score is not None}
    found = expected(q, k, v, o, precision, c.get("pv"))
    stored = oracle.rounded(v, "float32" if precision == "int8" else precision)
    held(found, as_bhld(out, c["layout"]), as_bhld(lse, c["layout"], 0), stored, kept, precision)
