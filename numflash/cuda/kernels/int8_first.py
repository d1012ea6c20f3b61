"""The first keys of a sequence, in front of the key blocks: the state that these find.

What `cpu.int8.first_keys` says of them holds here, to the bit. A warp takes its 16 rows with one
product of 8 columns per 32 channels: the high bytes of the four keys, then what these leave of
their 13 bits. Operands come from global memory, each lane its own words: nothing is shared, and no
warp waits for another.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...numerics import fixedpoint as fx
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_rows import PART, Int8Options
from .int8_softmax import (
    MASKED_SCORE,
    SPOILED,
    make_finish_score,
    octave_of,
    quad_imax,
    rounded,
)
from .int8_weights import weight_p16

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
FIRST_KEYS, FINER = fx.FIRST_KEYS, fx.FINER
PLANES = 2 * FIRST_KEYS  # columns of the product
TOGETHER = 4  # tiles of 8 channels whose values are added in one function
N_WEIGHTS = 2 * FIRST_KEYS  # of the two rows of a thread


@functools.cache
def make_first_values(first: int, stop: int, width: int) -> Any:
    """o = w.v for the tiles of 8 channels from `first` to `stop`, key by key.

    In functions of `TOGETHER` tiles, whose loops the compiler unrolls: an accumulator that a loop
    indexes would be in memory.
    """
    if stop - first > TOGETHER:
        add_values = make_first_values(first, first + TOGETHER, width)
        add_more = make_first_values(first + TOGETHER, stop, width)

        @device_function
        def add_all(o, w, values):
            add_values(o, w, values)
            add_more(o, w, values)

        return add_all

    @device_function
    def add_tiles(o, w, values):
        pair = cuda.local.array(2, u32)
        for n in range(first, stop):
            for i in range(4):
                o[4 * n + i] = f32(0)
            for j in range(FIRST_KEYS):
                ptx.load_global_v2(pair, 0, values + u64((j * width + 8 * n) * 4))
                for e in range(2):
                    for r in range(2):
                        at = 4 * n + 2 * r + e
                        o[at] = ptx.fma(w[FIRST_KEYS * r + j], ptx.from_bits(pair[e]), o[at])

    return add_tiles


@functools.cache
def make_begin_rows(
    d: int,
    width: int,
    value_tiles: int,
    options: Int8Options,
    turing: bool,
    count: int,
    pv: str = "int8",
) -> Any:
    """begin_rows(sums: Sums, mine, block: Block, sizes, sources, given: OptionData, lane).

    m, l and O of the thread's two rows after the first keys.

    `mine` is the first row's place in the table, `sizes` = (key heads, bytes of a query), `sources`
    = (q, first keys, their scales, first values at the first of `o`'s channels). Padded head size
    `d`, `width` channels of the values; the first `count` keys count, the blocks have the rest. The
    sums' unit is that of `pv`'s weights.
    """
    steps = d // 32
    product = ptx.mma_turing_s8 if turing else ptx.mma_s8
    band, finish = options.band, make_finish_score(options, turing)
    add_values = make_first_values(0, value_tiles, width)
    unit = f32(fx.WEIGHT_ONE[pv] / fx.FIRST_ONE)

    @device_function
    def multiply(s, at, exists, first, rest, lane):
        """s = Q . K^T of the planes; `rest` bytes of a query."""
        a, b = cuda.local.array(4, u32), cuda.local.array(2, u32)
        for i in range(4):
            s[i] = i32(0)
        for step in range(steps):
            for i in range(2):
                ahead = i32(step * 32 + 16 * i + 4 * (lane & 3))
                for r in range(2):
                    a[2 * i + r] = u32(0)
                    if exists[r] and ahead < rest:
                        a[2 * i + r] = u32(ptx.load_global_s32(at[r] + u64(ahead)))
                b[i] = u32(ptx.load_global_s32(first + u64((lane >> 2) * d + ahead)))
            product(s, 0, a, 0, b, 0)

    @device_function
    def begin_rows(sums, mine, block, sizes, sources, given, lane):
        (o, m, l), (kv_heads, rest) = sums, sizes
        batch, heads, queries = block.batch, block.heads, block.queries
        q, first, scales, values = sources
        four, s = cuda.local.array(4, u32), cuda.local.array(4, i32)
        w = cuda.local.array(N_WEIGHTS, f32)
        query, head, exists = (
            cuda.local.array(2, i32),
            cuda.local.array(2, i32),
            cuda.local.array(2, types.boolean),
        )
        slope, cq, shift = (
            cuda.local.array(2, f32),
            cuda.local.array(2, f32),
            cuda.local.array(2, f32),
        )
        at = cuda.local.array(2, u64)
        for r in range(2):
            ptx.load_shared_v4(four, 0, mine + u32(128 * r))
            cq[r], shift[r] = ptx.from_bits(four[2]), ptx.from_bits(four[3])
            ptx.load_shared_v4(four, 0, mine + u32(PART + 128 * r))
            query[r], head[r], slope[r] = i32(four[0]), i32(four[1]), ptx.from_bits(four[2])
            exists[r] = query[r] < queries
            number = u64(u32(i32(i32(batch * heads + head[r]) * queries + query[r])))
            at[r] = q + number * u64(rest)
        kv = i32(batch * kv_heads + block.kv_head)
        multiply(s, at, exists, first + u64(kv * (PLANES * d)), rest, lane)
        pair = i32(2 * (lane & 1))  # the thread's keys
        for r in range(2):
            top, total = i32(MASKED_SCORE), i32(0)
            low, high = i32(0), i32(block.keys)
            if band:
                low = i32(query[r] + block.diagonal - block.left)
                high = i32(min(block.keys, query[r] + block.diagonal + block.right + 1))
            if count < FIRST_KEYS:
                high = i32(min(high, count))
            for e in range(2):
                mine_s = s[2 * r + e]
                other = ptx.shuffle_xor_i32(mine_s, u32(2))
                if lane & 2:
                    mine_s, other = other, mine_s
                j = i32(pair + e)
                scale = ptx.load_global_f32(scales + u64((kv * FIRST_KEYS + j) * 4))
                x = ptx.mul(ptx.mul(ptx.to_float(i32(mine_s * FINER + other)), scale), cq[r])
                seen = exists[r] & (j >= low) & (j < high)
                row = query[r], head[r], slope[r], shift[r]
                t = rounded(finish(x, seen, j, row, block, given))
                s[2 * r + e] = t
                top = ptx.imax(top, t)
            top = quad_imax(top)
            m[r] = octave_of(top)
            for e in range(2):
                weight = i32(weight_p16(s[2 * r + e], m[r]) >> u32(4))
                total = i32(total + weight)
                mine_w = ptx.mul(ptx.to_float(weight), unit)
                other_w = ptx.shuffle_xor(mine_w, u32(1))
                odd = (lane & 1) != 0
                w[FIRST_KEYS * r + e] = other_w if odd else mine_w
                w[FIRST_KEYS * r + 2 + e] = mine_w if odd else other_w
            total = i32(total + ptx.shuffle_xor_i32(total, u32(1)))
            sum_of_row = ptx.mul(ptx.to_float(total), unit)
            l[r] = f32(np.nan) if top == SPOILED else sum_of_row
        values = values + u64((kv * (FIRST_KEYS * width) + 2 * (lane & 3)) * 4)
        add_values(o, w, values)

    return begin_rows
