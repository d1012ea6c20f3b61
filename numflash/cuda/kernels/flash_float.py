"""FlashAttention-2 forward on tensor cores for float16 and bfloat16 (Dao 2023, algorithm 1), sm_75
to sm_120.

A warp owns 16 query rows. Its scores, weights and outputs are accumulators of m16n8k16 products,
and the accumulator of one product is laid out as the operand of the next, so the weights never
leave registers. Keys and values come by cp.async into two buffers; sm_75 has neither cp.async nor
k16 products and uses one buffer and two k8 products instead.

Heads that share keys are packed: row r of the problem is query r // group of head r % group of the
group. Where few rows see many keys, several blocks `split` the keys of a tile of rows; each writes
an output and an LSE of its part, which `merge_parts` puts together.

`launch_float.float_forward` launches it: q (B, H, L, D), k (B, Hkv, S, D), v (B, Hkv, S, Dv) and
out (B, H, L, Dv) in 16 bits, lse (B, H, L) float32; `SIGNATURE` says in which order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .blocks import Call, make_tile_range
from .key_parts import make_find_part, make_share, make_store_part
from .products import make_add, make_scores, make_stage
from .score_functions import known, make_apply, make_tile_list, pointers_of
from .scores import (
    LN2,
    LOG2E,
    Mask,
    Place,
    Rows,
    ScoreOptions,
    join_sink,
    load_slopes,
    make_adjust,
    make_hide,
)
from .softmax import NEG_INF, State, make_rescale, make_softmax, quad_sum
from .tiles import (
    left_row,
    make_first_chunk,
    make_load_rows,
    make_load_tile,
    make_store_rows,
    make_waits,
    right_row,
)

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
OWN = 10  # pointers before those of the functions

# pointers: q, k, v, o, lse, diagonal, key_lengths, mask, slopes, sinks, then the functions'
# strides in bytes: batch, head, row of q, k, v, o; then of the mask: batch, head, query, key
# sizes: queries, d, dv (bytes per row that exist), query heads, left, right, parts of the keys
# factors: scale * log2(e), softcap * log2(e), 2 / softcap
SIGNATURE = types.void(
    types.UniTuple(u64, OWN),
    types.UniTuple(i64, 16),
    types.UniTuple(i32, 7),
    types.UniTuple(f32, 3),
)


class Memory(NamedTuple):
    """Shared addresses: the tile of Q, the first buffers of K and V."""

    q: Any
    k: Any
    v: Any


class Operands(NamedTuple):
    """Keys and values of one batch entry and key head."""

    k: Any  # addresses
    v: Any
    k_step: Any  # bytes from row to row
    v_step: Any
    d_left: Any  # bytes of a row that exist
    dv_left: Any


class Lane(NamedTuple):
    """Where a lane reads its part of fragments with ldmatrix.

    A row's place in bytes and the place of its first chunk of 16; the column enters by XOR with an
    even chunk number, which leaves the lane's bit alone.
    """

    q: Any
    q_chunk: Any
    k: Any
    k_chunk: Any
    v: Any
    v_chunk: Any


def flash_float(
    d: int,
    dv: int,
    block_q: int,
    block_k: int,
    dtype: str = "float16",
    group: int = 1,
    turing: bool = False,
    folded: bool = False,
    split: bool = False,
    **options: Any,
) -> Source:
    """The kernel for padded head sizes d and dv.

    Parameters
    ----------
    block_q : query rows per block, 16 per warp;  block_k : keys per tile, a multiple of 16
    group : query heads per key head
    turing : sm_75;  folded : see `make_find_block`
    split : o (B, H, L, parts, dv) and lse (B, H, L, parts) are of parts of the keys, float32
    options : those of `ScoreOptions`
    """
    chosen = ScoreOptions(**options)
    band, mask, softcap, alibi, _, sinks, functions, listed = chosen
    code = known(functions)
    changes, masks = code.changes, code.masks
    threads = block_q * 2
    k_steps, key_tiles, value_tiles = d // 16, block_k // 8, dv // 8
    n_s, n_o, n_q = key_tiles * 4, value_tiles * 4, k_steps * 4
    d_bytes, dv_bytes = d * 2, dv * 2
    # Q's fragments stay in registers where there is room (the ladder's rung 7)
    keep_q = d < (96 if mask else 128)
    n_qf = n_q if keep_q else 4
    # no register is left: slopes are read again for every tile, fewer scores adjusted at a time
    wide = max(d, dv) > 128
    (q_chunk_of, k_chunk_of), (v_chunk_of, _) = (
        make_first_chunk(d_bytes),
        make_first_chunk(dv_bytes),
    )
    stages = 1 if turing else 2
    q_size, k_size, v_size = block_q * max(d_bytes, dv_bytes), block_k * d_bytes, block_k * dv_bytes
    scaled = chosen.transforms and not changes  # by `adjust`
    adjusted = scaled or softcap or alibi or bool(mask)
    part = 2 if wide else 4
    adjust = make_adjust(key_tiles, scaled, softcap, alibi, mask, part, bool(functions))
    transform = chosen.transforms or changes
    find_tiles, start_of, is_full, _ = make_tile_list(OWN, listed, block_k)
    change = make_apply(OWN, functions, "score", key_tiles)
    hide_by_mask = make_apply(OWN, functions, "mask", key_tiles)

    tile_range, find_part = (
        make_tile_range(block_q, block_k, group, band),
        make_find_part(block_q, split, band, folded),
    )
    share_of, store_part = make_share(split), make_store_part(value_tiles)
    load_q = make_load_rows(block_q, d_bytes, threads, group, not turing)
    load_k = make_load_tile(block_k, d_bytes, threads, not turing)
    load_v = make_load_tile(block_k, dv_bytes, threads, not turing)
    scores = make_scores(d, block_k, dtype, turing, keep_q)
    hide = make_hide(key_tiles)
    softmax = make_softmax(key_tiles)
    rescale = make_rescale(value_tiles)
    add_values = make_add(dv, block_k, dtype, turing)
    stage_rows = make_stage(dv, dtype, turing)
    store_o = make_store_rows(dv_bytes, group)
    commit, wait_all, _ = make_waits(not turing)

    @device_function
    def find_operands(call, batch, kv_head):
        k_batch, k_head, k_step, v_batch, v_head, v_step = call.strides[3:9]
        k = call.pointers[1] + u64(batch * k_batch + kv_head * k_head)
        v = call.pointers[2] + u64(batch * v_batch + kv_head * v_head)
        return Operands(k, v, k_step, v_step, call.sizes[1], call.sizes[2])

    @device_function
    def load_tile(memory, operands, stage, start, keys, thread):
        """Copy keys and values `start` to `start + block_k` into buffer `stage` of shared memory."""
        k, v, k_step, v_step, d_left, dv_left = operands
        k_tile, v_tile = k + u64(start) * u64(k_step), v + u64(start) * u64(v_step)
        load_k(memory.k + u32(stage * k_size), k_tile, k_step, keys - start, d_left, thread)
        load_v(memory.v + u32(stage * v_size), v_tile, v_step, keys - start, dv_left, thread)

    @device_function
    def load_first(memory, operands, listed_at, tile, tiles, keys, thread):
        """The first tile of keys, if there is one, and Q's rows have arrived; sm_75 loads no tile yet."""
        if not turing:
            if tile < tiles:
                start = start_of(listed_at, tile)
                load_tile(memory, operands, i32(0), start, keys, thread)
            commit()
            wait_all()
        cuda.syncthreads()

    @device_function
    def load_next(memory, operands, stage, listed_at, tile, tiles, keys, thread):
        """Waits until a tile has arrived, and begins to copy the next one; sm_75 copies the tile itself."""
        if turing:
            start = start_of(listed_at, tile)
            load_tile(memory, operands, i32(0), start, keys, thread)
            cuda.syncthreads()
        else:
            wait_all()
            # this tile has arrived; all warps have finished the previous one
            cuda.syncthreads()
            if tile + 1 < tiles:
                ahead = start_of(listed_at, tile + 1)
                load_tile(memory, operands, stage ^ 1, ahead, keys, thread)
            commit()

    @device_function
    def find_rows(rows, low, high, row, kv_head, place, sides):
        """Query, head and visible keys [low, high) of the two rows that this thread holds."""
        query, head, (left, right) = rows.query, rows.head, sides
        diagonal, keys = place.diagonal, place.keys
        for r in range(2):
            query[r] = i32((row + 8 * r) // group)
            head[r] = i32(kv_head * group + (row + 8 * r - query[r] * group))
            low[r], high[r] = i32(0), keys
            if band:
                low[r] = i32(query[r] + diagonal - left)
                high[r] = i32(min(keys, query[r] + diagonal + right + 1))

    @device_function
    def find_lane(sq, lane, warp):
        """Where this lane reads its warp's rows of Q, and rows of any tile of keys and values."""
        q_row = warp * 16 + left_row(lane)
        q_at = sq + u32(q_row * d_bytes)
        q_chunk = q_chunk_of(lane, q_row)
        k_row = right_row(lane)
        k_chunk = k_chunk_of(lane, k_row)
        v_row = left_row(lane)
        v_chunk = v_chunk_of(lane, v_row)
        return Lane(q_at, q_chunk, u32(k_row * d_bytes), k_chunk, u32(v_row * dv_bytes), v_chunk)

    @device_function
    def begin(o, qf, state, at):
        """The state before the first tile of keys; Q's fragments that are to stay in registers."""
        for r in range(2):
            state.m[r], state.l[r] = NEG_INF, f32(0)
        for i in range(n_o):
            o[i] = f32(0)
        if keep_q:
            for step in range(k_steps):
                ptx.ldmatrix(qf, step * 4, at.q + ((at.q_chunk ^ u32(2 * step)) << u32(4)))

    @device_function
    def apply_options(s, key, rows, place, slopes_at, listed_at, tile, call):
        """What the call's options make of a tile's scores; `key` is that of the thread's first one."""
        factors = call.factors
        if alibi and wide:
            load_slopes(rows.slope, call.pointers[8], slopes_at, rows.head)
        change(s, key, rows, place, factors[0] * LN2, call.pointers)
        if adjusted:
            adjust(s, key, rows, place, factors, Mask(call.pointers[7], call.strides[12:]))
        if masks and not is_full(listed_at, tile):
            hide_by_mask(s, key, rows, place, f32(1), call.pointers)

    @device_function
    def finish_rows(state, factor, rows, sinks_at, lse_at, first, queries, part, parts, lane):
        """alpha = 1 / l of each row, and its LSE to memory.

        A row without keys is 0, its LSE -inf (or the sink).
        """
        m, l, alpha = state
        query, head = rows.query, rows.head
        for r in range(2):
            total = quad_sum(l[r])
            top = NEG_INF if total == f32(0) else m[r] * factor
            scale = f32(1)
            if sinks and query[r] < queries and (not split or part == 0):
                sink = ptx.load_global_f32(sinks_at + u64(head[r] * 4)) * LOG2E
                top, total, scale = join_sink(top, total, sink)
            alpha[r] = f32(0) if total == f32(0) else scale * ptx.rcp(total)
            if lane & 3 == 0 and query[r] < queries:
                number = i32((first + head[r]) * queries + query[r])
                if split:
                    number = i32(number * parts + part)
                ptx.store_global_f32(lse_at + u64(number * 4), (top + ptx.lg2(total)) * LN2)

    @device_function
    def write(o, alpha, memory, first, kv_head, batch, part, rows, warp, lane, call):
        """The warp's rows of the output, times `alpha`: 16 bytes at a time, through its own part of Q's
        tile. Those of a part of the keys are float32.
        """
        o_batch, o_head, o_step = call.strides[9:12]
        queries, _, dv_left = call.sizes[:3]
        to = call.pointers[3] + u64(batch * o_batch)
        if split:
            columns = i32(dv_left >> 1)
            to = to + u64(part * columns * 4)
            store_part(
                o, alpha, to, (o_head, o_step), rows.query, rows.head, queries, columns, lane
            )
        else:
            if dv > d:
                cuda.syncthreads()
            else:
                cuda.syncwarp()
            mine = memory.q + u32(warp * 16 * max(d_bytes, dv_bytes))
            stage_rows(o, mine, alpha[0], alpha[1], lane)
            cuda.syncwarp()
            to = to + u64(kv_head * group * o_head)
            total = i32(queries * group)
            store_o(mine, to, o_head, o_step, first + warp * 16, total, dv_left, lane)

    def flash(pointers, strides, sizes, factors):
        call = Call(pointers, strides, sizes, factors)
        queries, d_left, _, heads, left, right, parts = sizes
        factor = f32(1) if transform else factors[0]  # `adjust` has scaled the scores already
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        total = i32(queries * group)
        first, kv_head, batch, part = find_part(total, parts)
        sq = ptx.shared_address(shared)
        memory = Memory(sq, sq + u32(q_size), sq + u32(q_size) + u32(stages * k_size))
        operands = find_operands(call, batch, kv_head)

        # rows of this block, the tiles of keys that any of them attends to, and the keys that all
        # of them attend to
        keys = ptx.load_global_s32(pointers[6] + u64(batch * 4))
        diagonal = ptx.load_global_s32(pointers[5] + u64(batch * 4))
        place = Place(batch, diagonal, queries, keys)
        tile, tiles, whole_low, whole_high = tile_range(first, total, keys, diagonal, left, right)
        listed_at, tile, tiles = find_tiles(pointers, batch, kv_head, first // block_q, tile, tiles)
        tile, tiles = share_of(tile, tiles, part, parts)

        rows = Rows(cuda.local.array(2, i32), cuda.local.array(2, i32), cuda.local.array(2, f32))
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        row = i32(first + warp * 16 + (lane >> 2))
        find_rows(rows, low, high, row, kv_head, place, (left, right))
        rows.slope[0], rows.slope[1] = f32(0), f32(0)
        if alibi and not wide:
            load_slopes(rows.slope, pointers[8], batch * heads, rows.head)

        q = pointers[0] + u64(batch * strides[0] + kv_head * group * strides[1])
        load_q(sq, q, strides[1], strides[2], first, total, d_left, thread)
        load_first(memory, operands, listed_at, tile, tiles, keys, thread)
        state = State(cuda.local.array(2, f32), cuda.local.array(2, f32), cuda.local.array(2, f32))
        o = cuda.local.array(n_o, f32)  # the output so far: 16 x dv per warp
        qf = cuda.local.array(n_qf, u32)  # A fragments of Q
        s = cuda.local.array(n_s, f32)  # scores, then weights: 16 x block_k per warp
        at = find_lane(sq, lane, warp)
        begin(o, qf, state, at)

        stage = i32(0)
        while tile < tiles:
            start = start_of(listed_at, tile)
            load_next(memory, operands, stage, listed_at, tile, tiles, keys, thread)
            k_tile, v_tile = memory.k + u32(stage * k_size), memory.v + u32(stage * v_size)
            scores(s, qf, at.q, at.q_chunk, k_tile + at.k, at.k_chunk)
            key = i32(start + 2 * (lane & 3))  # of this thread's first score
            apply_options(s, key, rows, place, batch * heads, listed_at, tile, call)
            if start < whole_low or start + block_k > whole_high:
                hide(s, key, low, high)
            softmax(s, state.m, state.l, state.alpha, factor)
            rescale(o, state.alpha)
            add_values(o, s, v_tile + at.v, at.v_chunk)
            if turing:
                cuda.syncthreads()
            else:
                stage ^= 1
            tile += 1

        finish_rows(
            state, factor, rows, pointers[9], pointers[4], batch * heads, queries, part, parts, lane
        )
        write(o, state.alpha, memory, first, kv_head, batch, part, rows, warp, lane, call)

    own = types.void(pointers_of(OWN, functions), *SIGNATURE.args[1:])
    return Source(flash, own, threads, q_size + stages * (k_size + v_size))
