"""From a validated problem to the INT8 kernels: packing, options as arrays, and the log-sum-exp."""

from __future__ import annotations

import numba
import numpy as np

from .. import fixedpoint as fx
from ..scores import cap_shift, combined_scale, largest, log_sum_exp, row_shift, score_unit
from ..validation import Problem
from .int8 import flash_int8, portable
from .int8.packing import float_rows, pack_keys, pack_values
from .launch_float import NO_LIMIT, Results, compact, heads
from .semantics import Semantics

F = np.float32


def semantics(problem: Problem, extreme: bool) -> Semantics:
    """The options of a problem as the kernels take them; scores are in Q8.8 (256 per octave)."""
    nb, nh, _, length, _, _, _ = problem.shape
    has_mask, has_bias, slopes = (
        problem.mask is not None,
        problem.bias is not None,
        problem.alibi_slopes,
    )
    shift = cap_shift(problem) if problem.softcap else None
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
    )


def run(
    problem: Problem, isa: str, results: Results = None
) -> tuple[np.ndarray, np.ndarray | None]:
    """`precision="int8"` on the CPU; query, key and value are QuantizedTensors. Returns out and lse, both float32.

    out is the first of `results` if these are given.
    """
    nb, nh, nkv, length, s, d, dv = problem.shape
    q, k, v = problem.query, problem.key, problem.value
    cq, ck = combined_scale(q, k, problem.scale, problem.softcap)
    precise = problem.pv == "fp32"
    bad = ~np.isfinite(v).all(-1) if precise else v.nonfinite
    if bad is not None:
        ck = np.where(bad, F(np.nan), ck)
    most = (
        abs(score_unit(problem.scale, problem.softcap))
        * largest(q.scale)
        * largest(k.scale)
        * 128
        * 128
        * d
    )
    options = semantics(problem, most >= 2.0**30)
    n = nb * nh
    shaped = np.empty((nb, nh, length, dv), F) if results is None else results[0]
    out = shaped.reshape(n, length, dv)
    m, l = np.empty((n, length), np.int32), np.empty((n, length), F)
    v_scale = np.ones((nb * nkv, dv), F) if precise else heads(v.scale)[:, 0]
    rest = v_scale, options, (nh, nkv, numba.get_num_threads()), s, np.zeros(1, np.int64), out, m, l
    if isa == "portable":
        values = (
            portable.arrange_values(heads(v), heads(bad))
            if precise
            else portable.arrange_values(heads(v.data))
        )
        keys = portable.pad_keys(heads(k.data)), portable.pad_keys(heads(ck))
        portable.make_attend(problem.pv)(heads(q.data), heads(cq), *keys, values, *rest)
    else:
        values = (
            float_rows(isa, heads(v), heads(bad)) if precise else pack_values(isa, heads(v.data))
        )
        flash_int8.make_attend(isa, problem.pv)(
            heads(q.data), heads(cq), pack_keys(isa, heads(k.data), heads(ck)), values, *rest
        )
    if not problem.return_lse and problem.sinks is None:
        return shaped, None
    shift = None if problem.softcap else row_shift(q, k, problem.scale)
    return shaped, log_sum_exp(
        m.reshape(nb, nh, length), l.reshape(nb, nh, length), shift, 1 if precise else fx.P_ONE
    )
