"""Tensors on the CPU as the kernels read and write them: in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..interop.arrays import WORD, ArrayInterface

# dtypes whose equal calls keep plans, as `plan_store.keep_runner` names them; float16 is converted to
# float32, the others are read where they are
READ = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
HALVES = torch.float16, torch.bfloat16  # of masks, which are widened for kernels
OF_NAME = {name: dtype for dtype, name in READ.items()}


def plain(x: Any, dtype: torch.dtype) -> bool:
    """Whether x is a tensor of `dtype` whose memory holds its numbers as the kernels take them."""
    return (
        type(x) is Tensor
        and x.dtype is dtype
        and not x.is_mkldnn
        and x.is_cpu
        and x.is_contiguous()
        and not x.is_neg()
    )


def is_held(x: Any, dtype: torch.dtype) -> bool:
    """Whether x is a dense tensor of `dtype` on the CPU whose memory holds its numbers."""
    return (
        type(x) is Tensor
        and x.dtype is dtype
        and x.layout is torch.strided
        and x.is_cpu
        and not x.is_mkldnn
        and not x.is_neg()
    )


def in_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A (B, H, L, D) tensor that `is_held` as rows of contiguous `dtype`, which kernels read where they
    are; a copy where it is not that.
    """
    x = x if x.dtype is dtype else x.to(dtype)
    if x.is_contiguous():
        return x
    batch, head, row, column = x.stride()
    size = x.element_size()
    split = size < WORD and (batch | head | row) * size % WORD
    return x.contiguous() if column != 1 or split else x


def strides(*tensors: Tensor) -> np.ndarray:
    """Bytes from one batch entry, head and row of tensors to the next, of one tensor after the other."""
    found: list[int] = []
    for x in tensors:
        (batch, head, row, _), size = x.stride(), x.element_size()
        found += batch * size, head * size, row * size
    return np.array(found, np.int64)


def result_like(query: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """(B, H, L, `columns`), not written yet: a token's heads are together where they are in the query,
    as in PyTorch's results, so that a model goes on with its tokens without a copy. On a card it is
    contiguous.
    """
    b, h, length, _ = query.shape
    shape = b, h, length, columns
    of_head, of_row = query.stride()[1:3]
    if query.is_cpu and of_head < of_row:  # not a view, which would refuse to be changed in place
        steps = length * h * columns, columns, h * columns, 1
        return query.new_empty_strided(shape, steps, dtype=dtype)
    return query.new_empty(shape, dtype=dtype)


def as_written(x: Tensor) -> Tensor:
    """Contiguous float32 memory that a kernel writes instead of x: x itself where it is that."""
    return x if plain(x, torch.float32) else x.new_empty(x.shape, dtype=torch.float32)


def array(x: Tensor) -> np.ndarray:
    """The memory of a float32 tensor as an array.

    After `x.numpy()` PyTorch would refuse to resize the tensor.
    """
    steps = None if x.is_contiguous() else tuple(step * x.element_size() for step in x.stride())
    return np.asarray(ArrayInterface(x.data_ptr() or 16, tuple(x.shape), steps, "=f4", x))
