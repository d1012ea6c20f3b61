"""Caches in several threads: each has its own bits, and kernels of a work queue take turns."""

import threading
import time

import numba
import numpy as np
import pytest
from decode_cases import B, G, H, expected, relative, tokens
from oracles import draw

from numflash.cache.kvcache import KVCache
from numflash.cpu import launch_decode
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


def test_parallel_kernels_of_a_work_queue_take_turns(monkeypatch):
    """Two calls at once would end the process; observed from inside the call."""
    inside = [0]
    worst = [0]
    real = launch_decode.Plan.__init__

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

    monkeypatch.setattr(launch_decode.Plan, "__init__", init)
    monkeypatch.setattr(jit_threads, "_concurrent", False)
    monkeypatch.setattr(numba, "threading_layer", lambda: "workqueue")
    threads = [threading.Thread(target=generate, args=({}, seed)) for seed in (1, 2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert worst[0] == 1
