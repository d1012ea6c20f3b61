"""The component table of unfused INT8 attention in the A64FX status note (docs/sources.md), and
what each of its proposals changes.

Its sections are "Benchmark Results" and "Potential Next Steps". The note stops at softmax: P.V is
not part of their total, nor of this one. Everything runs on one thread, on random int8 operands
with the scores of N(0, 1) data.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...jit.threads import limit
from ...measure import roofline
from ...measure.timing import median_time
from ..int8.packing import pack_keys
from . import unfused
from .registers import aligned
from .unfused import BLOCK_Q, UNSEEN

F = np.float32
# the note's table, L -> (product, % of the INT8 peak; softmax, % of the time)
NOTE = {1024: (70.8, 63), 4096: (70.8, 64), 8192: (70.9, 63)}


@dataclass(frozen=True)
class Component:
    """One line: a part of a pipeline, its seconds, and its share of the pipeline's total."""

    pipeline: str
    part: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Times:
    """The table for one length.

    Attributes
    ----------
    components : lines of three pipelines: "three-pass" (the note's), "two-pass" (maxima from the
        product, no normalisation:
        P.V would divide by l at the end) and "strip" (all three passes on 48 rows at a time)
    softmax : share of everything but the product in "three-pass"; the note found 63.6 %
    gemm, gemm_in_l2 : operations per second of the product, S written to memory and S staying in
        the second-level cache
    staged, double_buffered : the same by one buffer and by two
    peak : measured INT8 operations per second of the dot instruction that the product uses
    elements : softmax of "three-pass", scores per second
    """

    length: int
    head_dim: int
    components: tuple[Component, ...]
    softmax: float
    gemm: float
    gemm_in_l2: float
    staged: float
    double_buffered: float
    peak: float
    elements: float

    def total(self, pipeline: str) -> float:
        """Seconds of one pipeline."""
        return sum(c.seconds for c in self.components if c.pipeline == pipeline)


def measure(
    length: int = 4096, head_dim: int = 128, exp2: str = "quadratic", repeats: int = 5
) -> Times:
    """Median times of every part for one head; S and P together take 8 * length**2 bytes.

    Raises
    ------
    UnsupportedError
        The machine has no register tiles.
    """
    isa = unfused.best_isa()
    rng = np.random.default_rng(0)
    q, k = (
        np.clip(np.rint(rng.normal(0, 32, (1, length, head_dim))), -127, 127).astype(np.int8)
        for _ in range(2)
    )
    scale = F(256 * np.log2(np.e) / (32 * 32 * head_dim**0.5))
    with limit(1):
        ops = unfused.operands(isa, q, k)
        head, keys, start = ops.q[0], ops.keys.data[0], ops.keys.start[0]
        s, p = (aligned(np.zeros((head.shape[0], start.size), kind)) for kind in (np.int32, F))
        e = p.view(np.int32)
        l = np.zeros(head.shape[0], np.int64)
        top = np.full(head.shape[0], UNSEEN, np.int32)
        strip = aligned(np.zeros((BLOCK_Q, start.size), np.int32))
        gemm = unfused.make_gemm(isa)

        def seconds(run: Callable, *args: Any) -> float:
            return median_time(lambda: run(*args), repeats)

        def gemm_in_l2() -> None:
            for row in range(0, head.shape[0], BLOCK_Q):
                part = head[row : row + BLOCK_Q]
                gemm(part, keys, start, strip[: len(part)], top)

        product, staged, double = (
            seconds(unfused.make_gemm(isa, n), head, keys, start, s, top) for n in (0, 1, 2)
        )
        l2 = seconds(gemm_in_l2)
        parts = {
            ("three-pass", "product"): product,
            ("three-pass", "maximum"): seconds(unfused.maxima, s, length, top),
            ("three-pass", "exponential and sum"): seconds(
                unfused.make_exponentials(exp2), s, length, scale, top, e, l
            ),
        }
        s[:] = e
        parts |= {
            ("three-pass", "normalise"): seconds(unfused.normalise, s, length, l, p),
            ("two-pass", "product and maximum"): seconds(
                unfused.make_gemm(isa, 0, True), head, keys, start, s, top
            ),
            ("two-pass", "exponential and sum"): parts["three-pass", "exponential and sum"],
            ("strip", "all"): seconds(
                unfused.make_strip(isa, exp2), head, keys, start, length, scale, p
            ),
        }
        peak = roofline.measure_compute(1, isa)[0]
    totals: dict[str, float] = {}
    for (pipeline, _), t in parts.items():
        totals[pipeline] = totals.get(pipeline, 0.0) + t
    softmax, operations = totals["three-pass"] - product, 2.0 * length**2 * head_dim
    components = tuple(
        Component(pipeline, part, t, t / totals[pipeline]) for (pipeline, part), t in parts.items()
    )
    return Times(
        length,
        head_dim,
        components,
        softmax / totals["three-pass"],
        operations / product,
        operations / l2,
        operations / staged,
        operations / double,
        peak,
        length**2 / softmax,
    )


def measure_gqa(
    heads: int = 8, kv_heads: int = 2, length: int = 1024, head_dim: int = 128, repeats: int = 5
) -> dict[str, float]:
    """Seconds of the scores of all query heads, with K of each KV head packed once and reused, and
    packed for every query head.

    Returns
    -------
    dict
        "packing shared", "product shared", "packing repeated", "product repeated"
    """
    isa = unfused.best_isa()
    rng = np.random.default_rng(0)
    q, k = (
        rng.integers(-127, 128, (h, length, head_dim)).astype(np.int8) for h in (heads, kv_heads)
    )
    found = {}
    with limit(1):
        gqa = unfused.make_gqa(isa)
        for name, key in (("shared", k), ("repeated", np.repeat(k, heads // kv_heads, 0))):
            ops, ones = unfused.operands(isa, q, key), np.ones(key.shape[:2], F)
            s = np.zeros((heads, ops.q.shape[1], ops.keys.start.shape[1]), np.int32)
            found[f"packing {name}"] = median_time(
                functools.partial(pack_keys, isa, key, ones), repeats
            )
            found[f"product {name}"] = median_time(
                functools.partial(gqa, ops.q, ops.keys.data, ops.keys.start, s), repeats
            )
    return found
