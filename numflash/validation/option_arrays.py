"""The options that are arrays, checked against the shapes of a problem: masks, lengths, slopes, sinks."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from ..interop.arrays import convert, import_array, import_integers, spread, widen, writable
from .options import OptionArrays

LARGEST_PER_HEAD = 1e20


def per_head(name: str, x: Any, allowed: tuple[tuple[int, ...], ...], words: str) -> np.ndarray:
    """A float32 array of one of the allowed shapes, of numbers that no length of a sequence takes
    out of float32.
    """
    taken = import_array(name, x)  # uint16 are numbers here: bits are taken of operands only
    array = widen(taken.array) if taken.dtype == "bfloat16" else taken.array
    if array.dtype.kind not in "fiu":
        raise ArgumentTypeError(f"{name}: got dtype {array.dtype}; allowed: numbers")
    if array.shape not in allowed:
        raise ArgumentError(
            f"{name}: got shape {array.shape}; allowed: {words} = {' or '.join(map(str, allowed))}"
        )
    with np.errstate(all="ignore"):
        array = array.astype(np.float32)  # float16 does not hold the limit
    if not (np.abs(array) <= LARGEST_PER_HEAD).all():  # false for NaN
        raise ArgumentError(
            f"{name}: got NaN, infinity or a number beyond +-{LARGEST_PER_HEAD:g}; allowed: numbers up to it"
        )
    return array


def split_mask(
    attn_mask: Any, shape: tuple[int, int, int, int]
) -> tuple[np.ndarray | None, np.ndarray | None]:
    """`attn_mask` as (mask, bias), one of them None: broadcast views of `shape`."""
    if attn_mask is None:
        return None, None
    taken = import_array("attn_mask", attn_mask)
    array = taken.array
    if taken.dtype == "bfloat16" or array.dtype.kind == "f":
        array = convert(array, "float32")
    elif array.dtype.kind != "b":
        raise ArgumentTypeError(
            f"attn_mask: got dtype {taken.dtype}; allowed: bool (True = may attend) or float (added to scores)"
        )
    try:
        array = writable(spread(array, shape))
    except ValueError:
        padding = array.shape == (shape[0], shape[3])
        hint = ". For padding give mask[:, None, None], or key_lengths" if padding else ""
        raise ArgumentError(
            f"attn_mask: got shape {array.shape}; allowed: what broadcasts to (B, H, L, S) = {shape}{hint}"
        ) from None
    return (array, None) if array.dtype.kind == "b" else (None, array)


def lengths(name: str, x: Any, batch: int, most: int) -> np.ndarray:
    """(B,) int64 counts between 0 and `most`."""
    if x is None:
        return np.array([most] * batch, np.int64)
    array = import_integers(name, x)
    if array.shape != (batch,):
        raise ArgumentError(f"{name}: got shape {array.shape}; allowed: (B,) = ({batch},)")
    counts = array.tolist()
    if batch and not (min(counts) >= 0 and max(counts) <= most):
        raise ArgumentError(f"{name}: got {counts}; allowed: 0 to {most}")
    return array.astype(np.int64)


def described(
    arrays: OptionArrays, alignment: str, shape: tuple[int, int, int, int]
) -> dict[str, Any]:
    """The fields of a `Problem` that come from its options' arrays; shape is (B, H, L, S).

    Raises
    ------
    ArgumentError, ArgumentTypeError
        Naming the argument, what came and what is allowed.
    """
    b, h, length, s = shape
    counts = lengths("key_lengths", arrays.key_lengths, b, s)
    mask, bias = split_mask(arrays.attn_mask, shape)
    slopes, sinks = arrays.alibi_slopes, arrays.sinks
    if slopes is not None:
        slopes = per_head("alibi_slopes", slopes, ((h,), (b, h)), "(H,) or (B, H)")
        slopes = writable(spread(slopes, (b, h)))
    if sinks is not None:
        sinks = per_head("sinks", sinks, ((h,),), "(H,)")
    return {
        "key_lengths": counts,
        "diagonal": counts - length if alignment == "lower_right" else np.zeros(b, np.int64),
        "mask": mask,
        "bias": bias,
        "alibi_slopes": slopes,
        "sinks": sinks,
    }
