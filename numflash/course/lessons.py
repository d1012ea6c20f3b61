"""What the notebooks share.

One way to draw, tables, and the ceilings that figures are held against. Drawing needs matplotlib
(extra `notebooks`).
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import UnsupportedError
from ..measure import roofline

# --- drawing
# -------------------------------------------------------------------------------------------------------------------
# Okabe and Ito's colours, safe for the colour-blind, in steps of brightness; dashes and hatches say
# the same in greyscale.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#F0E442")
DASHES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)))
MARKERS = ("o", "s", "^", "D", "v", "P")
HATCHES = ("", "//", "..", "\\\\", "xx", "--")


def figure(
    columns: int = 1, *, width: float = 9.0, height: float = 3.6, **options: Any
) -> tuple[Any, Any]:
    """A figure in the course's style, with `columns` axes side by side.

    (figure, axes or array of axes).
    """
    try:
        from cycler import cycler
        from matplotlib import pyplot, rcParams
    except ImportError:
        raise UnsupportedError(
            "figure: matplotlib is not installed; pip install 'numflash[notebooks]'"
        ) from None
    rcParams.update(
        {
            "axes.prop_cycle": cycler(color=COLOURS)
            + cycler(linestyle=DASHES)
            + cycler(marker=MARKERS),
            "image.cmap": "cividis",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.titlesize": 11,
            "font.size": 10,
            "figure.dpi": 72,
            "savefig.dpi": 72,
            "legend.frameon": False,
            "lines.markersize": 4,
            "hatch.linewidth": 0.6,
        }
    )
    return pyplot.subplots(1, columns, figsize=(width, height), layout="constrained", **options)


def bars(
    ax: Any,
    values: dict[str, float],
    unit: str,
    ceiling: tuple[str, float] | None = None,
    digits: int = 1,
) -> None:
    """Horizontal bars with their figures, top to bottom, and the named ceiling as a line that says
    its own.
    """
    names = list(values)
    numbers = list(values.values())
    best = max([*numbers, ceiling[1] if ceiling else 0.0])
    for n, number in enumerate(numbers):
        ax.barh(
            n,
            number,
            color="#56B4E9" if n % 2 else "#B7D3E8",
            edgecolor="black",
            hatch=HATCHES[n % len(HATCHES)],
        )
        share = f" ({100 * number / ceiling[1]:.0f} %)" if ceiling else ""
        ax.text(
            number + 0.01 * best,
            n,
            f"{number:.{digits}f}{share}",
            va="center",
            fontsize=9,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    if ceiling:
        ax.axvline(ceiling[1], color="#D55E00", linestyle="--", marker="")
        ax.text(
            ceiling[1],
            -0.7,
            f"{ceiling[0]}: {ceiling[1]:.{digits}f} ",
            ha="right" if ceiling[1] > 0.4 * best else "left",
            va="center",
            color="#A04000",
            fontsize=9,
        )
    ax.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel=unit,
        xlim=(0, 1.3 * best),
        ylim=(len(names) - 0.4, -1.1),
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table of text and numbers."""
    from ..measure.console import Table

    shown = Table(
        "",
        tuple(columns),
        [tuple(f"{x:.4g}" if isinstance(x, float) else str(x) for x in row) for row in rows],
    )
    print(shown.plain().lstrip("\n"))


# --- the machine
# -----------------------------------------------------------------------------------------------------------------


def machine() -> None:
    """Say on which machine and day the figures of this page were made."""
    import numba

    from ..jit import target

    isas = ", ".join(target.available())
    print(
        f"All figures of this page: {_cpu()}, {os.cpu_count()} cores ({isas}), "
        f"Numba {numba.__version__}, {datetime.date.today().isoformat()}."
    )


def _cpu() -> str:
    """The CPU's name as the system gives it, else LLVM's."""
    from ..jit import system, target

    return system.cpu_model() or str(target.cpu_name())


# --- numbers to compare with
# -----------------------------------------------------------------------------------------------------


def quantised(query: Any, key: Any, value: Any) -> Any:
    """Q, K and V rounded to 8 bits with their scales, as the INT8 kernels take them."""
    from ..numerics.quantization import quantize_problem
    from ..validation import describe
    from ..validation.options import Options

    return quantize_problem(describe(query, key, value, Options(), "int8"))


def exact_attention(query: Any, key: Any, value: Any) -> Any:
    """The definition, in float64 and not rounded to the type of the input."""
    from .. import reference, validation

    return reference.oracle(validation.problem(query, key, value))[0]


# --- ceilings
# ------------------------------------------------------------------------------------------------------------------


@functools.cache
def roof(threads: int = 1, isa: str | None = None) -> roofline.Roof:
    """The measured peaks of this machine, for one INT8 instruction set or the best.

    Measured once per notebook (two seconds).
    """
    return roofline.measure(threads, isa)


def rounds(run: Callable[[], object], seconds: float = 0.3) -> float:
    """Median seconds of a call, repeated for about `seconds`, at least 5 times, after one that is
    not counted.
    """
    from ..measure.timing import best_time, median_time

    once = best_time(run, 0.0, 1)
    return median_time(run, int(min(max(5, seconds / once), 200)))


# --- graphics cards
# ------------------------------------------------------------------------------------------------------------


@functools.cache
def card() -> Any:
    """The GPU (`numflash.cuda.device.Device`) or None, and a line that says so.

    Needs the `cuda` extra.
    """
    from ..cuda.device import current_device

    try:
        device = current_device()
    except UnsupportedError:
        print(
            "No GPU here: every kernel runs in the emulator, which checks it and counts. With a GPU this chapter uses it too."
        )
        return None
    print(
        f"{device.name}, {device.arch}: kernels run in the emulator, which checks them and counts, and on this card too."
    )
    return device
