"""Several blocks share the keys of a tile of rows: where few rows see many keys, one block for each
tile would leave most of a card idle.

Each part gives an output and an LSE in float32, as attention to its keys alone would. `merge_parts`
puts them together: O = sum_i exp(LSE_i - LSE) O_i with LSE = log(sum_i exp(LSE_i)), which is
Flash-Decoding (Dao et al. 2023). Sinks join the first part.
"""

from __future__ import annotations

import functools
from typing import Any

from ...tiling import CUDA_PARTS
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import make_find_block
from .scores import LN2, LOG2E
from .softmax import NEG_INF, warp_max, warp_sum

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
WARPS = 8  # of a block that merges; each takes every eighth part
TURNS = CUDA_PARTS // WARPS
# pointers: outputs (row, parts, dv) and LSE (row, parts) of all parts, float32; out, lse (row)
# strides in bytes: batch, head, row of out
# sizes: query heads, queries, parts, dv
SIGNATURE = types.void(types.UniTuple(u64, 4), types.UniTuple(i64, 3), types.UniTuple(i32, 4))


@functools.cache
def make_find_part(rows: int, split: bool, last_first: bool, folded: bool) -> Any:
    """find_part(total, parts): this block's first row of `total`, head, batch entry and part of the
    keys.

    Parts of a tile of rows are neighbouring blocks. Not `split`: `make_find_block`, and part 0.
    """
    find_block = make_find_block(rows, last_first, folded)

    @device_function
    def all_keys(total, parts):
        first, head, batch = find_block(total)
        return first, head, batch, i32(0)

    @device_function
    def some_keys(total, parts):
        tile = ptx.udiv(u32(cuda.blockIdx.x), u32(parts))
        part = u32(u32(cuda.blockIdx.x) - tile * u32(parts))
        return i32(tile * u32(rows)), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z), i32(part)

    return some_keys if split else all_keys


@functools.cache
def make_share(split: bool) -> Any:
    """share(tile, tiles, part, parts): of the tiles of keys [tile, tiles) those of a part."""

    @device_function
    def all_keys(tile, tiles, part, parts):
        return tile, tiles

    @device_function
    def some_keys(tile, tiles, part, parts):
        count = u32(max(i32(tiles - tile), i32(0)))
        begin = ptx.udiv(u32(count * u32(part)), u32(parts))
        end = ptx.udiv(u32(count * u32(part + 1)), u32(parts))
        return i32(u32(tile) + begin), i32(u32(tile) + end)

    return some_keys if split else all_keys


@functools.cache
def make_store_part(value_tiles: int) -> Any:
    """store_part(o, share, to, steps, query, head, queries, columns, lane): a thread's two rows of a
    part's output.

    o : accumulators, times `share` of each row;  to : where the part of the first row of the first
        head lies;  steps : bytes from head to head and from query to query
    """

    @device_function
    def store_part(o, share, to, steps, query, head, queries, columns, lane):
        pair = cuda.local.array(2, u32)
        for r in range(2):
            at = to + u64(head[r]) * u64(steps[0]) + u64(query[r]) * u64(steps[1])
            for n in range(value_tiles):
                column = i32(8 * n + 2 * (lane & 3))
                if query[r] < queries and column < columns:
                    for e in range(2):
                        pair[e] = ptx.bits(o[4 * n + 2 * r + e] * share[r])
                    ptx.store_global_v2(at + u64(4 * column), pair, 0)

    return store_part


@device_function
def find_shares(share, lse_at, parts, lane):
    """share[n]: of part lane + 32 n in the merged output. Returns the merged LSE."""
    for n in range(2):
        share[n] = NEG_INF
        if lane + 32 * n < parts:
            share[n] = ptx.load_global_f32(lse_at + u64(4 * (lane + 32 * n)))
    top = warp_max(ptx.fmax(share[0], share[1]))
    safe = f32(0) if top == NEG_INF else top
    for n in range(2):
        share[n] = ptx.ex2((share[n] - safe) * LOG2E)
    total = warp_sum(share[0] + share[1])
    factor = f32(0) if total == f32(0) else ptx.rcp(total)
    for n in range(2):
        share[n] *= factor
    return safe + ptx.lg2(total) * LN2


def merge_parts(dv: int, dtype: str, turing: bool = False) -> Source:
    """The kernel that merges the parts of each row, for padded value sizes up to dv.

    A block for each row. Its warps sum every eighth part, a lane two channels of each 64, and leave
    their sums in shared memory; all loads of a warp are under way together.
    """
    pairs = (dv + 63) // 64
    n_sums, n_words = 2 * pairs, TURNS * 2 * pairs
    pack = ptx.pack_turing if turing else ptx.pack[dtype]  # sm_75 packs no two at once

    def merge(pointers, strides, sizes):
        o_parts, lse_parts, out, lse_out = pointers
        heads, queries, parts, columns = sizes
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        query, head, batch = i32(cuda.blockIdx.x), i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        sums_at = ptx.shared_address(cuda.shared.array(0, u32))
        row = i32((batch * heads + head) * queries + query)
        share = cuda.local.array(2, f32)
        first = row * parts
        lse = find_shares(share, lse_parts + u64(first) * u64(4), parts, lane)
        if thread == 0:
            ptx.store_global_f32(lse_out + u64(row) * u64(4), lse)
        words, two = cuda.local.array(n_words, u32), cuda.local.array(2, u32)
        sums = cuda.local.array(n_sums, f32)
        for t in range(TURNS):
            if WARPS * t < parts:
                part = min(i32(warp + WARPS * t), i32(parts - 1))
                at = o_parts + u64(first + part) * u64(4 * columns)
                for n in range(pairs):
                    column = min(i32(2 * lane + 64 * n), i32(columns - 2))
                    ptx.load_global_v2(words, 2 * (pairs * t + n), at + u64(4 * column))
        for n in range(n_sums):
            sums[n] = f32(0)
        for t in range(TURNS):
            if WARPS * t < parts:
                part = i32(warp + WARPS * t)
                mine = ptx.shuffle(share[t * WARPS // 32], i32(part & 31))
                for n in range(n_sums):
                    if part < parts and mine != f32(0):  # without keys it may hold anything
                        sums[n] += mine * ptx.from_bits(words[n_sums * t + n])
        for n in range(pairs):
            column = i32(2 * lane + 64 * n)
            for e in range(2):
                two[e] = ptx.bits(sums[2 * n + e])
            if column < columns:
                ptx.store_shared_v2(sums_at + u32(4 * (warp * dv + column)), two, 0)
        cuda.syncthreads()
        if 2 * thread < columns:
            for e in range(2):
                sums[e] = f32(0)
                for w in range(WARPS):
                    sums[e] += ptx.load_shared_f32(sums_at + u32(4 * (w * dv + 2 * thread + e)))
            to = out + u64(batch * strides[0] + head * strides[1] + query * strides[2])
            ptx.store_global(to + u64(4 * thread), pack(sums[0], sums[1]))

    return Source(merge, SIGNATURE, 32 * WARPS, 4 * WARPS * dv)
