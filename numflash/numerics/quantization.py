"""Symmetric INT8 quantisation of query, key and value: step 1 of the integer pipeline.

* query: one scale per row.
* key: the mean of each channel over the keys is taken away first (SageAttention, section 4.2:
  softmax does not see a vector added to every key), then one scale per key.
* value: one scale per channel.

The scale is max|x| / 127 and -128 is never used. Rows of zeros get scale 1. A row that holds NaN or
infinity is stored as zeros and remembered: it makes the rows that attend to it NaN, and changes no
other row.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import choice, flag
from ..interop.arrays import import_array, to_float32
from ..jit import guard
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..tiling import KEY_BLOCK
from . import fixedpoint as fx
from .quantize_kernels import (
    CHUNK,
    LARGEST,
    NO_SCALE,
    F,
    channel_statistics,
    quantize_channels,
    quantize_rows,
)
from .rotation import rotate as rotated

GRANULARITIES = ("row", "block", "channel", "tensor")
# pv "bf16" and "fp32" add float values before they divide by the sum of weights: channels with a value of
# HUGE or more are computed in units of HUGE_UNIT, so that their sums do not overflow
HUGE = F(2.0**96)
HUGE_UNIT = F(2.0**32)


@dataclass(frozen=True, repr=False)
class QuantizedTensor:
    """INT8 values with their scales.

    Attributes
    ----------
    data : (..., L, D) int8, -127 to 127 from `quantize`; -128 is computed like any other
    scale : float32
        (..., L, 1) for "row", (..., ceil(L / block), 1) for "block", (..., 1, D) for "channel",
        (..., 1, 1) for "tensor".
    granularity : str
    offset : (..., 1, D) float32 or None
        What was subtracted before quantising (smoothing).
    nonfinite : (..., L) bool or None
        Rows that held NaN or infinity; their data are zeros. None where there are none.
    block : int
        Rows that share a scale with granularity "block".
    low : (..., min(L, 4), D) int8 or None
        What rounding took from the first rows, in 1/32 of a step: these are
        (data + low / 32) * scale, and INT8 attention computes with that. A sequence's first tokens
        often take most of the weight ("attention sinks"). None: nothing.
    rotated : bool
        Whether rows were multiplied by a Hadamard matrix first (`quantize_qkv(rotate=True)`): a query and
        a key belong together only if both were, or neither.
    """

    data: np.ndarray
    scale: np.ndarray
    granularity: str
    offset: np.ndarray | None = None
    nonfinite: np.ndarray | None = None
    block: int = KEY_BLOCK
    low: np.ndarray | None = None
    rotated: bool = False
    # see validation.quantized
    checked: bool = field(default=False, init=False, repr=False, compare=False)

    def __repr__(self) -> str:
        """One line: the arrays are too long to print."""
        more = [name for name in ("offset", "nonfinite", "low") if getattr(self, name) is not None]
        turned = ", rotated" if self.rotated else ""
        return (
            f"QuantizedTensor(shape={self.shape}, granularity={self.granularity!r}, nbytes={self.nbytes}{turned}"
            f"{', with ' + ', '.join(more) if more else ''})"
        )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the data."""
        return self.data.shape

    @property
    def nbytes(self) -> int:
        """Bytes of data and scales."""
        return sum(
            x.nbytes
            for x in (self.data, self.scale, self.offset, self.nonfinite, self.low)
            if x is not None
        )

    def is_contiguous(self) -> bool:
        """Whether data, scale and `low` are in contiguous memory, as compiled calls read them."""
        low = self.low
        return (
            self.data.flags.carray and self.scale.flags.carray and (low is None or low.flags.carray)
        )

    def unfolded(self, lead: tuple[int, ...]) -> QuantizedTensor:
        """The same numbers with other leading dimensions, (*lead, L, D)."""
        count = self.data.ndim - 2

        def unfold(x: Any) -> Any:
            return None if x is None else x.reshape(lead + x.shape[count:])

        return replace(
            self,
            data=unfold(self.data),
            scale=unfold(self.scale),
            offset=unfold(self.offset),
            nonfinite=unfold(self.nonfinite),
            low=unfold(self.low),
        )

    def row_scale(self) -> np.ndarray:
        """(..., L) float32: the scale of every row ("row", "block" and "tensor")."""
        length = self.data.shape[-2]
        if self.granularity == "channel":
            raise ArgumentError(
                "scale: granularity 'channel' has no scale per row; allowed: 'row', 'block', 'tensor'"
            )
        per_row = self.scale[..., 0]
        if self.granularity == "block":
            per_row = np.repeat(per_row, self.block, -1)[..., :length]
        return (
            per_row if self.granularity == "row" else np.broadcast_to(per_row, self.data.shape[:-1])
        )

    def finer_rows(self) -> np.ndarray:
        """(..., min(L, 4), D) int16: the first rows in 1/32 of a step, with what `low` holds."""
        rows = self.data[..., : fx.FIRST_KEYS, :].astype(np.int16) * np.int16(fx.FINER)
        return rows if self.low is None else rows + self.low

    def dequantize(self) -> np.ndarray:
        """(..., L, D) float32: data * scale + offset; rows that were not finite become NaN.

        What `low` holds of the first keys is not added.
        """
        scale = self.scale if self.granularity == "channel" else self.row_scale()[..., None]
        with np.errstate(all="ignore"):  # the largest float32 may round up to infinity
            x = self.data.astype(np.float32) * scale
            if self.offset is not None:
                x += self.offset
        if self.nonfinite is not None:
            x[self.nonfinite] = np.nan
        return x


def _statistics(x: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Sum and largest magnitude of every channel: two (N, D) float32."""
    shape = (x.shape[0], max(1, -(-x.shape[1] // CHUNK)), x.shape[2])
    sums = np.zeros(shape, np.float32)
    peaks = np.zeros(shape, np.int32)
    with one_at_a_time():
        channel_statistics(x, lengths, sums, peaks)
    return sums.sum(1, dtype=np.float64).astype(np.float32), peaks.max(1).view(np.float32)


@guard.guarded
def quantize_heads(
    x: np.ndarray,
    granularity: str,
    smooth: bool,
    lengths: np.ndarray | None = None,
    *,
    offset: np.ndarray | None = None,
    peak: np.ndarray | None = None,
) -> QuantizedTensor:
    """`quantize` for a contiguous (N, L, D) float32 array.

    Rows from lengths[n] on are left out and stored as zeros.

    A part of a longer array takes the whole one's `offset` (N, D), for `smooth`, and `peak` (N, D),
    for "channel", from outside.
    """
    refuse_after_fork()
    n, length, d = x.shape
    lengths = np.full(n, length, np.int64) if lengths is None else lengths
    data = np.zeros(x.shape, np.int8)
    bad = np.zeros((n, length), np.uint8)
    low = np.zeros((n, min(length, fx.FIRST_KEYS), d), np.int8)
    if not smooth:
        offset = np.zeros((n, d), np.float32)
    elif offset is None:
        with np.errstate(all="ignore"):
            offset = _statistics(x, lengths)[0] / np.maximum(lengths, 1).astype(np.float32)[:, None]
        offset = np.where(np.isfinite(offset), offset, F(0))
    if granularity == "channel":
        if peak is None:
            peak = _statistics(
                np.clip(x - offset[:, None], -LARGEST, LARGEST) if smooth else x, lengths
            )[1]
        usable = peak > NO_SCALE
        scale = np.where(usable, peak / F(127), F(1))[:, None]
        factor = np.where(usable, F(127) / np.where(usable, peak, F(1)), F(0))
        with one_at_a_time():
            quantize_channels(x, offset, factor, lengths, data, bad, low)
    else:
        block = {"row": 1, "block": KEY_BLOCK, "tensor": max(1, length)}[granularity]
        blocks = max(1, -(-length // block)) if granularity == "tensor" else -(-length // block)
        scale = np.ones((n, blocks), np.float32)
        with one_at_a_time():
            quantize_rows(x, offset, lengths, block, data, scale, bad, low)
        scale = scale[:, :, None]
    return QuantizedTensor(
        data,
        scale,
        granularity,
        offset[:, None] if smooth else None,
        bad.view(bool) if bad.any() else None,
        low=low,
    )


def _floats(name: str, x: Any) -> np.ndarray:
    """An argument as contiguous float32 rows, (..., L, D)."""
    taken = import_array(name, x)
    if taken.dtype not in ("float32", "float64", "float16", "bfloat16"):
        raise ArgumentTypeError(
            f"{name}: got dtype {taken.dtype}; allowed: float32, float64, float16, bfloat16"
        )
    array = taken.array
    if not 2 <= array.ndim <= 4 or array.shape[-1] < 1:
        raise ArgumentError(
            f"{name}: got shape {array.shape}; allowed: 2 to 4 dimensions (..., L, D) with D >= 1"
        )
    return to_float32(array)


def quantize(x: Any, granularity: str = "row", smooth: bool = False) -> QuantizedTensor:
    """Quantise to symmetric INT8.

    Parameters
    ----------
    x : (L, D), (H, L, D) or (B, H, L, D) array, float32, float64, float16 or bfloat16
    granularity : "row", "block" (128 rows share a scale), "channel" or "tensor" (per head)
    smooth : bool
        Take each channel's mean over the rows away first and keep it as `offset`.

    Returns
    -------
    QuantizedTensor

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    choice("granularity", granularity, GRANULARITIES)
    return _quantized(_floats("x", x), granularity, flag("smooth", smooth))


def _quantized(array: np.ndarray, granularity: str, smooth: bool = False) -> QuantizedTensor:
    """`quantize` of rows that `_floats` has taken in."""
    lead, (length, d) = array.shape[:-2], array.shape[-2:]
    heads = array.reshape(int(np.prod(lead)), length, d)
    t = quantize_heads(heads, granularity, smooth)
    return t.unfolded(lead)


def quantize_qkv(
    query: Any, key: Any, value: Any, *, rotate: bool = False
) -> tuple[QuantizedTensor, QuantizedTensor, QuantizedTensor]:
    """The three tensors that `attention(precision="int8")` makes.

    The query is quantised per row, the key smoothed and per row, the value per channel.

    Parameters
    ----------
    query, key, value : (..., L, D), (..., S, D), (..., S, Dv) float arrays
    rotate : bool
        Multiply query and key by a Hadamard matrix before they are rounded (`rotation`). Their
        products stay as they are, and channels that are much larger than others cost no digits of
        the others. What is returned then are not the three tensors of `attention`.

    Returns
    -------
    query, key, value : QuantizedTensor
        Data int8 of the arrays' shapes.

    Raises
    ------
    ArgumentError, ArgumentTypeError
    """
    rotate = flag("rotate", rotate)
    named = (("query", query), ("key", key), ("value", value))
    q, k, v = (_floats(name, x) for name, x in named)
    if rotate:
        q, k = rotated(q), rotated(k)
    return (
        replace(_quantized(q, "row"), rotated=rotate),
        replace(_quantized(k, "row", smooth=True), rotated=rotate),
        _quantized(v, "channel"),
    )


def float_values(v: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Values of pv "fp32" and "bf16" whose weighted sums stay in float32.

    v : (..., S, Dv) float32

    Returns the values in units of their channel, itself where all units are 1; the units (..., Dv)
    float32, 1 or `HUGE_UNIT`; and (..., S) bool, the tokens that are not finite, whose values mean
    nothing.
    """
    bad = np.zeros(v.shape[:-1], bool)
    with np.errstate(all="ignore"):
        top = np.maximum(v.max(-2, initial=0), -v.min(-2, initial=0))
    if not (top < HUGE).all():  # NaN and infinity, too
        bad = ~np.isfinite(v).all(-1)
        v = np.where(bad[..., None], F(0), v)
        top = np.abs(v).max(-2, initial=0)
    units = np.where(top < HUGE, F(1), HUGE_UNIT)
    return (v if (units == 1).all() else v / units[..., None, :]), units, bad


def quantize_problem(problem: Any) -> Any:
    """The Problem with its float operands quantised, as precision "int8" computes with them.

    Query per row, key smoothed and per row, value per channel; with pv "bf16" and "fp32" the value is a
    float32 array. Keys from `key_lengths` on are left out of means and scales, so padding never
    changes a bit. With a softcap or a score function the key is not smoothed:
    either changes its result when a constant is added to all scores.
    """

    def heads(x: np.ndarray) -> np.ndarray:
        return to_float32(x).reshape(-1, *x.shape[2:])

    b, h, hkv = problem.shape[:3]
    lengths = np.repeat(problem.key_lengths, hkv)
    value = heads(problem.value)
    return replace(
        problem,
        query=quantize_heads(heads(problem.query), "row", False).unfolded((b, h)),
        key=quantize_heads(heads(problem.key), "row", problem.smooths, lengths).unfolded((b, hkv)),
        value=(
            value.reshape(problem.value.shape)
            if problem.pv in fx.FLOAT_VALUES
            else quantize_heads(value, "channel", False, lengths).unfolded((b, hkv))
        ),
    )
