"""INT4 on the card: a row's codes, two codes a byte, and the fragments that products read.

A code c stands for the number 2 c - 15. A byte holds the codes of two channels, `KEY_PAIR` or
`VALUE_PAIR` apart: the first in its low half. So the low halves of a word are a fragment's register
as INT8 has it, and the high halves another: of the same 32 channels of a key, or of the next 8
channels of a value.
"""

from __future__ import annotations

from typing import Any

from ...numerics import fixedpoint as fx
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


def make_key_fragments(d: int, packed: bool) -> Any:
    """key_fragments(kb, codes, at, chunk, step, n): the operand kb of 32 channels, step by step,
    and 16 keys, n = 0 or 1.

    at, chunk : this lane's row of a swizzled tile and the place of its first chunk
    codes : 8 words that are kept from an even step to the next: a chunk has the codes of a step
    """
    row_bytes = d // 2 if packed else d

    @device_function
    def fragments_of_bytes(kb, codes, at, chunk, step, n):
        ptx.ldmatrix(kb, 0, at + u32(16 * n * row_bytes) + ((chunk ^ u32(2 * step)) << u32(4)))

    @device_function
    def fragments_of_codes(kb, codes, at, chunk, step, n):
        if step & 1 == 0:
            ptx.ldmatrix(
                codes, 4 * n, at + u32(16 * n * row_bytes) + ((chunk ^ u32(step)) << u32(4))
            )
        for keys in range(2):
            word = codes[4 * n + 2 * keys + (step & 1)]
            kb[2 * keys] = numbers(word, False)
            kb[2 * keys + 1] = numbers(word, True)

    return fragments_of_codes if packed else fragments_of_bytes


def make_value_fragments(value_tiles: int, block_k: int, packed: bool) -> Any:
    """value_fragments(kb, codes, tile, warp, n, half, lane): the operand kb of the 8 channels of
    the warp's value tile n and 64 keys, half = 0 or 1.

    codes : 8 words that are kept from an even value tile to the next
    """

    @device_function
    def read(d, place, tile, row, half, lane):
        ptx.ldmatrix(  # four matrices of 8 rows and 16 bytes
            d,
            place,
            tile + u32(row * block_k) + (u32((4 * half + (lane >> 3)) ^ (lane & 7)) << u32(4)),
        )

    @device_function
    def fragments_of_bytes(kb, codes, tile, warp, n, half, lane):
        read(kb, 0, tile, (warp * value_tiles + n) * 8 + (lane & 7), half, lane)

    @device_function
    def fragments_of_codes(kb, codes, tile, warp, n, half, lane):
        if n & 1 == 0:
            row = (warp * (value_tiles // 2) + n // 2) * VALUE_PAIR + (lane & 7)
            read(codes, 4 * half, tile, row, half, lane)
        for i in range(4):
            kb[i] = numbers(codes[4 * half + i], n & 1 == 1)

    return fragments_of_codes if packed else fragments_of_bytes


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
