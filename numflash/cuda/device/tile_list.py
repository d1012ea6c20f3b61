"""Block states as lists of the tiles that a kernel visits."""

from __future__ import annotations

import numpy as np

FULL = 2


def tile_list(
    states: np.ndarray,
    block: tuple[int, int],
    lengths: tuple[int, int],
    packed: int,
    tile: tuple[int, int],
) -> np.ndarray:
    """Which tiles of keys each tile of rows attends to, as `score_functions.make_tile_list` reads it.

    Parameters
    ----------
    states : (B or 1, H or 1, blocks of L, blocks of S) uint8: 0 empty, 2 full
    block : (queries, keys) of a block of `states`
    lengths : (L, S)
    packed : heads whose rows a tile interleaves
    tile : (rows, keys) of a kernel's tile

    Returns
    -------
    int32: strides along batch, heads and rows in elements (0 where one serves all), then for each
    tile of rows how many tiles it attends to, and twice the number of each, plus 1 where all rows
    attend to all of its keys
    """
    (length, s), (rows, keys) = lengths, tile
    nb, nh = states.shape[:2]
    low = high = states
    if nh > 1:
        grouped = states.reshape(nb, nh // packed, packed, *states.shape[2:])
        low, high = grouped.min(2), grouped.max(2)
    last = length * packed - 1
    starts = np.arange(0, last + 1, rows)
    first_query, last_query = starts // packed, np.minimum(starts + rows - 1, last) // packed
    low = _over(np.minimum, low, first_query // block[0], last_query // block[0], 2)
    high = _over(np.maximum, high, first_query // block[0], last_query // block[0], 2)
    starts = np.arange(0, s, keys)
    ends = np.minimum(starts + keys, s) - 1
    low = _over(np.minimum, low, starts // block[1], ends // block[1], 3)
    high = _over(np.maximum, high, starts // block[1], ends // block[1], 3)
    table = _rows(high > 0, low == FULL)
    row = table.shape[-1]
    heads = row * table.shape[2]
    strides = (heads * table.shape[1] if nb > 1 else 0, heads if nh > 1 else 0, row)
    return np.concatenate([np.array(strides, np.int32), table.reshape(-1)])


def _rows(seen: np.ndarray, full: np.ndarray) -> np.ndarray:
    """(..., 1 + tiles) int32: of each row how many tiles are seen, then these, zeros behind."""
    tiles = seen.shape[-1]
    table = np.zeros((*seen.shape[:-1], 1 + tiles), np.int32)
    count = table[..., 0] = np.count_nonzero(seen, -1)
    entries = 2 * np.arange(tiles, dtype=np.int32) + full
    table[..., 1:][np.arange(tiles) < count[..., None]] = entries[seen]
    return table


def _over(
    reduce: np.ufunc, states: np.ndarray, first: np.ndarray, last: np.ndarray, axis: int
) -> np.ndarray:
    """The extreme of blocks first to last of an axis, for each tile."""
    found = states.take(first, axis)
    for n in range(1, int((last - first).max(initial=0)) + 1):
        reduce(found, states.take(np.minimum(first + n, last), axis), out=found)
    return found
