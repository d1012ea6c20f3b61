"""Calls equal to an earlier one: what tells them apart, and what computes them again."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..dispatch import plan_store
from ..interop import device_tensors
from ..interop.arrays import check_memory
from ..jit.threads import one_at_a_time, refuse_after_fork
from ..numerics.merge import apply_sinks
from ..tiling import PlanCache
from .options import MASK, TENSORS, hold_tensors, to_describe
from .tensors import HALVES, OF_NAME, READ, array, in_rows, is_held, result_like, strides
from .threads import pytorch_threads


class Ready(NamedTuple):
    """What computes a call that was made before, with the tensors of its options.

    sinks : (H,) float32, or None
    arrays : the options' tensors, whose memory the runner reads
    """

    runner: Any
    sinks: np.ndarray | None
    arrays: Any


def runner_of(
    query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Any | None]:
    """The key of equal calls of the operator, and the runner that computes them.

    The key is None for tensors that are not those of `is_held`; the runner is None for calls that were not
    made before. The key has the types of the options too: 1 == True, and only one of them may be
    allowed.
    """
    if type(query) is Tensor and query.is_cuda:
        return on_card("attention", (query, key, value), options)
    return known_call(plan_store.runners, query, key, value, options)


def known_call(
    store: PlanCache[Any], query: Tensor, key: Tensor, value: Tensor, options: tuple[Any, ...]
) -> tuple[Any, Any | None]:
    """The key of equal calls on the CPU, and what they have in `store`."""
    dtype = query.dtype if type(query) is Tensor else None
    held = dtype in READ and is_held(query, dtype) and is_held(key, dtype) and is_held(value, dtype)
    if not held:
        return None, None
    asked = _without_tensors(options, dtype) if hold_tensors(options) else options
    if asked is None:
        return None, None
    try:
        call = dtype, query.shape, key.shape, value.shape, asked, tuple(map(type, asked))
        return call, store.get(call)
    except TypeError:  # an option that cannot be hashed
        return None, None
    except RuntimeError:  # a nested tensor of the strided layout has no shape
        return None, None


def on_card(name: str, tensors: tuple[Any, ...], options: tuple[Any, ...]) -> tuple[Any, Any]:
    """The key of equal calls on tensors on a card, and what computes them, as of `runner_of`."""
    places = device_tensors.places(*tensors)
    if places is None or hold_tensors(options):
        return None, None
    forms = tuple((x.shape, x.dtype) for x in tensors)
    call = name, forms, places, options, tuple(map(type, options))
    return call, plan_store.find(call)


def _without_tensors(options: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...] | None:
    """The options with a tensor's dtype in its place; None where a call has to look at more than its
    numbers.
    """
    changed = list(options)
    for n in TENSORS:
        x = options[n]
        if x is None:
            continue
        dense = type(x) in (Tensor, torch.nn.Parameter) and x.layout is torch.strided
        if not dense or not x.is_cpu or x.is_neg():
            return None
        if n == MASK and x.dtype not in (torch.bool, torch.float32, dtype):
            return None
        changed[n] = x.dtype
    return tuple(changed)


def with_tensors(runner: Any, query: Tensor, key: Tensor, options: tuple[Any, ...]) -> Ready | None:
    """What computes a call that was made before with the options' tensors.

    None where it takes more memory than the first call did.
    """
    if not hold_tensors(options):
        return Ready(runner, None, None)
    with torch.no_grad():  # a mask that requires grad is read here, and differentiated elsewhere
        arrays, *call = to_describe(options, query, key)
        mask = arrays.attn_mask
        if mask is not None and (mask.requires_grad or mask.dtype in HALVES):
            arrays = arrays._replace(attn_mask=mask.detach().to(torch.float32))
        runner, sinks = runner.for_arrays(arrays, *call)
    return None if runner is None else Ready(runner, sinks, arrays)


def check_operands(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Raise unless these, whose addresses a kernel gets, have memory."""
    check_memory("query", query)
    check_memory("key", key)
    check_memory("value", value)


def run(
    ready: Ready, query: Tensor, key: Tensor, value: Tensor, with_lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The results of a call that was made before; lse only where it is wanted."""
    runner, sinks, _ = ready
    if query.is_cuda:
        out, lse = runner(query, key, value)
        return out, lse
    refuse_after_fork()
    check_operands(query, key, value)
    dtype, kind = query.dtype, OF_NAME[runner.takes]
    whole = query.is_contiguous() and key.is_contiguous() and value.is_contiguous()
    # it lies as the caller's query does, not as a copy of that
    narrow = dtype is torch.bfloat16 and sinks is None and runner.narrows
    out = result_like(query, value.shape[3], dtype if narrow else torch.float32)
    if not whole or dtype is not kind:
        query, key, value = in_rows(query, kind), in_rows(key, kind), in_rows(value, kind)
    with_lse = with_lse or sinks is not None
    lse = query.new_empty(query.shape[:3], dtype=torch.float32) if with_lse else None
    places = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
    of_lse = 0 if lse is None else lse.data_ptr()
    steps = None if whole else strides(query, key, value, out)
    with pytorch_threads(), one_at_a_time():
        runner.run_at((*places, of_lse), with_lse, steps, narrow)
    if sinks is not None and lse is not None:
        apply_sinks(array(out), array(lse), sinks)
    return (out if out.dtype is dtype else out.to(dtype)), lse
