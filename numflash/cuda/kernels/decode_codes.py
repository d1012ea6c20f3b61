"""INT4 on the card: a row's codes, two codes a byte, and the fragments that products read.

A code c stands for the number 2 c - 15. A byte holds the codes of two channels, `KEY_PAIR` or
`VALUE_PAIR` apart: the first in its low half. So the low halves of a word are a fragment's register
as INT8 has it, and the high halves another: of the same 32 channels of a key, or of the next 8
channels of a value.
"""

from __future__ import annotations

from typing import Any

from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import NO_SCALE

i32, u32, f32 = types.int32, types.uint32, types.float32
KEY_PAIR, VALUE_PAIR = 16, 8  # channels between those of a byte
NUMBER_BITS = 3  # an operand is a number times 2**3: sums of 256 channels still fit int32


@device_function
def numbers(word, high):
    """Four numbers times 8, as signed bytes, of the high or the low halves of a word's bytes.

    16 c - 128 is the byte c0 with its sign turned, and 8 more fill the bits below: 8 (2 c - 15).
    A shift and two operations of three inputs for all eight codes.
    """
    return u32(((word if high else word << u32(4)) & u32(0xF0F0F0F0)) ^ u32(0x88888888))


def make_read_keys(packed: bool) -> Any:
    """read_keys(ka, at, chunk, pair): operands of 16 keys and 64 channels, the pair-th ones.

    ka : 4 words for 32 channels, then for the next 32
    at, chunk : this lane's row of a tile and the place of its first chunk
    """

    @device_function
    def read_bytes(ka, at, chunk, pair):
        for step in range(2):
            ptx.ldmatrix(ka, 4 * step, at + ((chunk ^ u32(4 * pair + 2 * step)) << u32(4)))

    @device_function
    def read_codes(ka, at, chunk, pair):
        codes = cuda.local.array(4, u32)
        ptx.ldmatrix(codes, 0, at + ((chunk ^ u32(2 * pair)) << u32(4)))
        for i in range(4):  # 8 keys of 32 channels: the first 16 are low halves
            ka[4 * (i >> 1) + (i & 1)] = numbers(codes[i], False)
            ka[4 * (i >> 1) + (i & 1) + 2] = numbers(codes[i], True)

    return read_codes if packed else read_bytes


def make_read_values(packed: bool) -> Any:
    """read_values(va, at, chunk, n, half): operands of 16 channels, the warp's n-th ones, and 64
    keys, half = 0 or 1.

    va : 4 words for 32 keys, then for the next 32
    at, chunk : this lane's row of a tile and the place of its first chunk
    """

    @device_function
    def read_bytes(va, at, chunk, n, half):
        at += u32(16 * n * KEY_BLOCK)
        for step in range(2):
            ptx.ldmatrix(va, 4 * step, at + ((chunk ^ u32(4 * half + 2 * step)) << u32(4)))

    @device_function
    def read_codes(va, at, chunk, n, half):
        codes = cuda.local.array(4, u32)
        at += u32(VALUE_PAIR * n * KEY_BLOCK)
        ptx.ldmatrix(codes, 0, at + ((chunk ^ u32(4 * half)) << u32(4)))
        for i in range(4):  # 16 keys: the first 8 channels are low halves
            va[2 * i] = numbers(codes[i], False)
            va[2 * i + 1] = numbers(codes[i], True)

    return read_codes if packed else read_bytes


@device_function
def warp_sum_i32(x):
    for n in range(5):
        x = i32(x + ptx.shuffle_xor_i32(x, u32(1 << n)))
    return x


@device_function
def code_of(x, steps):
    """The code of x, a whole number up to CODE_ONE; `steps` codes are the length of 65536."""
    return ptx.imin(ptx.imax(i32((x * steps) >> 16) + 8, i32(0)), i32(15))


def make_round_row(turns: int) -> Any:
    """round_row(x, channels, top, lane, codes) -> scale: a warp's row as `int4.quantize` has it.

    x : rows of float32 spread over the lanes, a lane's are 32 apart; zeros from `channels` on
    top : the bits of the largest |x|; infinity and NaN give any codes
    codes : int32, written; 0 from `channels` on
    """

    @device_function
    def round_row(x, channels, top, lane, codes):
        whole = cuda.local.array(turns, i32)
        largest = ptx.from_bits(u32(top))
        factor, unit = f32(0), f32(0)
        if largest > NO_SCALE:
            factor = ptx.div(f32(fx.CODE_ONE), largest)
            unit = ptx.div(largest, f32(fx.CODE_ONE))
        for t in range(turns):
            whole[t] = ptx.to_int(ptx.mul(x[t], factor))
        best, gain, scale = i32(fx.CODE_STEPS[0]), f32(-1), f32(0)
        for steps in fx.CODE_STEPS:
            product, square = i32(0), i32(0)
            for t in range(turns):
                if lane + 32 * t < channels:
                    number = i32(2 * code_of(whole[t], i32(steps)) - 15)
                    product = i32(product + whole[t] * number)
                    square = i32(square + number * number)
            along = ptx.to_float(warp_sum_i32(product))
            length = ptx.to_float(warp_sum_i32(square))
            won = ptx.div(ptx.mul(along, along), length)
            if won > gain:
                best, gain, scale = i32(steps), won, ptx.div(along, length)
        for t in range(turns):
            codes[t] = code_of(whole[t], best) if lane + 32 * t < channels else i32(0)
        return ptx.mul(unit, scale)

    return round_row
