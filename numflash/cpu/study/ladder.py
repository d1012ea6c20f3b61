"""The ladder: one head of attention, made faster one idea at a time, every rung checked before it
is timed.

`python -m numflash.cpu.study.ladder 4096 64` climbs it and prints what each rung reaches, against
float64 and the peaks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from ... import reference, validation
from ...errors import ArgumentError, UnsupportedError
from ...jit import target
from ...jit.threads import limit, one_at_a_time
from ...measure.metrics import errors
from ...measure.timing import median_time
from ...validation.options import Options
from . import ladder_float, ladder_int8

F = np.float32
BLOCK_Q, BLOCK_K = 48, 64  # of the float rungs: the tile of the L4 analysis


@dataclass(frozen=True)
class Rung:
    """A step of the ladder: what changed, and why it is faster or slower than the rung before."""

    number: int
    name: str
    precision: str
    why: str


LADDER = (
    Rung(
        1,
        "naive",
        "float32",
        "The definition, in three passes over a whole matrix of scores: 4 L S bytes written once, read four times, written twice "
        "more. Dot products and sums are vectorised by the compiler; exp2 is a call per score.",
    ),
    Rung(
        2,
        "online",
        "float32",
        "One pass and no matrix: memory no longer grows with L S. Not faster by itself: every key waits for the maximum before "
        "it, and all of K and V passes by for every row.",
    ),
    Rung(
        3,
        "tiled",
        "float32",
        "A tile of 48 rows shares each block of 64 keys: K and V come from far away once per tile, scores stay in the first-level "
        "cache, and the output shrinks at most once per tile. Faster where memory was the limit.",
    ),
    Rung(
        4,
        "packed",
        "float32",
        "K transposed by block: a vector holds 16 keys, so no dot product ends in adding up its lanes, and four products share "
        "each load and store of a sum. Still one load per product: far from the peak.",
    ),
    Rung(
        5,
        "unfused",
        "int8",
        "The register tile: 6 rows times 4 vectors of sums stay in registers, 64 products an instruction where the CPU has them. "
        "But the scores and weights of the whole problem go through memory, 3 bytes each.",
    ),
    Rung(
        6,
        "fused",
        "int8",
        "The same parts, tile by tile: scores and weights of a few rows and 128 keys never leave the cache.",
    ),
    Rung(
        7,
        "parallel",
        "int8",
        "Query tiles do not depend on each other: threads take the next one from a shared counter.",
    ),
    Rung(
        8,
        "causal",
        "int8",
        "Tiles above the diagonal are skipped, those on it masked, the longest rows go first: half the work, less what the tiles "
        "on the diagonal waste.",
    ),
)
NAMES = tuple(rung.name for rung in LADDER)


def vector_isa() -> str:
    """The best instruction set whose tiles are vector registers, which the course is about.

    Matrix tiles (AMX) are not asked for.

    Raises
    ------
    UnsupportedError
        The CPU has neither AVX2, nor dot products of NEON, nor SVE.
    """
    found = [isa for isa in target.available() if isa not in ("amx_int8", "portable")]
    if not found:
        raise UnsupportedError(
            f"isa: {target.cpu_name()!r} has no register tiles; allowed: AVX2, NEON dot products or SVE"
        )
    return found[0]


def prepare(
    name: str,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    workers: int = 1,
    isa: str | None = None,
) -> Callable[[], np.ndarray]:
    """A call without arguments that runs the rung on query (L, D), key (S, D) and value (S, Dv)
    float32; returns (L, Dv) float32.

    Packing is part of the call; quantisation is not. Rung "causal" hides keys after a query's own
    position.

    Raises
    ------
    ArgumentError
        `name` is no rung, or see `ladder_int8.quantise`.
    UnsupportedError
        An integer rung, and the CPU has no register tiles.
    """
    if name not in NAMES:
        raise ArgumentError(f"name: got {name!r}; allowed: {', '.join(map(repr, NAMES))}")
    if LADDER[NAMES.index(name)].precision == "int8":
        isa = target.require(isa or vector_isa())
        operands = ladder_int8.quantise(isa, query, key, value)

        def integer() -> np.ndarray:
            with one_at_a_time(), limit(workers):
                return ladder_int8.run(name, isa, operands, workers)

        return integer
    q, k, v = (np.ascontiguousarray(x, F) for x in (query, key, value))
    scale, o = F(np.log2(np.e) / np.sqrt(q.shape[1])), np.empty((q.shape[0], v.shape[1]), F)
    if name == "naive":
        s = np.empty((q.shape[0], k.shape[0]), F)
        return lambda: ladder_float.naive(q, k, v, scale, s, o) or o
    if name == "online":
        return lambda: ladder_float.online(q, k, v, scale, o) or o
    tile = np.empty((BLOCK_Q, BLOCK_K), F), np.empty(BLOCK_Q, F), np.empty(BLOCK_Q, F)
    if name == "tiled":
        return lambda: ladder_float.make_tiled(BLOCK_Q, BLOCK_K)(q, k, v, scale, *tile, o) or o
    blocks = np.empty((-(-k.shape[0] // BLOCK_K), k.shape[1], BLOCK_K), F)

    def packed() -> np.ndarray:
        ladder_float.pack(k, blocks)
        ladder_float.make_packed(BLOCK_Q, BLOCK_K)(q, blocks, v, scale, *tile, o)
        return o

    return packed


def climb(
    length: int, d: int, workers: int = 1, repeats: int = 5
) -> Iterator[tuple[Rung, float, float]]:
    """Every rung on N(0, 1).

    (rung, median seconds, relative L1 error against float64), each checked before it is timed.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((length, d), F) for _ in range(3))
    exact = {
        causal: reference.oracle(validation.problem(q, k, v, Options(is_causal=causal)))[0][0, 0]
        for causal in (False, True)
    }
    for rung in LADDER:
        if rung.precision == "int8" and target.available() == ["portable"]:
            return
        call = prepare(rung.name, q, k, v, workers if rung.number >= 7 else 1)
        error = errors(call(), exact[rung.name == "causal"]).relative_l1
        if not error < (1e-4 if rung.precision == "float32" else 0.05):
            raise AssertionError(f"rung {rung.name}: relative L1 error {error:.2g} against float64")
        yield rung, median_time(call, repeats), error


def main(arguments: list[str]) -> None:
    length, d, workers = [*map(int, arguments), *(2048, 128, 1)[len(arguments) :]]
    print(f"{'rung':12} {'ms':>9} {'GOP/s':>7}  error")
    for rung, seconds, error in climb(length, d, workers):
        work = 4 * d * (length * (length + 1) / 2 if rung.name == "causal" else length * length)
        print(
            f"{rung.number} {rung.name:10} {1e3 * seconds:9.2f} {work / seconds / 1e9:7.1f}  {error:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
