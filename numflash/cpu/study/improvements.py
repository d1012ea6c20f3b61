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
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numba import prange

from ...cache.kvcache import KVCache
from ...errors import UnsupportedError
from ...jit import target
from ...jit.compiler import kernel
from ...jit.threads import limit, most
from ...measure.timing import Timing, median_time
from ...measure.timing import timed as time_calls
from ...numerics.quantization import quantize_heads, quantize_problem
from ...numerics.quantize_kernels import MAGNITUDE, NO_SCALE, ROUND
from ...numerics.scores import combined_scale
from ...tiling import KEY_BLOCK, tiling
from ...validation import Problem, problem
from ...validation.options import Options
from ..floats.float_isas import FLOAT_ISAS
from ..floats.float_tiles import value_tile
from ..int8.packing import PackedKeys, bfloat16_pairs, float_rows, pack_keys, pack_values
from ..isa.isas import VECTOR_ISAS, padded, running_lanes
from .fused import HALF_WIDTH, make_fused

F, I = np.float32, np.int32
EPSILON = F(1e-5)
# register tiles of 6 rows: the summary's shape
ISAS = ("avx512_vnni", "avx_vnni", "avx2", "sve", "neon_dot")


@dataclass(frozen=True)
class Prepared:
    """One problem quantised and packed for every kind of P.V that this machine has."""

    forward: Problem
    isa: str
    q: np.ndarray
    cq: np.ndarray
    keys: PackedKeys
    values: dict[str, np.ndarray] = field(repr=False)
    columns: int
    v_scale: np.ndarray

    def run(self, exp2: str = "vectors", pv: str = "int8", ahead: bool = False) -> np.ndarray:
        """Attention by the kernel with these switches, on as many threads as are allowed now."""
        nb, nh, nkv, length, s, _, dv = self.forward.shape
        out = np.empty((nb * nh, length, dv), F)
        m = np.empty((nb * nh, length), I)
        l = np.empty((nb * nh, length), F)
        make_fused(self.isa, exp2, pv)(
            self.q,
            self.cq,
            self.keys,
            self.values[pv],
            self.columns,
            nh // nkv,
            self.forward.right is not None,
            ahead,
            s,
            numba.get_num_threads(),
            np.zeros(1, np.int64),
            out,
            m,
            l,
        )
        if pv == "int8":
            out *= np.repeat(self.v_scale, nh // nkv, 0)[:, None]
        return out.reshape(nb, nh, length, dv)


def prepare(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, is_causal: bool = False
) -> Prepared:
    """Quantise and pack float32 arrays (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv), as
    `precision="int8"` does.

    Raises
    ------
    UnsupportedError
        On a target without integer register tiles.
    """
    isa = next((name for name in target.available() if name in ISAS), None)
    if isa is None:
        raise UnsupportedError(
            f"isa: the target {target.cpu_name()!r} has no such tiles; allowed: {', '.join(map(repr, ISAS))}"
        )
    forward = problem(
        query, key, value, Options(is_causal=is_causal, enable_gqa=True, precision="float32")
    )
    quantised = quantize_problem(
        problem(query, key, value, Options(is_causal=is_causal, enable_gqa=True, precision="int8"))
    )
    nb, nh, nkv, length, s, d, dv = forward.shape
    instructions, rows = VECTOR_ISAS[isa], tiling(isa).block_q
    q = np.zeros(
        (nb * nh, padded(length, rows), padded(d, instructions.group)),
        np.uint8 if instructions.group == 4 else np.int16,
    )
    q[:, :length, :d] = (
        quantised.query.data.reshape(nb * nh, length, d).astype(np.int16) + instructions.q_offset
    )
    cq, ck = combined_scale(quantised.query, quantised.key, forward.scale)
    factors = np.zeros(q.shape[:2], F)
    factors[:, :length] = cq.reshape(nb * nh, length)
    floats = np.ascontiguousarray(forward.value, F).reshape(nb * nkv, s, dv)
    integers = quantised.value.data.reshape(nb * nkv, s, dv)
    columns = padded(dv, running_lanes(isa))
    values = {
        "fp32": float_rows(isa, floats, np.zeros((nb * nkv, s), bool)),
        "int8": pack_values(isa, integers),
    }
    if not target.missing(HALF_WIDTH, target.BFLOAT16_ISAS) and columns == padded(dv, 16):
        bits = floats.view(np.uint32)
        high = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16  # ties to even
        values["bf16"] = bfloat16_pairs(isa, high.astype(np.uint16))
    keys = pack_keys(
        isa,
        quantised.key.data.reshape(nb * nkv, s, d),
        np.ascontiguousarray(ck.reshape(nb * nkv, s)),
    )
    return Prepared(
        forward, isa, q, factors, keys, values, columns, quantised.value.scale.reshape(nb * nkv, dv)
    )


# ---- LayerNorm and the quantiser that feeds Q, K and V


@kernel(float_math=True)
def normalise(x, gamma, beta, y):
    """y = (x - mean) / sqrt(variance + epsilon) * gamma + beta, one row.

    A kernel of its own, so that both callers get its bits.
    """
    mean, square = F(0), F(0)
    for e in range(x.size):
        mean += x[e]
    mean = F(mean / F(x.size))
    for e in range(x.size):
        away = F(x[e] - mean)
        square += F(away * away)
    r = F(F(1) / np.sqrt(F(F(square / F(x.size)) + EPSILON)))
    for e in range(x.size):
        y[e] = F(F(F(F(x[e] - mean) * r) * gamma[e]) + beta[e])


@kernel(parallel=True)
def layer_norm(x, gamma, beta, y):
    """The separate pass.

    x (L, D) float32 -> y (L, D) float32, which the quantiser then reads again.
    """
    for i in prange(x.shape[0]):
        normalise(x[i], gamma, beta, y[i])


@kernel(parallel=True)
def layer_norm_quantize(x, gamma, beta, data, scale):
    """Both at once: x (L, D) float32 -> data (L, D) int8, scale (L,) float32, with the bits of
    `quantize(layer_norm(x), "row")`.

    Inputs are finite; the package's quantiser also marks rows that are not.
    """
    rows = 64
    for task in prange((x.shape[0] + rows - 1) // rows):
        y, largest = np.empty(x.shape[1], F), np.empty(1, np.int32)  # stay in L1
        for i in range(np.intp(task) * rows, min((np.intp(task) + 1) * rows, x.shape[0])):
            normalise(x[i], gamma, beta, y)
            bits, top, out = y.view(np.int32), I(0), data[i]
            for e in range(y.size):
                # ordered like the floats, and a maximum that vectorises
                top = max(top, I(bits[e] & MAGNITUDE))
            largest[0] = top
            peak = largest.view(np.float32)[0]
            usable = peak > NO_SCALE
            scale[i] = F(peak / F(127)) if usable else F(1)
            factor = F(F(127) / peak) if usable else F(0)
            for e in range(y.size):
                out[e] = np.int8(I(F(F(F(y[e] * factor) + ROUND) - ROUND)))


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
    shared_causal = prepare(q, k[:, :1], v[:, :1], is_causal=True)
    exact = full.run("plain", "fp32")
    for pv in full.values:
        if not np.abs(full.run("vectors", pv, True) - exact).max() <= 0.05 * np.abs(exact).max():
            raise ArithmeticError(f"improvements: pv {pv!r} is off by more than 5 %")
    threads, width = most(), heads * head_dim
    x = rng.standard_normal((length, width), F)
    gamma = rng.random(width, F)
    beta = rng.random(width, F)
    y, data, scale = np.empty_like(x), np.empty(x.shape, np.int8), np.empty(length, F)

    def apart() -> None:
        layer_norm(x, gamma, beta, y)
        quantize_heads(y[None], "row", False)

    def at_once() -> None:
        layer_norm_quantize(x, gamma, beta, data, scale)

    def timed(call: Callable[..., Any], *arguments: Any, on: int = 1) -> Timing:
        with limit(on):
            return time_calls(functools.partial(call, *arguments), repeats)

    base = timed(full.run, "plain", "fp32")
    wide = timed(full.run, "vectors", "fp32")
    whole = timed(full.run)
    norm, fused_norm = timed(apart), timed(at_once)
    tokens = 8 * length
    with limit(1):
        apart_heads, one_head = (_decode_time(n, 8, tokens, head_dim, repeats) for n in (8, 1))
    halves = timed(full.run, "vectors", "bf16") if "bf16" in full.values else None
    alone = "fp32 P.V, vector exp2"
    return [
        _gain(
            "vector code for exp2",
            base,
            wide,
            "fp32 P.V: the compiler's loop, vectors written out",
        ),
        _gain(
            "prefetching",
            wide,
            timed(full.run, "vectors", "fp32", True),
            f"{alone}: without, with",
        ),
        _gain(
            "threads",
            wide,
            timed(full.run, "vectors", "fp32", on=threads),
            f"{alone}: 1, {threads} threads",
        ),
        _gain(
            "GQA, prefill",
            wide,
            timed(shared.run, "vectors", "fp32"),
            f"{alone}: {heads}, 1 KV heads",
        ),
        _gain(
            "GQA, decode",
            apart_heads,
            one_head,
            f"KVCache of {tokens} tokens, 8 query heads: 8, 1 KV heads",
        ),
        *(
            []
            if halves is None
            else [_gain("16-bit P.V", wide, halves, f"{alone}: float32, bfloat16")]
        ),
        _gain(
            "fused LayerNorm",
            whole + norm,
            whole + fused_norm,
            "LayerNorm, quantiser and INT8 attention",
        ),
        _gain(
            "fused LayerNorm, its part",
            norm,
            fused_norm,
            f"LayerNorm and quantiser of {length} x {width}",
        ),
        _gain(
            "causal skipping",
            wide,
            timed(causal.run, "vectors", "fp32"),
            f"{alone}: full, causal",
        ),
        _gain("INT8 P.V", wide, whole, f"{alone}: float32, INT8"),
        _gain(
            "all together",
            base + norm,
            timed(shared_causal.run, "vectors", "int8", True, on=threads)
            + timed(at_once, on=threads),
            f"INT8 P.V, causal, 1 KV head, {threads} threads, prefetch, LayerNorm fused",
        ),
    ]
