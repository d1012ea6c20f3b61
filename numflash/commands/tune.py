"""`numflash tune`: which tiling of the INT8 kernel is fastest on this machine.

Enumerates what `tiling.using` lets pass, ranks it by a model of a register tile (loads for each dot
product, and whether a tile's arrays fit the cache), measures the best ones in turns, checks that
each has the bits of the integer model, and keeps the fastest in the file that `tiling` reads.
"""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np

from .. import reference, validation
from ..cpu import launch
from ..errors import ArgumentError, NumflashError
from ..jit import target
from ..jit.threads import limit
from ..measure.console import Progress, Table
from ..options import Options
from ..quantization import quantize_problem
from ..tiling import TILINGS, Caches, Tiling, in_use, using
from ..tiling.choice import changed, save

F = np.float32
MR = (2, 4, 6, 8, 12)
NV = (2, 4, 8)
TALLEST = 256  # rows of the query tiles that are tried
ROUNDS = 5


def candidates(isa: str) -> list[Tiling]:
    """Every legal tiling of an instruction set with some usual height."""
    named = TILINGS[f"{isa}-int8"]
    found = {}
    heights = [n * 12 for n in (1, 2, 4, 8, 16)] + [n * 32 for n in (1, 2, 4, 6, 8)]
    for mr, nv, rows in itertools.product(
        {*MR, named.mr}, {*NV, named.nv}, {*heights, named.block_q}
    ):
        try:
            t = changed(named, {"mr": mr, "nv": nv, "block_q": rows})
        except NumflashError:
            continue
        if rows <= TALLEST:
            found[t.mr, t.nv, t.block_q] = t
    return list(found.values())


def modelled(t: Tiling, head_dim: int, caches: Caches) -> float:
    """Relative cost of a dot product: loads beside it, and what does not fit the caches.

    A step of the tile is mr * nv dot products and mr + nv loads, two of each a cycle; a wait of
    some 9 cycles shows where there are fewer than 18 accumulators. K and V come once per query
    tile.
    """
    dots, loads = t.accumulators, t.mr + t.nv
    cost = max(dots, loads, 18) / dots + 0.1 * loads / dots
    cost += 4.0 / t.block_q  # of streaming a key block
    total = sum(t.working_set(head_dim).values())
    return (
        cost + (0.1 if total > caches.l1 else 0) + (0.5 if caches.l2 and total > caches.l2 else 0)
    )


def _arrays(length: int, head_dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, length, head_dim), F) for _ in range(3)]


def _checked(t: Tiling, isa: str) -> None:
    q, k, v = _arrays(70, 40)
    options = Options(precision="int8", is_causal=True)
    problem = quantize_problem(validation.problem(q, k, v, options))
    with using(t):
        out, _ = launch.run(problem, isa)
    if not np.array_equal(out, reference.integer_model(problem)[0]):
        raise ArithmeticError(f"tune: tiling {t.mr} x {t.nv}, block_q {t.block_q} has other bits")


def run(
    length: int = 2048,
    head_dim: int = 128,
    isa: str | None = None,
    measured: int = 4,
    keep: bool = True,
) -> dict[str, Any]:
    """Print the ranking and return it; the fastest is kept in the file of `tiling.choice.save`.

    measured : how many of the ranking are compiled and timed (some 10 s each); 0 for the model
        alone

    Raises
    ------
    ArgumentError, UnsupportedError
        For an instruction set that this machine lacks, or whose sizes are fixed.
    ArithmeticError
        A tiling has other bits than the integer model.
    """
    isa = target.require(isa)
    if isa == "portable":
        raise ArgumentError(
            "isa: 'portable' has fixed sizes; allowed: an instruction set with register tiles"
        )
    caches = Caches.of_this_machine()
    ranked = sorted(candidates(isa), key=lambda t: modelled(t, head_dim, caches))
    now = in_use(isa)
    chosen = [now, *(t for t in ranked if (t.mr, t.nv, t.block_q) != (now.mr, now.nv, now.block_q))]
    chosen = chosen[:measured]
    seconds: dict[int, list[float]] = {n: [] for n in range(len(chosen))}
    if chosen:
        q, k, v = _arrays(length, head_dim)
        problem = quantize_problem(validation.problem(q, k, v, Options(precision="int8")))
        with Progress("tune", len(chosen) + ROUNDS) as progress, limit(1):
            for t in chosen:
                progress.step(f"{t.mr} x {t.nv}, block_q {t.block_q}")
                _checked(t, isa)
                with using(t):
                    launch.run(problem, isa)
            for turn in range(ROUNDS):
                progress.step(f"round {turn + 1}")
                for n, t in enumerate(chosen):
                    with using(t):
                        begin = time.perf_counter()
                        launch.run(problem, isa)
                        seconds[n].append(time.perf_counter() - begin)
    table = Table(
        f"{target.cpu_name()}, {isa}, L = {length}, D = {head_dim}",
        ("register tile", "block_q", "modelled cost", "ms", "spread"),
    )
    for n, t in enumerate(chosen or ranked[:10]):
        times = seconds.get(n)
        table.add(
            f"{t.mr} x {t.nv}",
            str(t.block_q),
            f"{modelled(t, head_dim, caches):.2f}",
            f"{1e3 * min(times):.2f}" if times else "",
            f"{max(times) / min(times) - 1:.0%}" if times else "",
            mr=t.mr,
            nv=t.nv,
            block_q=t.block_q,
            seconds=times,
        )
    table.show()
    result: dict[str, Any] = {"isa": isa, "ranking": table.records, "kept": None}
    if chosen:
        best = chosen[min(seconds, key=lambda n: min(seconds[n]))]
        result["best"] = {"mr": best.mr, "nv": best.nv, "block_q": best.block_q}
        if keep:
            result["kept"] = str(save(best))
            print(f"{best.mr} x {best.nv}, block_q {best.block_q} is kept in {result['kept']}")
    return result
