"""Tensors on the CPU as the kernels read and write them: in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..interop.arrays import ArrayInterface

# dtypes that kernels read in place, as `plan_store.keep_runner` names them
READ = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


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


def array(x: Tensor) -> np.ndarray:
    """The memory of a contiguous float32 tensor as an array.

    After `x.numpy()` PyTorch would refuse to resize the tensor.
    """
    return np.asarray(ArrayInterface(x.data_ptr() or 16, tuple(x.shape), None, "=f4", x))
