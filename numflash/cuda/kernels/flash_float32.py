"""float32 forward for correctness, not for speed.

A warp per query row, no tensor cores, every option.

A lane holds the columns c with c % 32 = lane. Keys that a row does not attend to are never read, so
their values cannot matter.
"""

from __future__ import annotations

from ...tiling import tiling
from ..compile import Source
from ..compile.target import cuda, types
from ..instructions import ptx
from .blocks import make_find_block
from .score_functions import BATCHES, known, make_root, pointers_of
from .scores import LN2, LOG2E, add_bias, join_sink, tanh_accurate
from .softmax import NEG_INF, warp_sum

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
WARPS = tiling("sm_80", "float32").block_q
OWN = 11  # pointers before those of the functions

# pointers: q, k, v, o, lse, diagonal, key_lengths, mask, bias, slopes, sinks, then the functions'
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, keys, d, dv, query heads, left, right
# factors: scale * log2(e), softcap * log2(e)
SIGNATURE = types.void(
    types.UniTuple(u64, OWN), types.UniTuple(i64, 8), types.UniTuple(i32, 7), types.UniTuple(f32, 2)
)


def flash_float32(
    d: int,
    dv: int,
    group: int = 1,
    mask: bool = False,
    bias: bool = False,
    softcap: bool = False,
    alibi: bool = False,
    sinks: bool = False,
    functions: str = "",
    folded: bool = False,
) -> Source:
    """The kernel for head sizes up to d and dv, multiples of 32; options as for `flash_float`."""
    changes, masks, hidden = known(functions).changes, known(functions).masks, bool(functions)
    new_score = make_root(OWN, functions, "score")
    lets_pass = make_root(OWN, functions, "mask")
    d_parts, dv_parts, find_block = d // 32, dv // 32, make_find_block(WARPS, folded=folded)

    # One long function: its steps share some twenty fragments, addresses and sizes, which functions of
    # their own would all take as arguments.
    def flash(pointers, strides, sizes, factors):
        q, k, v, o_out, lse_out, diagonals, lengths, mask_at, bias_at, slopes, sinks_at = pointers[
            :OWN
        ]
        queries, key_count, d_left, dv_left, heads, left, right = sizes
        scale, cap = factors
        lane, warp = i32(cuda.threadIdx.x) & 31, i32(cuda.threadIdx.x) >> 5
        first, head, batch = find_block(queries)
        row = first + warp
        if row < queries:
            at = u64((batch * heads + head) * queries + row)
            kv = u64((batch * (heads // group) + head // group) * key_count)
            q_row, o = cuda.local.array(d_parts, f32), cuda.local.array(dv_parts, f32)
            for i in range(d_parts):
                c = lane + 32 * i
                q_row[i] = (
                    ptx.load_global_f32(q + (at * u64(d_left) + u64(c)) * u64(4))
                    if c < d_left
                    else f32(0)
                )
            for i in range(dv_parts):
                o[i] = f32(0)
            place = row + ptx.load_global_s32(diagonals + u64(batch * 4))
            keys = ptx.load_global_s32(lengths + u64(batch * 4))
            slope = f32(0)
            if alibi:
                slope = ptx.load_global_f32(slopes + u64((batch * heads + head) * 4)) * LOG2E
            entry = batch
            if changes or masks:
                entry = ptx.load_global_s32(pointers[OWN + BATCHES] + u64(batch * 4))
            m, l = NEG_INF, f32(0)
            for j in range(max(place - left, 0), min(keys, place + right + 1)):
                seen = True
                if mask:
                    seen = ptx.load_global_u8(
                        mask_at
                        + u64(
                            batch * strides[0]
                            + head * strides[1]
                            + row * strides[2]
                            + j * strides[3]
                        )
                    ) != u32(0)
                if masks and seen:
                    seen = lets_pass(f32(0), entry, head, row, i32(j), pointers)
                added = f32(0)
                if bias:
                    added = ptx.load_global_f32(
                        bias_at
                        + u64(
                            batch * strides[4]
                            + head * strides[5]
                            + row * strides[6]
                            + j * strides[7]
                        )
                    )
                    seen = seen and added != NEG_INF
                if seen:
                    s = f32(0)
                    for i in range(d_parts):
                        c = lane + 32 * i
                        if c < d_left:
                            s = ptx.fma(
                                q_row[i],
                                ptx.load_global_f32(
                                    k + ((kv + u64(j)) * u64(d_left) + u64(c)) * u64(4)
                                ),
                                s,
                            )
                    s = warp_sum(s) * scale
                    if changes:
                        s = new_score(s * LN2, entry, head, row, i32(j), pointers) * LOG2E
                    if softcap:
                        capped = cap * tanh_accurate(ptx.div(s, cap))
                        s = NEG_INF if hidden and s == NEG_INF else capped  # as `make_adjust`
                    if alibi:
                        s -= slope * f32(abs(place - j))
                    if bias:
                        s = add_bias(s, added)
                    top = ptx.fmax(m, s)
                    safe = f32(0) if top == NEG_INF else top
                    alpha, p = ptx.ex2(m - safe), ptx.ex2(s - safe)
                    l = l * alpha + p
                    for i in range(dv_parts):
                        c = lane + 32 * i
                        if c < dv_left:
                            x = ptx.load_global_f32(
                                v + ((kv + u64(j)) * u64(dv_left) + u64(c)) * u64(4)
                            )
                            o[i] = ptx.fma(p, x, o[i] * alpha)
                    m = top
            share = f32(1)
            if sinks:
                m, l, share = join_sink(m, l, ptx.load_global_f32(sinks_at + u64(head * 4)) * LOG2E)
            share = f32(0) if l == f32(0) else share * ptx.rcp(l)
            for i in range(dv_parts):
                c = lane + 32 * i
                if c < dv_left:
                    ptx.store_global_f32(
                        o_out + (at * u64(dv_left) + u64(c)) * u64(4), o[i] * share
                    )
            if lane == 0:
                ptx.store_global_f32(
                    lse_out + at * u64(4), NEG_INF if l == f32(0) else (m + ptx.lg2(l)) * LN2
                )

    own = types.void(pointers_of(OWN, functions), *SIGNATURE.args[1:])
    return Source(flash, own, 32 * WARPS)
