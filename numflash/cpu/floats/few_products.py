"""Products of few rows of queries with keys and values that are read where they are.

The scores of as many keys as a vector has lanes are summed from their rows by a transposing tree; rows
of V are added up in registers. `few_rows` and the gradient of few rows, `backward.few_gradients`, share
them, and which keys of a block a row sees.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare, own
from ...jit.memory import LINE, array_at
from ..isa.strided import row_at
from ..isa.vectors import (
    F32,
    I16,
    I32,
    I64,
    address,
    fold_tree,
    load_at,
    pointer,
    pointer_at,
    prefetch,
    prefetch_line,
    repeat,
    store_at,
)
from ..semantics import seen_range
from .float_isas import FLOAT_ISAS

KEYS = 64  # of a block: their rows stay in L1 for all rows of queries
WIDE = 4  # vectors of V's columns that are summed at a time
SAME_SET = 4096  # bytes: 64 sets of lines of 64 bytes
AHEAD = 16  # rows that are prefetched before they are copied
SIZES = {"float32": 4, "bfloat16": 2}  # bytes
HIDDEN = np.float32(-np.inf)


def _floats(b, isa, kind: str, base, element):
    """A vector of float32 or bfloat16 numbers from `element` on, as float32."""
    place = b.mul(element, I64(SIZES[kind]))
    if kind == "float32":
        return load_at(b, base, isa.floats, place)
    ints, halves = isa.vector(I32), load_at(b, base, isa.vector(I16), place, 2)
    return b.bitcast(b.shl(b.zext(halves, ints), isa.fill(b, ints, 16)), isa.floats)


@functools.cache
def key_scores(name: str, kind: str, ahead: bool):
    """Intrinsic f(k, stride, count, d, q, out): q . k of a vector's lanes of keys, to `out`, float32.

    k, q, out : addresses, of `kind` but for out;  stride : bytes from one key to the next;  count : keys
        that there are, the last of which stands for the others;  d : whole vectors
    ahead : prefetch the keys after these, which so many rows side by side hide from the CPU's own
        prefetching
    """
    isa = FLOAT_ISAS[name]
    lanes = isa.lanes

    @intrinsic
    def scores(typingctx, k, stride, count, d, q, out):
        def codegen(context, b, sig, a):
            pk, pq, po = (pointer(b, a[n]) for n in (0, 4, 5))
            last = b.sub(a[2], I64(1))
            rows = []
            for r in range(lanes):
                row = b.select(b.icmp_signed("<", I64(r), last), I64(r), last)
                rows.append(pointer_at(b, pk, b.mul(a[1], row)))

            def add(n, sums):
                at = b.mul(n, I64(lanes))
                x = _floats(b, isa, kind, pq, at)
                if ahead:
                    next_keys = b.add(b.mul(a[1], I64(lanes)), b.mul(n, I64(lanes * SIZES[kind])))
                    for row in rows:
                        prefetch(b, pointer_at(b, row, next_keys))
                return [
                    isa.fma(b, _floats(b, isa, kind, row, at), x, y)
                    for row, y in zip(rows, sums, strict=True)
                ]

            nothing = [isa.fill(b, isa.floats, 0.0)] * lanes
            sums = repeat(b, I64(0), b.sdiv(a[3], I64(lanes)), nothing, add)
            store_at(b, fold_tree(b, sums, b.fadd), po, I64(0))
            return context.get_dummy_value()

        return types.void(k, stride, count, d, q, out), codegen

    return scores


@functools.cache
def add_values(name: str, kind: str, rows: int, width: int):
    """Intrinsic f(p, p_stride, v, v_stride, count, o, o_stride): o[r] += p[r, j] * v[j].

    p, v, o : addresses of `rows` rows of weights, of `count` rows of V, of `kind`, and of `rows` rows of
        sums, `width` vectors of columns;  strides in bytes
    """
    isa = FLOAT_ISAS[name]
    columns = range(width)

    @intrinsic
    def add(typingctx, p, p_stride, v, v_stride, count, o, o_stride):
        def codegen(context, b, sig, a):
            pv = pointer(b, a[2])
            weights, sums = (
                [pointer_at(b, pointer(b, a[n]), b.mul(a[n + 1], I64(r))) for r in range(rows)]
                for n in (0, 5)
            )
            places = [I64(4 * isa.lanes * c) for c in columns]

            def one(j, state):
                row = pointer_at(b, pv, b.mul(j, a[3]))
                values = [_floats(b, isa, kind, row, I64(isa.lanes * c)) for c in columns]
                at = b.mul(j, I64(4))
                new = []
                for r in range(rows):
                    weight = isa.splat(b, load_at(b, weights[r], F32, at), isa.floats)
                    for c in columns:
                        new.append(isa.fma(b, weight, values[c], state[r * width + c]))
                return new

            begun = [load_at(b, row, isa.floats, at) for row in sums for at in places]
            done = repeat(b, I64(0), a[4], begun, one)
            for n, x in enumerate(done):
                store_at(b, x, sums[n // width], places[n % width])
            return context.get_dummy_value()

        return types.void(p, p_stride, v, v_stride, count, o, o_stride), codegen

    return add


@own
def row_of(x, kv_heads, n, r):
    """Address of row r of those of KV head n, in the queries or the result."""
    return row_at(x, n * (x.heads // kv_heads) + r // x.length, r % x.length)


@bare
def seen_keys(semantics, q, k, n, lo, hi):
    """The first key that each row of KV head n sees, and the key after its last one; those of all rows.

    q, k : Strided;  lo, hi : (rows,) int64, written
    """
    group, b = q.heads // k.heads, n // k.heads
    first, stop = k.length, 0
    for r in range(lo.size):
        h = n % k.heads * group + r // q.length
        lo[r], hi[r] = seen_range(semantics, b, h, r % q.length, k.length)
        if lo[r] < hi[r]:
            first, stop = min(first, lo[r]), max(stop, hi[r])
    return first, max(first, stop)


@own
def room_for_rows(x, rows, size):
    """Bytes for a block of x, Strided, where its rows are copied before `rows` rows are multiplied by them, or 0.

    Rows a multiple of 4096 bytes apart, as those of a head beside others are, have their lines in the same
    sets of L1, which hold fewer than a vector's lanes of them: each row of queries would fetch them anew.
    """
    apart = x.row % SAME_SET == 0 and x.row != x.d * size
    return KEYS * x.d * size if rows > 1 and apart else 0


@own
def hide_unseen(x, at, count, end, seen, seen_stop):
    """x[at : at + end] = -inf but for keys `seen` to `seen_stop` of the `count` that there are; whether
    there are any of those.
    """
    seen, seen_stop = min(max(seen, 0), count), min(seen_stop, count)
    for j in range(at, at + seen):
        x[j] = HIDDEN
    for j in range(at + max(seen, seen_stop), at + end):
        x[j] = HIDDEN
    return seen_stop > seen


class FewProducts(NamedTuple):
    """Jitted functions of one instruction set and kind of operands.

    rows_at_hand(k, n, first, count, room) : rows `first` and on of KV head n of k, Strided, as a `Block`:
        where they are, or copied to `room`, an address, unless this is 0
    block_scores(k, kv_heads, n, count, q, x) : x[r * KEYS + j] = q[r] . k[j] of all rows r of KV head n of q,
        Strided, and `count` keys j; whole vectors of keys are written
    block_values(v, count, x, o) : o[r] += x[r * KEYS + j] * v[j], o (rows, D) float32

    k, v : Block;  x : flat float32, at most KEYS keys of each row
    """

    rows_at_hand: Callable[..., Any]
    block_scores: Callable[..., Any]
    block_values: Callable[..., Any]


class Block(NamedTuple):
    """Rows of keys or values: the address of the first, and the bytes from one to the next."""

    start: int
    row: int


@functools.cache
def make_few_products(name: str, kind: str) -> FewProducts:
    """The functions of vectors of `name`; kind : "float32" or "bfloat16", of q, k and v."""
    lanes, size = FLOAT_ISAS[name].lanes, SIZES[kind]
    # of the first row, which also prefetches the next keys, and of the others
    first_scores, scores_of = (key_scores(name, kind, ahead) for ahead in (True, False))
    two_rows_wide, two_rows, one_row_wide, one_row = (
        add_values(name, kind, rows, width) for rows in (2, 1) for width in (WIDE, 1)
    )

    @bare
    def rows_at_hand(k, n, first, count, room):
        start, nbytes = row_at(k, n, first), k.d * size
        if room == 0:
            return Block(start, k.row)
        for j in range(count):
            source = start + j * k.row
            for line in range(0, nbytes, LINE):
                prefetch_line(source + AHEAD * k.row + line)
            words = array_at(source, (nbytes // 4,), np.uint32)
            copy = array_at(room + j * nbytes, (nbytes // 4,), np.uint32)
            for e in range(words.size):
                copy[e] = words[e]
        return Block(room, nbytes)

    @bare
    def block_scores(k, kv_heads, n, count, q, x):
        rows = q.heads // kv_heads * q.length
        for c in range(0, count, lanes):
            here, there, to = k.start + c * k.row, min(lanes, count - c), address(x) + c * 4
            first_scores(here, k.row, there, q.d, row_of(q, kv_heads, n, 0), to)
            for r in range(1, rows):
                scores_of(here, k.row, there, q.d, row_of(q, kv_heads, n, r), to + r * KEYS * 4)

    @bare
    def block_values(v, count, x, o):
        """Two rows at a time, WIDE vectors of columns at a time."""
        rows, dv = o.shape
        row, sums, values = v.row, dv * 4, v.start
        r = 0
        while r < rows:
            two = r + 1 < rows
            p, t = address(x) + r * KEYS * 4, 0
            while t < dv:
                wide = t + WIDE * lanes <= dv
                to, place = address(o) + (r * dv + t) * 4, values + t * size
                if two and wide:
                    two_rows_wide(p, KEYS * 4, place, row, count, to, sums)
                elif two:
                    two_rows(p, KEYS * 4, place, row, count, to, sums)
                elif wide:
                    one_row_wide(p, KEYS * 4, place, row, count, to, sums)
                else:
                    one_row(p, KEYS * 4, place, row, count, to, sums)
                t += WIDE * lanes if wide else lanes
            r += 2 if two else 1

    return FewProducts(rows_at_hand, block_scores, block_values)
