"""The gradient of attention with register tiles: dQ, dK and dV in float32, with recomputation, in one order of summation.

The algorithm of `backward_plain` with five products instead of seven. A worker owns a KV head, or every `splits`-th block of its
keys, and computes a tile of weights and score gradients once, transposed (keys are rows, so that LSE and D lie along the lanes):

    S^T  = K.Q^T * scale * log2(e)        dP^T = V.dO^T                   (score_tile, against packed Q and dO)
    P^T  = 2**(S^T - LSE)                 dS^T = P^T * (dP^T - D)         (row_gradients)
    dV  += P^T.dO                         dK  += dS^T.Q                   (value_tile)
    dQ  += dS.K                           after dS^T is turned round in registers

dQ is the worker's own (one copy for each split, added up in order at the end), so nothing is atomic and equal inputs give equal
bits at every thread count: the number of splits follows from the shape alone. FlashAttention 2 adds dQ atomically, and in its
deterministic mode keeps copies as well.
"""
from __future__ import annotations

import functools
from typing import NamedTuple

import numba
import numpy as np
from numba import prange, types
from numba.extending import intrinsic

from ..._jit import inline, kernel, one_at_a_time
from ...errors import ArgumentError, UnsupportedError
from ...tiling import Buffer
from ...validation import Problem, problem
from .. import target
from ..float_packing import pack_keys, transpose
from ..float_tiles import FLOAT_ISAS, MR, exp2, for_vectors, score_tile, value_tile
from ..launch_decode import zeros
from ..packing import padded
from ..vectors import data, load, next_task, store

F = np.float32
KEYS, QUERIES = 144, 64                          # rows and columns of a tile: multiples of MR and of every panel
TASKS = 16                                       # shares that a problem is cut into, at least, where it has so many key blocks
LOG2E = 1 / np.log(2.0)
NO_LIMIT = 1 << 40
HIDDEN = F(-np.inf)
BUFFERS = (Buffer("K, V rows", KEYS, "d", "float32", 2), Buffer("dK, dV", KEYS, "d", "float32", 2),
           Buffer("Q, dO packed", QUERIES, "d", "float32", 2), Buffer("Q, dO rows", QUERIES, "d", "float32", 2),
           Buffer("dQ", QUERIES, "d", "float32"), Buffer("P, dS, dS^T", KEYS, QUERIES, "float32", 3))


class Scratch(NamedTuple):
    """Tiles of W workers, on cache lines: p, ds (W, KEYS, QUERIES) and turned (W, QUERIES + MR, KEYS), all float32."""

    p: np.ndarray
    ds: np.ndarray
    turned: np.ndarray


@functools.cache
def row_gradients(name: str):
    """Intrinsic f(x, dp, off, count, lse, delta, at): x = 2**(x - lse[at:]), dp = x * (dp - delta[at:]), `count` vectors."""
    isa = FLOAT_ISAS[name]

    @intrinsic
    def gradients(typingctx, x, dp, off, count, lse, delta, at):
        def codegen(context, b, sig, a):
            px, pd, pl, pm = (data(context, b, sig.args[n], a[n]) for n in (0, 1, 4, 5))

            def body(n, state):
                here, there = b.add(a[2], n), b.add(a[6], n)
                p = exp2(b, isa, b.fsub(load(b, px, here, isa.floats, 4), load(b, pl, there, isa.floats, 4)))
                ds = b.fmul(p, b.fsub(load(b, pd, here, isa.floats, 4), load(b, pm, there, isa.floats, 4)))
                store(b, p, px, here, 4)
                store(b, ds, pd, here, 4)
                return []
            for_vectors(b, a[3], isa.lanes, [], body)
            return context.get_dummy_value()
        return types.void(x, dp, off, count, lse, delta, at), codegen
    return gradients


@functools.cache
def make_backward(name: str):
    """The kernel of one instruction set: see its own words."""
    isa = FLOAT_ISAS[name]
    lanes, panel, nv = isa.lanes, isa.panel, isa.nv
    half = max(1, nv // 2) * lanes
    score, gradients, square = score_tile(name, nv, scaled=True), row_gradients(name), transpose(lanes)
    value1, value2, value4 = (value_tile(name, n) for n in (1, max(1, nv // 2), nv))

    @inline
    def add_product(a, rows, stride, b, at, steps, width, out, first):
        """out[first + i] += sum over `steps` of a[i] * b[at + step] for whole tiles of MR rows; b and out have rows of `width`."""
        t = 0
        while t < width:                                                # a chunk of b's columns stays in L1 for all rows
            n = panel if t + panel <= width else half if nv > 1 and t + half <= width else lanes
            for i in range(0, rows, MR):
                if n == panel:
                    value4(a, i * stride, stride, b, at * width + t, width, steps, out, (first + i) * width + t, width)
                elif n == half:
                    value2(a, i * stride, stride, b, at * width + t, width, steps, out, (first + i) * width + t, width)
                else:
                    value1(a, i * stride, stride, b, at * width + t, width, steps, out, (first + i) * width + t, width)
            t += n

    @inline
    def visible_queries(limits, b, key, s):
        """First query that sees a key, and the one after the last."""
        left, right, diagonal, key_lengths = limits
        if key >= min(s, key_lengths[b]):
            return 0, 0
        return max(0, key - diagonal[b] - right), max(0, key - diagonal[b] + left + 1)

    @kernel(parallel=True)
    def run(q, q_packed, do, do_packed, k, v, lse, delta, c, limits, sizes, counter, scratch, dq, dk, dv):
        """All shares of all KV heads.

        q (N, padded L, columns), do (N, padded L, value columns), k, v (Nkv, padded S, ...) float32 in rows of whole vectors,
        padded with zeros; q_packed, do_packed (N, ...) in panels; lse (N, padded L) in units of log2, +inf for a row that sees
        nothing; delta (N, padded L); c float32 scale * log2(e); limits = (left, right, diagonal (B,), key_lengths (B,));
        sizes = (group, Hkv, S, splits, workers); counter (1,) int64 zero;
        scratch Scratch; dq (splits, N, padded L + MR, columns) zeros; dk, dv as k and v: all without the factor of the scores.
        """
        group, h_kv, s, splits, workers = sizes
        n_kv, key_rows, width = k.shape
        length, width_v = q.shape[1], v.shape[2]
        blocks = (key_rows + KEYS - 1) // KEYS
        for worker in prange(workers):
            w = np.intp(worker)                                         # P4
            p, ds, turned = scratch.p[w], scratch.ds[w], scratch.turned[w]
            while True:
                task = next_task(counter)
                if task >= n_kv * splits:
                    break
                n_key, split = task // splits, task % splits
                b, keys, values = n_key // h_kv, k[n_key], v[n_key]
                for block in range(split, blocks, splits):              # interleaved: causal shares are equal
                    key = block * KEYS
                    high = min(KEYS, key_rows - key)
                    dk_tile, dv_tile = dk[n_key, key:key + high], dv[n_key, key:key + high]
                    dk_tile[:], dv_tile[:] = F(0), F(0)
                    first, stop = length, 0                             # the queries that see any key of the block
                    for r in range(high):
                        lo, hi = visible_queries(limits, b, key + r, s)
                        if lo < min(hi, length):
                            first, stop = min(first, lo), max(stop, min(hi, length))
                    for n in range(n_key * group, (n_key + 1) * group):
                        for i in range(first // QUERIES * QUERIES, stop, QUERIES):
                            columns = min(QUERIES, length - i)
                            last = i + columns + limits[2][b] + limits[1]   # the key after the last one that the tile sees
                            rows = min(high, (last - key + MR - 1) // MR * MR)
                            for at in range(0, columns, panel):
                                for r in range(0, rows, MR):
                                    score(keys, (key + r) * width, width, q_packed[n], (i + at) * width, width, c, p,
                                          r * QUERIES + at, QUERIES)
                            for at in range(0, columns, panel):
                                for r in range(0, rows, MR):
                                    score(values, (key + r) * width_v, width_v, do_packed[n], (i + at) * width_v, width_v, F(1), ds,
                                          r * QUERIES + at, QUERIES)
                            for r in range(rows):
                                lo, hi = visible_queries(limits, b, key + r, s)
                                lo, hi = min(max(lo - i, 0), columns), min(max(hi - i, 0), columns)
                                p[r, :lo], p[r, hi:columns] = HIDDEN, HIDDEN
                                gradients(p, ds, r * QUERIES, columns // lanes, lse[n], delta[n], i)
                            add_product(p, rows, QUERIES, do[n], i, columns, width_v, dv_tile, 0)
                            add_product(ds, rows, QUERIES, q[n], i, columns, width, dk_tile, 0)
                            for r in range(0, rows, lanes):
                                for at in range(0, columns, lanes):
                                    square(ds, r * QUERIES + at, QUERIES, turned, at * KEYS + r, KEYS)
                            turned[columns:columns + MR] = F(0)         # the last tile of rows may stand out by some
                            add_product(turned, columns, KEYS, keys, key, rows, width, dq[split, n], i)
    return run


def _padded(x: np.ndarray, rows: int, unit: int) -> np.ndarray:
    """(B, H, L, D) as (B * H, rows, whole vectors) float32, zeros where nothing is, on cache lines."""
    b, h, length, d = x.shape
    out = zeros((b * h, rows, padded(d, unit)), F)
    out.reshape(b, h, rows, out.shape[2])[:, :, :length, :d] = x
    return out


def run(forward: Problem, grad_out: np.ndarray, out: np.ndarray, lse: np.ndarray, isa: str | None = None
        ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """dQ, dK and dV of a float32 problem, by the kernel of `isa` (None: the best of the target)."""
    isa = target.require(isa, {n: needs for n, needs in target.FLOAT_ISAS.items() if n in FLOAT_ISAS})
    vectors = FLOAT_ISAS[isa]
    nb, nh, nkv, length, s, d, dv = forward.shape
    wide, high = padded(length, vectors.panel), padded(s, MR)
    q, do = _padded(forward.query, wide, vectors.lanes), _padded(grad_out, wide, vectors.lanes)
    k, v = _padded(forward.key, high, vectors.lanes), _padded(forward.value, high, vectors.lanes)
    stops = np.full(1, wide, np.int64)
    q_packed, do_packed = (pack_keys(isa, x[None], stops)[0] for x in (q, do))
    rows, delta = np.full((nb * nh, wide), F(np.inf)), np.zeros((nb * nh, wide), F)
    flat = (lse.reshape(-1, length) * LOG2E).astype(F)
    rows[:, :length] = np.where(np.isneginf(flat), F(np.inf), flat)
    delta[:, :length] = np.einsum("bhld,bhld->bhl", grad_out, out).reshape(-1, length)
    limits = (NO_LIMIT if forward.left is None else forward.left, NO_LIMIT if forward.right is None else forward.right,
              np.asarray(forward.diagonal, np.int64), np.asarray(forward.key_lengths, np.int64))
    workers = numba.get_num_threads()
    tile = (workers, KEYS, QUERIES)
    scratch = Scratch(zeros(tile, F), zeros(tile, F), zeros((workers, QUERIES + MR, KEYS), F))
    splits = max(1, min(-(-TASKS // max(1, nb * nkv)), -(-high // KEYS)))
    dq = zeros((splits, nb * nh, wide + MR, q.shape[2]), F)
    dk, dv_ = zeros(k.shape, F), zeros(v.shape, F)
    with one_at_a_time():
        make_backward(isa)(q, q_packed, do, do_packed, k, v, rows, delta, F(forward.scale * LOG2E), limits,
                           (nh // nkv, nkv, s, splits, workers), np.zeros(1, np.int64), scratch, dq, dk, dv_)
    whole = dq[0]
    for part in dq[1:]:
        whole += part
    scale = F(forward.scale)
    return ((whole[:, :length, :d] * scale).reshape(nb, nh, length, d), (dk[:, :s, :d] * scale).reshape(nb, nkv, s, d),
            dv_[:, :s, :dv].reshape(nb, nkv, s, dv))


def backward(grad_out: np.ndarray, query: np.ndarray, key: np.ndarray, value: np.ndarray, out: np.ndarray, lse: np.ndarray,
             isa: str | None = None, **options: object) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Gradients of `numflash.attention(query, key, value, **options)` in float32.

    Parameters
    ----------
    grad_out : (B, H, L, Dv) float32
        Gradient of the output.
    query, key, value : (B, H, L, D), (B, Hkv, S, D), (B, Hkv, S, Dv) float32
    out, lse : what the forward pass gave with `return_lse=True`
    isa : str or None
        An instruction set of the float kernels instead of the best one.
    options : is_causal, scale, enable_gqa, window, alignment, key_lengths, as `attention` takes them

    Returns
    -------
    dq, dk, dv : float32, as query, key and value. Rows and keys that take no part have gradient 0.

    Raises
    ------
    ArgumentError, ArgumentTypeError
    UnsupportedError
        Options whose gradient is not here, or a target without register tiles (`backward_plain` runs everywhere).
    """
    forward = problem(query, key, value, precision="float32", **options)        # type: ignore[arg-type]
    for option in ("mask", "bias", "alibi_slopes", "sinks"):
        if getattr(forward, option) is not None:
            raise UnsupportedError(f"backward: no gradient with {option}; "
                                   "allowed: is_causal, scale, enable_gqa, window, alignment, key_lengths")
    if forward.softcap:
        raise UnsupportedError(f"backward: no gradient with softcap = {forward.softcap}; allowed: 0")
    nb, nh, _, length, _, _, dv = forward.shape
    rows = (nb, nh, length)
    for name, x, shape in (("grad_out", grad_out, (*rows, dv)), ("out", out, (*rows, dv)), ("lse", lse, rows)):
        if np.shape(x) != shape or np.asarray(x).dtype != F:
            raise ArgumentError(f"{name}: got {np.asarray(x).dtype} of shape {np.shape(x)}; allowed: float32 of shape {shape}")
    return run(forward, np.asarray(grad_out), np.asarray(out), np.asarray(lse), isa)
