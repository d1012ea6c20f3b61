"""The decode engine's state machine, and the demonstration that uses a cache in a real loop."""

import tracemalloc

import numpy as np
import pytest
from oracles import draw, naive

from numflash.cache.engine import DecodeEngine, State, StateError
from numflash.cache.settings import DTYPES
from numflash.commands import demo_decode
from numflash.errors import ArgumentError, ArgumentTypeError
from numflash.jit import threads

OPTIONS = {"batch": 2, "kv_heads": 2, "head_dim": 16, "max_length": 40}
METHODS = {
    "init": (),
    "load_qkv": (draw((2, 4, 1, 16)), draw((2, 2, 1, 16)), draw((2, 2, 1, 16))),
    "decode": (),
    "get_output": (),
    "reset": (),
    "cleanup": (),
}
PATHS = {
    State.UNINITIALISED: [],
    State.INITIALISED: ["init"],
    State.READY: ["init", "load_qkv", "decode"],
    State.OUTPUT_READY: ["init", "load_qkv", "decode", "get_output"],
}
LEADS_TO = {
    State.UNINITIALISED: {"init": State.INITIALISED, "cleanup": State.UNINITIALISED},
    State.INITIALISED: {
        "load_qkv": State.READY,
        "reset": State.INITIALISED,
        "cleanup": State.UNINITIALISED,
    },
    State.READY: {
        "load_qkv": State.READY,
        "decode": State.READY,
        "get_output": State.OUTPUT_READY,
        "reset": State.INITIALISED,
        "cleanup": State.UNINITIALISED,
    },
    State.OUTPUT_READY: {
        "load_qkv": State.READY,
        "get_output": State.OUTPUT_READY,
        "reset": State.INITIALISED,
        "cleanup": State.UNINITIALISED,
    },
}


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("method", METHODS)
def test_transitions(state, method):
    engine = DecodeEngine(**OPTIONS)
    for step in PATHS[state]:
        getattr(engine, step)(*METHODS[step])
    assert engine.state is state
    if method in LEADS_TO[state]:
        getattr(engine, method)(*METHODS[method])
        assert engine.state is LEADS_TO[state][method]
    else:
        with pytest.raises(StateError, match=method):
            getattr(engine, method)(*METHODS[method])
        assert engine.state is state


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"maxlength": 3},
            "maxlength: DecodeEngine does not take it; allowed: batch, .*max_length",
        ),
        ({"dtype": "x"}, "dtype: got 'x'"),
        ({"batch": -1}, "batch: got -1"),
    ],
)
def test_options_are_checked_before_they_are_needed(options, words):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=f"^{words}"):
        DecodeEngine(**OPTIONS | options)
    with pytest.raises(ArgumentTypeError, match="head_dim: got nothing"):
        DecodeEngine(batch=1, kv_heads=2)


def test_no_output_before_decode():
    engine = DecodeEngine(**OPTIONS)
    engine.init()
    engine.load_qkv(*METHODS["load_qkv"])
    with pytest.raises(StateError, match="nothing was decoded"):
        engine.get_output()


def test_step_initialises_by_itself_and_generates():
    engine = DecodeEngine(**OPTIONS, dtype="float32")
    key = draw((2, 2, 30, 16))
    value = draw((2, 2, 30, 16), 1)
    query = draw((2, 4, 30, 16), 2)
    for i in range(30):
        out = engine.step(query[:, :, i : i + 1], key[:, :, i : i + 1], value[:, :, i : i + 1])
        exact, _ = naive(query[:, :, i : i + 1], key[:, :, : i + 1], value[:, :, : i + 1])
        np.testing.assert_allclose(out, exact, atol=1e-5)
    engine.reset()
    first = engine.step(query[:, :, :1], key[:, :, :1], value[:, :, :1])
    np.testing.assert_allclose(first, np.repeat(value[:, :, :1], 2, 1), atol=1e-6)
    engine.cleanup()
    assert engine.cache is None


@pytest.mark.parametrize("dtype", ["int8", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_step_allocates_nothing(dtype, monkeypatch):
    """No array: what Python itself keeps for its views and tuples, 40 KB at most, is less than a
    query, a key or an output.
    """
    monkeypatch.setattr(threads, "least_work", lambda *_: 1)  # as with OpenMP
    engine = DecodeEngine(batch=64, kv_heads=8, head_dim=64, max_length=128, dtype=dtype)
    query = draw((64, 16, 1, 64))  # two rows a head: the kernels of the tests above
    key = draw((64, 8, 1, 64), 1)
    value = draw((64, 8, 1, 64), 2)
    first = engine.step(query, key, value)
    for _ in range(10):  # past the length from which two threads pay
        engine.step(query, key, value)
    tracemalloc.start()
    try:
        for _ in range(10):
            engine.step(query, key, value)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(90):
            out = engine.step(query, key, value)
        after, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert out is first and key.nbytes == 131072 and query.nbytes == out.nbytes == 2 * key.nbytes
    assert after - before < 65536 and peak - before < 65536
    np.testing.assert_allclose(out, np.repeat(value, 2, 1), atol=0.04)


def test_another_shape_of_query_gets_another_buffer():
    engine = DecodeEngine(**OPTIONS)
    one = engine.step(*METHODS["load_qkv"])
    copy = one.copy()
    two = engine.step(draw((2, 4, 4, 16)), draw((2, 2, 4, 16)), draw((2, 2, 4, 16)))
    assert two.shape == (2, 4, 4, 16) and (one == copy).all()
    assert (
        engine.step(draw((2, 4, 1, 16)).astype(np.float16), *METHODS["load_qkv"][1:]).dtype
        == np.float16
    )
    assert (two == engine._buffer).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int4", "bfloat16"])
def test_demo_of_every_storage(monkeypatch, dtype):
    monkeypatch.setattr(demo_decode, "LAYERS", 1)
    assert set(demo_decode.BUDGET) == set(DTYPES)
    assert 0 < demo_decode.run(1, dtype, 20, 2)["relative_l1_worst"] <= demo_decode.BUDGET[dtype]


def test_demo_agrees_with_recomputation(monkeypatch):
    monkeypatch.setattr(demo_decode, "LAYERS", 2)
    monkeypatch.setattr(demo_decode, "HEADS", 4)  # the kernel of the tests above
    monkeypatch.setattr(demo_decode, "HIDDEN", 4 * demo_decode.HEAD_DIM)
    found = demo_decode.run(1, "int8", 20, 3)
    assert 0 < found["relative_l1_worst"] <= 0.06 and found["cache_bytes"] == 2 * 2 * 128 * (
        2 * 64 + 8
    )
    monkeypatch.setitem(demo_decode.BUDGET, "int8", 1e-6)  # the check can fail
    with pytest.raises(ArithmeticError, match="full recomputation"):
        demo_decode.run(1, "int8", 20, 1)
