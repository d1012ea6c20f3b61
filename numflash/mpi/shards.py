"""Keys and values as messages.

One buffer of bytes each, without a header, because both ranks compute its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..quantization import QuantizedTensor, quantize_heads
from ..validation import Problem
from .splits import Range


@dataclass(frozen=True)
class Field:
    """One array of a shard: (B, Hkv, n, width) of `dtype`."""

    dtype: np.dtype
    width: int


@dataclass(frozen=True)
class Format:
    """What a shard holds.

    Float: key, value. INT8: the scale of each key (NaN marks a row whose key or value was not
    finite), key, value. The smoothing offset and the scales of the value's channels are the same on
    all ranks and are not sent.
    """

    lead: tuple[int, int]
    fields: tuple[Field, ...]

    def nbytes(self, ranges: Sequence[Range]) -> int:
        """Bytes of a message with these ranges of tokens."""
        row = sum(f.dtype.itemsize * f.width for f in self.fields)
        return self.lead[0] * self.lead[1] * row * sum(b - a for a, b in ranges)

    @property
    def aligned(self) -> list[int]:
        """Fields in the order of the buffer.

        Wide types first, so that every array in it is aligned.
        """
        return sorted(range(len(self.fields)), key=lambda f: -self.fields[f].dtype.itemsize)

    @classmethod
    def of(cls, problem: Problem) -> Format:
        """The fields of a message with a problem's keys and values."""
        d, dv = problem.shape[5:]
        if problem.precision == "int8":
            kinds = [
                ("float32", 1),
                ("int8", d),
                ("int8" if problem.pv == "int8" else "float32", dv),
            ]
        else:
            storage = "uint16" if problem.precision == "bfloat16" else problem.precision
            kinds = [(storage, d), (storage, dv)]
        return cls(
            (problem.shape[0], problem.shape[2]),
            tuple(Field(np.dtype(name), width) for name, width in kinds),
        )


@dataclass(frozen=True)
class Shard:
    """Keys and values of some ranges of tokens: arrays[f][c] is field f of range c."""

    ranges: tuple[Range, ...]
    arrays: tuple[tuple[np.ndarray, ...], ...]

    @classmethod
    def of(cls, ranges: tuple[Range, ...], *fields: np.ndarray) -> Shard:
        """From arrays (B, Hkv, n, .) of all ranges, one behind the other."""
        at = [0, *accumulate(b - a for a, b in ranges)]
        return cls(ranges, tuple(tuple(x[:, :, i:j] for i, j in pairwise(at)) for x in fields))

    @classmethod
    def whole(cls, parts: Sequence[Shard]) -> Shard:
        """The shards of all ranks as one range, in the order of the sequence."""
        order = sorted(
            (start, p, c)
            for p, part in enumerate(parts)
            for c, (start, _) in enumerate(part.ranges)
        )
        end = sum(b - a for part in parts for a, b in part.ranges)
        if not end:
            return parts[0]
        return cls(
            ((0, end),),
            tuple(
                (np.concatenate([parts[p].arrays[f][c] for _, p, c in order], 2),)
                for f in range(len(parts[0].arrays))
            ),
        )

    def cut(self, ranges: Sequence[Range]) -> Shard:
        """Views of smaller ranges, one within each of this shard's."""
        return Shard(
            tuple(ranges),
            tuple(
                tuple(
                    x[:, :, a - start : b - start]
                    for x, (a, b), (start, _) in zip(field, ranges, self.ranges, strict=True)
                )
                for field in self.arrays
            ),
        )


def encode(form: Format, shard: Shard, buffer: np.ndarray) -> None:
    """Write the arrays one behind the other; buffer (nbytes,) uint8."""
    at = 0
    for f in form.aligned:
        for x in shard.arrays[f]:
            buffer[at : at + x.nbytes].view(x.dtype).reshape(x.shape)[:] = x
            at += x.nbytes


def decode(form: Format, ranges: Sequence[Range], buffer: np.ndarray) -> Shard:
    """The shard in a received buffer: views, no copy."""
    arrays: list[tuple[np.ndarray, ...]] = [()] * len(form.fields)
    at = 0
    for f in form.aligned:
        for a, b in ranges:
            shape = (*form.lead, b - a, form.fields[f].width)
            n = int(np.prod(shape)) * form.fields[f].dtype.itemsize
            arrays[f] += (buffer[at : at + n].view(form.fields[f].dtype).reshape(shape),)
            at += n
    return Shard(tuple(ranges), tuple(arrays))


# ---- quantised once, by the owner
# ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Statistics:
    """Per batch entry, key head and channel, over the finite rows of one rank or of all.

    sums (B, Hkv, D) float64 of the key; peaks (B, Hkv, Dv) float32, the largest magnitude of the
    value.
    """

    sums: np.ndarray
    peaks: np.ndarray

    @classmethod
    def of(cls, key: np.ndarray, value: np.ndarray, real: np.ndarray) -> Statistics:
        """key, value (B, Hkv, n, .) float32; real (B, n) bool: rows that are not padding.

        Summed in float64: the mean comes out the same however the tokens are split, but for a last
        bit once in a great many.
        """

        def finite(x: np.ndarray) -> np.ndarray:
            return np.where((np.isfinite(x).all(-1) & real[:, None])[..., None], x, np.float32(0))

        peaks = (
            np.abs(finite(value)).max(2, initial=0)
            if value.size
            else np.zeros((*value.shape[:2], value.shape[3]), np.float32)
        )
        return cls(finite(key).sum(2, dtype=np.float64), peaks)

    @classmethod
    def join(cls, parts: Sequence[Statistics]) -> Statistics:
        """Statistics of all tokens from those of the parts."""
        return cls(np.sum([p.sums for p in parts], 0), np.max([p.peaks for p in parts], 0))


@dataclass(frozen=True)
class Agreed:
    """What all ranks quantise with.

    offset : (B, Hkv, D) float32 or None
        The mean of each channel of the key over the whole sequence; None with a softcap, as in
        `quantize_problem`.
    peaks : (B, Hkv, Dv) float32
    value_scale : (B, Hkv, 1, Dv) float32
    """

    offset: np.ndarray | None
    peaks: np.ndarray
    value_scale: np.ndarray

    @classmethod
    def of(cls, whole: Statistics, problem: Problem) -> Agreed:
        """From the statistics of all ranks.

        `problem.key_lengths` counts tokens of the whole sequence.
        """
        counts = np.maximum(problem.key_lengths, 1).astype(np.float64)[:, None, None]
        b, hkv, dv = whole.peaks.shape
        peaks = whole.peaks.reshape(b * hkv, dv)
        scale = quantize_heads(
            np.zeros((b * hkv, 0, dv), np.float32), "channel", False, peak=peaks
        ).scale
        return cls(
            None if problem.softcap else (whole.sums / counts).astype(np.float32),
            whole.peaks,
            scale.reshape(b, hkv, 1, dv),
        )


def quantise_shard(
    key: np.ndarray, value: np.ndarray, ranges: tuple[Range, ...], problem: Problem, agreed: Agreed
) -> Shard:
    """A rank's keys and values as INT8 (values as float32 with pv "fp32").

    Key, value (B, Hkv, n, .) float32.
    """
    b, hkv = key.shape[:2]
    offset = None if agreed.offset is None else agreed.offset.reshape(b * hkv, key.shape[3])
    columns = []
    at = 0
    for start, stop in ranges:
        n = stop - start
        k, v = (
            np.ascontiguousarray(x[:, :, at : at + n]).reshape(b * hkv, n, x.shape[3])
            for x in (key, value)
        )
        real = np.repeat(np.clip(problem.key_lengths - start, 0, n), hkv)
        kq = quantize_heads(k, "row", offset is not None, real, offset=offset)
        bad = np.zeros((b * hkv, n), bool) if kq.nonfinite is None else kq.nonfinite
        if problem.pv == "int8":
            vq = quantize_heads(
                v, "channel", False, real, peak=agreed.peaks.reshape(b * hkv, value.shape[3])
            )
            v = vq.data
            bad = bad if vq.nonfinite is None else bad | vq.nonfinite
        scale = np.where(bad[..., None], np.float32(np.nan), kq.scale)
        columns.append([x.reshape(b, hkv, n, x.shape[2]) for x in (scale, kq.data, v)])
        at += n
    return Shard(ranges, tuple(zip(*columns, strict=True)) if columns else ((), (), ()))


def operands(
    problem: Problem, arrays: Sequence[np.ndarray], agreed: Agreed | None
) -> tuple[Any, Any]:
    """Key and value of a Problem from one range of a shard."""
    if agreed is None:
        return arrays[0], arrays[1]
    scale, data, value = arrays
    bad = np.isnan(scale[..., 0])
    offset = None if agreed.offset is None else agreed.offset[:, :, None]
    key = QuantizedTensor(
        data,
        np.where(bad[..., None], np.float32(1), scale),
        "row",
        offset,
        bad if bad.any() else None,
    )
    return key, QuantizedTensor(
        value, agreed.value_scale, "channel"
    ) if problem.pv == "int8" else value
