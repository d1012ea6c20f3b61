"""`numflash bench --study`: the benchmarks of the A64FX notes (docs/sources.md) on this machine.

Tables as the notes have them, beside their figures: the exp2 benchmark, the unfused pipeline over
L, and the eight improvements. One thread unless a line says otherwise.
"""

from __future__ import annotations

from typing import Any

from ..cpu.study import exp2_benchmark, improvements, unfused_times
from ..measure.console import Progress, Table
from ..measure.timing import LARGEST_SPREAD, explain_marks, percent

LENGTHS = (1024, 4096)  # of the unfused table; S and P take 8 * L**2 bytes


def exp2_table(
    rows: tuple[int, ...] = (4, 16), keys: tuple[int, ...] = (64, 128, 256, 512)
) -> Table:
    """Shares of the FMA peak, a row for every kernel, exp2, broadcast and M."""
    found = exp2_benchmark.measure(rows, keys)
    table = Table(
        f"exp2 and P.V, D = 64: share of the measured FMA peak; of `exp2` cycles a score, Nc = {', '.join(map(str, keys))}",
        ("kernel", "exp2", "broadcast", "M", *map(str, keys), "relative L1", "ranking errors"),
    )
    lines: dict[tuple[str, str, str, int], list[exp2_benchmark.Row]] = {}
    for row in found:
        lines.setdefault((row.kernel, row.exp2, row.broadcast, row.m), []).append(row)
    for (kernel, exp2, broadcast, m), cells in lines.items():
        figures = [f"{c.cycles:.2f}" if kernel == "exp2" else percent(c.share, 1, 1) for c in cells]
        last = cells[-1]
        table.add(
            kernel,
            exp2,
            broadcast if kernel.startswith("fused") else "",
            str(m),
            *figures,
            f"{last.output_error:.1e}",
            percent(last.ranking_errors, 1, 1),
            rows=[c.as_dict() for c in cells],
        )
    table.note = (
        "the note, M = 4, Nc = 64 128 256: fused 12.7 12.9 12.8, four keys 14.5 14.6 14.6, two passes 51.0 58.1 47.2, product\n"
        "79.5 82.9 65.3 %. Best of three sweeps: what disturbs one is gone by the next"
    )
    return table


def unfused_table(lengths: tuple[int, ...] = LENGTHS, head_dim: int = 128) -> Table:
    """The note's table over L: product, share of the peak, share of softmax, and the strip."""
    table = Table(
        f"unfused INT8 attention, D = {head_dim}, one thread",
        (
            "L",
            "GOP/s",
            "of the peak",
            "in L2",
            "two buffers",
            "softmax",
            "two passes",
            "strip",
            "note",
        ),
    )
    for length in lengths:
        found = unfused_times.measure(length, head_dim)
        whole = found.total("three-pass")
        said = unfused_times.NOTE.get(length)
        table.add(
            str(length),
            f"{found.gemm / 1e9:.0f}",
            *(
                percent(rate, found.peak)
                for rate in (found.gemm, found.gemm_in_l2, found.double_buffered)
            ),
            percent(found.softmax, 1),
            f"{whole / found.total('two-pass'):.2f}x",
            f"{whole / found.total('strip'):.2f}x",
            f"{said[0]} %, softmax {said[1]} %" if said else "",
            length=length,
            parts=[vars(c) for c in found.components],
            operations_per_second=found.gemm,
            peak=found.peak,
            softmax=found.softmax,
        )
    table.note = "two passes, strip: how many times as fast as three passes over the whole of S"
    table.note += explain_marks(table.rows)
    return table


def improvements_table(length: int = 2048, head_dim: int = 128) -> Table:
    """The eight improvements: predicted and measured gain, and how even the times were."""
    table = Table(
        f"the summary's eight improvements, L = {length}, D = {head_dim}",
        (
            "improvement",
            "predicted",
            "measured",
            "ms before",
            "ms after",
            "spread",
            "what was compared",
        ),
    )
    for gain in improvements.measure(length, head_dim):
        measured = f"{gain.measured:.2f}"
        disturbed = gain.spread > LARGEST_SPREAD
        table.add(
            gain.name,
            "-".join(f"{p:g}" for p in dict.fromkeys(gain.predicted)),
            f"({measured}) disturbed" if disturbed else measured,
            f"{1e3 * gain.before:.2f}",
            f"{1e3 * gain.after:.2f}",
            f"{100 * gain.spread:.0f} %",
            gain.compared,
            **gain.as_dict(),
        )
    table.note = explain_marks(table.rows).lstrip()
    return table


def run(study: str) -> dict[str, Any]:
    """Print one table and return it as data."""
    job = {"exp2": exp2_table, "unfused": unfused_table, "improvements": improvements_table}[study]
    with Progress(f"bench {study}", 1) as progress:
        progress.step("checked against float64, then timed")
        table = job()  # type: ignore[operator]
    table.show()
    return {"study": study, "results": table.records}
