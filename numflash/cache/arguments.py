"""The arguments of a KV cache, checked: one clear exception for each."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arrays import Imported, dtype_name, import_array, widen

FLOAT32 = np.dtype(np.float32)
FLOATS = ("float32", "float64", "float16", "bfloat16")
# What rounds to infinity where it is stored: magnitudes from here on, of these types ("uint16":
# bfloat16).
BEYOND = {
    "float16": (65520.0, ("float32", "float64", "uint16")),
    "bfloat16": (2.0**128 - 2.0**119, ("float32", "float64")),
    "float32": (2.0**128 - 2.0**103, ("float64",)),
}


def is_float32(x: Any) -> bool:
    """Whether kernels take x as it is: a contiguous float32 array that can be written."""
    return type(x) is np.ndarray and x.dtype is FLOAT32 and x.flags.carray


def integer(name: str, value: Any, low: int, high: int) -> int:
    """An integer from `low` to `high`; ArgumentTypeError or ArgumentError names the argument."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"{name}: got {value!r}; allowed: an integer")
    number = int(value)
    if not low <= number <= high:
        raise ArgumentError(f"{name}: got {number}; allowed: {low} to {high}")
    return number


def floats(name: str, x: Any) -> Imported:
    """An array of floats taken in."""
    taken = import_array(name, x)
    if taken.dtype not in FLOATS:
        raise ArgumentTypeError(f"{name}: got dtype {taken.dtype}; allowed: {', '.join(FLOATS)}")
    return taken


def plain_array(name: str, x: Any) -> np.ndarray:
    """The array of numbers or booleans that x is; of no dtype in particular where it is empty.

    Raises
    ------
    ArgumentError, ArgumentTypeError
        A masked array, whose hidden entries would be read, and lists of different lengths.
    """
    if isinstance(x, np.ma.MaskedArray):
        raise ArgumentTypeError(f"{name}: got a masked array; allowed: plain arrays")
    try:
        array = np.asarray(x)
    except ValueError:
        raise ArgumentError(f"{name}: got {x!r}, of different lengths; allowed: an array") from None
    return array if array.size or array.dtype.kind != "f" else array.astype(np.int64)


def token_counts(counts: Any, batch: int, n: int) -> np.ndarray:
    """(B,) int64, how many of n tokens belong to each sequence."""
    take = plain_array("counts", counts)
    if take.shape != (batch,) or (
        batch and (take.dtype.kind not in "iu" or take.min() < 0 or take.max() > n)
    ):
        raise ArgumentError(f"counts: got {counts!r}; allowed: {batch} integers from 0 to {n}")
    return take.astype(np.int64)


def output(out: Any, shape: tuple[int, ...]) -> np.ndarray:
    """The caller's array for results."""
    if is_float32(out) and out.shape == shape:
        return out
    if not isinstance(out, np.ndarray) or isinstance(out, np.ma.MaskedArray):
        raise ArgumentTypeError(f"out: got {type(out).__name__}; allowed: a NumPy array")
    if not (out.dtype == np.float32 and out.flags.c_contiguous and out.flags.writeable):
        raise ArgumentTypeError(
            f"out: got {out.dtype}, contiguous {out.flags.c_contiguous}, writable {out.flags.writeable}; "
            "allowed: float32, contiguous and writable"
        )
    if out.shape != shape:
        raise ArgumentError(f"out: got shape {out.shape}; allowed: {shape}")
    return out


def in_range(name: str, x: np.ndarray, dtype: str) -> None:
    """Refuse finite numbers that would become infinite in a cache of this dtype."""
    limit, sources = BEYOND.get(dtype, BEYOND["float32"])
    if dtype_name(x.dtype) not in sources:
        return
    size = np.abs(widen(x))
    if not size.max(initial=0) < limit and ((size >= limit) & (size < np.inf)).any():
        raise ArgumentError(
            f"{name}: got {size[size < np.inf].max():.6g} in a cache of dtype {dtype!r}; allowed: "
            f"magnitudes below {limit:.6g}, infinity and NaN"
        )
