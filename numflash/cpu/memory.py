"""Arrays that start at a cache line: a vector that straddles two lines is loaded twice, a matrix tile sixteen times twice."""
from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._jit import inline

LINE = 64


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """np.empty, aligned."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    room = np.empty(size + LINE, np.uint8)
    start = -room.ctypes.data % LINE
    return room[start:start + size].view(dtype).reshape(shape)


@inline
def zero_bytes(size):
    """For kernels: (size,) uint8 zeros, aligned; `view` makes of them what is wanted."""
    room = np.zeros(size + LINE, np.uint8)
    start = LINE - np.intp(room.ctypes.data) % LINE
    return room[start:start + size]
