"""A mask of nothing but padding is read as key lengths: the keys behind them cost nothing then."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..interop.arrays import check_memory
from ..jit.compiler import kernel
from ..jit.memory import array_at


@kernel
def _count(mask: int, step: int, lengths: np.ndarray, keys: int) -> bool:
    """Write how many keys each row of a mask shows to lengths (B,); whether these are its first ones.

    mask : address of B rows of `keys` bytes, `step` bytes from one to the next
    """
    falling = True
    for b in range(lengths.size):
        row = array_at(mask + b * step, (keys,), np.uint8)
        seen = 0
        for j in range(keys):
            seen += row[j]
        lengths[b] = seen
        for j in range(seen):
            falling &= row[j] != 0
    return falling


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
    of_batch, of_heads, of_rows, of_keys = mask.stride()
    if (heads > 1 and of_heads) or (rows > 1 and of_rows):
        return None
    if mask.is_cpu:
        check_memory("attn_mask", mask)
        if of_keys != 1 and keys > 1:
            mask, of_batch = mask[:, 0, 0].contiguous(), keys
        counts = np.empty(batch, np.int64)
        return counts if _count(mask.data_ptr(), of_batch, counts, keys) else None
    row = mask[:, 0, 0]
    lengths = row.sum(-1)
    falling = torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
    return lengths.cpu() if falling else None
