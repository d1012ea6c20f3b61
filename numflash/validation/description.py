"""The checked description of one attention problem: what every backend gets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..numerics.fixedpoint import FIRST_KEYS

F = np.float32
NO_LIMIT = 1 << 40  # of keys on a side of a row: no sequence has so many tokens
ZERO = np.zeros(1, F)
ZERO.flags.writeable = False


@dataclass(frozen=True)
class Problem:
    """One attention problem, validated: what every backend's `run(problem)` takes.

    Attributes
    ----------
    query : (B, H, L, D) array, of any strides
        In the storage of `precision`: float32, float16, uint16 (the bits of bfloat16); a
        QuantizedTensor for "int8".
    key : (B, Hkv, S, D) array or QuantizedTensor, Hkv divides H
    value : (B, Hkv, S, Dv) array or QuantizedTensor; float32 for "int8" with pv "bf16" and "fp32"
    scale : float
        Factor of Q.K^T, 1/sqrt(D) unless given.
    left, right : int or None
        Row i attends to keys j with i + diagonal[b] - left <= j <= i + diagonal[b] + right; None is
        no limit. Causal is right = 0.
    diagonal : (B,) int64
        Key under the diagonal in row 0: 0 for alignment "upper_left", key_lengths - L for
        "lower_right".
    key_lengths : (B,) int64
        Keys from here on do not exist.
    mask : (B, H, L, S) bool or None
        True where a key may be seen; a broadcast view (zero strides), not a copy.
    bias : (B, H, L, S) float32 or None
        Added to the scaled scores; a broadcast view. -inf hides a key.
    softcap : float
        0 is none; else scores become softcap * tanh(scores / softcap), before bias and mask.
    alibi_slopes : (B, H) float32 or None
        Adds -slope * |i + diagonal - j|.
    sinks : (H,) float32 or None
        Adds exp(sink) to each row's denominator.
    precision : "float32", "bfloat16", "float16" or "int8"
    pv : "int8", "int16", "bf16" or "fp32"
        The second product of precision "int8".
    return_lse : bool
    functions : flex.Fused or None
        Score and mask functions, and which blocks they see.
    first_keys : int
        How many keys at the front are among the first `fixedpoint.FIRST_KEYS` of their sequence,
        which precision "int8" computes finer: fewer, or 0, where the keys are a later part of it.
    """

    query: Any
    key: Any
    value: Any
    scale: float
    left: int | None
    right: int | None
    diagonal: np.ndarray
    key_lengths: np.ndarray
    mask: np.ndarray | None
    bias: np.ndarray | None
    softcap: float
    alibi_slopes: np.ndarray | None
    sinks: np.ndarray | None
    precision: str
    pv: str
    return_lse: bool
    functions: Any = None
    first_keys: int = FIRST_KEYS

    @property
    def smooths(self) -> bool:
        """Whether INT8 may take the mean off K: nothing but the softmax uses the scores."""
        return not self.softcap and (self.functions is None or not self.functions.changes_scores)

    @property
    def reach(self) -> tuple[int, int]:
        """`left` and `right` as numbers, `NO_LIMIT` where there is none."""
        left, right = self.left, self.right
        return NO_LIMIT if left is None else left, NO_LIMIT if right is None else right

    def changed(self, **fields: Any) -> Problem:
        """A copy with other fields, in a third of the time of `dataclasses.replace`."""
        copy = object.__new__(Problem)
        copy.__dict__.update(self.__dict__, **fields)
        return copy

    def with_operands(self, query: Any, key: Any, value: Any) -> Problem:
        """A copy with other operands of the same shapes."""
        return self.changed(query=query, key=key, value=value)

    def without_memory(self) -> Problem:
        """A copy whose query, key and value have shapes, and no memory."""
        b, h, hkv, length, s, d, dv = self.shape
        shapes = (b, h, length, d), (b, hkv, s, d), (b, hkv, s, dv)
        return self.with_operands(*(np.ndarray(x, F, ZERO, strides=(0,) * 4) for x in shapes))

    @property
    def shape(self) -> tuple[int, int, int, int, int, int, int]:
        """B, H, Hkv, L, S, D, Dv."""
        b, h, length, d = self.query.shape
        return b, h, self.key.shape[1], length, self.key.shape[2], d, self.value.shape[3]
