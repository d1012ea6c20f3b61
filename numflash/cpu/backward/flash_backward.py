"""The gradient of attention with register tiles.

DQ, dK and dV in float32, with recomputation, in one order of summation.

FlashAttention 2, algorithm 2 (Dao 2023); `study.backward_plain` derives it and does the same in
plain loops. A worker owns a head, or every `splits`-th block of its keys, and computes a tile of
weights and score gradients once, transposed (keys are rows, so that LSE and D = rowsum(dO * O) are
stored along the lanes):

    S^T  = K.Q^T * scale * log2(e)        dP^T = V.dO^T                   (score_tile, against
    packed Q and dO) change  softcap, ALiBi, bias, mask, edges of the keys a query attends to
    (edge_row, only where asked for) P^T  = 2**(S^T - LSE)                 dS^T = P^T * (dP^T - D)
    (row_gradients) dV  += P^T.dO                         dK  += dS^T.Q
    (value_tile) dQ  += dS.K                           after dS^T is turned round in registers

dQ is the worker's own (one copy for each split, added up in order at the end), and so are dK and dV
(one copy for each query head of a group), so nothing is atomic and equal inputs give equal bits at
every thread count: the number of splits follows from the shape alone. FlashAttention 2 adds dQ
atomically, and in its deterministic mode keeps copies as well.

Everything is finite here: rows that float32 cannot hold take no part (`launch_backward` has
`backward_rows` do them), and keys that are not finite are masked: a row that attends to them is
such a row, or gives them weight 0.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare, inline, kernel
from ...jit.memory import empty, uncleared
from ...jit.parallel import over_tasks
from ...tiling import Buffer
from ...validation import Problem
from ..floats import float_tiles as tiles
from ..floats.float_packing import on_lines, pack_keys
from ..floats.float_tiles import FLOAT_ISAS, MR, exp2, for_vectors, score_tile, value_tile
from ..isa.isas import padded
from ..isa.score_calls import batch_of, call_slopes, must_mask, trimmed
from ..isa.transpose import transpose
from ..isa.vectors import constant, data, load, next_task, store
from ..launch_float import LOG2E, NO_LIMIT, slope_functions
from ..semantics import ScoreTiles

F = np.float32
# rows and columns of a tile: multiples of MR and of every panel
KEYS = 144
QUERIES = 64
TASKS = 16  # shares that a problem is cut into, at least, where it has so many key blocks
HIDDEN = F(-np.inf)
FINITE = float(np.finfo(F).max)
BUFFERS = (
    Buffer("K, V rows", KEYS, "d", "float32", 2),
    Buffer("dK, dV", KEYS, "d", "float32", 2),
    Buffer("Q, dO packed", QUERIES, "d", "float32", 2),
    Buffer("Q, dO rows", QUERIES, "d", "float32", 2),
    Buffer("dQ", QUERIES, "d", "float32"),
    Buffer("P, dS, dS^T", KEYS, QUERIES, "float32", 3),
)
inlined = inline(forceinline=True)  # where options go in: a call would copy them all
LN2 = np.log(2.0)


class Scratch(NamedTuple):
    """Tiles of W workers, on cache lines.

    P, ds (W, KEYS * QUERIES), turned (W, (QUERIES + MR) * KEYS), slope (W, QUERIES).
    """

    p: np.ndarray
    ds: np.ndarray
    turned: np.ndarray
    slope: np.ndarray


class Options(NamedTuple):
    """Which keys a query attends to and how its scores change, in units of log2, turned round like
    the tiles.

    left, right, diagonal, key_lengths : as in `scores.Semantics`
    hidden : (Nkv, S) bool, keys to leave out; empty if none
    mask, bias : (B, H, blocks of L, S, QUERIES) uint8 and float32, empty if none; the first four
        sizes may be 1
    softcap : float32, 0 = none
    slopes : (B, H) float32, empty if none
    functions : score and mask functions; `masked` is their gradient tile, `unmasked` whether scores
        change
    sizes : L, S
    """

    left: int
    right: int
    diagonal: np.ndarray
    key_lengths: np.ndarray
    hidden: np.ndarray
    mask: np.ndarray
    bias: np.ndarray
    softcap: float
    slopes: np.ndarray
    functions: ScoreTiles
    sizes: tuple[int, int]


@functools.cache
def row_gradients(name: str):
    """Intrinsic f(x, dp, off, count, lse, delta, at).

    x = 2**(x - lse[at:]), at most 1, dp = x * (dp - delta[at:]).
    """
    isa = FLOAT_ISAS[name]

    @intrinsic
    def gradients(typingctx, x, dp, off, count, lse, delta, at):
        def codegen(context, b, sig, a):
            px, pd, pl, pm = (data(context, b, sig.args[n], a[n]) for n in (0, 1, 4, 5))

            def body(n, state):
                here = b.add(a[2], n)
                there = b.add(a[6], n)
                x = b.fsub(load(b, px, here, isa.floats, 4), load(b, pl, there, isa.floats, 4))
                p = exp2(
                    b,
                    isa,
                    b.select(
                        b.fcmp_ordered(">", x, constant(isa.floats, 0.0)),
                        constant(isa.floats, 0.0),
                        x,
                    ),
                )
                ds = b.fmul(
                    p, b.fsub(load(b, pd, here, isa.floats, 4), load(b, pm, there, isa.floats, 4))
                )
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
    lanes = isa.lanes
    panel = isa.panel
    nv = isa.nv
    half = max(1, nv // 2) * lanes
    score = score_tile(name, nv, scaled=True)
    gradients = row_gradients(name)
    square = transpose(lanes)
    value1, value2, value4 = (value_tile(name, n) for n in (1, max(1, nv // 2), nv))
    softcap = tiles.row_softcap(name)
    alibi = tiles.row_alibi(name)
    add_bias = tiles.row_bias(name)
    softcap_seen = tiles.row_softcap(name, hidden=True)
    apply_mask = tiles.row_mask(name)
    found = tiles.any_byte(name)

    @inline
    def add_product(a, first, rows, stride, b, at, steps, width, out, to):
        """out[to + i] += sum over `steps` of a[first + i] * b[at + step] for whole tiles of MR
        rows; b and out are `width` wide.
        """
        t = 0
        while t < width:  # a chunk of b's columns stays in L1 for all rows
            n = panel if t + panel <= width else half if nv > 1 and t + half <= width else lanes
            for i in range(0, rows, MR):
                where = first + i * stride
                if n == panel:
                    value4(
                        a,
                        where,
                        stride,
                        b,
                        at * width + t,
                        width,
                        steps,
                        out,
                        (to + i) * width + t,
                        width,
                    )
                elif n == half:
                    value2(
                        a,
                        where,
                        stride,
                        b,
                        at * width + t,
                        width,
                        steps,
                        out,
                        (to + i) * width + t,
                        width,
                    )
                else:
                    value1(
                        a,
                        where,
                        stride,
                        b,
                        at * width + t,
                        width,
                        steps,
                        out,
                        (to + i) * width + t,
                        width,
                    )
            t += n

    @inline
    def visible_queries(options, b, key, s):
        """First query that attends to a key, and the one after the last."""
        if key >= min(s, options.key_lengths[b]):
            return 0, 0
        return max(0, key - options.diagonal[b] - options.right), max(
            0, key - options.diagonal[b] + options.left + 1
        )

    @inline
    def row_of(x, b, h, i, key):
        """Offset of what a flat mask or bias holds for a key and the queries from i on."""
        nb, nh, blocks, s, _ = x.shape
        head = min(b, nb - 1) * nh + min(h, nh - 1)
        return ((head * blocks + min(i // QUERIES, blocks - 1)) * s + min(key, s - 1)) * QUERIES

    @inlined
    def any_seen(options, mask, b, h, key, i, count):
        """Whether the mask lets any of `count` vectors of queries from i on see any of MR keys."""
        seen = False
        for r in range(key, key + MR):
            seen = seen or found(mask, row_of(options.mask, b, h, i, r), count)
        return seen

    @inlined
    def keys_seen(options, mask, b, h, key, i, columns, first, stop):
        """first .. stop (keys of a block) without the groups of MR keys at either end that the mask
        hides from all queries.
        """
        while first < stop and not any_seen(options, mask, b, h, key + first, i, columns // lanes):
            first += MR
        while first < stop and not any_seen(
            options, mask, b, h, key + stop - MR, i, columns // lanes
        ):
            stop -= MR
        return first, stop

    @inlined
    def user_row(options, b, h, key, i, columns, x, at, slope):
        """The user's functions on the scores of one key.

        a key or query that does not exist keeps slope 0.
        """
        functions = options.functions
        slope[:columns] = F(0)
        length, s = options.sizes
        if key < s and i < length:
            count = min(columns, length - i)
            user, frame = functions.masked, functions.masked_frame
            b = batch_of(functions, b)
            call_slopes(user, frame, x, at, slope, 0, 0, 1, count, b, h, i, key, F(LN2), F(LOG2E))

    @inlined
    def edge_row(options, mask, bias, slope, b, h, key, i, columns, lo, hi, x, at):
        """The scores x[at:] of one key for `columns` queries from i on, changed in the field's
        order; slope = softcap's slope.
        """
        count, cap = columns // lanes, options.softcap
        called = options.functions.masked != 0
        if called:
            user_row(options, b, h, key, i, columns, x, at, slope)
        if cap > F(0):
            if called:
                softcap_seen(x, at, count, cap)
            else:
                softcap(x, at, count, cap)
            for c in range(columns):
                t = F(x[at + c] / cap)
                factor = F(1) - t * t
                slope[c] = slope[c] * factor if called else factor
        if options.slopes.size > 0:
            alibi(x, at, count, options.slopes[b, h], key - options.diagonal[b] - i)
        if bias.size > 0:
            add_bias(x, at, count, bias, row_of(options.bias, b, h, i, key))
        if mask.size > 0:
            apply_mask(x, at, count, mask, row_of(options.mask, b, h, i, key))
        for c in range(at, at + lo):
            x[c] = HIDDEN
        for c in range(at + hi, at + columns):
            x[c] = HIDDEN

    @inline(twice=True)
    def work(
        worker,
        q,
        q_packed,
        do,
        do_packed,
        k,
        v,
        lse,
        delta,
        c,
        options,
        sizes,
        counter,
        scratch,
        dq,
        dk,
        dv,
    ):
        """One worker: shares, as long as there are any."""
        h_all, h_kv, s, splits, _ = sizes
        n_heads, length, width = q.shape
        key_rows, width_v = k.shape[1], v.shape[2]
        blocks = (key_rows + KEYS - 1) // KEYS
        functions = options.functions
        changed = (
            options.mask.size > 0
            or options.bias.size > 0
            or options.softcap > F(0)
            or options.slopes.size > 0
        )
        p = scratch.p[worker]
        ds = scratch.ds[worker]
        turned = scratch.turned[worker]
        slope = scratch.slope[worker]
        mask = options.mask.reshape(options.mask.size)
        bias = options.bias.reshape(options.bias.size)
        while True:
            task = next_task(counter)
            if task >= n_heads * splits:
                break
            n, split = task // splits, task % splits
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            keys, values, queries, outs, some_dq = k[n_kv], v[n_kv], q[n], do[n], dq[split, n]
            queries_packed = q_packed[n]
            outs_packed = do_packed[n]
            row_lse = lse[n]
            row_delta = delta[n]
            for block in range(split, blocks, splits):  # interleaved: causal shares are equal
                key = block * KEYS
                high = min(KEYS, key_rows - key)
                dk_tile, dv_tile = dk[n, key : key + high], dv[n, key : key + high]
                dk_tile[:], dv_tile[:] = F(0), F(0)
                end = min(s, options.key_lengths[b]) - key
                first, stop = length, 0  # the queries that see any key of the block
                for r in range(high):
                    lo, hi = visible_queries(options, b, key + r, s)
                    if lo < min(hi, length):
                        first, stop = min(first, lo), max(stop, min(hi, length))
                for i in range(first // QUERIES * QUERIES, stop, QUERIES):
                    columns = min(QUERIES, length - i)
                    # the keys of the block that the tile's first query attends to on its left, and
                    # its last on its right
                    near = max(0, i + options.diagonal[b] - options.left - key) // MR * MR
                    far = (
                        (min(end, i + columns + options.diagonal[b] + options.right - key) + MR - 1)
                        // MR
                        * MR
                    )
                    far = min(high, far)
                    if mask.size > 0:
                        near, far = keys_seen(options, mask, b, h, key, i, columns, near, far)
                    if functions.states.size > 0 and near < far:
                        a, z = trimmed(
                            functions, b, h, i, i + columns - 1, key + near, min(key + far, s), 1
                        )
                        near, far = (a - key) // MR * MR, (z - key + MR - 1) // MR * MR
                        near, far = (near, min(high, far)) if a < z else (0, 0)
                    if near >= far:
                        continue
                    called = functions.masked != 0 and (
                        functions.unmasked != 0
                        or must_mask(functions, b, h, i, i + columns - 1, key + near, key + far)
                    )
                    for at in range(0, columns, panel):
                        for r in range(near, far, MR):
                            score(
                                keys,
                                (key + r) * width,
                                width,
                                queries_packed,
                                (i + at) * width,
                                width,
                                c,
                                p,
                                r * QUERIES + at,
                                QUERIES,
                            )
                    for at in range(0, columns, panel):
                        for r in range(near, far, MR):
                            score(
                                values,
                                (key + r) * width_v,
                                width_v,
                                outs_packed,
                                (i + at) * width_v,
                                width_v,
                                F(1),
                                ds,
                                r * QUERIES + at,
                                QUERIES,
                            )
                    for r in range(near, far):
                        lo, hi = visible_queries(options, b, key + r, s)
                        lo, hi = min(max(lo - i, 0), columns), min(max(hi - i, 0), columns)
                        if (
                            options.hidden.size > 0
                            and key + r < s
                            and options.hidden[n_kv, key + r]
                        ):
                            hi = lo
                        if changed or called or lo > 0 or hi < columns:
                            edge_row(
                                options,
                                mask,
                                bias,
                                slope,
                                b,
                                h,
                                key + r,
                                i,
                                columns,
                                lo,
                                hi,
                                p,
                                r * QUERIES,
                            )
                        gradients(p, ds, r * QUERIES, columns // lanes, row_lse, row_delta, i)
                        bent = options.softcap > F(0) or functions.masked != 0
                        if bent and (changed or called or lo > 0 or hi < columns):
                            for x in range(columns):  # the slope of a hidden key may be anything
                                place = r * QUERIES + x
                                ds[place] = ds[place] * slope[x] if p[place] != F(0) else F(0)
                    add_product(
                        p,
                        near * QUERIES,
                        far - near,
                        QUERIES,
                        outs,
                        i,
                        columns,
                        width_v,
                        dv_tile,
                        near,
                    )
                    add_product(
                        ds,
                        near * QUERIES,
                        far - near,
                        QUERIES,
                        queries,
                        i,
                        columns,
                        width,
                        dk_tile,
                        near,
                    )
                    for r in range(near // lanes * lanes, far, lanes):
                        for at in range(0, columns, lanes):
                            square(ds, r * QUERIES + at, QUERIES, turned, at * KEYS + r, KEYS)
                    for x in range(columns * KEYS, (columns + MR) * KEYS):
                        turned[x] = F(0)  # the last tile of rows may exceed the length
                    add_product(
                        turned, near, columns, KEYS, keys, key + near, far - near, width, some_dq, i
                    )

    @kernel
    def run(
        q,
        q_packed,
        do,
        do_packed,
        k,
        v,
        lse,
        delta,
        c,
        options,
        sizes,
        counter,
        scratch,
        dq,
        dk,
        dv,
    ):
        """All shares of all heads.

        q (N, padded L, columns), do (N, padded L, value columns), k, v (Nkv, padded S, ...) float32
        in rows of whole vectors, padded with zeros; q_packed, do_packed (N, ...) in panels; lse (N,
        padded L) in units of log2, +inf for a row that takes no part; delta (N, padded L); c
        float32 scale * log2(e); sizes = (H, Hkv, S, splits, workers); counter (1,) int64 zero; dq
        (splits, N, padded L + MR, columns) zeros; dk, dv (N, padded S, ...): all without the factor
        of the scores.
        """
        over_tasks(
            work,
            sizes[4],
            (
                q,
                q_packed,
                do,
                do_packed,
                k,
                v,
                lse,
                delta,
                c,
                options,
                sizes,
                counter,
                scratch,
                dq,
                dk,
                dv,
            ),
        )

    return run


def _rows(x: np.ndarray, rows: int, unit: int, skip: np.ndarray | None = None) -> np.ndarray:
    """x (N, L, D) as (N, rows, whole vectors) on cache lines, zeros where nothing is and in the
    rows `skip` (N, L).
    """
    n, length, d = x.shape
    clean = skip is None or not skip.any()
    if clean and (length, d) == (rows, padded(d, unit)):
        return on_lines(x)
    out = empty((n, rows, padded(d, unit)), F)
    out[:, length:], out[:, :, d:], out[:, :length, :d] = 0, 0, x
    if not clean:
        out[:, :length][skip] = 0
    return out


@bare
def _turn_squares(rows, square, out):
    """out (S, QUERIES) = rows (up to QUERIES, S) turned round."""
    s = rows.shape[1]
    for first in range(0, s, QUERIES):
        count = min(QUERIES, s - first)
        for r in range(rows.shape[0]):
            source = rows[r, first : first + count]
            for j in range(count):
                square[j, r] = source[j]
        for j in range(count):
            source, target = square[j], out[first + j]
            for r in range(rows.shape[0]):
                target[r] = source[r]


@inline
def _turn_block(task, x, out):
    n, block, length = task // out.shape[1], task % out.shape[1], x.shape[1]
    # rows of x are often a power of two apart, which is one set of L1: a square of its own is not
    square = uncleared((QUERIES, QUERIES), x.dtype, "square turned round")
    _turn_squares(x[n, block * QUERIES : min((block + 1) * QUERIES, length)], square, out[n, block])


@kernel
def _turn(x, out):
    """out (N, blocks, S, QUERIES) = x (N, L, S) turned round, by squares.

    Elements beyond L are left unchanged.
    """
    over_tasks(_turn_block, x.shape[0] * out.shape[1], (x, out))


def _turned(x: np.ndarray | None, dtype: type) -> np.ndarray:
    """A broadcast (B, H, L, S) view as `Options` has it, without its repetitions."""
    if x is None:
        return np.zeros((0, 0, 0, 0, 0), dtype)
    repeated = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.strides)
    once: np.ndarray = np.ascontiguousarray(x[repeated]).view(dtype)
    nb, nh, length, s = once.shape
    out = np.zeros((nb, nh, -(-length // QUERIES), s, QUERIES), dtype)
    if x.strides[2] == 0:
        out[:] = once.reshape(nb, nh, 1, s, 1)
    else:
        _turn(once.reshape(-1, length, s), out.reshape(-1, *out.shape[2:]))
    return out


def _options(problem: Problem, hidden: np.ndarray) -> Options:
    bias = _turned(problem.bias, F)
    mask = (bias != HIDDEN).view(np.uint8) if bias.size else _turned(problem.mask, np.uint8)
    return Options(
        NO_LIMIT if problem.left is None else problem.left,
        NO_LIMIT if problem.right is None else problem.right,
        np.asarray(problem.diagonal, np.int64),
        np.asarray(problem.key_lengths, np.int64),
        hidden if hidden.any() else hidden[:0],
        mask,
        bias,
        F(problem.softcap * LOG2E),
        np.zeros((0, 0), F)
        if problem.alibi_slopes is None
        else np.ascontiguousarray(problem.alibi_slopes * LOG2E, F),
        slope_functions(problem),
        (problem.shape[3], problem.shape[4]),
    )


def run(
    problem: Problem,
    isa: str,
    operands: tuple[np.ndarray, ...],
    lse: np.ndarray,
    delta: np.ndarray,
    hidden: tuple[np.ndarray, np.ndarray],
    gradients: tuple[np.ndarray, ...],
) -> None:
    """dQ, dK and dV of all rows that have an LSE, by the kernel of `isa`.

    operands q (N, L, D), k (Nkv, S, D), v (Nkv, S, Dv), do (N, L, Dv) float32, contiguous; lse (N,
    L) float32 in units of log2, +inf for a row to leave out; delta (N, L); hidden (N, L) and (Nkv,
    S) bool: rows and keys that may hold anything; gradients as q, k and v, written.
    """
    vectors = FLOAT_ISAS[isa]
    q, k, v, do = operands
    _, nh, nkv, length, s, d, dv = problem.shape
    n = q.shape[0]
    group = nh // nkv
    lanes = vectors.lanes
    wide = padded(length, vectors.panel)
    high = padded(s, MR)
    q_rows, do_rows = (_rows(x, wide, lanes, hidden[0]) for x in (q, do))
    k_rows, v_rows = (_rows(x, high, lanes, hidden[1]) for x in (k, v))
    stops = np.full(1, wide, np.int64)
    q_packed, do_packed = (pack_keys(isa, x[None], stops)[0] for x in (q_rows, do_rows))
    row_lse = np.full((n, wide), F(np.inf))
    row_delta = np.zeros((n, wide), F)
    row_lse[:, :length], row_delta[:, :length] = lse, np.where(hidden[0], 0, delta)
    workers = numba.get_num_threads()
    scratch = Scratch(
        empty((workers, KEYS * QUERIES), F, "backward weights"),
        empty((workers, KEYS * QUERIES), F, "backward gradients of scores"),
        empty((workers, (QUERIES + MR) * KEYS), F, "backward gradients turned round"),
        empty((workers, QUERIES), F, "backward sums"),
    )
    splits = max(1, min(-(-TASKS // n), -(-high // KEYS)))
    dq = np.zeros((splits, n, wide + MR, q_rows.shape[2]), F)
    dk, dv_ = (empty((n, high, x.shape[2]), F) for x in (k_rows, v_rows))
    factor, scale = (F(np.clip(x, -FINITE, FINITE)) for x in (problem.scale * LOG2E, problem.scale))
    make_backward(isa)(
        q_rows,
        q_packed,
        do_rows,
        do_packed,
        k_rows,
        v_rows,
        row_lse,
        row_delta,
        factor,
        _options(problem, hidden[1]),
        (nh, nkv, s, splits, workers),
        np.zeros(1, np.int64),
        scratch,
        dq,
        dk,
        dv_,
    )
    whole = dq[0]
    for part in dq[1:]:
        whole += part
    np.multiply(whole[:, :length, :d], scale, out=gradients[0])
    for x, out, unit in (
        (dk[:, :s, :d], gradients[1], scale),
        (dv_[:, :s, :dv], gradients[2], F(1)),
    ):
        heads = x.reshape(-1, group, *x.shape[1:])
        whole = heads[:, 0] if group == 1 else heads[:, 0] + heads[:, 1]
        for part in range(2, group):
            whole += heads[:, part]
        np.multiply(whole, unit, out=out)
