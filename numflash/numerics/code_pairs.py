"""INT4's numbers as codes, two a byte, on the host."""

from __future__ import annotations

import numpy as np


def to_pairs(numbers: np.ndarray, apart: int = 1) -> np.ndarray:
    """Odd numbers (..., D) int8 from -15 to 15 as bytes (..., D / 2) uint8.

    A number n has the code (n + 15) / 2. A byte holds the codes of two channels `apart`, the first
    in its low half; D is filled up to whole blocks of 2 * apart channels with codes of 0.
    """
    codes = ((numbers + np.int8(15)) >> 1).view(np.uint8)
    fill = -codes.shape[-1] % (2 * apart)
    codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, fill)])
    blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // (2 * apart), 2, apart)
    pairs: np.ndarray = blocks[..., 0, :] | blocks[..., 1, :] << 4
    return pairs.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def from_pairs(pairs: np.ndarray, channels: int, apart: int = 1) -> np.ndarray:
    """The inverse of `to_pairs`: (..., channels) int8."""
    blocks = pairs.reshape(*pairs.shape[:-1], pairs.shape[-1] // apart, apart)
    codes = np.stack([blocks & 15, blocks >> 4], -2)
    codes = codes.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])[..., :channels]
    return codes.view(np.int8) * np.int8(2) - np.int8(15)
