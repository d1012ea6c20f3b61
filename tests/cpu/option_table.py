"""One table of everything that the CPU's forward kernels have code for, and the problem of each of
its rows.

`rows()` is the whole table; `pairs()` a part of it in which any two settings occur together.
Attention sinks join outside the kernels, so that every row is tested without and with them.
"""

from __future__ import annotations

import itertools
from random import Random

import numpy as np

from numflash.validation import Problem, problem
from numflash.validation.options import Options

# (B, H, Hkv, L, S, D, Dv): rows and keys that cut register, query and key tiles; channels that are
# no multiple of anything
SHAPES = (
    (1, 2, 2, 33, 70, 17, 17),
    (2, 4, 2, 25, 130, 40, 72),
    (1, 1, 1, 70, 257, 64, 64),
    (2, 2, 1, 5, 64, 3, 100),
    (1, 3, 3, 49, 49, 128, 33),
    (1, 2, 2, 97, 20, 80, 5),
)
LEVELS = {
    "shape": range(len(SHAPES)),
    "mask": ("", "bool", "rows", "float", "inf"),
    "band": ("", "causal", "causal lower", "window", "window lower", "left"),
    "softcap": (0.0, 2.0),
    "alibi": ("", "gentle", "steep"),
    "lengths": (False, True),
    "values": ("normal", "peaked", "unseen nan"),
}
BANDS = {
    "": {},
    "causal": {"is_causal": True},
    "causal lower": {"is_causal": True, "alignment": "lower_right"},
    "window": {"window": (19, 6)},
    "window lower": {"window": (40, 0), "alignment": "lower_right"},
    "left": {"window": (7, None)},
}
SLOPES = {"gentle": (0.02, 0.3), "steep": (-1.3, 9.0)}
Row = dict[str, object]


def rows() -> list[Row]:
    """Every combination, in one order."""
    return [
        dict(zip(LEVELS, values, strict=True)) for values in itertools.product(*LEVELS.values())
    ]


def pairs(seed: int = 0) -> list[Row]:
    """Rows in which every two settings meet.

    Of a few random ones, the one that adds most, until none is missing.
    """
    rng = Random(seed)

    def met(row: Row) -> set:
        return set(itertools.combinations(row.items(), 2))

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(LEVELS, 2)
        for x in LEVELS[a]
        for y in LEVELS[b]
    }
    chosen = []
    while missing:
        (a, x), (b, y) = min(missing, key=repr)
        tries = [{name: rng.choice(levels) for name, levels in LEVELS.items()} for _ in range(30)]
        best = max(({**row, a: x, b: y} for row in tries), key=lambda row: len(missing & met(row)))
        chosen.append(best)
        missing -= met(best)
    return chosen


def options(row: Row, rng: np.random.Generator) -> dict:
    """The row's options for `Options`."""
    b, h, _, length, s, _, _ = SHAPES[row["shape"]]  # type: ignore[index]
    found: dict = {**BANDS[row["band"]], "softcap": row["softcap"]}  # type: ignore[index]
    if row["mask"] == "bool":
        found["attn_mask"] = rng.random((b, 1, length, s)) < 0.6
    elif row["mask"] == "rows":  # some rows see nothing, some nothing of the first key block
        found["attn_mask"] = np.broadcast_to(rng.random((1, h, length, 1)) < 0.5, (1, h, length, s))
        found["attn_mask"] = found["attn_mask"] | (
            (np.arange(s) > 128) & (rng.random((length, 1)) < 0.5)
        )
    elif row["mask"] == "float":
        found["attn_mask"] = (3 * rng.standard_normal((1, h, length, s))).astype(np.float32)
    elif row["mask"] == "inf":
        hidden = rng.random((length, s)) < 0.5
        hidden[:, : s // 2] |= rng.random((length, 1)) < 0.3
        found["attn_mask"] = np.where(hidden, -np.inf, rng.standard_normal((length, s)))
    if row["alibi"]:
        found["alibi_slopes"] = np.resize(np.float32(SLOPES[row["alibi"]]), h)  # type: ignore[index]
    if row["lengths"]:
        found["key_lengths"] = [s * 2 // 3, s - 1][:b]
    return found


def operands(row: Row, rng: np.random.Generator) -> list[np.ndarray]:
    """Query, key and value as float32.

    With "unseen nan" the last key is not finite, which few rows or none see.
    """
    b, h, g, length, s, d, dv = SHAPES[row["shape"]]  # type: ignore[index]
    shapes = (b, h, length, d), (b, g, s, d), (b, g, s, dv)
    q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    if row["values"] == "peaked":
        q *= 6
    if row["values"] == "unseen nan":
        k[0, 0, -1, 0], v[-1, -1, -1, -1] = np.nan, np.inf
    return [q, k, v]


def make(row: Row, precision: str, pv: str | None = None) -> Problem:
    """The row's problem; operands and options are drawn by a seed of the row's own."""
    rng = np.random.default_rng(Random(repr(row)).getrandbits(32))
    arrays = operands(row, rng)
    given = Options(
        enable_gqa=True, precision=precision, pv=pv, return_lse=True, **options(row, rng)
    )
    with np.errstate(over="ignore"):
        return problem(*arrays, given)
