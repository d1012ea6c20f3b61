"""After the decode kernel: the rows that it gives back, and the log-sum-exp."""

from __future__ import annotations

from typing import Any

import numpy as np

from .. import fixedpoint as fx
from .contents import read
from .exact import attend, natural_lse, positions
from .memory import Memory
from .protocols import Plan

F = np.float32


def redo(memory: Memory, plan: Plan, query: np.ndarray, scale: Any, out: np.ndarray) -> None:
    """Compute rows again in float64 whose scores or sums float32 cannot hold.

    query (B, Hkv, rows, D), out (B, Hkv, rows, Dv) float32.
    """
    window, layout = memory.settings.window, memory.layout
    for b, g, r in plan.to_redo():
        key, value = read(memory, int(b))
        queries, length = plan.queries, int(memory.store.lengths[b])
        held = positions(length, memory.slots(b)[1], layout.sinks, layout.ring)
        at = length - queries + int(r) % queries
        seen = held <= at
        if window is not None:
            seen &= (held > at - window) | (held < layout.sinks)
        with np.errstate(over="ignore"):
            out[b, g, r], plan.m[b, g, r], plan.l[b, g, r] = attend(
                query[b, g, r], key[g, seen], value[g, seen], memory.calls.factor(scale)
            )


def lse_of(memory: Memory, plan: Plan, query: np.ndarray, scale: Any) -> np.ndarray:
    """lse (B, H, L) float32, natural log, of the plan's last call."""
    one = fx.P_ONE if memory.settings.dtype == "int8" else 1
    return natural_lse(
        plan.m,
        plan.l,
        query,
        memory.offset if memory.settings.smooth else None,
        memory.calls.factor(scale),
        one,
    )
