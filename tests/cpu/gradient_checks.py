"""Gradients by every kernel against float64, within twice the error of plain float32."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import draw, naive_gradients, qkv
from test_flash_float import make

from numflash import attention
from numflash.cpu import launch_backward
from numflash.jit import target

F = np.float32
ISAS = target.available(target.FLOAT_ISAS)
# the widest vectors and plain loops by default
every_isa = pytest.mark.parametrize(
    "isa",
    [
        pytest.param(isa, marks=() if isa in (ISAS[0], "portable") else pytest.mark.slow)
        for isa in ISAS
    ],
)
NAMES = ("dq", "dk", "dv")


def close(found, operands, ulp=2.0**-23, **options):
    """Within twice the error of plain float32, a few roundings, and those of scores and of dP - D
    as large as they are here.
    """
    wanted = naive_gradients(*operands, **options)
    plain = naive_gradients(*operands, **options, dtype=F)
    do, q, k, v = (np.abs(x).max(initial=0) for x in operands)
    d, dv = (operands[n].shape[-1] for n in (1, 3))
    scores = q * k * d**0.5 * max(1, options.get("scale") or 0)
    of_weights = do * v * (dv / d) ** 0.5
    slopes = options.get("alibi_slopes")
    scores += (
        0 if slopes is None else np.max(slopes) * (operands[1].shape[2] + operands[2].shape[2])
    )
    for name, mine, low, want, of_scores in zip(
        NAMES, found, plain, wanted, (of_weights * k, of_weights * q, 0), strict=True
    ):
        assert mine.shape == want.shape
        allowed = 2 * np.abs(low - want).max(initial=0) + (4 * ulp + 2.0**-23 * scores) * max(
            1, np.abs(want).max(initial=0)
        )
        allowed += 2.0**-23 * of_scores
        off = np.abs(mine - want).max(initial=0)
        assert off <= allowed, f"{name}: off by {off:.3g}, allowed {allowed:.3g}"


def solve(do, q, k, v, isa=None, attn_mask=None, **options):
    """Gradients by the kernels of `isa`, after a forward pass by the best ones."""
    out, lse = attention(q, k, v, attn_mask, enable_gqa=True, return_lse=True, **options)
    return launch_backward.run(make(q, k, v, "float32", attn_mask, **options), do, out, lse, isa)


def agrees(do, q, k, v, isa=None, **options):
    found = solve(do, q, k, v, isa, **options)
    assert all(x.dtype == F for x in found)
    close(found, (do, q, k, v), **options)
    return found


def drawn(dv=None, **sizes):
    q, k, v = qkv(dv=dv, **sizes)
    return draw((*q.shape[:3], v.shape[3]), 9), q, k, v
