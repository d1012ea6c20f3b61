"""Rows in 4 bits: what a `KVCache(dtype="int4")` stores, and the definition of its decoding.

A row is rotated by a Hadamard matrix (`rotation`), then rounded to the odd numbers from -15 to 15
times one scale. Rotation spreads the few large channels of real keys over all. From there on decoding
is that of INT8 over rotated rows, with other numbers and a query of 8 bits, which loses little beside
them: `int8_decode.rotated_decode`.

The numbers of a row are chosen in integers, so every machine chooses the same: x is rounded to 16
bits; then, for each of `fixedpoint.CODE_STEPS` step lengths s, c = clip((x * s >> 16) + 8, 0, 15)
and n = 2 c - 15. The row takes the s whose n, times their best factor (x . n) / (n . n), leave the
least error, and that factor is its scale.
"""

from __future__ import annotations

import functools

import numpy as np

from ..numerics import fixedpoint as fx
from ..numerics.quantization import QuantizedTensor
from ..numerics.rotation import rotate
from .int8_decode import rotated_decode

__all__ = ["decode", "quantize"]

F = np.float32
NO_SCALE = F(2.0**-100)  # as in `quantize_kernels`

decode = functools.partial(rotated_decode, query_one=fx.CODE_QUERY_ONE)


def quantize(rows: np.ndarray) -> QuantizedTensor:
    """Rows (..., L, D) in 4 bits: data int8, odd numbers from -15 to 15, and a scale per row.

    The data are those of rotated rows: `rotation.rotate(quantize(x).dequantize())` is near x. Rows
    of zeros have scale 0, rows that are not finite are marked.
    """
    x = rotate(np.asarray(rows, F))
    top = np.abs(x).max(-1, keepdims=True)
    nonfinite = ~np.isfinite(top)
    usable = (top > NO_SCALE) & ~nonfinite
    safe = np.where(usable, top, F(1))
    whole = np.rint(np.where(usable, x, F(0)) * (F(fx.CODE_ONE) / safe)).astype(np.int32)
    data = np.zeros(x.shape, np.int8)
    gain = np.full(top.shape, -1, F)
    factor = np.zeros(top.shape, F)
    for steps in fx.CODE_STEPS:
        n = np.clip((whole * np.int32(steps) >> 16) + 8, 0, 15) * 2 - 15
        product = (whole * n).sum(-1, keepdims=True).astype(F)
        square = (n * n).sum(-1, keepdims=True).astype(F)
        better = product * product / square > gain
        gain = np.where(better, product * product / square, gain)
        factor = np.where(better, product / square, factor)
        data = np.where(better, n, data).astype(np.int8)
    scale = np.where(usable, safe / F(fx.CODE_ONE), F(0)) * factor
    bad = nonfinite[..., 0] if nonfinite.any() else None
    return QuantizedTensor(data, np.where(nonfinite, F(1), scale), "row", None, bad)
