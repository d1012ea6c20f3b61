"""A mask of nothing but padding is read as key lengths: the keys behind them cost nothing then."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..interop.padding import KINDS, make_count

OF_DTYPE = {getattr(torch, name): kind for name, kind in KINDS.items()}


def as_key_lengths(
    mask: Tensor | None, lengths: Tensor | None, alignment: str, query: Tensor, key: Tensor
) -> tuple[Tensor | None, Tensor | np.ndarray | None]:
    """A mask and key lengths, the latter instead of a mask of nothing but padding."""
    if mask is None or lengths is not None or alignment != "upper_left":
        return mask, lengths  # with another alignment the diagonal would move with the lengths
    if mask.layout is not torch.strided or mask.is_nested or mask.is_neg() or mask.requires_grad:
        return mask, None  # which is refused elsewhere, or has a gradient
    (batch, heads, rows, _), keys = query.shape, key.shape[2]
    sizes = (1, batch), (1, heads), (1, rows), (keys,)
    if mask.dim() != 4 or any(x not in y for x, y in zip(mask.shape, sizes, strict=True)):
        return mask, None  # which may not fit, and is refused elsewhere
    found = None if 0 in mask.shape else _key_lengths(mask, batch)
    return (mask, None) if found is None else (None, found)


def _key_lengths(mask: Tensor, batch: int) -> Tensor | np.ndarray | None:
    """(B,) keys of each batch entry, where a mask (B, H, L, S) hides nothing but the last keys."""
    if mask.is_cpu:
        return _on_cpu(mask, batch)
    _, heads, rows, keys = mask.shape
    _, of_heads, of_rows, _ = mask.stride()
    if mask.dtype is not torch.bool or (heads > 1 and of_heads) or (rows > 1 and of_rows):
        return None
    row = mask[:, 0, 0].expand(batch, keys)
    lengths = row.sum(-1)
    falling = torch.equal(row, torch.arange(keys, device=row.device) < lengths[:, None])
    return lengths.cpu() if falling else None


def _on_cpu(mask: Tensor, batch: int) -> np.ndarray | None:
    """The same of a mask on the CPU, of any of `KINDS`, which may be written out for all heads and rows."""
    nb, heads, rows, keys = mask.shape
    of_batch, of_heads, of_rows, of_keys = mask.stride()
    known = OF_DTYPE.get(mask.dtype)
    if known is None or of_keys != 1 or not mask.data_ptr():
        return None  # without memory it is refused elsewhere
    size, lengths = mask.element_size(), np.empty(batch, np.int64)
    alike = make_count(*known)(
        mask.data_ptr(),
        heads if of_heads else 1,  # what is repeated is looked at once
        rows if of_rows else 1,
        keys,
        of_batch * size if nb > 1 else 0,
        of_heads * size,
        of_rows * size,
        lengths,
    )
    return lengths if alike else None
