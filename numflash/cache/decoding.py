"""After the decode kernel: the rows that it gives back, and the log-sum-exp."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ..numerics import fixedpoint as fx
from ..numerics.scores import offset_products
from .contents import read
from .decode_options import Changes
from .exact import attend, natural_lse, positions
from .memory import Memory
from .protocols import DecodePlan
from .settings import INTEGERS

F = np.float32


def redo(
    memory: Memory,
    plan: DecodePlan,
    query: np.ndarray,
    scale: Any,
    out: np.ndarray,
    changes: Changes,
) -> None:
    """Compute rows again in float64 whose scores or sums float32 cannot hold.

    query (B, H, L, D), out (B, H, L, Dv) float32, contiguous.
    """
    left = plan.to_redo()
    if not left.size:
        return
    window = memory.settings.window
    layout = memory.layout
    query, out = query.reshape(plan.shape), out.reshape((*plan.shape[:3], -1))
    for b, g, r in left:
        key, value = read(memory, int(b))
        queries = plan.queries
        length = int(memory.store.lengths[b])
        held = positions(length, memory.slots(b)[1], layout.sinks, layout.ring)
        new = int(r) % queries
        at = length - queries + new
        seen = held <= at
        if window is not None:
            seen &= (held > at - window) | (held < layout.sinks)
        if changes.mask is not None:
            seen &= (held < length - queries) | changes.mask[b, new][
                np.maximum(held - length + queries, 0)
            ]
        head = g * (plan.shape[2] // queries) + r // queries
        change = None
        if changes.functions is not None:
            change = functools.partial(
                changes.functions.change, b=int(b), h=int(head), q=int(at), k=held[seen]
            )
        slope = 0.0 if changes.slopes is None else float(changes.slopes[head])
        with np.errstate(all="ignore"):
            out[b, g, r], plan.m[b, g, r], plan.l[b, g, r] = attend(
                query[b, g, r],
                key[g, seen],
                value[g, seen],
                memory.calls.factor(scale),
                changes.softcap,
                -slope * np.abs(at - held[seen]),
                change,
            )


def lse_of(
    memory: Memory, plan: DecodePlan, query: np.ndarray, scale: Any, changes: Changes
) -> np.ndarray:
    """lse (B, H, L) float32, natural log, of the plan's last call."""
    # with a cap or a function the kernel itself has added the offset to the scores
    shifted = memory.settings.smooth and not changes.cap_or_functions
    one = fx.SUM_ONE if memory.settings.dtype in INTEGERS else 1
    return natural_lse(
        plan.m, plan.l, query, memory.offset if shifted else None, memory.calls.factor(scale), one
    )


def cap_shift(query: np.ndarray, offset: np.ndarray, scale: float, softcap: float) -> np.ndarray:
    """(B, H, L) float32: what `smooth` took from every score of a row, in units of the soft cap.

    In natural units if softcap is 1.

    query (B, H, L, D) float32, offset (B, Hkv, D).
    """
    shift = offset_products(query.astype(np.float64), offset) * (scale / softcap)
    limit = float(fx.T_LIMIT)
    return np.clip(shift, -limit, limit).astype(F)
