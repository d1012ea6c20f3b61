"""Tensor maps: what TMA copies. The emulator reads the description.

On a card the driver encodes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


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
