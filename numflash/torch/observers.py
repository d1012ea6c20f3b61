"""Who has to see an operator of ours: where nobody has, its function is called as it is.

PyTorch's dispatch of an operator and its gradient takes 0.2 ms.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ..interop import device_tensors


def unobserved(*tensors: Tensor) -> bool:
    """Whether the operator can be skipped without any difference.

    No gradient is asked for; no mode, transform, tracer, compiler, profiler or autocast is active.
    """
    return not (device_tensors.loses_grad(*tensors) or is_seen(tensors[0]))


def is_seen(query: Tensor) -> bool:
    """Whether more than a gradient's node has to see the operator."""
    return is_traced() or torch.is_autocast_enabled("cuda" if query.is_cuda else "cpu")


def is_traced() -> bool:
    """Whether a compiler, mode, transform, tracer or profiler has to see the operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.maybe_current_level() is not None
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
    )


def is_direct(x: Any) -> bool:
    """Whether PyTorch's dispatch would hand x on as it is: no subclass, no lazy negation, no batch of
    gradients (`is_grads_batched` of torch.autograd.grad), which none of the levels of vmap shows.
    """
    plain = type(x) in (Tensor, torch.nn.Parameter) and not x.is_neg()
    return plain and not torch._C._functorch.is_legacy_batchedtensor(x)
