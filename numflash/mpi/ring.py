"""Keys and values once round the ring, while every rank attends to what it holds.

Ring Attention (Liu et al. 2023, section 3).

Step t: a rank holds the keys of the rank t places behind it. It sends them on and receives the next
ones while its kernel runs on them, then merges the partial result by its log-sum-exp. Each message
carries only the keys that a later rank still attends to.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from .shards import Format, Shard, decode, encode
from .splits import Range

TAG = 0x6E66  # of all messages here
LARGEST = 1 << 30  # bytes of one message: MPI counts are 32-bit in many libraries
PAUSE = 2e-4  # seconds between two looks at messages in flight


@dataclass
class Report:
    """What one call cost this rank; pass one as `report` to have it filled.

    sent, received : bytes of keys and values;  messages : how many were sent
    setup : seconds in checks and in agreeing on scales;  kernel : seconds in attention and merging
    exchange : seconds in which nothing but the exchange went on: posting messages, and waiting for
        them after the kernel
    total : seconds of the call
    """

    sent: int = 0
    received: int = 0
    messages: int = 0
    setup: float = 0.0
    kernel: float = 0.0
    exchange: float = 0.0
    total: float = 0.0


def allocate(nbytes: int) -> np.ndarray:
    """Memory for messages."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True)
class Route:
    """What each step of the ring sends, and the memory for it.

    ranges : (owner, step) -> ranges
        What is sent, see `RankPlan.itinerary`.
    inbox : for what arrives, in turns;  outbox : for what is not sent on as it came
    """

    ranges: Callable[[int, int], tuple[Range, ...]]
    inbox: list[np.ndarray]
    outbox: np.ndarray

    @classmethod
    def of(
        cls, form: Format, ranges: Callable[[int, int], tuple[Range, ...]], rank: int, ranks: int
    ) -> Route:
        """The route over so many ranks.

        All memory is allocated here, because other ranks wait for one that fails in the ring.
        """
        steps = range(1, ranks)
        arriving = max((form.nbytes(ranges(rank - t, t)) for t in steps), default=0)
        leaving = max((form.nbytes(ranges(rank - t + 1, t)) for t in steps), default=0)
        return cls(ranges, [allocate(arriving) for _ in steps[:2]], allocate(leaving))


def messages(buffer: np.ndarray) -> list[np.ndarray]:
    """A buffer in pieces that MPI can count; none for an empty one."""
    return [buffer[at : at + LARGEST] for at in range(0, buffer.size, LARGEST)]


@contextmanager
def progressing(requests: list[Any]) -> Iterator[None]:
    """Keep messages moving while the main thread computes.

    Most MPI libraries move large ones only inside MPI calls.

    One thread at a time calls MPI, so THREAD_SERIALIZED is enough; with less, messages move before
    and after.
    """
    from mpi4py import MPI

    if not requests or MPI.Request.Testall(requests) or MPI.Query_thread() < MPI.THREAD_SERIALIZED:
        yield
        return
    done = threading.Event()

    def move() -> None:
        while not MPI.Request.Testall(requests) and not done.wait(PAUSE):
            pass

    thread = threading.Thread(target=move, name="numflash-mpi")
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed: the messages move after the kernel
        yield
        return
    try:
        yield
    finally:
        done.set()
        thread.join()


def rotate(
    comm: Any,
    form: Format,
    own: Shard,
    route: Route,
    work: Callable[[Shard], None],
    report: Report,
) -> None:
    """Call `work` on the shard of every rank in turn, own first; the next one arrives meanwhile.

    work
        Must not raise: the other ranks would wait forever.
    """
    from mpi4py import MPI

    n = comm.size
    rank = comm.rank
    clock = time.perf_counter
    ranges = route.ranges
    shard = own
    received = np.empty(0, np.uint8)
    for step in range(1, n + 1):
        started = clock()
        requests = []
        incoming = received
        if step < n:
            onward = ranges(rank - step + 1, step)
            wanted = ranges(rank - step, step)
            outgoing = received
            if step == 1 or onward != shard.ranges:
                outgoing = route.outbox[: form.nbytes(onward)]
                encode(form, shard.cut(onward), outgoing)
            incoming = route.inbox[(step - 1) % 2][: form.nbytes(wanted)]
            requests = [
                comm.Irecv([part, MPI.BYTE], (rank - 1) % n, TAG) for part in messages(incoming)
            ]
            requests += [
                comm.Isend([part, MPI.BYTE], (rank + 1) % n, TAG) for part in messages(outgoing)
            ]
            report.sent, report.received = (
                report.sent + outgoing.size,
                report.received + incoming.size,
            )
            report.messages += len(messages(outgoing))
        posted = clock()
        with progressing(requests):
            work(shard)
        worked = clock()
        MPI.Request.Waitall(requests)
        report.kernel += worked - posted
        report.exchange += posted - started + clock() - worked
        if step < n:
            shard = decode(form, wanted, incoming)
            received = incoming
