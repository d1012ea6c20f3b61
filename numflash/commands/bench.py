"""`numflash bench`: every contender is checked against float64, then timed.

Metrics as `Fused FlashAttention V2`, "Benchmark Metrics": reference and fused time, speed-up,
efficiency of each component, effective bandwidth. A rate is operations of the two products per
second, for everybody; shares are of peaks measured in the same run.
"""

from __future__ import annotations

from typing import Any

from ..cpu.isa.isas import VECTOR_ISAS, running_lanes
from ..errors import ArgumentError, UnsupportedError
from ..jit import target
from ..measure import roofline
from ..measure.console import Progress, Table, count
from ..measure.contenders import PEER, REFERENCE, Case, Result, compete, contenders
from ..measure.timing import explain_marks, percent, ratio
from ..tiling import KEY_BLOCK
from .demo import phase_table

LENGTHS = (64, 512, 1024, 2048, 4096, 8192)  # the matrix of the A64FX summary


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


def run(
    case: Case, iterations: int = 5, threads: int = 1, reference_threads: int = 0
) -> dict[str, Any]:
    """One case, every contender; then the parts of the fused kernel.

    reference_threads : also time the float32 reference on so many threads, 0 for no
    """
    length, head_dim = case.length, case.head_dim
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
        table = Table(
            f"{case}, {count(threads, 'thread')}, median of {iterations} or more",
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
        roof = roof.confirmed([r.rate for name, r in results.items() if "int8" in name])
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


def plot(path: str, head_dim: int, threads: int, iterations: int) -> dict[str, Any]:
    """Draw the sweep over L against the peers, and the roofline.

    `path` ends in what matplotlib can write (.png, .svg, .pdf).
    """
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise UnsupportedError(
            "--plot: matplotlib is not installed; pip install 'numflash[plot]'"
        ) from None
    matplotlib.use("agg")
    from matplotlib import pyplot

    everybody = contenders(everybody=True)
    figure, (sweep, roofs) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    if path.rsplit(".", 1)[-1] not in figure.canvas.get_supported_filetypes():
        raise ArgumentError(
            f"--plot: got {path!r}; allowed: a name ending in {', '.join(figure.canvas.get_supported_filetypes())}"
        )
    records = []
    with Progress("plot", len(everybody) * len(LENGTHS) + 1) as progress:
        progress.step("measuring this machine")
        roof = roofline.measure(threads)
        for contender in everybody:
            points = []
            for length in LENGTHS:
                case = Case(length, head_dim)
                progress.step(f"{contender.name}, {case}")
                result = compete(contender, case, threads, iterations)
                if result:
                    points.append(result)
            if points:
                rates = [r.rate / 1e9 for r in points]
                (line,) = sweep.plot(
                    [r.case.length for r in points], rates, marker="o", label=contender.name
                )
                roofs.plot(
                    [r.case.operations / r.case.traffic for r in points],
                    rates,
                    "o",
                    color=line.get_color(),
                )
                records += [r.as_dict() for r in points]
    sweep.axhline(roof.int8 / 1e9, color="black", linestyle="--", label="measured INT8 peak")
    sweep.axhline(roof.float32 / 1e9, color="grey", linestyle="--", label="measured FP32 peak")
    sweep.set(
        xscale="log",
        yscale="log",
        xlabel="queries and keys",
        ylabel="GOP/s",
        title=f"full attention, D = {head_dim}, {count(threads, 'thread')}",
    )
    sweep.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    sweep.grid(alpha=0.3)
    intensity = [2.0**i for i in range(-2, 14)]
    for peak, color in ((roof.int8, "black"), (roof.float32, "grey")):
        roofs.plot(
            intensity,
            [min(peak, x * roof.read) / 1e9 for x in intensity],
            color=color,
            linestyle="--",
        )
    roofs.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte of query, key, value and output",
        ylabel="GOP/s",
        title=f"roofline of this machine: read {roof.read / 1e9:.1f} GB/s",
    )
    roofs.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    print(f"{path}: {len(records)} points, {roof}")
    return {"file": path, "roof": roof.as_dict(), "results": records}
