"""The component table of unfused INT8 attention (docs/sources.md, the A64FX status note), on one
thread.

`extra_info` holds the shares; the benchmark's own time is that of measuring them all. S and P take
8 * L**2 bytes.
"""

import pytest

from numflash.cpu.study import unfused_times

D = 128


@pytest.mark.parametrize("exp2", ["quadratic", "line177"])
@pytest.mark.parametrize("length", [1024, 4096, 8192])
def bench_unfused(benchmark, length, exp2):
    benchmark.group = f"unfused L={length} D={D}"
    times = benchmark.pedantic(unfused_times.measure, (length, D, exp2), rounds=1)
    benchmark.extra_info.update(
        {f"{c.pipeline}, {c.part}": c.seconds for c in times.components},
        softmax_share=times.softmax,
        gemm_share_of_peak=times.gemm / times.peak,
        gemm_in_l2_share_of_peak=times.gemm_in_l2 / times.peak,
        staged_share_of_peak=times.staged / times.peak,
        double_buffered_share_of_peak=times.double_buffered / times.peak,
        softmax_elements_per_second=times.elements,
    )


def bench_gqa(benchmark):
    benchmark.extra_info.update(benchmark.pedantic(unfused_times.measure_gqa, rounds=1))
