"""How kernels call score and mask functions that were compiled apart: by address, a tile at a time.

A tile function changes rows of scores in place; `numflash.flex.emit` says what it takes. Block
states say which blocks no row attends to (0), where the mask has to be asked
(1) and where it hides nothing (2).
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from ...jit.compiler import bare
from .vectors import F32, I8, I32, I64, data, pointer

FULL = np.uint8(2)


def function_type(real: ir.Type) -> ir.FunctionType:
    """The LLVM type of all tile functions.

    void(frame, x, slope, base, stride, rows, count, b, h, q, k, scale, unit).
    """
    pointers = [I8.as_pointer(), real.as_pointer(), real.as_pointer(), I32.as_pointer()]
    return ir.FunctionType(ir.VoidType(), [*pointers, *[I64] * 7, real, real])


def _call(context, b, sig, address, frame, arrays, rest):
    """Call a tile function.

    arrays : x, slope and base, as (position in sig, array, offset) or None
    """
    real = F32 if sig.args[arrays[0][0]].dtype == types.float32 else ir.DoubleType()
    kind = function_type(real)
    pointers = []
    for found, target in zip(arrays, kind.args[1:4], strict=True):
        if found is None:
            pointers.append(ir.Constant(target, None))
        else:
            place, array, offset = found
            element = context.get_data_type(sig.args[place].dtype)
            first = b.bitcast(data(context, b, sig.args[place], array), element.as_pointer())
            pointers.append(b.bitcast(b.gep(first, [offset]), target))
    b.call(b.inttoptr(address, kind.as_pointer()), [pointer(b, frame), *pointers, *rest])
    return context.get_dummy_value()


@intrinsic
def call_tile(typingctx, address, frame, x, at, stride, rows, count, b, h, q, k, scale, unit):
    """f(address, frame, x, at, stride, rows, count, b, h, q, k, scale, unit).

    Change scores x[at ...] in place.
    """
    sig = types.void(types.intp, types.intp, x, *[types.int64] * 8, x.dtype, x.dtype)

    def codegen(context, builder, sig, a):
        return _call(context, builder, sig, a[0], a[1], ((2, a[2], a[3]), None, None), a[4:])

    return sig, codegen


@intrinsic
def call_slopes(
    typingctx, address, frame, x, at, slope, slope_at, stride, rows, count, b, h, q, k, scale, unit
):
    """The same of a gradient tile: slope[slope_at ...] becomes d score_mod / d score."""
    sig = types.void(
        types.intp, types.intp, x, types.int64, slope, *[types.int64] * 8, x.dtype, x.dtype
    )

    def codegen(context, builder, sig, a):
        arrays = (2, a[2], a[3]), (4, a[4], a[5]), None
        return _call(context, builder, sig, a[0], a[1], arrays, a[6:])

    return sig, codegen


@intrinsic
def call_rounded(
    typingctx, address, frame, x, at, to, to_at, base, base_at, stride, rows, count, b, h, q, k,
    scale, unit,
):  # fmt: skip
    """The same of scores that stay as they are: int16 to[to_at ...] becomes the changed ones rounded,
    less int32 base[base_at ...] of their row.
    """
    sig = types.void(
        types.intp, types.intp, x, types.int64, to, types.int64, base, *[types.int64] * 8,
        x.dtype, x.dtype,
    )  # fmt: skip

    def codegen(context, builder, sig, a):
        arrays = tuple((n, a[n], a[n + 1]) for n in (2, 4, 6))
        return _call(context, builder, sig, a[0], a[1], arrays, a[8:])

    return sig, codegen


@bare
def batch_of(tiles, b):
    """The batch entry as the functions shall see it."""
    return tiles.batch[b] if tiles.batch.size > 0 else b


@bare
def state(tiles, b, h, first_row, last_row, key):
    """Of the blocks of some rows at a key: 0 if all are empty, 2 if all are full, else 1."""
    states = tiles.states
    nb, nh, _, columns = states.shape
    b, h, column = min(b, nb - 1), min(h, nh - 1), min(key // tiles.keys, columns - 1)
    low, high = FULL, np.uint8(0)
    for block in range(first_row // tiles.rows, last_row // tiles.rows + 1):
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
    start = first
    while start < stop and state(tiles, b, h, first_row, last_row, start) == 0:
        start = (start // tiles.keys + 1) * tiles.keys
    if start >= stop:
        return stop, stop
    while stop > start and state(tiles, b, h, first_row, last_row, stop - 1) == 0:
        stop = max(start, (stop - 1) // tiles.keys * tiles.keys)
    return max(first, start // unit * unit), stop


@bare
def any_but(tiles, b, h, first_row, last_row, first, stop, kind):
    """Whether some block of these rows and keys has another state than `kind`."""
    key = first
    while key < stop:
        if state(tiles, b, h, first_row, last_row, key) != kind:
            return True
        key = (key // tiles.keys + 1) * tiles.keys
    return False


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
