"""`numflash bench`: every contender is checked against float64, then timed.

Metrics as `Fused FlashAttention V2`, "Benchmark Metrics": reference and fused time, speed-up,
efficiency of each component, effective bandwidth. A rate is operations of the two products per
second, for everybody; shares are of peaks measured in the same run.
"""

from __future__ import annotations

from typing import Any

from ..cpu.isa.isas import VECTOR_ISAS, running_lanes
from ..jit import target
from ..measure import roofline
from ..measure.console import Progress, Table, count
from ..measure.contenders import (
    PEER,
    REFERENCE,
    Case,
    Result,
    check_request,
    compete,
    contenders,
)
from ..measure.timing import explain_marks, percent, ratio
from ..tiling import KEY_BLOCK
from .demo import phase_table


def against_reference(
    case: Case, fused: Result, reference_threads: int, iterations: int, single: Result | None
) -> tuple[str, dict[str, Any]]:
    """The fused kernel against the float32 reference on more threads: a sentence, and its figures.

    The speed-up over one thread of the reference is estimated as the summary (docs/sources.md)
    does, as if its threads scaled perfectly, and given as measured where `single` is known.
    """
    reference = next(c for c in contenders() if c.name == REFERENCE)
    result = compete(reference, case, reference_threads, iterations)
    assert result is not None  # it runs everywhere
    faster = result.seconds / fused.seconds
    disturbed = result.timing.disturbed or fused.timing.disturbed
    text = (
        f"\n{REFERENCE} on {count(reference_threads, 'thread')}: {result.timing.milliseconds()} ms; {fused.contender} on "
        f"{count(fused.threads, 'thread')} is {ratio(result.timing, fused.timing)} times as fast, and against one thread an "
        f"estimated {faster * reference_threads:.2f}"
    )
    if single is not None and single.threads == 1:
        text += f" (measured: {ratio(single.timing, fused.timing)})"
    return text, {
        "threads": reference_threads,
        "seconds": result.seconds,
        "speed_up": faster,
        "estimated_single_thread_speed_up": faster * reference_threads,
        "disturbed": disturbed,
    }


def table_of(title: str, case: Case, results: dict[str, Result], roof: roofline.Roof) -> Table:
    """A row for each contender."""
    table = Table(
        title,
        (
            "contender",
            "ms",
            "spread",
            "GOP/s",
            "INT8 peak",
            "GB/s",
            "relative L1",
            "x reference",
            f"x {PEER}",
        ),
    )
    for name, r in results.items():
        ratios = [
            ratio(results[peer].timing, r.timing) if peer in results else ""
            for peer in (REFERENCE, PEER)
        ]
        share = percent(r.rate, roof.int8, 1) if "int8" in name else ""
        table.add(
            name,
            r.timing.milliseconds(),
            f"{100 * r.timing.spread:.0f} %",
            f"{r.rate / 1e9:.1f}",
            share,
            f"{case.traffic / r.seconds / 1e9:.2f}",
            f"{r.errors.relative_l1:.1e}",
            *ratios,
            **r.as_dict(),
        )
    table.note = f"measured: {roof}; GB/s counts query, key, value and output once;\n"
    table.note += "spread: how much longer the median call took than the fastest"
    return table


def run(
    case: Case, iterations: int = 5, threads: int = 1, reference_threads: int = 0
) -> dict[str, Any]:
    """One case, every contender; then the parts of the fused kernel.

    reference_threads : also time the float32 reference on so many threads, 0 for no
    """
    length, head_dim = case.length, case.head_dim
    check_request(head_dim, threads, reference_threads or 1)
    isa = target.available()[0]
    isas = VECTOR_ISAS.get(isa)
    parts = (
        isas is not None
        and length % KEY_BLOCK == 0
        and head_dim % (isas.nv * running_lanes(isa)) == 0
    )
    everybody = contenders(everybody=True)
    steps = len(everybody) + 1 + parts + bool(reference_threads)
    with Progress("bench", steps) as progress:
        progress.step("measuring this machine")
        roof = roofline.measure(threads)
        results = {}
        for contender in everybody:
            progress.step(contender.name)
            result = compete(contender, case, threads, iterations)
            if result:
                results[contender.name] = result
        roof = roof.confirmed([r.rate for name, r in results.items() if "int8" in name])
        title = f"{case}, {count(threads, 'thread')}, median of {iterations} or more"
        table = table_of(title, case, results, roof)
        reference = None
        if reference_threads:
            progress.step(f"{REFERENCE} on {count(reference_threads, 'thread')}")
            fused = next(iter(results.values()))
            said, reference = against_reference(
                case, fused, reference_threads, iterations, results.get(REFERENCE)
            )
            table.note += said
        table.note += explain_marks(table.rows)
        table.show()
        components = None
        if parts:
            single = roof.int8 if threads == 1 else roofline.measure_compute(1)[0]
            components = phase_table(progress, isa, single, length, head_dim)
            components.show()
    return {
        "roof": roof.as_dict(),
        "results": table.records,
        "reference": reference,
        "components": components.records if components else None,
    }
