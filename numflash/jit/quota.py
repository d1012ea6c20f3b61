"""How many CPUs a container may use at a time, and as many threads for Numba.

A container on a large machine sees all cores, and has a quota of CPU time (`docker --cpus`, Kubernetes'
limits). With a thread for every core, those that wait for each other spend it, and all of them stand
still for the rest of each tenth of a second. Numba reads the number of threads when it is imported, so
this runs before that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

GROUPS = "/proc/self/cgroup"
ROOT = "/sys/fs/cgroup"
VARIABLE = "NUMBA_NUM_THREADS"


def _read(path: str) -> str:
    """What a file holds; nothing where there is no such file."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except (OSError, ValueError):
        return ""


def _folders(groups: str, root: str) -> Iterator[str]:
    """Where Linux describes the control groups of this process, and those that these are in.

    In a container the root is its own group, and what `groups` names may not be there.
    """
    for line in _read(groups).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers or "cpu" in controllers.split(","):
            top = f"{root}/cpu" if controllers else root
            names = [name for name in path.split("/") if name]
            yield from ("/".join([top, *names[:n]]) for n in range(len(names) + 1))


def cpu_quota(groups: str = GROUPS, root: str = ROOT) -> float | None:
    """CPUs that this process may use at a time, by the smallest quota of its control groups.

    None without a quota, and on other systems than Linux.
    """
    found = []
    for folder in _folders(groups, root):
        words = _read(f"{folder}/cpu.max").split() or [  # of version 2, or of version 1
            _read(f"{folder}/cpu.cfs_{name}_us").strip() for name in ("quota", "period")
        ]
        # no quota is "max", or -1; an import must not fail for what else may stand there
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
            found.append(int(words[0]) / int(words[1]))
    return min(found, default=None)


def threads_of_quota() -> int | None:
    """Threads for this process's quota; None where it may use all CPUs that it sees."""
    quota = cpu_quota()
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    if quota is None or not seen or quota > seen - 1:
        return None
    return max(1, -int(-quota // 1))


def limit_numba() -> None:
    """Let Numba start as many threads as the quota allows, unless the user has said how many, or Numba has
    read the number already.
    """
    if VARIABLE not in os.environ and "numba" not in sys.modules:
        threads = threads_of_quota()
        if threads is not None:
            os.environ[VARIABLE] = str(threads)
