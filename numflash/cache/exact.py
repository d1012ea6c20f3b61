"""What a KV cache does outside its kernels, in float64.

Rows that float32 cannot hold, and the log-sum-exp.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..numerics import fixedpoint as fx
from ..numerics.scores import log_sum_exp, offset_products

LOG2E, LOWEST = float(fx.LOG2E), float(fx.LOWEST)


def positions(length: int, used: int, sinks: int, ring: int) -> np.ndarray:
    """The token in each of the `used` slots of a sequence of `length` tokens.

    Tokens after the sinks are stored in a ring.
    """
    slots = np.arange(used)
    if used == length:
        return slots
    behind = length - 1 - sinks - (slots - sinks)
    return np.where(slots < sinks, slots, length - 1 - behind % ring)


def attend(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    factor: float,
    softcap: float,
    bias: np.ndarray,
    change: Callable[[np.ndarray], np.ndarray] | None = None,
) -> tuple[np.ndarray, float, float]:
    """One row over the keys that it attends to: out (Dv,), its maximum in octaves and its sum.

    A maximum below float32's range is returned as its lowest finite number.

    query (D,), key (S, D), value (S, Dv); softcap 0 for none; bias (S,) is added to the scores;
    change gives the scores after functions, -inf where a key is hidden.
    """
    s = key.astype(np.float64) @ query.astype(np.float64) * factor
    if change is not None:
        s = change(s)
        seen = s != -np.inf
        s, bias, value = s[seen], bias[seen], value[seen]
    if not s.size:  # a row of no keys, done again with its whole tile
        return np.zeros(value.shape[1]), LOWEST, 0.0
    if softcap:
        s = softcap * np.tanh(s / softcap)
    s = s + bias
    top = s.max()
    p = np.exp(s - top)
    return p @ value / p.sum(), max(top * LOG2E, LOWEST), p.sum()


def natural_lse(
    m: np.ndarray,
    l: np.ndarray,
    query: np.ndarray,
    offset: np.ndarray | None,
    factor: float,
    one: int,
) -> np.ndarray:
    """lse (B, H, L) float32 of states m (octaves) and l (sums of weights of which `one` is 1).

    offset (B, Hkv, D): channel means that were taken from the keys, or None; query (B, H, L, D) as
    it came.
    """
    shift = None
    if offset is not None:
        shift = offset_products(query.astype(np.float64), offset) * factor
    m, l = (x.reshape(query.shape[:3]) for x in (m, l))
    return log_sum_exp(m.astype(np.float64), l, shift, one)
