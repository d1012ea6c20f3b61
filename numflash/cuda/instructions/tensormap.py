"""Tensor maps: what TMA copies. The emulator reads the description.

On a card the driver encodes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import UnsupportedError

ADDRESSES = 16  # divides those of all arrays


@dataclass(frozen=True)
class TensorMap:
    """What cuTensorMapEncodeTiled describes.

    Boxes of a row-major array, its last axis first in the coordinates.

    array : up to 5 dimensions, last axis contiguous; box : extent along each axis of the array;
        swizzle : 128 or 0 (bytes).
    """

    array: np.ndarray
    box: tuple[int, ...]
    swizzle: int = 128

    def strides(self) -> list[int]:
        """Bytes between elements along each axis but the last.

        An axis of one element, whose stride says nothing, gets a lawful one.
        """
        x = self.array
        found = list(x.strides)
        for axis in range(x.ndim - 2, -1, -1):
            if x.shape[axis] == 1:
                inner = found[axis + 1] * x.shape[axis + 1]
                found[axis] = max(16, min(-(-inner // 16) * 16, 1 << 39))
        return found[:-1]

    def check(self, address: int) -> None:
        """Raise UnsupportedError for what cuTensorMapEncodeTiled refuses, or TMA copies wrongly."""
        x, box = self.array, self.box
        size, row = x.itemsize, box[-1] * x.itemsize
        rules = (
            (address % ADDRESSES == 0, f"its array is at {address:#x}", "multiples of 16"),
            (1 <= x.ndim <= 5 and len(box) == x.ndim, f"rank {x.ndim}, box {box}", "up to 5 axes"),
            (x.shape[-1] == 1 or x.strides[-1] == size, "last axis not contiguous", "contiguous"),
            (all(1 <= n <= 1 << 32 for n in x.shape), f"shape {x.shape}", "sizes from 1 to 2**32"),
            (all(1 <= n <= 256 for n in box), f"box {box}", "extents from 1 to 256"),
            (
                all(n % 16 == 0 and 0 < n < 1 << 40 for n in self.strides()),
                f"strides of {x.strides} bytes",
                "positive multiples of 16 below 2**40",
            ),
            (row % 16 == 0, f"box rows of {row} bytes", "multiples of 16"),
            (self.swizzle != 128 or row <= 128, f"box rows of {row} bytes", "128 with swizzle"),
        )
        for holds, got, allowed in rules:
            if not holds:
                raise UnsupportedError(f"tensor map: got {got}; allowed: {allowed}")
