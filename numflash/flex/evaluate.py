"""A graph evaluated by NumPy in float64 and int64: what every compiled tile is compared with."""

from __future__ import annotations

from typing import Any

import numpy as np

from .graph import OPERATIONS, Graph, Node, reachable

DTYPES = {"b": np.bool_, "i": np.int64, "f": np.float64}


def inside(index: list[Any], shape: tuple[int, ...]) -> list[np.ndarray]:
    """An index as it is read: a negative one counts from the end, one outside is clamped."""
    found = []
    for at, size in zip(index, shape, strict=True):
        found.append(np.clip(np.where(at < 0, at + size, at), 0, size - 1))
    return found


def element(array: np.ndarray, index: list[Any]) -> np.ndarray:
    """Elements of an array by an index as `inside` takes it."""
    return array[tuple(inside(index, array.shape))]


def evaluate(graph: Graph, roots: tuple[Node, ...], arguments: dict[str, Any]) -> list[np.ndarray]:
    """Values of the roots; arguments b, h, q, k and score by name, arrays that broadcast."""
    values: dict[int, Any] = {}
    with np.errstate(all="ignore"):
        for x in reachable(roots):
            values[x.number] = _value(graph, x, [values[y.number] for y in x.args], arguments)
    return [values[x.number] for x in roots]


def _value(graph: Graph, x: Node, operands: list[Any], arguments: dict[str, Any]) -> Any:
    dtype = DTYPES[x.kind]
    if x.op in arguments:
        return np.asarray(arguments[x.op]).astype(dtype)
    if x.op == "const":
        return dtype(x.data)
    if x.op == "load":
        return element(graph.arrays[x.data], operands).astype(dtype)
    if x.op == "cast":
        (y,) = operands
        if x.kind == "i" and x.args[0].kind == "f":  # float to integer stays within 32 bits
            y = np.clip(np.where(np.isnan(y), 0, y), -(2.0**31), 2.0**31 - 1)
        return np.asarray(y).astype(dtype)
    if x.op == "where":
        return np.where(*operands)
    return np.asarray(OPERATIONS[x.op][1](*operands)).astype(dtype)
