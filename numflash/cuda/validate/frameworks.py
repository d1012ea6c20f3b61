"""Tensors of PyTorch and arrays of CuPy through the public functions, against float64.

A framework that is not installed, or that sees no card, is named and skipped.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ...interop.arrays import widen
from ...validation import Problem
from .. import launch_backward
from ..compile import Key
from ..device import Device
from . import compare, on_the_card, peers
from .cases import distance, floats_of, gradient_operands
from .steps import Row, Step, keys_of

SHAPE = (2, 4, 2, 150, 150, 64)
FIRST_CALL = 60.0  # seconds: the framework is loaded
Given = tuple[Any, list[Any], dict[str, Any]]  # the framework, q k v there, arguments


def _numflash() -> Any:
    """The package itself: its public functions stand above this one."""
    return importlib.import_module("numflash")


def _tensor(torch: Any, x: np.ndarray) -> Any:
    return torch.as_tensor(np.ascontiguousarray(x), device="cuda")


def _call(given: Given) -> Any:
    """A call on the current stream."""
    _, tensors, options = given
    return _numflash().attention(*tensors, **options)


def _flex(given: Given) -> Any:
    """A score function."""
    _, tensors, options = given
    return _numflash().flex_attention(*tensors, distance, **options)


def _on_a_stream(given: Given) -> Any:
    """A call on another stream, right after work of the framework's own there."""
    torch, tensors, options = given
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        big = torch.zeros(
            1 << 28, device="cuda"
        )  # a gigabyte: a call on a wrong stream overtakes it
        for _ in range(4):
            big += 1
        late = [x * (1 + 0 * big[:1]).to(x.dtype) for x in tensors]
        found = _numflash().attention(*late, **options)
    stream.synchronize()
    return found


def _in_a_graph(given: Given) -> Any:
    """A call captured with a query of zeros, launched again with the right one."""
    torch, tensors, options = given
    query, right = tensors[0], tensors[0] * 1
    query.zero_()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _numflash().attention(*tensors, **options)
    query.copy_(right)
    graph.replay()
    torch.cuda.synchronize()
    return found


# name, precision, options of the problem, what is called
FORWARD: tuple[tuple[str, str, dict[str, Any], Callable[[Given], Any]], ...] = (
    ("forward", "float16", {"is_causal": True}, _call),
    ("mask", "float16", {"attn_mask": "bool"}, _call),
    ("bias", "float16", {"attn_mask": "float"}, _call),
    ("sinks", "float16", {"sinks": True}, _call),
    ("INT8 of float16", "int8", {"is_causal": True}, _call),
    ("on another stream", "float16", {"is_causal": True}, _on_a_stream),
    ("in a graph", "float16", {"is_causal": True}, _in_a_graph),
    ("INT8 in a graph", "int8", {"is_causal": True}, _in_a_graph),
    ("score function", "float16", {"score_mod": True}, _flex),
)


def problem_of(precision: str, options: dict[str, Any]) -> Problem:
    """The problem on float16 arrays, for precision "int8" too."""
    problem = floats_of(SHAPE, precision, options)
    halves = {x: getattr(problem, x).astype(np.float16) for x in ("query", "key", "value")}
    return problem.changed(**halves)


def checks(arch: str) -> Iterator[Step]:
    """PyTorch's forward calls, its backward call, and CuPy's forward call."""
    for name, precision, options, call in FORWARD:
        yield _forward(f"torch {name}", precision, options, call, arch)
    yield _backward(arch)
    yield _forward("cupy forward", "float16", {"is_causal": True}, _call, arch)


def _skipped(error: peers.Missing) -> Row:
    return {"skipped": str(error), "passed": True}


def cupy() -> Any:
    """The module, where it can be used."""
    try:
        module = importlib.import_module("cupy")
        module.cuda.runtime.getDeviceCount()
    except Exception as error:  # as for PyTorch
        raise peers.Missing(f"{type(error).__name__}: {error}") from error
    return module


def _given(name: str, problem: Problem) -> tuple[Given, Callable[[Any], np.ndarray]]:
    """The arguments of a call, and what brings a result back."""
    if name.startswith("cupy"):
        library = cupy()
        there, back = library.asarray, library.asnumpy
    else:
        library = peers.pytorch()
        there = lambda x: _tensor(library, x)  # noqa: E731
        back = lambda x: x.cpu().numpy()  # noqa: E731
    options: dict[str, Any] = {"enable_gqa": True, "return_lse": True}
    mask = problem.bias if problem.mask is None else problem.mask
    if mask is not None:
        options["attn_mask"] = there(np.ascontiguousarray(mask[:, :1]))
    if problem.sinks is not None:
        options["sinks"] = there(problem.sinks)
    if problem.precision == "int8":
        options["precision"] = "int8"
    if problem.right is not None:
        options["is_causal"] = True
    tensors = [there(x) for x in (problem.query, problem.key, problem.value)]
    return (library, tensors, options), back


def _forward(
    name: str,
    precision: str,
    options: dict[str, Any],
    call: Callable[[Given], Any],
    arch: str,
) -> Step:
    def kernels() -> set[Key]:
        card = on_the_card.Planned(arch)
        return keys_of(*on_the_card.launches(problem_of(precision, options), card)[0])

    def run(device: Device) -> Iterator[Row]:
        problem = problem_of(precision, options)
        try:
            given, back = _given(name, problem)
        except peers.Missing as error:
            yield _skipped(error)
            return
        yield compare.errors(problem, [back(x) for x in call(given)], None)

    return Step(name, kernels, run, FIRST_CALL)


def _backward(arch: str) -> Step:
    def plans() -> tuple[Problem, tuple[np.ndarray, np.ndarray, np.ndarray]]:
        problem = problem_of("float16", {"is_causal": True})
        return problem, gradient_operands(problem)

    def kernels() -> set[Key]:
        problem, (grad, out, lse) = plans()
        return keys_of(*launch_backward.plan(problem, grad, out, lse, arch).launches)

    def run(device: Device) -> Iterator[Row]:
        problem, operands = plans()
        try:
            (torch, tensors, _), back = _given("torch", problem)
        except peers.Missing as error:
            yield _skipped(error)
            return
        grad, out, lse = (_tensor(torch, x) for x in operands)
        found = _numflash().attention_backward(
            grad, *tensors, out, lse, is_causal=True, enable_gqa=True
        )
        yield compare.gradients(problem, operands, [widen(back(x)) for x in found], None)

    return Step("torch backward", kernels, run, FIRST_CALL)
