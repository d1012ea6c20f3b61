"""INT8 attention on tensor cores.

The integer pipeline, with the bits of the CPU kernels and of the integer model.

Scores are m16n8k32 products of signed bytes (four m8n8k16 on sm_75); softmax weights are rounded to
unsigned bytes once per row and key block of 128 (`tiling.KEY_BLOCK`, the same on every device) and
multiply signed values in a second integer product. The step between the two is `int8_softmax`.

The accumulator of the first product is the A operand of the second if keys are taken in another
order: lane quad q of 8-key tiles 2 t and 2 t + 1 holds keys 2 q, 2 q + 1 of both, while the operand
needs four consecutive keys per lane. So the values are stored transposed (channels x keys) with the
keys of each 32 permuted accordingly (`permuted_keys`); integer sums do not mind.

With pv "int16" weights of 15 bits are two planes of unsigned bytes, each with a product of its own: 256
times the first and the second are added in int32.

With pv "fp32" the weights stay in Q16.16 and the values in float32: m16n8k8 products of TF32, each
operand split into a high and a low part, of which the low times low is left out (2**-20 of the
whole at most). There the values are stored as given, and the quad's two keys are the two halves of
k.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ...numerics.fixedpoint import FIRST_KEYS
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_find_block, make_tile_range
from .int8_first import make_begin_rows
from .int8_pairs import join_maxima, make_give, make_sum_given, make_take
from .int8_rows import (
    ROW_BYTES,
    Block,
    Int8Options,
    OptionData,
    Outputs,
    Sums,
    make_describe_rows,
    make_write_rows,
)
from .int8_softmax import (
    MIN_OCTAVE,
    Rows,
    make_add_weights,
    make_find_shares,
    make_log2_scores,
    make_sum_weights,
)
from .int8_tiles import Layout, make_bring, make_find_lane, make_memory_at, make_multiply_keys
from .int8_values import Values, make_byte_values, make_float_values
from .int8_weights import PLANES, make_weigh
from .tiles import make_load_rows, make_waits

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
# what depends on the numbers is computed anew after these: kept for every tile, it would spill
renew_both = ptx.register_fence(2, i32)
# pointers: q, k, v (transposed; with pv "fp32" rows of keys), out, m, l, cq, ck (padded to whole
# blocks), value scale, diagonal, key_lengths, mask, bias, slopes, shift, and of the first keys:
# planes (8 x d), scales, values (4 x dv)
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, keys, bytes per row of q and k, keys stored (of v and ck), channels of v and out
# (a multiple of 4), query heads, left, right
# factors: softcap in Q8.8
SIGNATURE = types.void(
    types.UniTuple(u64, 18), types.UniTuple(i64, 8), types.UniTuple(i32, 8), types.UniTuple(f32, 1)
)


class Fragments(NamedTuple):
    """A thread's registers: local arrays."""

    s: Any  # scores, then with pv "fp32" the weights
    o: Any  # sums of the outputs
    p: Any  # weights, four bytes each


class Part(NamedTuple):
    """What of a block's work is a thread's."""

    thread: Any
    lane: Any
    warp: Any
    rows: Any  # which 16
    half: Any  # of a pair of warps, which keys of a block, and channels
    table: Any  # where its first row is described (`int8_rows`)
    beside: Any  # and that of the pair's other warp


def permuted_keys(keys: int) -> np.ndarray:
    """Key number at each place of the transposed values, for a multiple of 32 keys."""
    place = np.arange(32)
    half, quad, e = place >> 4, (place & 15) >> 2, place & 3
    key = 16 * half + 8 * (e >> 1) + 2 * quad + (e & 1)
    return (np.arange(0, keys, 32)[:, None] + key).reshape(-1)


def flash_int8(
    d: int,
    dv: int,
    block_q: int,
    group: int = 1,
    pv: str = "int8",
    turing: bool = False,
    halves: int = 1,
    first_keys: int = FIRST_KEYS,
    folded: bool = False,
    **options: Any,
) -> Source:
    """The kernel for padded head sizes d and dv.

    d : 64, 128 or 256, whole swizzles;  dv : a multiple of 8, or of 16 with two halves

    pv : "int8", "int16" or "fp32" (sm_80 or later);  turing : sm_75, where copies are not asynchronous
        and V takes K's place;  halves : warps that share 16 rows, 1 or 2 (`int8_pairs`)

    first_keys : `Problem.first_keys`;  options : those of `Int8Options`
    """
    chosen, wide, planes = Int8Options(**options), pv == "fp32", PLANES[pv]
    layout, paired, band = Layout(d, dv, block_q, pv, turing, halves), halves - 1, chosen.band
    block_k, threads = KEY_BLOCK, layout.threads
    own_keys, own_channels = block_k // halves, dv // halves
    own_tiles, value_tiles = own_keys // 8, own_channels // 8
    n_s, n_o, n_p = own_tiles * 4, value_tiles * 4, 4 if wide else planes * block_k // 8
    tile_range, find_block = (
        make_tile_range(block_q, block_k, group, band),
        make_find_block(block_q, band, folded),
    )
    memory_at, find_lane = make_memory_at(layout), make_find_lane(d, own_keys)
    load_q, (commit, wait_all, _) = (
        make_load_rows(block_q, d, threads, group, not turing),
        make_waits(not turing),
    )
    values_of, bring_values, bring = make_bring(layout)
    describe_rows = make_describe_rows(group, chosen, 0 if wide else first_keys)
    begin_rows = make_begin_rows(d, dv, value_tiles, chosen, turing, first_keys, pv)
    multiply_keys = make_multiply_keys(d, own_tiles, turing)
    log2_scores = make_log2_scores(own_tiles, chosen, turing)
    weigh, find_shares = make_weigh(own_tiles, pv, turing), make_find_shares(pv)
    give, take, sum_given = (
        make_give(layout.own_weights),
        make_take(n_p),
        make_sum_given(2 * n_s),
    )
    sum_weights, add_weights = make_sum_weights(n_s if wide else n_p, pv), make_add_weights(pv)
    add_bytes = make_byte_values(value_tiles, planes, turing)
    add_floats = make_float_values(dv, value_tiles, threads, bool(paired))
    write_rows = make_write_rows(value_tiles)

    @device_function
    def find_rows(call):
        """The first of this block's rows, and what they belong to."""
        queries, _, _, _, _, heads, left, right = call.sizes
        diagonals, lengths = call.pointers[9:11]
        first, kv_head, batch = find_block(i32(queries * group))
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        return first, Block(batch, kv_head, heads, queries, keys, diagonal, left, right)

    @device_function
    def find_part(memory):
        """What of the block is this thread's."""
        thread = i32(cuda.threadIdx.x)
        # cast to i32 each time: an int64 takes two registers
        lane, warp = i32(thread & 31), i32(thread >> 5)
        tables = memory.table + u32((lane >> 2) * 16)
        table = tables + u32(warp * (16 * ROW_BYTES))
        beside = tables + u32((warp ^ 1) * (16 * ROW_BYTES))
        return Part(thread, lane, warp, i32(warp >> paired), i32(warp & paired), table, beside)

    @device_function
    def load_queries(call, block, first, memory, part):
        """Copies the block's rows of Q, and describes the warp's own to `log2_scores`."""
        queries, _, d_left = call.sizes[:3]
        cq, slopes, shifts = call.pointers[6], call.pointers[13], call.pointers[14]
        describe_rows(
            memory.table + u32(part.warp * (16 * ROW_BYTES)),
            i32(first + part.rows * 16),
            i32(block.kv_head * group),
            block,
            (cq, slopes, shifts),
            part.lane,
        )
        head = u64(block.batch * block.heads + block.kv_head * group)
        q = call.pointers[0] + head * u64(queries * d_left)
        total = i32(queries * group)
        load_q(memory.q, q, i64(queries * d_left), i64(d_left), first, total, d_left, part.thread)

    @device_function
    def begin(call, block, given, f, rows, part):
        """m, l and O before the blocks: after the first keys (`int8_first`), or after none."""
        for r in range(2):
            rows.l[r], rows.m[r] = f32(0), i32(MIN_OCTAVE)
        if wide:
            for i in range(n_o):
                f.o[i] = f32(0)
        else:
            first_k, first_scale, first_v = call.pointers[15:]
            own_v = first_v + u64(part.half * own_channels * 4)
            sources = call.pointers[0], first_k, first_scale, own_v
            sizes = i32(block.heads // group), call.sizes[2]
            begin_rows(
                Sums(f.o, rows.m, rows.l), part.table, block, sizes, sources, given, part.lane
            )

    @device_function
    def find_weights(f, rows, start, memory, block, given, part):
        """Weights of a block's scores, against the largest one of each row that any warp has."""
        ahead = i32(part.half * own_keys + 2 * (part.lane & 3))  # the thread's first key of them
        first_key, scales = i32(start + ahead), memory.scales + u32(4 * ahead)
        log2_scores(f.s, rows.top, part.table, first_key, scales, block, given)
        if paired:
            join_maxima(rows.top, part.table, part.beside, part.lane)
        weigh(f.s, f.p, rows.top)

    @device_function
    def exchange(f, at, thread):
        """The other warp's weights of a pair, through K's place at `at`; where those of both are."""
        both = at
        if paired:
            both = give(f.s if wide else f.p, at, thread)
            if not wide:
                take(f.p, both)
        return both

    @device_function
    def add_sums(f, rows, both):
        """l = l * alpha + the sum of P * share; `both` is what `exchange` returns."""
        find_shares(rows.top, rows.m, rows.alpha, rows.share)
        if wide and paired:
            sum_given(both, rows.total)
        else:
            sum_weights(f.s if wide else f.p, rows.total)
        add_weights(rows.total, rows.top, rows.l, rows.alpha, rows.share)

    @device_function
    def add_values(f, rows, both, values, start, memory, block, channels, part):
        """O = O * alpha + (P . V) * share for the warp's channels; `values` as for `bring_values`."""
        factors, begin = (rows.alpha, rows.share), i32(part.half * own_channels)
        if wide:
            source = Values(values, block.keys, channels)
            add_floats(f.o, (f.s, both), factors, memory.v, source, start, begin, part.thread)
        else:
            own_at = memory.v + u32(part.half * (own_channels * block_k))
            add_bytes(f.o, f.p, factors, own_at, i32(channels - begin), part.lane)

    @device_function
    def write(call, block, f, rows, part):
        """out, m and l of the thread's rows."""
        out, m, l = call.pointers[3:6]
        batch, kv_head, heads, queries = block.batch, block.kv_head, block.heads, block.queries
        kv_heads, channels, scales = i32(heads // group), call.sizes[4], call.pointers[8]
        outputs = Outputs(batch, kv_head, queries, heads, kv_heads, channels, out, m, l, scales)
        sums, begin = Sums(f.o, rows.m, rows.l), i32(part.half * own_channels)
        write_rows(sums, part.table, outputs, begin, part.lane)

    def flash(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        shared = cuda.shared.array(0, u32)
        memory = memory_at(ptx.shared_address(shared))
        part = find_part(memory)
        first, block = find_rows(call)
        keys, total = block.keys, i32(block.queries * group)
        kv = i32(block.batch * i32(block.heads // group) + block.kv_head)
        tile, tiles, _, _ = tile_range(first, total, keys, block.diagonal, block.left, block.right)
        given = OptionData(factors[0], pointers[11], pointers[12], strides)
        m, l = cuda.local.array(2, i32), cuda.local.array(2, f32)
        top, weights = cuda.local.array(2, i32), cuda.local.array(2, i32)
        alpha, share = cuda.local.array(2, f32), cuda.local.array(2, f32)
        rows = Rows(m, l, top, weights, alpha, share)
        f = Fragments(
            cuda.local.array(n_s, i32), cuda.local.array(n_o, f32), cuda.local.array(n_p, u32)
        )

        load_queries(call, block, first, memory, part)
        begin(call, block, given, f, rows, part)
        at = find_lane(memory, part.lane, part.rows, part.half)
        loader = cuda.local.array(2, i32)  # this thread's number; the key heads before this one
        loader[0], loader[1] = part.thread, kv
        # without a band the end is the number of keys, which is a register anyway
        start, stop = i32(tile * block_k), i32(tiles * block_k) if band else keys
        while start < stop:
            renew_both(loader, 0)
            before = u64(loader[1])
            values = values_of(call, before)
            bring(memory, call, before, values, start, keys, loader[0])
            commit()
            wait_all()
            cuda.syncthreads()

            multiply_keys(f.s, at)
            if turing and not paired:  # K's tile is done with: V comes in its place
                cuda.syncthreads()
                bring_values(memory, call, values, start, part.thread)
            find_weights(f, rows, start, memory, block, given, part)
            both = exchange(f, memory.k, part.thread)
            if turing and paired:  # K's place is done with only now
                cuda.syncthreads()
                bring_values(memory, call, values, start, part.thread)
            add_sums(f, rows, both)
            if turing:
                cuda.syncthreads()
            add_values(f, rows, both, values, start, memory, block, sizes[4], part)
            cuda.syncthreads()
            start = i32(start + block_k)

        write(call, block, f, rows, part)

    return Source(flash, SIGNATURE, threads, layout.shared_bytes)
