"""A mask of nothing but padding is read as key lengths: the keys behind them cost nothing then."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def as_key_lengths(
    mask: Tensor | None, lengths: Tensor | None, alignment: str, key: Tensor
) -> tuple[Tensor | None, Tensor | np.ndarray | None]:
    """A mask and key lengths, the latter instead of a mask of nothing but padding."""
    if mask is None or lengths is not None or alignment != "upper_left":
        return mask, lengths  # with another alignment the diagonal would move with the lengths
    found = _key_lengths(mask, key.shape[0], key.shape[2])
    return (mask, None) if found is None else (None, found)


def _key_lengths(mask: Tensor | None, batch: int, keys: int) -> Tensor | np.ndarray | None:
    """(B,) keys of each batch entry, where a mask is one row for all heads and queries that hides
    nothing but the last keys.
    """
    if (
        mask is None
        or mask.dtype != torch.bool
        or mask.dim() != 4
        or (mask.shape[0], mask.shape[3]) != (batch, keys)
        or 0 in mask.shape
    ):
        return None
    if any(
        size > 1 and step for size, step in zip(mask.shape[1:3], mask.stride()[1:3], strict=True)
    ):
        return None
    if mask.is_cpu:
        seen = mask.numpy()[:, 0, 0]
        falling = (seen[:, 1:] <= seen[:, :-1]).all()
        return seen.sum(1) if falling else None
    row = mask[:, 0, 0]
    lengths = row.sum(-1)
    falling = torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
    return lengths.cpu() if falling else None
