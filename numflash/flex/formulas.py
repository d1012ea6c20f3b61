"""NumPy's and PyTorch's functions that are more than one operation, written with traced values.

Casts and what changes only an array's shape are here too. `tracing` makes them known to
`traced.apply`.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from .graph import Graph, Untraceable
from .traced import Scalar, Values, apply, host_array, scalar

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
    "item", "reshape", "unsqueeze", "squeeze", "flatten", "contiguous", "clone", "cpu", "copy",
    "expand", "expand_as", "alias", "ravel", "positive",
)  # fmt: skip
# dtypes of either library, by what stands for them here; of others values would wrap or round
DTYPES = {
    "b": ("bool", "bool_"),
    "i": ("int", "int32", "int64", "long", "longlong", "intc", "intp"),
    "f": (
        "float", "float16", "bfloat16", "float32", "float64", "half", "single", "double", "longdouble", "float128",
    ),
}  # fmt: skip


def kind_of(dtype: Any) -> str:
    """The kind ("b", "i" or "f") of a NumPy or PyTorch dtype, or of a Python type."""
    name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
    kind = next((kind for kind, names in DTYPES.items() if name in names), None)
    if kind is None:
        raise Untraceable(
            f"a cast to {name}: integers do not wrap here (write `& 255` or `% 2**n`), and floats are "
            "float32; allowed: bool, int32, int64, and floats of 16 bits and more"
        )
    return kind


def _where(graph: Graph, condition: Any, x: Any, y: Any) -> Scalar:
    return Scalar(graph, graph.where(*(scalar(graph, z).node for z in (condition, x, y))))


def _clamp(graph: Graph, x: Any, *bounds: Any, **named: Any) -> Any:
    low, high = (*bounds, None, None)[:2]
    low = named.get("min", named.get("a_min", low))
    high = named.get("max", named.get("a_max", high))
    for op, beyond, bound in (("max", "lt", low), ("min", "gt", high)):
        if bound is None:
            continue
        if scalar(graph, x).node.kind == "f":  # PyTorch's slope at the bound is that of x
            x = _where(graph, apply(graph, beyond, (x, bound), {}), bound, x)
        else:
            x = apply(graph, op, (x, bound), {})
    return scalar(graph, x)


def _div(graph: Graph, x: Any, y: Any, rounding_mode: str | None = None) -> Any:
    """Division, PyTorch's rounded down or towards zero too."""
    u, v = scalar(graph, x), scalar(graph, y)
    if rounding_mode is None:
        return Scalar(graph, graph.make("div", u.node, v.node))
    if rounding_mode == "floor":
        return u // v
    if rounding_mode != "trunc":
        raise Untraceable(f"div() with rounding_mode={rounding_mode!r}; allowed: 'floor', 'trunc'")
    if "f" in (u.node.kind, v.node.kind):
        return apply(graph, "trunc", (Scalar(graph, graph.make("div", u.node, v.node)),), {})
    whole = abs(u) // abs(v)
    return _where(graph, (u < 0) ^ (v < 0), -whole, whole)


def _round(graph: Graph, x: Any, decimals: Any = 0) -> Any:
    if decimals != 0:
        raise Untraceable(f"round() to {decimals} decimals: write round(x * 10**n) / 10**n")
    return Scalar(graph, graph.make("round", scalar(graph, x).node))


def _view(graph: Graph, x: Any, *shape: Any, dtype: Any = None) -> Scalar:
    sizes = all(isinstance(n, (int, tuple, list)) and not isinstance(n, bool) for n in shape)
    if dtype is not None or not sizes:
        raise Untraceable("view() as another dtype cannot be recorded: cast with .to or .astype")
    return scalar(graph, x)


def _to(graph: Graph, x: Any, *args: Any, **options: Any) -> Scalar:
    found = scalar(graph, x)
    for y in (*args, *(options[name] for name in ("dtype", "other") if name in options)):
        if isinstance(y, Values) or host_array(y) is not None:  # as another one
            y = y.dtype
        device = type(y).__name__ == "device" or (isinstance(y, str) and "Tensor" not in y)
        if not (device or isinstance(y, bool)):
            found = found.cast(kind_of(y))
    return found


def _astype(graph: Graph, x: Any, dtype: Any, **_: Any) -> Scalar:
    torch = sys.modules.get("torch")
    name = dtype if torch is not None and isinstance(dtype, torch.dtype) else np.dtype(dtype).name
    return scalar(graph, x).cast(kind_of(name))


def _logical(op: str) -> Callable:
    def logical(graph: Graph, *args: Any) -> Scalar:
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
    smooth = (apply(graph, "max", (y, 0.0), {}) + tail) / beta
    return smooth if threshold == np.inf else _where(graph, y > threshold, x, smooth)


def _log1p(graph: Graph, x: Any) -> Any:
    """Near 0 the first five terms of the series, since 1 + x would lose the digits of x."""
    x = scalar(graph, x).cast("f")
    near = x * (1.0 - x * (0.5 - x * (1 / 3 - x * (0.25 - x * 0.2))))
    return _where(graph, abs(x) < 0.05, near, apply(graph, "log", (1.0 + x,), {}))


def _expm1(graph: Graph, x: Any) -> Any:
    x = scalar(graph, x).cast("f")
    half = apply(graph, "tanh", (_clamp(graph, x, -1.0, 1.0) * 0.5,), {})
    return _where(
        graph, abs(x) < 1.0, 2.0 * half / (1.0 - half), apply(graph, "exp", (x,), {}) - 1.0
    )


def _logaddexp(graph: Graph, x: Any, y: Any) -> Any:
    """Of equal infinities, whose difference is NaN, too."""
    x, y = scalar(graph, x), scalar(graph, y)
    apart = _where(graph, x == y, 0.0, abs(x - y))
    return apply(graph, "max", (x, y), {}) + _log1p(graph, apply(graph, "exp", (-apart,), {}))


def _but_nan(op: str) -> Callable:
    """The minimum or maximum, of NaN and a number the number."""

    def but_nan(graph: Graph, x: Any, y: Any) -> Any:
        x, y = scalar(graph, x), scalar(graph, y)
        found = apply(graph, op, (x, y), {})
        if found.node.kind != "f":
            return found
        return _where(graph, x != x, y, _where(graph, y != y, x, found))

    return but_nan


def _sign(graph: Graph, x: Any) -> Any:
    x = scalar(graph, x)
    return (x > 0).cast("i") - (x < 0).cast("i")


def _of_torch(formula: Callable) -> Callable:
    """The formula for arguments of any kind."""

    def of_any(graph: Graph, x: Any, *args: Any, **options: Any) -> Any:
        return formula(graph, scalar(graph, x), *args, **options)

    of_any.__signature__ = inspect.signature(formula)  # type: ignore[attr-defined]
    return of_any


def _leaky(g: Graph, x: Any, negative_slope: float = 0.01, inplace: bool = False) -> Any:
    return _where(g, x > 0, x, x * negative_slope)


def _relu(g: Graph, x: Any, inplace: bool = False) -> Any:
    """PyTorch's slope at 0 is 0."""
    return _where(g, x <= 0, 0, x)


def _silu(g: Graph, x: Any, inplace: bool = False) -> Any:
    return x * apply(g, "sigmoid", (x,), {})


def _powered_as_float(g: Graph, x: Any, y: Any) -> Scalar:
    return Scalar(g, g.make("pow", *(scalar(g, z).cast("f").node for z in (x, y))))


def _detach(g: Graph, x: Any) -> Scalar:
    return Scalar(g, g.make("detach", scalar(g, x).node))


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
    "relu": _of_torch(_relu), "leaky_relu": _of_torch(_leaky), "silu": _of_torch(_silu),
    "div": _div, "divide": _div, "true_divide": _div, "truediv": _div, "round": _round,
    "around": _round, "detach": _detach, "view": _view, "float_power": _powered_as_float,
    "log10": _of_torch(lambda g, x: apply(g, "log", (x,), {}) * 0.4342944819032518),
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), _of_torch(lambda g, x: -_softplus(g, -x, 1.0, np.inf))),
    "isnan": _of_torch(lambda g, x: x != x),
    "isinf": _of_torch(lambda g, x: abs(x) == np.inf),
    "isfinite": _of_torch(lambda g, x: abs(x) < np.inf),
    "masked_fill": lambda g, x, mask, value: _where(g, mask, value, x),
    "logaddexp": _logaddexp, "fmin": _but_nan("min"), "fmax": _but_nan("max"),
    "tan": _of_torch(lambda g, x: apply(g, "sin", (x,), {}) / apply(g, "cos", (x,), {})),
    "addcmul": lambda g, x, y, z, value=1: scalar(g, x) + value * (scalar(g, y) * z),
    "lerp": lambda g, x, y, w: scalar(g, x) + scalar(g, w) * (scalar(g, y) - x),
    **{name: (lambda g, x, *_, kind=kind, **__: scalar(g, x).cast(kind)) for name, kind in CASTS.items()},
    **{name: (lambda g, x, *_, **__: scalar(g, x)) for name in UNCHANGED},
}  # fmt: skip
