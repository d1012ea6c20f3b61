"""float16 and bfloat16 to and from float32: one pass over memory, on Numba's threads.

NumPy converts float16 one number at a time (three (8, 512, 64) arrays take as long as INT8
attention over them) and has no bfloat16. Only integers and float32 are used, so it does not matter
which instructions a CPU has for halves, nor whether subnormal numbers are flushed to zero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from ..errors import UnsupportedError
from ..jit.compiler import inline, kernel, own
from ..jit.memory import reinterpret
from ..jit.parallel import over_tasks
from ..jit.threads import least_work, one_at_a_time, refuse_after_fork

PART = 1 << 15  # elements of a task: about 3 us
U, H, F = np.uint32, np.uint16, np.float32


def _reinterpreted(to: Any) -> Any:
    """Intrinsic f(x): the 32 bits of x as `to`."""

    def same_bits(typingctx, x):
        def codegen(context, b, sig, args):
            return b.bitcast(args[0], context.get_value_type(to))

        return to(x), codegen

    return intrinsic(same_bits)


float_of, bits_of = _reinterpreted(types.float32), _reinterpreted(types.uint32)


@own
def bfloat16_of(x):
    """float32 bits -> bfloat16 bits, ties to even; every NaN is the same one."""
    even = U(U(x >> 16) & U(1))
    rounded = U(U(x + U(U(0x7FFF) + even)) >> 16)
    return H(0x7FC0) if U(x & U(0x7FFFFFFF)) > U(0x7F800000) else H(rounded)


@own
def bfloat16_to_float32(x):
    """Bfloat16 bits -> float32 bits."""
    return U(U(x) << 16)


@own
def float16_of(x):
    """float32 bits -> float16 bits, ties to even.

    Normal numbers lose 13 bits and change the exponent's offset. Below 2**-14 adding .5, whose last
    bit is worth 2**-24 as float16's is, rounds them.
    """
    sign, size = U(U(x >> 16) & U(0x8000)), U(x & U(0x7FFFFFFF))
    even = U(U(size >> 13) & U(1))
    normal = U(U(U(size - U(0x38000000)) + U(U(0xFFF) + even)) >> 13)
    small = U(bits_of(F(float_of(size) + F(0.5))) - U(0x3F000000))
    large = U(0x7E00) if size > U(0x7F800000) else U(0x7C00)
    y = small if size < U(0x38800000) else normal
    return H(U(sign | (large if size >= U(0x47800000) else y)))


@own
def float16_to_float32(x):
    """float16 bits -> float32 bits.

    A subnormal number is the fraction of 1.fraction * 2**-14: what is left when 2**-14 is
    subtracted.
    """
    sign, size = U(U(U(x) & U(0x8000)) << 16), U(U(U(x) & U(0x7FFF)) << 13)
    small = bits_of(F(float_of(U(size + U(0x38800000))) - F(2.0**-14)))
    offset = U(0x70000000) if size >= U(0x0F800000) else U(0x38000000)
    return U(sign | (small if size < U(0x00800000) else U(size + offset)))


@functools.cache
def _make_convert(number: Any, to_float: bool) -> Callable[..., None]:
    """convert(halves, floats, part) of one-dimensional arrays, uint16 bits and float32, `part`
    numbers a task.

    to_float : from halves to floats, otherwise the other way
    """

    @inline
    def convert_part(n, x, out, part):
        x, out = x[n * part : (n + 1) * part], out[n * part : (n + 1) * part]
        for i in range(x.size):
            out[i] = number(x[i])

    @kernel
    def convert(halves, floats, part):
        bits = reinterpret(floats, U)
        x, out = (halves, bits) if to_float else (bits, halves)
        over_tasks(convert_part, max(1, (x.size + part - 1) // part), (x, out, part))

    return convert


def _convert(number: Any, halves: np.ndarray, floats: np.ndarray, to_float: bool) -> None:
    convert = _make_convert(number, to_float)
    halves, floats = halves.ravel(), floats.ravel()
    if halves.size <= PART:  # one task runs in the thread that calls: nobody has to wait
        return convert(halves, floats, PART)
    try:
        refuse_after_fork()
        part = PART * least_work()
    except UnsupportedError:
        part = halves.size
    with one_at_a_time():
        return convert(halves, floats, part)


def narrow(x: np.ndarray, dtype: str) -> np.ndarray:
    """A contiguous, writable float32 array as "float16", or as "bfloat16" (bits, uint16).

    Rounded to even; what is too large becomes infinite, NaN stays NaN.
    """
    out = np.empty(x.shape, H)
    if dtype == "bfloat16":
        _convert(bfloat16_of, out, x, to_float=False)
        return out
    _convert(float16_of, out, x, to_float=False)
    return out.view(np.float16)


def widen(x: np.ndarray) -> np.ndarray:
    """A float16 array, or bfloat16 bits (uint16), as float32."""
    out = np.empty(x.shape, F)
    if not x.flags.carray:  # np.require takes a microsecond to find that out
        x = np.require(x, None, ("C", "A", "W"))
    if x.dtype == H:
        _convert(bfloat16_to_float32, x, out, to_float=True)
    else:
        _convert(float16_to_float32, x.view(H), out, to_float=True)
    return out
