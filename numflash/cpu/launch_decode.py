"""From a KV cache to decode kernels.

How the cache is laid out, how many splits, which kernel, and its buffers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..fixedpoint import LOG2E_Q8
from ..interop import convert, to_float32, writable
from ..jit import guard, target
from ..jit.memory import LINE
from ..jit.threads import count, one_at_a_time, refuse_after_fork
from ..tiling import KEY_BLOCK, split_count
from .decode.append import make_append_float, make_append_int8
from .decode.changes import ChangedScratch
from .decode.flash_decode import AGAIN, Scratch, Store, make_decode
from .decode.matrix_tiles import SCRATCH_ROWS
from .decode.tiles import ROWS, Tile, tile
from .decode.unpack import make_unpack
from .isa.isas import padded

if TYPE_CHECKING:
    from ..cache.decode_options import Changes
    from ..cache.settings import Settings

F = np.float32
MIN_PAGE = KEY_BLOCK
MAX_BATCH = 1 << 20
PARALLEL_CHANNELS = (
    1 << 19
)  # appended elements below which starting threads costs more than it saves
SERIAL_BYTES = 512 << 10  # cached bytes below which starting threads costs more than it saves
UNLIMITED = 1 << 40
NOTHING_TO_REDO = np.zeros((0, 3), np.intp)
MATRIX_ROWS = 3  # query rows from which AMX is faster than vectors
MATRIX_CHANNELS = 64  # of K in a matrix tile
PAGE = 4096  # bytes that hardware prefetches within


def zeros(
    shape: tuple[int, ...], dtype: type, align: int = LINE, offset: int = 0, fill: bool = False
) -> np.ndarray:
    """np.zeros, `offset` bytes behind a multiple of `align`.

    By default at the start of a cache line.

    A vector that straddles two lines costs two reads. `fill`: nothing needs the zeros, so `guard`
    may put other values there before a call.
    """
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
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
    window: int = UNLIMITED
    sinks: int = 0
    ring: int = UNLIMITED
    matrix: bool = False

    def takes_matrix(self, rows: int) -> bool:
        """Whether tiles of `rows` query rows are multiplied on AMX: same bits, other speed."""
        whole = self.channels % MATRIX_CHANNELS == 0
        return self.matrix and self.tile.dtype == "int8" and whole and rows >= MATRIX_ROWS

    @property
    def channels(self) -> int:
        """Channels of K as stored: a multiple of the dot product's group."""
        return padded(self.head_dim, self.tile.group)

    @property
    def columns(self) -> int:
        """Channels of V as stored: a multiple of the vector's lanes."""
        return padded(self.value_dim, self.tile.lanes)

    @property
    def block(self) -> int:
        """Elements of a stored block of KEY_BLOCK tokens of one head, K and V."""
        return self.tile.block(self.channels, self.columns)

    @property
    def bits(self) -> type:
        """The type of a stored element in memory."""
        return {"int8": np.int8, "float32": np.uint32}.get(self.tile.dtype, np.uint16)

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token of one KV head, scales not counted."""
        return (self.channels + self.columns) * self.tile.size

    def call(self, longest: int, batch: int) -> tuple[int, int]:
        """(threads, key blocks of the longest sequence): what the number of splits depends on."""
        small = longest * batch * self.kv_heads * self.slot_bytes <= SERIAL_BYTES
        return 1 if small else count(), -(-min(longest, self.sinks + self.ring) // KEY_BLOCK)

    def splits(self, batch: int, rows: int, workers: int, blocks: int) -> int:
        """How many splits `blocks` key blocks go in, for `rows` query rows of each KV head."""
        return (
            split_count(batch * self.kv_heads * -(-rows // ROWS), blocks, workers) if blocks else 1
        )

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

        Float32, or the bits of 16-bit storage.
        """
        if self.tile.dtype in ("int8", "float32"):
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
        """(1 or 2, Hkv, slots) float32: the scales of keys, and for INT8 of values."""
        x = np.ascontiguousarray(self.blocks(store, pages)[..., : self.tile.scales]).view(F)
        kinds = 2 if self.tile.dtype == "int8" else 1
        x = x.reshape(self.kv_heads, x.shape[1], kinds, KEY_BLOCK).transpose(2, 0, 1, 3)
        return x.reshape(kinds, self.kv_heads, x.shape[2] * KEY_BLOCK)

    def keys(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, D) stored elements of K of the pages, in slot order."""
        t = self.tile
        x = self.blocks(store, pages)[..., t.scales : t.scales + KEY_BLOCK * self.channels]
        panels = x.shape[1] * KEY_BLOCK // t.panel
        x = x.reshape(self.kv_heads, panels, self.channels // t.group, t.panel, t.group)
        x = x.swapaxes(2, 3).reshape(self.kv_heads, panels * t.panel, self.channels)
        x = x[..., : self.head_dim]
        return (x.view(np.uint8) - np.uint8(t.q_offset)).view(np.int8) if t.dtype == "int8" else x

    def values(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, Dv) stored elements of V of the pages, in slot order."""
        t = self.tile
        blocks = self.blocks(store, pages)[..., KEY_BLOCK * self.channels + self.tile.scales :]
        chunks = []
        for c in range(0, self.columns, t.panel):
            width = min(t.panel, self.columns - c)
            x = blocks[..., c * KEY_BLOCK : (c + width) * KEY_BLOCK]
            x = x.reshape(*blocks.shape[:2], KEY_BLOCK // t.group, width, t.group)
            slots = blocks.shape[1] * KEY_BLOCK
            chunks.append(x.transpose(0, 1, 2, 4, 3).reshape(self.kv_heads, slots, width))
        x = np.concatenate(chunks, 2)[..., : self.value_dim]
        return (x.view(np.uint8) - np.uint8(t.v_offset)).view(np.int8) if t.dtype == "int8" else x

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
        sizes = np.array([self.page_size, self.columns, slots])
        parallel = key.size + value.size >= PARALLEL_CHANNELS and count() > 1
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

        Key (Hkv, slots, D), value (Hkv, slots, Dv), scales (1 or 2, Hkv, slots).
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
        v[..., : self.value_dim] = value
        if t.dtype == "int8":
            k = (k.view(np.uint8) + np.uint8(t.q_offset)).view(np.int8)
            moved = v[..., : self.value_dim].view(np.uint8) + np.uint8(t.v_offset)
            v[..., : self.value_dim] = moved.view(np.int8)
        k = k.reshape(heads, -1, t.panel, self.channels // t.group, t.group).swapaxes(2, 3)
        x[..., t.scales : t.scales + KEY_BLOCK * self.channels] = k.reshape(heads, blocks, -1)
        values = x[..., t.scales + KEY_BLOCK * self.channels :]
        for c in range(0, self.columns, t.panel):
            width = min(t.panel, self.columns - c)
            chunk = v[..., c : c + width].reshape(heads, blocks, -1, t.group, width)
            chunk = chunk.transpose(0, 1, 2, 4, 3).reshape(heads, blocks, -1)
            values[..., c * KEY_BLOCK : (c + width) * KEY_BLOCK] = chunk
        store.data[pages] = (
            x.reshape(heads, len(pages), -1).transpose(1, 0, 2).reshape(len(pages), heads, -1)
        )


def make_layout(settings: Settings) -> Layout:
    """The layout for the best instruction set of the target, or for the one of the settings."""
    ring: dict[str, int] = {}
    if settings.window is not None and settings.ring is not None:
        ring = {"window": settings.window, "sinks": settings.sinks, "ring": settings.ring}
    isa = target.require(settings.isa)
    return Layout(
        tile(isa, settings.dtype),
        settings.kv_heads,
        settings.head_dim,
        settings.value_dim,
        settings.page_size,
        **ring,
        matrix=isa == "amx_int8",
    )


class Append:
    """Appending to one cache prepared: its kernels and buffers.

    Called with tokens, see `decode_append`.
    """

    def __init__(self, layout: Layout, batch: int, offset: np.ndarray) -> None:
        t = layout.tile
        longest = max(layout.channels, layout.value_dim)
        make = make_append_int8 if t.dtype == "int8" else make_append_float
        self.serial, self.parallel = make(t, False), make(t, True)
        self.sizes = np.array([layout.sinks, layout.ring, layout.page_size, layout.columns])
        if t.dtype == "int8":
            self.buffers: tuple[np.ndarray, ...] = (
                offset,
                zeros((batch * layout.kv_heads, 4, longest), F),
            )
        else:
            self.buffers = (zeros((longest,), layout.bits),)
        self.rest: tuple[Store | None, tuple[np.ndarray, ...]] = (None, ())

    @guard.checked
    def __call__(
        self, key: np.ndarray, value: np.ndarray, counts: np.ndarray, store: Store
    ) -> None:
        """Append `counts` tokens per sequence to the store."""
        known, rest = self.rest
        if known is not store:  # put together once: a token's append is 2 us in all
            rest = (*store, self.sizes, *self.buffers)
            self.rest = store, rest
        if key.size + value.size < PARALLEL_CHANNELS:
            self.serial(key, value, counts, *rest)
        else:
            refuse_after_fork()
            with one_at_a_time():
                self.parallel(key, value, counts, *rest)


class Plan:
    """One decode call prepared: its kernel, sizes and buffers.

    Called with the query (B, Hkv, rows, D).
    """

    def __init__(
        self,
        layout: Layout,
        batch: int,
        group: int,
        queries: int,
        splits: int,
        workers: int,
        changed: bool,
    ) -> None:
        all_rows = group * queries
        tiles = -(-all_rows // ROWS)
        rows = -(-all_rows // tiles)
        t = replace(layout.tile, matrix=layout.takes_matrix(rows))
        units = batch * layout.kv_heads * tiles
        tasks = max(1, units * splits)
        w = workers
        self.kernel = make_decode(t, rows, changed, workers > 1)
        self.sizes = (
            queries,
            splits,
            layout.window,
            layout.sinks,
            layout.ring,
            layout.page_size,
            workers,
        )
        self.shape = (batch, layout.kv_heads, all_rows, layout.head_dim)
        # What a worker writes block by block has pages of its own: prefetching beyond its end takes
        # lines from another worker. The two share few sets of the first-level cache.
        self.scratch: Scratch | ChangedScratch = Scratch(
            zeros((w, rows, t.planes, layout.channels // t.group), np.int32),
            zeros((w, SCRATCH_ROWS, KEY_BLOCK), np.int32, PAGE, fill=True),
            zeros((w, 64, layout.columns), F, PAGE, (rows + 1) * KEY_BLOCK * 4, fill=True),
            zeros((w, 2, layout.head_dim), F, fill=True),
            zeros((w, rows, 5), np.int64, fill=True),
            zeros((w, rows), np.uint8, fill=True),
            zeros((tasks, rows, layout.columns), F, fill=True),
            zeros((tasks, ROWS), F, fill=True),
            zeros((tasks, ROWS), F, fill=True),
            zeros((2,), np.int64),
        )
        self.m, self.l = zeros(self.shape[:3], F, fill=True), zeros(self.shape[:3], F, fill=True)
        self.unit = LOG2E_Q8 if t.dtype == "int8" else F(LOG2E_Q8 / 256)

    def change(self, changes: Changes, shift: np.ndarray | None) -> None:
        """Set the options of the next calls.

        Shift (B, H, L) float32 in units of the soft cap, natural ones with functions, or None.
        """
        batch, kv_heads, rows, _ = self.shape
        cap = np.zeros(2, F)
        if changes.softcap:
            cap[0] = F(changes.softcap) * self.unit
            cap[1] = F(1) / cap[0]
        function = frame = 0
        moved = np.zeros((batch, kv_heads, rows), F) if shift is None else shift
        if changes.functions is not None:
            function, frame = changes.functions.address_of(batch, kv_heads * rows // self.queries)
            moved = moved * self.unit
        slopes: np.ndarray = np.zeros((0, 0), F)
        if changes.slopes is not None:
            slopes = (changes.slopes * self.unit).reshape(kv_heads, -1)
        mask: np.ndarray = np.zeros((0, 0, 0), np.uint8)
        if changes.mask is not None:
            mask = changes.mask.view(np.uint8)
        plain = {name: getattr(self.scratch, name) for name in Scratch._fields}
        moved = moved.reshape(batch, kv_heads, rows)
        self.scratch = ChangedScratch(
            **plain,
            cap=cap,
            shift=moved,
            slopes=slopes,
            mask=mask,
            function=function,
            frame=frame,
        )

    @property
    def queries(self) -> int:
        """New tokens; rows are (query head of the group, new token)."""
        return self.sizes[0]

    def to_redo(self) -> np.ndarray:
        """(n, 3) the sequence, KV head and row of what the last call could not do in float32."""
        return np.argwhere(self.m == AGAIN) if self.scratch.counter[1] else NOTHING_TO_REDO

    def results(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> Any:
        """What a call writes."""
        return out, self.m, self.l

    @guard.writes(results)
    def __call__(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> None:
        """Decode `query` over the store into `out`; `c` scales the scores to units of log2."""
        if self.sizes[6] == 1:
            self.kernel(query, c, store, self.scratch, self.sizes, out, self.m, self.l)
        else:
            refuse_after_fork()
            with one_at_a_time():
                self.kernel(query, c, store, self.scratch, self.sizes, out, self.m, self.l)
