"""INT4's numbers as codes, two a byte, on the host."""

from __future__ import annotations

import numpy as np


def join(codes: np.ndarray, apart: int = 1) -> np.ndarray:
    """Codes (..., n) uint8 as bytes (..., n / 2): two codes `apart` in one, the first in its low half.

    n is a multiple of 2 * apart.
    """
    blocks = codes.reshape(*codes.shape[:-1], codes.shape[-1] // (2 * apart), 2, apart)
    pairs: np.ndarray = blocks[..., 0, :] | blocks[..., 1, :] << 4
    return pairs.reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def split(pairs: np.ndarray, apart: int = 1) -> np.ndarray:
    """The inverse of `join`."""
    blocks = pairs.reshape(*pairs.shape[:-1], pairs.shape[-1] // apart, apart)
    codes = np.stack([blocks & 15, blocks >> 4], -2)
    return codes.reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def to_pairs(numbers: np.ndarray, apart: int = 1) -> np.ndarray:
    """Odd numbers (..., D) int8 from -15 to 15 as bytes (..., D / 2) uint8.

    A number n has the code (n + 15) / 2. A byte holds the codes of two channels `apart`: see `join`;
    D is filled up to whole blocks of 2 * apart channels with codes of 0.
    """
    codes = ((numbers + np.int8(15)) >> 1).view(np.uint8)
    fill = -codes.shape[-1] % (2 * apart)
    return join(np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, fill)]), apart)


def from_pairs(pairs: np.ndarray, channels: int, apart: int = 1) -> np.ndarray:
    """The inverse of `to_pairs`: (..., channels) int8."""
    codes = split(pairs, apart)[..., :channels]
    return codes.view(np.int8) * np.int8(2) - np.int8(15)
