"""The eight improvements of the A64FX summary (docs/sources.md), checked and then timed.

`make bench`.

`numflash bench --study improvements` prints the gains beside the predicted ones. Nothing here
passes or fails by time.
"""

import numpy as np
import pytest

from numflash.cpu.study.prepared import prepare
from numflash.jit.threads import most
from numflash.measure.contenders import on_threads

LENGTH = 2048
HEAD_DIM = 128
SWITCHES = {
    "the summary's": ("plain", "fp32", False),
    "vector exp2": ("vectors", "fp32", False),
    "prefetching": ("vectors", "fp32", True),
    "16-bit P.V": ("vectors", "bf16", False),
    "INT8 P.V": ("vectors", "int8", False),
}


@pytest.mark.parametrize("threads", sorted({1, most()}))
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("name", SWITCHES)
def bench_fused(benchmark, name, kv_heads, causal, threads):
    exp2, pv, ahead = SWITCHES[name]
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((1, h, LENGTH, HEAD_DIM), np.float32) for h in (4, kv_heads, kv_heads)
    )
    with on_threads(threads):
        prepared = prepare(q, k, v, causal)
        if pv not in prepared.values:
            pytest.skip(f"no {pv} on this target")
        wanted = prepared.run("plain", "fp32")
        assert np.abs(prepared.run(exp2, pv, ahead) - wanted).max() <= 0.05 * np.abs(wanted).max()
        benchmark.group = f"L={LENGTH} D={HEAD_DIM} H=4 Hkv={kv_heads} {'causal' if causal else 'full'} threads={threads}"
        benchmark.pedantic(lambda: prepared.run(exp2, pv, ahead), rounds=5, warmup_rounds=1)
