"""The gradient of attention as an operator of PyTorch's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import api, validation
from ..dispatch import backends, plan_store
from ..dispatch.option_gradients import of_mask as of_mask_gradient
from ..errors import UnsupportedError
from ..interop.arrays import address, check_memory
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..validation.options import Options
from .batching import one_call
from .equal_calls import known_call, on_card
from .options import (
    GRADIENT_TENSORS,
    LAST,
    MASK,
    OPTIONS,
    SINKS,
    asked_for,
    detached,
    hold_tensors,
    parted,
    schema,
    to_describe,
)
from .tensors import READ, array, as_written, in_rows, is_held, plain, strides
from .threads import pytorch_threads

NAMES = "query", "key", "value", "grad_out", "out", "lse", "grad_lse", "sinks"


def differentiate(*arguments: Any) -> tuple[Tensor, ...]:
    """The gradients of query, key, value, a float mask and sinks, shaped like them; in memory of
    PyTorch's.

    arguments : grad_out, query, key, value, out and lse, the options, whether the gradients of the
        mask and of the sinks are wanted, else they have size 0; the gradient of the lse or None
    """
    tensors, options, of_mask, of_sinks, grad_lse = parted(arguments)
    grad_out, query, key, value, out, lse = tensors
    given = query, key, value, grad_out, out, lse, grad_lse, options[SINKS]
    for name, x in zip(NAMES, given, strict=True):
        if x is not None and x.layout is torch.strided:
            check_memory(name, x)
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
        found = api.differentiate((*arrays, grad_lse), *_asked_for(options, query, key), call=call)
    return *found, query.new_empty(0)


def _asked_for(options: tuple[Any, ...], query: Tensor, key: Tensor) -> tuple[Options, str]:
    """The options and the implementation, without what has no gradient."""
    asked, impl = asked_for(options, query, key)
    return replace(detached(asked), pv=None), impl  # which is of "int8" only


def _on_cpu(
    tensors: tuple[Tensor, ...], grad_lse: Tensor | None, options: tuple[Any, ...], of_mask: bool
) -> tuple[Tensor, ...]:
    """The gradients of query, key, value and mask, the last of size 0 where it is not wanted."""
    _, query, key, value, _, _ = tensors
    found = [_memory_for(x) for x in (query, key, value)]
    scores = None
    if of_mask:
        # in large pages: 48 MB take 5 ms, PyTorch's 24
        scores = np.zeros((*query.shape[:3], key.shape[2]), np.float32)
    call, runner = known_call(plan_store.gradients, query, key, value, options)
    known = runner is not None and _are_results(tensors, grad_lse)
    if not (known and _by_runner(runner, tensors, grad_lse, options, found, scores)):
        given = [x.detach() for x in tensors]
        _in_full(given, grad_lse, options, found, scores, None if known else call)
    return *found, _of_mask(scores, options[MASK], query)


def _memory_for(x: Tensor) -> Tensor:
    """Memory for the gradient of x, in the layout of x if its rows are contiguous there, as PyTorch's
    own are: the gradient of a transposed tensor is copied nowhere. On a card it is contiguous.
    """
    like = torch.empty_like(x)
    return like if x.is_cpu and like.stride(3) == 1 else x.new_empty(x.shape)


def _are_results(tensors: tuple[Tensor, ...], grad_lse: Tensor | None) -> bool:
    """Whether those that are not operands are dense tensors of the dtypes and shapes that belong to
    query and value.
    """
    grad_out, query, _, value, out, lse = tensors
    rows, dtype = query.shape[:3], query.dtype
    shape = (*rows, value.shape[3])
    return (
        is_held(out, dtype)
        and is_held(grad_out, dtype)
        and plain(lse, torch.float32)
        and out.shape == grad_out.shape == shape
        and lse.shape == rows
        and (grad_lse is None or (plain(grad_lse, torch.float32) and grad_lse.shape == rows))
    )


def _by_runner(
    runner: Any,
    tensors: tuple[Tensor, ...],
    grad_lse: Tensor | None,
    options: tuple[Any, ...],
    found: list[Tensor],
    scores: np.ndarray | None,
) -> bool:
    """Write the gradients of query, key and value to `found`, and those of the scores, by a
    `GradientRunner`; False where it does not hold all rows.
    """
    refuse_after_fork()
    grad_out, query, key, value, out, lse = tensors
    arrays = to_describe(options, query, key) if hold_tensors(options) else None
    operands = [in_rows(x, torch.float32) for x in (query, key, value, grad_out, out)]
    written = [
        x if x.dtype is torch.float32 else torch.empty_like(x, dtype=torch.float32) for x in found
    ]
    rows = *operands, *written
    whole = all(map(Tensor.is_contiguous, rows))
    steps = None if whole else strides(*rows)
    places = [0 if x is None else x.data_ptr() for x in (*operands, lse, grad_lse, *written)]
    places.append(0 if scores is None else address(scores))
    with pytorch_threads(), one_at_a_time():
        held: bool = runner.run_at(places, steps, arrays)
    if held:
        _copy(written, found)
    elif scores is not None:
        scores.fill(0)
    return held


def _copy(written: list[Tensor], found: list[Tensor]) -> None:
    """What was written elsewhere, rounded to the dtypes of `found`."""
    for x, to in zip(written, found, strict=True):
        if x is not to:
            to.copy_(x)


def _in_full(
    tensors: list[Tensor],
    grad_lse: Tensor | None,
    options: tuple[Any, ...],
    found: list[Tensor],
    scores: np.ndarray | None,
    call: Any,
) -> None:
    """The same of a call that is checked in full, and leaves a runner for the next one with the key
    `call`, if there is one.
    """
    grad_out, query, key, value, out, lse = tensors
    asked, impl = _asked_for(options, query, key)
    problem = validation.problem(query, key, value, asked)
    shape, given = tuple(query.shape), (grad_out, out, lse, grad_lse)
    operands = validation.gradient_operands(problem, shape, *given, "bhld")
    written = [as_written(x) for x in found]
    with pytorch_threads():
        backends.solve_backward(problem, operands, impl, [array(x) for x in written], scores)
    _copy(written, found)
    if call is not None:
        plan_store.keep_gradients(call, problem, impl, READ[query.dtype])


def _of_mask(scores: np.ndarray | None, mask: Tensor, query: Tensor) -> Tensor:
    """The gradient of a mask from that of the scores (B, H, L, S); of size 0 without these."""
    if scores is None:
        return query.new_empty(0)
    found = of_mask_gradient(scores, tuple(mask.shape))
    return torch.from_numpy(found).to(mask.dtype)


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
    found = [_memory_for(x) for x in (query, key, value)]
    for wanted, place in ((of_mask, MASK), (of_sinks, SINKS)):
        option = options[place]
        found.append(option.new_empty(option.shape) if wanted else query.new_empty(0))
    return tuple(found)


attention_backward_operator.register_autograd(no_second_derivatives)
attention_backward_operator.register_vmap(
    one_call(attention_backward_operator, 6, [*OPTIONS, *LAST])
)
