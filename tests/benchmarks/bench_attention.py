"""The benchmark matrix, every contender on one thread: `make bench`.

Nothing here passes or fails by time.

A contender is checked against float64 before it is timed. `extra_info` holds GOP/s, the share of
the INT8 peak measured in the same run, effective bandwidth, the five error figures; of the fused
kernel also the time and efficiency of each part.
"""

import functools

import pytest

from numflash.cpu.isa.isas import VECTOR_ISAS
from numflash.errors import UnsupportedError
from numflash.jit import target
from numflash.measure import phases, roofline
from numflash.measure.contenders import Case, contenders, on_threads

LENGTHS = (64, 512, 1024, 2048, 4096, 8192)  # Fused FlashAttention V2, "Test matrix"
HEAD_DIMS = (128, 64)
CASES = [
    Case(length, d, causal) for d in HEAD_DIMS for length in LENGTHS for causal in (False, True)
]
CASES += [Case(512, 64, causal, heads=8) for causal in (False, True)]
ISA = target.available()[0]


@functools.cache
def roof():
    return roofline.measure(1)


@pytest.mark.parametrize("contender", contenders(everybody=True), ids=lambda c: c.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def bench_attention(benchmark, contender, case):
    peak = roof()
    with on_threads(1):
        try:
            call = contender.prepare(case)
            found = case.check(call())
        except UnsupportedError as error:
            pytest.skip(str(error))
        assert found.relative_l1 <= contender.budget
        benchmark.group = str(case)
        benchmark.pedantic(call, rounds=5 if case.length > 2048 else 15, warmup_rounds=1)
    if benchmark.stats:
        rate = case.operations / benchmark.stats.stats.median
        benchmark.extra_info.update(
            found.as_dict(),
            gops=rate / 1e9,
            int8_peak_gops=peak.int8 / 1e9,
            share_of_int8_peak=rate / peak.int8,
            effective_bandwidth=case.traffic / benchmark.stats.stats.median,
            read_bandwidth=peak.read,
        )


@pytest.mark.skipif(ISA not in VECTOR_ISAS, reason="the target has no register tiles")
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("length", LENGTHS[1:])
def bench_parts(benchmark, length, head_dim):
    """Where the time of the fused kernel goes.

    The benchmark's own time is that of measuring all parts.
    """
    peak = roof()
    parts = benchmark.pedantic(phases.measure, (ISA, length, head_dim, 5), rounds=1)
    product = 2.0 * length**2 * head_dim
    benchmark.group = f"parts L={length} D={head_dim}"
    for name, seconds in parts.items():
        benchmark.extra_info[name] = seconds
        if name in ("scores", "values"):
            benchmark.extra_info[f"{name}_efficiency"] = product / seconds / peak.int8
