"""What a device must offer to hold a KV cache.

The types that `cpu.launch_decode` and `cuda.launch_decode` have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np


class Store(Protocol):
    """The memory of a cache on its device, with its block table and lengths on the host.

    table : (B, pages of a sequence) int32, the page of each `page_size` slots
    lengths : (B,) int64, tokens of each sequence
    """

    @property
    def table(self) -> np.ndarray:
        """Block table."""
        ...

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        ...


class Layout(Protocol):
    """How tokens are stored: sizes of a cache, and access to its elements in slot order."""

    @property
    def kv_heads(self) -> int:
        """Heads of K and V."""
        ...

    @property
    def head_dim(self) -> int:
        """Channels of K."""
        ...

    @property
    def value_dim(self) -> int:
        """Channels of V."""
        ...

    @property
    def page_size(self) -> int:
        """Slots of a page."""
        ...

    @property
    def window(self) -> int:
        """Tokens that a row attends to; unlimited where there is no ring."""
        ...

    @property
    def sinks(self) -> int:
        """First tokens that keep their slots."""
        ...

    @property
    def ring(self) -> int:
        """Slots of the ring; unlimited where there is none."""
        ...

    def call(self, longest: int, batch: int) -> tuple[int, int]:
        """(workers, key blocks of the longest sequence): what the number of splits depends on."""
        ...

    def serial_tokens(self, batch: int) -> int:
        """The longest sequence whose plan does not depend on its length; -1 for none."""
        ...

    def splits(self, batch: int, rows: int, workers: int, blocks: int) -> int:
        """How many splits `blocks` key blocks go in, for `rows` query rows of each KV head."""
        ...

    def allocate(self, pages: int, batch: int, table_width: int) -> Any:
        """A Store of zeros."""
        ...

    def rebound(self, store: Any, table: np.ndarray, lengths: np.ndarray) -> Any:
        """A Store with the same memory and another table and other lengths."""
        ...

    @property
    def indirect(self) -> bool:
        """Whether kernels find a sequence by the table even where the cache is not paged."""
        ...

    def resized(self, page_size: int) -> Any:
        """The same layout with pages of another size."""
        ...

    def copy_pages(self, store: Any, pages: Any, to: Any, targets: Any, slots: int) -> None:
        """Copy the first `slots` slots of pages of one Store to pages of another, or of the same."""
        ...

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """New tokens as the append kernels take them."""
        ...

    def keys(self, store: Any, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, D) stored elements of K of the pages, in slot order."""
        ...

    def values(self, store: Any, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, Dv) stored elements of V of the pages, in slot order."""
        ...

    def scales(self, store: Any, pages: np.ndarray) -> np.ndarray:
        """(1 or 2, Hkv, slots) float32: the scales of keys, and for INT8 of values."""
        ...

    def read(
        self,
        store: Any,
        pages: np.ndarray,
        slots: int,
        offset: np.ndarray,
        out: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(Hkv, slots, D) and (Hkv, slots, Dv) float32, NaN where a token was not finite.

        Written to the first slots of `out` where that is given. None where no kernel does it.
        """
        ...

    def write(
        self, store: Any, pages: np.ndarray, key: np.ndarray, value: np.ndarray, scales: np.ndarray
    ) -> None:
        """The inverse of `keys`, `values` and `scales`: store whole pages' worth of elements."""
        ...


class DecodePlan(Protocol):
    """A prepared decode call. `m` and `l` (B, Hkv, rows) hold the softmax state of the last one."""

    m: np.ndarray
    l: np.ndarray

    @property
    def again(self) -> bool:
        """Whether the last call left rows to do again."""
        ...

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(B, Hkv, rows, D) of the query."""
        ...

    @property
    def queries(self) -> int:
        """New tokens; rows are (query head of the group, new token)."""
        ...

    def __call__(self, query: np.ndarray, c: np.float32, store: Any, out: np.ndarray) -> None:
        """Attention of rows of this shape, scores times c.

        Writes out (B, Hkv, rows, Dv), m and l.
        """
        ...

    def change(self, changes: Any, shift: np.ndarray | None) -> None:
        """Set the options of the next call of a plan made for them, `decode_options.Changes`."""
        ...

    def to_redo(self) -> np.ndarray:
        """(n, 3) the sequence, KV head and row of what the last call could not do in float32."""
        ...


class Append(Protocol):
    """A prepared append.

    Writes tokens behind the lengths of a Store and raises these in one step.
    """

    def __call__(self, key: np.ndarray, value: np.ndarray, counts: np.ndarray, store: Any) -> None:
        """Append the first `counts` (B,) of the tokens (B, Hkv, n, D) and (B, Hkv, n, Dv)."""
        ...


class Backend(Protocol):
    """A module `launch_decode`."""

    MIN_PAGE: int
    MAX_BATCH: int
    make_layout: Callable[..., Any]
    Append: Callable[..., Any]
    DecodePlan: Callable[..., Any]
