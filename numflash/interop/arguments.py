"""Checks of single arguments. Every error names the argument, what came and what is allowed."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from numbers import Integral, Real
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError

# scale and softcap: their products with units and reciprocals stay in float32
SMALLEST_FACTOR = 1e-30
LARGEST_FACTOR = 1e30
NOT_MASKS = (bool, int, float, np.generic)
Window = tuple[int | None, int | None]


EMULATED = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90a")  # architectures of the CUDA emulator
EMULATOR = "cuda-emulator"
EMULATED_DEFAULT = "sm_80"


def emulated_arch(value: str) -> str | None:
    """The architecture that "cuda-emulator" or "cuda-emulator:sm_75" names.

    None for what names no emulator.
    """
    name, _, arch = value.partition(":")
    return (arch or EMULATED_DEFAULT) if name == EMULATOR else None


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """`value` if it is one of the allowed names, or names an architecture of an allowed emulator."""
    if isinstance(value, str) and EMULATOR in allowed and value.startswith(EMULATOR + ":"):
        if emulated_arch(value) not in EMULATED:
            shown = ", ".join(map(repr, EMULATED))
            raise ArgumentError(f"{name}: got {value!r}; allowed after '{EMULATOR}:': {shown}")
        return value
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(f"{name}: got {value!r}; allowed: {', '.join(map(repr, allowed))}")
    return value


def refuse_unknown(function: str, options: Iterable[str], taken: Collection[str]) -> None:
    """Refuse keywords that the public function does not take.

    Else a function inside it would be blamed for them.
    """
    for name in options:
        if name not in taken:
            raise ArgumentTypeError(
                f"{name}: {function} does not take it; allowed: {', '.join(taken)}"
            )


def mask_array(name: str, value: Any) -> Any:
    """Refuse a flag or a number where a mask belongs.

    It would broadcast, and mean another argument.
    """
    if isinstance(value, NOT_MASKS):
        meant = "is_causal" if isinstance(value, (bool, np.bool_)) else "scale"
        raise ArgumentTypeError(
            f"{name}: got {value!r}; allowed: an array, or None. Did you mean {meant}={value}?"
        )
    return value


def flag(name: str, value: Any) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, (bool, np.bool_)):
        raise ArgumentTypeError(f"{name}: got {value!r}; allowed: True or False")
    return bool(value)


def real(name: str, value: Any, low: float = -np.inf) -> float:
    """A finite number of at least `low`."""
    if type(value) is float and low <= value < np.inf and value > -np.inf:
        return value
    if (
        isinstance(value, (bool, np.bool_))
        or not isinstance(value, (Real, np.ndarray))
        or (isinstance(value, np.ndarray) and (value.ndim or value.dtype.kind not in "fiu"))
    ):
        raise ArgumentTypeError(f"{name}: got {value!r}; allowed: a number")
    try:
        number = float(value)
    except OverflowError:  # an int beyond float64
        number = np.inf
    if not (np.isfinite(number) and number >= low):
        raise ArgumentError(
            f"{name}: got {number}; allowed: finite{'' if low == -np.inf else f', at least {low:g}'}"
        )
    return number


def factor(name: str, value: Any, low: float = -np.inf) -> float:
    """0, or a number of at least `low` that float32 holds, and its reciprocal too, in whatever
    units the kernels use it.
    """
    number = real(name, value, low)
    if number and not SMALLEST_FACTOR <= abs(number) <= LARGEST_FACTOR:
        raise ArgumentError(
            f"{name}: got {number:g}; allowed: 0, or magnitudes from {SMALLEST_FACTOR:g} to {LARGEST_FACTOR:g}"
        )
    return number


def sides(name: str, window: Any) -> Window:
    """(left, right) of a window: integers of 0 or more, None for no limit."""
    if window is None:
        return None, None
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise ArgumentTypeError(
            f"{name}: got {window!r}; allowed: (left, right), None on a side for no limit"
        )
    for side in window:
        if side is None:
            continue
        if isinstance(side, bool) or not isinstance(side, Integral):
            raise ArgumentTypeError(f"{name}: got {window!r}; allowed: integers or None")
        if side < 0:
            raise ArgumentError(f"{name}: got {window!r}; allowed: 0 or more, None for no limit")
    left, right = (None if side is None else int(side) for side in window)
    return left, right
