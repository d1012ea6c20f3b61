"""Values to the packed operand of the INT8 kernel: int8, or floats where they stay floats.

The part of `quantize` that knows what a packed value is.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...interop.halves import bfloat16_of, bfloat16_to_float32, bits_of
from ...jit.compiler import bare
from ...jit.memory import array_at, reinterpret
from ...numerics.fixedpoint import FLOAT_VALUES
from ...tiling import KEY_BLOCK
from ..isa.isas import VECTOR_ISAS, running_lanes
from ..isa.strided import row_at
from ..isa.vectors import address
from .packing import block_interleaver
from .quantize_rows import ROWS, quantize_rows
from .wide_rows import floats_of

F = np.float32
U = np.uint32


def value_form(isa_name: str, pv: str) -> str:
    """How packed values are kept: "integers", "floats" (float32), "pairs" of bfloat16, or "rounded":
    the numbers of bfloat16 as float32, for CPUs without its products.
    """
    if pv not in FLOAT_VALUES:
        return "integers"
    if floats_of(isa_name, pv).group == 2:
        return "pairs"
    return "rounded" if pv == "bf16" else "floats"


def value_type(isa_name: str, pv: str) -> Any:
    """The dtype of packed values; of pairs, that of bfloat16's bits."""
    integers = np.int8 if VECTOR_ISAS[isa_name].group == 4 else np.int16
    types = {"integers": integers, "pairs": np.uint16}
    return types.get(value_form(isa_name, pv), np.float32)


@functools.cache
def value_blocks(isa_name: str, kind: str):
    """f(x, n, first, stop, length, values, slot, room): values first .. stop of head n to a slot of `values`.

    Those from `length` on are zeros.
    """
    to_int8 = quantize_rows(kind, True)
    interleave_block = block_interleaver(isa_name, running_lanes(isa_name))

    @bare
    def run(x, n, first, stop, length, values, slot, room):
        columns = room.block.size // KEY_BLOCK
        for j in range(first, stop, KEY_BLOCK):
            real = max(0, min(KEY_BLOCK, length - j))
            if real < KEY_BLOCK:
                room.block[:] = np.int8(0)
            for i in range(0, real, ROWS):
                count, here = min(ROWS, real - i), row_at(x, n, j + i)
                out = address(room.block) + i * columns
                to_int8(here, x.row, count, x.d, 0, address(room.v_factor), out, columns)
            interleave_block(room.block, 0, columns, columns, values, slot, j // KEY_BLOCK)

    return run


@bare
def rounded_bits(number):
    """float32 -> the bits of the nearest bfloat16."""
    return bfloat16_of(bits_of(number))


@bare
def rounded_float(number):
    """float32 -> the bits of that bfloat16 as float32."""
    return bfloat16_to_float32(rounded_bits(number))


@bare
def same(number):
    return number


@functools.cache
def float_blocks(kind: str, form: str):
    """The same for values that stay floats (pv "fp32" and "bf16"), in a `value_form`: rows of whole
    vectors, or pairs of keys.
    """
    element, in_pairs = F if kind == "float32" else np.uint16, form == "pairs"
    if kind == "float32":
        bits32, bits16 = rounded_float if form == "rounded" else bits_of, rounded_bits
    else:
        bits32, bits16 = bfloat16_to_float32, same
    rows_of_words = 1 if in_pairs else 2  # for two keys

    @bare
    def fill_rows(x, n, j, count, columns, out):
        """Rows j and j + 1, of which the first `count` exist, to 2 x columns words."""
        for i in range(2):
            real, at = x.d if i < count else 0, i * columns
            if i < count:
                row = array_at(row_at(x, n, j + i), (x.d,), element)
                for t in range(x.d):
                    out[at + t] = bits32(row[t])
            out[at + real : at + columns] = U(0)

    @bare
    def fill_pair(x, n, j, count, columns, out):
        """The same as pairs, to `columns` words."""
        if count > 0:
            even = array_at(row_at(x, n, j), (x.d,), element)
            odd = array_at(row_at(x, n, j + count - 1), (x.d,), element)
            kept = U(0xFFFFFFFF) if count == 2 else U(0xFFFF)
            for t in range(x.d):
                out[t] = U(U(U(bits16(even[t])) | U(U(bits16(odd[t])) << 16)) & kept)
        out[x.d if count > 0 else 0 : columns] = U(0)

    fill = fill_pair if in_pairs else fill_rows

    @bare
    def run(x, n, first, stop, length, values, slot, room):
        columns = room.block.size // KEY_BLOCK
        words, size = reinterpret(values, U)[slot], rows_of_words * columns
        for j in range(first, stop, 2):
            at = j // 2 * size
            fill(x, n, j, max(0, min(2, length - j)), columns, words[at : at + size])

    return run
