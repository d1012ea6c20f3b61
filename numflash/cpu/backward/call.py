"""One call of the tiled gradient in one compiled function: the tuples of its arrays from addresses.

What a call needs besides its operands comes as two arrays of numbers, which `tiled.GradientPlan`
prepares once for all equal calls: unpacking a hundred Python objects takes as long as the gradients
of 32 keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...jit.compiler import inline, kernel
from ...jit.memory import array_at, unpacked
from ...jit.parallel import limit_threads, use_threads
from ..floats.float_isas import FLOAT_ISAS
from ..isa.strided import Strided, strided_at
from ..semantics import OPTION_NUMBERS, OptionNumbers, semantics_at
from .flash_backward import make_backward
from .held import CHUNK, Found, Given
from .operands import KEYS, QUERIES, Factors, Gradients, Prepared, Scratch, Sizes

F = np.float32


class Numbers(NamedTuple):
    """What the compiled call reads from one int64 array, in this order, before `OptionNumbers`."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    head_dim: int
    value_dim: int
    high: int  # L in whole panels
    wide: int  # columns of Q and K
    columns: int  # of V and dO
    workers: int
    splits: int
    bounds: int  # see `held.Given`
    # from here on bytes from the start of scratch memory: `held.Found`
    skip: int
    hidden: int
    lse: int
    delta: int
    exact_delta: int
    largest: int
    counter: int
    # `Scratch`
    scores: int
    slopes: int
    transposed: int
    p: int
    ds: int
    ds_turned: int
    k: int
    v: int
    k_right: int
    room: int
    dk: int
    dv: int
    # `Prepared`
    q: int
    q_packed: int
    do: int
    do_packed: int
    dq: int
    # dK and dV of each query head, where several share keys
    copies_dk: int
    copies_dv: int
    # the rest of `Scratch`
    mask: int
    bias: int


class RealNumbers(NamedTuple):
    """What it reads from one float64 array: `Factors`, the scale of `held.Given`, softcap * log2(e)."""

    scores: float
    dq: float
    dk: float
    largest_scale: float
    softcap: float


NUMBERS = len(Numbers._fields)
REALS = len(RealNumbers._fields)
PLACES = slice(Numbers._fields.index("skip"), NUMBERS)


@inline
def _found_at(at, p):
    """The `Found` of a call, not filled yet."""
    n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
    return Found(
        array_at(at + p.skip, (n, p.length), np.bool_),
        array_at(at + p.hidden, (n_kv, p.keys), np.bool_),
        array_at(at + p.lse, (n, p.high), np.float32),
        array_at(at + p.delta, (n, p.high), np.float32),
        array_at(at + p.exact_delta, (n, p.length), np.float64),
        array_at(at + p.largest, (n_kv, (p.keys + CHUNK - 1) // CHUNK, 2), np.int32),
    )


@inline
def given_at(p, o, f, bounds, strides, places):
    """The `Given` of a call.

    p, o, f : numbers of a plan, `OptionNumbers` and `RealNumbers`;  places : addresses from q to grad_lse
    """
    q, k, v, do, out, lse, grad_lse = places
    n = p.batch * p.heads
    return Given(
        strided_at(strides, 0, q, p.heads, p.length, p.head_dim),
        strided_at(strides, 1, k, p.kv_heads, p.keys, p.head_dim),
        strided_at(strides, 2, v, p.kv_heads, p.keys, p.value_dim),
        strided_at(strides, 3, do, p.heads, p.length, p.value_dim),
        strided_at(strides, 4, out, p.heads, p.length, p.value_dim),
        array_at(lse, (n, p.length), np.float32),
        array_at(grad_lse, (n if grad_lse != 0 else 0, p.length), np.float32),
        array_at(o.key_lengths, (p.batch,), np.int64),
        f.largest_scale,
        bounds,
    )


@inline
def results_at(p, strides, places):
    """The `Gradients` of a call; places : addresses of dq, dk, dv and scores or 0."""
    dq, dk, dv, scores = places
    n = p.batch * p.heads
    return Gradients(
        strided_at(strides, 5, dq, p.heads, p.length, p.head_dim),
        strided_at(strides, 6, dk, p.kv_heads, p.keys, p.head_dim),
        strided_at(strides, 7, dv, p.kv_heads, p.keys, p.value_dim),
        array_at(scores, (n if scores != 0 else 0, p.length, p.keys), np.float32),
    )


@functools.cache
def make_call(isa: str) -> Callable[..., bool]:
    """call(q, k, v, do, out, lse, grad_lse, dq, dk, dv, scores, room, numbers, strides, reals) -> whether
    float32 does not hold all rows.

    q, k, v, do, out, lse, grad_lse : addresses of q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S,
        Dv), do and out (B, H, L, Dv), whose rows are contiguous, lse (B, H, L) and its gradient or 0,
        which are contiguous, all float32
    dq, dk, dv, scores, room : of the results, shaped like q, k and v, and contiguous (B, H, L, S) zeros
        or 0, float32 as well; of scratch memory
    numbers, reals : `Numbers` and `OptionNumbers`;  `RealNumbers`
    strides : of q, k, v, do, out, dq, dk and dv, as `strided_at` takes them
    """
    tiles = FLOAT_ISAS[isa]
    narrow = tiles.group == 2  # the operands of products are bfloat16
    operand: type[np.generic] = np.uint16 if narrow else np.float32
    turned_rows = QUERIES + tiles.rows
    rows_of_tile = tiles.rows
    differentiate = make_backward(isa)

    @inline
    def scratch_at(at, p):
        tile, turned = (p.workers, KEYS * QUERIES), (p.workers, turned_rows * KEYS)
        of_keys, of_values = (p.workers, KEYS, p.wide), (p.workers, KEYS, p.columns)
        # float32 has no memory of its own for these
        own = p.workers if narrow else 0
        return Scratch(
            array_at(at + p.scores, tile, np.float32),
            array_at(at + p.slopes, tile, np.float32),
            array_at(at + p.transposed, turned, np.float32),
            array_at(at + p.p, (own, KEYS * QUERIES), operand),
            array_at(at + p.ds, (own, KEYS * QUERIES), operand),
            array_at(at + p.ds_turned, (own, turned_rows * KEYS), operand),
            array_at(at + p.k, of_keys, operand),
            array_at(at + p.v, of_values, operand),
            array_at(at + p.k_right, (own, KEYS, p.wide), operand),
            array_at(at + p.room, (p.workers, KEYS * max(p.wide, p.columns) * narrow), np.float32),
            array_at(at + p.dk, of_keys, np.float32),
            array_at(at + p.dv, of_values, np.float32),
            array_at(at + p.mask, tile, np.uint8),
            array_at(at + p.bias, tile, np.float32),
        )

    @inline
    def prepared_at(at, p):
        slots = p.workers if p.splits == 1 else p.batch * p.heads
        return Prepared(
            array_at(at + p.q, (slots, p.high, p.wide), operand),
            array_at(at + p.q_packed, (slots, p.high * p.wide), operand),
            array_at(at + p.do, (slots, p.high, p.columns), operand),
            array_at(at + p.do_packed, (slots, p.high * p.columns), operand),
            array_at(at + p.dq, (slots, p.splits, p.high + rows_of_tile, p.wide), np.float32),
        )

    @inline
    def copies_at(at, p, d):
        """A contiguous (B, H, S, d): a copy for each query head."""
        head = p.keys * d * 4
        return Strided(at, p.heads * head, head, d * 4, p.heads, p.keys, d)

    @kernel
    def call(q, k, v, do, out, lse, grad_lse, dq, dk, dv, scores, room, numbers, strides, reals):
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = RealNumbers(*unpacked(reals, REALS))
        given = given_at(p, o, f, p.bounds != 0, strides, (q, k, v, do, out, lse, grad_lse))
        results = results_at(p, strides, (dq, dk, dv, scores))
        sums = results
        if p.heads > p.kv_heads:
            copies = (
                copies_at(room + p.copies_dk, p, p.head_dim),
                copies_at(room + p.copies_dv, p, p.value_dim),
            )
            sums = Gradients(results.dq, copies[0], copies[1], results.scores)
        threads = limit_threads(p.workers)
        left = differentiate(
            given,
            _found_at(room, p),
            Factors(F(f.scores), F(f.dq), F(f.dk)),
            semantics_at(o, f.softcap, False),
            Sizes(p.heads, p.kv_heads, p.length, p.keys, p.splits, p.workers),
            array_at(room + p.counter, (1,), np.int64),
            scratch_at(room, p),
            prepared_at(room, p),
            sums,
            results,
        )
        if p.workers < threads:
            use_threads(threads)
        return left

    return call
