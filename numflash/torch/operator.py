"""Attention as an operator of PyTorch's, with its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import api, validation
from ..dispatch import backends, plan_store
from .batching import one_call
from .equal_calls import run, runner_of, with_tensors
from .gradients import attention_backward_operator, differentiate
from .observers import is_direct, is_traced
from .options import MASK, OPTIONS, SINKS, asked_for, detached, schema
from .tensors import READ, array, as_written, result_like
from .threads import pytorch_threads


def attend(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    """out (B, H, L, Dv) like query and lse (B, H, L) float32, of 4-D tensors.

    Both are tensors in memory that PyTorch has allocated.
    """
    call, runner = runner_of(query, key, value, options)
    ready = None if runner is None else with_tensors(runner, query, key, options)
    if ready is not None:
        return run(ready, query, key, value, True)
    asked, impl = asked_for(options, query, key)
    query, key, value = (x.detach() for x in (query, key, value))  # gradients are kept elsewhere
    asked = detached(asked)
    if query.is_cuda:  # allocates through PyTorch, and gets the current stream
        return api.attend(query, key, value, asked, impl, call)
    problem = validation.problem(query, key, value, asked)
    out, lse = _results(query, value)
    written = as_written(out)
    with pytorch_threads():
        backends.solve(problem, impl, (array(written), array(lse)))
    if call is not None:
        plan_store.keep_runner(call, problem, impl, READ[query.dtype])
    return out if written is out else out.copy_(written), lse


def _results(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Memory for the results, not written yet."""
    lse = query.new_empty(query.shape[:3], dtype=torch.float32)
    return result_like(query, value.shape[3], query.dtype), lse


attention_operator = torch.library.custom_op(
    "numflash::attention", attend, mutates_args=(), schema=schema("query key value", OPTIONS, 2)
)


@attention_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    return _results(query, value)


def save(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Keep what the backward pass recomputes the weights from."""
    tensors = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
    ctx.rest, ctx.places = (
        [None if i in tensors else x for i, x in enumerate(inputs)],
        list(tensors),
    )
    ctx.save_for_backward(*output, *tensors.values())
    ctx.set_materialize_grads(False)


def gradients(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple:
    """The gradients of `attend`'s arguments, None for what has none."""
    if grad_out is grad_lse is None:  # nothing depends on the results
        return (None,) * len(ctx.rest)
    out, lse, *tensors = ctx.saved_tensors
    arguments = list(ctx.rest)
    for place, x in zip(ctx.places, tensors, strict=True):
        arguments[place] = x
    query, key, value, *options = arguments
    wanted = [ctx.needs_input_grad[3 + n] for n in (MASK, SINKS)]
    of_results = grad_out, query, key, value, out, lse
    *found, mask, sinks = differentiated(*of_results, *options, *wanted, grad_lse)
    others: list[Tensor | None] = [None] * len(options)
    for of_option, place, x in zip(wanted, (MASK, SINKS), (mask, sinks), strict=True):
        if of_option:
            others[place] = x
    return (*found, *others)


def differentiated(grad_out: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
    """`differentiate`, by its operator where something has to see that; `grad_out` is None where only
    the lse has a gradient.

    Where a gradient of the gradient is asked for, the operator refuses it.
    """
    out, grad_lse = rest[3], rest[-1]
    if grad_out is None:
        grad_out = torch.zeros_like(out)
    negated = any(x.is_neg() for x in rest[:3])  # which the dispatch computes
    direct = is_direct(grad_out) and (grad_lse is None or is_direct(grad_lse))
    if negated or torch.is_grad_enabled() or is_traced() or not direct:
        found: tuple[Tensor, ...] = attention_backward_operator(grad_out, *rest)
        return found
    return differentiate(grad_out, *rest)


attention_operator.register_autograd(gradients, setup_context=save)
attention_operator.register_vmap(one_call(attention_operator, 3, [*OPTIONS]))
