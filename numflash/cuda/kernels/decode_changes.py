"""What options make of decode's scores between the products and the softmax.

Soft cap, ALiBi, the mask of the new tokens: the twin of `cpu.decode.changes`. Every operation
rounds once, so INT8 has the bits of `reference.integer_decode` here too.

A kernel without options is made of the same source: its functions here do nothing, and the compiler
drops what is left of them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile.target import device_function, types
from ..instructions import ptx
from .scores import softcap_exact

i32, u64, f32 = types.int32, types.uint64, types.float32


class Options(NamedTuple):
    """The options of a call."""

    shift: Any  # addresses
    slopes: Any
    mask: Any
    cap: Any  # and its reciprocal
    inverse: Any


class Changes(NamedTuple):
    """The device functions of a decode kernel, with options or without.

    unpack(given, numbers) -> Options, which follow the kernel's own arguments
    row(at, place) : the float32 of a row in an array of all rows, 0 where there is none
    allowed(mask, b, queries, row, ahead) : whether new token `row` attends to the token `ahead` of
        the first new one
    score(x, shift, slope, away, options) : a float score after the options
    """

    unpack: Any
    row: Any
    allowed: Any
    score: Any


def make_changes(changed: bool, pointers: int, factors: int) -> Changes:
    """The functions of a kernel with options, or of one without.

    pointers, factors : how many the kernel has itself
    """
    if not changed:
        return _nothing()
    slopes, mask, inverse = pointers + 1, pointers + 2, factors + 1

    @device_function
    def unpack(given, numbers):
        return Options(
            given[pointers], given[slopes], given[mask], numbers[factors], numbers[inverse]
        )

    @device_function
    def row(at, place):
        found = f32(0)
        if at != u64(0):
            found = ptx.load_global_f32(at + u64(place) * u64(4))
        return found

    @device_function
    def allowed(mask, b, queries, row, ahead):
        seen = True
        if mask != u64(0) and ahead >= 0 and ahead < queries:
            place = (b * queries + row) * queries + ahead
            seen = ptx.load_global_s32(mask + u64(place) * u64(4)) != 0
        return seen

    @device_function
    def score(x, shift, slope, away, options):
        if options.cap > f32(0):
            x = softcap_exact(ptx.add(ptx.mul(x, options.inverse), shift), options.cap)
        if slope != f32(0):
            x = ptx.sub(x, ptx.mul(slope, ptx.to_float(i32(abs(away)))))
        return x

    return Changes(unpack, row, allowed, score)


def _nothing() -> Changes:
    @device_function
    def unpack(given, numbers):
        return Options(u64(0), u64(0), u64(0), f32(0), f32(0))

    @device_function
    def row(at, place):
        return f32(0)

    @device_function
    def allowed(mask, b, queries, row, ahead):
        return True

    @device_function
    def score(x, shift, slope, away, options):
        return x

    return Changes(unpack, row, allowed, score)


def extended(signature: Any) -> Any:
    """The signature of a kernel with options: three more pointers, two more factors."""
    pointers, bytes_of, sizes, factors = signature.args
    return types.void(
        types.UniTuple(u64, len(pointers) + 3),
        bytes_of,
        sizes,
        types.UniTuple(f32, len(factors) + 2),
    )
