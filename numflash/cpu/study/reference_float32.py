"""The parallel float32 reference of the A64FX summary (docs/sources.md).

One query row per step, its scores in full, threads over rows.

`Fused FlashAttention V2`, "Parallel Reference Verification": score row, softmax, weighted sum of V,
`omp parallel for` over rows. No tiles, nothing fused: what a plain loop gives when the compiler
vectorises it, and a second opinion on large problems where the float64 oracle would take minutes.
Threads: all of Numba's, or as many as given.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from ...errors import UnsupportedError
from ...jit.compiler import kernel
from ...jit.threads import limit
from ...validation import Problem

F = np.float32


@kernel(parallel=True, float_math=True)
def attend_rows(q, k, v, scale, causal, workers, out):
    """q (N, L, D), k (Nkv, S, D), v (Nkv, S, Dv), out (N, L, Dv), all float32.

    N / Nkv query heads share a key head.
    """
    n_heads, length, _ = q.shape
    s_len, share = k.shape[1], n_heads // k.shape[0]
    scores = np.empty((workers, s_len), np.float32)  # an exception inside prange would be lost
    for worker in prange(workers):
        s = scores[worker]
        # rows in turn: causal work balances
        for task in range(np.intp(worker), n_heads * length, workers):
            n, i = task // length, task % length
            keys, values = k[n // share], v[n // share]
            row, o = q[n, i], out[n, i]
            stop = min(s_len, i + 1) if causal else s_len
            m = F(-np.inf)
            for j in range(stop):
                key, dot = keys[j], F(0)
                for t in range(row.size):
                    dot += row[t] * key[t]
                s[j] = dot * scale
                m = max(m, s[j])
            l = F(0)
            o[:] = F(0)
            for j in range(stop):
                p, value = np.exp(s[j] - m), values[j]
                l += p
                for t in range(o.size):
                    o[t] += p * value[t]
            r = F(1) / l
            for t in range(o.size):
                o[t] *= r


def run(problem: Problem, threads: int | None = None) -> np.ndarray:
    """Attention of a float32 problem, full or causal and nothing else; out (B, H, L, Dv) float32.

    Raises
    ------
    UnsupportedError
        The problem needs more than that.
    """
    more = (problem.mask, problem.bias, problem.alibi_slopes, problem.sinks, problem.left)
    if (
        any(x is not None for x in more)
        or problem.softcap
        or problem.right not in (None, 0)
        or problem.diagonal.any()
        or problem.precision != "float32"
        or (problem.key_lengths != problem.shape[4]).any()
    ):
        raise UnsupportedError(
            "the float32 reference does full and causal attention in float32 only"
        )
    b, h, hkv, length, s, d, dv = problem.shape
    out = np.empty((b, h, length, dv), np.float32)
    q, k, v = (
        np.ascontiguousarray(x).reshape(-1, *x.shape[2:])
        for x in (problem.query, problem.key, problem.value)
    )
    with limit(threads) as workers:
        attend_rows(
            q, k, v, F(problem.scale), problem.right == 0, workers, out.reshape(b * h, length, dv)
        )
    return out
