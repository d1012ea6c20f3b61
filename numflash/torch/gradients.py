"""The gradient of attention as an operator of PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import api, validation
from ..dispatch import backends, plan_store, plans
from ..dispatch.option_gradients import of_mask as of_mask_gradient
from ..errors import UnsupportedError
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..validation import Problem
from ..validation.options import Options
from .batching import one_call
from .equal_calls import check_operands, known_call, on_card
from .options import (
    GRADIENT_TENSORS,
    LAST,
    MASK,
    OPTIONS,
    SINKS,
    asked_for,
    detached,
    fields,
    hold_tensors,
    parted,
    schema,
)
from .tensors import array, plain
from .threads import pytorch_threads


def differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, a float mask and sinks, shaped like them; in memory of
    PyTorch's.

    arguments : grad_out, query, key, value, out and lse, the options, whether the gradients of the
        mask and of the sinks are wanted, else they have size 0; the gradient of the lse or None
    """
    tensors, options, of_mask, of_sinks, grad_lse = parted(arguments)
    grad_out, query, _, _, out, lse = tensors
    sinks = query.new_empty(0)
    if of_sinks:
        sinks = _gradient_of_sinks(options[SINKS], grad_out, out, lse, grad_lse)
    of_operands = _on_card if query.is_cuda else _on_cpu
    if grad_lse is not None:  # kernels do not read one number expanded, as of a sum
        grad_lse = grad_lse.detach().contiguous()
    return *of_operands(tensors, grad_lse, options, of_mask), sinks


def _gradient_of_sinks(
    sinks: Tensor, grad_out: Tensor, out: Tensor, lse: Tensor, grad_lse: Tensor | None
) -> Tensor:
    """(H,) like sinks (H,), from dO and O (B, H, L, Dv), the LSE (B, H, L) and its gradient, on any
    device: `dispatch.option_gradients.of_sinks`.
    """
    delta = (grad_out.double() * out.double()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    weights = torch.exp(torch.clamp(sinks.double()[:, None] - lse.double(), max=0))
    return -(weights * delta).sum((0, 2)).to(sinks.dtype)


def _on_card(
    tensors: tuple[Tensor, ...], grad_lse: Tensor | None, options: tuple[Any, ...], of_mask: bool
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value on a card, and one of size 0."""
    backends.refuse_gradient_of_mask("auto", of_mask)
    grad_out, query, key, value, out, lse = tensors
    grad_out = grad_out.contiguous()
    of_lse = () if grad_lse is None else (grad_lse,)
    call, again = on_card("gradients", (query, key, value, grad_out, out, lse, *of_lse), options)
    if again is not None:
        found = again(query, key, value, None, grad_out, out, lse, grad_lse)
    else:
        arrays = tuple(x.detach() for x in (grad_out, query, key, value, out, lse))
        found = api.differentiate((*arrays, grad_lse), *_asked_for(options, key), call=call)
    return *found, query.new_empty(0)


def _asked_for(options: tuple[Any, ...], key: Tensor) -> tuple[Options, str]:
    """The options and the implementation, without what has no gradient."""
    asked, impl = asked_for(options, key)
    return replace(detached(asked), pv=None), impl  # which is of "int8" only


def _on_cpu(
    tensors: tuple[Tensor, ...], grad_lse: Tensor | None, options: tuple[Any, ...], of_mask: bool
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and mask, the last of size 0 where it is not wanted."""
    _, query, key, value, _, _ = tensors
    call, known = known_call(plan_store.gradients, query, key, value, options)
    if call is not None:
        check_operands(query, key, value)
    taken = known is not None and _are_results(tensors, grad_lse)
    whole = taken and all(plain(x, torch.float32) for x in (query, key, value))
    runner = known.runner if known is not None and whole and not of_mask else None
    if runner is not None:
        held = _by_runner(runner, tensors, grad_lse)
        if held is not None:
            return *held, query.new_empty(0)
    grad_out, query, key, value, out, lse = (x.detach() for x in tensors)
    if known is None:
        asked, impl = _asked_for(options, key)
        problem = validation.problem(query, key, value, asked)
    else:
        problem, impl = _again(known.problem, query, key, value, options), options[-1]
    if taken:
        of_lse = None if grad_lse is None else grad_lse.numpy()
        operands = grad_out.numpy(), out.numpy(), lse.numpy(), of_lse
    else:
        shape, given = tuple(query.shape), (grad_out, out, lse, grad_lse)
        operands = validation.gradient_operands(problem, shape, *given, "bhld")
    found = [x.new_empty(x.shape, dtype=torch.float32) for x in (query, key, value)]
    nb, nh, _, length, s, _, _ = problem.shape
    scores = np.zeros((nb, nh, length, s), np.float32) if of_mask else None
    with pytorch_threads():
        backends.solve_backward(problem, operands, impl, [array(x) for x in found], scores)
    if call is not None and known is None:
        plan_store.keep_gradients(call, problem, impl, not hold_tensors(options))
    return *(x.to(query.dtype) for x in found), _of_mask(scores, options[MASK], query)


def _by_runner(
    runner: Any, tensors: tuple[Tensor, ...], grad_lse: Tensor | None
) -> list[Tensor] | None:
    """The gradients of query, key and value by a `GradientRunner`; None where it does not hold all
    rows.
    """
    refuse_after_fork()
    grad_out, query, key, value, out, lse = tensors
    found = [x.new_empty(x.shape) for x in (query, key, value)]
    places = [x.data_ptr() for x in (query, key, value, grad_out, out, lse)]
    of_lse = 0 if grad_lse is None else grad_lse.data_ptr()
    with pytorch_threads(), one_at_a_time():
        held = runner.run_at((*places, of_lse), tuple(x.data_ptr() for x in found))
    return found if held else None


def _again(
    known: Problem, query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> Problem:
    """The problem of an equal call, with these tensors."""
    tensors = query, key, value
    whole = query.dtype is torch.float32  # NumPy has no bfloat16
    taken = [x.numpy() for x in tensors] if whole else plans.taken_in(*tensors)
    problem = known.with_operands(*plans.shaped(taken, "bhld", known.precision))
    if hold_tensors(options):
        problem = problem.changed(**fields(options, query, key))
    return problem


def _of_mask(scores: np.ndarray | None, mask: Tensor, query: Tensor) -> Tensor:
    """The gradient of a mask from that of the scores (B, H, L, S); of size 0 without these."""
    if scores is None:
        return query.new_empty(0)
    return torch.from_numpy(of_mask_gradient(scores, tuple(mask.shape))).to(mask.dtype)


def _are_results(tensors: tuple[Tensor, ...], grad_lse: Tensor | None) -> bool:
    """Whether those that are not operands are contiguous float32 tensors of the shapes that belong to
    query and value.
    """
    grad_out, query, _, value, out, lse = tensors
    rows, kind = query.shape[:3], torch.float32
    shape = (*rows, value.shape[3])
    return (
        plain(out, kind)
        and plain(grad_out, kind)
        and plain(lse, kind)
        and out.shape == grad_out.shape == shape
        and lse.shape == rows
        and (grad_lse is None or (plain(grad_lse, kind) and grad_lse.shape == rows))
    )


def no_second_derivatives(ctx: Any, *grads: Any) -> tuple:
    """Refuse the backward pass of a backward pass."""
    raise UnsupportedError(
        "derivatives: got a gradient of a gradient; allowed: first derivatives only"
    )


attention_backward_operator = torch.library.custom_op(
    "numflash::attention_backward",
    differentiate,
    mutates_args=(),
    schema=schema(GRADIENT_TENSORS, {**OPTIONS, **LAST}, 5),
)


@attention_backward_operator.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    tensors, options, of_mask, of_sinks, _ = parted(arguments)
    _, query, key, value, _, _ = tensors
    found = [x.new_empty(x.shape) for x in (query, key, value)]
    for wanted, place in ((of_mask, MASK), (of_sinks, SINKS)):
        option = options[place]
        found.append(option.new_empty(option.shape) if wanted else query.new_empty(0))
    return tuple(found)


attention_backward_operator.register_autograd(no_second_derivatives)
attention_backward_operator.register_vmap(
    one_call(attention_backward_operator, 6, [*OPTIONS, *LAST])
)
