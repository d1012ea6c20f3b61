"""The eight improvements that the A64FX summary (docs/sources.md) proposes, measured singly and
together.

Its section is "Further Improvement Possibilities (8 Strategies)". The starting point is its kernel
in this package's terms: INT8 Q.K^T, fixed-point softmax left to the compiler, float32 P.V, one
thread, every head with its own K and V. `measure()` returns the table as data; `numflash
bench --study improvements` prints it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...cache.kvcache import KVCache
from ...jit import target
from ...jit.compiler import kernel
from ...jit.threads import limit, most
from ...measure.timing import Timing, median_time
from ...measure.timing import timed as time_calls
from ...numerics.quantization import quantize_heads
from ...tiling import KEY_BLOCK
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_tiles import value_tile
from .fused import HALF_WIDTH
from .layer_norm import layer_norm, layer_norm_quantize
from .prepared import Prepared, prepare

F = np.float32


# ---- why 16 bits may not pay


def tile_rates(repeats: int = 5) -> dict[str, float]:
    """Multiplications and additions per second of the P.V register tile alone, in L1.

    In float32, and in bfloat16 where there are such tiles.
    """
    names = {"float32": next(n for n in target.available(target.FLOAT_ISAS))}
    if not target.missing(HALF_WIDTH, target.BFLOAT16_ISAS):
        names["bfloat16"] = HALF_WIDTH
    found = {}
    for label, name in names.items():
        if name in FLOAT_ISAS:
            isa, turns, keys = FLOAT_ISAS[name], 1000, KEY_BLOCK // 2
            p, v = (
                np.zeros((rows, n), F if isa.group == 1 else np.uint16)
                for rows, n in ((48, keys), (keys, isa.panel))
            )
            o = np.zeros((48, isa.panel), F)
            run = _tile_loop(name)
            with limit(1):
                found[label] = (
                    2
                    * 48
                    * keys
                    * isa.panel
                    * turns
                    / median_time(functools.partial(run, p, v, o, turns), repeats)
                )
    return found


@functools.cache
def _tile_loop(name: str) -> Callable[..., None]:
    tile, group = value_tile(name, FLOAT_ISAS[name].nv), FLOAT_ISAS[name].group

    @kernel
    def run(p, v, o, turns):
        for _ in range(turns):
            for i in range(0, p.shape[0], 6):
                tile(
                    p,
                    i * p.shape[1],
                    p.shape[1],
                    v,
                    0,
                    v.shape[1] * group,
                    v.shape[0] // group,
                    o,
                    i * o.shape[1],
                    o.shape[1],
                )

    return run


# ---- the table

# the summary's own figures: how many times as fast, at least and at most
PREDICTED = {
    "vector code for exp2": (1.2, 1.3),
    "prefetching": (1.05, 1.1),
    "threads": (10, 11),
    "GQA": (1.5, 1.8),
    "16-bit P.V": (1.5, 1.8),
    "fused LayerNorm": (1.05, 1.1),
    "causal skipping": (2, 2),
    "INT8 P.V": (3, 4),
    "all together": (15, 20),
}


@dataclass(frozen=True)
class Gain:
    """One improvement.

    Seconds before and after, the predicted gain (low, high), what was compared, and by how much the
    median of the less even of the two times is above its fastest, as a share.
    """

    name: str
    predicted: tuple[float, float]
    before: float
    after: float
    compared: str
    spread: float = 0.0

    @property
    def measured(self) -> float:
        return self.before / self.after

    def as_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "predicted": self.predicted,
            "before_s": self.before,
            "after_s": self.after,
            "measured": self.measured,
            "compared": self.compared,
            "spread": self.spread,
        }


def _gain(name: str, before: Timing, after: Timing, compared: str) -> Gain:
    """A line of the table; "GQA, decode" is a part of the prediction "GQA"."""
    predicted = PREDICTED[name.partition(",")[0]]
    spread = max(before.spread, after.spread)
    return Gain(name, predicted, before.seconds, after.seconds, compared, spread)


def _decode_time(kv_heads: int, heads: int, s: int, d: int, repeats: int) -> Timing:
    rng = np.random.default_rng(1)
    cache = KVCache(1, kv_heads, d, s)
    cache.append(*(rng.standard_normal((1, kv_heads, s, d), F) for _ in range(2)))
    query = rng.standard_normal((1, heads, 1, d), F)
    return time_calls(lambda: cache.decode(query), 5 * repeats)


def measure(
    length: int = 2048, head_dim: int = 128, heads: int = 4, repeats: int = 5
) -> list[Gain]:
    """The table: every improvement on its own, then all together.

    Checked against each other before anything is timed.

    Raises
    ------
    UnsupportedError
    ArithmeticError
        The kernels disagree: a wrong answer is not timed.
    """
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, heads, length, head_dim), F) for _ in range(3))
    full, causal = prepare(q, k, v), prepare(q, k, v, is_causal=True)
    shared = prepare(q, k[:, :1], v[:, :1])
    all_shared = prepare(q, k[:, :1], v[:, :1], is_causal=True)
    _check(full)
    norm, fused_norm = _layer_norms(rng.standard_normal((length, heads * head_dim), F), rng)

    def timed(call: Callable[..., Any], *arguments: Any, threads: int = 1) -> Timing:
        with limit(threads):
            return time_calls(functools.partial(call, *arguments), repeats)

    of_kernel = _kernel_gains(timed, full, causal, shared, heads)
    of_decode = _decode_gain(8 * length, head_dim, repeats)
    apart, at_once, whole = timed(norm), timed(fused_norm), timed(full.run)
    of_norm = [
        _gain(
            "fused LayerNorm",
            whole + apart,
            whole + at_once,
            "LayerNorm, quantiser, INT8 attention",
        ),
        _gain("fused LayerNorm, its part", apart, at_once, "LayerNorm and quantiser"),
    ]
    threads = most()
    together = timed(all_shared.run, "vectors", "int8", True, threads=threads)
    last = _gain(
        "all together",
        timed(full.run, "plain", "fp32") + apart,
        together + timed(fused_norm, threads=threads),
        f"INT8 P.V, causal, 1 KV head, {threads} threads, prefetch, LayerNorm fused",
    )
    return [*of_kernel, of_decode, *of_norm, last]


def _check(full: Prepared) -> None:
    exact = full.run("plain", "fp32")
    for pv in full.values:
        if not np.abs(full.run("vectors", pv, True) - exact).max() <= 0.05 * np.abs(exact).max():
            raise ArithmeticError(f"improvements: pv {pv!r} is off by more than 5 %")


def _layer_norms(
    x: np.ndarray, rng: np.random.Generator
) -> tuple[Callable[[], None], Callable[[], None]]:
    """LayerNorm of x (L, D) and the quantiser apart, and both at once."""
    gamma, beta = rng.random(x.shape[1], F), rng.random(x.shape[1], F)
    y, data, scale = np.empty_like(x), np.empty(x.shape, np.int8), np.empty(len(x), F)

    def apart() -> None:
        layer_norm(x, gamma, beta, y)
        quantize_heads(y[None], "row", False)

    def at_once() -> None:
        layer_norm_quantize(x, gamma, beta, data, scale)

    return apart, at_once


def _kernel_gains(
    timed: Callable[..., Timing], full: Prepared, causal: Prepared, shared: Prepared, heads: int
) -> list[Gain]:
    """What one switch of the fused kernel brings, or another problem."""
    threads = most()
    plain, wide = timed(full.run, "plain", "fp32"), timed(full.run, "vectors", "fp32")
    ahead = timed(full.run, "vectors", "fp32", True)
    together = timed(full.run, "vectors", "fp32", threads=threads)
    one_head, half = (timed(x.run, "vectors", "fp32") for x in (shared, causal))
    on = "fp32 P.V, vector exp2:"
    found = [
        ("vector code for exp2", plain, wide, "fp32 P.V: the compiler's loop, vectors written out"),
        ("prefetching", wide, ahead, f"{on} without, with"),
        ("threads", wide, together, f"{on} 1, {threads} threads"),
        ("GQA, prefill", wide, one_head, f"{on} {heads}, 1 KV heads"),
        ("causal skipping", wide, half, f"{on} full, causal"),
        ("INT8 P.V", wide, timed(full.run), f"{on} float32, INT8"),
    ]
    if "bf16" in full.values:
        bf16 = timed(full.run, "vectors", "bf16")
        found.append(("16-bit P.V", wide, bf16, f"{on} float32, bfloat16"))
    return [_gain(*case) for case in found]


def _decode_gain(tokens: int, head_dim: int, repeats: int) -> Gain:
    """Grouped heads in decoding."""
    with limit(1):
        apart, one_head = (_decode_time(n, 8, tokens, head_dim, repeats) for n in (8, 1))
    compared = f"KVCache of {tokens} tokens, 8 query heads: 8, 1 KV heads"
    return _gain("GQA, decode", apart, one_head, compared)
