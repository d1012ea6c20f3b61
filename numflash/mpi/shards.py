"""Keys and values as messages.

One buffer of bytes each, without a header, because both ranks compute its layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ..numerics.fixedpoint import FIRST_KEYS, FLOAT_VALUES
from ..numerics.quantization import QuantizedTensor, quantize_heads
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
    finite), key, value. What is the same on all ranks (`Agreed`) is not sent.
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
                ("float32" if problem.pv in FLOAT_VALUES else "int8", dv),
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
@dataclass(frozen=True)
class Statistics:
    """Per batch entry, key head and channel, over the finite rows of one rank or of all.

    sums (B, Hkv, D) float64 of the key; peaks (B, Hkv, Dv) float32, the largest magnitude of the
    value.
    first : (place, key (B, Hkv, D) and value (B, Hkv, Dv) float32) of each of the sequence's first
        `FIRST_KEYS` tokens that is there
    """

    sums: np.ndarray
    peaks: np.ndarray
    first: tuple[tuple[int, np.ndarray, np.ndarray], ...]

    @classmethod
    def of(
        cls, key: np.ndarray, value: np.ndarray, real: np.ndarray, place: np.ndarray
    ) -> Statistics:
        """key, value (B, Hkv, n, .) float32; real (B, n) bool: rows that are not padding; place
        (n,): of the tokens in the whole sequence.

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
        first = tuple(
            (int(place[i]), key[:, :, i], value[:, :, i])
            for i in np.flatnonzero(place < FIRST_KEYS)
        )
        return cls(finite(key).sum(2, dtype=np.float64), peaks, first)

    @classmethod
    def join(cls, parts: Sequence[Statistics]) -> Statistics:
        """Statistics of all tokens from those of the parts."""
        first = sorted((x for p in parts for x in p.first), key=lambda x: x[0])
        return cls(
            np.sum([p.sums for p in parts], 0), np.max([p.peaks for p in parts], 0), tuple(first)
        )


@dataclass(frozen=True)
class Agreed:
    """What all ranks quantise with.

    offset : (B, Hkv, D) float32 or None
        The mean of each channel of the key over the whole sequence; None with a softcap, as in
        `quantize_problem`.
    peaks : (B, Hkv, Dv) float32
    value_scale : (B, Hkv, 1, Dv) float32
    low : (B, Hkv, n, D) and (B, Hkv, n, Dv) int8
        `QuantizedTensor.low` of the sequence's first n keys and values, at most `FIRST_KEYS`.
    """

    offset: np.ndarray | None
    peaks: np.ndarray
    value_scale: np.ndarray
    low: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, whole: Statistics, problem: Problem) -> Agreed:
        """What all ranks agree on, from the statistics of all of them.

        `problem.key_lengths` counts tokens of the whole sequence.
        """
        counts = np.maximum(problem.key_lengths, 1).astype(np.float64)[:, None, None]
        b, hkv, d = whole.sums.shape
        dv = whole.peaks.shape[2]
        offset = (whole.sums / counts).astype(np.float32) if problem.smooths else None
        n = len(whole.first)
        key, value = (
            np.stack(rows, 2) if n else np.zeros((b, hkv, 0, width), np.float32)
            for rows, width in zip(
                ([x[i] for x in whole.first] for i in (1, 2)), (d, dv), strict=True
            )
        )
        real = np.repeat(np.clip(problem.key_lengths, 0, n), hkv)
        kq = quantize_heads(
            key.reshape(b * hkv, n, d),
            "row",
            offset is not None,
            real,
            offset=None if offset is None else offset.reshape(b * hkv, d),
        )
        vq = quantize_heads(
            value.reshape(b * hkv, n, dv),
            "channel",
            False,
            real,
            peak=whole.peaks.reshape(b * hkv, dv),
        )
        low = kq.low.reshape(b, hkv, n, d), vq.low.reshape(b, hkv, n, dv)
        return cls(offset, whole.peaks, vq.scale.reshape(b, hkv, 1, dv), low)

    def low_of(self, keys: Range) -> tuple[np.ndarray | None, np.ndarray | None]:
        """`QuantizedTensor.low` of the keys and values of a range of the sequence.

        None where it holds none of the first ones.
        """
        first, stop = keys
        if first >= FIRST_KEYS:
            return None, None
        there = min(stop, FIRST_KEYS) - first
        key, value = (
            np.zeros((*x.shape[:2], min(stop - first, FIRST_KEYS), x.shape[3]), np.int8)
            for x in self.low
        )
        for x, low in zip((key, value), self.low, strict=True):
            x[:, :, :there] = low[:, :, first : first + there]
        return key, value


def quantise_shard(
    key: np.ndarray, value: np.ndarray, ranges: tuple[Range, ...], problem: Problem, agreed: Agreed
) -> Shard:
    """A rank's keys and values as INT8 (values as float32 with pv "bf16" and "fp32").

    key and value (B, Hkv, n, .) are float32.
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
        if problem.pv not in FLOAT_VALUES:
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
    problem: Problem, arrays: Sequence[np.ndarray], agreed: Agreed | None, keys: Range
) -> tuple[Any, Any]:
    """Key and value of a Problem from one range of a shard."""
    if agreed is None:
        return arrays[0], arrays[1]
    scale, data, value = arrays
    bad = np.isnan(scale[..., 0])
    offset = None if agreed.offset is None else agreed.offset[:, :, None]
    key_low, value_low = agreed.low_of(keys)
    key = QuantizedTensor(
        data,
        np.where(bad[..., None], np.float32(1), scale),
        "row",
        offset,
        bad if bad.any() else None,
        low=key_low,
    )
    return key, QuantizedTensor(
        value, agreed.value_scale, "channel", low=value_low
    ) if problem.pv not in FLOAT_VALUES else value
