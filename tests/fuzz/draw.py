"""Cases at random.

Each a dictionary of JSON, from which `checks` makes the arrays and the call again.
"""

from __future__ import annotations

from random import Random

from .arrays import DRAWS, USUAL, VIEWS

SMALL = (1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 15, 16, 17)
EDGES = (0, 23, 24, 25, 31, 32, 33, 35, 47, 48, 49, 63, 64, 65, 70, 96, 100)
LONG = (127, 128, 129, 130, 191, 200, 255, 256, 257, 300)
DIMS = (
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    16,
    17,
    24,
    31,
    32,
    32,
    33,
    40,
    48,
    63,
    64,
    64,
    65,
    72,
    80,
    100,
    128,
)
WIDE = (129, 160, 200, 256, 320, 512)
# functions of `flexes`
SCORES = ("none", "slopes", "table", "tanh", "where", "causal", "wave")
MASKS = ("none", "window", "prefix", "documents", "lengths", "rows")
BAD = ("nan", "nan", "inf", "-inf")


def length(rng: Random) -> int:
    return rng.choice(rng.choices((SMALL, EDGES, LONG), (12, 7, 1))[0])


def dim(rng: Random) -> int:
    return rng.choice(WIDE if rng.random() < 0.03 else DIMS)


def operand(rng: Random, ndim: int, usual: bool, bad: bool, values: tuple[str, ...] = BAD) -> dict:
    like = {"draw": rng.choice(USUAL if usual else DRAWS), "seed": rng.randrange(1 << 30)}
    if bad:
        like["bad"] = [
            [rng.randrange(1 << 20), rng.choice(values)] for _ in range(rng.choice((1, 1, 2, 3)))
        ]
    if rng.random() < 0.2:
        like["view"] = [rng.choice(VIEWS), rng.randrange(ndim)]
    return like


def options(
    rng: Random, b: int, h: int, length: int, s: int, int8: bool, packed: bool = False
) -> dict:
    """Options of `attention` as JSON; arrays are described as operands are."""
    o: dict = {}
    some = rng.random
    if some() < 0.3:
        o["is_causal"] = True
    if some() < 0.25:
        o["window"] = [rng.choice((None, 0, 1, 3, 17, 64, 130, 10**6)) for _ in "lr"]
    if some() < 0.35:
        o["alignment"] = "lower_right"
    if some() < 0.15:
        o["scale"] = rng.choice((0.0, 1.0, -0.3, 0.01, 3.0, 1e-30, 1e30 if some() < 0.2 else 0.5))
    if some() < 0.12:
        o["softcap"] = rng.choice(
            (1e-3, 0.5, 2.0, 30.0, 1e4) if int8 else (1e-3, 0.5, 2.0, 30.0, 1e4, 1e30)
        )
    if some() < 0.15:
        o["alibi_slopes"] = {"batch": not packed and some() < 0.3, "seed": rng.randrange(1 << 30)}
        o["alibi_slopes"]["size"] = rng.choice((0.1, 1.0, 5.0, 1e20 if some() < 0.1 else 50.0))
    if some() < 0.12:
        o["sinks"] = {
            "seed": rng.randrange(1 << 30),
            "size": rng.choice((1.0, 1.0, 10.0, 1e20 if some() < 0.1 else 80.0)),
        }
    if packed:
        return o
    if some() < 0.2:
        o["key_lengths"] = [rng.randint(0, s) for _ in range(b)]
    if some() < 0.35:
        o["attn_mask"] = mask(rng)
    return o


def mask(rng: Random) -> dict:
    m = {
        "kind": rng.choice(("bool", "bool", "float", "float", "inf", "blocks", "lowest")),
        "seed": rng.randrange(1 << 30),
        "axes": rng.choice(("bhls", "bhls", "ls", "b11s", "11ls", "1hls", "s", "b1ls", "bh1s")),
        "share": rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
        "dtype": rng.choice(("float32", "float32", "float64", "float16")),
    }
    if rng.random() < 0.2:
        m["view"] = [rng.choice(VIEWS[:-1]), rng.randrange(4)]
    return m


def shapes(rng: Random) -> dict:
    g = rng.choice((1, 1, 1, 2, 3))
    c = {
        "b": rng.choice((1, 1, 1, 2, 3)),
        "h": g * rng.choice((1, 1, 2, 4)),
        "g": g,
        "l": length(rng),
        "s": length(rng),
    }
    if rng.random() < 0.4:
        c["s"] = c["l"]
    if rng.random() < 0.01:
        c["b"] = 0
    c["d"] = dim(rng)
    c["dv"] = c["d"] if rng.random() < 0.7 else dim(rng)
    return c


def attention(rng: Random) -> dict:
    c = {"kind": "attention", **shapes(rng)}
    c["dtype"] = rng.choice(("float32", "float32", "float32", "float64", "float16", "bfloat16"))
    c["precision"] = rng.choice((None, None, "int8", "int8", "float32", "bfloat16", "float16"))
    if c["precision"] == "int8":
        c["pv"] = rng.choice((None, "int8", "int16", "bf16", "fp32"))
    c["ndim"] = rng.choice((2, 3, 4, 4, 4)) if c["b"] == 1 else 4
    if c["ndim"] == 2:
        c["h"] = c["g"] = 1
    c["layout"] = rng.choice(("bhld", "bhld", "blhd"))
    c["impl"] = rng.choice(("auto", "auto", "cpu", "portable" if rng.random() < 0.3 else "auto"))
    usual = rng.random() < 0.85
    bad = rng.random() < 0.15
    for name in "qkv":
        c[name] = operand(rng, c["ndim"], usual, bad and rng.random() < 0.5)
    c["options"] = options(rng, c["b"], c["h"], c["l"], c["s"], c["precision"] == "int8")
    return c


def quantised(rng: Random) -> dict:
    """attention_int8 on QuantizedTensors made here.

    Any int8 data, -128 included, and scales of any size.
    """
    c = {
        "kind": "quantised",
        **shapes(rng),
        "ndim": 4,
        "pv": rng.choice(("int8", "int16", "bf16", "fp32")),
    }
    c["granularity"] = [rng.choice(("row", "row", "block", "tensor")) for _ in "qk"]
    c["granularity"].append(
        rng.choice(
            ("row", "block", "channel", "tensor")
            if c["pv"] in ("bf16", "fp32")
            else ("channel", "tensor")
        )
    )
    c["scales"] = [
        rng.choice((0.0, 0.01, 0.01, 0.01, 0.1, 1.0, 1e-20, 1e10 if rng.random() < 0.2 else 0.02))
        for _ in "qkv"
    ]
    c["offset"], c["seed"] = rng.random() < 0.3, rng.randrange(1 << 30)
    c["bad"] = [rng.random() < 0.1 for _ in "qkv"]
    # what rounding took from the first rows: none, an array, one of a stride; rarely a wrong one
    c["low"] = [rng.choice((None, "plain", "plain", "axes", "step", "reverse")) for _ in "qkv"]
    if rng.random() < 0.03:
        c["wrong low"] = [rng.choice((0, 1, 2)), rng.choice(("rows", "channels", "dtype", "size"))]
    c["options"] = options(rng, c["b"], c["h"], c["l"], c["s"], True)
    return c


def flex(rng: Random) -> dict:
    c = {"kind": "flex", **shapes(rng)}
    c.update({n: max(1, c[n]) for n in "bls"})
    c["dtype"] = rng.choice(("float32", "float32", "float64", "float16", "bfloat16"))
    c["precision"] = rng.choice((None, None, "float32", "bfloat16", "float16", "int8", "int8"))
    c["layout"] = rng.choice(("bhld", "bhld", "blhd"))
    c["impl"] = rng.choice(("auto", "auto", "auto", "portable"))
    c["score"], c["mask"] = rng.choice(SCORES), rng.choice(MASKS)
    c["seed"], c["number"] = rng.randrange(1 << 30), rng.choice((0.5, 2.0, 20.0))
    c["block"], c["width"] = rng.choice((8, 32, 64, 128)), rng.choice((0, 1, 20, 100))
    bad = rng.random() < 0.15
    for name in "qkv":
        c[name] = operand(rng, 4, True, bad and rng.random() < 0.5)
    c["options"] = options(rng, c["b"], c["h"], c["l"], c["s"], False) if rng.random() < 0.4 else {}
    if c["precision"] == "int8":  # the others belong into the functions
        c["pv"] = rng.choice((None, "int8", "int16", "bf16", "fp32"))
        for name in ("attn_mask", "softcap", "alibi_slopes"):
            c["options"].pop(name, None)
    return c


def varlen(rng: Random) -> dict:
    c = {"kind": "varlen", **shapes(rng)}
    n = rng.choice((1, 2, 3, 5, 8))
    c["lengths_q"], c["lengths_k"] = ([min(length(rng), 100) for _ in range(n)] for _ in "qk")
    if rng.random() < 0.5:
        c["lengths_k"] = c["lengths_q"]
    c["dtype"] = rng.choice(("float32", "float32", "float16", "bfloat16"))
    c["precision"] = rng.choice((None, None, "int8", "float32", "bfloat16"))
    if c["precision"] == "int8":
        c["pv"] = rng.choice((None, None, "int16", "bf16", "fp32"))
    usual = rng.random() < 0.85
    bad = rng.random() < 0.15
    for name in "qkv":
        c[name] = operand(rng, 3, usual, bad and rng.random() < 0.5)
    c["options"] = options(rng, 1, c["h"], 1, 1, c["precision"] == "int8", packed=True)
    if rng.random() < 0.5:
        c["do"] = operand(rng, 3, usual, bad and rng.random() < 0.3)
    return c


def merge(rng: Random) -> dict:
    c = {
        "kind": "merge",
        "shape": [rng.choice((1, 2, 3, 7, 0)) for _ in range(rng.choice((0, 1, 2, 3)))],
        "dv": dim(rng),
    }
    c["dtype"] = rng.choice(("float32", "float64", "float16", "bfloat16"))
    c["lse_dtype"] = rng.choice(("float32", "float64"))
    usual = rng.random() < 0.8
    ndim = len(c["shape"]) + 1
    c["a"], c["b"] = (operand(rng, ndim, usual, rng.random() < 0.1) for _ in "ab")
    size = rng.choice((1.0, 10.0, 100.0, 1e30))
    c["lse"] = [
        {"seed": rng.randrange(1 << 30), "size": size, "special": rng.choice((0, 0, 0.3))}
        for _ in "ab"
    ]
    return c


def backward(rng: Random) -> dict:
    c = {"kind": "backward", **shapes(rng), "ndim": 4}
    c["dtype"] = rng.choice(("float32", "float32", "float32", "float16", "bfloat16"))
    c["layout"] = rng.choice(("bhld", "bhld", "blhd"))
    c["impl"] = rng.choice(("auto", "auto", "auto", "portable"))
    c["grad_lse"] = rng.choice((0.0, 0.0, 1.0, 30.0))
    usual = rng.random() < 0.9
    bad = rng.random() < 0.1
    for name in ("q", "k", "v", "do"):
        c[name] = operand(rng, 4, usual, bad and rng.random() < 0.4)
    c["options"] = options(rng, c["b"], c["h"], c["l"], c["s"], False)
    return c


def torch(rng: Random) -> dict:
    c = {"kind": "torch", **shapes(rng)}
    c["dtype"] = rng.choice(("float32", "float32", "bfloat16", "float16"))
    c["precision"] = rng.choice((None, None, None, "int8"))
    c["call"] = rng.choice(("sdpa", "attention"))
    c["grad"] = c["precision"] is None and rng.random() < 0.4
    c["grad_lse"] = rng.choice((0.0, 1.0)) * (c["grad"] and c["call"] == "attention")
    for name in ("q", "k", "v", "do"):
        c[name] = {
            "draw": rng.choice(USUAL),
            "seed": rng.randrange(1 << 30),
            "order": rng.sample(range(4), 4),
        }
    o = options(rng, c["b"], c["h"], c["l"], c["s"], c["precision"] == "int8")
    if c["call"] == "sdpa":
        o = {name: x for name, x in o.items() if name in ("is_causal", "scale", "attn_mask")}
        if "attn_mask" in o:
            o.pop("is_causal", None)
    c["options"] = o
    return c


def cache(rng: Random) -> dict:
    """A KV cache and what happens to it."""
    g = rng.choice((1, 2))
    c = {
        "kind": "cache",
        "b": rng.choice((1, 1, 2, 3)),
        "g": g,
        "d": rng.choice((1, 3, 8, 16, 16, 33, 64, 80)),
    }
    c["dv"] = rng.choice((None, None, None, 5, 16, 40))
    kinds = ("int8", "int8", "int4", "int4", "float32", "float32", "bfloat16", "float16")
    c["dtype"] = rng.choice(kinds)
    c["max_length"] = rng.choice((1, 5, 64, 100, 128, 129, 300, 400))
    c["draw"] = rng.choice(
        (
            "normal",
            "normal",
            "normal",
            "peaked",
            "small",
            "integers",
            "biased",
            "mixed",
            "zeros",
            "huge",
        )
    )
    kind = rng.choice(("plain", "plain", "pages", "ring"))
    if kind == "pages":
        c["page_size"] = rng.choice((128, 128, 256))
        c["pages"] = rng.choice((None, None, 2, 3, 5))
    elif kind == "ring":
        c["window"], c["sinks"] = (
            rng.choice((1, 2, 7, 60, 100, 128, 200)),
            rng.choice((0, 0, 1, 4, 130)),
        )
    c["smooth"] = c["dtype"] in ("int8", "int4") and rng.random() < 0.3
    c["queries"] = c["g"] * rng.choice((1, 1, 2, 4))
    if rng.random() < 0.2:
        latent(rng, c)
    if c["dtype"] == "int8":
        c["rotate"] = rng.random() < 0.4
    c["ops"] = [step(rng, c) for _ in range(rng.choice((2, 3, 5, 8, 12)))]
    return c


def latent(rng: Random, c: dict) -> None:
    """The cache with its values in its keys."""
    c.update(value_in_key=True, smooth=False, dtype=rng.choice(("int8", "float32", "bfloat16")))
    c["dv"] = rng.choice((None, 1, max(1, c["d"] // 2), max(1, c["d"] - 1), c["d"]))
    c["queries"] = c["g"] * rng.choice((1, 2, 5, 16, 17))


def step(rng: Random, c: dict) -> dict:
    name = rng.choices(
        ("append", "decode", "step", "reset", "share", "truncate", "reorder", "repeat", "reserve", "copy", "state"),
        (16, 16, 8, 2, 4 if "page_size" in c else 0, 3, 3, 1, 1, 1, 1),
    )[0]  # fmt: skip
    op: dict = {"op": name, "seed": rng.randrange(1 << 30)}
    if name in ("append", "step"):
        op["n"] = rng.choice((0, 1, 1, 1, 2, 3)) if name == "append" else rng.choice((1, 1, 2))
        if name == "append" and rng.random() < 0.5:
            op["n"] = rng.choice((15, 16, 17, 40, 64, 100, 127, 128, 130))
        if name == "append" and rng.random() < 0.25:
            op["counts"] = [rng.randint(0, op["n"]) for _ in range(c["b"])]
        if rng.random() < 0.08:
            op["bad"] = [rng.choice("kv"), [[rng.randrange(1 << 20), rng.choice(BAD)]]]
        if rng.random() < 0.2:
            op["view"] = [rng.choice(VIEWS[:-1]), rng.randrange(4)]
    if name in ("decode", "step"):
        op["l"] = op["n"] if name == "step" else rng.choice((1, 1, 1, 1, 2, 3))
        op["splits"] = rng.choice((None, None, None, 1, 2, 5))
        op["scale"] = rng.choice((None, None, None, 0.3, -0.2, 0.0))
        op["lse"], op["out"] = name == "decode" and rng.random() < 0.5, rng.random() < 0.2
    if name == "decode" and rng.random() < 0.3:
        op["softcap"] = rng.choice((0, 0, 0.5, 2.0, 30.0))
        op["alibi"] = rng.choice((0, 0, 0.1, 1.0, 20.0))
        op["joins"] = rng.choice((0, 0, 1.0, 10.0))
        op["mask"] = rng.random() < 0.4
        op["score"] = rng.choice((None, None, "slopes", "halves"))
        op["sees"] = rng.choice((None, None, "first", "rows"))
    if name == "truncate":
        op["parts"] = [rng.choice((0, 0.3, 0.9, 0.99, 1)) for _ in range(3)]
    if name == "reorder":
        op["index"] = [rng.randrange(6) for _ in range(rng.choice((1, 2, 3, 4)))]
    if name == "repeat":
        op["times"] = rng.choice((1, 2, 3))
    if name == "reserve":
        op["tokens"] = rng.choice((1, 100, 260, 500))
    if name == "reset":
        op["which"] = rng.choice((None, 0, [rng.randrange(c["b"])]))
    if name == "share":
        op["source"], op["target"] = rng.randrange(c["b"]), rng.randrange(c["b"])
        op["length"] = rng.choice((None, None, 0, 1, 100, 128, 200))
    return op


def refused(rng: Random) -> dict:
    """A call with one argument that is not allowed."""
    from .invalid import WRONG

    c = attention(rng)
    c["options"].pop("key_lengths", None)
    c.update(
        kind="refused",
        b=max(1, c["b"]),
        l=max(1, c["l"]),
        s=max(1, c["s"]),
        wrong=rng.choice(sorted(WRONG)),
    )
    return c


KINDS = {
    "attention": (attention, 50),
    "quantised": (quantised, 10),
    "varlen": (varlen, 6),
    "merge": (merge, 4),
    "backward": (backward, 8),
    "cache": (cache, 14),
    "torch": (torch, 4),
    "flex": (flex, 5),
    "refused": (refused, 8),
}


def case(seed: int, number: int, kinds: tuple[str, ...]) -> dict:
    """The numbered case of a run."""
    rng = Random(f"{seed} {number}")
    return KINDS[rng.choices(kinds, [KINDS[kind][1] for kind in kinds])[0]][0](rng)
