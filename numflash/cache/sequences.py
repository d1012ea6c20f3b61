"""Operations on whole sequences of a KV cache: room, length, order, sharing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ArgumentError, ArgumentTypeError
from . import pages as paging
from .arguments import integer, plain_array
from .holdings import Holdings
from .memory import copied, emptied, reserved, selected, truncated
from .settings import MAX_LENGTH

if TYPE_CHECKING:
    from typing_extensions import Self


class Sequences(Holdings):
    """Each of these changes takes effect in one step.

    An interrupted call has done all of it or nothing.
    """

    def reserve(self, tokens: int) -> None:
        """Make room for more tokens in every sequence; what is stored stays.

        New memory is allocated and the tokens are copied, so double the size rather than adding a
        little.

        Parameters
        ----------
        tokens : int
            The least `max_length` from now on, 1 to 2**31. A ring needs no room, and a smaller number
            than the present one changes nothing.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `tokens` is no such integer.
        MemoryError
            There is not so much memory; the cache is as before.
        """
        memory = self._open()
        tokens = integer("tokens", tokens, 1, MAX_LENGTH)
        if self.window is None and tokens > memory.settings.max_length:
            self._memory = reserved(memory, tokens)

    def truncate(self, lengths: Any) -> None:
        """Keep the first tokens of each sequence: what drops speculated tokens.

        Parameters
        ----------
        lengths : int or (B,) integers
            How many tokens to keep, of all sequences or of each; 0 to what it holds.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Other numbers; and a ring that has dropped tokens which the last remaining one attends to:
            it keeps 64 tokens or more beyond its window.
        CacheFullError
            A page shared with another sequence has to be copied, and the pool has none left.
        """
        memory = self._open()
        held = memory.store.lengths
        given = plain_array("lengths", lengths)
        if given.ndim == 0:
            given = np.full(memory.batch, given)
        if given.shape != held.shape or given.dtype.kind not in "iu":
            raise ArgumentError(
                f"lengths: got {lengths!r}; allowed: an integer or {memory.batch} integers"
            )
        if ((given < 0) | (given > held)).any():
            raise ArgumentError(f"lengths: got {given.tolist()}; allowed: 0 to {held.tolist()}")
        if (given != held).any():
            self._memory = truncated(memory, given.astype(np.int64))

    def reorder(self, index: Any) -> None:
        """Make sequence i of the cache a copy of the present sequence `index[i]`.

        For beam search and for dropping finished sequences. In a cache with pages the tables move
        and only partly filled pages are copied; otherwise a sequence named twice is copied.

        Parameters
        ----------
        index : (n,) integers, each 0 to B - 1
            The cache has n sequences afterwards.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Other indices.
        CacheFullError
            A pool of a given size has no page left for a copy.
        """
        memory = self._open()
        given = plain_array("index", index)
        good = (
            given.ndim == 1 and given.dtype.kind in "iu" and given.size <= memory.backend.MAX_BATCH
        )
        if not good or (given.size and (given.min() < 0 or given.max() >= memory.batch)):
            allowed = f"integers from 0 to {memory.batch - 1}"
            if not memory.batch:
                allowed = "no index, for the cache holds no sequence"
            raise ArgumentError(f"index: got {index!r}; allowed: {allowed}")
        self._memory = selected(memory, given.astype(np.intp))

    def repeat(self, n: int) -> None:
        """Make n copies of every sequence, next to each other: `reorder([0] * n + [1] * n + ...)`.

        Parameters
        ----------
        n : int
            1 or more.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `n` is no such integer.
        CacheFullError
            A pool of a given size has no page left for a copy.
        """
        memory = self._open()
        n = integer("n", n, 1, memory.backend.MAX_BATCH)
        self.reorder(np.arange(memory.batch).repeat(n))

    def copy(self) -> Self:
        """A cache of its own with the same content, which later calls on this one do not change."""
        memory = self._open()
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._memory = copied(memory)
        return new

    def __copy__(self) -> Self:
        return self.copy()

    def __deepcopy__(self, memo: Any) -> Self:
        return self.copy()

    def __reduce__(self) -> Any:
        raise ArgumentTypeError(
            "pickle: got a KVCache; allowed: its state(), to be given to load_state() of a new one"
        )

    def share(self, source: int, target: int, length: int | None = None) -> None:
        """Let an empty sequence start with the first tokens of another, in a cache with pages.

        Full pages are shared (no append ever writes to a full page); the tokens of the last, partial
        page are copied.

        Parameters
        ----------
        source, target : int
            Sequences, 0 to B - 1; `target` holds no token.
        length : int, optional
            How many tokens; all of the source's unless given.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            Other numbers, or a cache without pages.
        CacheFullError
            The pool has no page left for the copy.
        """
        memory = self._open()
        store = memory.store
        if not memory.settings.paged:
            raise ArgumentError("share: the cache has no pages; allowed: a cache with page_size")
        a = self._sequence(memory, "source", source)
        b = self._sequence(memory, "target", target)
        if a == b or store.lengths[b]:
            raise ArgumentError(
                f"target: got {b}; allowed: an empty sequence other than the source"
            )
        held = int(store.lengths[a])
        n = held if length is None else integer("length", length, 0, held)
        page = paging.share(
            store.table, store.lengths, a, b, n, memory.layout.page_size, memory.pages
        )
        if page is not None:
            memory.layout.copy_pages(store, [page[0]], store, [page[1]], memory.layout.page_size)
        memory.offset[b] = memory.offset[a]
        store.lengths[b] = n

    def reset(self, sequences: Any = None) -> None:
        """Empty sequences, and return their pages to the pool. Memory stays allocated.

        Parameters
        ----------
        sequences : int or integers, each 0 to B - 1, optional
            All sequences unless given.

        Raises
        ------
        ArgumentError, ArgumentTypeError
            `sequences` is no integer from 0 to B - 1, nor several.
        NumflashError
            A closed cache.
        """
        memory = self._open()
        if sequences is None:
            sequences = range(memory.batch)
        given = plain_array("sequences", sequences)
        if given.ndim > 1 or given.dtype.kind not in "iu":
            raise ArgumentTypeError(f"sequences: got {sequences!r}; allowed: an integer or several")
        chosen = [self._sequence(memory, "sequences", b) for b in given.ravel().tolist()]
        self._memory = emptied(memory, chosen)
