"""The rows of an INT8 kernel's block.

What is known of each before the first key, and how their results leave.

What a tile of scores needs of its rows is in shared memory, two times 16 bytes a row, and
is read anew for every tile: kept in registers through the products it would push other things onto
the stack. Row r of the problem is query r // group of head r % group of the heads that are packed
together (`tiles.make_load_rows`); a thread holds two rows, 8 apart.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
UNROLLED = 16  # tiles: a loop over more would be left as one, and the fragment in memory
# of a warp's 16 rows first low, high, cq, shift; from `PART` on query, head, slope, `int8_pairs`
ROW_BYTES = 32
PART = 256


class Int8Options(NamedTuple):
    """What an INT8 kernel has code for besides plain attention: constants of its factory."""

    band: bool = False  # a causal or windowed problem; blocks of keys outside are skipped
    mask: bool = False  # uint8
    bias: bool = False  # float32, added
    softcap: bool = False
    alibi: bool = False


class Block(NamedTuple):
    """The problem, and this block's batch entry and key head in it, int32."""

    batch: Any
    kv_head: Any
    heads: Any  # of queries
    queries: Any
    keys: Any
    diagonal: Any  # query i's own key is i + diagonal
    left: Any
    right: Any


class Outputs(NamedTuple):
    """Where results go."""

    batch: Any
    kv_head: Any
    queries: Any
    heads: Any  # of queries
    kv_heads: Any
    channels: Any  # a multiple of 4
    out: Any  # addresses
    m: Any
    l: Any
    scales: Any  # of the values


class OptionData(NamedTuple):
    """What the options of a call read."""

    cap: Any  # in Q8.8
    mask: Any  # addresses
    bias: Any
    strides: Any  # bytes, of the mask, then of the bias: batch, head, query, key


class Sums(NamedTuple):
    """The state of a thread's two rows: local arrays."""

    o: Any  # the output so far
    m: Any  # octaves of the maxima
    l: Any  # sums of the weights


class Columns(NamedTuple):
    """The channels of a fragment of outputs."""

    scales: Any  # address of the values' scales of this key head
    channels: Any
    begin: Any  # the fragment's first channel


@functools.cache
def make_describe_rows(group: int, options: Int8Options, first_key: int = 0) -> Any:
    """describe_rows(table, row, first_head, block: Block, tables, lane).

    A warp stores what it needs of its 16 rows, from `row` on.

    `table` is where they go in shared memory, `tables` the addresses of cq, slopes and shifts. A row
    attends to the keys low <= j < high, in the blocks those from `first_key` on; one that does not
    exist attends to none.
    """
    band, _, _, softcap, alibi = options

    @device_function
    def describe_rows(table, row, first_head, block, tables, lane):
        batch, queries, heads, keys = block.batch, block.queries, block.heads, block.keys
        cq_at, slopes, shifts = tables
        four = cuda.local.array(4, u32)
        if lane < 16:
            mine = i32(row + lane)
            query = i32(mine // group)
            head = i32(first_head + (mine - query * group))
            low, high, cq, slope, shift = i32(0), i32(0), f32(0), f32(0), f32(0)
            if query < queries:
                at = u64(u32(i32(i32(batch * heads + head) * queries + query))) * u64(4)
                high = i32(keys)
                if band:
                    low = i32(query + block.diagonal - block.left)
                    high = i32(min(keys, query + block.diagonal + block.right + 1))
                cq = ptx.load_global_f32(cq_at + at)
                if alibi:
                    slope = ptx.load_global_f32(slopes + u64((batch * heads + head) * 4))
                if softcap:
                    shift = ptx.load_global_f32(shifts + at)
            low = i32(max(low, first_key))
            four[0], four[1], four[2], four[3] = u32(low), u32(high), ptx.bits(cq), ptx.bits(shift)
            ptx.store_shared_v4(table + u32(lane * 16), four, 0)
            four[0], four[1], four[2], four[3] = u32(query), u32(head), ptx.bits(slope), u32(0)
            ptx.store_shared_v4(table + u32(PART + lane * 16), four, 0)
        cuda.syncwarp()

    return describe_rows


@functools.cache
def make_write_tiles(first: int, stop: int) -> Any:
    """write_tiles(sums: Sums, inverse, columns: Columns, to, exists, odd, lane).

    The part of `write_rows` for the tiles of 8 channels from `first` to `stop`.

    The lane writes to one row, at `to` if it exists: an odd one to the second.
    """

    @device_function
    def write_tiles(sums, inverse, columns, to, exists, odd, lane):
        o, l, (scales, channels, begin) = sums.o, sums.l, columns
        scale, four = cuda.local.array(2, f32), cuda.local.array(4, u32)
        for n in range(first, stop):
            c = i32(begin + 8 * n + 2 * (lane & 3))
            for e in range(2):
                scale[e] = (
                    ptx.load_global_f32(scales + u64((c + e) * 4)) if c < channels else f32(0)
                )
            for r in range(2):
                for e in range(2):
                    x = o[4 * n + 2 * r + e]
                    o[4 * n + 2 * r + e] = (
                        f32(0) if l[r] == f32(0) else ptx.mul(ptx.mul(x, inverse[r]), scale[e])
                    )
            for e in range(2):
                kept, sent = (
                    (o[4 * n + 2 + e], o[4 * n + e]) if odd else (o[4 * n + e], o[4 * n + 2 + e])
                )
                came = ptx.shuffle_xor(sent, u32(1))
                four[e] = ptx.bits(came if odd else kept)
                four[2 + e] = ptx.bits(kept if odd else came)
            start = i32(begin + 8 * n + 4 * ((lane & 3) >> 1))
            if exists and start < channels:
                ptx.store_global_v4(to + u64(start * 4), four, 0)

    return write_tiles


@functools.cache
def make_write_rows(value_tiles: int) -> Any:
    """write_rows(sums: Sums, mine, outputs: Outputs, begin, lane).

    Writes out = o / l * value scale, and m and l, of the thread's two rows.

    `mine` is the first one's place in the table, `begin` the first channel of `o`. Lanes in pairs
    swap halves, the even one keeps the first row: 16 bytes are written at a time.
    """
    write_tiles = make_write_tiles(0, min(value_tiles, UNROLLED))
    write_more = make_write_tiles(UNROLLED, value_tiles)

    @device_function
    def write_rows(sums, mine, outputs, begin, lane):
        m, l = sums.m, sums.l
        batch, kv_head, queries, heads, kv_heads, channels, out, m_out, l_out, scales = outputs
        scales = scales + u64(u32(batch * kv_heads + kv_head)) * u64(channels * 4)
        odd = (lane & 1) != 0
        four, inverse = cuda.local.array(4, u32), cuda.local.array(2, f32)
        number, there = cuda.local.array(2, u64), cuda.local.array(2, types.boolean)
        for r in range(2):
            ptx.load_shared_v4(four, 0, mine + u32(PART + 128 * r))
            query, head = i32(four[0]), i32(four[1])
            number[r], there[r] = (
                u64(u32(i32(i32(batch * heads + head) * queries + query))),
                query < queries,
            )
            inverse[r] = ptx.rcp(l[r])
            if lane & 3 == 0 and begin == 0 and there[r]:
                ptx.store_global(m_out + number[r] * u64(4), u32(m[r]))
                ptx.store_global_f32(l_out + number[r] * u64(4), l[r])
        to = out + (number[1] if odd else number[0]) * u64(channels * 4)
        columns = Columns(scales, channels, begin)
        write_tiles(sums, inverse, columns, to, there[1] if odd else there[0], odd, lane)
        if value_tiles > UNROLLED:
            write_more(sums, inverse, columns, to, there[1] if odd else there[0], odd, lane)

    return write_rows
