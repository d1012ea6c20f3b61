"""What a block of a decode kernel works on.

Its split of a sequence's slots, its rows, its parts of shared memory, and which slots a row attends
to.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...tiling import KEY_BLOCK
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .decode_pieces import WARPS, Pages, divided, remainder

i32, u32, u64 = types.int32, types.uint32, types.uint64


class Tokens(NamedTuple):
    """A sequence's tokens in a cache, int32."""

    length: Any
    newest: Any  # the slot of the last one
    window: Any  # of a ring
    sinks: Any
    ring_slots: Any


class Task(NamedTuple):
    """What a block works on, int32."""

    number: Any
    batch: Any
    kv_head: Any
    head: Any  # batch * KV heads + kv_head
    first_row: Any
    start: Any  # the slots of its split
    stop: Any


class Rows(NamedTuple):
    """The query rows of a thread: local arrays, and what all rows have in common."""

    token: Any  # the number of the row's token among the new ones
    shift: Any  # `decode_changes`
    slope: Any
    queries: Any  # new tokens
    first: Any  # position of the first of them


class Memory(NamedTuple):
    """Addresses in shared memory."""

    q: Any
    k: Any
    v: Any
    p: Any  # weights
    scales: Any  # of two tiles' keys and values
    factors: Any  # a float32 for each row
    maxima: Any  # for each warp and row
    sums: Any


def make_find_task(tile_rows: int, paged: bool, ring: bool) -> Any:
    """Which rows of which head a block works on, and where its keys and values are.

    find_task(k, v, tables, lengths, bytes_of, sizes) -> (Task, keys: Pages, values: Pages, Tokens).
    Arguments as the kernels get them. Tasks are the splits of a tile of `tile_rows` rows, a power
    of two, then of the next tile; splits are counted in key blocks, as on the CPU.
    """
    row_shift, block_shift = tile_rows.bit_length() - 1, KEY_BLOCK.bit_length() - 1

    @device_function
    def find_task(k, v, tables, lengths, bytes_of, sizes):
        k_page, k_head, v_page, v_head = bytes_of[:4]
        _, rows, kv_heads, splits = sizes[:4]
        k_row, v_row, width, shift, window, sinks, ring_slots = sizes[6:]
        number = i32(cuda.blockIdx.x)
        unit = divided(number, splits)
        split = i32(number - unit * splits)
        tiles = (rows + tile_rows - 1) >> row_shift
        head = divided(unit, tiles)
        first_row = i32((unit - head * tiles) * tile_rows)
        b = divided(head, kv_heads)
        g = i32(head - b * kv_heads)
        length = ptx.load_global_s32(lengths + u64(b * 4))
        slots, newest = length, length - 1
        if ring:
            slots = min(length, sinks + ring_slots)
            if length > slots:
                newest = sinks + remainder(length - 1 - sinks, ring_slots)
        blocks = (slots + KEY_BLOCK - 1) >> block_shift
        share = i32(divided(blocks + splits - 1, splits) << block_shift)
        start = i32(split * share)
        table = tables + u64(b * width) * u64(4) if paged else u64(b)
        return (
            Task(number, b, g, head, first_row, start, i32(min(start + share, slots))),
            Pages(k + u64(g) * u64(k_head), u64(k_page), table, shift, k_row),
            Pages(v + u64(g) * u64(v_head), u64(v_page), table, shift, v_row),
            Tokens(length, i32(newest), window, sinks, ring_slots),
        )

    return find_task


def make_find_rows(n_rows: int, row_of: Any, option: Any) -> Any:
    """find_rows(rows: Rows, task, tokens, row_count, options, lane).

    Fills the local arrays of a thread's `n_rows` rows, in the block row_of(lane, i). `option` is
    `decode_changes.Changes.row`.
    """

    @device_function
    def find_rows(rows, task, tokens, row_count, options, lane):
        for i in range(n_rows):
            inside = row_of(lane, i)
            r = task.first_row + inside
            rows.token[i] = remainder(r, rows.queries)
            r = min(r, row_count - 1)
            rows.shift[i] = option(options.shift, task.head * row_count + r)
            rows.slope[i] = option(options.slopes, task.kv_head * row_count + r)

    return find_rows


def make_layout(q: int, k: int, v: int, p: int, scales: int, tile_rows: int) -> tuple[Any, int]:
    """(layout(start) -> Memory, its bytes), from the bytes of the first five parts."""
    row = tile_rows * 4

    @device_function
    def layout(start):
        at_k = start + u32(q)
        at_v = at_k + u32(k)
        at_p = at_v + u32(v)
        at_scales = at_p + u32(p)
        factors = at_scales + u32(scales)
        maxima = factors + u32(row)
        return Memory(
            start, at_k, at_v, at_p, at_scales, factors, maxima, maxima + u32(WARPS * row)
        )

    return layout, q + k + v + p + scales + (1 + 2 * WARPS) * row


def make_position(ring: bool) -> Any:
    """position_of(j, tokens): of the token in slot j of a sequence.

    In a ring it follows from how far the slot lies behind the newest.
    """

    @device_function
    def position_of(j, tokens):
        length, newest, _, sinks, ring_slots = tokens
        position = j
        if ring and j >= sinks:
            behind = i32(newest - j)
            if behind < 0:
                behind = i32(behind + ring_slots)
            position = i32(i32(length - 1) - behind)
        return position

    return position_of


def make_attends(ring: bool, allowed: Any) -> Any:
    """attends(i, j, position, rows, task, tokens, mask): whether row i attends to slot j, whose
    token is at `position`.

    `allowed` is `decode_changes.Changes.allowed`.
    """

    @device_function
    def attends(i, j, position, rows, task, tokens, mask):
        last = i32(rows.first + rows.token[i])
        seen = j < task.stop and position <= last
        if ring:
            seen = seen and (position < tokens.sinks or position > i32(last - tokens.window))
        return seen and allowed(
            mask, task.batch, rows.queries, rows.token[i], i32(position - rows.first)
        )

    return attends
