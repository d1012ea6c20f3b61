"""The kernels that quantise: sums and peaks of channels, and rows of floats rounded to INT8.

`quantization` says what is computed; several devices take its constants from here.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ..jit.compiler import bare, inlined, kernel
from ..jit.memory import reinterpret
from ..jit.parallel import over_tasks
from . import fixedpoint as fx

CHUNK = 1024  # rows per task: fixed, so that sums do not depend on the thread count
F = np.float32
I = np.int32
LARGEST = F(np.finfo(np.float32).max)
INFINITE = I(0x7F800000)  # bits of +inf: |x| orders like its bits
MAGNITUDE = I(0x7FFFFFFF)
NO_SCALE = F(2.0**-100)  # peaks up to this count as zero: their scale would leave float32
ROUND = F(1.5 * 2.0**23)  # x + ROUND - ROUND is x rounded to even


class Source(NamedTuple):
    """x (N, L, D) float32 less offset (N, D); lengths (N,) rows that count."""

    x: np.ndarray
    offset: np.ndarray
    lengths: np.ndarray


class Rounded(NamedTuple):
    """data (N, L, D) int8, nonfinite (N, L) uint8, low (N, first rows, D) int8."""

    data: np.ndarray
    nonfinite: np.ndarray
    low: np.ndarray


@bare
def largest_bits(x):
    """Bits of the largest magnitude of floats: ordered like the floats, NaN above all."""
    bits, top = x.view(np.int32), I(0)
    for j in range(bits.size):
        top = max(top, I(bits[j] & MAGNITUDE))
    return top


@bare
def _chunk_statistics(task, x, lengths, sums, peaks):
    chunks = sums.shape[1]
    n, c = task // chunks, task % chunks
    bits = reinterpret(x[n], np.int32)
    total, peak = sums[n, c], peaks[n, c]
    for i in range(c * CHUNK, min((c + 1) * CHUNK, lengths[n])):
        row, row_bits = x[n, i], bits[i]
        top = I(0)
        for d in range(row.size):
            top = max(top, I(row_bits[d] & MAGNITUDE))
        if top < INFINITE:
            for d in range(row.size):
                total[d] = F(total[d] + row[d])
                peak[d] = max(peak[d], I(row_bits[d] & MAGNITUDE))


@kernel
def channel_statistics(x, lengths, sums, peaks):
    """The sum and the largest |x| of every channel over finite rows, per head and chunk of rows.

    x (N, L, D) float32; lengths (N,) rows that count; sums (N, chunks, D) float32, peaks (N,
    chunks, D) int32, both zero.
    """
    over_tasks(_chunk_statistics, x.shape[0] * sums.shape[1], (x, lengths, sums, peaks))


@bare
def finer(t, whole):
    """What rounding the value t to `whole` took, in 1 / FINER of a step, rounded to even."""
    return np.int8(I((t * F(fx.FINER) + ROUND) - ROUND) - I(I(whole) * I(fx.FINER)))


@bare
def _row_peaks(row, row_bits, shift):
    """Bits of the largest |x| of a row, and of the row less its offset: ordered like the floats."""
    given, moved = I(0), I(0)
    for d in range(row.size):
        given = max(given, I(row_bits[d] & MAGNITUDE))
        x = F(min(max(row[d] - shift[d], -LARGEST), LARGEST))
        moved = max(moved, I(x.view(np.int32) & MAGNITUDE))
    return given, moved


@inlined
def _quantize_block(n, b, source, block, scale, to):
    """Rows of one block of head n."""
    x, shift = source.x[n], source.offset[n]
    raw, nonfinite, low = reinterpret(x, np.int32), to.nonfinite[n], to.low[n]
    i0, i1 = b * block, min((b + 1) * block, source.lengths[n])
    peak = I(0)
    for i in range(i0, i1):
        given, moved = _row_peaks(x[i], raw[i], shift)
        if given < INFINITE:
            peak = max(peak, moved)
        else:
            nonfinite[i] = 1
    largest = I(peak).view(np.float32)
    usable = largest > NO_SCALE
    scale[n, b] = largest / F(127) if usable else F(1)
    factor = F(127) / largest if usable else F(0)
    for i in range(i0, i1):
        if nonfinite[i] == 0:
            row, out = x[i], to.data[n, i]
            for d in range(row.size):
                t = min(max(row[d] - shift[d], -LARGEST), LARGEST) * factor
                out[d] = np.int8(I((t + ROUND) - ROUND))
            if i < low.shape[0]:
                for d in range(row.size):
                    t = min(max(row[d] - shift[d], -LARGEST), LARGEST) * factor
                    low[i, d] = finer(t, out[d])


@bare
def _quantize_blocks(task, source, block, per_task, tasks, scale, to):
    n, first = task // tasks, task % tasks * per_task
    for b in range(first, min(first + per_task, scale.shape[1])):
        _quantize_block(n, b, source, block, scale, to)


@kernel
def quantize_rows(x, offset, lengths, block, data, scale, nonfinite, low):
    """One scale per `block` rows.

    x (N, L, D), offset (N, D), data (N, L, D) int8, scale (N, blocks), nonfinite (N, L) uint8, low
    (N, first rows, D) int8.
    """
    per_task = max(1, CHUNK // block)
    tasks = (scale.shape[1] + per_task - 1) // per_task
    source, to = Source(x, offset, lengths), Rounded(data, nonfinite, low)
    over_tasks(_quantize_blocks, x.shape[0] * tasks, (source, block, per_task, tasks, scale, to))


@bare
def _quantize_chunk(task, source, factor, chunks, to):
    n, c = task // chunks, task % chunks
    x, shift, f, low = source.x[n], source.offset[n], factor[n], to.low[n]
    bits = reinterpret(x, np.int32)
    for i in range(c * CHUNK, min((c + 1) * CHUNK, source.lengths[n])):
        row, row_bits, out = x[i], bits[i], to.data[n, i]
        top = I(0)
        for d in range(row.size):
            top = max(top, I(row_bits[d] & MAGNITUDE))
        if top < INFINITE:
            for d in range(row.size):
                t = min(max(row[d] - shift[d], -LARGEST), LARGEST) * f[d]
                out[d] = np.int8(I((t + ROUND) - ROUND))
            if i < low.shape[0]:
                for d in range(row.size):
                    t = min(max(row[d] - shift[d], -LARGEST), LARGEST) * f[d]
                    low[i, d] = finer(t, out[d])
        else:
            to.nonfinite[n, i] = 1


@kernel
def quantize_channels(x, offset, factor, lengths, data, nonfinite, low):
    """One scale per channel, given as factor (N, D) = 127 / peak."""
    chunks = (x.shape[1] + CHUNK - 1) // CHUNK
    source, to = Source(x, offset, lengths), Rounded(data, nonfinite, low)
    over_tasks(_quantize_chunk, x.shape[0] * chunks, (source, factor, chunks, to))
