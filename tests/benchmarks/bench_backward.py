"""Forward and backward of float32 attention against PyTorch, one thread, checked against each other
before they are timed.

`make bench` runs it; PyTorch takes part where it is installed. Nothing here passes or fails by
time.
"""

import numpy as np
import pytest

from numflash import attention, attention_backward
from numflash.cpu.study import backward_plain
from numflash.measure.contenders import on_threads

CASES = {
    f"L={l} D={d} H={h}{' causal' if causal else ''}": (h, l, d, causal)
    for h, l, d in ((8, 2048, 64), (8, 2048, 128), (8, 512, 64))
    for causal in (False, True)
}


def tiled(do, q, k, v, causal):
    def call():
        out, lse = attention(q, k, v, is_causal=causal, return_lse=True)
        return attention_backward(do, q, k, v, out, lse, is_causal=causal)

    return call


def plain(do, q, k, v, causal):
    def call():
        out, lse = attention(q, k, v, is_causal=causal, return_lse=True)
        return backward_plain.backward(do, q, k, v, out, lse, causal)

    return call


def pytorch(do, q, k, v, causal):
    torch = pytest.importorskip("torch")
    leaves = [torch.from_numpy(x).requires_grad_(True) for x in (q, k, v)]

    def call():
        for x in leaves:
            x.grad = None
        torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=causal).backward(
            torch.from_numpy(do)
        )
        return tuple(x.grad.numpy() for x in leaves)

    return call


@pytest.mark.parametrize("prepare", [tiled, plain, pytorch], ids=lambda f: f.__name__)
@pytest.mark.parametrize("case", CASES)
def bench_forward_and_backward(benchmark, case, prepare):
    h, length, d, causal = CASES[case]
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((1, h, length, d), np.float32) for _ in range(4)]
    with on_threads(1):
        call = prepare(*arrays, causal)
        for found, wanted in zip(call(), plain(*arrays, causal)(), strict=True):
            assert np.abs(found - wanted).max() <= 1e-5 * np.abs(wanted).max()
        benchmark.group = case
        benchmark.pedantic(call, rounds=5, warmup_rounds=1)
    if benchmark.stats:
        benchmark.extra_info["gflops"] = (
            14e-9 * h * d * length**2 / (2 if causal else 1) / benchmark.stats.stats.median
        )
