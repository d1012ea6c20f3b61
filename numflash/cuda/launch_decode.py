"""From a KV cache to decode kernels on a card.

The cache's layout there, how many splits, which kernel, and its buffers.

The twin of `cpu.launch_decode`. Keys, values, block table and lengths stay on the card; the host
keeps copies of the two small ones and sends them only after it has changed them itself (a new page,
`share`, `reset`). A step uploads its token.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..arguments import emulated_arch
from ..errors import CacheFullError, UnsupportedError
from ..fixedpoint import LOG2E_Q8
from ..interop import to_float32
from ..tiling import KEY_BLOCK, split_count
from .kernels.decode_append import BLOCK, decode_append
from .kernels.decode_combine import decode_combine
from .kernels.decode_float import decode_float
from .kernels.decode_int8 import decode_int8
from .kernels.decode_pieces import LANE_KEYS, WARPS
from .resident import Card, Emulated

if TYPE_CHECKING:
    from ..cache.decode_options import Changes
    from ..cache.settings import Settings

F = np.float32
MIN_PAGE = LANE_KEYS
SHORT_CONTEXT = (
    256  # keys up to which one block does a KV head: the threshold of the T4 architecture
)
BLOCKS_PER_MULTIPROCESSOR = 2  # of the kernels' registers
UNLIMITED = (
    1 << 30
)  # slots of a ring that never turns, and of a sequence's page where it has but one
HEAD_DIMS = (32, 64, 96, 128, 256)
KEY_DIMS_INT8 = (64, 128, 256)  # whole swizzles
SOURCES = {"float32": "float32", "float16": "float16", "uint16": "bfloat16"}
LONGEST = (1 << 31) - 1
MAX_BATCH = 65535  # blocks along an axis of the grid


class Store:
    """A cache on the card.

    k, v : what a slot holds, see `Layout.allocate`;  scales : of INT8 slots table (B, pages of a
        sequence) int32, lengths (B,) int64 : on the host; `synchronise` sends them when they were
        changed there
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

    @property
    def exact(self) -> bool:
        """Whether products and sums are exact integers."""
        return self.dtype == "int8"

    @property
    def bits(self) -> type:
        """The type of a stored element in memory."""
        return np.int8 if self.exact else np.uint16

    @property
    def k_stored(self) -> int:
        """Channels of a stored key: whole pieces of 16 bytes."""
        unit = 16 // np.dtype(self.bits).itemsize
        return -(-self.head_dim // unit) * unit

    @property
    def v_stored(self) -> int:
        """Channels of a stored value.

        INT8 values are stored channel by channel and need no padding.
        """
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

    def row_tiles(self, rows: int) -> int:
        """Tiles of 16 query rows per block; two where the registers hold them."""
        return 2 if rows > 16 and max(self.padded) <= 128 and self.unified is None else 1

    @property
    def padded(self) -> tuple[int, int]:
        """The head sizes that the kernels are built for."""
        d = next(n for n in (KEY_DIMS_INT8 if self.exact else HEAD_DIMS) if n >= self.head_dim)
        return d, next(n for n in HEAD_DIMS if n >= self.value_dim)

    def call(self, longest: int, batch: int) -> tuple[int, int]:
        """(blocks that run at once, key blocks of the longest sequence).

        What the number of splits depends on.
        """
        return self.card.multiprocessors * BLOCKS_PER_MULTIPROCESSOR, -(
            -min(longest, self.sinks + self.ring) // KEY_BLOCK
        )

    def splits(self, batch: int, rows: int, workers: int, blocks: int) -> int:
        """How many splits `blocks` key blocks go in, for `rows` query rows of each KV head."""
        if blocks * KEY_BLOCK <= SHORT_CONTEXT:
            return 1
        return split_count(
            batch * self.kv_heads * -(-rows // (16 * self.row_tiles(rows))), blocks, workers
        )

    def tokens(self, x: np.ndarray) -> np.ndarray:
        """New tokens as the append kernel takes them, contiguous.

        As they are, float64 as float32.
        """
        return np.ascontiguousarray(x) if x.dtype.name in SOURCES else to_float32(x)

    def allocate(self, pages: int, batch: int, table_width: int) -> Store:
        """K (pages, Hkv, slots, D).

        V (pages, Hkv, slots, Dv), for INT8 (pages, Hkv, slots / n, Dv, n) with n = min(page, 128).

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

        Key (Hkv, slots, D), value (Hkv, slots, Dv), scales (1 or 2, Hkv, slots).
        """
        size = self.page_size
        span = min(self.page_size, BLOCK)
        k = np.zeros((*key.shape[:2], self.k_stored), self.bits)
        v = np.zeros((*value.shape[:2], self.v_stored), self.bits)
        k[..., : self.head_dim], v[..., : self.value_dim] = key, value
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
    # ------------------------------------------------------------------------------------------------------
    def _pages(self, x: np.ndarray, pages: np.ndarray) -> np.ndarray:
        """(Hkv, pages, ...) of a buffer on the host."""
        found = [self.card.download(x[page]) for page in pages]
        return np.stack(found, 1) if found else np.zeros((self.kv_heads, 0, *x.shape[2:]), x.dtype)

    def keys(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, D) stored elements of K of the pages, in slot order."""
        return self._pages(store.k, pages).reshape(self.kv_heads, -1, self.k_stored)[
            ..., : self.head_dim
        ]

    def values(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(Hkv, slots, Dv) stored elements of V of the pages, in slot order."""
        x = self._pages(store.v, pages)
        if self.exact:
            x = x.swapaxes(-1, -2)
        return x.reshape(self.kv_heads, -1, self.v_stored)[..., : self.value_dim]

    def scales(self, store: Store, pages: np.ndarray) -> np.ndarray:
        """(1 or 2, Hkv, slots) float32: the scales of keys, and for INT8 of values.

        a float key that is NaN has the scale NaN.
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
    if dtype == "float32" or (card.arch == "sm_75" and dtype != "float16"):
        allowed = "float16" if card.arch == "sm_75" else "int8, float16, bfloat16"
        raise UnsupportedError(
            f"dtype: got {dtype!r}; the CUDA kernels of {card.arch} decode over {allowed}"
        )
    for name, n in (("head_dim", settings.head_dim), ("value_dim", settings.value_dim)):
        if n > HEAD_DIMS[-1]:
            raise UnsupportedError(f"{name}: got {n}; the CUDA kernels take 1 to {HEAD_DIMS[-1]}")
    ring: dict[str, int] = {}
    if settings.window is not None and settings.ring is not None:
        ring = {"window": settings.window, "sinks": settings.sinks, "ring": settings.ring}
    return Layout(
        card,
        dtype,
        settings.kv_heads,
        settings.head_dim,
        settings.value_dim,
        settings.page_size,
        settings.paged,
        **ring,
        unified=settings.unified_max,
    )


class Append:
    """Appending to one cache prepared: its buffers.

    Called with tokens of float32, float16 or (as uint16) bfloat16.
    """

    def __init__(self, layout: Layout, batch: int, offset: np.ndarray) -> None:
        self.layout, self.offset = layout, offset
        self._buffers: tuple[np.ndarray, ...] = ()
        self._small = (
            (np.zeros(batch, np.int32), layout.card.zeros((batch,), np.int32)),
            (np.zeros(offset.shape, F), layout.card.zeros(offset.shape, F)),
        )

    def __call__(
        self, key: np.ndarray, value: np.ndarray, counts: np.ndarray, store: Store
    ) -> None:
        """Append `counts` tokens per sequence to the store."""
        card = self.layout.card
        if not key.size:
            return
        if key.dtype != value.dtype:
            key = to_float32(key)
            value = to_float32(value)
        self.prepare(counts, store)
        if (
            not self._buffers
            or self._buffers[0].shape != key.shape
            or self._buffers[0].dtype != key.dtype
        ):
            self._buffers = card.zeros(key.shape, key.dtype), card.zeros(value.shape, value.dtype)
        for to, x in zip(self._buffers, (key, value), strict=True):
            card.upload(to, x)
        store.growing()
        self.launch(self._buffers, store)
        store.grown(counts)

    def prepare(self, counts: np.ndarray, store: Store) -> None:
        """Bring the card up to what the host has changed.

        Table and lengths, tokens per sequence, channel means.
        """
        if (store.lengths + counts).max(initial=0) > LONGEST:
            raise CacheFullError(
                f"append: a sequence would hold more than {LONGEST} tokens, which CUDA kernels do not count"
            )
        store.synchronise()
        for (sent, small), now in zip(self._small, (counts, self.offset), strict=True):
            if not np.array_equal(sent, now):
                sent[...] = now
                self.layout.card.upload(small, sent)

    def launch(self, tokens: tuple[np.ndarray, ...], store: Store) -> None:
        """Enqueue the kernel on buffers (B, Hkv, n, D) and (B, Hkv, n, Dv)."""
        key, value = tokens
        layout, (batch, kv_heads, n, d), dv = self.layout, key.shape, value.shape[3]
        constants = {
            "d": d,
            "dv": dv,
            "source": SOURCES[key.dtype.name],
            "dtype": layout.dtype,
            "paged": layout.paged,
            "smooth": bool(self.offset.any()),
            "turing": layout.card.arch == "sm_75",
        }
        sizes = (
            n,
            kv_heads,
            d,
            dv,
            layout.k_stored,
            layout.v_stored,
            store.table.shape[1],
            layout.shift,
            layout.sinks,
            layout.ring,
        )
        counts, offset = (small for _, small in self._small)
        layout.card.run(
            decode_append,
            constants,
            (-(-n // WARPS), kv_heads, batch),
            (
                (
                    key,
                    value,
                    counts,
                    store.table_there,
                    store.lengths_there,
                    store.tickets,
                    store.k,
                    store.v,
                    store.scales,
                    offset,
                ),
                layout.bytes_of,
                sizes,
            ),
        )


class Plan:
    """One decode call prepared: its kernels, sizes and buffers.

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
        card = layout.card
        rows = group * queries
        d, dv = layout.padded
        tiles = layout.row_tiles(rows)
        units = batch * layout.kv_heads * -(-rows // (16 * tiles))
        self.layout, self.splits, self.sizes = layout, splits, (queries,)
        self.shape = (batch, layout.kv_heads, rows, layout.head_dim)
        self.constants: dict[str, Any] = {
            "d": d,
            "dv": dv,
            "row_tiles": tiles,
            "direct": splits == 1,
            "paged": layout.paged,
            "ring": layout.ring != UNLIMITED,
            "changed": changed,
        }
        if not layout.exact:
            self.constants |= {
                "dtype": layout.dtype,
                "turing": card.arch == "sm_75",
                "unified": layout.unified is not None and not changed,
            }
        self.combine = {"dv": dv, "row_tiles": tiles, "exact": layout.exact}
        self.grid, self.combine_grid = (
            (units * splits, 1, 1),
            (units * tiles * (dv // 8 // WARPS), 1, 1),
        )
        self.q, self.out = (
            card.zeros(self.shape, F),
            card.zeros((*self.shape[:3], layout.value_dim), F),
        )
        self.there = card.zeros(self.shape[:3], F), card.zeros(self.shape[:3], F)
        tasks = units * splits if splits > 1 else 0
        self.parts = tuple(card.zeros((tasks, 16 * tiles, *last), F) for last in ((dv,), (), ()))
        self.m, self.l = np.zeros(self.shape[:3], F), np.zeros(self.shape[:3], F)
        self.spoiled = np.zeros((0, 3), np.intp)
        self.more: tuple[Any, ...] = ()  # pointers and factors of the options
        self.cap: tuple[np.float32, ...] = ()

    def change(self, changes: Changes, shift: np.ndarray | None) -> None:
        """Set the options of the next calls.

        shift : (B, H, L) float32 in units of the soft cap, or None
        """
        if changes.functions is not None:
            raise UnsupportedError(
                "score_mod, mask_mod: got one with a cache on a card; allowed: on the CPU"
            )
        batch, kv_heads, rows, _ = self.shape
        card = self.layout.card
        unit = LOG2E_Q8 if self.layout.exact else F(LOG2E_Q8 / 256)
        self.cap = F(0), F(0)
        if changes.softcap:
            cap = F(changes.softcap) * unit
            self.cap = cap, F(1) / cap
        moved = None if shift is None else shift.reshape(batch, kv_heads, rows).astype(F)
        slopes = mask = None
        if changes.slopes is not None:
            heads = (changes.slopes * unit).reshape(kv_heads, -1)
            slopes = np.repeat(heads.astype(F), self.queries, 1)
        if changes.mask is not None:
            mask = changes.mask.astype(np.int32)
        self.more = tuple(0 if x is None else _sent(card, x) for x in (moved, slopes, mask))

    @property
    def queries(self) -> int:
        """New tokens; rows are (query head of the group, new token)."""
        return self.sizes[0]

    def to_redo(self) -> np.ndarray:
        """(n, 3) the sequence, KV head and row of what the last call could not do in float32."""
        return self.spoiled

    def launch(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> None:
        """Enqueue the kernels on buffers."""
        layout = self.layout
        card = self.layout.card
        queries, (_, kv_heads, rows, d), dv = self.sizes[0], self.shape, layout.value_dim
        exact = layout.exact
        size = np.dtype(layout.bits).itemsize
        results = (out, *self.there) if self.splits == 1 else self.parts
        scales = (store.scales,) if exact else ()
        pointers = (
            query,
            store.k,
            store.v,
            *scales,
            store.table_there,
            store.lengths_there,
            *results,
        )
        value_row = () if exact else (layout.v_stored * size,)
        sizes = (
            queries,
            rows,
            kv_heads,
            self.splits,
            d,
            dv,
            layout.k_stored * size,
            *value_row,
            store.table.shape[1],
            layout.shift,
            layout.window,
            layout.sinks,
            layout.ring,
        )
        factors = (c, *self.cap) if exact else (c, F(layout.unified or 0), *self.cap)
        card.run(
            decode_int8 if exact else decode_float,
            self.constants,
            self.grid,
            (
                (*pointers, *self.more),
                layout.bytes_of if exact else layout.bytes_of[:4],
                sizes,
                factors,
            ),
        )
        if self.splits > 1:
            card.run(
                decode_combine,
                self.combine,
                self.combine_grid,
                ((*self.parts, out, *self.there), (rows, self.splits, dv)),
            )

    def __call__(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> None:
        """Decode `query` over the store into `out`; `c` scales the scores to units of log2."""
        card = self.layout.card
        if not out.size:
            return
        store.synchronise()
        card.upload(self.q, query)
        self.launch(self.q, c, store, self.out)
        for x, to in zip((self.out, *self.there), (out, self.m, self.l), strict=True):
            card.fetch(x, to)
        card.synchronise()
        self.inspect(out)

    def inspect(self, out: np.ndarray) -> None:
        """Note the rows to be done again."""
        if not self.layout.exact:
            self.spoiled = np.argwhere(~np.isfinite(out).all(-1))


def _sent(card: Any, x: np.ndarray) -> np.ndarray:
    """A copy of x on the card."""
    there: np.ndarray = card.zeros(x.shape, x.dtype)
    card.upload(there, np.ascontiguousarray(x))
    return there


class Step:
    """A whole step captured: tokens and query to the card, append, attention, results to the host.

    Replayed with one launch.

    Made for one plan, scale and number of new tokens; the lengths are the card's own, so a graph
    serves every length that has the plan's splits.
    """

    def __init__(self, append: Append, plan: Plan, c: np.float32, store: Store) -> None:
        layout = plan.layout
        card = plan.layout.card
        self.append, self.plan, self.store, self.c = append, plan, store, c
        batch, kv_heads, _, d = plan.shape
        shapes = (
            (batch, kv_heads, plan.sizes[0], d),
            (batch, kv_heads, plan.sizes[0], layout.value_dim),
        )
        self.there = tuple(card.zeros(shape, F) for shape in shapes)
        self.tokens = [card.pinned(shape, F) for shape in (*shapes, plan.shape)]
        self.results = [card.pinned(x.shape, F) for x in (plan.out, *plan.there)]
        self._graph: Callable[[], None] | None = None

    def _enqueue(self) -> None:
        card = self.plan.layout.card
        plan = self.plan
        for to, x in zip((*self.there, plan.q), self.tokens, strict=True):
            card.upload(to, x)
        self.append.launch(self.there, self.store)
        plan.launch(plan.q, self.c, self.store, plan.out)
        for x, to in zip((plan.out, *plan.there), self.results, strict=True):
            card.fetch(x, to)

    def __call__(
        self,
        key: np.ndarray,
        value: np.ndarray,
        query: np.ndarray,
        counts: np.ndarray,
        out: np.ndarray,
        store: Store,
    ) -> None:
        """Tokens (B, Hkv, n, D) and (B, Hkv, n, Dv), query (B, Hkv, rows, D), `counts` all n.

        Float32.

        store : with the memory that the step was made for.
        """
        card = self.plan.layout.card
        self.append.prepare(counts, store)
        for to, x in zip(self.tokens, (key, value, query), strict=True):
            to[...] = x
        if self._graph is None:
            self._graph = card.capture(self._enqueue)
        store.growing()
        self._graph()
        store.grown(counts)
        card.synchronise()
        for to, x in zip((out, self.plan.m, self.plan.l), self.results, strict=True):
            to[...] = x
        self.plan.inspect(out)
