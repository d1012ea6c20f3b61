"""The rows of a query tile: loaded at its beginning, their results written at its end."""

from __future__ import annotations

import functools

import numpy as np

from ...interop.halves import bfloat16_of
from ...jit.compiler import inlined
from ...jit.memory import array_at, reinterpret
from ...numerics.fixedpoint import LN2
from ..isa.strided import row_at
from ..isa.vectors import address
from ..semantics import seen_ranges
from . import float_rows
from .flash_rows import LOWEST
from .float_isas import FLOAT_ISAS

F = np.float32
HIDDEN = F(-np.inf)
MAGNITUDE = np.uint32(0x7FFFFFFF)


@functools.cache
def make_query_rows(name: str):
    """(load_tile, store_rows) for register tiles of `name`."""
    isa = FLOAT_ISAS[name]
    lanes, group, mr = isa.lanes, isa.group, isa.rows
    total_of = float_rows.row_total(name)
    times = float_rows.row_times(name)
    beyond = float_rows.row_beyond(name)
    operand, word = (np.float32, np.uint32) if group == 1 else (np.uint16, np.uint16)
    spare = np.uint32(32 - 8 * np.dtype(word).itemsize)  # bits of a float32 that no operand has

    @inlined
    def beyond_limit(row, limit):
        """Whether an operand of the row is above the limit, or not finite; `limit` is bits."""
        bits, whole = reinterpret(row, word), row.size // (lanes * group)
        found = beyond(row, 0, whole, limit)
        for e in range(whole * lanes * group, row.size):
            found |= (bits[e] & (MAGNITUDE >> spare)) > (limit >> spare)
        return found

    @inlined
    def load_tile(q, limit, semantics, tile, s, state):
        """Load the rows of a tile as operands, the keys each attends to, and the empty state.

        Returns the range of keys that any row attends to.
        """
        start, lo, hi = row_at(q, tile.n, tile.row), state.lo[: tile.real], state.hi[: tile.real]
        for i in range(tile.real):
            source = array_at(start + i * q.row, (q.d,), operand)
            target = state.q[i]
            for e in range(source.size):
                target[e] = source[e]
            state.beyond[i] = beyond_limit(source, limit)
        state.m[: tile.real] = HIDDEN
        seen_ranges(semantics, tile.b, tile.h, tile.row, s, lo, hi)
        first, stop = s, 0
        for i in range(tile.real):
            if hi[i] > lo[i]:
                first, stop = min(first, lo[i]), max(stop, hi[i])
        groups = (tile.real + mr - 1) // mr * mr
        state.q[tile.real : groups] = operand(0)
        state.o[:groups], state.l[:groups] = F(0), F(0)
        return first, stop

    @inlined
    def store_rows(tile, shifted, state, counter, results):
        """out = O / l and the LSE of each row, and whether it must be computed again in float64."""
        m, (out, lse, redo, narrow) = state.m, results
        start = row_at(out, tile.n, tile.row)
        for i in range(tile.real):
            sums, place = state.o[i], start + i * out.row
            result = array_at(address(sums) if narrow else place, (out.d,), np.float32)
            total = total_of(state.l, i * lanes)
            seen = state.hi[i] > state.lo[i]
            infinite = False
            if seen:
                r, whole = F(0) if total == F(0) else F(1) / total, result.size // lanes
                infinite = times(sums, 0, whole, r, result, 0)
                for t in range(whole * lanes, result.size):
                    result[t] = sums[t] * r
                    infinite |= not np.isfinite(result[t])
            else:  # `sums` may be NaN: 0 * NaN of keys that other rows attend to
                result[:] = F(0)
            if narrow:
                bits, rounded = reinterpret(result, np.uint32), array_at(place, (out.d,), np.uint16)
                for t in range(rounded.size):
                    rounded[t] = bfloat16_of(bits[t])
            lse[tile.n, tile.row + i] = (
                F((m[i] + np.log2(np.float64(total))) * LN2) if total != F(0) else HIDDEN
            )
            held = m[i] > LOWEST or (m[i] == HIDDEN and not shifted)
            again = seen and (infinite or state.beyond[i] or not held)
            redo[tile.n, tile.row + i] = again
            if again:
                counter[1] = 1

    return load_tile, store_rows
