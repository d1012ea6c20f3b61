"""The end of a tile of rows in the 16-bit Hopper kernel: log-sum-exp and output."""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper_scores import make_describe
from .pieces import NEG_INF, quad_sum
from .scores import LN2, LOG2E, join_sink

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
O, LSE, SINKS = 1, 2, 7  # places in the kernel's pointers


@functools.cache
def make_exchange(words: int, bit: int) -> Any:
    """exchange(w, lane): half of a transposition of 4 x 4 words among the four lanes of a quad.

    Lanes that differ in `bit` exchange the words whose number has it and those that have not. With
    bits 1 and 2 lane i gets word i of each group of four from all lanes: of an accumulator each lane
    holds 4 bytes in every tile of 8 columns, then the 16 bytes of one tile in four.
    """

    @device_function
    def exchange(w, lane):
        upper = lane & bit != 0
        for n in range(words // 2):
            i = n // bit * 2 * bit + n % bit
            came = u32(ptx.shuffle_xor_i32(i32(w[i] if upper else w[i + bit]), u32(bit)))
            w[i] = came if upper else w[i]
            w[i + bit] = w[i + bit] if upper else came

    return exchange


def make_write_rows(dv: int, pack: Any, packed: int, transform: bool, sinks: bool) -> Any:
    """write_rows(o, state, row, first_head, batch, call): a thread's two rows to global memory.

    They go from registers: shared memory is free for the next tile's loads.
    """
    describe, columns, n_words = make_describe(packed), dv // 8, dv // 4
    exchange_1, exchange_2 = (make_exchange(n_words, bit) for bit in (1, 2))

    @device_function
    def close(state, r, query, head, call):
        """The factor of row r's output; its log-sum-exp in units of log2 in `state.m`."""
        m, l, _ = state
        queries = call.sizes[0]
        l[r] = quad_sum(l[r])
        scale = f32(1) if transform else call.factors[0]
        top, share = NEG_INF if l[r] == f32(0) else m[r] * scale, f32(1)
        if sinks and query < queries:
            sink = ptx.load_global_f32(call.pointers[SINKS] + u64(head * 4)) * LOG2E
            top, l[r], share = join_sink(top, l[r], sink)
        m[r] = top + ptx.lg2(l[r])
        return f32(0) if l[r] == f32(0) else share * ptx.rcp(l[r])

    @device_function
    def write_rows(o, state, row, first_head, batch, call):
        queries, row_bytes, heads = call.sizes[:3]
        lane = i32(cuda.threadIdx.x) & 3
        query, head = cuda.local.array(2, i32), cuda.local.array(2, i32)
        words, share = cuda.local.array(n_words, u32), cuda.local.array(2, f32)
        describe(query, head, row, first_head)
        for r in range(2):
            share[r] = close(state, r, query[r], head[r], call)
            if query[r] < queries and lane == 0:
                at = ((batch * heads + head[r]) * queries + query[r]) * 4
                ptx.store_global_f32(call.pointers[LSE] + u64(at), state.m[r] * LN2)
        for r in range(2):
            for c in range(columns):
                n = 4 * c + 2 * r
                words[r * columns + c] = pack(o[n] * share[r], o[n + 1] * share[r])
        exchange_1(words, lane)
        exchange_2(words, lane)
        for r in range(2):
            at = call.pointers[O] + u64(
                batch * call.strides[0] + head[r] * call.strides[1] + query[r] * call.strides[2]
            )
            for c in range(0, columns, 4):
                column = i32((c + lane) * 16)
                if query[r] < queries and column < row_bytes:
                    ptx.store_global_v4(at + u64(column), words, r * columns + c)

    return write_rows
