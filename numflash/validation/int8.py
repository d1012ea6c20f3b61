"""Operands that are quantised already: the arguments of `attention_int8`."""

from __future__ import annotations

from dataclasses import replace
from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arguments import choice
from ..numerics.fixedpoint import FINER, FIRST_KEYS, FLOAT_VALUES
from ..numerics.quantization import QuantizedTensor
from .description import Problem
from .operands import check_shapes, describe
from .options import DEFAULT, Options


def _is_plain(x: Any, dtype: type) -> bool:
    """Whether x is an unmasked NumPy array of this dtype."""
    return isinstance(x, np.ndarray) and not isinstance(x, np.ma.MaskedArray) and x.dtype == dtype


def _kind(x: Any) -> str:
    """What came where an array should be: its dtype and shape, or its type."""
    return f"{x.dtype} {x.shape}" if type(x) is np.ndarray else type(x).__name__


def _check_part(name: str, x: Any, dtype: type, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless an attribute of a QuantizedTensor is such an array."""
    if not _is_plain(x, dtype) or x.shape != shape:
        raise ArgumentError(f"{name}: got {_kind(x)}; allowed: {np.dtype(dtype)} {shape}")


def _check_parts(name: str, t: QuantizedTensor) -> None:
    """Raise unless the parts of a QuantizedTensor fit each other.

    Looked at once, the arrays are not expected to change.
    """
    if t.checked:
        return
    if not _is_plain(t.data, np.int8) or not 2 <= t.data.ndim <= 4:
        raise ArgumentTypeError(
            f"{name}.data: got {_kind(t.data)}; allowed: int8 of 2 to 4 dimensions"
        )
    lead, (rows, d), block = t.data.shape[:-2], t.data.shape[-2:], 1
    if t.granularity == "block":
        block = t.block
        if isinstance(block, bool) or not isinstance(block, Integral) or block < 1:
            raise ArgumentError(f"{name}.block: got {block!r}; allowed: an integer, 1 or more")
    shape = {
        "row": (rows, 1),
        "block": (-(-rows // block), 1),
        "channel": (1, d),
        "tensor": (1, 1),
    }[t.granularity]
    _check_part(f"{name}.scale", t.scale, np.float32, (*lead, *shape))
    if not (np.isfinite(t.scale).all() and (t.scale >= 0).all()):
        raise ArgumentError(
            f"{name}.scale: got NaN, infinity or a negative number; allowed: finite, 0 or more"
        )
    if t.offset is not None:
        _check_part(f"{name}.offset", t.offset, np.float32, (*lead, 1, d))
        if not np.isfinite(t.offset).all():
            raise ArgumentError(f"{name}.offset: got NaN or infinity; allowed: finite numbers")
    if t.nonfinite is not None:
        _check_part(f"{name}.nonfinite", t.nonfinite, np.bool_, (*lead, rows))
    if t.low is not None:
        _check_part(f"{name}.low", t.low, np.int8, (*lead, min(rows, FIRST_KEYS), d))
        if np.abs(t.low.astype(np.int16)).max(initial=0) > FINER // 2:
            raise ArgumentError(f"{name}.low: got values beyond {FINER // 2}; allowed: -16 to 16")
    object.__setattr__(t, "checked", True)


def quantized(name: str, t: Any, granularities: tuple[str, ...]) -> QuantizedTensor:
    """A QuantizedTensor that is whole and fit for its place, with 4-D data."""
    if not isinstance(t, QuantizedTensor):
        raise ArgumentTypeError(
            f"{name}: got {type(t).__name__}; allowed: a QuantizedTensor (numflash.quantize)"
        )
    choice(f"{name}.granularity", t.granularity, granularities)
    if t.offset is not None and name != "key":
        raise ArgumentError(
            f"{name}.offset: got {_kind(t.offset)}; allowed: None, only the key is smoothed"
        )
    _check_parts(name, t)
    if t.data.ndim == 4:
        return t
    return t.unfolded((1,) * (4 - t.data.ndim) + t.data.shape[:-2])


def quantized_problem(query: Any, key: Any, value: Any, options: Options = DEFAULT) -> Problem:
    """Check the arguments of `numflash.attention_int8` and describe them."""
    pv = options.pv or "int8"
    q, k = (
        quantized(n, t, ("row", "block", "tensor")) for n, t in (("query", query), ("key", key))
    )
    v = quantized(
        "value",
        value,
        ("row", "block", "channel", "tensor") if pv in FLOAT_VALUES else ("channel", "tensor"),
    )
    for name, t in (("key", key), ("value", value)):
        if t.data.ndim != query.data.ndim:
            raise ArgumentError(
                f"{name}: got shape {t.data.shape}; allowed: as many dimensions as query {query.data.shape}"
            )
    if q.rotated != k.rotated:
        raise ArgumentError(
            f"key: got rotated={k.rotated} with a query of rotated={q.rotated}; allowed: both of one "
            "`quantize_qkv` call, or of calls with the same `rotate`"
        )
    check_shapes(q.shape, k.shape, v.shape, options.enable_gqa)
    if pv not in FLOAT_VALUES and v.granularity == "tensor":
        v = replace(v, granularity="channel", scale=np.repeat(v.scale, v.shape[3], -1))
    return describe(q, k, v.dequantize() if pv in FLOAT_VALUES else v, options, "int8")
