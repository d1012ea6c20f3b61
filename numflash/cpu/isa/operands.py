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


class Waiting(NamedTuple):
    """One of two tile buffers: `number` mod 2 selects it."""

    room: Any  # their address
    number: Any


class Part(NamedTuple):
    """The first `count` rows of a tile, and the row and the key of a problem that it begins at."""

    count: Any
    row: Any
    key: Any


class Queries(NamedTuple):
    """Query rows of a block of scores: channels in a flat view or rows, `stride` elements a row."""

    data: Any
    stride: Any
    scale: Any  # of each row
    count: Any


class KeyRange(NamedTuple):
    """`count` packed keys from key `first` on, with what their sums begin with and their scales."""

    data: Any
    start: Any
    scale: Any
    first: Any
    count: Any


FLAT = (Rows, Packed, Scales, Waiting, Part)


def flat(b, sig, args):
    """(types, values) of an intrinsic's arguments, the fields of such operands one by one."""
    found_types: list[Any] = []
    values: list[Any] = []
    for kind, value in zip(sig.args, args, strict=True):
        if isinstance(kind, types.BaseNamedTuple) and kind.instance_class in FLAT:
            found_types += kind.types
            values += cgutils.unpack_tuple(b, value)
        else:
            found_types.append(kind)
            values.append(value)
    return found_types, values
