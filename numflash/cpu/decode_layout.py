"""How a KV cache is laid out in memory: pages of blocks of the decode kernels' tiles.

Also which kernels a call may take, and how many splits of the keys.
"""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ..interop.arrays import convert, to_float32, writable
from ..jit import guard, target
from ..jit.memory import LINE
from ..jit.threads import one_at_a_time, refuse_after_fork, threads_for
from ..numerics import code_pairs
from ..tiling import KEY_BLOCK, split_count
from ..validation import NO_LIMIT
from .decode.task_data import SHARED_ROWS, Store
from .decode.tiles import ROWS, Tile, tile
from .decode.unpack import make_unpack
from .floats.amx_bfloat16 import PAIRS
from .isa.isas import padded

if TYPE_CHECKING:
    from ..cache.settings import Settings

F = np.float32
MIN_PAGE = KEY_BLOCK
# elements of tokens up to which starting threads costs more than it saves
PARALLEL_CHANNELS = 1 << 19
# cached bytes, each code of INT4 counted as one, up to which starting threads costs more than it saves
SERIAL_BYTES = 512 << 10
SLOW_START = 40  # times as many where threads start slowly: 20 MB, some 0.9 ms
MATRIX_ROWS = 3  # query rows from which AMX is faster than vectors
AMX_BFLOAT16 = "amx_bf16", target.BFLOAT16_ISAS
MATRIX_CHANNELS = 64  # of K in a matrix tile


def zeros(
    shape: tuple[int, ...], dtype: type, align: int = LINE, offset: int = 0, fill: bool = False
) -> np.ndarray:
    """np.zeros, `offset` bytes behind a multiple of `align`.

    By default at the start of a cache line.

    A vector that straddles two lines costs two reads. `fill`: nothing needs the zeros, so `guard`
    may put other values there before a call.
    """
    count = math.prod(shape) * np.dtype(dtype).itemsize
    if count > sys.maxsize - align:
        raise MemoryError(
            f"Unable to allocate {count / 2**60:.3g} EiB for an array with shape {shape}"
        )
    if guard.ON:
        return guard.array(guard.caller(), shape, dtype, count, fill)
    raw = np.zeros(count + align, np.uint8)
    start = (offset - raw.ctypes.data) % align
    return raw[start : start + count].view(dtype).reshape(shape)


@dataclass(frozen=True)
class Layout:
    """Sizes of a cache: pages of `page_size` slots.

    Tokens below `sinks` keep their slots, the others share a ring of `ring`. `matrix`: products may
    take AMX's tiles.
    """

    tile: Tile
    kv_heads: int
    head_dim: int
    value_dim: int
    page_size: int
    window: int = NO_LIMIT
    sinks: int = 0
    ring: int = NO_LIMIT
    matrix: bool = False

    def takes_matrix(self, rows: int) -> bool:
        """Whether tiles of `rows` query rows are multiplied on AMX: same bits, other speed."""
        if self.tile.pairs:
            return self.matrix
        whole = self.channels % MATRIX_CHANNELS == 0
        return self.matrix and self.tile.exact and whole and rows >= MATRIX_ROWS

    @property
    def channels(self) -> int:
        """Channels of K as stored: a multiple of the dot product's group, of INT4 of two."""
        if self.tile.shared:  # whole vectors of values; pairs in whole matrix tiles
            most = max(self.head_dim, self.sum_columns)
            return padded(most, PAIRS if self.tile.pairs and self.matrix else self.tile.group)
        return padded(self.head_dim, self.tile.unit)

    @property
    def columns(self) -> int:
        """Channels of V as stored: a multiple of the vector's lanes, none where it is in K."""
        return 0 if self.tile.shared else self.sum_columns

    @property
    def sum_columns(self) -> int:
        """Columns of P.V: a multiple of the vector's lanes."""
        return padded(self.value_dim, self.tile.lanes)

    @property
    def block(self) -> int:
        """Elements of a stored block of KEY_BLOCK tokens of one head, K and V."""
        return self.tile.block(self.channels, self.columns)

    @property
    def bits(self) -> type:
        """The type of a stored element in memory."""
        return self.tile.bits

    @functools.cached_property
    def slot_bytes(self) -> int:
        """Bytes of a token of one KV head, scales not counted."""
        return (self.channels + self.columns) * self.tile.size // self.tile.packed

    @functools.cached_property
    def limits(self) -> tuple[int, int]:
        """Tokens up to which one thread serves all sequences, and slots of a sequence."""
        units = self.slot_bytes * self.tile.packed  # a code of 4 bits is as much work as one of 8
        return SERIAL_BYTES // (self.kv_heads * units), self.sinks + self.ring

    def call(self, longest: int, batch: int) -> tuple[int, int]:
        """(threads, key blocks of the longest sequence): what the number of splits depends on."""
        serial_tokens, slots = self.limits
        held = longest if longest < slots else slots
        threads = threads_for(longest * batch, serial_tokens, SLOW_START)
        if threads > 1:
            refuse_after_fork()  # before a step appends its tokens
        return threads, -(-held // KEY_BLOCK)

    def serial_tokens(self, batch: int) -> int:
        """The longest sequence that one thread serves, in one split whatever its length."""
        return self.limits[0] // max(1, batch)

    def splits(self, batch: int, rows: int, workers: int, blocks: int) -> int:
        """How many splits `blocks` key blocks go in, for `rows` query rows of each KV head."""
        together = SHARED_ROWS if self.tile.shared else ROWS
        units = batch * self.kv_heads * -(-rows // together)
        return split_count(units, blocks, workers) if blocks else 1

    def copy_pages(
        self, store: Store, pages: np.ndarray, to: Store, targets: np.ndarray, slots: int
    ) -> None:
        """Copy the first `slots` slots of pages of one store to pages of another, or of the same."""
        used = -(-slots // KEY_BLOCK) * self.block
        for page, target_page in zip(pages, targets, strict=True):
            to.data[target_page, :, :used] = store.data[page, :, :used]

    @property
    def indirect(self) -> bool:
        """Whether the kernels find a sequence by the table, with pages or without."""
        return True

    def resized(self, page_size: int) -> Layout:
        """The same layout with pages of another size."""
        return replace(self, page_size=page_size)

    def rebound(self, store: Store, table: np.ndarray, lengths: np.ndarray) -> Store:
        """A store with the same memory under another table and other lengths."""
        return Store(store.data, table, lengths)

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """New tokens as the append kernels take them, contiguous.

        They are float32, or the bits of 16-bit storage.
        """
        floats = not self.tile.exact
        if self.tile.shared and floats and x.shape[-1] < self.channels:
            x = np.pad(x, (*((0, 0),) * (x.ndim - 1), (0, self.channels - x.shape[-1])))
        if self.tile.exact or self.tile.dtype == "float32":
            return to_float32(x)
        return writable(np.ascontiguousarray(convert(x, self.tile.dtype))).view(self.bits)

    def allocate(self, pages: int, batch: int, table_width: int) -> Store:
        """Zeroed memory for `pages` pages and a table of `table_width` pages per sequence."""
        return Store(
            zeros((pages, self.kv_heads, self.page_size // KEY_BLOCK * self.block), self.bits),
            zeros((batch, table_width), np.int32),
            zeros((batch,), np.int64),
        )

    def blocks(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, blocks, elements of a block) of the pages, in slot order."""
        count = self.page_size // KEY_BLOCK
        x = store.data[pages].reshape(len(pages), self.kv_heads, count, self.block)
        return x.transpose(1, 0, 2, 3).reshape(self.kv_heads, len(pages) * count, self.block)

    def scales(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(1 or 2, Hkv, slots) float32: the scales of keys, and for integers of values."""
        x = np.ascontiguousarray(self.blocks(store, pages)[..., : self.tile.scales]).view(F)
        kinds = 2 if self.tile.exact else 1
        x = x.reshape(self.kv_heads, x.shape[1], kinds, KEY_BLOCK).transpose(2, 0, 1, 3)
        return x.reshape(kinds, self.kv_heads, x.shape[2] * KEY_BLOCK)

    def keys(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, D) stored elements of K of the pages, in slot order."""
        t = self.tile
        x = self.blocks(store, pages)[..., t.scales : t.scales + self.key_elements]
        if t.packed == 2:
            x = code_pairs.split(x.view(np.uint8), t.panel * t.group).view(np.int8)
        panels = x.shape[1] * KEY_BLOCK // t.panel
        x = x.reshape(self.kv_heads, panels, self.channels // t.group, t.panel, t.group)
        x = x.swapaxes(2, 3).reshape(self.kv_heads, panels * t.panel, self.channels)
        return self._numbers(x[..., : self.head_dim], t.q_offset)

    def values(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, Dv) stored elements of V of the pages, in slot order."""
        t = self.tile
        if t.shared:
            return self.keys(store, pages)[..., : self.value_dim]
        blocks = self.blocks(store, pages)[..., self.key_elements + self.tile.scales :]
        chunks = []
        for c in range(0, self.columns, t.panel):
            width = min(t.panel, self.columns - c)
            span = KEY_BLOCK // t.packed
            x = blocks[..., c * span : (c + width) * span]
            if t.packed == 2:
                x = code_pairs.split(x.view(np.uint8), width * t.group).view(np.int8)
            x = x.reshape(*blocks.shape[:2], KEY_BLOCK // t.group, width, t.group)
            slots = blocks.shape[1] * KEY_BLOCK
            chunks.append(x.transpose(0, 1, 2, 4, 3).reshape(self.kv_heads, slots, width))
        return self._numbers(np.concatenate(chunks, 2)[..., : self.value_dim], t.v_offset)

    @property
    def key_elements(self) -> int:
        """Elements of the keys of a block."""
        return KEY_BLOCK * self.channels // self.tile.packed

    def _numbers(self, x: np.ndarray, offset: int) -> np.ndarray:
        """Stored integers, or codes, as the numbers they stand for; floats as they are."""
        if not self.tile.exact:
            return x
        return (x.view(np.uint8) * np.uint8(self.tile.packed) - np.uint8(offset)).view(np.int8)

    def read(
        self,
        store: Store,
        pages: np.ndarray,
        slots: int,
        offset: np.ndarray,
        out: tuple[np.ndarray, np.ndarray] | None = None,
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """(Hkv, slots, D) and (Hkv, slots, Dv) float32 of the pages, compiled.

        None for float16, which has no scalar code.

        offset : (Hkv, D) float32, what was subtracted from the keys
        out : contiguous float32 arrays of `slots` or more slots, to be written and returned
        """
        if self.tile.dtype == "float16":
            return None
        key, value = out or (
            np.empty((self.kv_heads, slots, d), F) for d in (self.head_dim, self.value_dim)
        )
        sizes = np.array([self.page_size, self.columns, slots, self.channels])
        parallel = threads_for(key.size + value.size, PARALLEL_CHANNELS) > 1
        unpack = make_unpack(self.tile, parallel)
        if not parallel:
            unpack(store.data, pages, sizes, offset, key, value)
        else:
            refuse_after_fork()
            with one_at_a_time():
                unpack(store.data, pages, sizes, offset, key, value)
        return key, value

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
        t = self.tile
        heads = self.kv_heads
        blocks = key.shape[1] // KEY_BLOCK
        x = np.zeros((heads, blocks, self.block), self.bits)
        factors = scales.reshape(-1, heads, blocks, KEY_BLOCK).transpose(1, 2, 0, 3)
        x[..., : t.scales] = (
            np.ascontiguousarray(factors).reshape(heads, blocks, -1).view(self.bits)
        )
        k: np.ndarray = np.zeros((heads, key.shape[1], self.channels), self.bits)
        k[..., : self.head_dim] = key
        v: np.ndarray = np.zeros((heads, key.shape[1], self.columns), self.bits)
        value = value[..., :0] if t.shared else value
        v[..., : self.value_dim] = value
        if t.exact:
            k = _stored(k, t.q_offset, t.packed)
            v[..., : self.value_dim] = _stored(v[..., : self.value_dim], t.v_offset, t.packed)
        k = k.reshape(heads, -1, t.panel, self.channels // t.group, t.group).swapaxes(2, 3)
        k = k.reshape(heads, blocks, -1)
        if t.packed == 2:
            k = code_pairs.join(k.view(np.uint8), t.panel * t.group).view(np.int8)
        x[..., t.scales : t.scales + self.key_elements] = k
        values = x[..., t.scales + self.key_elements :]
        for c in range(0, self.columns, t.panel):
            width = min(t.panel, self.columns - c)
            chunk = v[..., c : c + width].reshape(heads, blocks, -1, t.group, width)
            chunk = chunk.transpose(0, 1, 2, 4, 3).reshape(heads, blocks, -1)
            if t.packed == 2:
                chunk = code_pairs.join(chunk.view(np.uint8), width * t.group).view(np.int8)
            span = KEY_BLOCK // t.packed
            values[..., c * span : (c + width) * span] = chunk
        store.data[pages] = (
            x.reshape(heads, len(pages), -1).transpose(1, 0, 2).reshape(len(pages), heads, -1)
        )


def _stored(x: np.ndarray, offset: int, packed: int) -> np.ndarray:
    """Numbers int8 as they are stored, with their offset, or their codes."""
    return ((x.view(np.uint8) + np.uint8(offset)) // np.uint8(packed)).view(np.int8)


def make_layout(settings: Settings) -> Layout:
    """The layout for the best instruction set of the target, or for the one of the settings."""
    ring: dict[str, int] = {}
    if settings.window is not None and settings.ring is not None:
        ring = {"window": settings.window, "sinks": settings.sinks, "ring": settings.ring}
    isa = target.require(settings.isa)
    found = tile(isa, settings.dtype, settings.value_in_key)
    pairs = found.pairs
    if settings.rotate:
        found = replace(found, rotation=settings.rotation)
    return Layout(
        found,
        settings.kv_heads,
        settings.head_dim,
        settings.value_dim,
        settings.page_size,
        **ring,
        matrix=isa == "amx_int8" and not (pairs and target.missing(*AMX_BFLOAT16)),
    )
