"""`mpiexec -n 2 numflash demo ring`: one sequence over several ranks.

Tables of errors, balance, speed, and the length from which it pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from .. import api, reference, validation
from ..jit.threads import limit
from ..measure.console import Progress, Table, count
from ..measure.metrics import errors
from ..validation.options import Options
from .agreement import mpi
from .attention import all_gather_attention, prepare, ring_attention, ring_room
from .model import LINKS, Ring
from .plan import make_plan
from .ring import Report, rotate
from .splits import Split, imbalance

# tokens of the whole sequence
CHECKED = 517
TIMED = 4096
HEADS = 4
KV_HEADS = 4
HEAD_DIM = 128
PRECISIONS = ("float32", "int8")
REPEATS = 5


def draw(length: int) -> list[np.ndarray]:
    """Random q, k, v of the demo's heads."""
    rng = np.random.default_rng(length)
    return [
        rng.standard_normal((1, h, length, HEAD_DIM), np.float32)
        for h in (HEADS, KV_HEADS, KV_HEADS)
    ]


def exact_table(comm: Any, progress: Progress | None) -> Table:
    """Errors of every call and split against float64 on one rank."""
    table = Table(
        f"1. How exact: causal, L={CHECKED} over {count(comm.size, 'rank')}, against float64 on one",
        ("call", "split", "precision", "relative L1", "max abs"),
    )
    arrays = draw(CHECKED)
    q, k, v = arrays
    want = (
        reference.oracle(validation.problem(q, k, v, Options(is_causal=True)))[0]
        if comm.rank == 0
        else None
    )
    for name, call in (("ring", ring_attention), ("all-gather", all_gather_attention)):
        for kind in ("plain", "zigzag"):
            split = getattr(Split, kind)(CHECKED, comm.size)
            for precision in PRECISIONS:
                step(progress, f"{name}, {kind}, {precision}")
                out = call(
                    comm,
                    *(split.shard(x, comm.rank) for x in arrays),
                    split=kind,
                    is_causal=True,
                    precision=precision,
                )
                shards = comm.gather(out)
                if shards is not None:
                    e = errors(split.join(shards), want)
                    table.add(
                        name,
                        kind,
                        precision,
                        f"{e.relative_l1:.1e}",
                        f"{e.max_abs:.1e}",
                        call=name,
                        split=kind,
                        precision=precision,
                        **e.as_dict(),
                    )
    return table


def balance_table() -> Table:
    """How unevenly consecutive shards share causal work."""
    table = Table(
        "2. Causal work of the busiest rank over the mean",
        ("ranks", "plain", "zigzag"),
        note="plain: the last rank has most to do, and all wait for it",
    )
    for ranks in (2, 4, 8, 16, 64):
        plain, zigzag = (
            imbalance(make(256 * ranks, ranks)) for make in (Split.plain, Split.zigzag)
        )
        table.add(
            str(ranks), f"{plain:.2f}", f"{zigzag:.2f}", ranks=ranks, plain=plain, zigzag=zigzag
        )
    return table


def slowest(comm: Any, run: Callable[[], float]) -> float:
    """Median over calls of the slowest rank's seconds; one call before is not counted."""
    run()
    times = []
    for _ in range(REPEATS):
        comm.Barrier()
        times.append(run())
    return float(np.median(np.max(comm.allgather(times), 0)))


def speed_table(
    comm: Any, threads: int, progress: Progress | None
) -> tuple[Table, dict[str, float]]:
    """The table, and the rate of one rank's kernel for each precision."""
    table = Table(
        f"3. How fast: L={TIMED}, {HEADS} heads x {HEAD_DIM}, {count(comm.size, 'rank')} of {count(threads, 'thread')}",
        (
            "case",
            "precision",
            "ms",
            "GOP/s",
            "kernel ms",
            "waiting ms",
            "alone ms",
            "hidden",
            "MB sent",
        ),
        note="median of the slowest rank; waiting: posting and waiting for messages; alone: the same messages without a "
        "kernel; hidden: the part of that time that the kernel covers; MB: all ranks together",
    )
    rates: dict[str, float] = {}
    arrays = draw(TIMED)
    for case, kind, causal in (
        ("full", "plain", False),
        ("causal", "plain", True),
        ("causal", "zigzag", True),
    ):
        split = getattr(Split, kind)(TIMED, comm.size)
        local = [split.shard(x, comm.rank) for x in arrays]
        for precision in PRECISIONS:
            step(progress, f"{case}, {kind}, {precision}")
            given = {"is_causal": causal, "precision": precision}
            total, kernel, waiting, sent = timed(comm, local, kind, given)
            alone = exchange_alone(comm, local, kind, given)
            work = 4.0 * HEADS * HEAD_DIM * TIMED**2 * (0.5 if causal else 1.0)
            rates[precision] = max(rates.get(precision, 0.0), work / comm.size / kernel)
            hidden = max(0.0, 1 - waiting / alone) if sent else None
            table.add(
                f"{case}, {kind}",
                precision,
                f"{1e3 * total:.1f}",
                f"{work / total / 1e9:.1f}",
                f"{1e3 * kernel:.1f}",
                f"{1e3 * waiting:.2f}",
                f"{1e3 * alone:.2f}",
                "-" if hidden is None else f"{100 * hidden:.0f} %",
                f"{sent / 1e6:.1f}",
                case=case,
                split=kind,
                precision=precision,
                seconds=total,
                kernel=kernel,
                waiting=waiting,
                alone=alone,
                hidden=hidden,
                sent=sent,
                rate=work / total,
            )
    return table, rates


def timed(
    comm: Any, local: Any, kind: str, given: dict[str, Any]
) -> tuple[float, float, float, int]:
    """Seconds of a call, of its kernel and of waiting, of the slowest ranks; bytes of all ranks."""
    reports: list[Report] = []

    def call() -> float:
        reports.append(Report())
        ring_attention(comm, *local, split=kind, **given, report=reports[-1])
        return reports[-1].total

    total = slowest(comm, call)
    kernel, waiting = (
        float(np.max(comm.allgather(np.median([getattr(r, f) for r in reports[1:]]))))
        for f in ("kernel", "exchange")
    )
    return total, kernel, waiting, comm.allreduce(reports[-1].sent)


def exchange_alone(comm: Any, local: Any, kind: str, given: dict[str, Any]) -> float:
    """Seconds of the same messages with nothing to compute."""
    query, key, value = local
    options = {**given, "split": kind, "split_kv": None, "impl": "auto"}
    job = prepare(comm, make_plan(comm, query, key, value, options), "auto", ring_room)

    def once() -> float:
        start = time.perf_counter()
        rotate(comm, job.form, job.own, job.room, lambda shard: None, Report())
        return time.perf_counter() - start

    return slowest(comm, once)


def model_table(rates: dict[str, float], threads: int) -> Table:
    """From how many tokens per rank on the exchange takes less time than the kernel."""
    table = Table(
        f"4. Tokens per rank from which the exchange hides, {HEADS} heads x {HEAD_DIM}, no mask",
        ("link", "precision", "kernel GOP/s", "bytes per token", "tokens per rank"),
        note=f"a model: the rate of {count(threads, 'thread')} a rank is measured here, the rest is the link's",
    )
    for link in LINKS:
        for precision, rate in rates.items():
            ring = Ring(rate, link, HEADS, KV_HEADS, HEAD_DIM, precision)
            table.add(
                link.name,
                precision,
                f"{rate / 1e9:.0f}",
                str(ring.token_bytes),
                str(ring.hiding_length()),
                link=link.name,
                precision=precision,
                rate=rate,
                token_bytes=ring.token_bytes,
                hiding_length=ring.hiding_length(),
                source=link.source,
            )
    return table


def step(progress: Progress | None, what: str) -> None:
    """Report progress on the rank that shows it."""
    if progress:
        progress.step(what)


def run(threads: int = 1) -> dict[str, Any]:
    """Print the tables on rank 0 and return them there; other ranks leave the program here."""
    MPI = mpi("demo ring")
    comm = MPI.COMM_WORLD
    with limit(threads):
        if comm.rank == 0:  # compile once; the others find it on disk
            for precision in PRECISIONS:
                q, k, v = draw(8)
                api.attention(q, k, v, is_causal=True, precision=precision, return_lse=True)
        comm.Barrier()
        progress = Progress("demo ring", 14) if comm.rank == 0 else None
        tables = [exact_table(comm, progress), balance_table()]
        speed, rates = speed_table(comm, threads, progress)
    if comm.rank:
        raise SystemExit(0)
    tables += [speed, model_table(rates, threads)]
    for table in tables:
        table.show()
    return {
        "ranks": comm.size,
        "threads": threads,
        "library": MPI.Get_library_version().splitlines()[0],
        "tables": {t.title: t.records for t in tables},
    }
