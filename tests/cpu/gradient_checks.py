"""Gradients by every kernel against float64, within twice the error of plain float32.

Those by bfloat16 products get operands that bfloat16 holds, and may be off by a few of its
roundings.
"""

from __future__ import annotations

import numpy as np
import pytest
from oracles import draw, naive_gradients, qkv
from test_flash_float import make

from numflash import attention
from numflash.cpu import launch_backward
from numflash.interop.arrays import convert, widen
from numflash.jit import target

F = np.float32
ISAS = target.available(target.FLOAT_ISAS)
BFLOAT16_ISAS = [x for x in target.available(target.BFLOAT16_ISAS) if x not in ISAS]


def _each(isas):
    """Tests for each of them: the widest vectors and plain loops by default."""
    often = ISAS[0], "portable"
    marked = [pytest.param(x, marks=() if x in often else pytest.mark.slow) for x in isas]
    return pytest.mark.parametrize("isa", marked)


float_isa = _each(ISAS)
every_isa = _each([*ISAS, *BFLOAT16_ISAS])
NAMES = ("dq", "dk", "dv", "scores")


def close(found, operands, ulp=2.0**-23, **options):
    """Within twice the error of plain float32, a few roundings, and those of scores and of dP - D
    as large as they are here.
    """
    with_scores = len(found) == len(NAMES)
    wanted = naive_gradients(*operands, **options, with_scores=with_scores)
    plain = naive_gradients(*operands, **options, with_scores=with_scores, dtype=F)
    do, q, k, v = (np.abs(x).max(initial=0) for x in operands)
    d, dv = (operands[n].shape[-1] for n in (1, 3))
    scores = q * k * d**0.5 * max(1, options.get("scale") or 0)
    of_weights = do * v * (dv / d) ** 0.5 + np.abs(options.get("grad_lse", 0)).max()
    slopes = options.get("alibi_slopes")
    scores += (
        0 if slopes is None else np.max(slopes) * (operands[1].shape[2] + operands[2].shape[2])
    )
    for name, mine, low, want, of_scores in zip(
        NAMES,
        found,
        plain,
        wanted,
        (of_weights * k, of_weights * q, 0, of_weights * d**0.5),
        strict=False,
    ):
        assert mine.shape == want.shape
        allowed = 2 * np.abs(low - want).max(initial=0) + (4 * ulp + 2.0**-23 * scores) * max(
            1, np.abs(want).max(initial=0)
        )
        allowed += 2.0**-23 * of_scores
        off = np.abs(mine - want).max(initial=0)
        assert off <= allowed, f"{name}: off by {off:.3g}, allowed {allowed:.3g}"


def held(operands, isa):
    """The operands as an instruction set multiplies them, and the precision that asks for it."""
    if isa not in BFLOAT16_ISAS:
        return operands, "float32"
    with np.errstate(over="ignore", invalid="ignore"):
        return [widen(convert(np.asarray(x, F), "bfloat16")) for x in operands], "bfloat16"


def near(isa):
    """How far gradients of about 1 by the kernels of `isa` and those by float64 are apart."""
    return 0.03 if isa in BFLOAT16_ISAS else 1e-5


def solve(do, q, k, v, isa=None, attn_mask=None, scores=None, grad_lse=None, **options):
    """Gradients by the kernels of `isa`, after a forward pass by the best ones; every element of
    theirs is written, and `scores` where they are given.
    """
    (do, q, k, v), precision = held((do, q, k, v), isa)
    out, lse = attention(q, k, v, attn_mask, enable_gqa=True, return_lse=True, **options)
    problem = make(q, k, v, precision, attn_mask, **options)
    results = [np.full(x.shape, np.nan, F) for x in (q, k, v)]
    return launch_backward.run(problem, do, out, lse, grad_lse, isa, results, scores)


def agrees(do, q, k, v, isa=None, **options):
    scores = np.zeros((*q.shape[:3], k.shape[2]), F)
    found = solve(do, q, k, v, isa, scores=scores, **options)
    assert all(x.dtype == F for x in found)
    operands, precision = held((do, q, k, v), isa)
    ulp = 2.0**-23 if precision == "float32" else 2.0**-8
    close((*found, scores), operands, ulp, **options)
    return found


def drawn(dv=None, **sizes):
    q, k, v = qkv(dv=dv, **sizes)
    return draw((*q.shape[:3], v.shape[3]), 9), q, k, v
