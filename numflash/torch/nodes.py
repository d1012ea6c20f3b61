"""Attention of tensors by the shortest way that PyTorch allows: its kernel, a node of autograd's, or
the operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..interop import device_tensors
from . import operator
from .equal_calls import Ready, run, runner_of, with_tensors
from .observers import is_direct, is_seen, is_traced
from .options import CONSTANTS, MASK, PRECISION, SINKS, TENSORS, TRAINED, typed


def without_operator(
    query: Any, key: Any, value: Any, options: tuple[Any, ...], with_lse: bool
) -> tuple[Tensor, Tensor | None] | None:
    """A call that was made before, without PyTorch's dispatch; None where that is not the same."""
    if torch.compiler.is_compiling():
        return None
    _, runner = runner_of(query, key, value, options)
    if runner is None or is_seen(query):
        return None
    trained = [x for n in TRAINED if (x := options[n]) is not None]
    constants = [x for n in CONSTANTS if (x := options[n]) is not None]
    watched = device_tensors.loses_grad(query, key, value, *trained, *constants)
    if watched and (options[PRECISION] == "int8" or device_tensors.loses_grad(*constants)):
        return None  # which refuses them
    ready = with_tensors(runner, query, key, options)
    if ready is None:
        return None
    if not watched:
        return run(ready, query, key, value, with_lse)
    inputs = query, key, value, options[MASK], options[SINKS]
    out, lse = _Known.apply(ready, *inputs, options)
    return out, lse


class _Attention(torch.autograd.Function):
    """The operator and its gradient without PyTorch's dispatch, which takes 0.2 ms for both."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        found = operator.attend(*inputs)
        operator.save(ctx, inputs, found)
        return found

    backward = staticmethod(operator.gradients)


class _Known(torch.autograd.Function):
    """The same for a call that was made before, and what computes it.

    The options are one argument, because autograd's node takes time for each; those that may require
    grad are arguments, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        ready: Ready,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        sinks: Tensor | None,
        options: tuple,
    ) -> tuple[Tensor, Tensor | None]:
        out, lse = run(ready, query, key, value, True)
        ctx.set_materialize_grads(False)
        ctx.options = list(options)
        ctx.places = [n for n in TENSORS if options[n] is not None]
        # as `_Attention` saves them: a checkpoint may find the first call here when it runs again
        ctx.save_for_backward(out, lse, query, key, value, *(options[n] for n in ctx.places))
        for n in ctx.places:
            ctx.options[n] = None
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
        if grad_out is grad_lse is None:  # nothing depends on the results
            return (None,) * len(ctx.needs_input_grad)
        out, lse, query, key, value, *tensors = ctx.saved_tensors
        options = list(ctx.options)
        for n, x in zip(ctx.places, tensors, strict=True):
            options[n] = x
        of_results = grad_out, query, key, value, out, lse
        wanted = ctx.needs_input_grad[4:6]
        *found, mask, sinks = operator.differentiated(*of_results, *options, *wanted, grad_lse)
        return None, *found, mask if wanted[0] else None, sinks if wanted[1] else None, None


def attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) like query and lse (B, H, L) float32 of 4-D tensors, with gradients.

    By the operator where something has to see it, and by a node of autograd's where a gradient is
    asked for.
    """
    direct = not is_traced() and all(map(is_direct, (query, key, value)))
    how = operator.attention_operator
    if direct:
        inputs = query, key, value, options[MASK], options[SINKS]
        watched = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
        how = _Attention.apply if watched else operator.attend
    if not direct and not torch.compiler.is_compiling():
        options = typed(options)
    out, lse = how(query, key, value, *options)
    return out, lse
