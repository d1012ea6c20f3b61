"""Timing a call: always after one that is not counted, which compiles and warms the caches."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np


def best_time(run: Callable[[], object], seconds: float = 0.2, least: int = 3) -> float:
    """Shortest time of a call: repeated for `seconds`, at least `least` times, after one that is not counted."""
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < least:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def median_time(run: Callable[[], object], repeats: int, seconds: float = 0.02) -> float:
    """Median time of a call, after one that is not counted: of `repeats` calls, more where they take less than `seconds`."""
    run()
    times: list[float] = []
    while len(times) < repeats or sum(times) < seconds:
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times))
