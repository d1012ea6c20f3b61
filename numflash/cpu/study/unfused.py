"""The unfused INT8 pipeline of the A64FX status note (docs/sources.md).

S = Q.K^T for all keys, then softmax in passes over S, each a kernel of its own.

`INT8 GEMM + FlashAttention status`. Scores are int32, tiles 48 x 128 (`tiling`
"a64fx-unfused-48x128"), register tiles 6 rows high; softmax is in integers: t = round(S * scale) in
Q8.8, weights 2**(t - maximum) in Q16.16.

* `make_gemm`: every tile straight to S, or by one or two buffers in the first-level cache ("Key
  Optimizations", 2).
* `make_gqa`: several query heads against each tile of K while it is in the cache.
* `maxima`, `make_exponentials`, `normalise`: the three passes ("Three-pass requirement").
* `make_gemm(..., maxima=True)`: the row maxima from the product itself, so that softmax needs two
  passes ("Two-pass algorithm").
* `make_gemm(..., ahead=True)`: the next panel of K is prefetched, by hints that its lines are used
  once (`pldl2strm`, "Prefetching").
* `make_strip`: 48 rows of S at a time, which stay in the second-level cache until softmax has read
  them ("L2 tiling").
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...errors import ArgumentError, UnsupportedError
from ...jit import target
from ...jit.compiler import inline, kernel
from ...numerics import fixedpoint as fx
from ...tiling import TILINGS
from ..int8.packing import PackedKeys, pack_keys
from ..isa.dot_loop import Panel, dot_loop
from ..isa.isas import VECTOR_ISAS, lanes_of, padded
from ..isa.operands import Packed, Rows, flat
from ..isa.vectors import I32, data, load, prefetch_once, store

F, I, U = np.float32, np.int32, np.uint32
# dot products of vectors, not of matrices
ISAS = {name: isa for name, isa in VECTOR_ISAS.items() if 6 in isa.rows}
TILING = TILINGS["a64fx-unfused-48x128"]
BLOCK_Q, KEYS, MR = TILING.block_q, TILING.key_block, TILING.mr
ROUND = F(1.5 * 2.0**23)  # x + ROUND - ROUND is x rounded to even, |x| < 2**22
UNSEEN = I(-(1 << 31))
LINE = 64  # elements of K between two prefetches: a line of int8, of the shortest lines
SUMMED = 16384  # weights of 1.0 (65536) whose sum fits int32


class Operands(NamedTuple):
    """q (H, rows, channels) first dot operand, rows padded to a multiple of 6.

    Keys of Hkv heads, padded to a multiple of 128.
    """

    q: np.ndarray
    keys: PackedKeys


def best_isa() -> str:
    """The best instruction set of this machine that has register tiles of 6 rows.

    "portable" where there is none.
    """
    return next(isa for isa in target.available() if isa in ISAS or isa == "portable")


def operands(isa_name: str, q: np.ndarray, k: np.ndarray) -> Operands:
    """Pack q (H, L, D) and k (Hkv, S, D), both int8, for `isa_name`.

    Raises
    ------
    ArgumentError, UnsupportedError
    """
    if target.require(isa_name) not in ISAS:
        raise UnsupportedError(
            f"isa: {isa_name!r} has no register tiles of 6 rows; allowed: {', '.join(map(repr, ISAS))}"
        )
    for name, x in (("q", q), ("k", k)):
        if x.ndim != 3 or x.dtype != np.int8 or not x.size:
            raise ArgumentError(
                f"{name}: got {x.dtype} {x.shape}; allowed: int8 of three dimensions, none of them 0"
            )
    if q.shape[2] != k.shape[2] or q.shape[0] % k.shape[0]:
        raise ArgumentError(
            f"k: got {k.shape} for q {q.shape}; allowed: the same last dimension, "
            f"and a divisor of {q.shape[0]} heads"
        )
    isa = ISAS[isa_name]
    rows = np.full(
        (q.shape[0], padded(q.shape[1], MR), padded(q.shape[2], isa.group)), isa.q_offset, np.int16
    )
    rows[:, : q.shape[1], : q.shape[2]] += q
    return Operands(
        rows.astype(np.uint8) if isa.group == 4 else rows,
        pack_keys(isa_name, k, np.ones(k.shape[:2], F)),
    )


@functools.cache
def make_tile(name: str):
    """Intrinsic f(q: Rows, k: Packed, groups, start: Packed, s: Rows).

    Writes s[6, panel] int32 = q . k, in key order.
    """
    isa = ISAS[name]

    @intrinsic
    def tile(typingctx, q, k, groups, start, s):
        def codegen(context, b, sig, args):
            target.guard(name, context.codegen())
            kinds, a = flat(b, sig, args)
            pq, pk, pb, ps = (data(context, b, kinds[n], a[n]) for n in (0, 3, 6, 8))
            first = [
                load(b, pb, b.add(a[7], isa.elements(b, v)), isa.vector(I32), 4)
                for v in range(isa.nv)
            ] * MR
            for m, sums in enumerate(
                dot_loop(
                    b,
                    isa,
                    isa.score_dot,
                    Rows(pq, a[1], a[2]),
                    Panel(pk, a[4]),
                    a[5],
                    first,
                    isa.nv,
                )
            ):
                where = b.add(a[9], b.mul(a[10], a[10].type(m)))
                for v in range(0, isa.nv, 2):
                    for n, x in enumerate(isa.in_order(b, sums[v], sums[v + 1])):
                        store(b, x, ps, b.add(where, isa.elements(b, v + n)), 4)
            return context.get_dummy_value()

        return types.void(q, k, groups, start, s), codegen

    return tile


@functools.cache
def make_rows(isa_name: str):
    """Inline f(q, i, k, start, c, s, s_off, s_stride).

    The scores of 6 rows of q from row i on against 128 keys from key c on.
    """
    isa, tile, lanes = ISAS[isa_name], make_tile(isa_name), lanes_of(isa_name)
    group, nv = isa.group, isa.nv

    @inline
    def six_rows(q, i, k, start, c, s, s_off, s_stride):
        stride, panel = q.shape[1], nv * lanes()
        for j in range(0, KEYS, panel):
            key = c + j
            rows, to = Rows(q, i * stride, stride), Rows(s, s_off + j, s_stride)
            tile(rows, Packed(k, key * stride), stride // group, Packed(start, key), to)

    return six_rows


@intrinsic
def prefetch_at(typingctx, x, off):
    """Prefetch the cache line of element `off` of an int8 or int16 array, which is read once."""

    def codegen(context, b, sig, args):
        size = context.get_abi_sizeof(context.get_data_type(sig.args[0].dtype))
        place = b.gep(data(context, b, sig.args[0], args[0]), [b.mul(args[1], args[1].type(size))])
        prefetch_once(b, place)
        return context.get_dummy_value()

    return types.void(x, off), codegen


@inline
def raise_maxima(s, row, rows, c, top):
    """top[i] = the largest of top[i] and the 128 scores of each row from key c on."""
    for i in range(row, row + rows):
        line, m = s[i, c : c + KEYS], top[i]
        for j in range(line.size):
            m = max(m, line[j])
        top[i] = m


@functools.cache
def make_gemm(isa_name: str, buffers: int = 0, maxima: bool = False, ahead: bool = False):
    """Kernel f(q, k, start, s, top): s (rows, keys) int32 = q . k of one head.

    k and start are those of `PackedKeys`.

    buffers : 0 writes tiles straight to s; 1 computes a tile, then copies it; 2 computes a tile
        while it copies the one before
    maxima : raise top (rows,) int32 to the largest score of each row, from each tile while it is in
        the cache (`buffers` 0)
    ahead : prefetch the next 128 keys while the first rows of a tile are computed (`buffers` 0)
    """
    six_rows = make_rows(isa_name)

    @inline
    def fetch(k, first, size):
        for at in range(first, min(first + size, k.size), LINE):
            prefetch_at(k, at)

    @kernel
    def gemm(q, k, start, s, top):
        rows, keys = s.shape
        for row in range(0, rows, BLOCK_Q):
            height = min(BLOCK_Q, rows - row)
            for c in range(0, keys, KEYS):
                if ahead:
                    fetch(k, (c + KEYS) * q.shape[1], KEYS * q.shape[1])
                for i in range(row, row + height, MR):
                    six_rows(q, i, k, start, c, s, i * keys + c, keys)
                if maxima:
                    raise_maxima(s, row, height, c, top)

    @kernel
    def buffered(q, k, start, s, top):
        rows, keys = s.shape
        across = keys // KEYS
        tiles = (rows + BLOCK_Q - 1) // BLOCK_Q * across
        space, lag = np.empty((buffers, BLOCK_Q, KEYS), np.int32), buffers - 1
        for t in range(tiles + lag):
            row, c = t // across * BLOCK_Q, t % across * KEYS
            old_row, old_c = (t - lag) // across * BLOCK_Q, (t - lag) % across * KEYS
            new, old = space[t % buffers], space[(t - lag) % buffers]
            for i in range(0, BLOCK_Q, MR):
                if row + i < rows and t < tiles:
                    six_rows(q, row + i, k, start, c, new, i * KEYS, KEYS)
                if t >= lag:
                    for n in range(i, min(i + MR, rows - old_row)):
                        line, source = s[old_row + n, old_c : old_c + KEYS], old[n]
                        for j in range(KEYS):
                            line[j] = source[j]

    return buffered if buffers else gemm


@functools.cache
def make_gqa(isa_name: str):
    """Kernel f(q, k, start, s): all heads.

    A tile of K serves every query head of its group before the next one is read.

    q (H, rows, channels); k (Hkv, ...) and start (Hkv, keys) of `PackedKeys`; s (H, rows, keys)
    int32
    """
    six_rows = make_rows(isa_name)

    @kernel
    def gqa(q, k, start, s):
        heads, rows, keys = s.shape
        share = heads // k.shape[0]
        for g in range(k.shape[0]):
            for c in range(0, keys, KEYS):
                for h in range(g * share, (g + 1) * share):
                    for i in range(0, rows, MR):
                        six_rows(q[h], i, k[g], start[g], c, s[h], i * keys + c, keys)

    return gqa


@inline
def row_maximum(s):
    m = UNSEEN
    for j in range(s.size):
        m = max(m, s[j])
    return m


@kernel
def maxima(s, count, top):
    """Pass 1: top (rows,) int32 = the largest of the first `count` scores of each row of s (rows,
    keys).
    """
    for i in range(s.shape[0]):
        top[i] = row_maximum(s[i, :count])


@functools.cache
def make_row_exponentials(name: str):
    """Inline f(s, scale, top, e) -> total.

    One row of weights e in Q16.16 and their sum, by an exp2 of `fixedpoint.EXP2`.
    """
    exp2 = inline(fx.EXP2[name][0])

    @inline
    def row_exponentials(s, scale, top, e):
        t_top, total = I((F(top) * scale + ROUND) - ROUND), np.int64(0)
        for j in range(s.size):
            t = I((F(s[j]) * scale + ROUND) - ROUND)
            # np.minimum: min widens to int64
            e[j] = I(exp2(U(np.minimum(np.subtract(t_top, t), I(65535)))))
        for c in range(0, s.size, SUMMED):  # 32 bits overflow at 32768 equal keys
            some, part = e[c : c + SUMMED], I(0)
            for j in range(some.size):
                part = np.add(part, some[j])
            total += np.int64(part)
        return total

    return row_exponentials


@functools.cache
def make_exponentials(name: str):
    """Pass 2: kernel f(s, count, scale, top, e, l).

    Weights of the first `count` keys of each row, and their sums.

    s (rows, keys) int32;  scale : float32, scores to Q8.8;  top (rows,) int32;  e (rows, keys)
    int32 Q16.16;  l (rows,) int64
    """
    row_exponentials = make_row_exponentials(name)

    @kernel
    def exponentials(s, count, scale, top, e, l):
        for i in range(s.shape[0]):
            l[i] = row_exponentials(s[i, :count], scale, top[i], e[i, :count])

    return exponentials


@inline
def row_normalise(e, total, p):
    r = F(1) / F(total)
    for j in range(e.size):
        p[j] = F(e[j]) * r


@kernel
def normalise(e, count, l, p):
    """Pass 3: p (rows, keys) float32 = e / l."""
    for i in range(e.shape[0]):
        row_normalise(e[i, :count], l[i], p[i, :count])


@functools.cache
def make_strip(isa_name: str, exp2: str):
    """Kernel f(q, k, start, count, scale, p).

    p (rows, keys) float32, all three passes on 48 rows of S before the next 48.
    """
    six_rows, row_exponentials = make_rows(isa_name), make_row_exponentials(exp2)

    @kernel
    def strip(q, k, start, count, scale, p):
        rows, keys = p.shape
        s, e = np.empty((BLOCK_Q, keys), np.int32), np.empty(count, np.int32)
        for row in range(0, rows, BLOCK_Q):
            height = min(BLOCK_Q, rows - row)
            for c in range(0, keys, KEYS):
                for i in range(0, height, MR):
                    six_rows(q, row + i, k, start, c, s, i * keys + c, keys)
            for i in range(height):
                line = s[i, :count]
                total = row_exponentials(line, scale, row_maximum(line), e)
                row_normalise(e, total, p[row + i, :count])

    return strip
