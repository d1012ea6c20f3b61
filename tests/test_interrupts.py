"""Ctrl-C at any moment: a cache is as before the call or as after it, and a later call works."""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from oracles import draw

import numflash
from numflash.cache.kvcache import KVCache
from numflash.errors import CacheFullError
from numflash.jit import threads
from numflash.jit.interrupts import uninterrupted

B = 3
G = 2
D = 16
PAGE = 128
PACKAGE = str(Path(numflash.__file__).parent)
needs_signals = pytest.mark.skipif(
    not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread(),
    reason="needs interval timers",
)


def tokens(n, seed=0):
    return draw((B, G, n, D), seed), draw((B, G, n, D), seed + 1)


def given(cache, n, seed=0):
    """Tokens as the cache takes them: a key alone where the value is in it."""
    return tokens(n, seed)[: 1 if cache.value_in_key else 2]


def cache_of(dtype="int8", **options):
    """Three sequences: 130 tokens, 40, and an empty one."""
    cache = KVCache(B, G, D, 300, dtype, **options)
    cache.append(*given(cache, 130), counts=[130, 40, 0])
    return cache


def state(cache):
    """All that a caller can learn about a cache."""
    held = tuple(x.tobytes() for b in range(B) if cache.lengths[b] for x in cache.read(b))
    return (
        cache.lengths.tolist(),
        cache.free_pages,
        held,
        cache.decode(draw((B, G, 1, D), 7), splits=1).tobytes(),
    )


OPERATIONS: dict[str, Callable] = {
    "append": lambda cache: cache.append(*given(cache, 20, 3)),
    "append counts": lambda cache: cache.append(*given(cache, 140, 3), counts=[3, 140, 70]),
    "step": lambda cache: cache.step(draw((B, G, 1, D), 4), *given(cache, 1, 3)),
    "decode": lambda cache: cache.decode(draw((B, G, 2, D), 4), return_lse=True),
    "share": lambda cache: cache.share(0, 2, 129),
    "truncate": lambda cache: cache.truncate([129, 7, 0]),
    "reorder": lambda cache: cache.reorder([1, 0, 0]),
    "reserve": lambda cache: cache.reserve(500),
    "reset": lambda cache: cache.reset([0, 1]),
    "reset all": lambda cache: cache.reset(),
}
CACHES = {
    "plain": {},
    "smooth pages": {"page_size": PAGE, "pages": 8, "smooth": True},
    "ring": {"window": 100, "sinks": 3},
    "int4 pages": {"dtype": "int4", "page_size": PAGE, "pages": 8},
    "latent pages": {"value_in_key": True, "value_dim": 9, "page_size": PAGE, "pages": 8},
}
OFTEN = ("smooth pages", "ring")


def marked(kind, *rest):
    return pytest.param(kind, *rest, marks=[] if kind in OFTEN else [pytest.mark.slow])


PAIRS = [
    marked(kind, name)
    for kind in CACHES
    for name in OPERATIONS
    if name != "share" or "page" in kind
]


class Interrupter:
    """Raises KeyboardInterrupt at the n-th bytecode of this package's Python code, which is where a
    signal's handler may run.
    """

    def __init__(self, n: int) -> None:
        self.n, self.raised = n, False

    def __call__(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and not self.raised:
            self.n -= 1
            if self.n < 0:
                self.raised = True
                raise KeyboardInterrupt
        return self


def interrupted(call: Callable, n: int) -> bool:
    """Whether the call was interrupted at its n-th bytecode; it had fewer otherwise."""
    tracer = Interrupter(n)
    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    assert not tracer.raised, "an interrupt was swallowed"
    return False


@pytest.mark.parametrize(("kind", "name"), PAIRS, ids=lambda x: x.replace(" ", "_"))
def test_interrupted_at_every_bytecode(kind, name):
    """Before or after, never between.

    And what comes next counts pages and room as if nothing had happened.
    """
    run = OPERATIONS[name]
    cache = cache_of(**CACHES[kind])
    before = state(cache)
    run(cache)
    after = state(cache)
    n = 0
    found = set()
    stride = 7 if name in ("decode", "step") else 2
    while True:
        cache = cache_of(**CACHES[kind])
        again = interrupted(lambda cache=cache: run(cache), n)
        now = state(cache)
        assert now in (before, after), (
            f"neither before nor after, interrupted at bytecode {n}: {now[:2]}, {before[:2]}, {after[:2]}"
        )
        found.add(now == after)
        if not again:
            break
        n += stride
    assert n > 20 and True in found


@pytest.mark.parametrize("kind", ["plain", "smooth pages"])
def test_an_interrupted_append_does_not_change_the_room(kind):
    """Capacity is counted from what the kernel has stored, not from what Python noted afterwards."""
    more = tokens(64, 3)
    n = 0
    again = True
    while again:
        cache = KVCache(B, G, D, 192, **CACHES[kind])
        again = interrupted(lambda cache=cache: cache.append(*more), n)
        for _ in range(3 - int(cache.lengths[0]) // 64):
            cache.append(*more)
        with pytest.raises(CacheFullError):
            cache.append(*more)
        assert cache.lengths.tolist() == [192] * B
        n += 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["plain", "latent pages"])
def test_an_interrupted_load_leaves_an_empty_cache(kind):
    """Of a ring that was truncated, too: what it had dropped is nothing that the next tokens lack."""
    options = {**CACHES[kind], "window": 100} if kind == "plain" else CACHES[kind]
    full = KVCache(B, G, D, 300, **options)
    most = 290 if kind == "plain" else 250
    full.append(*given(full, most))
    full.truncate(most - 10)
    held = full.state()
    want = state(full)
    n, again = 0, True
    while again:
        cache = KVCache(B, G, D, 300, **options)
        again = interrupted(lambda cache=cache: cache.load_state(held), n)
        if cache.lengths.any():
            assert state(cache) == want
        else:
            cache.append(*given(cache, 5, 3))
            cache.decode(draw((B, G, 2, D), 7))
        n += 5


@pytest.mark.skipif(
    not hasattr(signal, "SIGUSR1") or threading.current_thread() is not threading.main_thread(),
    reason="needs POSIX signals",
)
def test_every_signal_that_came_while_compiling_is_handled():
    """In the order in which they came, also behind one whose handler raises."""
    came = []

    def raising(number, frame):
        came.append(number)
        raise TimeoutError(number)

    def compiles():
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
            signal.raise_signal(number)
        assert not came

    handlers = {
        signal.SIGUSR1: raising,
        signal.SIGUSR2: raising,
        signal.SIGTERM: lambda number, frame: came.append(number),
    }
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(TimeoutError):
            uninterrupted(compiles)
        assert all(signal.getsignal(number) is handler for number, handler in handlers.items())
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert came == list(handlers)


@needs_signals
@pytest.mark.parametrize("kind", [*map(marked, ("smooth pages", "int4 pages", "latent pages"))])
@pytest.mark.parametrize("name", ["append", "share", "reset", "decode", "step"])
def test_real_signals(name, kind):
    """An interval timer interrupts a call at random moments."""
    options = CACHES[kind]
    run = OPERATIONS[name]
    cache = cache_of(**options)
    before = state(cache)
    run(cache)
    after = state(cache)
    rng = np.random.default_rng(5)
    hits = 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(60):
            cache = cache_of(**options)
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 2e-4))
                run(cache)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert state(cache) in (before, after)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert hits > 5


@needs_signals
@pytest.mark.parametrize("precision", ["float32", "int8"])
def test_attention_after_real_signals(precision):
    q, k, v = (draw((1, 2, 70, 32), n) for n in range(3))
    want = numflash.attention(q, k, v, precision=precision)
    rng = np.random.default_rng(5)
    hits = 0
    handler = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(100):
            try:
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(2e-6, 4e-4))
                numflash.attention(q, k, v, precision=precision)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                hits += 1
            signal.setitimer(signal.ITIMER_REAL, 0)
            np.testing.assert_array_equal(numflash.attention(q, k, v, precision=precision), want)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)
    assert hits > 5


def until_inside(context, check):
    """Interrupt a context manager at every bytecode until its body begins; then `check()`."""
    inside = []

    def call():
        with context():
            inside.append(True)

    n = 0
    while not inside:
        interrupted(call, n)
        check()
        n += 1
    assert n > 1


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
@pytest.mark.parametrize("context", [numflash.num_threads, threads.limit])
def test_the_number_of_threads_comes_back(context):
    before = numflash.get_num_threads()

    def check():
        now = numflash.get_num_threads()
        numflash.set_num_threads(before)
        assert now == before

    until_inside(lambda: context(1 if before > 1 else 2), check)


def test_the_lock_of_the_work_queue_is_not_left_held(monkeypatch):
    """Every other thread would wait for ever."""
    monkeypatch.setattr(threads, "_serialised", lambda: True)
    found = []

    def check():
        def take():
            found.append(threads._kernels.acquire(timeout=1))
            if found[-1]:
                threads._kernels.release()

        other = threading.Thread(target=take)
        other.start()
        other.join()
        assert found[-1], len(found)

    until_inside(threads.one_at_a_time, check)
