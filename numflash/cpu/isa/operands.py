"""Operands of register tiles: an array and where in it the tile begins.

Kernels pass them to the tiles' intrinsics, whose code takes them apart again (`flat`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import types
from numba.core import cgutils


class Rows(NamedTuple):
    """Rows of an array: the first begins at element `first`, each next one `stride` elements on."""

    base: Any
    first: Any
    stride: Any


class Packed(NamedTuple):
    """An array that is read without gaps, from element `first` on."""

    base: Any
    first: Any


class Scales(NamedTuple):
    """What makes scores of sums: sums begin with start[key ...], a score is sum * key_scale[key ...]
    * query_scale[row ...].
    """

    start: Any
    key_scale: Any
    key: Any
    query_scale: Any
    row: Any


def flat(b, sig, args):
    """(types, values) of an intrinsic's arguments, the fields of such operands one by one."""
    found_types: list[Any] = []
    values: list[Any] = []
    for kind, value in zip(sig.args, args, strict=True):
        if isinstance(kind, types.NamedTuple) and kind.instance_class in (Rows, Packed, Scales):
            found_types += kind.types
            values += cgutils.unpack_tuple(b, value)
        else:
            found_types.append(kind)
            values.append(value)
    return found_types, values
