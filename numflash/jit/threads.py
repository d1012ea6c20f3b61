"""Threads: how many a kernel uses, which callers must wait for each other, and processes that
cannot have them.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from importlib import import_module
from numbers import Integral
from typing import Any

import numba
from numba.core import config
from numba.np.ufunc import parallel

from ..errors import ArgumentError, ArgumentTypeError, UnsupportedError
from . import quota

_started: list[Callable[[], int]] = []  # what tells the number of threads, the layer being loaded


def most() -> int:
    """Threads that Numba started with: NUMBA_NUM_THREADS, or as many as the cores that may be used."""
    return int(config.NUMBA_NUM_THREADS)


def count() -> int:
    """Threads that parallel kernels of this thread use now.

    Numba's threading layer is loaded for it.

    Raises
    ------
    UnsupportedError
        There is no such layer here.
    """
    if _started:  # Numba's own function waits for two locks before it asks
        return int(_started[0]())
    try:
        with _openmp_stays():
            threads = _within_quota(int(numba.get_num_threads()))
        _started.append(getattr(parallel, "_get_num_threads", numba.get_num_threads))
        return threads
    except (ValueError, ImportError) as error:
        asked = config.THREADING_LAYER
        reason = " ".join(str(error).split())
        raise UnsupportedError(
            f"NUMBA_THREADING_LAYER: got {asked!r}, which cannot be loaded here ({reason}); allowed: unset, 'workqueue', "
            "or 'omp' and 'tbb' where they are installed"
        ) from None


def layer() -> str:
    """Numba's threading layer: "omp", "tbb" or "workqueue"; "none" where what is asked for cannot be loaded."""
    try:
        count()
    except UnsupportedError:
        return "none"
    return str(numba.threading_layer())


def least_work(slow: int = 8) -> int:
    """How many times as much work makes another thread pay as with OpenMP, whose threads start in 0.01 ms:
    `slow` times with Numba's work queue, whose threads take 0.2 to 0.4.
    """
    count()
    return slow if numba.threading_layer() == "workqueue" else 1


def threads_for(work: int, least: int, slow: int = 8) -> int:
    """Threads for so much work: one up to `least`, for which Numba's threads are not started either, and up
    to `slow` times as much where they start slowly.
    """
    if work <= least or work <= least * least_work(slow):
        return 1
    return count()


def _within_quota(threads: int) -> int:
    """The number of threads of this Python thread, after Numba was imported before `quota` could tell it
    how many there may be; one that the user has set stays.
    """
    said = quota.VARIABLE in os.environ or threads < most()
    allowed = None if said else quota.threads_of_quota()
    if allowed is None or allowed >= threads:
        return threads
    numba.set_num_threads(allowed)
    return allowed


def _openmp(layer: str | None = None) -> list[Any]:
    """The OpenMP runtimes of this process, as far as they can be found; nothing is loaded for it.

    PyTorch brings a runtime whose names the whole process sees; others are found by GNU's name.
    `layer`: the file of Numba's layer, which leads to its own.
    """
    places: list[tuple[str | None, int]] = []
    if hasattr(os, "RTLD_NOLOAD"):
        places += [(None, 0), ("libgomp.so.1", os.RTLD_NOLOAD)]
    if layer:
        places.append((layer, 0))
    found = []
    for name, mode in places:
        with suppress(OSError, AttributeError):
            library = ctypes.CDLL(name, ctypes.DEFAULT_MODE | mode)
            library.omp_get_max_threads  # noqa: B018
            found.append(library)
    return found


@contextmanager
def _openmp_stays() -> Iterator[None]:
    """Undo what Numba's OpenMP layer does to this thread when it starts: it sets the number of threads
    and allows parallel regions inside of parallel regions.

    Where PyTorch shares the runtime, `torch.set_num_threads` would be undone, and each of its threads
    would start more for every small product: its attention of one token took 70 ms for 0.5.
    """
    before = [(runtime, runtime.omp_get_max_threads()) for runtime in _openmp()]
    yield
    if numba.threading_layer() != "omp":
        return
    for runtime, threads in before:
        runtime.omp_set_num_threads(threads)
    if not {"OMP_NESTED", "OMP_MAX_ACTIVE_LEVELS"} & os.environ.keys():
        for runtime in _openmp(import_module("numba.np.ufunc.omppool").__file__):
            runtime.omp_set_max_active_levels(1)


def check_memory_for_threads() -> None:
    """Try to start as many threads as kernels will use where the address space is limited (ulimit
    -v).

    Raises
    ------
    MemoryError
        It is too small for them. GNU OpenMP would terminate the process.
    """
    try:
        import resource
    except ImportError:  # Windows
        return
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    done = threading.Event()
    started = list[threading.Thread]()
    try:
        for _ in range(most() - 1):
            thread = threading.Thread(target=done.wait, daemon=True)
            thread.start()
            started.append(thread)
    except (RuntimeError, MemoryError) as error:
        raise MemoryError(
            f"{most()} threads cannot be started ({error}): the address space is limited to "
            f"{resource.getrlimit(resource.RLIMIT_AS)[0] >> 20} MB; raise the limit (ulimit -v), or set NUMBA_NUM_THREADS=1"
        ) from None
    finally:
        done.set()
        for thread in started:
            thread.join()


SMALLEST_STACK = 64 << 10  # bytes of a thread of OpenMP; kernels keep tiles in up to 28 KiB
UNITS = {"": 1 << 10, "b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def check_stacks() -> None:
    """Read OMP_STACKSIZE as OpenMP does, where kernels run on threads of OpenMP.

    Raises
    ------
    UnsupportedError
        It is too little for a kernel, which would end the process.
    """
    asked = os.environ.get("OMP_STACKSIZE", "")
    found = re.fullmatch(r"\s*(\d+)\s*([bkmg]?)\s*", asked, re.IGNORECASE)
    if found is None or most() == 1 or numba.threading_layer() != "omp":
        return
    if int(found[1]) * UNITS[found[2].lower()] < SMALLEST_STACK:
        raise UnsupportedError(
            f"OMP_STACKSIZE: got {asked!r}, less than a kernel needs; allowed: unset, or from "
            f"{SMALLEST_STACK >> 10}k on, before the process starts"
        )


@contextmanager
def limit(threads: int | None) -> Iterator[int]:
    """Run what is inside on `threads` threads, or as many as now for None, then restore the number."""
    before = count()
    if threads is not None:
        check_threads(threads)
    try:
        if threads not in (None, before):  # setting costs a tenth of a short kernel's call
            numba.set_num_threads(threads)
        yield threads or before
    finally:
        if count() != before:
            numba.set_num_threads(before)


def restoring_threads(call: Callable[..., Any], *arguments: Any) -> Any:
    """call(*arguments), a kernel that may set the number of threads: after an error in it, whose memory
    was not enough, there are as many as before.
    """
    before = count()
    try:
        return call(*arguments)
    except BaseException:
        numba.set_num_threads(before)
        raise


_kernels = threading.RLock()
_nothing = nullcontext()
_concurrent = False


def _serialised() -> bool:
    """Whether callers must wait for each other.

    With Numba's work queue, and until it is known what the first kernel chooses.
    """
    global _concurrent
    if not _concurrent:
        try:
            _concurrent = numba.threading_layer() != "workqueue"
        except ValueError:  # not chosen yet
            return True
    return not _concurrent


def one_at_a_time() -> AbstractContextManager[Any]:
    """Serialise callers of parallel kernels where the threading layer is Numba's work queue.

    The work queue is not thread-safe and ends the process (docs/pitfalls.md, "The workqueue layer
    ends the process"); OpenMP and TBB need no lock. It is the lock itself, because Ctrl-C between a
    method of ours and the lock would leave it held.
    """
    return _kernels if _serialised() else _nothing


def check_threads(threads: int) -> None:
    """Raise unless kernels can run on so many threads."""
    if isinstance(threads, bool) or not isinstance(threads, Integral):
        raise ArgumentTypeError(f"threads: got {threads!r}; allowed: an integer, 1 to {most()}")
    if not 1 <= threads <= most():
        raise ArgumentError(f"threads: got {threads}; allowed: 1 to {most()}")


def get_num_threads() -> int:
    """Threads that calls of this Python thread use, at most; problems too small for all use fewer.

    Returns
    -------
    int
        What `set_num_threads` was given, else as many as Numba started with.
    """
    return count()


def set_num_threads(threads: int) -> None:
    """Let calls of this Python thread use that many threads.

    Results do not depend on it. `numflash.torch` follows `torch.get_num_threads()` instead.

    Parameters
    ----------
    threads : int
        1 to as many as Numba started with (`NUMBA_NUM_THREADS`).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Not such an integer.
    """
    check_threads(threads)
    count()
    numba.set_num_threads(int(threads))


@contextmanager
def num_threads(threads: int) -> Iterator[int]:
    """Within this context, calls of this Python thread use that many threads; then as many as before.

    Parameters
    ----------
    threads : int
        As `set_num_threads` takes it.

    >>> with num_threads(1) as n:
    ...     n == get_num_threads() == 1
    True

    Raises
    ------
    ArgumentError, ArgumentTypeError
        As `set_num_threads`.
    """
    before = count()
    try:
        set_num_threads(threads)
        yield int(threads)
    finally:
        numba.set_num_threads(before)


_checked = False  # whether what a first call needs is there
_forked = False  # from a process in which OpenMP's threads had started


def _after_fork() -> None:
    global _forked
    with suppress(ValueError):  # no threads yet
        _forked = numba.threading_layer() == "omp"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def refuse_after_fork() -> None:
    """To be called before parallel kernels run.

    Raises
    ------
    UnsupportedError
        In a process forked from one in which Numba's threads had started, by a kernel or by asking
        for their number: GNU OpenMP would terminate it (docs/pitfalls.md, "GNU OpenMP does not
        survive a fork"). At the first call also where Numba's threading layer cannot be loaded, or
        its threads' stacks are too small.
    MemoryError
        At the first call, if the address space is too small for the threads.
    """
    global _checked
    if _forked:
        raise UnsupportedError(
            "forked from a process in which Numba's threads have started, which GNU OpenMP cannot survive; "
            "allowed: worker processes started by 'spawn', or forked before the first call"
        )
    if not _checked:
        count()
        check_memory_for_threads()
        check_stacks()
        _checked = True
