"""From a KV cache to decode kernels: which kernel, and its buffers.

The layout of the cache is in `decode_layout`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..jit import guard
from ..jit.threads import one_at_a_time, refuse_after_fork, threads_for
from ..numerics.fixedpoint import LOG2E_Q8
from ..tiling import KEY_BLOCK
from .decode import matrix_floats
from .decode.append import make_append_float, make_append_int8
from .decode.append_int4 import make_append_int4
from .decode.call import FRAME, FUNCTION, OPTIONS, STORE, Numbers, make_call
from .decode.changes import Options
from .decode.matrix_tiles import SCRATCH_ROWS
from .decode.task_data import AGAIN, Scratch, Sizes, Store, rows_together, sums_rows
from .decode.tiles import ROWS
from .decode_layout import MIN_PAGE, PARALLEL_CHANNELS, F, Layout, make_layout, zeros

if TYPE_CHECKING:
    from ..cache.decode_options import Changes
    from ..flex.fused import InCache
    from ..flex.machine import Tile

__all__ = ["MAX_BATCH", "MIN_PAGE", "Append", "DecodePlan", "Layout", "Store", "make_layout"]

MAX_BATCH = 1 << 20
NOTHING_TO_REDO = np.zeros((0, 3), np.intp)
PAGE = 4096  # bytes that hardware prefetches within
KEPT = 8  # options of a plan that are remembered


class Append:
    """Appending to one cache prepared: its kernels and buffers.

    Called with tokens, see `decode.append`.
    """

    def __init__(self, layout: Layout, batch: int, offset: np.ndarray) -> None:
        t = layout.tile
        longest = max(layout.channels, layout.value_dim)
        make = {"int8": make_append_int8, "int4": make_append_int4}.get(t.dtype, make_append_float)
        self.serial, self.parallel = make(t, False), make(t, True)
        self.sizes = np.array(
            (
                layout.sinks,
                layout.ring,
                layout.page_size,
                layout.columns,
                layout.channels,
                layout.value_dim,
            )
        )
        if t.exact:
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
        if threads_for(key.size + value.size, PARALLEL_CHANNELS) == 1:
            self.serial(key, value, counts, *rest)
        else:
            refuse_after_fork()
            with one_at_a_time():
                self.parallel(key, value, counts, *rest)


class MadeOptions(NamedTuple):
    """Options of a plan.

    slopes : the array that they were made of, kept so that no other gets its identity
    numbers : addresses and sizes of the options' arrays, for the kernel
    """

    options: Options
    slopes: np.ndarray | None
    numbers: tuple[int, ...]


class DecodePlan:
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
        floats = layout.matrix and layout.tile.pairs  # on matrix tiles, whose height is fixed
        tiles = -(-all_rows // (matrix_floats.ROWS if floats else ROWS))
        rows = matrix_floats.ROWS if floats else -(-all_rows // tiles)
        t = replace(layout.tile, matrix=layout.takes_matrix(rows))
        most = max(rows, ROWS)
        scratch_rows = matrix_floats.SCRATCH_ROWS if floats else SCRATCH_ROWS
        units = batch * layout.kv_heads * tiles
        tasks = max(1, units * splits)
        w = workers
        span = rows_together(t, rows) // rows  # tiles of a task
        self.kernel = t, rows, changed, workers > 1  # `make_call` of these
        self.call = make_call(*self.kernel)
        self.sizes = Sizes(
            queries,
            splits,
            layout.window,
            layout.sinks,
            layout.ring,
            layout.page_size,
            workers,
        )
        self.shape = (batch, layout.kv_heads, all_rows, layout.head_dim)
        columns = layout.sum_columns
        # What a worker writes block by block has pages of its own: prefetching beyond its end takes
        # lines from another worker. The two share few sets of the first-level cache.
        self.scratch = Scratch(
            zeros((w * span, rows, t.query_planes, layout.channels // t.group), np.int32),
            zeros((w * span, scratch_rows, KEY_BLOCK), np.int32, PAGE, fill=True),
            zeros((w, sums_rows(t, rows), columns), F, PAGE, (rows + 1) * KEY_BLOCK * 4, fill=True),
            zeros((w, 3, layout.head_dim), F, fill=True),
            zeros((w * span, rows, 5), np.int64, fill=True),
            zeros((w * span, rows), np.uint8, fill=True),
            zeros((tasks, rows, columns), F, fill=True),
            zeros((tasks, most), F, fill=True),
            zeros((tasks, most), F, fill=True),
            zeros((2,), np.int64),
        )
        self.m, self.l = zeros(self.shape[:3], F, fill=True), zeros(self.shape[:3], F, fill=True)
        self.unit = LOG2E_Q8 if t.exact else F(LOG2E_Q8 / 256)
        self.store: Store | None = None  # whose addresses `numbers` has
        self.options: MadeOptions | None = None  # whose addresses `numbers` has
        # where a soft cap and slopes are all, by the number and the array's identity
        self.made: dict[tuple[float, int], MadeOptions] = {}
        self.functions: InCache | None = None  # of the last changes
        self.function: Tile | None = None  # whose addresses `numbers` has
        self.again = False  # whether the last call left rows to do again
        s = self.scratch
        numbers = Numbers(
            *self.shape,
            layout.value_dim,
            *self.sizes,
            s.q.shape[0],
            s.q.shape[3],
            s.work.shape[1],
            s.sums.shape[1],
            columns,
            tasks,
            most,
            *(x.ctypes.data for x in (*s, self.m, self.l)),
        )
        self.numbers = np.array(numbers, np.int64)
        self.address = self.numbers.ctypes.data

    def change(self, changes: Changes, shift: np.ndarray | None) -> None:
        """Set the options of the next calls.

        shift (B, H, L) float32 in units of the soft cap, natural ones with functions, or None.
        """
        if shift is not None or changes.mask is not None:
            found = self._make_options(changes, shift)
        else:
            key = changes.softcap, id(changes.slopes)
            if key not in self.made:
                if len(self.made) >= KEPT:
                    self.made.clear()
                self.made[key] = self._make_options(changes, None)
            found = self.made[key]
        if found is not self.options:
            self.numbers[OPTIONS] = found.numbers
            self.options = found
        if changes.functions is not self.functions:
            self._set_functions(changes.functions)

    def _set_functions(self, functions: InCache | None) -> None:
        found = None
        if functions is not None:
            (batch, kv_heads, rows, _), t = self.shape, self.kernel[0]
            heads, kind = kv_heads * rows // self.queries, "integers" if t.exact else "floats"
            found = functions.tile(batch, heads, kind)
        self.numbers[FUNCTION], self.numbers[FRAME] = (
            (0, 0) if found is None else (found.address, found.data)
        )
        self.functions, self.function = functions, found

    def _make_options(self, changes: Changes, shift: np.ndarray | None) -> MadeOptions:
        """What `change` sets, but for the functions."""
        batch, kv_heads, rows, _ = self.shape
        cap = np.zeros(2, F)
        if changes.softcap:
            cap[0] = F(changes.softcap) * self.unit
            cap[1] = F(1) / cap[0]
        moved = np.zeros((batch, kv_heads, rows), F) if shift is None else shift
        if changes.functions is not None:
            moved = moved * self.unit
        slopes: np.ndarray = np.zeros((0, 0), F)
        if changes.slopes is not None:
            slopes = (changes.slopes * self.unit).reshape(kv_heads, -1)
        mask: np.ndarray = np.zeros((0, 0, 0), np.uint8)
        if changes.mask is not None:
            mask = changes.mask.view(np.uint8)
        moved = np.ascontiguousarray(moved).reshape(batch, kv_heads, rows)
        places = (x.ctypes.data for x in (cap, moved, slopes))
        numbers = *places, slopes.shape[1], mask.ctypes.data, mask.shape[1]
        return MadeOptions(Options(cap, moved, slopes, mask), changes.slopes, numbers)

    @property
    def queries(self) -> int:
        """New tokens; rows are (query head of the group, new token)."""
        return self.sizes.queries

    def to_redo(self) -> np.ndarray:
        """(n, 3) the sequence, KV head and row of what the last call could not do in float32."""
        return np.argwhere(self.m == AGAIN) if self.again else NOTHING_TO_REDO

    def results(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> Any:
        """What a call writes."""
        return out, self.m, self.l

    @guard.writes(results)
    def __call__(self, query: np.ndarray, c: np.float32, store: Store, out: np.ndarray) -> None:
        """Decode `query` over the store into `out`; `c` scales the scores to units of log2.

        Both are contiguous; their elements are in the order of (B, Hkv, rows, D).
        """
        if store is not self.store:
            pages, _, elements = store.data.shape
            places = (x.ctypes.data for x in store)
            self.numbers[STORE] = (pages, elements, store.table.shape[1], *places)
            self.store = store
        if self.sizes.workers == 1:
            self.again = self.call(query, c, out, self.address)
        else:
            refuse_after_fork()
            with one_at_a_time():
                self.again = self.call(query, c, out, self.address)
