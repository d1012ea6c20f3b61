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

from typing import Any

import numpy as np

from ...numerics.fixedpoint import FIRST_KEYS
from ...tiling import KEY_BLOCK
from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .blocks import make_find_block, make_tile_range
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
    make_add_weights,
    make_find_shares,
    make_log2_scores,
    make_sum_weights,
)
from .int8_values import FLOAT_KEYS, PADDING, Values, make_byte_values, make_float_values
from .int8_weights import PLANES, make_weigh
from .tiles import make_copy, make_load_rows, make_load_tile, make_waits, swizzle_of

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
    block_k, threads, paired = KEY_BLOCK, block_q * 2 * halves, halves - 1
    own_keys, own_channels = block_k // halves, dv // halves
    k_steps = d // 32
    key_tiles = block_k // 8
    own_tiles = own_keys // 8
    value_tiles = own_channels // 8
    n_s, n_o, n_p = own_tiles * 4, value_tiles * 4, 4 if wide else planes * key_tiles
    shift_k, xor_k = swizzle_of(d)
    # registers, whose contents cross through K's place
    own_weights = own_tiles * (4 if wide else planes)
    q_size, k_size = block_q * d, max(block_k * d, paired * threads * 4 * own_weights)
    v_size = FLOAT_KEYS * (dv * 4 + PADDING) if wide else dv * block_k
    v_at = q_size if turing else q_size + k_size
    scales_at = q_size + max(k_size, v_size) if turing else q_size + k_size + v_size
    table_at = scales_at + block_k * 4
    load_q = make_load_rows(block_q, d, threads, group, not turing)
    load_k = make_load_tile(block_k, d, threads, not turing)
    load_v = make_load_tile(dv, block_k, threads, not turing)
    copy, (commit, wait_all, _) = make_copy(not turing), make_waits(not turing)
    product = ptx.mma_turing_s8 if turing else ptx.mma_s8
    log2_scores = make_log2_scores(own_tiles, chosen, turing)
    weigh, find_shares = make_weigh(own_tiles, pv, turing), make_find_shares(pv)
    sum_weights, add_weights = make_sum_weights(n_s if wide else n_p, pv), make_add_weights(pv)
    give, take, sum_given = make_give(own_weights), make_take(n_p), make_sum_given(2 * n_s)
    describe_rows = make_describe_rows(group, chosen, 0 if wide else first_keys)
    begin_rows = make_begin_rows(d, dv, value_tiles, chosen, turing, first_keys, pv)
    write_rows = make_write_rows(value_tiles)
    band = chosen.band
    tile_range, find_block = (
        make_tile_range(block_q, block_k, group, band),
        make_find_block(block_q, band, folded),
    )
    add_bytes = make_byte_values(value_tiles, planes, turing)
    add_floats = make_float_values(dv, value_tiles, threads, bool(paired))

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def flash(pointers, strides, sizes, factors):
        (
            q, k, v, out, m_out, l_out, cq_at, ck, v_scale, diagonals, lengths, mask_at, bias_at,
            slopes, shifts, first_k, first_scale, first_v,
        ) = pointers  # fmt: skip
        queries, key_count, d_left, stored, channels, heads, left, right = sizes
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        # cast to i32 each time: an int64 takes two registers
        lane = i32(thread & 31)
        warp = i32(thread >> 5)
        # which 16 rows; which keys of a block, and channels
        rows_of = i32(warp >> paired)
        half = i32(warp & paired)
        rows = i32(queries * group)
        first, kv_head, batch = find_block(rows)
        kv = i32(batch * i32(heads // group) + kv_head)
        sq = ptx.shared_address(shared)
        sk, sv, sc = sq + u32(q_size), sq + u32(v_at), sq + u32(scales_at)
        all_q = q
        q = q + u64(batch * heads + kv_head * group) * u64(queries * d_left)

        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles, _, _ = tile_range(first, rows, keys, diagonal, left, right)
        block = Block(batch, kv_head, heads, queries, keys, diagonal, left, right)
        given = OptionData(factors[0], mask_at, bias_at, strides)
        top, m, total = cuda.local.array(2, i32), cuda.local.array(2, i32), cuda.local.array(2, i32)
        l = cuda.local.array(2, f32)
        alpha = cuda.local.array(2, f32)
        share = cuda.local.array(2, f32)
        for r in range(2):
            l[r], m[r] = f32(0), i32(MIN_OCTAVE)
        tables = sq + u32(table_at) + u32((lane >> 2) * 16)
        table = tables + u32(warp * (16 * ROW_BYTES))
        beside = tables + u32((warp ^ 1) * (16 * ROW_BYTES))
        describe_rows(
            sq + u32(table_at + warp * (16 * ROW_BYTES)),
            i32(first + rows_of * 16),
            i32(kv_head * group),
            block,
            (cq_at, slopes, shifts),
            lane,
        )

        load_q(sq, q, i64(queries * d_left), i64(d_left), first, rows, d_left, thread)
        s, o, p = cuda.local.array(n_s, i32), cuda.local.array(n_o, f32), cuda.local.array(n_p, u32)
        a, b = cuda.local.array(4, u32), cuda.local.array(4, u32)
        if wide:
            for i in range(n_o):
                o[i] = f32(0)
        else:
            sources = all_q, first_k, first_scale, first_v + u64(half * own_channels * 4)
            first_sizes = i32(heads // group), d_left
            begin_rows(Sums(o, m, l), table, block, first_sizes, sources, given, lane)
        q_row = i32(rows_of * 16 + (lane & 15))
        q_at, q_chunk = sq + u32(q_row * d), u32((lane >> 4) ^ ((q_row >> shift_k) & xor_k))
        k_row = i32(half * own_keys + ((lane >> 4) << 3) + (lane & 7))
        k_at, k_chunk = sk + u32(k_row * d), u32(((lane >> 3) & 1) ^ ((k_row >> shift_k) & xor_k))
        loader = cuda.local.array(2, i32)  # this thread's number; the heads
        loader[0], loader[1] = thread, kv
        # without a band the end is the number of keys, which is a register anyway
        start, stop = i32(tile * block_k), i32(tiles * block_k) if band else keys
        while start < stop:
            renew_both(loader, 0)
            heads_before = u64(loader[1])
            v_of_heads = v + heads_before * (
                u64(key_count) * u64(channels * 4) if wide else u64(channels * stored)
            )
            load_k(
                sk,
                k + (heads_before * u64(key_count) + u64(start)) * u64(d_left),
                i64(d_left),
                i32(keys - start),
                d_left,
                loader[0],
            )
            if not turing and not wide:
                load_v(
                    sv,
                    v_of_heads + u64(start),
                    i64(stored),
                    channels,
                    i32(stored - start),
                    loader[0],
                )
            if loader[0] < block_k // 4:
                copy(
                    sc + u32(loader[0] * 16),
                    0,
                    ck + (heads_before * u64(stored) + u64(start + 4 * loader[0])) * u64(4),
                    True,
                )
            commit()
            wait_all()
            cuda.syncthreads()

            # S = Q . K^T, exact
            for i in range(n_s):
                s[i] = i32(0)
            for step in range(k_steps):
                ptx.ldmatrix(a, 0, q_at + ((q_chunk ^ u32(2 * step)) << u32(4)))
                for n in range(own_tiles // 2):
                    ptx.ldmatrix(
                        b, 0, k_at + u32(n * 16 * d) + ((k_chunk ^ u32(2 * step)) << u32(4))
                    )
                    product(s, 8 * n, a, 0, b, 0)
                    product(s, 8 * n + 4, a, 0, b, 2)
            if turing and not paired:  # K's tile is done with: V comes in its place
                cuda.syncthreads()
                load_v(
                    sv, v_of_heads + u64(start), i64(stored), channels, i32(stored - start), thread
                )

            ahead = i32(half * own_keys + 2 * (lane & 3))  # the thread's first key in the block
            first_key = i32(start + ahead)
            log2_scores(s, top, table, first_key, sc + u32(4 * ahead), block, given)
            if paired:
                join_maxima(top, table, beside, lane)
            weigh(s, p, top)
            crossed = sk
            if paired:
                crossed = give(s if wide else p, sk, thread)
                if not wide:
                    take(p, crossed)
                if turing:
                    cuda.syncthreads()
                    load_v(
                        sv,
                        v_of_heads + u64(start),
                        i64(stored),
                        channels,
                        i32(stored - start),
                        thread,
                    )
            find_shares(top, m, alpha, share)
            if wide and paired:
                sum_given(crossed, total)
            else:
                sum_weights(s if wide else p, total)
            add_weights(total, top, l, alpha, share)
            if turing:
                cuda.syncthreads()
            if wide:
                values = Values(v_of_heads, keys, channels)
                begin = i32(half * own_channels)
                add_floats(o, (s, crossed), (alpha, share), sv, values, start, begin, thread)
            else:
                own_at = sv + u32(half * (own_channels * block_k))
                rest = i32(channels - half * own_channels)
                add_bytes(o, p, (alpha, share), own_at, rest, lane)
            cuda.syncthreads()
            start = i32(start + block_k)

        outputs = Outputs(
            batch,
            kv_head,
            queries,
            heads,
            i32(heads // group),
            channels,
            out,
            m_out,
            l_out,
            v_scale,
        )
        write_rows(Sums(o, m, l), table, outputs, i32(half * own_channels), lane)

    return Source(flash, SIGNATURE, threads, table_at + halves * block_q * ROW_BYTES)
