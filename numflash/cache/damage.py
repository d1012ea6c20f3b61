"""What a state of a KV cache cannot hold unless its file is damaged or of somebody else's making.

Shapes and dtypes of the tokens are looked at where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from .settings import INTEGERS, Settings

MOST_TOKENS = 1 << 62  # that a ring may have seen: more is damage, and would overflow soon
EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


def check_common(settings: Settings, batch: int, given: Any) -> None:
    """Raise unless what belongs to no single token is what `state` makes."""
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"state: got {type(given).__name__}; allowed: a mapping, as KVCache.state() returns it"
        )
    version, oldest = (np.asarray(given.get(name)) for name in ("version", "oldest"))
    if "version" in given and (version.shape != () or version.dtype.kind not in "iu"):
        raise ArgumentError(f"state: got version {given['version']!r}; allowed: one integer")
    if "lengths" in given:
        check_lengths(batch, np.asarray(given["lengths"]))
    if "oldest" in given:
        if oldest.shape != (batch,) or oldest.dtype != np.int64:
            raise ArgumentError(
                f"state: got {oldest.dtype} of shape {oldest.shape} for 'oldest'; allowed: int64 of "
                f"shape ({batch},)"
            )
        if "lengths" in given and ((oldest < 0) | (oldest > np.asarray(given["lengths"]))).any():
            raise ArgumentError(
                f"state: got {oldest.tolist()} for 'oldest'; allowed: 0 to the lengths"
            )
    offset = np.asarray(given.get("offset", 0))
    if offset.dtype == np.float32 and not np.isfinite(offset).all():
        raise ArgumentError("state: got channel means that are not finite; allowed: finite numbers")
    if offset.dtype == np.float32 and offset.any() and not settings.smooth:
        raise ArgumentError("state: got channel means; allowed: of a cache with smooth only")


def check_lengths(batch: int, lengths: np.ndarray) -> None:
    """Raise unless the lengths of a state are those of as many sequences as the cache has."""
    if lengths.ndim == 1 and lengths.dtype == np.int64 and lengths.size != batch:
        raise ArgumentError(
            f"state: got a batch of {lengths.size}; allowed: {batch}, the cache's batch"
        )
    if lengths.shape != (batch,) or lengths.dtype != np.int64:
        raise ArgumentError(
            f"state: got {lengths.dtype} of shape {lengths.shape} for 'lengths'; allowed: int64 of shape "
            f"({batch},), the cache's batch"
        )
    if ((lengths < 0) | (lengths > MOST_TOKENS)).any():
        raise ArgumentError(f"state: got lengths {lengths}; allowed: 0 to {MOST_TOKENS}")


def check_rotation(settings: Settings, given: Any) -> None:
    """Raise unless the rows of a state are rotated where those of the cache are.

    Earlier states do not say it: only 4 bits were rotated then.
    """
    rotated = np.asarray(given.get("rotate", settings.dtype == "int4"))
    if rotated.shape != () or rotated.dtype != np.bool_ or rotated != settings.rotate:
        raise ArgumentError(
            f"state: got rotate={rotated}; allowed: rotate={settings.rotate}, as this cache has it"
        )


def check_numbers(
    settings: Settings, b: int, key: np.ndarray, value: np.ndarray, scale: np.ndarray
) -> None:
    """Raise unless the numbers of sequence b are finite, but for tokens that are marked by NaN."""
    bad = np.isnan(scale[0])
    rest = np.where(bad, 0, scale)
    if not (np.isfinite(rest).all() and (rest >= 0).all()):
        raise ArgumentError(
            f"state: got negative or infinite numbers, or NaN for values, in 'scale{b}'; allowed: finite, "
            "0 or more, NaN for keys of tokens that were not finite"
        )
    if settings.dtype in INTEGERS:
        return
    limit = EXPONENTS[settings.dtype]
    for name, x in (("key", key), ("value", value)):
        if (((x & limit) == limit).any(-1) & ~bad).any():
            raise ArgumentError(
                f"state: got NaN or infinity in '{name}{b}'; allowed: only in tokens whose 'scale{b}' is NaN"
            )
