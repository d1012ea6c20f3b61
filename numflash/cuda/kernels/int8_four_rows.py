"""Four rows of floats at a time: how the kernels around INT8 attention read and reduce them.

A lane has four channels of each row, 16 bytes of float32: a warp, or the half or quarter of it that a
narrow head needs, takes a row in one load, and four rows' loads are under way together. The four
results of a reduction end in different lanes, row n in those whose number ends with n, so that
what follows once a row, such as a division, is done once for all four.

The rows are 0, 1, 8 and 9 of 16, and 2, 4 and 6 further: four consecutive bytes of V as stored
(`flash_int8.permuted_keys`).
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import EXPONENT

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
ROWS = 4  # at a time
CHANNELS = 4  # of a lane and row, side by side
MAGNITUDE = 0x7FFFFFFF
ROUND = f32(1.5 * 2.0**23)  # added, it leaves x rounded to even in the low bits, up to 2**22
# of prmt: bytes 0 and 4; 0, 1, 4 and 5
FIRST_BYTES, LOW_HALVES = u32(0x40), u32(0x5410)


class Shape(NamedTuple):
    """How a warp shares rows.

    lanes : of a row, a power of two;  beside : groups of four rows of a warp;  turns : of 4 channels
        for each lane;  numbers : elements of a lane's four rows
    """

    lanes: int
    beside: int
    turns: int
    numbers: int


def shape_of(channels: int) -> Shape:
    """For padded head sizes (multiples of 32)."""
    lanes = min(32, 1 << (channels // CHANNELS - 1).bit_length())
    turns = -(-channels // (CHANNELS * lanes))
    return Shape(lanes, 32 // lanes, turns, ROWS * CHANNELS * turns)


@device_function
def row_ahead(n):
    """How far row n of the four is from the first."""
    return i32((n & 1) + 8 * (n >> 1))


@device_function
def first_row(place):
    """The first of the four rows that are word `place` of V as stored."""
    return i32(16 * (place >> 2) + 2 * (place & 3))


@functools.cache
def make_load(source: str) -> Any:
    """load(address): the bits of one element."""
    return ptx.load_global_s32 if source == "float32" else ptx.load_global_u16


@functools.cache
def make_as_float(source: str) -> Any:
    """as_float(bits): the element as float32."""

    @device_function
    def as_float(bits):
        if source == "float32":
            return ptx.from_bits(bits)
        return ptx.from_bits(bits << u32(16)) if source == "bfloat16" else ptx.half_to_float(bits)

    return as_float


@functools.cache
def make_is_whole(source: str) -> Any:
    """is_whole(address, row_step, step, channels): whether four channels are one load."""
    size = 4 if source == "float32" else 2

    @device_function
    def is_whole(address, row_step, step, channels):
        low = i32(u32(address) | u32(row_step)) & i32(CHANNELS * size - 1)
        return (low == 0) & (step == i64(size)) & (channels & (CHANNELS - 1) == 0)

    return is_whole


@functools.cache
def make_read(shape: Shape, source: str) -> Any:
    """read(raw, address, steps, first, stop, channels, whole, c): four rows as they are in memory.

    steps = (row, channel) in bytes; rows from `first` on exist up to `stop`; `c` is the lane's first
    channel. `raw` takes zeros for what does not exist; `make_unpack` makes floats of it, later, so
    that no load waits for another.
    """
    size = 4 if source == "float32" else 2
    words = CHANNELS * size // 4
    load_whole = ptx.load_global_v4 if size == 4 else ptx.load_global_v2
    load, span = make_load(source), CHANNELS * shape.lanes

    @device_function
    def read(raw, address, steps, first, stop, channels, whole, c):
        row_step, step = steps
        for i in range(ROWS * shape.turns * words):
            raw[i] = u32(0)
        if whole:
            for r in range(ROWS):
                row = i32(first + row_ahead(r))
                at = address + u64(i64(row) * row_step + i64(c * size))
                for t in range(shape.turns):
                    if row < stop and c + span * t < channels:
                        load_whole(raw, (r * shape.turns + t) * words, at + u64(span * size * t))
        else:
            for r in range(ROWS):
                row = i32(first + row_ahead(r))
                at = address + u64(i64(row) * row_step)
                for t in range(shape.turns):
                    for i in range(CHANNELS):
                        channel = i32(c + span * t + i)
                        if row < stop and channel < channels:
                            bits = u32(load(at + u64(i64(channel) * step)))
                            place = (r * shape.turns + t) * words + (i if size == 4 else i >> 1)
                            raw[place] |= bits << u32(0 if size == 4 else 16 * (i & 1))

    return read


@functools.cache
def make_unpack(shape: Shape, source: str) -> Any:
    """unpack(x, raw): what was read as float32; channel i of row r and turn t is number
    4 * (turns * r + t) + i.
    """
    as_float, wide = make_as_float(source), source == "float32"

    @device_function
    def unpack(x, raw):
        for i in range(shape.numbers):
            if wide:
                x[i] = as_float(raw[i])
            else:
                half = raw[i >> 1] >> u32(16) if i & 1 else raw[i >> 1] & u32(0xFFFF)
                x[i] = as_float(u32(half))

    return unpack


@functools.cache
def make_largest(shape: Shape) -> Any:
    """largest(x, top): in `top` the largest magnitude of the lane's part of each row, as bits."""
    own = CHANNELS * shape.turns

    @device_function
    def largest(x, top):
        for r in range(ROWS):
            top[r] = i32(0)
            for i in range(own):
                top[r] = ptx.imax(top[r], i32(ptx.bits(x[own * r + i]) & u32(MAGNITUDE)))

    return largest


@functools.cache
def make_join(lanes: int, combine: Any, exchange: Any) -> Any:
    """join(x, lane): the four numbers of `x` combined over the lanes of a row.

    Row `lane % 4`'s comes back.
    """
    levels = lanes.bit_length() - 1

    @device_function
    def join(x, lane):
        odd, high = (lane & 1) != 0, (lane & 2) != 0
        front = combine(x[1] if odd else x[0], exchange(x[0] if odd else x[1], u32(1)))
        back = combine(x[3] if odd else x[2], exchange(x[2] if odd else x[3], u32(1)))
        own = combine(back if high else front, exchange(front if high else back, u32(2)))
        for n in range(2, levels):
            own = combine(own, exchange(own, u32(1 << n)))
        return own

    return join


@functools.cache
def make_join_largest(lanes: int) -> Any:
    return make_join(lanes, ptx.imax, ptx.shuffle_xor_i32)


@functools.cache
def make_join_sums(lanes: int) -> Any:
    return make_join(lanes, ptx.add, ptx.shuffle_xor)


@device_function
def spread(x, own, lane):
    """x = the four rows' numbers, of which the lane has `own`."""
    for r in range(ROWS):
        x[r] = ptx.shuffle(own, i32((lane & ~3) | r))


@functools.cache
def make_clear_bad(shape: Shape) -> Any:
    """clear_bad(x, good, lane): zeros in the rows that the lanes' `good` says are not."""
    own = CHANNELS * shape.turns

    @device_function
    def clear_bad(x, good, lane):
        kept = cuda.local.array(ROWS, f32)
        if not ptx.vote_all(i32(good)):
            spread(kept, f32(1) if good else f32(0), lane)
            for r in range(ROWS):
                for i in range(own):
                    x[own * r + i] = f32(0) if kept[r] == f32(0) else x[own * r + i]

    return clear_bad


@device_function
def is_finite(top):
    """Of the bits of a largest magnitude."""
    return top < i32(EXPONENT)


@device_function
def four_bytes(a, b, c, d):
    """Values within a byte, rounded to even, in one register in that order."""
    a, b, c, d = (
        ptx.bits(ptx.add(a, ROUND)),
        ptx.bits(ptx.add(b, ROUND)),
        ptx.bits(ptx.add(c, ROUND)),
        ptx.bits(ptx.add(d, ROUND)),
    )
    return ptx.prmt(ptx.prmt(a, b, FIRST_BYTES), ptx.prmt(c, d, FIRST_BYTES), LOW_HALVES)
