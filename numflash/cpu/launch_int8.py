"""From a validated problem to the INT8 kernels.

Operands, options as arrays, threads, and the log-sum-exp.

Operands come from float arrays in one pass (`int8.quantize`), or are quantised already, by the
caller or the general way, and only packed here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numba
import numpy as np

from .. import fixedpoint as fx
from ..jit.memory import fresh
from ..quantization import QuantizedTensor, float_values, quantize_problem
from ..scores import LIMIT, cap_shift, combined_scale, largest, log_sum_exp, row_shift, score_unit
from ..tiling import chosen
from ..validation import Problem
from .int8 import amx_stream, flash_int8, portable
from .int8.packing import float_rows, pack_keys, pack_values
from .int8.quantize import quantize
from .isa.isas import VECTOR_ISAS
from .launch_float import NO_LIMIT, Results, compact, functions_of, heads
from .semantics import Semantics

F = np.float32
MOST = 2.0**30  # scores from here on are not rounded to int32 at once


class Operands(NamedTuple):
    """What the kernels take, for N query heads and Nkv KV heads.

    query : (N, L, D) int8;  query_scale : (N, L) float32, in Q8.8 or units of the softcap
    keys : `PackedKeys`, or what `portable` takes;  values : as packed;  value_scale : (Nkv, Dv)
        float32
    most : no score is larger than this
    cap_shift, row_shift : functions f() of `scores`, for options that need them
    """

    query: np.ndarray
    query_scale: np.ndarray
    keys: Any
    values: np.ndarray
    value_scale: np.ndarray
    most: float
    cap_shift: Callable[[], np.ndarray | None]
    row_shift: Callable[[], np.ndarray | None]


def semantics(problem: Problem, extreme: bool, shift: np.ndarray | None) -> Semantics:
    """The options of a problem as the kernels take them; scores are in Q8.8 (256 per octave).

    extreme : scores may be too large to be rounded to int16 at once;  shift : `scores.cap_shift`
        where there is a softcap
    """
    nb, nh, _, length, _, _, _ = problem.shape
    has_mask = problem.mask is not None
    has_bias = problem.bias is not None
    slopes = problem.alibi_slopes
    return Semantics(
        NO_LIMIT if problem.left is None else problem.left,
        NO_LIMIT if problem.right is None else problem.right,
        np.asarray(problem.diagonal, np.int64),
        np.asarray(problem.key_lengths, np.int64),
        extreme or has_mask or has_bias or bool(problem.softcap) or slopes is not None,
        compact(problem.mask, np.uint8),
        compact(problem.bias, F),
        has_mask,
        has_bias,
        F(problem.softcap) * fx.LOG2E_Q8,
        np.zeros((nb, nh, length) if problem.softcap else (1, 1, 1), F) if shift is None else shift,
        np.zeros((1, 1), F)
        if slopes is None
        else np.ascontiguousarray(slopes.astype(F) * fx.LOG2E_Q8),
        extreme,
        functions_of(problem),
    )


def most_of(problem: Problem, query_scale: float, key_scale: float) -> float:
    """A bound of all scores, from the largest scales."""
    unit = abs(score_unit(problem.scale, problem.softcap))
    return unit * query_scale * key_scale * 128 * 128 * problem.shape[5]


def from_floats(problem: Problem, isa: str) -> Operands | None:
    """Operands of float arrays, in one pass; None where only the general way is right."""
    unit = score_unit(problem.scale, problem.softcap)
    if isa == "portable" or abs(unit) >= LIMIT:
        return None
    found = quantize(problem, isa, unit)
    if found is None or found[1] * abs(unit) >= LIMIT:
        return None
    to, query_scale, key_scale = found
    b, h, hkv, length, _, d, _ = problem.shape

    def shift() -> np.ndarray | None:
        query = QuantizedTensor(
            to.q.reshape(b, h, length, d), to.q_scale.reshape(b, h, length, 1), "row"
        )
        return row_shift(query, to.offset.reshape(b, hkv, 1, d), problem.scale)

    most = most_of(problem, query_scale, key_scale)
    # with a softcap nothing is taken off the keys
    return Operands(to.q, to.cq, to.keys, to.values, to.v_scale, most, lambda: None, shift)


def from_integers(problem: Problem, isa: str) -> Operands:
    """Operands of QuantizedTensors, packed."""
    q = problem.query
    k = problem.key
    v = problem.value
    dv = problem.shape[6]
    cq, ck = combined_scale(q, k, problem.scale, problem.softcap)
    precise = problem.pv == "fp32"
    if precise:
        v, units, bad = float_values(v)
        v_scale = units.reshape(-1, dv)
    else:
        v_scale, bad = heads(v.scale)[:, 0], v.nonfinite
    if bad is not None:
        ck = np.where(bad, F(np.nan), ck)
    if isa == "portable":
        keys: Any = portable.pad_keys(heads(k.data)), portable.pad_keys(heads(ck))
        values = (
            portable.arrange_values(heads(v), heads(bad))
            if precise
            else portable.arrange_values(heads(v.data))
        )
    else:
        keys = pack_keys(isa, heads(k.data), heads(ck))
        values = (
            float_rows(isa, heads(v), heads(bad)) if precise else pack_values(isa, heads(v.data))
        )
    return Operands(
        heads(q.data),
        heads(cq),
        keys,
        values,
        v_scale,
        most_of(problem, largest(q.scale), largest(k.scale)),
        lambda: cap_shift(problem),
        lambda: row_shift(q, k.offset, problem.scale),
    )


def stream_of(problem: Problem, isa: str) -> int:
    """The address of the woven stream for these head sizes, or 0 where there is none."""
    if not VECTOR_ISAS[isa].tiled or problem.pv == "fp32":
        return 0
    return amx_stream.address_of(problem.shape[5], problem.shape[6])


def run(
    problem: Problem, isa: str, results: Results = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """`precision="int8"` on the CPU. Returns out and lse, both float32.

    Out is the first of `results` if these are given.

    problem : its query, key and value are QuantizedTensors, or all three are float arrays
    """
    isa, rows = chosen(isa)
    x = from_floats(problem, isa) if isinstance(problem.query, np.ndarray) else None
    if x is None:
        if isinstance(problem.query, np.ndarray):
            problem = quantize_problem(problem)
        x = from_integers(problem, isa)
    nb, nh, nkv, length, s, _, dv = problem.shape
    options = semantics(problem, x.most >= MOST, x.cap_shift() if problem.softcap else None)
    n = nb * nh
    shaped = fresh((nb, nh, length, dv), F) if results is None else results[0]
    out = shaped.reshape(n, length, dv)
    m = fresh((n, length), np.int32)
    l = fresh((n, length), F)
    sizes = (nh, nkv, numba.get_num_threads())
    counter = np.zeros(1, np.int64)
    if isa != "portable":
        sizes = (*sizes, stream_of(problem, isa))  # type: ignore[assignment]
    rest = x.values, x.value_scale, options, sizes, s, counter, out, m, l
    if isa == "portable":
        portable.make_attend(problem.pv)(x.query, x.query_scale, *x.keys, *rest)
    else:
        flash_int8.make_attend(isa, problem.pv, *rows)(x.query, x.query_scale, x.keys, *rest)
    if not problem.return_lse and problem.sinks is None:
        return shaped, None
    shift = x.row_shift() if problem.smooths else None
    one = 1 if problem.pv == "fp32" else fx.P_ONE
    rows = nb, nh, length
    return shaped, log_sum_exp(m.reshape(rows), l.reshape(rows), shift, one)
