"""Calls with one argument that is not allowed: a NumflashError must name it."""

from __future__ import annotations

import numpy as np

import numflash
from numflash.errors import NumflashError

from .checks import make_options, operands
from .compare import WrongError

# what is wrong: (argument, keywords or changed operands from the case's own)
WRONG = {
    "query is None": ("query", lambda q, k, v: {"query": None}),
    "query of text": ("query", lambda q, k, v: {"query": "text"}),
    "query of integers": ("query", lambda q, k, v: {"query": np.ones(q.shape, np.int32)}),
    "query of objects": ("query", lambda q, k, v: {"query": np.full(q.shape, None)}),
    "query complex": ("query", lambda q, k, v: {"query": np.ones(q.shape, np.complex64)}),
    "query of one dimension": ("query", lambda q, k, v: {"query": q.reshape(-1)}),
    "query of five dimensions": (
        "query",
        lambda q, k, v: {"query": q.reshape((1,) * (5 - q.ndim) + q.shape)},
    ),
    "query masked": (
        "query",
        lambda q, k, v: {"query": np.ma.masked_array(np.ones(q.shape, np.float32))},
    ),
    "key of other channels": (
        "key",
        lambda q, k, v: {"key": np.zeros((*k.shape[:-1], k.shape[-1] + 1), k.dtype)},
    ),
    "key of other dimensions": ("key", lambda q, k, v: {"key": k[None] if k.ndim < 4 else k[0]}),
    "key of another dtype": (
        "key",
        lambda q, k, v: {"key": k.astype("f4" if k.dtype != "f4" else "f8")},
    ),
    "value of another dtype": (
        "value",
        lambda q, k, v: {"value": v.astype("f4" if v.dtype != "f4" else "f8")},
    ),
    "value without channels": ("value", lambda q, k, v: {"value": v[..., :0]}),
    "query and key without channels": (
        "query",
        lambda q, k, v: {"query": q[..., :0], "key": k[..., :0]},
    ),
    "value too wide": ("value", lambda q, k, v: {"value": np.zeros((*v.shape[:-1], 577), v.dtype)}),
    "mask of integers": ("attn_mask", lambda q, k, v: {"attn_mask": np.ones((1, 1), np.int8)}),
    "mask of another shape": (
        "attn_mask",
        lambda q, k, v: {"attn_mask": np.ones((7, 11, 13, 17, 19), bool)},
    ),
    "dropout": ("dropout_p", lambda q, k, v: {"dropout_p": 0.5}),
    "dropout of text": ("dropout_p", lambda q, k, v: {"dropout_p": "0"}),
    "causal of text": ("is_causal", lambda q, k, v: {"is_causal": "yes"}),
    "causal of a number": ("is_causal", lambda q, k, v: {"is_causal": 1}),
    "scale not a number": ("scale", lambda q, k, v: {"scale": float("nan")}),
    "scale infinite": ("scale", lambda q, k, v: {"scale": float("-inf")}),
    "scale too large": ("scale", lambda q, k, v: {"scale": 1e40}),
    "scale of text": ("scale", lambda q, k, v: {"scale": "1"}),
    "scale an array": ("scale", lambda q, k, v: {"scale": np.ones(3)}),
    "window of one": ("window", lambda q, k, v: {"window": (1,)}),
    "window a number": ("window", lambda q, k, v: {"window": 4}),
    "window negative": ("window", lambda q, k, v: {"window": (-1, 0)}),
    "window of fractions": ("window", lambda q, k, v: {"window": (0.5, 0)}),
    "alignment unknown": ("alignment", lambda q, k, v: {"alignment": "middle"}),
    "lengths negative": ("key_lengths", lambda q, k, v: {"key_lengths": [-1]}),
    "lengths of fractions": ("key_lengths", lambda q, k, v: {"key_lengths": [0.5]}),
    "lengths too many": ("key_lengths", lambda q, k, v: {"key_lengths": [0] * 77}),
    "softcap negative": ("softcap", lambda q, k, v: {"softcap": -1.0}),
    "softcap not a number": ("softcap", lambda q, k, v: {"softcap": float("nan")}),
    "softcap tiny": ("softcap", lambda q, k, v: {"softcap": 1e-40}),
    "slopes of another shape": ("alibi_slopes", lambda q, k, v: {"alibi_slopes": np.ones(1234)}),
    "slopes not finite": ("alibi_slopes", lambda q, k, v: {"alibi_slopes": np.full(1234, np.nan)}),
    "sinks of another shape": ("sinks", lambda q, k, v: {"sinks": np.ones((3, 4))}),
    "sinks of text": ("sinks", lambda q, k, v: {"sinks": "no"}),
    "precision unknown": ("precision", lambda q, k, v: {"precision": "float8"}),
    "precision a dtype": ("precision", lambda q, k, v: {"precision": np.float32}),
    "pv unknown": ("pv", lambda q, k, v: {"pv": "fp16", "precision": "int8"}),
    "pv without int8": ("pv", lambda q, k, v: {"pv": "fp32", "precision": "float32"}),
    "layout unknown": ("layout", lambda q, k, v: {"layout": "hbld"}),
    "impl unknown": ("impl", lambda q, k, v: {"impl": "best"}),
    "lse of text": ("return_lse", lambda q, k, v: {"return_lse": "yes"}),
    "grouped of a number": ("enable_gqa", lambda q, k, v: {"enable_gqa": 2}),
}


def refused(c: dict) -> None:
    q, k, v = operands(c)
    given, _ = make_options(c["options"], c["b"], c["h"], c["l"], c["s"])
    name, wrong = WRONG[c["wrong"]]
    extra = {n: c[n] for n in ("precision", "pv") if c.get(n)}
    call = {
        "query": q, "key": k, "value": v, **given, **extra,
        "enable_gqa": c["g"] != c["h"], "layout": c["layout"], "impl": c["impl"], **wrong(q, k, v),
    }  # fmt: skip
    if call.get("precision") != "int8" and name != "pv":
        call.pop("pv", None)
    if call.get("softcap", 0) > 1e4:
        del call["softcap"]
    try:
        numflash.attention(**call)
    except NumflashError as error:
        if name not in str(error):
            raise WrongError(f"the message does not name {name}: {error}") from None
    else:
        raise WrongError(f"{name} was accepted")
