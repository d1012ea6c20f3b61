"""Rotating rows by a Hadamard matrix before they are rounded.

Keys of real models have a few channels that are much larger than the others, and one scale per row
wastes the digits of the rest on them. A Hadamard matrix spreads every channel over all; applied to
query and key both, it leaves their products unchanged (QuaRot, arXiv 2404.00456). Additions and
subtractions in a fixed order and one factor: the same bits on every machine.
"""

from __future__ import annotations

import llvmlite.ir as ir
import numpy as np
from numba import types
from numba.extending import intrinsic

from ..jit.compiler import bare, kernel
from ..jit.parallel import over_tasks
from ..jit.threads import least_work, one_at_a_time, refuse_after_fork
from .quantize_kernels import INFINITE, LARGEST, MAGNITUDE

F = np.float32
I = np.int32
LANES = 16  # numbers that are transformed in one register, or two or four narrower ones
SIGN = 0x80000000
CHUNK = 256  # rows per task
HUGE = I((127 + 100) << 23)  # bits of 2**100: sums of 576 such numbers still are finite
DOWN, UP = F(2.0**-32), F(2.0**32)
WHOLE = 1 << 20  # larger than any row: its Hadamard matrices are not limited


def block_of(channels: int) -> int:
    """The largest power of two that divides `channels`: the size of the Hadamard matrices."""
    return channels & -channels


def shared_block(channels: int, first: int) -> int:
    """The largest matrix whose blocks rotate a row and its `first` channels by themselves."""
    return min(block_of(channels), block_of(first))


def _place(context, b, array_type, array, first, lanes):
    """Pointer to `lanes` numbers of a float32 array, from element `first` on."""
    base = context.make_array(array_type)(context, b, array).data
    return b.bitcast(b.gep(base, [first]), ir.VectorType(ir.FloatType(), lanes).as_pointer())


def _lane_butterfly(b, x, half):
    """One stage of butterflies in a register: x[i] + x[i + half] where bit `half` of i is 0, else their difference.

    Each lane adds its partner to itself or, in the second half, to itself with the sign changed.
    """
    lanes = x.type.count
    index = ir.VectorType(ir.IntType(32), lanes)
    partner = b.shuffle_vector(x, x, ir.Constant(index, [i ^ half for i in range(lanes)]))
    sign = ir.Constant(index, [SIGN if i & half else 0 for i in range(lanes)])
    return b.fadd(partner, b.bitcast(b.xor(b.bitcast(x, index), sign), x.type))


def _register_butterflies(registers):
    """An intrinsic for all stages of `registers` times `LANES` numbers, which it loads once."""

    @intrinsic
    def butterflies(typingctx, out, first):
        def codegen(context, b, signature, args):
            array, first = args
            places = [
                _place(context, b, signature.args[0], array, at, LANES)
                for at in (b.add(first, first.type(i * LANES)) for i in range(registers))
            ]
            x = [b.load(place, align=4) for place in places]
            for stage in range(LANES.bit_length() - 1):
                x = [_lane_butterfly(b, lanes, 1 << stage) for lanes in x]
            half = 1
            while half < registers:
                for i in (i for i in range(registers) if not i & half):
                    x[i], x[i + half] = b.fadd(x[i], x[i + half]), b.fsub(x[i], x[i + half])
                half *= 2
            for place, lanes in zip(places, x, strict=True):
                b.store(lanes, place, align=4)
            return context.get_dummy_value()

        return types.void(out, first), codegen

    return butterflies


@intrinsic
def _butterfly_of_halves(typingctx, out, first, half):
    """`LANES` numbers of `out` from `first` on plus, and less, those that are `half` behind."""

    def codegen(context, b, signature, args):
        array, first, half = args
        places = [
            _place(context, b, signature.args[0], array, at, LANES)
            for at in (first, b.add(first, half))
        ]
        x, y = (b.load(place, align=4) for place in places)
        b.store(b.fadd(x, y), places[0], align=4)
        b.store(b.fsub(x, y), places[1], align=4)
        return context.get_dummy_value()

    return types.void(out, first, half), codegen


_butterflies_of_one = _register_butterflies(1)
_butterflies_of_four = _register_butterflies(4)


@bare
def _small_butterflies(out, block):
    """All stages of blocks that do not fill a register."""
    half = 1
    while half < block:
        for first in range(0, out.size, 2 * half):
            for e in range(first, first + half):
                x, y = out[e], out[e + half]
                out[e] = x + y
                out[e + half] = x - y
        half *= 2


@bare
def _large_butterflies(out, block):
    """All stages of blocks of `LANES` and more channels."""
    half = np.int64(LANES)
    if block >= 4 * LANES:
        half = np.int64(4 * LANES)
        for first in range(np.int64(0), out.size, half):
            _butterflies_of_four(out, first)
    else:
        for first in range(np.int64(0), out.size, half):
            _butterflies_of_one(out, first)
    while half < block:
        for first in range(np.int64(0), out.size, 2 * half):
            for e in range(first, first + half, LANES):
                _butterfly_of_halves(out, e, half)
        half *= 2


@bare
def _rotate_row(row, bits, block, factor, out):
    top = I(0)
    for e in range(row.size):
        top = max(top, I(bits[e] & MAGNITUDE))
    large = top > HUGE
    unit = factor * DOWN if large else factor
    for e in range(row.size):
        out[e] = row[e] * unit
    if block < LANES:
        _small_butterflies(out, block)
    else:
        _large_butterflies(out, block)
    if large:  # a finite row stays finite
        for e in range(row.size):
            x = out[e] * UP
            out[e] = x if x != x or top >= INFINITE else min(max(x, -LARGEST), LARGEST)


@bare
def rotate_row(row, most):
    """One row (D,) float32 as `rotate` gives it, in place."""
    block = min(row.size & -row.size, most)
    if block > 1:
        _rotate_row(row, row.view(I), block, F(np.sqrt(1.0 / block)), row)


@bare
def _rotate_chunk(task, chunk, x, bits, block, factor, out):
    for i in range(task * chunk, min((task + 1) * chunk, x.shape[0])):
        _rotate_row(x[i], bits[i], block, factor, out[i])


@kernel
def _rotate(x, bits, chunk, block, factor, out):
    """Rows of x (N, D) float32 with their bits as int32, into out (N, D), `chunk` rows a task."""
    tasks = (x.shape[0] + chunk - 1) // chunk
    over_tasks(_rotate_chunk, tasks, (chunk, x, bits, block, factor, out))


def rotate(x: np.ndarray, most: int = WHOLE) -> np.ndarray:
    """The rows of x (..., D) times a Hadamard matrix, float32.

    Twice gives x again, but for rounding.

    Where D is no power of two, one matrix for each `block_of(D)` channels, and none larger than
    `most`, a power of two. A row that is not finite stays so, a finite one stays finite.
    """
    rows = np.ascontiguousarray(x, F).reshape(-1, x.shape[-1])
    block = min(block_of(rows.shape[1]), most)
    if block == 1:
        return rows.reshape(x.shape).copy()
    out = np.empty_like(rows)
    refuse_after_fork()
    chunk = CHUNK * least_work()
    with one_at_a_time():
        _rotate(rows, rows.view(I), chunk, block, F(block**-0.5), out)
    return out.reshape(x.shape)
