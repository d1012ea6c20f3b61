"""What a task of decode works on: the cache, the scratch of the workers, the query rows of a tile, the
key blocks that they attend to, and where the state of a row is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK
from . import matrix_floats
from .changes import Rows
from .tiles import CQ, ROWS, START, L, M, Tile

F = np.float32
UNSEEN = F(fx.MIN_OCTAVE)  # maximum of an integer row that has seen no key
NOTHING = F(-3e38)  # maximum of a float row that has seen no key
AGAIN = F(np.inf)  # maximum of a float row that is to be done again in float64
SHARED_ROWS = 128  # query rows that share the values made from a block's keys


class Sizes(NamedTuple):
    """Numbers of a decode call. A plain tuple from Python, which is passed in less time."""

    queries: int  # new tokens
    splits: int
    window: int
    sinks: int
    ring: int
    page_size: int
    workers: int


class Store(NamedTuple):
    """The cache: pages of keys and values, see `tiles` for the layout inside a page of a head.

    data : (pages, Hkv, elements): scales, K and V block by block; the scale of a key is NaN where
        the token was not finite
    table : (B, pages of a sequence) int32, the page of each `page size` slots;  lengths : (B,)
        int64 tokens
    """

    data: np.ndarray
    table: np.ndarray
    lengths: np.ndarray

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and scales."""
        return self.data.nbytes


class Results(NamedTuple):
    """What a call writes, for the rows of each KV head: see `flash_decode`."""

    out: np.ndarray
    m: np.ndarray
    l: np.ndarray


class Scratch(NamedTuple):
    """Buffers of the workers, and the results of T query tiles x splits, allocated once.

    `rows` are those of a tile. A task has one tile, or several where tiles are `shared`; W counts the
    tiles of all workers, those of a worker next to each other.

    q : (W, rows, planes, words) int32 operands of the products
    work : (W, scratch rows, 128) int32, see `Query`; how many rows the products want is
        `SCRATCH_ROWS` of `matrix_tiles` or `matrix_floats`
    sums : (workers, `sums_rows`, columns) float32, the output of a task
    line : (workers, 3, D) float32, a query row while it is rounded and rotated
    edges : (W, rows, 5) int64;  spoiled : (W, rows) uint8, see `Query`
    o : (T, rows, columns);  m, l : (T, 8 or more) float32, the results before they are merged
    counter : (2,) int64, the next task, and whether any row is to be done again
    """

    q: np.ndarray
    work: np.ndarray
    sums: np.ndarray
    line: np.ndarray
    edges: np.ndarray
    spoiled: np.ndarray
    o: np.ndarray
    m: np.ndarray
    l: np.ndarray
    counter: np.ndarray


class Query(NamedTuple):
    """The query rows of one tile of a task: `real` of them, in the buffers of its worker.

    words : (rows, planes, words) int32 operands of the products
    work : (scratch rows, 128) int32: scores, then weights, a row for each query row; the state of all
        rows behind them (`Places`)
    edges : (rows, 5) int64 slots that a row attends to, see `slots`
    spoiled : (rows,) uint8, whether a row attends to a token that is not finite
    o : (rows, columns) float32 sums
    options : the scratch, of a call with the options of `changes` a `ChangedScratch`
    values : address of the values made from a block's keys, 0 where they are stored
    """

    words: np.ndarray
    work: np.ndarray
    edges: np.ndarray
    spoiled: np.ndarray
    o: np.ndarray
    real: int
    rows: Rows
    options: NamedTuple
    values: int


class Blocks(NamedTuple):
    """Key blocks side by side in the elements `data` of one head of a page.

    The first begins at element `base`, the next `step` elements further. Each has `n` slots, the
    first of them is slot `first` of the sequence. More than one only where every row attends to all
    of them: then `inside` is true.
    """

    data: np.ndarray
    base: int
    step: int
    count: int  # type: ignore[assignment]  # a field; tuple has a method of that name
    n: int
    first: int
    inside: bool


class Places(NamedTuple):
    """Columns of row number `rows` of `work`, the one behind the scores.

    From these on the state of the rows of a tile is stored.

    most : rows that there is room for;  sums : row of `work` for the sum of a float row, where
        tiles are `shared` a vector for each row
    """

    most: int
    m: int
    l: int
    start: int
    cq: int
    sums: int


def places_of(tile: Tile, rows: int) -> Places:
    """Where the state of a tile of `rows` rows is."""
    if tile.pairs and tile.matrix:
        most = matrix_floats.ROWS
        return Places(most, 0, most, 2 * most, 3 * most, matrix_floats.SUMS_ROW)
    return Places(ROWS, M, L, START, CQ, rows + 1 if tile.shared else rows)


def rows_together(tile: Tile, rows: int) -> int:
    """Query rows of a task, whose tiles have `rows` each."""
    return max(rows, SHARED_ROWS // rows * rows) if tile.shared else rows


def sums_rows(tile: Tile, rows: int) -> int:
    """Rows of a worker's sums; behind those of its tiles, V of a block where it is made from K.

    Else 64, of which `rows` are used: 64 rows of a multiple of 16 columns are whole pages of 4096
    bytes, so the rows that two workers write do not share a page.
    """
    return rows_together(tile, rows) + KEY_BLOCK * tile.size // 4 if tile.shared else 64
