"""What a KV cache holds at one moment, and how that is changed: every change makes a new `Memory`.

`KVCache` replaces its `Memory` in one assignment, so a call that is interrupted leaves the cache as
it was. The one exception is the append kernel, which writes tokens behind the lengths and then
raises these, all in one call.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ..errors import ArgumentError, CacheFullError
from . import pages as paging
from .calls import Calls
from .protocols import Append, Backend, Layout, Store
from .settings import Settings

F = np.float32


@dataclass(frozen=True)
class Memory:
    """Keys and values of all sequences.

    settings : with the present `max_length`
    offset : (B, Hkv, D) float32, what `smooth` takes from the keys (`smoothing`)
    oldest : (B,) int64, the first token behind the sinks that a ring still holds after `truncate`
    pages : of the pool
    calls : decode calls prepared for this layout and number of sequences
    """

    settings: Settings
    backend: Backend
    layout: Layout
    store: Store
    append: Append
    offset: np.ndarray
    oldest: np.ndarray
    pages: int
    calls: Calls

    @property
    def batch(self) -> int:
        """Sequences."""
        return int(self.store.lengths.size)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        lengths = self.store.lengths
        if lengths.size == 1:
            return lengths.item()
        return max(lengths.tolist(), default=0) if lengths.size <= 64 else int(lengths.max())

    def slots(self, b: int) -> tuple[np.ndarray, int]:
        """The pages and the number of slots in use of sequence b."""
        layout = self.layout
        store = self.store
        used = min(int(store.lengths[b]), layout.sinks + layout.ring)
        return store.table[b, : -(-used // layout.page_size)], used

    def free_pages(self) -> int:
        """Pages of the pool that no sequence uses."""
        store = self.store
        return int(
            paging.free_pages(store.table, store.lengths, self.layout.page_size, self.pages).size
        )

    def refuse_dropped(self, rows: int, new: int = 0) -> None:
        """Raise where the first of the last `rows` tokens attends to tokens that a ring dropped
        before it was truncated. `new`: tokens that are to be appended before.
        """
        window = self.settings.window
        if window is None or not self.oldest.any():
            return
        at = self.store.lengths + (new - rows)
        first = np.maximum(at - window + 1, self.settings.sinks)
        lost = (first < self.oldest) & (first <= at)
        if lost.any():
            b = int(np.argmax(lost))
            most = int(self.store.lengths[b] + new - self.oldest[b] - window + 1)
            raise ArgumentError(
                f"query: got {rows} tokens for sequence {b}, whose ring was truncated and holds tokens "
                f"from {self.oldest[b]} on; allowed: {most}, or more after an append"
            )

    def grow(self, take: np.ndarray) -> None:
        """Take pages for `take` more tokens of each sequence, or raise CacheFullError."""
        store = self.store
        paging.grow(store.table, store.lengths, take, self.layout.page_size, self.pages)


def allocate(
    backend: Backend, settings: Settings, batch: int, pages: int = 0, like: Layout | None = None
) -> Memory:
    """An empty cache, with a pool of `pages` or more, on the card of the layout `like`."""
    layout = backend.make_layout(settings) if like is None else like.resized(settings.page_size)
    count = max(pages, settings.pool(batch))
    store = layout.allocate(count, batch, settings.width)
    if not settings.paged:
        store.table[:, 0] = np.arange(batch)
    offset = np.zeros((batch, settings.kv_heads, settings.head_dim), F)
    append = backend.Append(layout, batch, offset)
    calls = Calls(backend, layout, settings, batch)
    return Memory(
        settings, backend, layout, store, append, offset, np.zeros(batch, np.int64), count, calls
    )


def _allocate_for(memory: Memory, settings: Settings, batch: int) -> Memory:
    """An empty memory that takes over another's sequences."""
    return allocate(
        memory.backend, settings, batch, memory.pages if settings.paged else 0, memory.layout
    )


def _filled(new: Memory, source: Memory, index: np.ndarray) -> Memory:
    """An allocated memory with the source's data of its sequences `index` other than tokens."""
    new.store.lengths[:] = source.store.lengths[index]
    new.offset[:] = source.offset[index]
    new.oldest[:] = source.oldest[index]
    return new


def reserved(memory: Memory, tokens: int) -> Memory:
    """The same sequences with room for `tokens` tokens each."""
    settings = replace(memory.settings, max_length=tokens)
    if settings.paged and settings.width == memory.settings.width:
        return replace(memory, settings=settings)
    if not settings.paged:
        settings = replace(settings, page_size=settings.slots)
        if settings.page_size == memory.settings.page_size:
            return replace(memory, settings=settings)
    everyone = np.arange(memory.batch)
    if settings.paged and settings.pages is not None:
        table = np.zeros((memory.batch, settings.width), np.int32)
        table[:, : memory.store.table.shape[1]] = memory.store.table
        store = memory.layout.rebound(memory.store, table, memory.store.lengths.copy())
        calls = Calls(memory.backend, memory.layout, settings, memory.batch)
        return replace(memory, settings=settings, store=store, calls=calls)
    new = _allocate_for(memory, settings, memory.batch)
    if settings.paged:
        new.store.table[:, : memory.store.table.shape[1]] = memory.store.table
        _copy_pool(memory, new)
    else:
        _copy_sequences(memory, new, everyone)
    return _filled(new, memory, everyone)


def selected(memory: Memory, index: np.ndarray) -> Memory:
    """Sequences `index` of the cache, each as often as it is named.

    Tables move, and tokens only where two sequences would write to the same page.

    Raises
    ------
    CacheFullError
        A pool of a given size has no page left for such a copy; nothing has changed then.
    """
    if index.size == memory.batch and (index == np.arange(index.size)).all():
        return memory
    try:
        return _gathered(memory, index)
    except CacheFullError:
        if memory.settings.pages is not None:
            raise
    return _apart(memory, index)


def _apart(memory: Memory, index: np.ndarray) -> Memory:
    """Sequences `index` in a new pool, none of whose pages are shared."""
    new = _allocate_for(memory, memory.settings, index.size)
    size, width = memory.layout.page_size, memory.settings.width
    used = -(-memory.store.lengths[index] // size)
    rows, columns = np.nonzero(np.arange(width) < used[:, None])
    table = np.arange(index.size * width, dtype=np.int32).reshape(index.size, width)
    source = memory.store.table[index[rows], columns]
    memory.layout.copy_pages(memory.store, source, new.store, table[rows, columns], size)
    new.store.table[...] = table
    return _filled(new, memory, index)


def _gathered(memory: Memory, index: np.ndarray) -> Memory:
    """Sequences `index`: full pages are shared, and a partial last one is copied."""
    store = memory.store
    settings = memory.settings
    same_batch = index.size == memory.batch
    distinct = np.unique(index).size == index.size
    if settings.paged and (same_batch or settings.pages is not None or index.size < memory.batch):
        table, source, copies = paging.gather(
            store.table, store.lengths, index, settings.page_size, memory.pages
        )
        memory.layout.copy_pages(store, source, store, copies, settings.page_size)
        return _rebound(memory, table, index)
    if distinct and not settings.paged and memory.layout.indirect:
        return _rebound(memory, store.table[index], index)
    new = _allocate_for(memory, settings, int(index.size))
    if settings.paged:
        _copy_pool(memory, new)
        table, source, copies = paging.gather(
            store.table, store.lengths, index, settings.page_size, new.pages
        )
        memory.layout.copy_pages(store, source, new.store, copies, settings.page_size)
        new.store.table[...] = table
    else:
        _copy_sequences(memory, new, index)
    return _filled(new, memory, index)


def _rebound(memory: Memory, table: np.ndarray, index: np.ndarray) -> Memory:
    """The same memory under another table."""
    store = memory.layout.rebound(memory.store, table, memory.store.lengths[index])
    offset = memory.offset[index]
    append = memory.backend.Append(memory.layout, index.size, offset)
    calls = memory.calls
    if index.size != memory.batch:
        calls = Calls(memory.backend, memory.layout, memory.settings, int(index.size))
    return replace(
        memory, store=store, append=append, offset=offset, oldest=memory.oldest[index], calls=calls
    )


def truncated(memory: Memory, lengths: np.ndarray) -> Memory:
    """The first `lengths` tokens of each sequence.

    Raises
    ------
    ArgumentError
        A ring no longer holds the tokens that the window before the last of them covers.
    CacheFullError
        A shared page would have to be copied and none is free; nothing has changed then.
    """
    store = memory.store
    layout = memory.layout
    settings = memory.settings
    oldest = memory.oldest
    if settings.window is not None:
        oldest = np.maximum(oldest, store.lengths - layout.ring)
        first = np.maximum(lengths - settings.window, settings.sinks)
        lost = (lengths < store.lengths) & (first < oldest) & (lengths > settings.sinks)
        if lost.any():
            b = int(np.argmax(lost))
            raise ArgumentError(
                f"lengths: got {lengths[b]} for sequence {b}, whose window would begin at token {first[b]}; "
                f"allowed: {oldest[b] + settings.window} or more, the ring holds tokens from {oldest[b]} on"
            )
        oldest = np.where(lengths <= settings.sinks, 0, oldest)  # it starts over
    table = store.table.copy()
    if settings.paged:
        rows = np.flatnonzero((lengths < store.lengths) & (lengths % settings.page_size > 0))
        columns = lengths[rows] // settings.page_size
        users = paging.page_users(table, store.lengths, settings.page_size, memory.pages)
        shared = users[table[rows, columns]] > 1
        rows = rows[shared]
        columns = columns[shared]
        free = np.flatnonzero(users == 0)
        if rows.size > free.size:
            if settings.pages is None:
                return truncated(_apart(memory, np.arange(memory.batch)), lengths)
            raise CacheFullError(
                f"truncate: {rows.size} more pages of {settings.page_size} tokens are needed; free are "
                f"{free.size} of {memory.pages}"
            )
        layout.copy_pages(store, table[rows, columns], store, free[: rows.size], settings.page_size)
        table[rows, columns] = free[: rows.size]
    return replace(memory, store=layout.rebound(store, table, lengths), oldest=oldest)


def emptied(memory: Memory, chosen: list[int]) -> Memory:
    """The same memory, in which the chosen sequences hold no token.

    Lengths and `oldest` change together: an empty sequence of a ring must not remember what it dropped.
    """
    lengths, oldest = memory.store.lengths.copy(), memory.oldest.copy()
    lengths[chosen] = 0
    oldest[chosen] = 0
    store = memory.layout.rebound(memory.store, memory.store.table, lengths)
    return replace(memory, store=store, oldest=oldest)


def copied(memory: Memory) -> Memory:
    """A memory of its own with the same content."""
    everyone = np.arange(memory.batch)
    new = _allocate_for(memory, memory.settings, memory.batch)
    if memory.settings.paged:
        _copy_pool(memory, new)
        new.store.table[...] = memory.store.table
    else:
        _copy_sequences(memory, new, everyone)
    return _filled(new, memory, everyone)


def _copy_pool(source: Memory, target: Memory) -> None:
    """All pages under their own numbers."""
    every = np.arange(source.pages)
    source.layout.copy_pages(source.store, every, target.store, every, source.layout.page_size)


def _copy_sequences(source: Memory, target: Memory, index: np.ndarray) -> None:
    """The slots in use of sequences `index`, where each has one page."""
    longest = min(source.longest, source.layout.sinks + source.layout.ring)
    pages = source.store.table[index, 0]
    to = target.store.table[:, 0]
    source.layout.copy_pages(source.store, pages, target.store, to, longest)
