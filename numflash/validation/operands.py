"""Arrays and options of the public functions, checked and put into a `Problem`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arrays import Imported, convert, import_array, writable
from ..tiling import MAX_HEAD_DIM
from .description import Problem
from .option_arrays import described
from .options import DEFAULT, Options, check_weights

LARGEST_INT8_CAP = 1e4
OWN_PRECISION = {
    "float32": "float32",
    "float64": "float32",
    "float16": "float16",
    "bfloat16": "bfloat16",
}


def tensor(name: str, x: np.ndarray, layout: str) -> np.ndarray:
    """A 2-D, 3-D or 4-D array as a (B, H, L, D) view."""
    if not 2 <= x.ndim <= 4:
        raise ArgumentError(
            f"{name}: got shape {x.shape}; allowed: 2 to 4 dimensions, {' '.join(SHAPES[layout])}"
        )
    if layout == "blhd":
        x = x[None, :, None] if x.ndim == 2 else x[None] if x.ndim == 3 else x
        return x.transpose(0, 2, 1, 3)
    return x.reshape((1,) * (4 - x.ndim) + x.shape)


SHAPES = {
    "bhld": ("(B, H, L, D)", "(H, L, D)", "(L, D)"),
    "blhd": ("(B, L, H, D)", "(L, H, D)", "(L, D)"),
}


def check_shapes(
    q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], enable_gqa: bool
) -> None:
    """Raise ArgumentError unless (B, H, L, D), (B, Hkv, S, D) and (B, Hkv, S, Dv) fit together."""
    shown = "as (B, H, L, D)"
    for name, shape in (("query", q), ("key", k), ("value", v)):
        if not 1 <= shape[3] <= MAX_HEAD_DIM:
            raise ArgumentError(
                f"{name}: got shape {shape} {shown}; allowed: head_dim 1 to {MAX_HEAD_DIM}"
            )
        if shape[1] < 1:
            raise ArgumentError(f"{name}: got shape {shape} {shown}; allowed: at least one head")
    for axis, word in ((0, "batch"), (3, "head_dim")):
        if k[axis] != q[axis]:
            raise ArgumentError(
                f"key: got shape {k} {shown}; allowed: the query's {word}, {q[axis]}"
            )
    if v[2] != k[2]:
        # blame the one that is not as long as the query
        name, other, found = ("key", "value", (k, v)) if v[2] == q[2] else ("value", "key", (v, k))
        raise ArgumentError(
            f"{name}: got {found[0][2]} keys, shape {found[0]} {shown}, where {other} has {found[1][2]}; "
            "allowed: as many in both"
        )
    for axis, word in ((0, "batch"), (1, "heads")):
        if v[axis] != k[axis]:
            raise ArgumentError(
                f"value: got shape {v} {shown}; allowed: the key's {word}, {k[axis]}"
            )
    if k[1] != q[1]:
        if not enable_gqa:
            raise ArgumentError(
                f"enable_gqa: got False with {q[1]} query and {k[1]} key heads, of query {q} and key {k} {shown}; "
                "allowed: True, or equal heads"
            )
        if q[1] % k[1]:
            raise ArgumentError(
                f"key: got {k[1]} heads; allowed: a divisor of the query's {q[1]} heads"
            )


def describe(query: Any, key: Any, value: Any, options: Options, precision: str) -> Problem:
    """The Problem of 4-D operands whose shapes are checked.

    What of the options depends on shapes or precision is checked here.
    """
    (b, h, l, d), s = query.shape, key.shape[2]
    if precision == "int8" and options.softcap > LARGEST_INT8_CAP:
        raise ArgumentError(
            f"softcap: got {options.softcap:g} with precision 'int8'; allowed: 0 to {LARGEST_INT8_CAP:g}, beyond which "
            "the error of its tanh would show"
        )
    if options.pv is not None:
        check_weights(options.pv, precision)
    left, right = options.limits(l + s)
    return Problem(
        query=query,
        key=key,
        value=value,
        scale=1.0 / math.sqrt(d) if options.scale is None else options.scale,
        left=left,
        right=right,
        softcap=options.softcap,
        precision=precision,
        pv=options.pv or "int8",
        return_lse=options.return_lse,
        **described(options.arrays, options.alignment, (b, h, l, s)),
    )


def import_operands(query: Any, key: Any, value: Any) -> tuple[Imported, Imported, Imported]:
    """The three arrays of a call, taken in once."""
    return import_array("query", query), import_array("key", key), import_array("value", value)


def problem(query: Any, key: Any, value: Any, options: Options = DEFAULT) -> Problem:
    """Check the arguments of `numflash.attention` and describe them; see `problem_of`."""
    return problem_of(import_operands(query, key, value), options)


def problem_of(
    operands: tuple[Imported, Imported, Imported], options: Options, convert_operands: bool = True
) -> Problem:
    """The same for arrays that are taken in.

    The operands come out in the storage of the precision: float32, float16, or uint16 (the bits of
    bfloat16); for "int8", or without `convert_operands`, they stay as they came: for
    `quantize_problem`, or for the oracle.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    """
    taken = dict(zip(("query", "key", "value"), operands, strict=True))
    precision = options.precision
    layout = options.layout
    tensor("query", operands[0].array, layout)
    dtype = operands[0].dtype
    for name, x in taken.items():
        if x.dtype not in OWN_PRECISION and not (x.dtype == "uint16" and precision == "bfloat16"):
            raise ArgumentTypeError(
                f"{name}: got dtype {x.dtype}; allowed: float32, float64, float16, bfloat16, "
                "or uint16 (the bits of bfloat16) with precision='bfloat16'"
            )
        if x.dtype != dtype:
            lists = " (lists of numbers are float64)" if "float64" in (x.dtype, dtype) else ""
            raise ArgumentTypeError(
                f"{name}: got dtype {x.dtype}; allowed: the query's, {dtype}{lists}"
            )
        if x.array.ndim != taken["query"].array.ndim:
            raise ArgumentError(
                f"{name}: got shape {x.array.shape}; allowed: the query's {taken['query'].array.ndim} dimensions"
            )
    precision = precision or OWN_PRECISION[dtype]
    q, k, v = (tensor(n, x.array, layout) for n, x in taken.items())
    check_shapes(q.shape, k.shape, v.shape, options.enable_gqa)
    if convert_operands and precision != "int8":
        q, k, v = (convert(x, precision) for x in (q, k, v))
    q, k, v = (writable(x) for x in (q, k, v))
    return describe(q, k, v, options, precision)


# from here on float32 holds an LSE to no better than 1: gradients compute it anew
LARGEST_LSE = 2.0**23


def gradient_operands(
    problem: Problem,
    query_shape: tuple[int, ...],
    grad_out: Any,
    out: Any,
    lse: Any,
    grad_lse: Any,
    layout: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray | None]:
    """grad_out and out as (B, H, L, Dv), lse and grad_lse, unless None, as (B, H, L), float32.

    They come in the query's layout and number of dimensions.
    """
    lead = query_shape[:-1]
    found = []
    for name, given, shape in (
        ("grad_out", grad_out, (*lead, problem.shape[6])),
        ("out", out, (*lead, problem.shape[6])),
        ("lse", lse, lead),
        ("grad_lse", grad_lse, lead),
    ):
        if name == "grad_lse" and given is None:
            continue
        taken = import_array(name, given)
        floats: tuple[str, ...] = ("float32", "float64")
        if shape != lead:
            floats = (
                (*OWN_PRECISION, "uint16")
                if problem.precision == "bfloat16"
                else tuple(OWN_PRECISION)
            )
        if taken.dtype not in floats:
            raise ArgumentTypeError(
                f"{name}: got dtype {taken.dtype}; allowed: {', '.join(floats)}"
            )
        if taken.array.shape != shape:
            raise ArgumentError(
                f"{name}: got shape {taken.array.shape}; allowed: {shape} with query {query_shape}"
            )
        found.append(writable(convert(taken.array, "float32")))
    grad_out, out, *rows = found
    lse, *others = (tensor("lse", x[..., None], layout)[..., 0] for x in rows)
    return (
        tensor("grad_out", grad_out, layout),
        tensor("out", out, layout),
        lse,
        others[0] if others else None,
    )
