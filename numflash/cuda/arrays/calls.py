"""Calls with arrays on the card (PyTorch, CuPy, Numba).

Results of the same kind, on the caller's stream, nothing copied.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from ... import validation
from ...errors import ArgumentError, ArgumentTypeError, UnsupportedError
from ...interop.arrays import import_array, on_device
from ...validation.options import Options
from .operands import Operands, Remote, representing
from .plans import LaunchPlan, Made, run
from .tensors import Again

Keep = Callable[[Callable[..., Any]], None]
FORWARD = ("query", "key", "value", "attn_mask", "sinks")
BACKWARD = ("query", "key", "value", "attn_mask", "grad_out", "out", "lse", "grad_lse")


def attention(
    query: Any,
    key: Any,
    value: Any,
    options: Options,
    with_functions: Callable[[validation.Problem], validation.Problem] | None = None,
    keep: Keep | None = None,
) -> Any:
    """`numflash.attention` for device arrays.

    `keep` is given what computes equal calls on PyTorch's tensors (`device_tensors.places`) without
    mask, lengths, slopes and sinks.

    `with_functions` adds score and mask functions to the problem; what they capture is in host
    memory and uploaded once per content. Such a call leaves no plan.

    A mask must be on the card (bool or float32). Sinks may be on the card (float32) or on the host,
    like all small arguments (lengths, slopes).
    """
    sinks = options.sinks
    there = None
    if on_device(sinks):
        there, sinks = sinks, None
    operands = Operands(FORWARD, (query, key, value, options.attn_mask, there))

    def plan() -> LaunchPlan:
        return _forward(operands, replace(options, sinks=sinks), with_functions)

    if with_functions is None:
        small = ("key_lengths", options.key_lengths), ("alibi_slopes", options.alibi_slopes)
        found, kept = run(operands, (*small, ("sinks", sinks)), options, plan)
        if keep is not None:
            keep(_again(kept, query, options))
    else:
        found = plan()(operands)
    out, lse, *_ = found
    return _delivered(out, lse, len(query.shape), options)


def _again(plan: LaunchPlan, query: Any, options: Options) -> Callable[..., Any]:
    """What computes a call on PyTorch's tensors that is equal to one before, as `dispatch.plans.ArrayPlan`
    does.
    """
    call, ndim = Again(plan, query, 2), len(query.shape)

    def attend(query: Any, key: Any, value: Any, no_arrays: tuple = ()) -> Any:
        out, lse = call(query, key, value, None, None)
        return _delivered(out, lse, ndim, options)

    return attend


def _delivered(out: Any, lse: Any, ndim: int, options: Options) -> Any:
    """The results in the caller's number of dimensions and layout."""
    if ndim < 4:
        out, lse = (x.reshape(tuple(x.shape)[4 - ndim :]) for x in (out, lse))
    if not options.return_lse:
        return out
    if options.layout == "blhd":
        if not hasattr(lse, "swapaxes"):
            raise UnsupportedError(
                f"return_lse: {type(lse).__name__} cannot be transposed; allowed with it: layout 'bhld'"
            )
        lse = lse.swapaxes(1, 2)
    return out, lse


def _forward(
    operands: Operands,
    options: Options,
    with_functions: Callable[[validation.Problem], validation.Problem] | None,
) -> LaunchPlan:
    """The launches of `attention`; what is made are out, lse and scratch memory."""
    from . import forward, quantized

    taken, problem = _described(operands, options)
    if with_functions is not None:
        problem = with_functions(problem)
    if problem.precision == "int8":
        quantized.check(problem)
    own = taken[0].dtype
    b, h, _, length, _, _, dv = problem.shape
    if operands.given[4] is not None:
        there = operands.take("sinks", ("float32",)).array
        if there.shape != (h,) or not there.flags.c_contiguous:
            raise ArgumentError(
                f"sinks: got shape {there.shape}; allowed: contiguous (H,) = ({h},)"
            )
        problem = problem.changed(sinks=there)
    turned = options.layout == "blhd"
    made: list[Made] = []

    def empty(shape: tuple[int, ...], dtype: str) -> np.ndarray:
        made.append((1, shape, dtype))
        return representing(len(FORWARD) + len(made), shape, dtype)

    out = empty((b, length, h, dv) if turned else (b, h, length, dv), own)
    lse = empty((b, h, length), "float32")
    device = operands.device()
    if 0 in (b, length):
        return LaunchPlan(device, [], made)
    results = out.swapaxes(1, 2) if turned else out, lse
    return LaunchPlan(device, forward.launches(problem, own, device, results, empty), made)


def _representing(made: list[Made], operands: int) -> list[np.ndarray]:
    """The arrays that represent what a plan makes beside its operands."""
    return [
        representing(number, shape, dtype)
        for number, (_, shape, dtype) in enumerate(made, operands + 1)
    ]


def attention_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    grad_lse: Any,
    options: Options,
    keep: Keep | None = None,
) -> tuple[Any, Any, Any]:
    """`numflash.attention_backward` for device arrays.

    A mask is on that card too, the rows' statistics get memory of the query's kind.

    Sinks are in the LSE already. `keep` is given what computes equal calls, as in `attention`.
    """
    grad_out = dense(grad_out)
    operands = Operands(
        BACKWARD, (query, key, value, options.attn_mask, grad_out, out, lse, grad_lse)
    )
    small = ("key_lengths", options.key_lengths), ("alibi_slopes", options.alibi_slopes)
    (dq, dk, dv, _), plan = run(operands, small, options, lambda: _backward(operands, options))
    if keep is not None:
        keep(Again(plan, query, 3))
    return dq, dk, dv


def _backward(operands: Operands, options: Options) -> LaunchPlan:
    """The launches of `attention_backward`; what is made are dq, dk, dv and statistics."""
    from .. import launch_backward

    taken, problem = _described(operands, replace(options, sinks=None))
    layout = options.layout
    lead = taken[0].array.shape[:-1]
    given = []
    for name, shape, dtype in (
        ("grad_out", (*lead, problem.shape[6]), taken[0].dtype),
        ("out", (*lead, problem.shape[6]), taken[0].dtype),
        ("lse", lead, "float32"),
        ("grad_lse", lead, "float32"),
    ):
        if name == "grad_lse" and operands.given[BACKWARD.index(name)] is None:
            continue
        remote = operands.take(name)
        if remote.dtype != dtype:
            raise ArgumentTypeError(f"{name}: got dtype {remote.dtype}; allowed on a card: {dtype}")
        if remote.array.shape != shape:
            raise ArgumentError(
                f"{name}: got shape {remote.array.shape}; allowed: {shape} with query {taken[0].array.shape}"
            )
        given.append(remote.array)
    grad, o = (
        validation.tensor(name, x, layout)
        for name, x in (("grad_out", given[0]), ("out", given[1]))
    )
    lse, *others = (validation.tensor("lse", x[..., None], layout)[..., 0] for x in given[2:])
    device = operands.device()
    made: list[Made] = [(n, x.array.shape, x.dtype) for n, x in enumerate(taken, 1)]
    made.append((1, launch_backward.statistics_shape(problem), "float32"))
    *gradients, stats = _representing(made, len(BACKWARD))
    results = [
        validation.tensor(name, x, layout)
        for name, x in zip(("dq", "dk", "dv"), gradients, strict=True)
    ]
    work = launch_backward.plan(problem, grad, o, lse, device.arch, (*results, stats), *others)
    return LaunchPlan(device, work.launches, made)


def dense(x: Any) -> Any:
    """x, or a copy if it is a PyTorch tensor without rows in memory.

    `sum().backward()` returns one number, expanded.
    """
    return x.contiguous() if hasattr(x, "contiguous") and x.stride(-1) != 1 else x


def _described(operands: Operands, options: Options) -> tuple[list[Remote], validation.Problem]:
    """The operands and the mask as they are stored on the card, and the problem."""
    mask = options.attn_mask
    precision = options.precision
    if mask is not None:
        mask = operands.take("attn_mask", ("bool", "float32")).array
    taken = [operands.take(name) for name in ("query", "key", "value")]
    own = taken[0].dtype
    ndim = taken[0].array.ndim
    if options.layout == "blhd" and ndim != 4:
        raise ArgumentError(
            f"query: got {ndim} dimensions; allowed on a card with layout 'blhd': 4"
        )
    if precision not in (None, own, "int8"):
        raise UnsupportedError(
            f"precision: got {precision!r} for {own} arrays on a card; allowed there: their own, 'int8'"
        )
    options = replace(options, attn_mask=mask, precision=precision or own)
    q, k, v = (import_array("array", x.array)._replace(dtype=x.dtype) for x in taken)
    return taken, validation.problem_of((q, k, v), options)
