"""How many threads a kernel uses, for a while."""
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numba
from numba.core import config

from ..errors import ArgumentError


def most() -> int:
    """Threads that Numba started with: as many as cores, or NUMBA_NUM_THREADS."""
    return int(config.NUMBA_NUM_THREADS)


@contextmanager
def limit(threads: int | None) -> Iterator[int]:
    """Run what is inside on `threads` threads (None: as many as now) and put the old number back (P29)."""
    before = numba.get_num_threads()
    if threads is not None and not 1 <= threads <= most():
        raise ArgumentError(f"threads: got {threads}; allowed: 1 to {most()}")
    if threads not in (None, before):                    # setting costs a tenth of a short kernel's call
        numba.set_num_threads(threads)
    try:
        yield threads or before
    finally:
        if numba.get_num_threads() != before:
            numba.set_num_threads(before)
