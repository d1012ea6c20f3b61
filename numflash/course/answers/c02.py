"""Chapter 02: tiling and caches."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError

from ...jit.compiler import kernel
from ..exercises import Exercise, difference, does_nothing
from .kernels import not_compiled


def _working_set(block_q: int, block_k: int, d: int) -> int:
    return 4 * (2 * block_q * d + 2 * block_k * d + block_q * block_k + 2 * block_q)


def largest_block_q(block_k: int, d: int, cache: int) -> int:
    """The largest multiple of 6 whose working set fits."""
    return max(q for q in range(6, 10000, 6) if _working_set(q, block_k, d) <= cache)


def _usual_cause(said: str) -> str:
    if re.search(r"No implementation of function|unsupported NumPy|Unknown attribute", said):
        return (
            "\n   Numba knows only a part of what NumPy does with whole arrays (no `axis=` in `max`, "
            "no `keepdims=`).\n   Loop over single numbers: compiled, that is fast."
        )
    return ""


def _tile_kib() -> float:
    """Q, K, V in bytes, O, S and a state of four numbers a row in float32: 48 rows, 96 keys."""
    return (48 * 128 + 2 * 96 * 128 + 4 * (48 * 128 + 48 * 96 + 48 * 4)) / 1024


def _ridge(peak: Any) -> float:
    return peak.float32 / peak.read


@kernel
def compiled_tiled(q: Any, k: Any, v: Any, scale: Any, out: Any) -> None:
    """Tiled attention in single numbers: 24 rows, 32 keys."""
    s = np.empty((24, 32), np.float32)
    m, l = np.empty(24, np.float32), np.empty(24, np.float32)
    for row in range(0, q.shape[0], 24):
        rows = min(24, q.shape[0] - row)
        for i in range(rows):
            m[i], l[i] = -np.inf, 0
            out[row + i] = 0
        for c in range(0, k.shape[0], 32):
            keys = min(32, k.shape[0] - c)
            for i in range(rows):
                top = m[i]
                for j in range(keys):
                    dot = np.float32(0)
                    for e in range(q.shape[1]):
                        dot += q[row + i, e] * k[c + j, e]
                    s[i, j] = dot * scale
                    top = max(top, s[i, j])
                shrink = np.exp2(m[i] - top)
                m[i], l[i] = top, l[i] * shrink
                for e in range(out.shape[1]):
                    out[row + i, e] *= shrink
                for j in range(keys):
                    weight = np.exp2(s[i, j] - top)
                    l[i] += weight
                    for e in range(out.shape[1]):
                        out[row + i, e] += weight * v[c + j, e]
        for i in range(rows):
            for e in range(out.shape[1]):
                out[row + i, e] /= l[i]


def _with_room(rows: int, d: int, fill: float) -> tuple[np.ndarray, np.ndarray]:
    """An array (rows, d), and what lies behind it: compiled code does not test its indices."""
    room = np.full((rows + 64, d), fill, np.float32)
    return room[:rows], room[rows:]


def _compiled(answer: Any) -> str:
    rng = np.random.default_rng(6)
    for length, keys, d, scale in ((48, 64, 16, 0.25), (50, 70, 8, 0.5), (30, 100, 8, 100.0)):
        q, k, v = (_with_room(n, d, 0)[0] for n in (length, keys, keys))
        for x in (q, k, v):
            x[:] = rng.standard_normal(x.shape, np.float32)
        t = q.astype(float) @ k.T.astype(float) * scale
        p = 2.0 ** (t - t.max(1, keepdims=True))
        exact = p @ v.astype(float) / p.sum(1, keepdims=True)
        out, behind = _with_room(length, d, np.nan)
        try:
            answer(q, k, v, np.float32(scale), out)
        except NumbaError as error:
            return not_compiled(error) + _usual_cause(str(error))
        if np.isnan(out).all():
            nothing = (
                "it ran, but stored nothing in `out`; a value that it returns is not looked at"
            )
            return "open" if does_nothing(answer) else nothing
        fault = difference(out.astype(float), exact, 1e-5 * max(1.0, scale))
        if not np.isnan(behind).all():
            fault = "it writes behind the last row of `out`; the last tile has fewer rows"
        if fault:
            return f"{length} queries, {keys} keys, D = {d}, scale {scale:g}: {fault}"
    if not (isinstance(answer, Dispatcher) and answer.nopython_signatures):
        return "the numbers are right, but it is not compiled; write @kernel above it"
    return ""


EXERCISES = {
    "02.1": Exercise(
        "KiB of a 48 x 96 tile",
        (
            "Look at the sizes before the equals sign: which of the six parts have 64, the number of keys?",
            "K, V and S grow by a factor of 96 / 64. Q, O and the state stay.",
        ),
        expected=_tile_kib,
        within=0.01,
    ),
    "02.2": Exercise(
        "the largest tile that fits",
        (
            "`working_set` has terms that grow with block_q and terms that do not. Separate them.",
            "The cache minus the fixed part, divided by the bytes of one more row; then round down "
            "to a multiple of 6.",
        ),
        model=largest_block_q,
        cases=((64, 128, 131072), (64, 64, 49152), (64, 128, 127360)),  # the last: all of the cache
        slip=("// 6 * 6", ""),
    ),
    "02.3": Exercise(
        "operations per byte where the roofs meet",
        (
            "A kernel of i operations per byte does at most i * peak.read operations per second.",
            "At which i is that as much as peak.float32?",
        ),
        expected=_ridge,
        within=0.01,
    ),
    "02.4": Exercise(
        "tiled attention, compiled",
        (
            "The loops are those of `tiled` in chapter 00: rows of a tile, blocks of keys, then within a "
            "tile the scores, the softmax and the values of each row.",
            "The last tile and the last block may be smaller: rows = min(24, q.shape[0] - row).",
            "shrink = np.exp2(m[i] - top) multiplies l[i] and every number of the row of `out` before "
            "this block is added. Divide by l[i] after the last block.",
        ),
        model=compiled_tiled,
        judge=_compiled,
        slip=("out[row + i, e] *= shrink", "pass"),
    ),
}
