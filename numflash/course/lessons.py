"""What the notebooks share.

`check` for exercises, one way to draw, and the ceilings that figures are held against.

Imported only by name (`from numflash.course import check`); drawing needs matplotlib (extra
`notebooks`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import UnsupportedError
from ..measure import roofline

# --- exercises
# -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """One call of `check`.

    What was asked, what came, and the verdict ("open", "right" or "wrong") with its words.
    """

    name: str
    got: Any
    expected: Any
    cases: tuple[tuple[Any, ...], ...]
    within: float
    verdict: str
    words: str


answers: list[Answer] = []  # of this process, in order


def check(
    name: str, got: Any, expected: Any, *cases: tuple[Any, ...], within: float = 1e-6
) -> None:
    """Compare an exercise's answer with what is expected, and say both in plain words.

    a wrong answer stops nothing.

    Parameters
    ----------
    name : what the exercise requires
    got : the answer; `...`, also within a tuple, is an exercise that is still open
    expected : a value (number, text, array, or a tuple of them), or a function that computes it
    cases : with functions, the arguments to call both with, a tuple for each call
    within : relative tolerance of floats; integers, booleans and text must be equal
    """
    if got is ... or (isinstance(got, tuple) and any(x is ... for x in got)):
        verdict = "open"
        words = "not answered yet"
    elif cases:
        verdict = "right"
        words = f"right, on {len(cases)} case{'s' * (len(cases) > 1)}"
        for case in cases:
            shown = ", ".join(map(_show, case))
            wish = expected(*case)
            try:
                came = got(*case)
            except Exception as error:
                verdict = "wrong"
                words = f"not yet: of ({shown}) expected {_show(wish)}, got {type(error).__name__}: {error}"
                break
            if came is ...:
                verdict = "open"
                words = "not answered yet"
                break
            if not _equal(came, wish, within):
                verdict = "wrong"
                words = f"not yet: of ({shown}) expected {_show(wish)}, got {_show(came)}"
                break
    elif _equal(got, expected, within):
        verdict = "right"
        words = f"right: {_show(expected)}"
    else:
        verdict = "wrong"
        words = f"not yet: expected {_show(expected)}, got {_show(got)}"
    answers.append(Answer(name, got, expected, cases, within, verdict, words))
    print(f"{name}: {words}")


def _equal(got: Any, expected: Any, within: float) -> bool:
    if isinstance(expected, (tuple, list)):
        return (
            isinstance(got, (tuple, list))
            and len(got) == len(expected)
            and all(_equal(a, b, within) for a, b in zip(got, expected, strict=True))
        )
    if isinstance(expected, str):
        return isinstance(got, str) and got.strip().lower() == expected.lower()
    try:
        a = np.asarray(got)
        b = np.asarray(expected)
        if a.shape != b.shape or a.dtype.kind not in "biuf":
            return False
        return bool(
            np.allclose(a, b, rtol=within, atol=within * 1e-3)
            if b.dtype.kind == "f"
            else np.array_equal(a, b)
        )
    except (TypeError, ValueError):
        return False


def _show(x: Any) -> str:
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(_show, x))})"
    if isinstance(x, np.ndarray) and x.ndim:
        head = ", ".join(f"{v:.6g}" for v in x.ravel()[:4])
        return f"array {x.shape} {x.dtype} [{head}{', ...' if x.size > 4 else ''}]"
    if isinstance(x, (float, np.floating)):
        return f"{x:.6g}"
    return repr(x.item() if isinstance(x, np.generic) else x)


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
            -0.75,
            f"{ceiling[0]}: {ceiling[1]:.{digits}f}",
            ha="right",
            va="bottom",
            color="#A04000",
            fontsize=9,
        )
    ax.set(
        yticks=range(len(names)),
        yticklabels=names,
        xlabel=unit,
        xlim=(0, 1.22 * best),
        ylim=(len(names) - 0.4, -0.95),
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
