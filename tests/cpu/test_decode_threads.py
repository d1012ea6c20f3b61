"""Caches in several threads: each has its own bits, one that is only read too, and kernels of a work
queue take turns.
"""

import threading
import time

import numba
import numpy as np
import pytest
from decode_cases import B, G, H, expected, relative, tokens
from oracles import draw

from numflash.cache.kvcache import KVCache
from numflash.cpu import launch_decode
from numflash.errors import CacheFullError
from numflash.jit import threads as jit_threads
from numflash.jit.threads import limit, most


def generate(out, seed):
    """Tokens appended and decoded one by one on a thread of its own, on caches large enough for
    kernels of several threads.
    """
    with limit(min(2, most())):
        cache, (key, value) = KVCache(B, G, 64, 5000), tokens(4500, seed, d=64)
        cache.append(key, value)
        query = draw((B, H, 1, 64), seed)
        bits = []
        for i in range(30):
            more = tokens(1, 31 * seed + i, d=64)
            cache.append(*more)
            key = np.concatenate([key, more[0]], 2)
            value = np.concatenate([value, more[1]], 2)
            bits.append(cache.decode(query, splits=2))
        out[seed] = bits, relative(bits[-1], expected(query, key, value)[0])


@pytest.mark.parametrize("layer", ["as it is", "workqueue"])
def test_two_caches_in_two_threads(layer, monkeypatch):
    if layer == "workqueue":
        monkeypatch.setattr(jit_threads, "_concurrent", False)  # what an earlier call has found out
        monkeypatch.setattr(numba, "threading_layer", lambda: layer)
    alone = {}
    together = {}
    for seed in (10, 20):
        generate(alone, seed)
    threads = [threading.Thread(target=generate, args=(together, seed)) for seed in (10, 20)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for seed in (10, 20):
        assert together[seed][1] < 0.03
        np.testing.assert_array_equal(together[seed][0], alone[seed][0])


@pytest.mark.skipif(most() < 2, reason="needs two threads")
def test_parallel_kernels_of_a_work_queue_take_turns(monkeypatch):
    """Two calls at once would end the process; observed from inside the call."""
    inside = [0]
    worst = [0]
    real = launch_decode.DecodePlan.__init__

    class Slow:
        def __init__(self, kernel):
            self.kernel = kernel

        def __call__(self, *arguments):
            inside[0] += 1
            worst[0] = max(worst[0], inside[0])
            time.sleep(0.01)
            again = self.kernel(*arguments)
            inside[0] -= 1
            return again

    def init(plan, *arguments):
        real(plan, *arguments)
        plan.call = Slow(plan.call)

    monkeypatch.setattr(launch_decode.DecodePlan, "__init__", init)
    monkeypatch.setattr(jit_threads, "_concurrent", False)
    monkeypatch.setattr(numba, "threading_layer", lambda: "workqueue")
    # short calls in parallel all the same
    monkeypatch.setattr(jit_threads, "least_work", lambda *_: 1)
    threads = [threading.Thread(target=generate, args=({}, seed)) for seed in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert worst[0] == 1


@pytest.mark.parametrize("length", [100, 4500])  # of one thread each, and of several
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_one_cache_decoded_in_two_threads(dtype, length, monkeypatch):
    """Both calls have left their kernels before one reads what its kernel has left in its plan."""
    cache = KVCache(B, G, 64, 5000, dtype)
    cache.append(*tokens(length, 1, d=64))
    queries = [draw((B, H, 1, 64), seed) for seed in (2, 3)]
    alone = [cache.decode(q, return_lse=True) for q in queries]
    made, both, found = [], threading.Barrier(2, timeout=60), {}
    real = launch_decode.DecodePlan.__call__

    def meet(plan, *arguments):
        real(plan, *arguments)
        both.wait()

    def count(plan, *arguments):
        made.append(plan)
        init(plan, *arguments)

    init = launch_decode.DecodePlan.__init__
    monkeypatch.setattr(launch_decode.DecodePlan, "__call__", meet)
    monkeypatch.setattr(launch_decode.DecodePlan, "__init__", count)

    def decode(i):
        for _ in range(3):
            found[i] = cache.decode(queries[i], return_lse=True)

    threads = [threading.Thread(target=decode, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for i in range(2):
        for got, wanted in zip(found[i], alone[i], strict=True):
            np.testing.assert_array_equal(got, wanted)
    assert len(made) == 1  # besides the one that there was


def test_calls_that_raise_give_their_plan_back(monkeypatch):
    made = []
    init = launch_decode.DecodePlan.__init__
    monkeypatch.setattr(
        launch_decode.DecodePlan,
        "__init__",
        lambda plan, *x: (made.append(plan), init(plan, *x))[1],
    )
    cache, query = KVCache(B, G, 64, 40), draw((B, H, 1, 64), 2)
    cache.append(*tokens(40, 1, d=64))
    for _ in range(3):
        cache.decode(query)
        for out in ("no array", np.empty((1, 1), np.float32)):
            with pytest.raises(ValueError if isinstance(out, np.ndarray) else TypeError):
                cache.decode(query, out=out)
        with pytest.raises(ValueError, match="sinks"):
            cache.decode(query, sinks=[1.0])
        with pytest.raises(CacheFullError):
            cache.step(query, *tokens(1, 1, d=64))
    assert len(made) == 1
