"""Pages of a KV cache: which sequence owns which, which are shared, which are free."""

from __future__ import annotations

import numpy as np

from ..errors import CacheFullError


class Pages:
    """A pool of `count` pages of `size` slots for sequences that take them as they grow.

    Attributes
    ----------
    table : (B, pages of a sequence) int32, the page of each `size` slots; written here, read by the kernels
    paged : False where every sequence owns its only page for good
    """

    def __init__(self, count: int, size: int, table: np.ndarray, paged: bool) -> None:
        self.count, self.size, self.table, self.paged = count, size, table, paged
        self._owned: list[list[int]] = [[] for _ in range(table.shape[0])]
        self._users = np.zeros(count, np.int64)
        self.free = list(range(count - 1, -1, -1))
        if not paged:
            table[:, 0] = np.arange(table.shape[0])

    def _own(self, b: int, page: int) -> None:
        self.table[b, len(self._owned[b])] = page
        self._owned[b].append(page)
        self._users[page] += 1

    def grow(self, lengths: np.ndarray, take: np.ndarray) -> None:
        """Give every sequence the pages for `take` more tokens, or raise CacheFullError and give none."""
        need = [
            -(-(int(n) + int(t)) // self.size) - len(mine)
            for n, t, mine in zip(lengths, take, self._owned, strict=True)
        ]
        if sum(x for x in need if x > 0) > len(self.free):
            raise CacheFullError(
                f"append: {sum(x for x in need if x > 0)} more pages of {self.size} tokens are needed; "
                f"free are {len(self.free)} of {self.count}"
            )
        for b, more in enumerate(need):
            for _ in range(more):
                self._own(b, self.free.pop())

    def share(self, source: int, target: int, length: int) -> tuple[int, int] | None:
        """Let an empty sequence own the pages of another's first `length` tokens; returns (page, its copy) if one is partial.

        Full pages are never written again, so only the last, partial one needs a copy.
        """
        whole, rest = divmod(length, self.size)
        if rest and not self.free:
            raise CacheFullError(f"share: one more page is needed; free are 0 of {self.count}")
        for page in self._owned[source][:whole]:
            self._own(target, page)
        if not rest:
            return None
        self._own(target, self.free.pop())
        return self._owned[source][whole], self._owned[target][whole]

    def release(self, b: int) -> None:
        """Give back the pages of a sequence that nobody else uses."""
        for page in self._owned[b]:
            self._users[page] -= 1
            if not self._users[page]:
                self.free.append(page)
        self._owned[b] = []
