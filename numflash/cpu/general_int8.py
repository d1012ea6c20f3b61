"""INT8 attention on operands of all kinds, array by array: quantised tensors, packed and attended to.

What `launch_int8.Int8Plan` does in one compiled call for most operands, and leaves to this for others
and for scores beyond int16.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from ..interop.arrays import convert, widen
from ..jit.memory import fresh
from ..numerics import fixedpoint as fx
from ..numerics.quantization import float_values, quantize_problem
from ..numerics.scores import (
    cap_shift,
    combined_scale,
    largest,
    log_sum_exp,
    row_shift,
    score_unit,
)
from ..tiling import chosen
from ..validation import Problem
from .int8 import amx_stream, flash_int8, portable
from .int8.arguments import Operands, Results, Sizes
from .int8.call import MOST, most_score
from .int8.first_keys import first_keys, no_first_keys
from .int8.packing import bfloat16_pairs, float_rows, pack_keys, pack_values
from .int8.wide_rows import floats_of
from .isa.isas import VECTOR_ISAS, padded
from .isa.strided import strided
from .problem_arrays import edges_and_masks, functions_of, heads
from .semantics import Semantics

F = np.float32
ONE_SHIFT, ONE_SLOPE = np.zeros((1, 1, 1), F), np.zeros((1, 1), F)  # where there are none


def slopes_of(problem: Problem) -> np.ndarray:
    """ALiBi's slopes in Q8.8, one 0 for none."""
    slopes = problem.alibi_slopes
    return ONE_SLOPE if slopes is None else np.ascontiguousarray(slopes.astype(F) * fx.LOG2E_Q8)


def semantics(problem: Problem, extreme: bool, shift: np.ndarray | None) -> Semantics:
    """The options of a problem as the kernels take them; scores are in Q8.8 (256 per octave).

    extreme : scores may be too large to be rounded to int16 at once;  shift : `scores.cap_shift`
        where there is a softcap
    """
    nb, nh, _, length, _, _, _ = problem.shape
    no_shift = np.zeros((nb, nh, length), F) if problem.softcap else ONE_SHIFT
    return Semantics(
        *edges_and_masks(problem, extreme),
        F(problem.softcap) * fx.LOG2E_Q8,
        no_shift if shift is None else shift,
        slopes_of(problem),
        extreme,
        functions_of(problem),
    )


def from_integers(problem: Problem, isa: str) -> tuple[Operands, float]:
    """Operands of QuantizedTensors, packed, and a bound of all scores."""
    q = problem.query
    k = problem.key
    v = problem.value
    dv = problem.shape[6]
    cq, ck = combined_scale(q, k, problem.scale, problem.softcap)
    unit = score_unit(problem.scale, problem.softcap)
    precise = problem.pv in fx.FLOAT_VALUES
    if precise:
        v, units, bad = float_values(v)
        if problem.pv == "bf16":
            v = convert(v, "bfloat16")
        v_scale = units.reshape(-1, dv)
    else:
        v_scale, bad = heads(v.scale)[:, 0], v.nonfinite
    if bad is not None:
        ck = np.where(bad, F(np.nan), ck)
    if isa == "portable":
        keys: Any = portable.pad_keys(heads(k.data)), portable.pad_keys(heads(ck))
        values = (
            portable.arrange_values(heads(widen(v)), heads(bad))
            if precise
            else portable.arrange_values(heads(v.data))
        )
        columns = padded(dv, portable.NR)
    else:
        keys = pack_keys(isa, heads(k.data), heads(ck))
        if not precise:
            values = pack_values(isa, heads(v.data))
        elif floats_of(isa, problem.pv).group == 2:
            values = bfloat16_pairs(isa, heads(v))
        else:
            values = float_rows(isa, heads(widen(v)), heads(bad))
        columns = values.shape[1] // max(1, keys.start.shape[1])
    if precise:
        first = no_first_keys(len(v_scale), columns)
    else:
        first = first_keys(
            heads(k.finer_rows()), heads(v.finer_rows()), heads(ck), columns, problem.first_keys
        )
    most = most_score.py_func(unit, largest(q.scale), largest(k.scale), problem.shape[5])
    return Operands(heads(q.data), heads(cq), keys, values, first, v_scale), most


def stream_of(problem: Problem, isa: str) -> int:
    """The address of the software-pipelined stream for these head sizes, or 0 where there is none."""
    if not VECTOR_ISAS[isa].tiled or problem.pv != "int8":
        return 0
    changed = problem.functions is not None and problem.functions.changes_scores
    return amx_stream.address_of(problem.shape[5], problem.shape[6], changed)


def run_general(
    problem: Problem, isa: str, shaped: np.ndarray
) -> tuple[np.ndarray, np.ndarray | None]:
    """Attention of operands of all kinds: `shaped`, (B, H, L, Dv) float32 whose rows are contiguous, is
    written.

    Returns
    -------
    out (B, H, L, Dv), which is `shaped`; lse (B, H, L) float32, or None where nobody asks for it
    """
    if isinstance(problem.query, np.ndarray):
        problem = quantize_problem(problem)
    isa, tile_rows = chosen(isa)
    operands, most = from_integers(problem, isa)
    nb, nh, nkv, length, s, _, _ = problem.shape
    options = semantics(problem, most >= MOST, cap_shift(problem) if problem.softcap else None)
    n = nb * nh
    m = fresh((n, length), np.int32)
    l = fresh((n, length), F)
    if isa == "portable":
        attend, stream = portable.make_attend(problem.pv), 0
    else:
        attend, stream = (
            flash_int8.make_attend(isa, problem.pv, *tile_rows),
            stream_of(problem, isa),
        )
    attend(
        operands,
        options,
        Sizes(nh, nkv, s, numba.get_num_threads(), stream),
        np.zeros(1, np.int64),
        Results(strided(shaped), m, l),
    )
    if not problem.return_lse and problem.sinks is None:
        return shaped, None
    shift = None
    if problem.smooths:
        shift = row_shift(problem.query, problem.key.offset, problem.scale)
    per_row = nb, nh, length
    one = fx.WEIGHT_ONE[problem.pv]
    return shaped, log_sum_exp(m.reshape(per_row), l.reshape(per_row), shift, one)
