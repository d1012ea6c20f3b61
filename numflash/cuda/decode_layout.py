"""How a KV cache is laid out on a card, and its memory there.

Keys, values, block table and lengths stay on the card; the host keeps copies of the two small ones
and sends them only after it has changed them itself (a new page, `share`, `reset`).
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UnsupportedError
from ..interop.arguments import emulated_arch
from ..interop.arrays import to_float32
from ..numerics.code_pairs import from_pairs, to_pairs
from ..tiling import KEY_BLOCK, split_count
from .compile import ARCHITECTURES
from .device.resident import Card, Emulated
from .kernels.decode_append import BLOCK
from .kernels.decode_codes import KEY_PAIR, VALUE_PAIR
from .kernels.decode_float import decode_float
from .kernels.decode_int8 import decode_int8, resident_blocks
from .kernels.decode_pieces import LANE_KEYS

if TYPE_CHECKING:
    from ..cache.settings import Settings


F = np.float32
MIN_PAGE = LANE_KEYS
# keys up to which one block does a KV head: the threshold of the T4 architecture
SHORT_CONTEXT = 256
RESERVED = 1024  # bytes of shared memory that the system takes for each block, from sm_80 on
# slots of a ring that never turns, and of a sequence's page where it has but one
UNLIMITED = 1 << 30
HEAD_DIMS = (32, 64, 96, 128, 256)
WHOLE_DIMS = (64, 128, 256)  # of integers: whole swizzles, whole tiles of channels for each warp
SOURCES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
MAX_BATCH = 65535  # blocks along an axis of the grid


class Store:
    """A cache on the card.

    k, v : what a slot holds, see `Layout.allocate`;  scales : of integers
    table (B, pages of a sequence) int32, lengths (B,) int64 : on the host; `synchronise` sends
        them when they were changed there
    """

    def __init__(
        self, card: Any, k: np.ndarray, v: np.ndarray, scales: np.ndarray, batch: int, width: int
    ) -> None:
        self.card, self.k, self.v, self.scales = card, k, v, scales
        self.table, self.lengths = np.zeros((batch, width), np.int32), np.zeros(batch, np.int64)
        self.table_there, self.lengths_there = (
            card.zeros((batch, width), np.int32),
            card.zeros((batch,), np.int32),
        )
        self.tickets = card.zeros((batch,), np.int32)
        self.sent: list[np.ndarray] = [self.table.copy(), self.lengths.copy()]

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return sum(x.nbytes for x in (self.k, self.v, self.scales))

    def synchronise(self) -> None:
        """Bring the card's copies up to the host's, if the host has changed them."""
        pairs: tuple[tuple[np.ndarray, np.ndarray], ...] = (
            (self.table, self.table_there),
            (self.lengths, self.lengths_there),
        )
        for n, (here, there) in enumerate(pairs):
            if not np.array_equal(here, self.sent[n]):
                self.card.upload(there, here.astype(there.dtype, copy=False))
                self.sent[n] = here.copy()

    def growing(self) -> None:
        """An append kernel is about to raise the card's lengths.

        Unless `grown` follows, they are sent again.
        """
        self.sent[1] = np.full_like(self.lengths, -1)

    def grown(self, counts: np.ndarray) -> None:
        """The append kernel has raised the card's lengths."""
        self.lengths += counts
        self.sent[1] = self.lengths.copy()

    def rebound(self, table: np.ndarray, lengths: np.ndarray) -> Store:
        """The same memory under another table and other lengths."""
        if table.shape != self.table.shape:
            new = Store(self.card, self.k, self.v, self.scales, *table.shape)
        else:
            new = copy.copy(self)
            new.sent = list(self.sent)
        new.table, new.lengths = table, lengths
        return new


@dataclass(frozen=True)
class Layout:
    """Sizes of a cache: pages of `page_size` slots.

    Tokens below `sinks` keep their slots, the others share a ring of `ring`.
    """

    card: Any
    dtype: str
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    paged: bool
    window: int = UNLIMITED
    sinks: int = 0
    ring: int = UNLIMITED
    unified: float | None = None  # FlashDecoding++'s constant in place of the maximum, in octaves
    rotate: bool = False  # rows before they are rounded, see `kernels.decode_rotate`

    @property
    def exact(self) -> bool:
        """Whether products and sums are exact integers."""
        return self.dtype in ("int8", "int4")

    @property
    def packed(self) -> bool:
        """Whether a stored element is a pair of codes."""
        return self.dtype == "int4"

    @property
    def bits(self) -> type:
        """The type of a stored element in memory."""
        if self.packed:
            return np.uint8
        return np.int8 if self.exact else np.uint16

    @property
    def k_stored(self) -> int:
        """Elements of a stored key: whole pieces of 16 bytes."""
        unit = 16 // np.dtype(self.bits).itemsize
        channels = unit * 2 if self.packed else unit
        return -(-self.head_dim // channels) * unit

    @property
    def v_stored(self) -> int:
        """Elements of a stored value.

        INT8 values are stored channel by channel and need no padding.
        """
        if self.packed:
            return -(-self.value_dim // (2 * VALUE_PAIR)) * VALUE_PAIR
        return self.value_dim if self.exact else -(-self.value_dim // 8) * 8

    @property
    def shift(self) -> int:
        """log2 of the slots of a page."""
        return self.page_size.bit_length() - 1 if self.paged else UNLIMITED.bit_length() - 1

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token of one KV head, scales not counted."""
        return (self.k_stored + self.v_stored) * np.dtype(self.bits).itemsize

    @property
    def bytes_of(self) -> tuple[int, ...]:
        """Bytes of a page of K, of V and of scales over all heads, and of one head in it."""
        size = np.dtype(self.bits).itemsize
        heads = [
            self.page_size * self.k_stored * size,
            self.page_size * self.v_stored * size,
            self.page_size * 8,
        ]
        return tuple(n for head in heads for n in (self.kv_heads * head, head))

    def tile_rows(self, rows: int, changed: bool = False) -> int:
        """Query rows per block: integers take 4 or 8 where that is all, floats 16; 32 where the
        registers hold them.

        Of integers they do not with options: the compiler leaves a loop over so many rows as it is,
        and what a loop's counter indexes is no register.
        """
        if self.exact and rows <= 8:
            return 4 if rows <= 4 else 8
        registers = max(self.padded) <= 128 and self.unified is None
        return 32 if rows > 16 and registers and not (changed and self.exact) else 16

    @property
    def padded(self) -> tuple[int, int]:
        """The head sizes that the kernels are built for."""
        sizes = WHOLE_DIMS if self.exact else HEAD_DIMS
        return (
            next(n for n in sizes if n >= self.head_dim),
            next(n for n in sizes if n >= self.value_dim),
        )

    def call(self, longest: int, batch: int) -> tuple[int, int]:
        """(multiprocessors, key blocks of the longest sequence).

        What the number of splits depends on.
        """
        return self.card.multiprocessors, -(-min(longest, self.sinks + self.ring) // KEY_BLOCK)

    def residents(self, rows: int) -> int:
        """Blocks of the decode kernel that a multiprocessor holds at once.

        By shared memory and registers, not measured on a card. Integer kernels are compiled for so
        many blocks. Of floats 65536 registers are three blocks of 128 threads with up to 168 each,
        which those of one tile of rows take up to D = 128, else two. Options on scores, which the
        number of splits does not depend on, take more registers: then a block fewer is there.
        """
        tile = self.tile_rows(rows)
        if self.exact:
            most = resident_blocks(*self.padded, tile)
        else:
            most = 3 if tile == 16 and max(self.padded) <= 128 and self.unified is None else 2
        arch = self.card.arch
        each = RESERVED + shared_bytes(self, tile)
        return max(1, min(most, (ARCHITECTURES[arch][1] + RESERVED) // each))

    def serial_tokens(self, batch: int) -> int:
        """No sequence: the number of splits depends on every length."""
        return -1

    def splits(self, batch: int, rows: int, workers: int, blocks: int) -> int:
        """How many splits `blocks` key blocks go in, for `rows` query rows of each KV head."""
        if blocks * KEY_BLOCK <= SHORT_CONTEXT:
            return 1
        units = batch * self.kv_heads * -(-rows // self.tile_rows(rows))
        return split_count(units, blocks, workers * self.residents(rows))

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """New tokens as the append kernel takes them, contiguous.

        As they are, float64 and rows that are to be rotated as float32.
        """
        if self.rotate:
            return to_float32(x)
        return np.ascontiguousarray(x) if x.dtype.name in SOURCES else to_float32(x)

    def allocate(self, pages: int, batch: int, table_width: int) -> Store:
        """K (pages, Hkv, slots, D).

        V (pages, Hkv, slots, Dv), for integers (pages, Hkv, slots / n, Dv, n) with n = min(page,
        128). Of INT4 D and Dv count pairs, `kernels.decode_codes`.

        Scales (pages, Hkv, 2, slots) float32, of keys and of values.
        """
        heads = (pages, self.kv_heads)
        span = min(self.page_size, BLOCK)
        v = (
            (*heads, self.page_size // span, self.v_stored, span)
            if self.exact
            else (*heads, self.page_size, self.v_stored)
        )
        scales = (*heads, 2, self.page_size) if self.exact else (0,)
        zeros = self.card.zeros
        return Store(
            self.card,
            zeros((*heads, self.page_size, self.k_stored), self.bits),
            zeros(v, self.bits),
            zeros(scales, F),
            batch,
            table_width,
        )

    @property
    def indirect(self) -> bool:
        """Whether the kernels find a sequence by the table.

        Without pages, sequence b has page b.
        """
        return self.paged

    def resized(self, page_size: int) -> Layout:
        """The same layout with pages of another size."""
        return replace(self, page_size=page_size)

    def rebound(self, store: Store, table: np.ndarray, lengths: np.ndarray) -> Store:
        """A store with the same memory under another table and other lengths."""
        return store.rebound(table, lengths)

    def copy_pages(
        self, store: Store, pages: np.ndarray, to: Store, targets: np.ndarray, slots: int
    ) -> None:
        """Copy pages of one store to pages of another, or of the same.

        Of pages of another size what fits.
        """
        arrays = [(store.k, to.k), (store.v, to.v)]
        if self.exact:
            arrays.append((store.scales, to.scales))
        for source, target in zip(pages, targets, strict=True):
            for here, there in arrays:
                if here.shape[1:] == there.shape[1:]:
                    self.card.copy(there[target], here[source])
                else:
                    self._copy_heads(here[source], there[target])

    def _copy_heads(self, here: np.ndarray, there: np.ndarray) -> None:
        """Slot by slot from the first on; (Hkv, slots, ...), scales (Hkv, 2, slots)."""
        for head in range(self.kv_heads):
            rows = [(here[head], there[head])]
            if here.ndim == 3 and here.dtype == F:
                rows = [(here[head, n], there[head, n]) for n in (0, 1)]
            for x, y in rows:
                n = min(x.shape[0], y.shape[0])
                self.card.copy(y[:n], x[:n])

    def read(
        self, store: Store, pages: np.ndarray, slots: int, offset: np.ndarray, out: Any = None
    ) -> None:
        """No kernel takes tokens out of the cache: the host converts them."""

    def write(
        self,
        store: Store,
        pages: np.ndarray,
        key: np.ndarray,
        value: np.ndarray,
        scales: np.ndarray,
    ) -> None:
        """Store whole pages of elements.

        key (Hkv, slots, D), value (Hkv, slots, Dv), scales (1 or 2, Hkv, slots).
        """
        size = self.page_size
        span = min(self.page_size, BLOCK)
        if self.packed:
            key, value = to_pairs(key, KEY_PAIR), to_pairs(value, VALUE_PAIR)
        k = np.zeros((*key.shape[:2], self.k_stored), self.bits)
        v = np.zeros((*value.shape[:2], self.v_stored), self.bits)
        k[..., : key.shape[2]], v[..., : value.shape[2]] = key, value
        if not self.exact:
            k[np.isnan(scales[0])] = 0x7FC0 if self.dtype == "bfloat16" else 0x7E00
        for n, page in enumerate(pages):
            part = slice(n * size, (n + 1) * size)
            v_page = v[:, part]
            if self.exact:
                v_page = v_page.reshape(self.kv_heads, -1, span, self.v_stored).swapaxes(-1, -2)
                self.card.upload(
                    store.scales[page], np.ascontiguousarray(scales[:, :, part].swapaxes(0, 1))
                )
            self.card.upload(store.k[page], np.ascontiguousarray(k[:, part]))
            self.card.upload(store.v[page], np.ascontiguousarray(v_page))

    # ---- reading back
    def _pages(self, x: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """(Hkv, pages, ...) of a buffer on the host."""
        found = [self.card.download(x[page]) for page in pages]
        return np.stack(found, 1) if found else np.zeros((self.kv_heads, 0, *x.shape[2:]), x.dtype)

    def keys(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, D) stored elements of K of the pages, in slot order."""
        x = self._pages(store.k, pages).reshape(self.kv_heads, -1, self.k_stored)
        return from_pairs(x, self.head_dim, KEY_PAIR) if self.packed else x[..., : self.head_dim]

    def values(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, Dv) stored elements of V of the pages, in slot order."""
        x = self._pages(store.v, pages)
        if self.exact:
            x = x.swapaxes(-1, -2)
        x = x.reshape(self.kv_heads, -1, self.v_stored)
        return (
            from_pairs(x, self.value_dim, VALUE_PAIR) if self.packed else x[..., : self.value_dim]
        )

    def scales(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(1 or 2, Hkv, slots) float32: the scales of keys, and for integers of values.

        A float key that is NaN has the scale NaN.
        """
        if self.exact:
            return (
                self._pages(store.scales, pages).transpose(2, 0, 1, 3).reshape(2, self.kv_heads, -1)
            )
        nan = 0x7FC0 if self.dtype == "bfloat16" else 0x7E00
        return np.where(self.keys(store, pages)[None, ..., 0] == nan, F(np.nan), F(1))


def make_layout(settings: Settings) -> Layout:
    """The layout on the first card, or for "cuda-emulator" in the emulator."""
    emulator = emulated_arch(settings.device)
    card = Emulated(emulator) if emulator else Card()
    dtype = settings.dtype
    allowed = ["int8", "int4", "float16", *([] if card.arch == "sm_75" else ["bfloat16"])]
    if dtype not in allowed:
        raise UnsupportedError(
            f"dtype: got {dtype!r}; the CUDA kernels of {card.arch} decode over {', '.join(allowed)}"
        )
    for name, n in (("head_dim", settings.head_dim), ("value_dim", settings.value_dim)):
        if n > HEAD_DIMS[-1]:
            raise UnsupportedError(f"{name}: got {n}; the CUDA kernels take 1 to {HEAD_DIMS[-1]}")
    ring: dict[str, int] = {}
    if settings.window is not None and settings.ring is not None:
        ring = {"window": settings.window, "sinks": settings.sinks, "ring": settings.ring}
    layout = Layout(
        card,
        dtype,
        settings.kv_heads,
        settings.head_dim,
        settings.value_dim,
        settings.page_size,
        settings.paged,
        **ring,
        unified=settings.unified_max,
        rotate=settings.rotate,
    )
    needed, there = shared_bytes(layout, layout.tile_rows(MAX_BATCH)), ARCHITECTURES[card.arch][1]
    if needed > there:
        raise UnsupportedError(
            f"head_dim: got {settings.head_dim} and value_dim {settings.value_dim} with dtype {dtype!r}, "
            f"which need {needed} bytes of shared memory; {card.arch} has {there}; allowed: smaller ones, as 128"
        )
    return layout


def shared_bytes(layout: Layout, tile_rows: int) -> int:
    """Shared memory of the decode kernel for so many query rows of a block."""
    turing = layout.card.arch == "sm_75"
    if layout.exact:
        return decode_int8(
            *layout.padded, tile_rows, packed=layout.packed, turing=turing
        ).shared_bytes
    return decode_float(
        *layout.padded, tile_rows // 16, dtype=layout.dtype, turing=turing
    ).shared_bytes
