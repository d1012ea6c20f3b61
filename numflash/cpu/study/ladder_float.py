"""Rungs 1 to 4 of the ladder, in float32 and plain loops: naive, online, tiled, packed.

One head: q (L, D), k (S, D), v (S, Dv), o (L, Dv), all float32; `scale` times log2(e), so that
weights are powers of two. What a rung needs beside its operands is an argument too, so that
`numflash.course.tracer` can count what it costs.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import inline, kernel

F = np.float32


@inline
def dot(x, y):
    total = F(0)
    for e in range(x.size):
        total += x[e] * y[e]
    return total


@inline
def add_scaled(out, p, value):
    """out += p * value"""
    for t in range(out.size):
        out[t] += p * value[t]


@inline
def add_rows(out, weights, rows):
    """out += weights @ rows, four rows an iteration.

    `out` is loaded and stored once for four multiply-adds.
    """
    whole = rows.shape[0] // 4 * 4
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
        r0, r1, r2, r3 = rows[j], rows[j + 1], rows[j + 2], rows[j + 3]
        for t in range(out.size):
            out[t] += w0 * r0[t] + w1 * r1[t] + w2 * r2[t] + w3 * r3[t]
    for j in range(whole, rows.shape[0]):
        add_scaled(out, weights[j], rows[j])


@inline
def multiply(out, factor):
    for t in range(out.size):
        out[t] *= factor


@kernel(float_math=True)
def naive(q, k, v, scale, s, o):
    """Rung 1: the definition.

    The whole matrix of scores s (L, S) is written, read and written again by every pass.
    """
    for i in range(q.shape[0]):  # S = Q.K^T
        query, row = q[i], s[i]
        for j in range(k.shape[0]):
            row[j] = dot(query, k[j]) * scale
    for i in range(q.shape[0]):  # softmax: the maximum, the weights and their sum, the quotients
        row, m, l = s[i], F(-np.inf), F(0)
        for j in range(row.size):
            m = max(m, row[j])
        for j in range(row.size):
            row[j] = np.exp2(row[j] - m)
            l += row[j]
        multiply(row, F(1) / l)
    for i in range(q.shape[0]):  # O = P.V
        out, row = o[i], s[i]
        out[:] = F(0)
        for j in range(row.size):
            add_scaled(out, row[j], v[j])


@kernel(float_math=True)
def online(q, k, v, scale, o):
    """Rung 2: one pass (Milakov and Gimelshein 2018). No matrix.

    When a larger score comes, what was summed shrinks.
    """
    for i in range(q.shape[0]):
        query, out, m, l = q[i], o[i], F(-np.inf), F(0)
        out[:] = F(0)
        for j in range(k.shape[0]):
            s = dot(query, k[j]) * scale
            if s > m:
                shrink = np.exp2(m - s)
                l *= shrink
                multiply(out, shrink)
                m = s
            p = np.exp2(s - m)
            l += p
            add_scaled(out, p, v[j])
        if l > F(0):
            multiply(out, F(1) / l)


@inline
def softmax_row(s, m, l, out):
    """Scores s of one row and tile become weights, relative to the new maximum.

    Returns the new maximum and the new sum of weights; what `out` has summed shrinks.
    """
    top = m
    for j in range(s.size):
        top = max(top, s[j])
    if top > m:
        shrink = np.exp2(m - top)
        l *= shrink
        multiply(out, shrink)
    for j in range(s.size):
        s[j] = np.exp2(s[j] - top)
        l += s[j]
    return top, l


@functools.cache
def make_tiled(block_q: int, block_k: int):
    """Rung 3: tiles of block_q rows and block_k keys (FlashAttention, Dao et al. 2022).

    s (block_q, block_k), m and l (block_q,): the scores of a tile, the maximum and the sum of each
    of its rows.
    """

    @kernel(float_math=True)
    def tiled(q, k, v, scale, s, m, l, o):
        for row in range(0, q.shape[0], block_q):
            q_tile, o_tile = q[row : row + block_q], o[row : row + block_q]
            for i in range(q_tile.shape[0]):
                m[i], l[i] = F(-np.inf), F(0)
                o_tile[i][:] = F(0)
            for c in range(0, k.shape[0], block_k):
                k_tile, v_tile = k[c : c + block_k], v[c : c + block_k]
                keys = k_tile.shape[0]
                for i in range(q_tile.shape[0]):
                    query, line = q_tile[i], s[i]
                    for j in range(keys):
                        line[j] = dot(query, k_tile[j]) * scale
                for i in range(q_tile.shape[0]):
                    m[i], l[i] = softmax_row(s[i][:keys], m[i], l[i], o_tile[i])
                for i in range(q_tile.shape[0]):
                    line, out = s[i], o_tile[i]
                    for j in range(keys):
                        add_scaled(out, line[j], v_tile[j])
            for i in range(q_tile.shape[0]):
                if l[i] > F(0):
                    multiply(o_tile[i], F(1) / l[i])

    return tiled


@kernel
def pack(k, packed):
    """packed (blocks, D, block_k) = k transposed block by block; keys that do not exist hold 0."""
    for b in range(packed.shape[0]):
        block = packed[b]
        for j in range(block.shape[1]):
            n = b * block.shape[1] + j
            for e in range(k.shape[1]):
                block[e, j] = k[n, e] if n < k.shape[0] else F(0)


@functools.cache
def make_packed(block_q: int, block_k: int):
    """Rung 4: k packed (blocks, D, block_k), so that a vector holds keys and no sum crosses its
    lanes; else as rung 3.
    """

    @kernel(float_math=True)
    def packed(q, k, v, scale, s, m, l, o):
        for row in range(0, q.shape[0], block_q):
            q_tile, o_tile = q[row : row + block_q], o[row : row + block_q]
            for i in range(q_tile.shape[0]):
                m[i], l[i] = F(-np.inf), F(0)
                o_tile[i][:] = F(0)
            for b in range(k.shape[0]):
                k_tile, v_tile = k[b], v[b * block_k : (b + 1) * block_k]
                keys = v_tile.shape[0]
                for i in range(q_tile.shape[0]):
                    query, line = q_tile[i], s[i]
                    line[:] = F(0)
                    add_rows(line, query, k_tile)
                    multiply(line, scale)
                for i in range(q_tile.shape[0]):
                    m[i], l[i] = softmax_row(s[i][:keys], m[i], l[i], o_tile[i])
                for i in range(q_tile.shape[0]):
                    line, out = s[i], o_tile[i]
                    add_rows(out, line, v_tile)
            for i in range(q_tile.shape[0]):
                if l[i] > F(0):
                    multiply(o_tile[i], F(1) / l[i])

    return packed
