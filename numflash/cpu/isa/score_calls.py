"""How kernels call score and mask functions that were compiled apart: by address, a tile at a time.

A tile function changes rows of scores in place; `numflash.flex.emit` says what it takes, and
`numflash.flex.emit_cached` what those of decoding take. Block
states say which blocks no row attends to (0), where the mask has to be asked
(1) and where it hides nothing (2).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare, own
from .vectors import F32, I8, I32, I64, data, pointer

FULL = np.uint8(2)
HIDDEN = -(1 << 31)  # int32 score of a key that is not seen
HUGE = np.int32(0x7C000000)  # bits of 2**121: float32 does not hold sums of such scores


def function_type(real: ir.Type) -> ir.FunctionType:
    """The LLVM type of all tile functions.

    void(frame, x, slope, base, stride, rows, count, b, h, q, k, scale, unit).
    """
    pointers = [I8.as_pointer(), real.as_pointer(), real.as_pointer(), I32.as_pointer()]
    return ir.FunctionType(ir.VoidType(), [*pointers, *[I64] * 7, real, real])


def cached_function_type() -> ir.FunctionType:
    """The LLVM type of decoding's tile functions.

    int64(frame, x, shift, scales, rows, count, rounded, b, h, q, k, scale, unit).
    """
    floats = F32.as_pointer()
    return ir.FunctionType(I64, [I8.as_pointer(), floats, floats, floats, *[I64] * 7, F32, F32])


class Function(NamedTuple):
    """A compiled function and what it captured, as addresses."""

    address: Any
    frame: Any


class Corner(NamedTuple):
    """The first score of a tile: batch entry as the function sees it, query head, row and key."""

    b: Any
    h: Any
    row: Any
    key: Any


def _call(context, b, sig, args, arrays):
    """Call a tile function: the intrinsics below.

    sig, args : function, x: Rows, `arrays` more of Packed, rows, count, corner, scale, unit
    """

    def field(n, name):
        """(Numba type, value) of a field of a named tuple."""
        place = sig.args[n].fields.index(name)
        return sig.args[n].types[place], b.extract_value(args[n], place)

    def whole(n, name):
        kind, value = field(n, name)
        return context.cast(b, value, kind, types.int64)

    def first_of(n, target):
        """Where an operand begins; null if there is none."""
        if n > 1 + arrays:
            return ir.Constant(target, None)
        kind, array = field(n, "base")
        element = context.get_data_type(kind.dtype).as_pointer()
        first = b.bitcast(data(context, b, kind, array), element)
        return b.bitcast(b.gep(first, [whole(n, "first")]), target)

    real = F32 if field(1, "base")[0].dtype == types.float32 else ir.DoubleType()
    kind = function_type(real)
    rows, count, corner, scale, unit = range(2 + arrays, 7 + arrays)
    b.call(
        b.inttoptr(whole(0, "address"), kind.as_pointer()),
        [
            pointer(b, whole(0, "frame")),
            *(first_of(n, target) for n, target in enumerate(kind.args[1:4], 1)),
            whole(1, "stride"),
            args[rows],
            args[count],
            *(whole(corner, name) for name in Corner._fields),
            args[scale],
            args[unit],
        ],
    )
    return context.get_dummy_value()


def _signature(function, x, more, corner):
    real = x.types[0].dtype
    return types.void(function, x, *more, types.int64, types.int64, corner, real, real)


@intrinsic
def call_tile(typingctx, function, x, rows, count, corner, scale, unit):
    """f(function, x: Rows, rows, count, corner, scale, unit): change rows x count scores in place.

    A score times `scale` is in natural units, one of these in units of `unit`.
    """

    def codegen(context, builder, sig, args):
        return _call(context, builder, sig, args, 0)

    return _signature(function, x, (), corner), codegen


@intrinsic
def call_slopes(typingctx, function, x, slope, rows, count, corner, scale, unit):
    """The same of a gradient tile: slope, Packed, becomes d score_mod / d score."""

    def codegen(context, builder, sig, args):
        return _call(context, builder, sig, args, 1)

    return _signature(function, x, (slope,), corner), codegen


@intrinsic
def call_rounded(typingctx, function, x, to, base, rows, count, corner, scale, unit):
    """The same of scores that stay as they are: int16 `to`, Packed, becomes the changed ones rounded,
    less int32 `base`, Packed, of their row.
    """

    def codegen(context, builder, sig, args):
        return _call(context, builder, sig, args, 2)

    return _signature(function, x, (to, base), corner), codegen


@intrinsic
def call_cached(typingctx, function, x, shift, scales, rows, count, rounded, corner, scale, unit):
    """f(function, x, shift, scales, rows, count, rounded, corner, scale, unit) -> which rows have met
    NaN, or what float32 does not hold: a tile function of decoding. x, shift and scales are addresses.
    """

    def codegen(context, b, sig, args):
        def field(n, name):
            place = sig.args[n].fields.index(name)
            return context.cast(
                b, b.extract_value(args[n], place), sig.args[n].types[place], types.int64
            )

        kind = cached_function_type()
        floats = (b.inttoptr(args[n], F32.as_pointer()) for n in (1, 2, 3))
        return b.call(
            b.inttoptr(field(0, "address"), kind.as_pointer()),
            [
                b.inttoptr(field(0, "frame"), I8.as_pointer()),
                *floats,
                *args[4:7],
                *(field(7, name) for name in Corner._fields),
                *args[8:],
            ],
        )

    number, real = types.int64, types.float32
    addresses = [types.intp] * 3
    return number(function, *addresses, number, number, number, corner, real, real), codegen


@own
def batch_of(tiles, b):
    """The batch entry as the functions shall see it."""
    return tiles.batch[b] if tiles.batch.size > 0 else b


@bare
def blocks_of(tiles, b, h, first_row, last_row):
    """Where the states of the blocks that hold some rows are: (b, h, first block, last block)."""
    nb, nh, _, _ = tiles.states.shape
    return min(b, nb - 1), min(h, nh - 1), first_row // tiles.rows, last_row // tiles.rows


@bare
def state(states, blocks, column):
    """Of `blocks_of` in a column of blocks: 0 if all are empty, 2 if all are full, else 1."""
    b, h, first, last = blocks
    low, high = FULL, np.uint8(0)
    for block in range(first, last + 1):
        found = states[b, h, block, column]
        low, high = min(low, found), max(high, found)
    if high == 0:
        return 0
    return 2 if low == FULL else 1


@bare
def trimmed(tiles, b, h, first_row, last_row, first, stop, unit):
    """Keys first .. stop without the empty blocks at either end.

    The first one stays a multiple of `unit`.
    """
    if first >= stop:
        return stop, stop
    states, keys = tiles.states, tiles.keys
    blocks = blocks_of(tiles, b, h, first_row, last_row)
    column, last = first // keys, min((stop - 1) // keys, states.shape[3] - 1)
    while column <= last and state(states, blocks, column) == 0:
        column += 1
    if column > last:
        return stop, stop
    end = last
    while state(states, blocks, end) == 0:
        end -= 1
    start = first if column == first // keys else column * keys
    stop = stop if end == last else (end + 1) * keys
    return max(first, start // unit * unit), stop


@bare
def any_but(tiles, b, h, first_row, last_row, first, stop, kind):
    """Whether some block of these rows and keys has another state than `kind`."""
    states, keys = tiles.states, tiles.keys
    blocks = blocks_of(tiles, b, h, first_row, last_row)
    found = False
    for column in range(first // keys, min((stop + keys - 1) // keys, states.shape[3])):
        found = found or state(states, blocks, column) != kind
    return found


@bare
def all_empty(tiles, b, h, first_row, last_row, first, stop):
    """Whether every block of these rows and keys is known to be empty."""
    known = tiles.states.size > 0
    return known and not any_but(tiles, b, h, first_row, last_row, first, stop, 0)


@bare
def has_holes(tiles, b, h, first_row, last_row):
    """Whether there are empty blocks between those that some of these rows attend to."""
    nb, nh, _, _ = tiles.spans.shape
    b, h = min(b, nb - 1), min(h, nh - 1)
    found = False
    for block in range(first_row // tiles.rows, last_row // tiles.rows + 1):
        found = found or tiles.spans[b, h, block, 4] != 0
    return found


@bare
def full_run(tiles, b, h, first_row, last_row, first, stop):
    """Keys of first .. stop that all these rows see, by the longest runs of their full blocks."""
    nb, nh, blocks, _ = tiles.spans.shape
    if blocks == 0:
        return first, first
    b, h = min(b, nb - 1), min(h, nh - 1)
    start, end = first, stop
    for block in range(first_row // tiles.rows, last_row // tiles.rows + 1):
        start = max(start, tiles.spans[b, h, block, 2])
        end = min(end, tiles.spans[b, h, block, 3])
    return (start, end) if start < end else (first, first)


@bare
def must_mask(tiles, b, h, first_row, last_row, first, stop):
    """Whether some block of these rows and keys is not full."""
    known = tiles.states.size > 0
    return not known or any_but(tiles, b, h, first_row, last_row, first, stop, 2)
