"""NumPy's and PyTorch's functions that are more than one operation, written with traced values.

Casts and what changes only an array's shape are here too. `tracing` makes them known to
`traced.apply`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .graph import Graph
from .traced import Scalar, Values, apply, scalar

CASTS = {
    "float": "f",
    "double": "f",
    "half": "f",
    "bfloat16": "f",
    "int": "i",
    "long": "i",
    "bool": "b",
}
UNCHANGED = (
    "item", "view", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "detach", "clone",
    "cpu", "copy", "expand", "expand_as", "alias", "ravel", "positive",
)  # fmt: skip


def kind_of(dtype: Any) -> str:
    """The kind ("b", "i" or "f") of a NumPy or PyTorch dtype, or of a Python type."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    if name.startswith("bool"):
        return "b"
    return "i" if name.startswith(("int", "uint", "long", "short")) else "f"


def _where(graph: Graph, condition: Any, x: Any, y: Any, **_: Any) -> Scalar:
    return Scalar(graph, graph.where(*(scalar(graph, z).node for z in (condition, x, y))))


def _clamp(graph: Graph, x: Any, *bounds: Any, **named: Any) -> Any:
    low, high = (*bounds, None, None)[:2]
    low = named.get("min", named.get("a_min", low))
    high = named.get("max", named.get("a_max", high))
    for op, bound in (("max", low), ("min", high)):
        if bound is not None:
            x = apply(graph, op, (x, bound), {})
    return scalar(graph, x)


def _to(graph: Graph, x: Any, *args: Any, **options: Any) -> Scalar:
    wanted = [
        y
        for y in (*args, options.get("dtype"))
        if y is not None and not isinstance(y, (bool, Values))
    ]
    dtypes = [y for y in wanted if not isinstance(y, str) and type(y).__name__ != "device"]
    return scalar(graph, x).cast(kind_of(dtypes[0])) if dtypes else scalar(graph, x)


def _astype(graph: Graph, x: Any, dtype: Any, **_: Any) -> Scalar:
    torch = sys.modules.get("torch")
    name = dtype if torch is not None and isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    return scalar(graph, x).cast(kind_of(name))


def _logical(op: str) -> Callable:
    def logical(graph: Graph, *args: Any, **_: Any) -> Scalar:
        return Scalar(graph, graph.make(op, *(scalar(graph, x).cast("b").node for x in args)))

    return logical


def _filled(value: float | None) -> Callable:
    def filled(graph: Graph, like: Any, *args: Any, **options: Any) -> Any:
        given = value if value is not None else args[-1] if args else options.get("fill_value")
        kind = scalar(graph, like).node.kind
        if options.get("dtype") is not None:
            kind = kind_of(options["dtype"])
        return scalar(graph, given).cast(kind)

    return filled


def _gelu(graph: Graph, x: Any, approximate: str = "none") -> Any:
    x = scalar(graph, x)
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
        return 0.5 * x * (1.0 + apply(graph, "tanh", (inner,), {}))
    return 0.5 * x * (1.0 + apply(graph, "erf", (x * 0.7071067811865476,), {}))


def _softplus(graph: Graph, x: Any, beta: float = 1.0, threshold: float = 20.0) -> Any:
    y: Any = scalar(graph, x)
    y = y * beta
    tail = _log1p(graph, apply(graph, "exp", (-abs(y),), {}))
    return (apply(graph, "max", (y, 0.0), {}) + tail) / beta


def _log1p(graph: Graph, x: Any) -> Any:
    """log(1 + x); near 0, where rounding 1 + x loses digits, five terms of the series."""
    x = scalar(graph, x).cast("f")
    near = x * (1.0 - x * (0.5 - x * (1 / 3 - x * (0.25 - x * 0.2))))
    return _where(graph, abs(x) < 0.05, near, apply(graph, "log", (1.0 + x,), {}))


def _expm1(graph: Graph, x: Any) -> Any:
    x = scalar(graph, x).cast("f")
    half = apply(graph, "tanh", (_clamp(graph, x, -1.0, 1.0) * 0.5,), {})
    return _where(
        graph, abs(x) < 1.0, 2.0 * half / (1.0 - half), apply(graph, "exp", (x,), {}) - 1.0
    )


def _sign(graph: Graph, x: Any) -> Any:
    x = scalar(graph, x)
    return (x > 0).cast("i") - (x < 0).cast("i")


def _of_torch(formula: Callable) -> Callable:
    return lambda graph, x, *args, **options: formula(graph, scalar(graph, x), *args)


def _leaky(g: Graph, x: Any, slope: float = 0.01) -> Any:
    return _where(g, x > 0, x, x * slope)


FORMULAS: dict[str, Callable] = {
    "where": _where, "clamp": _clamp, "clip": _clamp, "to": _to, "type": _to, "astype": _astype,
    "clamp_min": lambda g, x, low: _clamp(g, x, low),
    "clamp_max": lambda g, x, high: _clamp(g, x, None, high),
    "logical_and": _logical("and"), "logical_or": _logical("or"), "logical_not": _logical("not"),
    "logical_xor": _logical("xor"), "zeros_like": _filled(0.0), "ones_like": _filled(1.0),
    "new_zeros": _filled(0.0), "new_ones": _filled(1.0), "full_like": _filled(None),
    "new_full": _filled(None), "gelu": _gelu, "softplus": _softplus, "log1p": _log1p,
    "expm1": _expm1, "sign": _sign, "sgn": _sign,
    "square": _of_torch(lambda g, x: x * x),
    "reciprocal": _of_torch(lambda g, x: 1.0 / x),
    "relu": _of_torch(lambda g, x, *_: _clamp(g, x, 0.0)),
    "leaky_relu": _of_torch(_leaky),
    "silu": _of_torch(lambda g, x, *_: x * apply(g, "sigmoid", (x,), {})),
    "log10": _of_torch(lambda g, x: apply(g, "log", (x,), {}) * 0.4342944819032518),
    "logsigmoid": _of_torch(lambda g, x: -_softplus(g, -x)),
    "isnan": _of_torch(lambda g, x: x != x),
    "isinf": _of_torch(lambda g, x: abs(x) == np.inf),
    "isfinite": _of_torch(lambda g, x: abs(x) < np.inf),
    "masked_fill": lambda g, x, mask, value: _where(g, mask, value, x),
    "logaddexp": lambda g, x, y: apply(g, "max", (x, y), {})
    + _log1p(g, apply(g, "exp", (-abs(scalar(g, x) - y),), {})),
    "tan": _of_torch(lambda g, x: apply(g, "sin", (x,), {}) / apply(g, "cos", (x,), {})),
    "addcmul": lambda g, x, y, z, value=1: scalar(g, x) + value * (scalar(g, y) * z),
    "lerp": lambda g, x, y, w: scalar(g, x) + scalar(g, w) * (scalar(g, y) - x),
    **{name: (lambda g, x, *_, kind=kind, **__: scalar(g, x).cast(kind)) for name, kind in CASTS.items()},
    **{name: (lambda g, x, *_, **__: scalar(g, x)) for name in UNCHANGED},
}  # fmt: skip
