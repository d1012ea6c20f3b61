"""`numflash tune`: which tiling of a kernel is fastest on this machine.

Enumerates what `tiling.using` lets pass, ranks it by a model of a register tile (loads for each dot
product, and whether a tile's arrays fit the cache), measures the best ones in turns, checks each
(INT8: the bits of the integer model; floats: their budget against float64), and keeps the fastest
in the file that `tiling` reads: the tiling in use, unless another is faster by 2 %. For another CPU
there is the model alone: of float tiles on AArch64 it is llvm-mca's, which sees the instructions.
"""

from __future__ import annotations

import itertools
import math
import time
from typing import Any, NamedTuple

import numpy as np

from .. import reference, validation
from ..cpu import launch
from ..errors import ArgumentError, NumflashError
from ..jit import target
from ..jit.threads import limit
from ..measure.console import Progress, Table
from ..measure.contenders import check_request
from ..measure.metrics import errors
from ..numerics.quantization import quantize_problem
from ..tiling import CACHES, TILINGS, Caches, Tiling, in_use, using
from ..tiling.rules import changed
from ..tiling.tuned import save
from ..validation import Problem
from ..validation.options import Options
from .validate import BUDGETS

F = np.float32
MR = {"int8": (2, 4, 6, 8, 12), "float": (2, 4, 6, 8, 10, 12, 14)}
NV = {"int8": (2, 4, 8), "float": (1, 2, 3, 4)}
KEY_BLOCKS = (64, 128, 256, 512)  # of float kernels; an INT8 kernel's is fixed
TALLEST = 256  # rows of the query tiles that are tried
ROUNDS = 5
MARGIN = 0.98  # of the least time of the tiling in use: another must be faster by more than noise
MODELLED = 8  # register tiles that llvm-mca is asked about
NEEDS = {
    "int8": target.ISAS,
    "float32": target.FLOAT_ISAS,
    "bfloat16": {x: target.BFLOAT16_ISAS[x] for x in ("amx_bf16", "avx512_bf16")},
}


class Request(NamedTuple):
    """What is tuned: attention of this length and head size by the kernels of `isa` for `dtype`."""

    length: int
    head_dim: int
    isa: str
    dtype: str


def candidates(isa: str, dtype: str = "int8") -> list[Tiling]:
    """Every legal tiling of an instruction set with some usual height."""
    named = TILINGS[f"{isa}-{dtype}"]
    kind = "int8" if dtype == "int8" else "float"
    found = {}
    heights = [n * 12 for n in (1, 2, 4, 8, 16)] + [n * 32 for n in (1, 2, 4, 6, 8)]
    blocks = KEY_BLOCKS if kind == "float" else (named.key_block,)
    for mr, nv, rows, keys in itertools.product(
        {*MR[kind], named.mr},
        {*NV[kind], named.nv},
        {*heights, named.block_q},
        {*blocks, named.key_block},
    ):
        if kind == "float":  # the nearest whole tiles
            rows = max(1, rows // math.lcm(mr, 2)) * math.lcm(mr, 2)
            keys = max(1, keys // (nv * named.lanes)) * nv * named.lanes
        try:
            t = changed(named, {"mr": mr, "nv": nv, "block_q": rows, "key_block": keys})
        except NumflashError:
            continue
        if rows <= TALLEST:
            found[sizes(t)] = t
    return list(found.values())


def sizes(t: Tiling) -> tuple[int, int, int, int]:
    """What tells tilings of one kernel apart."""
    return t.mr, t.nv, t.block_q, t.key_block


def varied(ranked: list[Tiling]) -> list[Tiling]:
    """The best of each register tile, then the others: a model tells these apart least."""
    first: dict[tuple[int, int], Tiling] = {}
    for t in ranked:
        first.setdefault((t.mr, t.nv), t)
    return [*first.values(), *(t for t in ranked if t is not first[t.mr, t.nv])]


def modelled(t: Tiling, head_dim: int, caches: Caches) -> float:
    """Relative cost of a dot product: loads beside it, and what does not fit the caches.

    A step of the tile is mr * nv dot products and mr + nv loads, two of each a cycle; a wait of
    some 9 cycles shows where there are fewer than 18 accumulators (of x86's float products, which
    take 4 cycles, 8). K and V come once per query tile, O once per key block.
    """
    dots, loads = t.accumulators, t.mr + t.nv
    waits = 8 if t.dtype != "int8" and t.isa.startswith("avx") else 18
    cost = max(dots, loads, waits) / dots + 0.1 * loads / dots
    cost += 4.0 / t.block_q  # of streaming a key block
    if t.dtype != "int8":
        cost += 4.0 / t.key_block  # of loading and storing O
    total = sum(t.working_set(head_dim).values())
    return (
        cost + (0.1 if total > caches.l1 else 0) + (0.5 if caches.l2 and total > caches.l2 else 0)
    )


def _arrays(length: int, head_dim: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal((1, 2, length, head_dim), F) for _ in range(3)]


def _problem(
    length: int, head_dim: int, dtype: str, causal: bool = False, softcap: float = 0.0
) -> Problem:
    q, k, v = _arrays(length, head_dim)
    options = Options(precision=dtype, is_causal=causal, softcap=softcap)
    found = validation.problem(q, k, v, options)
    return quantize_problem(found) if dtype == "int8" else found


def _checked(t: Tiling, isa: str, dtype: str) -> None:
    """Raise unless a tiling computes a causal problem of some blocks of keys, whose scores are changed."""
    problem = _problem(300, 40, dtype, causal=True, softcap=3.0)
    with using(t):
        out, _ = launch.run(problem, isa)
    name = f"tune: tiling {t.mr} x {t.nv}, block_q {t.block_q}, key_block {t.key_block}"
    if dtype != "int8":
        found = errors(out, reference.oracle(problem)[0]).relative_l1
        if not found <= BUDGETS[dtype]:
            raise ArithmeticError(f"{name} is off by {found:.2g}; allowed: {BUDGETS[dtype]:g}")
    elif not np.array_equal(out, reference.integer_model(problem)[0]):
        raise ArithmeticError(f"{name} has other bits")


def _times(chosen: list[Tiling], request: Request) -> list[list[float]]:
    """Seconds of each tiling, in turns, on one thread; each is checked first."""
    seconds: list[list[float]] = [[] for _ in chosen]
    length, head_dim, isa, dtype = request
    problem = _problem(length, head_dim, dtype)
    with Progress("tune", len(chosen) + ROUNDS) as progress, limit(1):
        for t in chosen:
            progress.step(f"{t.mr} x {t.nv}, block_q {t.block_q}, key_block {t.key_block}")
            _checked(t, isa, dtype)
            with using(t):
                launch.run(problem, isa)
        for turn in range(ROUNDS):
            progress.step(f"round {turn + 1}")
            for n, t in enumerate(chosen):
                with using(t):
                    begin = time.perf_counter()
                    launch.run(problem, isa)
                    seconds[n].append(time.perf_counter() - begin)
    return seconds


def _of_instructions(
    ranked: list[Tiling], request: Request, cpu: str
) -> list[tuple[Tiling, float | None]]:
    """The best tiling of each of the first register tiles, by llvm-mca's cycles of their products."""
    from ..machinecode.estimate_floats import tile_cycles

    cycles: dict[Tiling, float] = {}
    tiles = len({(t.mr, t.nv) for t in ranked})
    chosen = varied(ranked)[: min(MODELLED, tiles)]
    with Progress("tune", len(chosen)) as progress:
        for t in chosen:
            progress.step(f"{t.mr} x {t.nv}")
            cycles[t] = tile_cycles(f"{t.isa}:{t.mr}x{t.nv}", cpu, request.head_dim)
    return [(t, cycles[t]) for t in sorted(cycles, key=cycles.__getitem__)]


def _isa(isa: str | None, dtype: str, cpu: str | None, measured: int) -> str:
    """The instruction set that is tuned: of this machine, or of a CPU that is only modelled."""
    if dtype not in NEEDS:
        raise ArgumentError(f"dtype: got {dtype!r}; allowed: {', '.join(map(repr, NEEDS))}")
    needs = NEEDS[dtype]
    if cpu is None:
        if dtype == "bfloat16" and not target.available(needs):
            raise ArgumentError(
                f"dtype: 'bfloat16' has tiles of its own on {' and '.join(needs)}, which this machine lacks; "
                "allowed: 'float32', whose tiles serve it"
            )
        isa = target.require(isa, needs)
    else:
        isa = _isa_of(cpu, isa, dtype, measured)
    if isa == "portable":
        of = "" if cpu is None else f", all that {cpu!r} has for {dtype!r},"
        raise ArgumentError(
            f"isa: 'portable'{of} has fixed sizes; allowed: an instruction set with register tiles"
        )
    return isa


def _isa_of(cpu: str, isa: str | None, dtype: str, measured: int) -> str:
    from ..machinecode import codegen, export

    if measured:
        raise ArgumentError(f"cpu: got {cpu!r}, which is not measured; allowed: with --model")
    found = codegen.code_generator(codegen.Target.named(cpu))
    own = [x for x in NEEDS[dtype] if not target.missing(x, NEEDS[dtype], found)]
    if dtype == "float32":  # vectors of another length than the CPU's are no choice
        bits = export.LENGTHS.get(cpu, 128)
        own = [x for x in own if not x.startswith("sve") or x == f"sve{bits}"]
    if not own:
        raise ArgumentError(
            f"dtype: got {dtype!r}, of which {cpu!r} has no tiles; allowed: another dtype or cpu"
        )
    if isa not in (None, *own):
        raise ArgumentError(
            f"isa: got {isa!r}; allowed for {cpu!r} and {dtype!r}: {', '.join(map(repr, own))}"
        )
    return isa or own[0]


def run(
    length: int = 2048,
    head_dim: int = 128,
    isa: str | None = None,
    measured: int = 4,
    keep: bool = True,
    dtype: str = "int8",
    cpu: str | None = None,
) -> dict[str, Any]:
    """Print the ranking and return it; the fastest is kept in the file of `tiling.tuned.save`.

    measured : how many of the ranking are compiled and timed (some 10 s each); 0 for the model
        alone
    dtype : "int8", "float32" or "bfloat16"
    cpu : another CPU than this, by LLVM's name; the model alone

    Raises
    ------
    ArgumentError, UnsupportedError
        For a head size that no kernel has; for an instruction set that the machine lacks, or whose sizes are fixed.
    ArithmeticError
        A tiling has other bits than the integer model, or float results beyond their budget.
    """
    check_request(head_dim)
    request = Request(length, head_dim, _isa(isa, dtype, cpu, measured), dtype)
    isa = request.isa
    caches = CACHES.get(cpu, CACHES["generic"]) if cpu else Caches.of_this_machine()
    ranked = sorted(candidates(isa, dtype), key=lambda t: modelled(t, head_dim, caches))
    now = in_use(isa, dtype) if cpu is None else TILINGS[f"{isa}-{dtype}"]
    others = [t for t in ranked if sizes(t) != sizes(now)]
    if dtype != "int8":  # whose own register tile comes first already
        same = [t for t in others if (t.mr, t.nv) == (now.mr, now.nv)]
        others = varied([t for t in others if t not in same]) + same
    chosen = [now, *others][:measured]
    if keep and chosen:
        save(now)  # a file that cannot be written is an error now, not after minutes of measuring
    seconds = _times(chosen, request) if chosen else []
    rows: list[tuple[Tiling, float | None]] = [(t, None) for t in chosen or ranked[:10]]
    by_instruction = cpu is not None and dtype == "float32" and isa.startswith(("sve", "neon"))
    if by_instruction and cpu:
        rows = _of_instructions([now, *ranked], request, cpu)
    table = Table(
        f"{cpu or target.cpu_name()}, {isa}, {dtype}, L = {length}, D = {head_dim}",
        ("register tile", "block_q", "key_block", "modelled cost")
        + ("llvm-mca, cycles per 64 multiply-adds",) * by_instruction
        + ("ms", "spread") * bool(seconds),
    )
    for n, (t, cycles) in enumerate(rows):
        times = seconds[n] if seconds else None
        figures = [f"{1e3 * min(times):.2f}", f"{max(times) / min(times) - 1:.0%}"] if times else []
        table.add(
            f"{t.mr} x {t.nv}",
            str(t.block_q),
            str(t.key_block),
            f"{modelled(t, head_dim, caches):.2f}",
            *([f"{cycles:.2f}"] if cycles is not None else figures),
            mr=t.mr,
            nv=t.nv,
            block_q=t.block_q,
            key_block=t.key_block,
            seconds=times,
            cycles=cycles,
        )
    table.show()
    print(
        "modelled cost: of a dot instruction with its loads and waits; 1 would be its start alone"
    )
    result: dict[str, Any] = {"isa": isa, "dtype": dtype, "ranking": table.records, "kept": None}
    if chosen:
        least = [min(x) for x in seconds]
        fastest = min(range(len(chosen)), key=least.__getitem__)
        best = chosen[fastest if least[fastest] < MARGIN * least[0] else 0]
        text = f"{best.mr} x {best.nv}, block_q {best.block_q}, key_block {best.key_block}"
        result["best"] = dict(zip(("mr", "nv", "block_q", "key_block"), sizes(best), strict=True))
        if best is now:
            text += f", in use, is the fastest: none of the others takes less than {MARGIN:.0%} of its time"
        if keep:
            result["kept"] = str(save(best))
            text += f"; kept in {result['kept']}"
        print(text)
    return result
