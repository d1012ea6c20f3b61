"""Pages of a KV cache: which sequence owns which, which are shared, which are free.

Nothing is stored but the block table and the lengths: the pages of a sequence are the first entries
of its row, as many as its length needs. So ownership changes in the same step as the lengths, and
entries beyond the length are scratch that an interrupted call may leave behind.
"""

from __future__ import annotations

import numpy as np

from ..errors import CacheFullError


def page_counts(lengths: np.ndarray, size: int) -> np.ndarray:
    """(B,) pages that sequences of these lengths need."""
    return -(-lengths // size)


def page_users(table: np.ndarray, lengths: np.ndarray, size: int, pages: int) -> np.ndarray:
    """(pages,) how many sequences use each page of the pool."""
    held = np.arange(table.shape[1]) < page_counts(lengths, size)[:, None]
    return np.bincount(table[held], minlength=pages)


def free_pages(table: np.ndarray, lengths: np.ndarray, size: int, pages: int) -> np.ndarray:
    """The pages that no sequence uses, in ascending order."""
    return np.flatnonzero(page_users(table, lengths, size, pages) == 0)


def grow(table: np.ndarray, lengths: np.ndarray, take: np.ndarray, size: int, pages: int) -> None:
    """Enter pages for `take` more tokens of each sequence into the table, or raise and enter none.

    The sequences own them once the lengths have been raised.

    Raises
    ------
    CacheFullError
    """
    before = page_counts(lengths, size)
    after = page_counts(lengths + take, size)
    need = after - before
    total = int(need.sum())
    if not total:
        return
    free = free_pages(table, lengths, size, pages)
    if total > free.size:
        raise CacheFullError(
            f"append: {total} more pages of {size} tokens are needed; free are {free.size} of {pages}"
        )
    start = 0
    for b in np.flatnonzero(need):
        table[b, before[b] : after[b]] = free[start : start + need[b]]
        start += int(need[b])


def gather(
    table: np.ndarray, lengths: np.ndarray, index: np.ndarray, size: int, pages: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences `index` of a cache in a new table.

    The table, and the pages to copy and their copies.

    Full pages are shared: no append writes to them. A partial last page belongs to one sequence, so
    every further taker gets a copy in a free page.

    Raises
    ------
    CacheFullError
        The copies of partial pages need more pages than are free.
    """
    chosen = table[index]
    partial = lengths[index] % size > 0
    first = np.zeros(index.size, bool)
    first[np.unique(index, return_index=True)[1]] = True
    rows = np.flatnonzero(partial & ~first)
    columns = lengths[index[rows]] // size
    source = chosen[rows, columns]
    free = free_pages(table, lengths, size, pages)
    if rows.size > free.size:
        raise CacheFullError(
            f"reorder: {rows.size} more pages of {size} tokens are needed; free are {free.size} of {pages}"
        )
    copies = free[: rows.size]
    chosen[rows, columns] = copies
    return chosen, source, copies


def share(
    table: np.ndarray,
    lengths: np.ndarray,
    source: int,
    target: int,
    length: int,
    size: int,
    pages: int,
) -> tuple[int, int] | None:
    """Enter the pages of a sequence's first `length` tokens into the row of an empty one.

    Returns (page, its copy) if the last of them is partial: only that one needs a copy.

    Raises
    ------
    CacheFullError
    """
    whole, rest = divmod(length, size)
    row = table[source, : whole + (rest > 0)].copy()
    copied = None
    if rest:
        free = free_pages(table, lengths, size, pages)
        if not free.size:
            raise CacheFullError(f"share: one more page is needed; free are 0 of {pages}")
        copied = int(row[-1]), int(free[0])
        row[-1] = free[0]
    table[target, : row.size] = row
    return copied
