"""Short calls by each way into numflash, one thread: `make bench`.

Nothing passes or fails by time.
"""

import functools

import numpy as np
import pytest
from oracles import naive

from numflash.measure import short_calls
from numflash.measure.contenders import on_threads

calls = functools.cache(short_calls.calls)


@pytest.mark.parametrize("shape", short_calls.SHAPES, ids=str)
@pytest.mark.parametrize("name", short_calls.NAMES)
def bench_short(benchmark, shape, name):
    call = calls(shape).get(name)
    if call is None:
        pytest.skip("no such way for this shape, or without PyTorch")
    benchmark.group = f"short {shape}"
    with on_threads(1):
        out = call()
        if not isinstance(out, tuple):  # the compiled function's result is checked with the call's
            rng = np.random.default_rng(0)
            want = naive(*(rng.standard_normal(shape, np.float32) for _ in range(3)))[0]
            out = np.asarray(out.float() if hasattr(out, "float") else out)
            assert abs(out - want).sum() < 0.03 * abs(want).sum()
        benchmark(call)
