"""Tensors times a Hadamard matrix, before INT8 attention rounds them.

An operator of PyTorch's, so that a compiled model holds it whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..numerics.rotation import rotate
from .observers import unobserved
from .threads import pytorch_threads


def _rotated(x: Tensor) -> Tensor:
    """The rows of x (..., D), on the CPU, as `numflash.numerics.rotation.rotate` gives them: float32."""
    with pytorch_threads():
        return torch.from_numpy(rotate(x.detach().float().numpy()))


rotate_operator = torch.library.custom_op(
    "numflash::rotate", _rotated, mutates_args=(), schema="(Tensor x) -> Tensor"
)


@rotate_operator.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.float32)


def rotated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Query and key rotated, the value as it is; all float32. Scores stay the same.

    Keys of language models have a few channels that are much larger than the others, on which
    their one scale would be wasted. Tensors that INT8 attention refuses, because they require grad,
    and those of a card are left as they are.
    """
    operands = query, key, value
    trained = torch.is_grad_enabled() and any(x.requires_grad for x in operands)
    if trained or not all(x.is_cpu for x in operands):
        return operands
    turn = _rotated if unobserved(*operands) else rotate_operator
    return turn(query), turn(key), value.float()
