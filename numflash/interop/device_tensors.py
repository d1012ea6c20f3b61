"""PyTorch's tensors on a card: what makes calls on them equal, and which ones no kernel may read."""

from __future__ import annotations

import sys
from typing import Any

from ..errors import ArgumentError, ArgumentTypeError

ALIGNMENT = 16  # bytes: nothing that a launch depends on is finer


def loses_grad(*tensors: Any) -> bool:
    """Whether a result would silently lose the gradient that is asked for of one of them."""
    if not sys.modules["torch"].is_grad_enabled():
        return False
    return any(x.requires_grad for x in tensors)


def refuse_grad(name: str) -> ArgumentError:
    """Why a tensor that requires grad is not taken."""
    return ArgumentError(
        f"{name}: the tensor requires grad, which would be lost; allowed: detach() it, "
        "call under no_grad(), or numflash.torch.attention, which has gradients"
    )


def check(name: str, x: Any) -> None:
    """Raise for a tensor on a card whose memory alone does not say what it is."""
    if loses_grad(x):
        raise refuse_grad(name)
    if x.is_neg():
        raise ArgumentTypeError(
            f"{name}: got a tensor whose sign is not applied yet; allowed: resolve_neg() of it"
        )


def places(*tensors: Any) -> tuple[Any, ...] | None:
    """Strides, device and alignment of each; None unless all are plain tensors on a card."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    found: list[Any] = []
    for x in tensors:
        if type(x) is not torch.Tensor or not x.is_cuda or x.is_neg():
            return None
        found += x.stride(), x.get_device(), x.data_ptr() % ALIGNMENT
    return tuple(found)
