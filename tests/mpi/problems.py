"""Attention problems over ranks, and ways to split them.

What worker.py computes and the tests hold it against.
"""

import random
from itertools import pairwise

from numflash.mpi import Split

SPLITS = ("plain", "zigzag", "unequal", "cyclic")
SMALL = {"b": 2, "h": 4, "hkv": 2, "l": 37, "d": 16, "dv": 8}
LONG = {"h": 2, "l": 1024, "d": 32}
# name: shapes and options; (B, H, L, D) problems of which each rank holds its shard
PROBLEMS = {
    "plain": (SMALL, {}),
    "causal": (SMALL, {"is_causal": True}),
    "window": (SMALL, {"window": (5, 3)}),
    "narrow": (SMALL, {"window": (0, 0), "is_causal": True}),
    "padded": (SMALL, {"key_lengths": [30, 5], "softcap": 2.0, "scale": 0.3}),
    "unseen": (SMALL, {"key_lengths": [0, 37], "window": (3, None)}),
    "everything": (
        SMALL,
        {
            "key_lengths": [30, 37],
            "alignment": "lower_right",
            "is_causal": True,
            "sinks": [1.0, 2.0, 0.0, -1.0],
            "alibi_slopes": [0.1, 0.2, 0.3, 0.4],
        },
    ),
    "cross": (
        {**SMALL, "s": 90},
        {"is_causal": True, "alignment": "lower_right", "window": (40, None)},
    ),
    "short": ({**SMALL, "s": 9}, {"key_lengths": [2, 4]}),
    "few": ({**SMALL, "l": 2, "s": 3}, {"is_causal": True}),
    "one": ({**SMALL, "l": 1}, {}),
    "no_keys": ({**SMALL, "s": 0}, {"sinks": [1.0, 2.0, 0.0, -1.0]}),
    "no_queries": ({**SMALL, "l": 0, "s": 5}, {}),
    "no_batch": ({**SMALL, "b": 0}, {}),
}


def splits(name, length, ranks):
    """A Split of each kind, and what to pass for it."""
    rng = random.Random(ranks)
    if name == "unequal":  # with empty ranks
        cuts = sorted(rng.choices(range(length + 1), k=ranks - 1))
        cuts = [0, *cuts, length]
        return Split.of_lengths([b - a for a, b in pairwise(cuts)]), "plain"
    if name == "cyclic":  # blocks of 4 dealt like cards
        blocks = [(a, min(a + 4, length)) for a in range(0, length, 4)]
        split = Split(tuple(tuple(blocks[r::ranks]) for r in range(ranks)))
        return split, split
    return getattr(Split, name)(length, ranks), name
