"""The main job: attention on real activations, how exact, how fast, where the time goes, and what
fits which cache.
"""

from __future__ import annotations

import functools
from typing import Any

from .. import tiling
from ..cpu.isa.isas import VECTOR_ISAS
from ..errors import UnsupportedError
from ..jit import target
from ..jit.cache_files import files, folders
from ..jit.threads import check_threads, most
from ..measure import metrics, phases, roofline
from ..measure.console import Progress, Table, count
from ..measure.contenders import PEER, Case, compete, contenders
from ..measure.data import minilm
from ..measure.timing import DISTURBED, explain_marks, percent, ratio
from .warmup import Job, compile_all, processes_for

LENGTHS = (1024, 4096)
HEAD_DIMS = (64, 128)


def _measure_errors(variant: str) -> None:
    metrics.accuracy(*minilm(), variants=[variant])


def _attend(name: str) -> None:
    (contender,) = (x for x in contenders() if x.name == name)
    contender.prepare(Case(64, 64))()


def kernels() -> list[Job]:
    """Calls that compile the kernels of the first two tables, some seconds each."""
    variants = [Job(x, functools.partial(_measure_errors, x)) for x in metrics.VARIANTS]
    others = [x.name for x in contenders() if x.name != PEER]
    return variants + [Job(x, functools.partial(_attend, x)) for x in others]


def accuracy_table(progress: Progress) -> Table:
    """Errors of every precision on real activations."""
    table = Table(
        "1. How exact: MiniLM-L6, layer 2, 12 heads x 512 tokens x 32, against float64",
        ("precision", "cosine", "relative L1", "RMSE", "max abs", "worst row"),
        note="worst row: the largest relative L1 of a single row; it is what a high cosine hides",
    )
    for name in metrics.VARIANTS:
        progress.step(f"accuracy of {name}")
        try:
            e = metrics.accuracy(*minilm(), variants=[name])[name]
        except UnsupportedError:
            table.add(name, *["not here"] * 5, precision=name)
            continue
        table.add(
            name,
            f"{e.cosine:.6f}",
            f"{e.relative_l1:.2e}",
            f"{e.rmse:.2e}",
            f"{e.max_abs:.2e}",
            f"{e.worst_row:.2e}",
            precision=name,
            **e.as_dict(),
        )
    return table


def speed_table(progress: Progress, roof: roofline.Roof) -> Table:
    """Times of every contender, each checked first."""
    threads = roof.threads
    table = Table(
        f"2. How fast: {count(threads, 'thread')}, full attention, one head, median; operands quantised before",
        ("contender", "L", "D", "ms", "GOP/s", "INT8 peak", "relative L1", f"x {PEER}"),
    )
    peers = {}
    rows = []
    for head_dim in HEAD_DIMS:
        for length in LENGTHS:
            case = Case(length, head_dim)
            for contender in reversed(contenders()):  # the peer first
                progress.step(f"{case}: {contender.name}")
                result = compete(contender, case, threads, 3)
                if result and contender.name == PEER:
                    peers[case] = result.timing
                rows += [result] if result else []
    roof = roof.confirmed([r.rate for r in rows if "int8" in r.contender])
    for r in rows:
        share = percent(r.rate, roof.int8) if "int8" in r.contender else ""
        table.add(
            r.contender,
            str(r.case.length),
            str(r.case.head_dim),
            r.timing.milliseconds(2),
            f"{r.rate / 1e9:.1f}",
            share,
            f"{r.errors.relative_l1:.1e}",
            ratio(peers[r.case], r.timing) if r.case in peers else "no PyTorch",
            **r.as_dict(),
            int8_peak=roof.int8,
        )
    table.note = f"measured on this machine, {count(threads, 'thread')}: {roof}"
    table.note += explain_marks(table.rows)
    return table


def gops(rate: float, peak: float) -> str:
    """A rate in GOP/s, and its share of a peak."""
    share = percent(rate, peak)
    return DISTURBED if share == DISTURBED else f"{rate / 1e9:.0f} GOP/s, {share} of peak"


def phase_table(
    progress: Progress, isa: str, int8_peak: float, length: int = 4096, head_dim: int = 128
) -> Table:
    """Times of the parts of the fused INT8 kernel."""
    table = Table(
        f"3. Where the time goes: int8 on {isa}, L={length}, D={head_dim}, one thread",
        ("part", "ms", "share", "rate"),
    )
    progress.step("parts of the kernel")
    found = phases.measure(isa, length, head_dim, 3)
    total = found["sum"]
    product = 2.0 * length**2 * head_dim
    names = {"scores": "Q.K^T", "values": "P.V", "packing": "packing K and V"}
    for part, seconds in found.items():
        known = seconds > 0  # not where it is NaN
        rate = DISTURBED
        if known and part in ("scores", "values", "sum"):
            rate = gops((1 + (part == "sum")) * product / seconds, int8_peak)
        elif known:
            rate = f"{length**2 / seconds / 1e9:.1f} G scores/s"
        table.add(
            names.get(part, part),
            f"{1e3 * seconds:.3f}" if known else DISTURBED,
            percent(seconds, total, 1),
            rate,
            part=part,
            seconds=seconds if known else None,
        )
    table.note = "each part is what it adds to the kernel without it"
    if isa == "amx_int8":
        table.note += (
            "; measured block by block: the shipped kernel runs these parts beside each other, "
            "so that it takes less time than their sum (see the speed table)"
        )
    table.note += explain_marks(table.rows)
    return table


def tiling_text(isa: str) -> str:
    """The tiling of this machine's INT8 kernel, with its sizes."""
    t = tiling.TILINGS[f"{isa}-int8"]
    return f"4. What fits which cache\n{t.explain(128, caches=tiling.Caches.of_this_machine())}"


def run(threads: int = 1) -> dict[str, Any]:
    """Print the four tables as they come; returns them as data."""
    check_threads(threads)
    isa = target.available()[0]
    with_phases = isa in VECTOR_ISAS
    cases = len(LENGTHS) * len(HEAD_DIMS) * len(contenders())
    fresh = folders() and not files()  # nothing has been compiled here, and it could be kept
    work = kernels() if fresh else []
    processes = processes_for(work)
    compiling = len(work) + 1 if processes > 1 else 0
    steps = compiling + len(metrics.VARIANTS) + 1 + cases + with_phases
    with Progress("demo", steps) as progress:
        if compiling:
            progress.step(f"compiling kernels with {processes} processes, this once")
            compile_all(work, processes, lambda job, *_: progress.step(f"compiled: {job.name}"))
        tables = [accuracy_table(progress)]
        tables[0].show()
        progress.step("measuring this machine")
        roof = roofline.measure(threads)
        tables.append(speed_table(progress, roof))
        tables[1].show()
        if with_phases:
            single = roof if threads == 1 else roofline.measure(1)
            tables.append(phase_table(progress, isa, single.int8))
            tables[2].show()
    text = tiling_text(isa)
    print(text)
    return {
        "isa": isa,
        "threads": threads,
        "most_threads": most(),
        "roof": roof.as_dict(),
        "tables": {t.title: t.records for t in tables},
        "tiling": text,
    }
