"""Timing a call: always after one that is not counted, which compiles and warms the caches.

A machine that runs other programs gives figures that cannot be: more than the peak, parts below
zero. They are marked as disturbed, with their spread, and never printed as results.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

DISTURBED = "disturbed"  # what tables say in the place of an impossible figure
LARGEST_SPREAD = 0.25
TURN = 2e-4  # seconds of one contender's turn, at least

Calls = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Timing:
    """Seconds of some calls: their median, and the fastest."""

    seconds: float
    fastest: float

    @property
    def spread(self) -> float:
        """How much longer the median call took than the fastest, as a share of the fastest."""
        return self.seconds / self.fastest - 1 if self.fastest else 0.0

    @property
    def disturbed(self) -> bool:
        """Whether calls took so different times that the median says little."""
        return self.spread > LARGEST_SPREAD

    def __add__(self, other: Timing) -> Timing:
        """Of both calls, one after the other."""
        return Timing(self.seconds + other.seconds, self.fastest + other.fastest)

    def milliseconds(self, digits: int = 3) -> str:
        """The median, marked with its spread where it is disturbed."""
        mark = f" ({DISTURBED}, +{100 * self.spread:.0f} %)" if self.disturbed else ""
        return f"{1e3 * self.seconds:.{digits}f}{mark}"


def _times(run: Callable[[], object], repeats: int, seconds: float) -> list[float]:
    run()
    times: list[float] = []
    while len(times) < repeats or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return times


def timed(run: Callable[[], object], repeats: int, seconds: float = 0.02) -> Timing:
    """Times of `repeats` calls, more where they take less than `seconds`, after one that is not
    counted.
    """
    times = _times(run, repeats, seconds)
    return Timing(float(np.median(times)), min(times))


def median_time(run: Callable[[], object], repeats: int, seconds: float = 0.02) -> float:
    """Median time of a call, see `timed`."""
    return timed(run, repeats, seconds).seconds


def best_time(run: Callable[[], object], seconds: float = 0.2, least: int = 3) -> float:
    """Shortest time of a call.

    Repeated for `seconds`, at least `least` times, after one that is not counted.
    """
    return min(_times(run, least, seconds))


def in_turns(contenders: Calls, rounds: int) -> dict[str, float]:
    """Seconds of one call of each contender, the median of `rounds` turns."""
    turns: dict[str, int] = {}
    for name, call in contenders.items():
        call()  # compiles, and leaves a plan
        call()
        start = time.perf_counter()
        call()
        turns[name] = max(1, int(TURN / (time.perf_counter() - start)))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            start = time.perf_counter()
            for _ in range(turns[name]):
                call()
            times[name].append((time.perf_counter() - start) / turns[name])
    return {name: float(np.median(found)) for name, found in times.items()}


def percent(part: float, whole: float, digits: int = 0) -> str:
    """A share of a whole.

    Where it cannot be (above 100 %, below 0, not a number) the word `disturbed`.
    """
    share = part / whole if whole else float("nan")
    return f"{100 * share:.{digits}f} %" if 0 <= share <= 1 else DISTURBED


def ratio(numerator: Timing, denominator: Timing) -> str:
    """How many times as long the first takes; in brackets where one of them is disturbed."""
    text = f"{numerator.seconds / denominator.seconds:.2f}"
    return f"({text})" if numerator.disturbed or denominator.disturbed else text


def explain_marks(cells: list[tuple[str, ...]]) -> str:
    """What is to be said below a table with marks; empty where there are none."""
    if not any(DISTURBED in cell for row in cells for cell in row):
        return ""
    return (
        f"\n{DISTURBED}: other programs took time from this run; + is how much longer the median call took than the fastest, "
        "ratios with such a time are in brackets. Measure again on an idle machine"
    )
