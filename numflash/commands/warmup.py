"""Compile kernels ahead of their first call, by calling them on small problems.

In several processes, which share the disk cache: a compiler uses one core.
"""

from __future__ import annotations

import functools
import itertools
import logging
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from typing import Any, NamedTuple

import numpy as np

from ..api import attention, attention_backward
from ..cache.kvcache import KVCache
from ..cache.settings import DTYPES
from ..errors import ArgumentError, NumflashError, UnsupportedError
from ..interop.arrays import address
from ..interop.padding import KINDS, make_count
from ..jit.cache_files import files
from ..jit.threads import most
from ..measure.console import Progress, Table

PRECISIONS: tuple[dict[str, Any], ...] = (
    {"precision": "int8"},
    {"precision": "int8", "pv": "int16"},
    {"precision": "int8", "pv": "bf16"},
    {"precision": "int8", "pv": "fp32"},
    {"precision": "float32"},
    {"precision": "bfloat16"},
    {"precision": "float16"},
)
MASKS = {
    "no mask": None,
    "bool mask": np.ones((3, 3), bool),
    "additive mask": np.zeros((3, 3), np.float32),
}

# rows and head sizes: rows that end within a vector, which INT8 computes by `general_int8`; whole ones; a new token
SIZES = (3, 8), (3, 64), (1, 64)
# rows, keys and head sizes of gradients: by register tiles and of few rows
GRADIENT_SIZES = (3, 3, 8), (1, 32, 64)
GROUPS = range(1, 9)  # query heads of a KV head; of more than 8 a kernel takes up to 8 at a time
OPTIONS = "options"  # the word of kernels with a soft cap, ALiBi or functions
COMMON = "int8", "float32"  # storage of KV caches that is compiled where no words ask for others
MOST_PROCESSES = 8  # unless asked for: each takes 0.5 to 1.2 GB of memory


class Job(NamedTuple):
    """Something that compiles: its name, the call, and whether it belongs to what most people need."""

    name: str
    call: Callable[[], Any]
    common: bool = True


def forward(impl: str, options: dict[str, Any], mask: np.ndarray | None) -> None:
    """One call for each kind of size; a mask's numbers are all the same."""
    for length, head_dim in SIZES:
        x = np.ones((1, 1, length, head_dim), np.float32)
        given = None if mask is None else np.resize(mask, (length, length))
        attention(x, x, x, given, impl=impl, **options)


def decode(dtype: str, group: int, batch: int, softcap: float = 0.0) -> None:
    """One append and one decode.

    64 sequences are enough work for the kernels of several threads. A soft cap stands for all options and
    functions: they share a kernel.
    """
    cache = KVCache(batch, 1, 64, 128, dtype)
    x = np.ones((batch, 1, 128, 64), np.float32)
    cache.append(x, x)
    cache.decode(np.ones((batch, group, 1, 64), np.float32), softcap=softcap)


def gradient(impl: str, mask: np.ndarray | None = None) -> None:
    """Forward and backward passes; a key that is not finite is done again in float64."""
    for length, keys, head_dim in GRADIENT_SIZES:
        q, x = (np.ones((1, 1, rows, head_dim), np.float32) for rows in (length, keys))
        y = x.copy()
        y[0, 0, 2] = np.inf
        given = None if mask is None else np.resize(mask, (length, keys))
        for key in (x, y):
            out, lse = attention(q, key, x, given, return_lse=True, impl=impl)
            attention_backward(q, q, key, x, out, lse, attn_mask=given, impl=impl)


def attention_jobs() -> list[Job]:
    """Masks come as broadcast views, the usual case."""
    found = []
    for impl in ("cpu", "portable"):
        for options in PRECISIONS:
            for words, mask in MASKS.items():
                if impl == "cpu" or mask is None:
                    portable = ", portable" if impl == "portable" else ""
                    precision = " pv ".join(options.values())
                    name = f"attention {precision}{portable}, {words}"
                    found.append(Job(name, functools.partial(forward, impl, options, mask)))
    return found


def gradient_jobs() -> list[Job]:
    """The CPU's best kernel, with masks too, and the portable one."""
    found = [Job("gradient, portable, no mask", functools.partial(gradient, "portable"))]
    for words, mask in MASKS.items():
        found.append(Job(f"gradient, {words}", functools.partial(gradient, "cpu", mask)))
    return found


def cache_jobs() -> list[Job]:
    """Every storage, every number of query rows of a kernel, on one thread and on several, without
    options and with them.
    """
    found = []
    for dtype in DTYPES:
        for group in GROUPS:
            for batch, threads in ((1, "one thread"), (64, "threads")):
                name = f"KV cache {dtype}, group {group}, {threads}"
                call = functools.partial(decode, dtype, group, batch)
                found.append(Job(name, call, dtype in COMMON))
                changed = functools.partial(decode, dtype, group, batch, 1.0)
                found.append(Job(f"{name}, {OPTIONS}", changed, False))
    return found


def padding() -> None:
    """What looks for padding in a mask of each dtype."""
    for kind in KINDS.values():
        mask, lengths = np.zeros(1, kind[0]), np.zeros(1, np.int64)
        make_count(*kind)(address(mask), 1, 1, 1, 0, 0, 0, lengths)


def everything() -> list[Job]:
    """All that `warmup` knows."""
    masks = Job("padding masks of PyTorch's tensors", padding)
    return [*attention_jobs(), *gradient_jobs(), masks, *cache_jobs()]


def chosen(given: Sequence[str]) -> list[Job]:
    """All, or those whose names have all of the words, "cache int4" and "group 3" being four; kernels with
    options only where that is one of them.

    Raises
    ------
    ArgumentError
        No name has them.
    """
    if not given:
        return everything()
    wanted = words_of(" ".join(given))
    named = [(job, words_of(job.name)) for job in everything()]
    found = [job for job, own in named if wanted <= own and OPTIONS in wanted | ({OPTIONS} - own)]
    if not found or not wanted:
        raise ArgumentError(
            f"WORD: got {' '.join(given)!r}, which no kernel's name has; allowed: words of a name in "
            "`numflash warmup --list`"
        )
    return found


def words_of(text: str) -> set[str]:
    """The words and numbers of a text, in small letters."""
    return set(re.findall(r"\w+", text.lower()))


def compile_one(job: Job) -> tuple[float, str]:
    """Seconds that a job takes, and why this machine cannot do it, or ""."""
    begin = time.perf_counter()
    try:
        job.call()
    except UnsupportedError as error:
        return 0.0, str(error)
    return time.perf_counter() - begin, ""


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent, which ends its workers, and end with it if it is killed.

    Messages about compiling are left out: the parent shows what has been compiled.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.getLogger("numflash").addFilter(lambda record: "compiling" not in record.msg)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Otherwise a worker whose parent was killed would wait for more work forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def spread(work: list[Job]) -> list[Job]:
    """One job of each kind, then the next of each.

    Jobs of one kind share kernels; started together, several processes would compile the same ones.
    """
    kinds: dict[str, list[Job]] = {}
    for job in work:
        kinds.setdefault(job.name.split(",")[0], []).append(job)
    rounds = itertools.zip_longest(*kinds.values())
    return [job for jobs in rounds for job in jobs if job is not None]


def processes_for(work: list[Job]) -> int:
    """How many of them are compiled at a time."""
    return min(most(), MOST_PROCESSES, len(work))


def compile_all(work: list[Job], processes: int, done: Callable[[Job, float, str], None]) -> None:
    """Run jobs in several processes.

    done : called with each job as it is done, and with the results of `compile_one`; what it
        raises, as Ctrl-C, ends the processes, too

    Raises
    ------
    NumflashError
        The system has ended a process, for want of memory.
    """
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, spawn, _begin_worker)
    try:
        jobs = {pool.submit(compile_one, job): job for job in spread(work)}
        for future in as_completed(jobs):
            done(jobs[future], *future.result())
    except BaseException as error:
        pool.shutdown(wait=False, cancel_futures=True)
        for worker in multiprocessing.active_children():
            worker.terminate()
        if isinstance(error, BrokenProcessPool):
            raise NumflashError(
                f"processes: one of {processes} was ended by the system, for want of memory perhaps; "
                "allowed: fewer, as numflash warmup --processes 1"
            ) from None
        raise
    pool.shutdown()


def run(words: Sequence[str] = (), processes: int = 0) -> dict[str, Any]:
    """Compile those with the words in their names; without words, what most people need.

    processes : at a time; 0 for as many as cores, up to MOST_PROCESSES

    Returns the seconds each took (near 0 where the disk cache had it).
    """
    table = Table("compiled", ("kernel", "s"))
    work = chosen(words) if words else [job for job in everything() if job.common]
    processes = min(processes, len(work)) or processes_for(work)
    start = time.perf_counter()
    found: dict[str, tuple[float, str]] = {}

    def show(job: Job, seconds: float, reason: str) -> None:
        progress.step(job.name)
        found[job.name] = seconds, reason

    with Progress("warmup", len(work) + (processes > 1)) as progress:
        if processes == 1:
            for job in work:
                progress.step(job.name)
                found[job.name] = compile_one(job)
        else:
            progress.step(f"compiling with {processes} processes")
            compile_all(work, processes, show)
    for job in work:
        seconds, reason = found[job.name]
        if reason:
            table.add(job.name, "not here", kernel=job.name, seconds=None, reason=reason)
        else:
            table.add(job.name, f"{seconds:.2f}", kernel=job.name, seconds=seconds)
    total = time.perf_counter() - start
    together = f" with {processes} processes" if processes > 1 else ""
    table.note = f"{total:.1f} s in all{together}; {len(files())} files in the disk cache"
    table.show()
    return {"seconds": total, "processes": processes, "kernels": table.records}
