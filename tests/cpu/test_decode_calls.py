"""Equal calls of `KVCache.decode` skip the checks of the first one: they still attend to what the
cache holds now, and refuse what they must.
"""

import numpy as np
import pytest

import numflash
from numflash.cache import appending, calls
from numflash.errors import ArgumentError, ArgumentTypeError, NumflashError, UnsupportedError
from numflash.jit import threads

HEADS, KV_HEADS, D = 4, 2, 32
rng = np.random.default_rng(0)


def normal(*shape):
    return rng.standard_normal(shape, np.float32)


def exact(query, keys, values, scale=D**-0.5):
    """Attention in float64 of one new token (B, H, 1, D) over lists of (Hkv, tokens, D)."""
    out = np.zeros(query.shape)
    for b, (key, value) in enumerate(zip(keys, values, strict=True)):
        for h in range(HEADS):
            g = h * KV_HEADS // HEADS
            s = key[g].astype(np.float64) @ query[b, h, 0] * scale
            p = np.exp(s - s.max())
            out[b, h, 0] = p @ value[g] / p.sum()
    return out


@pytest.mark.parametrize("page_size", [None, 128])
@pytest.mark.parametrize(("dtype", "atol"), [("float32", 2e-6), ("int8", 0.06)])
def test_equal_calls_attend_to_what_the_cache_holds_now(dtype, atol, page_size):
    cache = numflash.KVCache(2, KV_HEADS, D, 256, dtype, page_size)
    query = normal(2, HEADS, 1, D)
    held = [[normal(KV_HEADS, 0, D)] * 2 for _ in range(2)]  # keys, values of each sequence

    def append(n):
        new = [normal(2, KV_HEADS, n, D) for _ in range(2)]
        cache.append(*new)
        for x, rows in zip(held, new, strict=True):
            x[:] = [np.concatenate([old, r], 1) for old, r in zip(x, rows, strict=True)]

    def check(scale=None):
        for _ in range(2):  # the second is an equal call
            wanted = exact(query, *held, scale or D**-0.5)
            np.testing.assert_allclose(cache.decode(query, scale=scale), wanted, atol=atol)

    append(100)
    check()
    check(scale=0.5)
    append(1)
    check()
    append(60)  # more splits, and another page
    check()
    cache.reorder([1, 0])
    held[:] = [x[::-1] for x in held]
    check()
    cache.truncate([90, 130])
    held[:] = [[x[0][:, :90], x[1][:, :130]] for x in held]
    check()
    cache.reserve(700)
    check()
    append(300)
    check()


def test_equal_calls_refuse_what_the_first_would():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    cache.append(normal(1, KV_HEADS, 3, D), normal(1, KV_HEADS, 3, D))
    query = normal(1, HEADS, 1, D)
    for _ in range(2):
        cache.decode(query)
    with pytest.raises(ArgumentError, match="scale: got inf"):
        cache.decode(query, scale=np.inf)
    with pytest.raises(ArgumentError, match="splits: got 0"):
        cache.decode(query, splits=0)
    with pytest.raises(ArgumentTypeError, match="return_lse: got 1"):
        cache.decode(query, return_lse=1)
    with pytest.raises(ArgumentError, match="query: got shape"):
        cache.decode(query[:, :, :, :-1])
    cache.close()
    with pytest.raises(NumflashError, match="closed"):
        cache.decode(query)


def test_equal_calls_do_rows_again_that_float32_cannot_hold():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    key, value = normal(1, KV_HEADS, 5, D), normal(1, KV_HEADS, 5, D)
    key[0, 0, 2] = 1e30
    cache.append(key, value)
    query = normal(1, HEADS, 1, D)
    query[0, 0] = 1e20  # its score of that key is beyond float32
    wanted = exact(query, key, value)
    for _ in range(3):
        np.testing.assert_allclose(cache.decode(query), wanted, atol=2e-6)


def test_more_calls_than_are_kept():
    cache = numflash.KVCache(1, KV_HEADS, D, 64, "float32")
    key, value = normal(1, KV_HEADS, 5, D), normal(1, KV_HEADS, 5, D)
    cache.append(key, value)
    query = normal(1, HEADS, 1, D)
    for n in range(150):
        scale = 0.1 + n / 1000
        wanted = exact(query, key, value, scale)
        np.testing.assert_allclose(cache.decode(query, scale=scale), wanted, atol=2e-6)


def test_what_a_cache_keeps_of_its_calls_is_bounded(monkeypatch):
    for module in (calls, appending):
        monkeypatch.setattr(module, "MOST_CALLS", 5)
    cache = numflash.KVCache(1, KV_HEADS, D, 4096, "float32")
    for n in range(1, 30):
        cache.append(normal(1, KV_HEADS, n, D), normal(1, KV_HEADS, n, D))
    kept = cache._memory.calls
    assert len(kept.shapes) <= 5
    for n in range(20):
        cache.decode(normal(1, HEADS, n % 2 + 1, D), scale=np.array(0.1), splits=1 + n // 2)
    assert len(kept._plans) <= 6 and len(kept._calls) <= 6


def test_a_call_of_another_thread_between_two_looks():
    """`succeeded` is for the call that it was given, whatever `last` is by then."""

    class Calls(calls.Calls):
        looks = 0

        @property
        def last(self):
            self.looks += 1
            return mine if self.looks == 1 else others

        @last.setter
        def last(self, value):
            self.kept = value

    mine, others = calls.LastCall((1, 2, 1, 8)), calls.LastCall((1, 2, 5, 8))
    made = object.__new__(Calls)
    made.results = {}
    made.succeeded((1, 2, 1, 8), (1, 2, 1, 8))
    assert made.kept == mine._replace(wanted=(1, 2, 1, 8))


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
def test_a_step_that_a_forked_process_refuses_appends_nothing(monkeypatch):
    monkeypatch.setattr(threads, "least_work", lambda *_: 1)  # 7,000 tokens on two threads
    cache = numflash.KVCache(1, KV_HEADS, D, 8000)
    cache.append(*np.ones((2, 1, KV_HEADS, 7000, D), np.float32))
    token, query = np.ones((1, KV_HEADS, 1, D), np.float32), np.ones((1, HEADS, 1, D), np.float32)
    cache.step(query, token, token)  # the next one is equal to it
    monkeypatch.setattr(threads, "_forked", True)
    for given in ((query, token, token), (query.astype(np.float16), token, token)):
        with pytest.raises(UnsupportedError, match="forked from a process"):
            cache.step(*given)
        assert cache.lengths.tolist() == [7001]


@pytest.mark.skipif(threads.most() < 2, reason="needs two threads")
@pytest.mark.parametrize("batch", [1, 3])
def test_plans_of_one_thread_and_of_two(batch, monkeypatch):
    """Short sequences have one thread and one split; the plan kept for them is not that of long ones."""
    monkeypatch.setattr(threads, "least_work", lambda *_: 1)  # as with OpenMP
    cache = numflash.KVCache(batch, KV_HEADS, D, 400)._open()
    layout, shape = cache.layout, (batch, HEADS, 1, D)
    serial = layout.serial_tokens(batch)
    codes = numflash.KVCache(batch, KV_HEADS, D, 400, "int4")._open().layout
    assert codes.serial_tokens(batch) == serial  # half the bytes, as much work

    def sizes(longest):
        plan, _, free = cache.calls.take(shape, None, None, longest)
        free.append(plan)
        return plan.sizes.workers, plan.sizes.splits

    with numflash.num_threads(2):
        for longest in (1, 128, 129, serial):
            assert sizes(longest) == (1, 1)
            assert layout.splits(batch, HEADS, *layout.call(longest, batch)) == 1
        for _ in range(2):
            assert sizes(serial + 1)[0] == 2
            assert sizes(serial) == (1, 1)
        assert sizes(serial + 1)[0] == 2
    with numflash.num_threads(1):
        assert sizes(serial + 1)[0] == 1


def test_an_equal_call_follows_the_length():
    """Token by token over the end of a block, and cut again: as a cache that was never asked before."""
    query = normal(1, HEADS, 1, D)
    key, value = (normal(1, KV_HEADS, 260, D) for _ in range(2))
    cache = numflash.KVCache(1, KV_HEADS, D, 300)
    cache.append(key[:, :, :126], value[:, :, :126])
    for n in range(126, 260):
        got = cache.decode(query)
        if n % 64 == 0 or 126 <= n < 131 or 254 <= n < 258:
            fresh = numflash.KVCache(1, KV_HEADS, D, 300)
            fresh.append(key[:, :, :n], value[:, :, :n])
            np.testing.assert_array_equal(got, fresh.decode(query))
            np.testing.assert_array_equal(cache.decode(query, scale=D**-0.5), got)
        cache.append(key[:, :, n : n + 1], value[:, :, n : n + 1])
    cache.truncate(100)
    fresh = numflash.KVCache(1, KV_HEADS, D, 300)
    fresh.append(key[:, :, :100], value[:, :, :100])
    np.testing.assert_array_equal(cache.decode(query), fresh.decode(query))
