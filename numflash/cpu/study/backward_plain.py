"""The gradient of attention in plain loops, float32.

Read this first, then `cpu.backward`, which does the same with register tiles.

FlashAttention 2, algorithm 2 (Dao 2023). The forward pass saved one number per row, LSE = log(sum
of exp(scores)), from which any tile of the weights can be computed again, so nothing of size L x S
is ever stored. With dO the gradient of the output O:

    P  = exp(S - LSE)            S = Q.K^T * scale
    dV = P^T.dO
    dP = dO.V^T
    dS = P * (dP - D)            D = rowsum(dO * O): what the softmax's own normalisation takes back
    dK = dS^T.Q * scale
    dQ = dS.K * scale

Two passes, each over tiles that no other worker writes: key blocks for dK and dV, query blocks for
dQ. So there are no atomic additions and every sum has one order, whatever the number of threads;
the price is that S and dP are computed twice, seven products instead of five.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import prange

from ...jit.compiler import inline, kernel
from ...numerics.fixedpoint import LOG2E

F = np.float32
BLOCK = 32  # queries and keys of a tile: p and ds together are 8 KiB


class Given(NamedTuple):
    """What the gradients are made of.

    Rows without keys have an `lse` of +inf.
    """

    q: np.ndarray  # (N, L, D) float32
    k: np.ndarray  # (Nkv, S, D)
    v: np.ndarray  # (Nkv, S, Dv)
    do: np.ndarray  # (N, L, Dv)
    lse: np.ndarray  # (N, L) in units of log2
    delta: np.ndarray  # (N, L)
    scale: np.float32  # in units of log2
    causal: bool


@inline
def dot_products(a, b, out):
    """out[i, j] = a[i] . b[j]: a (M, D), b (N, D)."""
    for i in range(a.shape[0]):
        row = a[i]
        for j in range(b.shape[0]):
            column, total = b[j], F(0)
            for e in range(row.size):
                total += row[e] * column[e]
            out[i, j] = total


@inline
def add_rows(weights, rows, out):
    """out += sum over j of weights[j] * rows[j]: weights (N,), rows (N, D), out (D,)."""
    for j in range(weights.size):
        w, row = weights[j], rows[j]
        for e in range(out.size):
            out[e] += w * row[e]


@inline
def tile_gradients(q, k, v, do, lse, delta, scale, first_key, p, ds):
    """Weights p and score gradients ds of one tile, both (M, N).

    Row i attends to the keys below first_key[i], counted in the tile.
    """
    dot_products(q, k, p)
    dot_products(do, v, ds)
    for i in range(q.shape[0]):
        for j in range(k.shape[0]):
            p[i, j] = np.exp2(F(F(p[i, j] * scale) - lse[i])) if j < first_key[i] else F(0)
            ds[i, j] = p[i, j] * (ds[i, j] - delta[i])


@inline
def seen_keys(first_row, rows, key, causal, seen):
    """seen[i]: how many keys of a block that starts at `key` row first_row + i attends to."""
    for i in range(rows):
        seen[i] = first_row + i - key + 1 if causal else BLOCK


@kernel(parallel=True, float_math=True)
def key_pass(given, dk, dv):
    """dK and dV: a worker owns a block of keys and goes through all queries that see it.

    given : `Given`;  dk, dv : as k and v, without the factor of the scores
    """
    q, k, v, do, lse, delta, scale, causal = given
    n_kv, s, _ = k.shape
    group, length, blocks = q.shape[0] // max(1, n_kv), q.shape[1], (s + BLOCK - 1) // BLOCK
    for task in prange(n_kv * blocks):
        n_key, j = np.intp(task) // blocks, np.intp(task) % blocks * BLOCK
        z = min(j + BLOCK, s)
        p = np.empty((BLOCK, BLOCK), F)
        ds = np.empty((BLOCK, BLOCK), F)
        seen = np.empty(BLOCK, np.int64)
        transposed = np.empty((BLOCK, BLOCK), F)
        dk[n_key, j:z], dv[n_key, j:z] = F(0), F(0)
        for n in range(n_key * group, (n_key + 1) * group):
            first = j // BLOCK * BLOCK if causal else 0
            for i in range(first, length, BLOCK):
                y = min(i + BLOCK, length)
                seen_keys(i, y - i, j, causal, seen)
                tile_gradients(
                    q[n, i:y],
                    k[n_key, j:z],
                    v[n_key, j:z],
                    do[n, i:y],
                    lse[n, i:y],
                    delta[n, i:y],
                    scale,
                    seen,
                    p,
                    ds,
                )
                for which in range(2):
                    source = p if which == 0 else ds
                    for r in range(y - i):
                        for c in range(z - j):
                            transposed[c, r] = source[r, c]
                    for c in range(z - j):
                        if which == 0:
                            add_rows(transposed[c, : y - i], do[n, i:y], dv[n_key, j + c])
                        else:
                            add_rows(transposed[c, : y - i], q[n, i:y], dk[n_key, j + c])


@kernel(parallel=True, float_math=True)
def query_pass(given, dq):
    """dQ: a worker owns a block of queries and goes through all keys that they see.

    given : `Given`;  dq : as q, without the factor of the scores
    """
    q, k, v, do, lse, delta, scale, causal = given
    n_heads, length, _ = q.shape
    group, s, blocks = n_heads // max(1, k.shape[0]), k.shape[1], (length + BLOCK - 1) // BLOCK
    for task in prange(n_heads * blocks):
        n, i = np.intp(task) // blocks, np.intp(task) % blocks * BLOCK
        y, n_key = min(i + BLOCK, length), np.intp(task) // blocks // group
        p = np.empty((BLOCK, BLOCK), F)
        ds = np.empty((BLOCK, BLOCK), F)
        seen = np.empty(BLOCK, np.int64)
        dq[n, i:y] = F(0)
        last = min(s, y) if causal else s
        for j in range(0, last, BLOCK):
            z = min(j + BLOCK, s)
            seen_keys(i, y - i, j, causal, seen)
            tile_gradients(
                q[n, i:y],
                k[n_key, j:z],
                v[n_key, j:z],
                do[n, i:y],
                lse[n, i:y],
                delta[n, i:y],
                scale,
                seen,
                p,
                ds,
            )
            for r in range(y - i):
                add_rows(ds[r, : z - j], k[n_key, j:z], dq[n, i + r])


def backward(
    grad_out: np.ndarray,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    out: np.ndarray,
    lse: np.ndarray,
    is_causal: bool = False,
    scale: float | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK and dV of attention, for arrays (B, H, L, D) and (B, Hkv, S, D) float32.

    `out` and `lse` from the forward pass.

    The diagonal of `is_causal` starts in the upper left corner, as in PyTorch.
    `numflash.attention_backward` is the one to use.
    """
    q, do, o = (np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for x in (query, grad_out, out))
    k, v = (np.ascontiguousarray(x).reshape(-1, *x.shape[2:]) for x in (key, value))
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    rows = (lse * LOG2E).astype(F).reshape(q.shape[:2])
    given = Given(
        q,
        k,
        v,
        do,
        np.where(np.isneginf(rows), F(np.inf), rows),
        np.einsum("nld,nld->nl", do, o),
        F(factor * LOG2E),
        is_causal,
    )
    dq, dk, dv = np.empty_like(q), np.empty_like(k), np.empty_like(v)
    key_pass(given, dk, dv)
    query_pass(given, dq)
    return (
        (dq * F(factor)).reshape(query.shape),
        (dk * F(factor)).reshape(key.shape),
        dv.reshape(value.shape),
    )
