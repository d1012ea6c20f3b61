"""A mask of nothing but padding is read as key lengths: the keys behind them cost nothing then."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..interop.arrays import memory_of


def as_key_lengths(
    mask: Tensor | None, lengths: Tensor | None, alignment: str, key: Tensor
) -> tuple[Tensor | None, Tensor | np.ndarray | None]:
    """A mask and key lengths, the latter instead of a mask of nothing but padding."""
    if mask is None or lengths is not None or alignment != "upper_left":
        return mask, lengths  # with another alignment the diagonal would move with the lengths
    batch, _, keys, _ = key.shape
    found = _key_lengths(mask, batch, keys)
    return (mask, None) if found is None else (None, found)


def _key_lengths(mask: Tensor, batch: int, keys: int) -> Tensor | np.ndarray | None:
    """(B,) keys of each batch entry, where a mask is one row for all heads and queries that hides
    nothing but the last keys.
    """
    if mask.dtype is not torch.bool or mask.dim() != 4:
        return None
    nb, heads, rows, s = mask.shape
    if (nb, s) != (batch, keys) or 0 in mask.shape:
        return None
    _, of_heads, of_rows, _ = mask.stride()
    if (heads > 1 and of_heads) or (rows > 1 and of_rows):
        return None
    if mask.is_cpu:
        seen = memory_of("attn_mask", mask)[:, 0, 0]
        rising = np.count_nonzero(seen[:, 1:] > seen[:, :-1])
        return None if rising else seen.sum(1)
    row = mask[:, 0, 0]
    lengths = row.sum(-1)
    falling = torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
    return lengths.cpu() if falling else None
