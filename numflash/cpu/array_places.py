"""What tells whether a plan made for some masks, lengths, slopes and sinks serves for others."""

from __future__ import annotations

import math
from typing import Any

from ..interop.arrays import lent, location, memory_of
from ..validation.options import OptionArrays

LARGEST = 4096  # numbers of lengths, slopes or sinks that are compared


def place_of(arrays: OptionArrays) -> tuple[Any, ...] | None:
    """Where a mask lies, and what lengths, slopes and sinks hold: nothing else of them is in a plan whose
    kernels read the mask there.

    None where that cannot be told of one of them.
    """
    mask, *others = arrays
    of_mask = None if mask is None else location(mask)
    if mask is not None and of_mask is None:
        return None
    found = [of_mask]
    for name, x in zip(arrays._fields[1:], others, strict=True):
        held = None if x is None else _contents(name, x)
        if x is not None and held is None:
            return None
        found.append(held)
    return tuple(found)


def _contents(name: str, x: Any) -> tuple[Any, ...] | None:
    """What an array of few numbers holds."""
    place = location(x)
    if place is None or math.prod(place[1]) > LARGEST:
        return None
    return *place[1:], memory_of(name, x).tobytes()


def lend_mask(fields: dict[str, Any], at: int) -> bool:
    """Whether mask or bias among the `fields` of a problem is the memory at an address; it does not
    keep that alive any more.
    """
    name = "bias" if fields["mask"] is None else "mask"
    same: bool = fields[name].ctypes.data == at
    if same:
        fields[name] = lent(fields[name])
    return same
