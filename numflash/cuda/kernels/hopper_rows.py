"""The end of a tile of rows in the 16-bit Hopper kernel: log-sum-exp and output, of all keys or of
a part of them.
"""

from __future__ import annotations

import functools
from typing import Any

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .hopper_scores import make_describe
from .key_parts import make_store_part
from .scores import LN2, LOG2E, join_sink
from .softmax import NEG_INF, quad_sum

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
O, LSE, SINKS = 1, 2, 7  # places in the kernel's pointers
PARTS = 7  # in its sizes


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


def make_write_rows(
    dv: int, pack: Any, packed: int, transform: bool, sinks: bool, split: bool
) -> Any:
    """write_rows(o, state, row, place, call): a thread's two rows to global memory.

    They go from registers: shared memory is free for the next tile's loads. Returns a number that
    needs all of the output, for a store that waits for it.
    """
    describe, columns, n_words = make_describe(packed), dv // 8, dv // 4
    exchange_1, exchange_2 = (make_exchange(n_words, bit) for bit in (1, 2))
    store_part = make_store_part(columns)

    @device_function
    def close(state, r, query, head, part, call):
        """The factor of row r's output; its log-sum-exp in units of log2 in `state.m`."""
        m, l, _ = state
        queries = call.sizes[0]
        l[r] = quad_sum(l[r])
        scale = f32(1) if transform else call.factors[0]
        top, share = NEG_INF if l[r] == f32(0) else m[r] * scale, f32(1)
        if sinks and query < queries and (not split or part == 0):
            sink = ptx.load_global_f32(call.pointers[SINKS] + u64(head * 4)) * LOG2E
            top, l[r], share = join_sink(top, l[r], sink)
        m[r] = top + ptx.lg2(l[r])
        return f32(0) if l[r] == f32(0) else share * ptx.rcp(l[r])

    @device_function
    def store_lse(state, query, head, place, call):
        _, _, batch, part = place
        queries, _, heads = call.sizes[:3]
        for r in range(2):
            number = i32((batch * heads + head[r]) * queries + query[r])
            if split:
                number = i32(number * call.sizes[PARTS] + part)
            if query[r] < queries and i32(cuda.threadIdx.x) & 3 == 0:
                at = call.pointers[LSE] + u64(number) * u64(4)
                ptx.store_global_f32(at, state.m[r] * LN2)

    @device_function
    def store_rows(o, share, query, head, batch, call):
        """16 bytes at a time, which the four lanes of a row exchange for."""
        queries, row_bytes = call.sizes[:2]
        lane = i32(cuda.threadIdx.x) & 3
        words = cuda.local.array(n_words, u32)
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
        mixed = u32(0)
        for n in range(n_words):
            mixed ^= words[n]
        return mixed

    @device_function
    def write_rows(o, state, row, place, call):
        _, first_head, batch, part = place
        query, head = cuda.local.array(2, i32), cuda.local.array(2, i32)
        share = cuda.local.array(2, f32)
        describe(query, head, row, first_head)
        for r in range(2):
            share[r] = close(state, r, query[r], head[r], part, call)
        store_lse(state, query, head, place, call)
        if split:
            wide = i32(call.sizes[1] >> 1)
            to = call.pointers[O] + u64(batch * call.strides[0]) + u64(part * wide * 4)
            steps, lane = call.strides[1:3], i32(cuda.threadIdx.x) & 31
            store_part(o, share, to, steps, query, head, call.sizes[0], wide, lane)
            return u32(0)  # a block seldom has another tile of rows
        return store_rows(o, share, query, head, batch, call)

    return write_rows
