"""The order in which persistent blocks compute tiles of rows that take different times.

A causal tile of rows attends to more keys the later its rows are. Each turn of the blocks gives out
the next tiles, long ones first, and the longest to the block that has had least so far: shares that
differ by a few percent, found by sorting, which no launch has to reset and a captured graph may
repeat (a counter in memory would be neither).
"""

from __future__ import annotations

import functools

import numpy as np


class Arrangement:
    """The tiles of rows of a launch, for any number of blocks.

    Parameters
    ----------
    costs : (units, tiles of rows) integers: how long each tile takes, in any unit. A unit is a batch
        entry's heads whose rows are packed together.
    together : units whose keys and values L2 holds at once, which are finished before others begin
    """

    def __init__(self, costs: np.ndarray, together: int) -> None:
        self._shape, self._together = costs.shape, together
        self._costs = np.ascontiguousarray(costs, np.int32).tobytes()

    def __call__(self, blocks: int) -> np.ndarray:
        """int32 numbers of all tiles, unit * tiles of rows + tile: what block b of `blocks` computes
        in turn t is entry t * blocks + b.
        """
        return _arranged(self._costs, self._shape, self._together, blocks)


@functools.lru_cache(16)  # an int32 for each tile of rows
def _arranged(costs: bytes, shape: tuple[int, int], together: int, blocks: int) -> np.ndarray:
    units, row_tiles = shape
    cost = np.frombuffer(costs, np.int32)
    section = np.arange(cost.size) // row_tiles // together
    order = np.lexsort((-cost, section))  # by sections, in each the longest first
    load = np.zeros(blocks, np.int64)
    found = np.empty(cost.size, np.int32)
    for first in range(0, cost.size, blocks):
        given = order[first : first + blocks]
        given = given[np.argsort(-cost[given], kind="stable")]
        least = np.argsort(load, kind="stable")[: given.size]
        if given.size < blocks:  # the last turn is that of the first blocks
            least = np.argsort(load[: given.size], kind="stable")
        found[first + least] = given
        load[least] += cost[given]
    found.flags.writeable = False
    return found


def band_costs(
    rows: tuple[int, int, int],
    keys: np.ndarray,
    diagonal: np.ndarray,
    sides: tuple[int, int],
    tile: tuple[int, int],
) -> np.ndarray:
    """(B, tiles of rows) tiles of keys in a band (`blocks.make_tile_range`), and one for what a tile of
    rows costs by itself.

    Parameters
    ----------
    rows : queries of a head, heads that are packed together, tiles of rows
    keys, diagonal : (B,) int32
    sides : keys before and after the diagonal
    tile : rows and keys of a tile
    """
    (queries, packed, row_tiles), (left, right), (block_q, block_k) = rows, sides, tile
    first = np.arange(row_tiles) * block_q
    last = np.minimum(first + block_q, queries * packed) - 1
    low = first // packed + diagonal[:, None].astype(np.int64)
    high = last // packed + diagonal[:, None].astype(np.int64)
    end = np.minimum(keys[:, None], np.maximum(high + right + 1, 0))
    begin = np.maximum(low - left, 0) // block_k
    return np.maximum(-(-end // block_k) - begin, 0) + 1


def listed_costs(tiles: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    """(B, units of a batch entry, tiles of rows) tiles of keys in a `tile_list`, and one each as above."""
    batch, unit, row = np.ogrid[tuple(map(slice, shape))]
    places = 3 + batch * tiles[0] + unit * tiles[1] + row * tiles[2]
    return tiles[places] + 1
