"""Generation with a KV cache.

24 attention layers of Qwen 0.5B's shape, a prefill and then token after token, each step checked.

The layers are real ones (RMS norm, Q, K, V and output projections with random weights, rotary
positions, residual), without the multi-layer perceptrons; each token's hidden state feeds the next
step. At every step and layer the decoded output is held against full attention recomputed in
float32 from all keys and values seen so far.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from ..api import attention
from ..cache.kvcache import KVCache
from ..cache.settings import DTYPES
from ..interop.arguments import choice
from ..jit.threads import limit
from ..measure.console import Progress, Table
from ..measure.metrics import errors

LAYERS = 24
HEADS = 14
KV_HEADS = 2
HEAD_DIM = 64
HIDDEN = HEADS * HEAD_DIM
BUDGET = {"float32": 1e-4, "bfloat16": 0.03, "float16": 5e-3, "int8": 0.06, "int4": 0.4}
F = np.float32


class Layer:
    """One attention layer with random weights, its cache, and every key and value it has seen."""

    def __init__(self, rng: np.random.Generator, capacity: int, dtype: str) -> None:
        def weights(columns: int) -> np.ndarray:
            return rng.standard_normal((HIDDEN, columns), F) * F(HIDDEN**-0.5)

        self.q, self.k, self.v, self.o = (
            weights(n * HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
        )
        self.cache = KVCache(1, KV_HEADS, HEAD_DIM, capacity, dtype)
        self.keys, self.values = (np.zeros((1, KV_HEADS, capacity, HEAD_DIM), F) for _ in range(2))

    def project(self, x: np.ndarray, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """query, key, value (1, heads, n, D) of the hidden states (n, HIDDEN) at positions from
        `first` on.
        """
        x = x * F(1) / np.sqrt((x * x).mean(-1, keepdims=True) + F(1e-6))
        q, k, v = (
            np.ascontiguousarray((x @ w).reshape(len(x), -1, HEAD_DIM).swapaxes(0, 1))[None]
            for w in (self.q, self.k, self.v)
        )
        return rotate(q, first), rotate(k, first), v

    def remember(self, key: np.ndarray, value: np.ndarray, first: int) -> None:
        """Keep tokens `first` onwards for `recompute`."""
        stop = first + key.shape[2]
        self.keys[:, :, first:stop], self.values[:, :, first:stop] = key, value

    def recompute(self, query: np.ndarray, stop: int) -> np.ndarray:
        """Full attention of the last token in plain float32."""
        q = query.reshape(KV_HEADS, -1, HEAD_DIM) * F(HEAD_DIM**-0.5)
        s = q @ self.keys[0, :, :stop].swapaxes(1, 2)
        p = np.exp(s - s.max(-1, keepdims=True))
        return (p @ self.values[0, :, :stop] / p.sum(-1, keepdims=True)).reshape(query.shape)


def rotate(x: np.ndarray, first: int) -> np.ndarray:
    """Rotary positions on (1, heads, n, D), float32."""
    half = x.shape[3] // 2
    angle = np.arange(first, first + x.shape[2])[:, None] * 1e6 ** (-np.arange(half) / half)
    cos = np.cos(angle).astype(F)
    sin = np.sin(angle).astype(F)
    a = x[..., :half]
    b = x[..., half:]
    return np.ascontiguousarray(np.concatenate([a * cos - b * sin, b * cos + a * sin], -1))


def run(
    threads: int = 1, dtype: str = "int8", prefill: int = 1024, steps: int = 256
) -> dict[str, Any]:
    """Generate `steps` tokens after `prefill`, print and return the figures.

    Raises
    ------
    ArgumentError
    ArithmeticError
        A decoded output disagrees with full recomputation.
    """
    choice("dtype", dtype, DTYPES)
    rng = np.random.default_rng(0)
    seconds = 0.0
    worst = 0.0
    total = 0.0
    with limit(threads), Progress("decode", steps + 1) as progress:
        progress.step(f"prefill of {prefill} tokens")
        layers = [Layer(rng, prefill + steps, dtype) for _ in range(LAYERS)]
        x = rng.standard_normal((prefill, HIDDEN), F)
        for layer in layers:
            q, k, v = layer.project(x, 0)
            layer.cache.append(k, v)
            layer.remember(k, v, 0)
            out = attention(q, k, v, is_causal=True, enable_gqa=True)
            x = x + out[0].swapaxes(0, 1).reshape(prefill, HIDDEN) @ layer.o
        x = x[-1:]
        layers[0].cache.decode(np.zeros((1, HEADS, 1, HEAD_DIM), F))  # compiles outside the timing
        begin = time.perf_counter()
        checking = 0.0
        for step in range(steps):
            progress.step(f"token {step + 1} of {steps}")
            position = prefill + step
            for layer in layers:
                q, k, v = layer.project(x, position)
                start = time.perf_counter()
                layer.cache.append(k, v)
                out = layer.cache.decode(q)
                stop = time.perf_counter()
                seconds += stop - start
                layer.remember(k, v, position)
                found = errors(out, layer.recompute(q, position + 1)).relative_l1
                if not found <= BUDGET[dtype]:
                    raise ArithmeticError(
                        f"token {step}: relative L1 {found:.3g} against full recomputation, "
                        f"budget {BUDGET[dtype]}"
                    )
                worst = max(worst, found)
                total = total + found
                checking += time.perf_counter() - stop
                x = x + out.reshape(1, HIDDEN) @ layer.o
            x = x / np.sqrt((x * x).mean() + F(1e-6))
        elapsed = time.perf_counter() - begin - checking
    result = {
        "dtype": dtype,
        "threads": threads,
        "layers": LAYERS,
        "prefill": prefill,
        "steps": steps,
        "attention_seconds_per_token": seconds / max(1, steps),
        "tokens_per_second": steps / elapsed if steps else 0.0,
        "cache_bytes": sum(layer.cache.nbytes for layer in layers),
        "relative_l1_worst": worst,
        "relative_l1_mean": total / max(1, steps * LAYERS),
    }
    table_of(result).show()
    return result


def table_of(found: dict[str, Any]) -> Table:
    """The figures of `run`, to be printed."""
    table = Table(
        f"Decode: {LAYERS} layers, {HEADS} query and {KV_HEADS} KV heads, D={HEAD_DIM}, {found['dtype']} cache, "
        f"prefill {found['prefill']}, {found['steps']} steps",
        ("figure", "value"),
    )
    for name, value in (
        (
            "attention and append, per token",
            f"{1e6 * found['attention_seconds_per_token']:.0f} us",
        ),
        (
            "tokens per second (projections included, checks not)",
            f"{found['tokens_per_second']:.1f}",
        ),
        ("cache", f"{found['cache_bytes'] / 2**20:.1f} MiB"),
        (
            "relative L1 against full recomputation, worst of all steps and layers",
            f"{found['relative_l1_worst']:.2e}",
        ),
        ("the same, mean", f"{found['relative_l1_mean']:.2e}"),
    ):
        table.add(name, value)
    return table
