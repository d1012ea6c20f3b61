"""Numba types of the arguments of kernels that take named tuples, which no signature text can name."""

from __future__ import annotations

from typing import Any

from numba.core import types
from numba.core.types import containers

from ..cpu.backward import held
from ..cpu.backward import operands as backward_operands
from ..cpu.decode.task_data import Scratch, Store
from ..cpu.floats import flash_rows, float_state
from ..cpu.int8 import arguments as int8_arguments
from ..cpu.int8.first_keys import FirstKeys
from ..cpu.int8.packing import PackedKeys
from ..cpu.isa.strided import Strided
from ..cpu.semantics import ScoreTiles, Semantics

INT, FLOAT, FLAG = types.int64, types.float32, types.boolean
ROWS_IN_PLACE = containers.NamedUniTuple(INT, len(Strided._fields), Strided)
# what a cache stores -> an element of it, and of the tokens that are appended
STORED = {
    "int8": ("int8", "float32"),
    "int4": ("int8", "float32"),
    "float32": ("uint32", "float32"),
    "bfloat16": ("uint16", "uint16"),
    "float16": ("uint16", "uint16"),
}


def array(dtype: str, ndim: int) -> Any:
    """A contiguous array."""
    return types.Array(getattr(types, dtype), ndim, "C")


def score_tiles() -> Any:
    """Score and mask functions (`ScoreTiles`)."""
    fields = (*[INT] * 4, array("uint8", 4), array("int64", 4), INT, INT, array("int64", 1))
    return containers.NamedTuple(fields, ScoreTiles)


def semantics() -> Any:
    """Options of the forward kernels (`Semantics`)."""
    fields = (
        INT, INT, array("int64", 1), array("int64", 1), FLAG, array("uint8", 4), array("float32", 4), FLAG, FLAG, FLOAT,
        array("float32", 3), array("float32", 2), FLAG, score_tiles(),
    )  # fmt: skip
    return containers.NamedTuple(fields, Semantics)


def attend_int8(portable: bool, operand: str = "int8") -> tuple[Any, ...]:
    """The fused INT8 kernels: `make_attend` of `cpu.int8.portable` and of `cpu.int8.flash_int8`."""
    if portable:
        keys, values = containers.Tuple((array("int8", 3), array("float32", 2))), array("int8", 4)
    else:
        fields = array(operand, 2), array("int32", 2), array("float32", 2), array("uint8", 2)
        keys, values = containers.NamedTuple(fields, PackedKeys), array(operand, 2)
    first = array("int16", 3), array("float32", 2), array("float32", 3), INT
    f2 = array("float32", 2)
    x = array("int8", 3), f2, keys, values, containers.NamedTuple(first, FirstKeys), f2
    results = ROWS_IN_PLACE, array("int32", 2), f2
    return (
        containers.NamedTuple(x, int8_arguments.Operands),
        semantics(),
        containers.NamedUniTuple(INT, len(int8_arguments.Sizes._fields), int8_arguments.Sizes),
        array("int64", 1),
        containers.NamedTuple(results, int8_arguments.Results),
    )


def attend_floats(kind: str) -> tuple[Any, ...]:
    """The fused float kernel of packed operands: `make_attend` of `cpu.floats.flash_float`."""
    element = "float32" if kind == "float32" else "uint16"
    packed = array(element, 2)
    found = array("uint32", 2), array("float32", 1), array("int64", 1), types.float64
    x = *[ROWS_IN_PLACE] * 3, packed, packed, *found
    results = ROWS_IN_PLACE, array("float32", 2), array("uint8", 2), FLAG
    return (
        containers.NamedTuple(x, float_state.Operands),
        containers.NamedTuple(results, float_state.Results),
        FLOAT,
        semantics(),
        containers.NamedTuple((*[INT] * 7, FLAG, FLAG), float_state.Sizes),
        array("int64", 1),
    )


def attend_rows() -> tuple[Any, ...]:
    """Float attention in plain loops: `make_attend_rows` of `cpu.floats.flash_rows`."""
    rows = array("float32", 3)
    given = (rows, rows, rows, array("int64", 1), types.float64, semantics(), INT, INT, INT, INT)
    kind = containers.NamedTuple(given, flash_rows.Given)
    return kind, array("int64", 1), rows, array("float32", 2)


def backward(kind: str = "float32") -> tuple[Any, ...]:
    """The gradient: `make_backward` of `cpu.backward.flash_backward`; `kind` of the operands."""
    b, f3, f2, integers = (
        backward_operands,
        array("float32", 3),
        array("float32", 2),
        array("int64", 1),
    )
    stored = "float32" if kind == "float32" else "uint16"
    o3, o2 = array(stored, 3), array(stored, 2)
    given = *[ROWS_IN_PLACE] * 5, f2, f2, integers, types.float64, types.boolean
    booleans = array("bool_", 2)
    gradients = containers.NamedTuple((*[ROWS_IN_PLACE] * 3, f3), b.Gradients)
    found = booleans, booleans, f2, f2, array("float64", 2), array("int32", 3)
    return (
        containers.NamedTuple(given, held.Given),
        containers.NamedTuple(found, held.Found),
        containers.NamedUniTuple(FLOAT, 3, b.Factors),
        semantics(),
        containers.NamedUniTuple(INT, 6, b.Sizes),
        integers,
        containers.NamedTuple(
            (f2, f2, f2, o2, o2, o2, o3, o3, o3, f2, f3, f3, array("uint8", 2), f2), b.Scratch
        ),
        containers.NamedTuple((o3, o2, o3, o2, array("float32", 4)), b.Prepared),
        gradients,
        gradients,
    )


def decode(dtype: str) -> tuple[Any, ...]:
    """Attention over a cache that stores `dtype`: `make_decode` of `cpu.decode.flash_decode`."""
    pages = array(STORED[dtype][0], 3), array("int32", 2), array("int64", 1)
    f2, f3, f4 = (array("float32", n) for n in (2, 3, 4))
    scratch = (
        array("int32", 4), array("int32", 3), f3, f3, array("int64", 3), array("uint8", 2), f3, f2, f2, array("int64", 1)
    )  # fmt: skip
    return (
        f4, FLOAT, containers.NamedTuple(pages, Store), containers.NamedTuple(scratch, Scratch),
        containers.UniTuple(INT, 7), f4, f3, f3,
    )  # fmt: skip


def append(dtype: str) -> tuple[Any, ...]:
    """Appending to such a cache: the makers of `cpu.decode.append` and `append_int4`."""
    stored, given = STORED[dtype]
    rows, numbers = array(given, 4), array("int64", 1)
    last = (array("float32", 3),) * 2 if dtype.startswith("int") else (array(stored, 1),)
    return rows, rows, numbers, array(stored, 3), array("int32", 2), numbers, numbers, *last
