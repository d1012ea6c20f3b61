"""What the fused INT8 kernels are called with, as names instead of long lists.

N query heads and Nkv KV heads of all batch entries, one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..isa.strided import Strided
from .first_keys import FirstKeys


class Operands(NamedTuple):
    """Quantised and packed operands."""

    q: np.ndarray  # (N, L, D) int8
    cq: np.ndarray  # (N, L) float32: scale of a row, times scale * log2(e) in Q8.8 units
    keys: Any  # PackedKeys; of the portable kernel, the keys and their scales
    values: np.ndarray  # (Nkv, ...) packed
    first: FirstKeys
    v_scale: np.ndarray  # (Nkv, Dv) float32


class Sizes(NamedTuple):
    """What the arrays do not tell."""

    heads: int  # of a batch entry
    kv_heads: int
    keys: int  # of a sequence, without padding
    workers: int  # threads at most
    stream: int  # address of the AMX stream, or 0


class Part(NamedTuple):
    """Which query tiles are computed: from a counter on, which tells the next one."""

    stop: int  # number of the tile behind the last
    workers: int  # that share the counter
    before: int  # KV heads before the one whose packed keys and values come first


class Results(NamedTuple):
    """Results, and the softmax state of each row."""

    out: Strided  # (B, H, L, Dv) float32
    m: np.ndarray  # (N, L) int32, whole octaves
    l: np.ndarray  # (N, L) float32
