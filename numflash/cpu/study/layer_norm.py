"""LayerNorm, and LayerNorm with the quantiser inside that feeds Q, K and V."""

from __future__ import annotations

import numpy as np
from numba import prange

from ...jit.compiler import kernel
from ...numerics.quantize_kernels import MAGNITUDE, NO_SCALE, ROUND

F, I = np.float32, np.int32
EPSILON = F(1e-5)


@kernel(float_math=True)
def normalise(x, gamma, beta, y):
    """y = (x - mean) / sqrt(variance + epsilon) * gamma + beta, one row.

    A kernel of its own, so that both callers get its bits.
    """
    mean, square = F(0), F(0)
    for e in range(x.size):
        mean += x[e]
    mean = F(mean / F(x.size))
    for e in range(x.size):
        away = F(x[e] - mean)
        square += F(away * away)
    r = F(F(1) / np.sqrt(F(F(square / F(x.size)) + EPSILON)))
    for e in range(x.size):
        y[e] = F(F(F(F(x[e] - mean) * r) * gamma[e]) + beta[e])


@kernel(parallel=True)
def layer_norm(x, gamma, beta, y):
    """The separate pass.

    x (L, D) float32 -> y (L, D) float32, which the quantiser then reads again.
    """
    for i in prange(x.shape[0]):
        normalise(x[i], gamma, beta, y[i])


@kernel(parallel=True)
def layer_norm_quantize(x, gamma, beta, data, scale):
    """Both at once: x (L, D) float32 -> data (L, D) int8, scale (L,) float32, with the bits of
    `quantize(layer_norm(x), "row")`.

    Inputs are finite; the package's quantiser also marks rows that are not.
    """
    rows = 64
    for task in prange((x.shape[0] + rows - 1) // rows):
        y, largest = np.empty(x.shape[1], F), np.empty(1, np.int32)  # stay in L1
        for i in range(np.intp(task) * rows, min((np.intp(task) + 1) * rows, x.shape[0])):
            normalise(x[i], gamma, beta, y)
            bits, top, out = y.view(np.int32), I(0), data[i]
            for e in range(y.size):
                # ordered like the floats, and a maximum that vectorises
                top = max(top, I(bits[e] & MAGNITUDE))
            largest[0] = top
            peak = largest.view(np.float32)[0]
            usable = peak > NO_SCALE
            scale[i] = F(peak / F(127)) if usable else F(1)
            factor = F(F(127) / peak) if usable else F(0)
            for e in range(y.size):
                out[e] = np.int8(I(F(F(F(y[e] * factor) + ROUND) - ROUND)))
