"""The exp2 benchmark (docs/sources.md).

Every kernel, exp2 and broadcast at M = 4 and 16, Nc = 64 to 512, D = 64, on one thread.

`numflash.cpu.study.exp2_benchmark.measure` gives the same as a table. A kernel is checked against
float64 before it is timed; a round is many calls. `extra_info` holds seconds per call, and the
share of the FMA peak and the cycles per element of the same run.
"""

import functools

import numpy as np
import pytest

from numflash.cpu.study import exp2_benchmark as study
from numflash.measure import roofline


@functools.cache
def machine():
    return roofline.measure_compute(1)[1], study.measure_clock()


@pytest.mark.parametrize("nc", [64, 128, 256, 512])
@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize("combination", study.combinations(), ids=" ".join)
def bench_exp2_values(benchmark, combination, m, nc):
    name, exp2, broadcast = combination
    s, scale, top, v = study.draw(m, nc)
    p, o = study.compute(name, exp2, broadcast, s, scale, top, v)
    exact = np.exp2(s * np.float64(scale) - np.float64(top))
    assert np.abs(p / exact - 1).max() <= study.WORST[exp2]
    assert (
        name == "exp2"
        or np.abs(o - exact @ v).sum() <= 2 * study.WORST[exp2] * np.abs(exact @ v).sum()
    )
    call, times = study.prepare(name, exp2, broadcast, s, scale, top, v)
    benchmark.group = f"M={m} Nc={nc}"
    benchmark.pedantic(call, rounds=10, warmup_rounds=1)
    if benchmark.stats:
        peak, clock = machine()
        seconds = benchmark.stats.stats.median / times
        operations = 0 if name == "exp2" else 2 * m * nc * v.shape[1]
        benchmark.extra_info.update(
            seconds=seconds,
            share_of_fma_peak=operations / seconds / peak,
            cycles_per_element=seconds * clock / s.size,
            ranking_errors=study.ranking_errors(s, p),
        )
