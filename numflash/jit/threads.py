"""Threads: how many a kernel uses, which callers must wait for each other, and processes that cannot have them."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numba
from numba.core import config

from ..errors import ArgumentError, UnsupportedError


def most() -> int:
    """Threads that Numba started with: as many as cores, or NUMBA_NUM_THREADS."""
    return int(config.NUMBA_NUM_THREADS)


@contextmanager
def limit(threads: int | None) -> Iterator[int]:
    """Run what is inside on `threads` threads (None: as many as now), then restore the old number."""
    before = numba.get_num_threads()
    if threads is not None and not 1 <= threads <= most():
        raise ArgumentError(f"threads: got {threads}; allowed: 1 to {most()}")
    if threads not in (None, before):  # setting costs a tenth of a short kernel's call
        numba.set_num_threads(threads)
    try:
        yield threads or before
    finally:
        if numba.get_num_threads() != before:
            numba.set_num_threads(before)


_kernels = threading.RLock()


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """Serialise callers of parallel kernels where the threading layer is Numba's work queue.

    The work queue is not thread-safe and ends the process (docs/pitfalls.md, "The workqueue layer ends the process"); OpenMP and
    TBB need no lock.
    """
    try:
        layer = numba.threading_layer()
    except ValueError:  # not chosen yet: the first kernel chooses
        layer = "workqueue"
    if layer == "workqueue":
        with _kernels:
            yield
    else:
        yield


_first_process: int | None = None


def refuse_after_fork() -> None:
    """To be called before parallel kernels run.

    Raises
    ------
    UnsupportedError
        In a process forked from one that has run them already: GNU OpenMP would terminate it (docs/pitfalls.md, "GNU OpenMP
        does not survive a fork").
    """
    global _first_process
    if _first_process is None:
        _first_process = os.getpid()
    elif _first_process != os.getpid():
        try:
            layer = numba.threading_layer()
        except ValueError:  # no kernel has run yet
            _first_process = os.getpid()
            return
        if layer == "omp":
            raise UnsupportedError(
                "forked from a process that has run numflash kernels, which GNU OpenMP cannot survive; "
                "allowed: worker processes started by 'spawn', or forked before the first call"
            )
