"""The arguments of `KVCache(...)`, checked once and passed whole."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from ..errors import ArgumentError, UnsupportedError
from ..interop.arguments import choice, flag, real
from ..numerics.rotation import WHOLE, shared_block
from ..tiling import KEY_BLOCK, MAX_HEAD_DIM
from .arguments import integer
from .exact import LOG2E
from .protocols import Backend

DEVICES = ("cpu", "cuda", "cuda-emulator")
DTYPES = ("int8", "int4", "float32", "bfloat16", "float16")
INTEGERS = ("int8", "int4")  # stored with a scale for every token
SHARED_DTYPES = ("int8", "float32", "bfloat16")  # of a cache whose values are in its keys
MAX_LENGTH = 1 << 31
LARGEST_PAGE = 1 << 20
MAX_WINDOW = 1 << 29
MAX_SINKS = 1 << 20
SLACK = KEY_BLOCK // 2  # slots of a ring beyond its window, for several new tokens at once


def whole_blocks(slots: int) -> int:
    """Slots rounded up to whole key blocks."""
    return -(-slots // KEY_BLOCK) * KEY_BLOCK


@dataclass(frozen=True)
class Settings:
    """What a cache is made of; see `KVCache` for the meaning.

    page_size : slots of a page, of all the memory of a sequence where the cache is not `paged`
    pages : of the pool; None for as many as every sequence can need
    unified_max : in octaves
    rotate : whether rows are rotated, always for INT4
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    max_length: int
    dtype: str
    device: str
    page_size: int
    pages: int | None
    window: int | None
    sinks: int
    smooth: bool
    isa: str | None
    unified_max: float | None
    paged: bool = False
    value_in_key: bool = False
    rotate: bool = False

    @property
    def rotation(self) -> int:
        """Most channels of the Hadamard matrices that rows are rotated by, 0 for none."""
        if not self.rotate:
            return 0
        return shared_block(self.head_dim, self.value_dim) if self.value_in_key else WHOLE

    @property
    def slots(self) -> int:
        """Slots of a sequence."""
        if self.window is not None:
            return whole_blocks(self.sinks + self.window + SLACK)
        return whole_blocks(self.max_length)

    @property
    def ring(self) -> int | None:
        """Slots of the ring behind the sinks, None where there is no window."""
        return None if self.window is None else self.slots - self.sinks

    @property
    def width(self) -> int:
        """Pages of a sequence."""
        return -(-self.slots // self.page_size)

    def pool(self, batch: int) -> int:
        """Pages of the pool."""
        return batch * self.width if self.pages is None else self.pages


def check_settings(given: Settings, backend: Backend) -> Settings:
    """The settings of a cache from its arguments as they came.

    One clear exception for what is not allowed.

    Raises
    ------
    ArgumentError, ArgumentTypeError, UnsupportedError
    """
    choice("dtype", given.dtype, DTYPES)
    head_dim = integer("head_dim", given.head_dim, 1, MAX_HEAD_DIM)
    value_dim = given.value_dim
    value_dim = head_dim if value_dim is None else integer("value_dim", value_dim, 1, MAX_HEAD_DIM)
    for name in ("smooth", "rotate"):
        if flag(name, getattr(given, name)) and given.dtype not in INTEGERS:
            raise ArgumentError(
                f"{name}: got True with dtype {given.dtype!r}; allowed: only with dtype 'int8' or 'int4'"
            )
    if flag("value_in_key", given.value_in_key):
        _check_shared(given, head_dim, value_dim)
    if given.isa is not None and given.device != "cpu":
        raise ArgumentError(f"isa: got {given.isa!r} with device {given.device!r}; allowed: None")
    settings = replace(
        given,
        kv_heads=integer("kv_heads", given.kv_heads, 1, 65535),
        head_dim=head_dim,
        value_dim=value_dim,
        max_length=integer("max_length", given.max_length, 1, MAX_LENGTH),
        paged=given.page_size is not None,
        smooth=bool(given.smooth),
        rotate=bool(given.rotate) or given.dtype == "int4",
        unified_max=_unified(given),
        **_window(given),
    )
    return replace(settings, **_paging(settings, backend))


def _check_shared(given: Settings, head_dim: int, value_dim: int) -> None:
    """What a cache allows whose values are the first channels of its keys."""
    if value_dim > head_dim:
        raise ArgumentError(
            f"value_dim: got {value_dim} with value_in_key; allowed: 1 to head_dim, {head_dim}"
        )
    if given.device != "cpu":
        raise UnsupportedError(
            f"value_in_key: got True with device {given.device!r}; allowed: with device 'cpu'"
        )
    if given.dtype not in SHARED_DTYPES:
        raise UnsupportedError(
            f"value_in_key: got True with dtype {given.dtype!r}; allowed: with "
            f"{', '.join(map(repr, SHARED_DTYPES))}"
        )
    if given.smooth:
        raise ArgumentError("smooth: got True with value_in_key; allowed: False")


def _window(given: Settings) -> dict[str, Any]:
    sinks = integer("sinks", given.sinks, 0, MAX_SINKS)
    if given.window is None:
        if sinks:
            raise ArgumentError(f"sinks: got {sinks} without a window; allowed: 0")
        return {"sinks": 0}
    if given.page_size is not None:
        raise ArgumentError("window: got a window and page_size; allowed: one of the two")
    return {"sinks": sinks, "window": integer("window", given.window, 1, MAX_WINDOW)}


def _paging(given: Settings, backend: Backend) -> dict[str, Any]:
    if not given.paged:
        if given.pages is not None:
            raise ArgumentError("pages: got a number without page_size; allowed: None")
        return {"page_size": given.slots}
    smallest = backend.MIN_PAGE
    page_size = integer("page_size", given.page_size, -sys.maxsize, sys.maxsize)
    if page_size & (page_size - 1) or not smallest <= page_size <= LARGEST_PAGE:
        raise ArgumentError(
            f"page_size: got {page_size}; allowed: a power of two, {smallest} to {LARGEST_PAGE}"
        )
    pages = given.pages
    return {
        "page_size": page_size,
        "pages": None if pages is None else integer("pages", pages, 1, 1 << 30),
    }


def _unified(given: Settings) -> float | None:
    """The unified maximum in octaves."""
    if given.unified_max is None:
        return None
    if given.device == "cpu" or given.dtype not in ("float16", "bfloat16"):
        raise UnsupportedError(
            f"unified_max: got {given.unified_max!r} with device {given.device!r} and dtype "
            f"{given.dtype!r}; allowed: on CUDA with float16 or bfloat16"
        )
    return real("unified_max", given.unified_max) * LOG2E
