"""From a KV cache to decode kernels on a card: which kernel, how many splits, its buffers.

The twin of `cpu.launch_decode`, for the layout in `decode_layout`. A step uploads its token.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import CacheFullError, UnsupportedError
from ..interop.arrays import to_float32
from ..numerics.fixedpoint import LOG2E_Q8
from .decode_layout import (
    MAX_BATCH,
    MIN_PAGE,
    SOURCES,
    UNLIMITED,
    F,
    Layout,
    Store,
    make_layout,
)
from .kernels.decode_append import decode_append
from .kernels.decode_combine import decode_combine
from .kernels.decode_float import decode_float
from .kernels.decode_int8 import decode_int8
from .kernels.decode_pieces import WARPS
from .kernels.decode_rotate import decode_rotate

if TYPE_CHECKING:
    from ..cache.decode_options import Changes

__all__ = [
    "MAX_BATCH",
    "MIN_PAGE",
    "Append",
    "DecodePlan",
    "Layout",
    "Step",
    "Store",
    "make_layout",
]

LONGEST = (1 << 31) - 1  # tokens of a sequence
NO_ROWS = np.zeros((0, 3), np.intp)


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
        card.wait_for_copies()  # the tokens may be in pinned memory, which the caller may fill again

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

    def launch(self, tokens: tuple[np.ndarray, ...], store: Store, rotated: bool = False) -> None:
        """Enqueue the kernel on buffers (B, Hkv, n, D) and (B, Hkv, n, Dv), `rotated` already or to
        be rotated in place.
        """
        key, value = tokens
        layout, (batch, kv_heads, n, d), dv = self.layout, key.shape, value.shape[3]
        counts, offset = (small for _, small in self._small)
        smooth = bool(self.offset.any())
        if layout.rotate and not rotated:
            _rotation(layout.card, key, offset if smooth else None)()
            _rotation(layout.card, value)()
            smooth = False  # it is done
        constants = {
            "d": d,
            "dv": dv,
            "source": SOURCES[key.dtype.name],
            "dtype": layout.dtype,
            "paged": layout.paged,
            "smooth": smooth,
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


class Prepared(NamedTuple):
    """The launches of a call, and what it was given: `held` keeps the ids from being another's."""

    given: tuple[Any, ...] = ()
    held: tuple[np.ndarray, ...] = ()
    launches: Sequence[Callable[[], None]] = ()


class DecodePlan:
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
        tile = layout.tile_rows(rows, changed)
        units = batch * layout.kv_heads * -(-rows // tile)
        self.layout, self.splits, self.sizes = layout, splits, (queries,)
        self.shape = (batch, layout.kv_heads, rows, layout.head_dim)
        self.constants: dict[str, Any] = {
            "d": d,
            "dv": dv,
            "direct": splits == 1,
            "paged": layout.paged,
            "ring": layout.ring != UNLIMITED,
            "changed": changed,
            "turing": card.arch == "sm_75",
        }
        if layout.exact:
            self.constants |= {"tile_rows": tile, "packed": layout.packed}
        else:
            self.constants |= {
                "row_tiles": tile // 16,
                "dtype": layout.dtype,
                "unified": layout.unified is not None and not changed,
            }
        self.combine = {
            "dv": dv,
            "tile_rows": tile,
            "exact": layout.exact,
            "turned": layout.value_dim if layout.rotate else 0,
        }
        self.grid = units * splits, 1, 1
        self.combine_grid = batch * layout.kv_heads * rows, 1, 1
        shapes = (*self.shape[:3], layout.value_dim), self.shape[:3], self.shape[:3]
        self._query, self.q = card.pinned(self.shape, F), card.zeros(self.shape, F)
        # out, m and l behind each other: they come back in one copy
        size = sum(math.prod(x) for x in shapes)
        self._here, self._there = card.pinned((size,), F), card.zeros((size,), F)
        self.out, *self.there = _parts(self._there, shapes)
        self.result, self.m, self.l = _parts(self._here, shapes)
        tasks = units * splits if splits > 1 else 0
        self.parts = tuple(card.zeros((tasks, tile, *last), F) for last in ((dv,), (), ()))
        self._prepared = Prepared()
        self.spoiled = NO_ROWS
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
        self._prepared = Prepared()

    @property
    def queries(self) -> int:
        """New tokens; rows are (query head of the group, new token)."""
        return self.sizes[0]

    @property
    def again(self) -> bool:
        """Whether the last call left rows to do again."""
        return bool(self.spoiled.size)

    def to_redo(self) -> np.ndarray:
        """(n, 3) the sequence, KV head and row of what the last call could not do in float32."""
        return self.spoiled

    def launch(
        self,
        query: np.ndarray,
        c: np.float32,
        store: Store,
        out: np.ndarray,
        rotated: bool = False,
    ) -> None:
        """Enqueue the kernels on buffers; a query that is to be rotated is changed in place.

        What the last call launched is launched again if it had the same arguments.
        """
        # not the store itself: a plan must not keep a cache's memory
        given = id(query), id(out), weakref.ref(store), float(c), rotated
        if given != self._prepared.given:
            launches = list(self._launches(query, c, store, out, rotated))
            self._prepared = Prepared(given, (query, out), launches)
        for launch in self._prepared.launches:
            launch()

    def _launches(
        self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray, rotated: bool
    ) -> Iterator[Callable[[], None]]:
        layout = self.layout
        card = layout.card
        queries, (_, kv_heads, rows, d), dv = self.sizes[0], self.shape, layout.value_dim
        exact = layout.exact
        size = np.dtype(layout.bits).itemsize
        results = (out, *self.there) if self.splits == 1 else self.parts
        if layout.rotate and not rotated:
            yield _rotation(card, query)
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
        sizes = (
            queries,
            rows,
            kv_heads,
            self.splits,
            d,
            dv,
            layout.k_stored * size,
            layout.v_stored * size,
            store.table.shape[1],
            layout.shift,
            layout.window,
            layout.sinks,
            layout.ring,
        )
        factors = (c, *self.cap) if exact else (c, F(layout.unified or 0), *self.cap)
        yield card.prepared(
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
            yield card.prepared(
                decode_combine,
                self.combine,
                self.combine_grid,
                ((*self.parts, out, *self.there), (rows, self.splits, dv)),
            )
        elif layout.rotate:
            yield _rotation(card, out)

    def fetch(self) -> None:
        """Enqueue the copy of the results to the host: `result`, `m` and `l`."""
        self.layout.card.fetch(self._there, self._here)

    def __call__(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> None:
        """Decode `query` over the store into `out`; `c` scales the scores to units of log2."""
        card = self.layout.card
        if not out.size:
            return
        store.synchronise()
        self._query[...] = query
        card.send(self.q, self._query)
        self.launch(self.q, c, store, self.out)
        self.fetch()
        card.synchronise()
        out[...] = self.result
        self.inspect(out)

    def inspect(self, out: np.ndarray) -> None:
        """Note the rows to be done again."""
        if not self.layout.exact:
            good = np.isfinite(out)
            self.spoiled = NO_ROWS if good.all() else np.argwhere(~good.all(-1))


def _parts(memory: np.ndarray, shapes: tuple[tuple[int, ...], ...]) -> list[np.ndarray]:
    """Views of a buffer, one behind the other."""
    ends = np.cumsum([math.prod(shape) for shape in shapes]).tolist()
    return [x.reshape(shape) for x, shape in zip(np.split(memory, ends[:-1]), shapes, strict=True)]


def _rotation(card: Any, rows: np.ndarray, offset: np.ndarray | None = None) -> Callable[[], None]:
    """Enqueues the rotation of a buffer (..., n, D) in place, less an offset (B, Hkv, D)."""
    *_, n, d = rows.shape
    count = rows.size // d
    launch: Callable[[], None] = card.prepared(
        decode_rotate,
        {"d": d, "smooth": offset is not None},
        (-(-count // WARPS), 1, 1),
        ((rows, 0 if offset is None else offset), (count, n)),
    )
    return launch


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

    def __init__(self, append: Append, plan: DecodePlan, c: np.float32, store: Store) -> None:
        layout = plan.layout
        card = plan.layout.card
        self.append, self.plan, self.store, self.c = append, plan, store, c
        batch, kv_heads, _, d = plan.shape
        tokens = batch, kv_heads, plan.sizes[0]
        shapes = (*tokens, d), (*tokens, layout.value_dim), plan.shape
        # token and query behind each other: they go in one copy, and are rotated together
        size = sum(math.prod(x) for x in shapes)
        self._here, self._there = card.pinned((size,), F), card.zeros((size,), F)
        self.tokens, self.there = _parts(self._here, shapes), _parts(self._there, shapes)
        self._graph: Callable[[], None] | None = None

    def _enqueue(self) -> None:
        card, layout = self.plan.layout.card, self.plan.layout
        plan = self.plan
        *tokens, query = self.there
        card.send(self._there, self._here)
        rotated = layout.rotate and layout.head_dim == layout.value_dim
        if rotated:
            _rotation(card, self._there.reshape(-1, layout.head_dim))()
        self.append.launch(tuple(tokens), self.store, rotated)
        plan.launch(query, self.c, self.store, plan.out, rotated)
        plan.fetch()

    def __call__(
        self,
        key: np.ndarray,
        value: np.ndarray,
        query: np.ndarray,
        counts: np.ndarray,
        out: np.ndarray,
        store: Store,
    ) -> None:
        """Append float32 tokens and decode the query over the cache.

        key (B, Hkv, n, D), value (B, Hkv, n, Dv), query (B, Hkv, rows, D); `counts` are all n.

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
        out[...] = self.plan.result
        self.plan.inspect(out)
