"""`numflash bench --plot`: the sweep over L against the peers, and the roofline, as one picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError, UnsupportedError
from ..measure import roofline
from ..measure.console import Progress, count
from ..measure.contenders import Case, Result, check_request, compete, contenders

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LENGTHS = (64, 512, 1024, 2048, 4096, 8192)  # the matrix of the A64FX summary


def plot(path: str, head_dim: int, threads: int, iterations: int) -> dict[str, Any]:
    """Measure, and draw the picture.

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

    figure, (sweep, roofs) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    if path.rsplit(".", 1)[-1] not in figure.canvas.get_supported_filetypes():
        raise ArgumentError(
            f"--plot: got {path!r}; allowed: a name ending in {', '.join(figure.canvas.get_supported_filetypes())}"
        )
    check_request(head_dim, threads)
    try:
        with open(path, "ab"):  # what cannot be written is refused before minutes of measuring
            pass
    except OSError as error:
        raise ArgumentError(
            f"--plot: cannot write {path!r}: {error.strerror}; allowed: a file"
        ) from None
    roof, results = measure(head_dim, threads, iterations)
    for name, points in results.items():
        rates = [r.rate / 1e9 for r in points]
        (line,) = sweep.plot([r.case.length for r in points], rates, marker="o", label=name)
        intensity = [r.case.operations / r.case.traffic for r in points]
        roofs.plot(intensity, rates, "o", color=line.get_color())
    finish_sweep(sweep, roof, f"full attention, D = {head_dim}, {count(threads, 'thread')}")
    finish_roofs(roofs, roof)
    figure.legend(loc="outside lower center", ncols=5, fontsize="small")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    records = [r.as_dict() for points in results.values() for r in points]
    print(f"{path}: {len(records)} points, {roof}")
    return {"file": path, "roof": roof.as_dict(), "results": records}


def measure(
    head_dim: int, threads: int, iterations: int
) -> tuple[roofline.Roof, dict[str, list[Result]]]:
    """Peaks of this machine, and by contender its results at each length that it can do."""
    everybody = contenders(everybody=True)
    results: dict[str, list[Result]] = {}
    with Progress("plot", len(everybody) * len(LENGTHS) + 1) as progress:
        progress.step("measuring this machine")
        roof = roofline.measure(threads)
        for contender in everybody:
            for length in LENGTHS:
                case = Case(length, head_dim)
                progress.step(f"{contender.name}, {case}")
                result = compete(contender, case, threads, iterations)
                if result:
                    results.setdefault(contender.name, []).append(result)
    return roof, results


def finish_sweep(sweep: Axes, roof: roofline.Roof, title: str) -> None:
    """Peaks, axes and grid of the sweep."""
    sweep.axhline(roof.int8 / 1e9, color="black", linestyle="--", label="measured INT8 peak")
    sweep.axhline(roof.float32 / 1e9, color="grey", linestyle="--", label="measured FP32 peak")
    sweep.set(xscale="log", yscale="log", xlabel="queries and keys", ylabel="GOP/s", title=title)
    sweep.set_xticks(LENGTHS, [str(n) for n in LENGTHS])
    sweep.grid(alpha=0.3)


def finish_roofs(roofs: Axes, roof: roofline.Roof) -> None:
    """Roofs of both peaks, axes and grid."""
    intensity = [2.0**i for i in range(-2, 14)]
    for peak, color in ((roof.int8, "black"), (roof.float32, "grey")):
        rates = [min(peak, x * roof.read) / 1e9 for x in intensity]
        roofs.plot(intensity, rates, color=color, linestyle="--")
    roofs.set(
        xscale="log",
        yscale="log",
        xlabel="operations per byte of query, key, value and output",
        ylabel="GOP/s",
        title=f"roofline of this machine: read {roof.read / 1e9:.1f} GB/s",
    )
    roofs.grid(alpha=0.3)
