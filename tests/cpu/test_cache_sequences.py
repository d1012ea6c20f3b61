"""Whole sequences of a cache: room, length, order, copies, states.

And calls that are interrupted.
"""

import sys

import numpy as np
import pytest
from decode_cases import B, D, G, H, filled, tokens
from oracles import draw

from numflash.cache.kvcache import KVCache
from numflash.errors import ArgumentError, ArgumentTypeError, CacheFullError

DEVICES = ["cpu", "cuda-emulator"]
KINDS = [("int8", None), ("float16", 128)]
QUERY = draw((B, H, 1, D), 77)


def new(device="cpu", dtype="int8", page_size=None, length=300, **options):
    if device != "cpu":
        pytest.importorskip("numba_cuda")
    return KVCache(B, G, D, length, dtype, page_size, device, **options)


def holding(device, dtype, page_size, counts=(140, 70), **options):
    cache = new(device, dtype, page_size, **options)
    key, value = tokens(max(counts))
    cache.append(key, value, counts=list(counts))
    return cache, key, value


def assert_like(cache, rows, seeds=5):
    """Sequence i of the cache holds rows[i] = (key (Hkv, n, D), value), as appended to a fresh
    cache.
    """
    fresh = KVCache(len(rows), G, D, 700, cache.dtype)
    n = max(k.shape[1] for k, _ in rows)
    key, value = np.zeros((2, len(rows), G, n, D), np.float32)
    for b, (k, v) in enumerate(rows):
        key[b, :, : k.shape[1]], value[b, :, : k.shape[1]] = k, v
    fresh.append(key, value, counts=[k.shape[1] for k, _ in rows])
    assert cache.lengths.tolist() == fresh.lengths.tolist()
    for b in range(len(rows)):
        for x, y in zip(cache.read(b), fresh.read(b), strict=True):
            np.testing.assert_array_equal(x, y)
    if cache.device == "cpu" and len(rows):
        query = draw((len(rows), H, 1, D), seeds)
        np.testing.assert_array_equal(cache.decode(query, splits=1), fresh.decode(query, splits=1))


def part(key, value, b, n):
    return key[b, :, :n], value[b, :, :n]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "page_size"), KINDS)
def test_room_length_order_and_copies(device, dtype, page_size):
    cache, key, value = holding(device, dtype, page_size)
    cache.reserve(600)
    assert cache.max_length == 600
    rows = [part(key, value, 0, 140), part(key, value, 1, 70)]
    assert_like(cache, rows)
    twin = cache.copy()
    cache.reorder([1, 0])
    assert_like(cache, rows[::-1])
    cache.reorder([1, 1])
    assert_like(cache, [rows[0], rows[0]])
    cache.truncate([129, 128])  # with one token in its last page
    assert_like(cache, [part(key, value, 0, 129), part(key, value, 0, 128)])
    cache.reorder([0, 0])
    more = tokens(3, 9)
    cache.append(*more)  # a copy of its own: what one sequence appends is not the other's
    grown = [
        tuple(
            np.concatenate([x[0, :, :n], y[b]], 1) for x, y in zip((key, value), more, strict=True)
        )
        for b, n in enumerate((129, 129))
    ]
    assert_like(cache, grown)
    cache.repeat(2)
    assert cache.batch == 4
    assert_like(cache, [grown[0], grown[0], grown[1], grown[1]])
    cache.reorder([3])
    assert_like(cache, [grown[1]])
    assert_like(twin, rows)
    cache.truncate(0)
    assert cache.lengths.tolist() == [0]


def test_pages_move_tables_only():
    cache, key, value = holding("cpu", "int8", 128, (256, 128), pages=9)
    before = cache.free_pages
    data = cache._open().store.data
    cache.repeat(3)
    assert cache._open().store.data is data
    assert cache.free_pages == before == 6
    cache.append(*tokens(1, 5, b=6))
    assert cache.free_pages == 0
    cache.reset([0, 1])
    assert cache.free_pages == 2


def test_a_pool_of_the_caches_own_size_has_room_for_every_order():
    """Sequences that are dropped and those that take their place are stored at the same time."""
    cache, key, value = holding("cpu", "int8", 128, (130, 129), length=130)
    assert cache.free_pages == 0
    cache.reorder([1, 1])
    assert_like(cache, [part(key, value, 1, 129)] * 2)
    cache.reorder([0, 0])
    cache.truncate([100, 50])  # both of a page that they share
    assert_like(cache, [part(key, value, 1, 100), part(key, value, 1, 50)])
    cache.repeat(2)
    cache.reorder([3, 3, 3, 3, 3, 0])
    assert_like(cache, [part(key, value, 1, 50)] * 5 + [part(key, value, 1, 100)])


def test_a_pool_without_room_for_copies():
    cache, key, value = holding("cpu", "int8", 128, (100, 100), pages=2)
    with pytest.raises(CacheFullError, match="reorder: 1 more pages"):
        cache.reorder([0, 0])
    assert_like(cache, [part(key, value, 0, 100), part(key, value, 1, 100)])


def test_a_shared_page_is_copied_before_it_is_cut():
    cache, key, value = holding("cpu", "int8", 128, (256, 0), pages=4)
    cache.share(0, 1)
    cache.truncate([256, 200])
    cache.append(*tokens(5, 3), counts=[0, 5])
    assert_like_first = part(key, value, 0, 256)
    np.testing.assert_array_equal(
        cache.quantized(0)[0].data, filled(256, dtype="int8")[0].quantized(0)[0].data
    )
    assert assert_like_first[0].shape[1] == 256
    assert cache.free_pages == 1


@pytest.mark.parametrize("sinks", [0, 4])
def test_a_ring_is_cut_as_far_as_it_holds_its_window(sinks):
    cache = KVCache(1, G, D, 1, "float32", window=100, sinks=sinks)
    key, value = (x[:1] for x in tokens(400))
    cache.append(key, value)
    cache.truncate(340)
    cache.append(key[:, :, 340:350].copy(), value[:, :, 340:350].copy())
    whole = KVCache(1, G, D, 1, "float32", window=100, sinks=sinks)
    whole.append(key[:, :, :350].copy(), value[:, :, :350].copy())
    np.testing.assert_array_equal(cache.decode(QUERY[:1]), whole.decode(QUERY[:1]))
    with pytest.raises(ArgumentError, match=r"lengths: got 240.*ring holds tokens from"):
        cache.truncate(240)
    assert cache.lengths.tolist() == [350]
    cache.reserve(10**6)
    assert cache.nbytes == whole.nbytes


def damaged(state):
    """Changes of a state that no cache makes, and the words that name each."""
    found = [
        ({"version": np.array([1, 1])}, "one integer"),
        ({"version": np.array("x")}, "one integer"),
        ({"oldest": np.zeros(3, np.int64)}, "'oldest'"),
        ({"oldest": np.array([0.0, 0.0])}, "'oldest'"),
        ({"lengths": state["lengths"].astype("U3")}, "<U3 of shape .* for 'lengths'"),
        ({"lengths": np.array([None, 1])}, "object of shape .* for 'lengths'"),
        ({"lengths": state["lengths"].astype("M8[D]")}, "datetime64"),
        ({"lengths": state["lengths"] - 1}, "'key0'.* and the state's lengths, 139"),
        ({"oldest": state["lengths"] + 1}, "0 to the lengths"),
        ({"offset": np.full_like(state["offset"], np.nan)}, "not finite"),
        ({"offset": np.ones_like(state["offset"])}, "smooth"),
        ({"scale0": np.full_like(state["scale0"], -1)}, "'scale0'"),
        ({"scale1": np.full_like(state["scale1"], np.inf)}, "'scale1'"),
    ]
    if state["key0"].dtype != np.int8:
        infinite = np.full_like(state["key0"], 0x7F80 << 8 * (state["key0"].itemsize - 2))
        found += [({"key0": infinite}, "infinity in 'key0'")]
    return found


@pytest.mark.parametrize(
    "dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow), "float32"]
)
def test_state_and_back(dtype):
    cache, key, value = holding("cpu", dtype, None)
    state = cache.state()
    for page_size in (None, 128):
        other = new("cpu", dtype, page_size)
        other.load_state(state)
        assert_like(other, [part(key, value, 0, 140), part(key, value, 1, 70)])
        other.append(*tokens(1, 3))
    with pytest.raises(ArgumentError, match="holds tokens"):
        other.load_state(state)
    for change, words in (
        ({"version": np.array(9)}, "version 9"),
        (
            {"lengths": np.zeros(3, np.int64), "oldest": np.zeros(3, np.int64)},
            "a batch of 3; allowed: 2",
        ),
        ({"lengths": np.array([-1, 70])}, "got lengths"),
        ({"key0": state["key0"][:, :5]}, "'key0'"),
        ({"scale1": state["scale1"].astype(np.float64)}, "'scale1'"),
        *damaged(state),
    ):
        other = new("cpu", dtype)
        with pytest.raises(ArgumentError, match=words):
            other.load_state({**state, **change})
        assert other.lengths.tolist() == [0, 0]
    with pytest.raises(ArgumentTypeError, match="a mapping"):
        new("cpu", dtype).load_state([state])
    other = new("cpu", dtype)
    other.load_state({**state, "oldest": [0, 0]})  # a list, as JSON has it
    assert other.state()["oldest"].dtype == np.int64
    with pytest.raises(CacheFullError, match="state: got 140"):
        new("cpu", dtype, length=100).load_state(state)
    cache.reset(0)
    for page_size in (None, 128):  # with a sequence of no tokens
        other = new("cpu", dtype, page_size)
        other.load_state(cache.state())
        assert_like(other, [part(key, value, 0, 0), part(key, value, 1, 70)])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_state_of_a_cache_with_its_values_elsewhere(dtype):
    """Beside the keys, or the first channels of these."""
    kinds = (
        {},
        {"value_dim": 16},
        {"value_in_key": True},
        {"value_in_key": True, "value_dim": 16},
    )
    key = draw((1, 1, 40, 32))
    caches = [KVCache(1, 1, 32, 64, dtype, **kind) for kind in kinds]
    for cache, kind in zip(caches, kinds, strict=True):
        wide = kind.get("value_dim", 32)
        cache.append(key, *(() if "value_in_key" in kind else (key[..., :wide] + 1,)))
    for cache, kind in zip(caches, kinds, strict=True):
        state = cache.state()
        earlier = {name: x for name, x in state.items() if not name.startswith("value_")}
        for other in kinds:
            for given in (state, earlier):
                loaded = KVCache(1, 1, 32, 64, dtype, **other)
                if other == kind:
                    loaded.load_state(given)
                    for x, y in zip(loaded.read(0), cache.read(0), strict=True):
                        np.testing.assert_array_equal(x, y)
                elif given is state or "value_in_key" in (other.keys() ^ kind.keys()):
                    with pytest.raises(ArgumentError, match="state: got"):
                        loaded.load_state(given)


def test_state_crosses_devices():
    cache, key, value = holding("cpu", "int8", None)
    for page_size in (None, 16):
        other = new("cuda-emulator", "int8", page_size)
        other.load_state(cache.state())
        np.testing.assert_array_equal(other.decode(QUERY, splits=1), cache.decode(QUERY, splits=1))
        for name, x in other.state().items():
            np.testing.assert_array_equal(x, cache.state()[name])


def test_a_truncated_ring():
    cache = KVCache(1, G, D, 1, "float32", window=64)
    key, value = tokens(300, b=1)
    cache.append(key, value)
    cache.truncate(236)  # tokens 172 to 235, the last row's window, and none before
    query = draw((1, H, 4, D), 3)
    with pytest.raises(
        ArgumentError, match=r"query: got 4 tokens.*from 172 on; allowed: 1, or more"
    ):
        cache.decode(query)
    other = KVCache(1, G, D, 1, "float32", window=64)
    other.load_state(cache.state())
    with pytest.raises(ArgumentError, match="from 172 on"):
        other.decode(query)
    for sizes in ({"window": 60, "sinks": 4}, {"window": 63}, {}):  # as many slots, other tokens
        with pytest.raises(ArgumentError, match=r"state: got window=64; allowed: window="):
            KVCache(1, G, D, 128, "float32", **sizes).load_state(cache.state())
    with pytest.raises(ArgumentError, match=r"state: got sinks=0; allowed: sinks=4, as this"):
        KVCache(1, G, D, 1, "float32", window=64, sinks=4).load_state(cache.state())
    last = cache.decode(query[:, :, 3:])
    cache.append(key[:, :, 236:240].copy(), value[:, :, 236:240].copy())
    cache.decode(query)
    whole = KVCache(1, G, D, 1, "float32", window=64)
    whole.append(key[:, :, :236].copy(), value[:, :, :236].copy())
    np.testing.assert_allclose(last, whole.decode(query[:, :, 3:]), rtol=1e-5, atol=1e-6)
    twin = cache.copy()
    twin.reset()
    cache.truncate(0)
    for empty in (cache, twin):  # starts over: nothing that was dropped matters
        empty.append(key[:, :, :50].copy(), value[:, :, :50].copy())
        empty.truncate(40)
        assert empty.lengths.tolist() == [40]


def test_bad_arguments():
    cache, _, _ = filled(10)
    for call, error, words in (
        (lambda: cache.reserve(0), ArgumentError, "tokens"),
        (lambda: cache.reserve(1.5), ArgumentTypeError, "tokens"),
        (lambda: cache.truncate(11), ArgumentError, "lengths"),
        (lambda: cache.truncate([1, -1]), ArgumentError, "lengths"),
        (lambda: cache.truncate([1]), ArgumentError, "lengths"),
        (lambda: cache.truncate(0.5), ArgumentError, "lengths"),
        (lambda: cache.reorder([2]), ArgumentError, "index"),
        (lambda: cache.reorder(0), ArgumentError, "index"),
        (lambda: cache.repeat(0), ArgumentError, "n: got 0"),
    ):
        with pytest.raises(error, match=words):
            call()
    assert cache.lengths.tolist() == [10, 10]


CHANGES = {
    "append": lambda c: c.append(*tokens(5, 3)),
    "share": lambda c: c.share(0, 2, 130),
    "reorder": lambda c: c.reorder([1, 1, 0]),
    "repeat": lambda c: c.repeat(2),
    "truncate": lambda c: c.truncate([129, 20, 0]),
    "reserve": lambda c: c.reserve(500),
    "reset": lambda c: c.reset([0, 1]),
}


def snapshot(cache):
    return {**cache.state(), "free": cache.free_pages, "most": cache.max_length}


def same(a, b):
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("kind", ["one page", "pages", "ring"])
def test_an_interrupted_call_has_done_all_or_nothing(change, kind):
    """KeyboardInterrupt before every line of the package that the call runs."""
    if kind != "pages" and change == "share":
        pytest.skip("without pages nothing is shared")

    def fresh():
        if kind == "ring":  # the first sequence has dropped tokens
            cache = KVCache(3, G, D, 1, "int8", window=20, sinks=2)
            cache.append(*tokens(140, b=3), counts=[140, 70, 0])
            cache.truncate([132, 70, 0])
            return cache
        cache = KVCache(3, G, D, 300, "int8", 128 if kind == "pages" else None)
        key, value = tokens(140, b=3)
        cache.append(key, value, counts=[140, 70, 0])
        return cache

    whole = {"append": lambda c: c.append(*tokens(5, 3, b=3))}.get(change, CHANGES[change])
    before = snapshot(fresh())
    done = fresh()
    whole(done)
    after = snapshot(done)
    for line in range(10**6):
        cache = fresh()
        count = [0]

        def trace(frame, event, _, count=count, line=line):
            if "numflash/cache" not in frame.f_code.co_filename:
                return None
            if event == "line":
                count[0] += 1
                if count[0] > line:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys.settrace(trace)
        try:
            whole(cache)
            sys.settrace(None)
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        found = snapshot(cache)
        assert same(found, before) or same(found, after), (change, line)
    assert line > 3


@pytest.mark.parametrize("dtype", ["int8", "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("page_size", [None, 128])
def test_reading_is_the_inverse_of_storing(dtype, page_size):
    """The compiled reading against the arrays of `state`, also of heads that fill no panel and of
    tokens not finite.
    """
    cache = KVCache(2, G, 5, 300, dtype, page_size, value_dim=70, smooth=dtype == "int8")
    key = draw((2, G, 150, 5))
    value = draw((2, G, 150, 70), 1)
    value[0, 1, 7, 3] = np.nan
    cache.append(key, value, counts=[150, 20])
    for b, n in ((0, 150), (1, 20)):
        k, v = cache.read(b)
        assert k.shape == (G, n, 5) and v.shape == (G, n, 70)
        if dtype == "int8":
            wanted = [x.dequantize() for x in cache.quantized(b)]
        else:
            name = {"float32": np.float32, "float16": np.float16}.get(dtype)
            stored = [cache.state()[f"{x}{b}"] for x in ("key", "value")]
            wanted = [
                (x.astype(np.uint32) << 16).view(np.float32) if name is None else x.view(name)
                for x in stored
            ]
        for x, y, original in zip((k, v), wanted, (key[b, :, :n], value[b, :, :n]), strict=True):
            bad = np.isnan(x)
            assert bad.sum() == (x.shape[2] if b == 0 else 0)
            np.testing.assert_array_equal(x[~bad], y[~bad])
            np.testing.assert_allclose(x[~bad], original[~bad], atol=0.05)
