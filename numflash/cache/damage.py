"""What a state of a KV cache cannot hold unless its file is damaged or of somebody else's making.

Shapes and dtypes of the tokens are looked at where they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError, CacheFullError
from .settings import INTEGERS, Settings

STATE_VERSION = 1
# that a ring may have seen: a larger number is damage, and int64 would overflow soon
MOST_TOKENS = 1 << 62
EXPONENTS = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}


def checked_lengths(settings: Settings, batch: int, given: Any) -> np.ndarray:
    """The lengths of a state, unless something is wrong with what belongs to no single token.

    Raises
    ------
    ArgumentError, ArgumentTypeError, CacheFullError
    """
    if not isinstance(given, Mapping):
        raise ArgumentTypeError(
            f"state: got {type(given).__name__}; allowed: a mapping, as KVCache.state() returns it"
        )
    missing = [name for name in ("version", "lengths", "offset", "oldest") if name not in given]
    if missing:
        raise ArgumentError(f"state: got no {missing[0]!r}; allowed: what KVCache.state() returns")
    version = np.asarray(given["version"])
    if version.shape != () or version.dtype.kind not in "iu":
        raise ArgumentError(f"state: got version {given['version']!r}; allowed: one integer")
    if int(version) != STATE_VERSION:
        raise ArgumentError(f"state: got version {version}; allowed: {STATE_VERSION}")
    _check_rotation(settings, given)
    _check_ring(settings, given)
    _check_values(settings, given)
    lengths, oldest, offset = (np.asarray(given[x]) for x in ("lengths", "oldest", "offset"))
    _check_lengths(batch, lengths)
    if oldest.shape != (batch,) or oldest.dtype != np.int64:
        raise ArgumentError(
            f"state: got {oldest.dtype} of shape {oldest.shape} for 'oldest'; allowed: int64 of "
            f"shape ({batch},)"
        )
    if ((oldest < 0) | (oldest > lengths)).any():
        raise ArgumentError(f"state: got {oldest.tolist()} for 'oldest'; allowed: 0 to the lengths")
    _check_means(settings, batch, offset)
    if settings.window is None and lengths.max(initial=0) > settings.max_length:
        raise CacheFullError(
            f"state: got {lengths.max()} tokens; allowed: {settings.max_length} in all"
        )
    return lengths


def _check_means(settings: Settings, batch: int, offset: np.ndarray) -> None:
    """Raise unless these are the means of K's channels."""
    shape = batch, settings.kv_heads, settings.head_dim
    if offset.shape != shape or offset.dtype != np.float32:
        raise ArgumentError(
            f"state: got channel means of shape {offset.shape} and dtype {offset.dtype}; allowed: float32 of "
            f"{shape}"
        )
    if not np.isfinite(offset).all():
        raise ArgumentError("state: got channel means that are not finite; allowed: finite numbers")
    if offset.any() and not settings.smooth:
        raise ArgumentError("state: got channel means; allowed: of a cache with smooth only")


def _check_lengths(batch: int, lengths: np.ndarray) -> None:
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


def _check_rotation(settings: Settings, given: Any) -> None:
    """Raise unless the rows of a state are rotated where those of the cache are.

    Earlier states do not say it: only 4 bits were rotated then.
    """
    rotated = np.asarray(given.get("rotate", settings.dtype == "int4"))
    if rotated.shape != () or rotated.dtype != np.bool_ or rotated != settings.rotate:
        raise ArgumentError(
            f"state: got rotate={rotated}; allowed: rotate={settings.rotate}, as this cache has it"
        )


def _check_ring(settings: Settings, given: Any) -> None:
    """Raise unless a state's tokens lie in the slots where the cache looks for them.

    Earlier states do not say which window and sinks they are of.
    """
    for name, own in (("window", settings.window or 0), ("sinks", settings.sinks)):
        found = np.asarray(given.get(name, own))
        if found.shape != () or found.dtype.kind not in "iu" or found != own:
            raise ArgumentError(
                f"state: got {name}={found}; allowed: {name}={own}, as this cache has it (0: none)"
            )


def _check_values(settings: Settings, given: Any) -> None:
    """Raise unless a state's values are where those of the cache are: beside the keys, or in them.

    Earlier states do not say it: those with values of their own are of no cache that has them in keys.
    """
    beside = any(str(name).startswith("value") and str(name)[5:].isdecimal() for name in given)
    shared = np.asarray(given.get("value_in_key", settings.value_in_key and not beside))
    width = np.asarray(given.get("value_dim", settings.value_dim))
    for name, found, own in (
        ("value_in_key", shared, settings.value_in_key),
        ("value_dim", width, settings.value_dim),
    ):
        if found.shape != () or found.dtype.kind not in "biu" or found != own:
            raise ArgumentError(
                f"state: got {name}={found}; allowed: {name}={own}, as this cache has it"
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
