"""One call of the float kernels in one compiled function.

Pack K and V, attend, check the limits of float32.

What a call needs besides its arrays comes as two arrays of numbers, which `launch_float.FloatPlan`
prepares once for all equal calls. Arrays come as addresses: unpacking thirty Python objects takes
as long as attention over 64 keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, kernel
from ...jit.memory import array_at, reinterpret, unpacked
from ...jit.parallel import limit_threads, use_threads
from ..head_shares import heads_are_shared_out, least_heads
from ..isa.strided import strided_at
from ..semantics import OPTION_NUMBERS, OptionNumbers, semantics_at
from .flash_float import make_attend
from .float_isas import FLOAT_ISAS
from .float_state import Operands, Results, Sizes

F = np.float32
TASKS = 4  # query tiles for each thread, at least


class Numbers(NamedTuple):
    """What the compiled call reads from one int64 array, in this order, before `OptionNumbers`."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    keys: int
    head_dim: int
    value_dim: int
    words: int  # of 32 bits in a row of packed K
    key_words: int  # in a row of K
    columns: int  # of a row of packed V that are multiplied
    value_row: int  # all of them
    block_q: int  # at most
    parts: int  # of the keys where rows are few (`few_rows`), 0 where keys are packed
    packed_keys: int  # from here on bytes from the start of scratch memory
    magnitudes: int
    limits: int
    redo: int
    counter: int
    states: int  # of the parts of few rows
    spoiled: int
    lse: int  # where the caller needs none
    packed_values: int  # last: a call that reads V in place has no memory for it
    narrow: int  # whether the result is bfloat16
    in_place: int  # whether V is read in place
    panels: int  # of packed keys, per head; from here on what the options' arrays decide
    value_rows: int  # of packed V, per head
    workers: int  # at most
    stops: int  # an address


class Factors(NamedTuple):
    """What it reads from one float64 array: scale and softcap, both times log2(e)."""

    scale: float
    softcap: float


REDO = Numbers._fields.index("redo")
LSE = Numbers._fields.index("lse")
NARROW = Numbers._fields.index("narrow")
IN_PLACE = Numbers._fields.index("in_place")
PLACES = slice(Numbers._fields.index("packed_keys"), NARROW)
NUMBERS = len(Numbers._fields)
FACTORS = len(Factors._fields)


@kernel
def addresses(q, k, v, out, lse):
    """Addresses of five arrays; NumPy takes ten times as long to give them."""
    return q.ctypes.data, k.ctypes.data, v.ctypes.data, out.ctypes.data, lse.ctypes.data


@bare
def operands_at(p, strides, q_at, k_at, v_at, out_at, width):
    """Q, K, whose rows have `width` numbers, V and the result, where they are."""
    return (
        strided_at(strides, 0, q_at, p.heads, p.length, p.head_dim),
        strided_at(strides, 1, k_at, p.kv_heads, p.keys, width),
        strided_at(strides, 2, v_at, p.kv_heads, p.keys, p.value_dim),
        strided_at(strides, 3, out_at, p.heads, p.length, p.value_dim),
    )


@bare
def rows_per_task(block_q, mr, n, length, workers):
    """Rows of a query tile.

    The tiling's, or fewer for short queries, and where several threads would have too few tiles.

    Always whole groups of rows, so that the bits do not depend on the number of threads.
    """
    rows = block_q
    while workers > 1 and rows > 4 * mr and n * ((length + rows - 1) // rows) < TASKS * workers:
        rows = rows // 2 // mr * mr
    return min(rows, (length + mr - 1) // mr * mr)


@functools.cache
def make_call(isa: str, kind: str, key_block: int = 0) -> Callable[..., bool]:
    """call(q, k, v, out, lse, room, numbers, strides, factors) -> whether a row is to be done again
    in float64.

    q, k, v, out, lse, room : addresses of q (B, H, L, D), k (B, Hkv, S, whole words) and v (B, Hkv,
        S, Dv), operands whose rows are contiguous;
        of out (B, H, L, Dv) float32, or bits of bfloat16 as the numbers say, and lse (B, H, L) float32;
        of scratch memory
    strides : of q, k, v and out, as `strided_at` takes them
    key_block : keys of a block, 0 for the tiling's
    """
    tiles = FLOAT_ISAS[isa]
    panel = tiles.panel
    rows_of_tile = tiles.rows
    operand: type[np.generic] = np.float32 if tiles.group == 1 else np.uint16
    attend = make_attend(isa, kind, key_block) if key_block else make_attend(isa, kind)
    least = least_heads(isa)

    @kernel
    def call(q_at, k_at, v_at, out_at, lse_at, room, numbers, strides, factors):
        p = Numbers(*unpacked(numbers[:NUMBERS], NUMBERS))
        o = OptionNumbers(*unpacked(numbers[NUMBERS:], OPTION_NUMBERS))
        f = Factors(*unpacked(factors, FACTORS))
        n, n_kv = p.batch * p.heads, p.batch * p.kv_heads
        threads = limit_threads(p.workers)
        workers = min(p.workers, threads)
        counter = array_at(room + p.counter, (2,), np.int64)
        counter[0] = 0
        counter[1] = 0
        stops = array_at(p.stops, (p.batch,), np.int64)
        q, k, v, out = operands_at(p, strides, q_at, k_at, v_at, out_at, p.key_words)
        by_head = heads_are_shared_out(n_kv, workers, stops, least)
        slots = workers if by_head else n_kv
        if p.in_place != 0:
            values = array_at(v_at, (n_kv, p.keys * p.value_dim), operand)
        else:
            words = array_at(room + p.packed_values, (slots, p.value_rows * p.value_row), np.uint32)
            values = reinterpret(words, operand)
        keys = array_at(room + p.packed_keys, (slots, p.panels * panel * p.words), np.uint32)
        semantics = semantics_at(o, f.softcap, False)
        operands = Operands(
            q,
            k,
            v,
            reinterpret(keys, operand),
            values,
            array_at(room + p.magnitudes, (slots, p.panels), np.uint32),
            array_at(room + p.limits, (slots,), np.float32),
            stops,
            p.head_dim * max(1.0, abs(f.scale)),
        )
        results = Results(
            out,
            array_at(lse_at, (n, p.length), np.float32),
            array_at(room + p.redo, (n, p.length), np.uint8),
            p.narrow != 0,
        )
        rows = rows_per_task(p.block_q, rows_of_tile, n, p.length, 1 if by_head else workers)
        sizes = Sizes(
            p.heads,
            p.kv_heads,
            p.keys,
            p.columns,
            p.value_row,
            rows,
            workers,
            by_head,
            p.in_place != 0,
        )
        attend(operands, results, F(f.scale), semantics, sizes, counter)
        if workers < threads:
            use_threads(threads)
        return counter[1] != 0

    return call
