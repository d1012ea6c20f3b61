"""Tiles of `flash_int8`: where they lie in shared memory, who copies them, and Q . K^T of them."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ...tiling import KEY_BLOCK
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_rows import ROW_BYTES
from .int8_values import FLOAT_KEYS, PADDING
from .int8_weights import PLANES
from .tiles import left_row, make_copy, make_first_chunk, make_load_tile, right_row

i32, i64, u32, u64 = types.int32, types.int64, types.uint32, types.uint64
Q, K, V, KEY_SCALES = 0, 1, 2, 7  # of the kernel's pointers


class Layout(NamedTuple):
    """Shared memory of a block, in bytes: Q, a block of K and V, K's scales, the table of `int8_rows`."""

    d: int
    dv: int
    block_q: int
    pv: str
    turing: bool
    halves: int  # warps that share 16 rows

    @property
    def threads(self) -> int:
        """Of a block: a warp, or a pair of them, for 16 rows."""
        return self.block_q * 2 * self.halves

    @property
    def own_weights(self) -> int:
        """A thread's registers of weights, which a pair of warps exchanges through K's place."""
        return KEY_BLOCK // self.halves // 8 * (4 if self.pv == "fp32" else PLANES[self.pv])

    @property
    def k(self) -> int:
        """Where K begins, behind Q."""
        return self.block_q * self.d

    @property
    def v(self) -> int:
        """Where V begins: on sm_75 in K's place."""
        return self.k if self.turing else self.k + self.k_size

    @property
    def k_size(self) -> int:
        """Of K's place."""
        exchanged = self.threads * 4 * self.own_weights if self.halves > 1 else 0
        return max(KEY_BLOCK * self.d, exchanged)

    @property
    def v_size(self) -> int:
        """Of V's place."""
        return FLOAT_KEYS * (self.dv * 4 + PADDING) if self.pv == "fp32" else self.dv * KEY_BLOCK

    @property
    def scales(self) -> int:
        """Where the scales of K begin."""
        return max(self.k + self.k_size, self.v + self.v_size)

    @property
    def table(self) -> int:
        """Where the table begins."""
        return self.scales + KEY_BLOCK * 4

    @property
    def shared_bytes(self) -> int:
        """Of a block; each warp of a pair has a table."""
        return self.table + self.halves * self.block_q * ROW_BYTES


class Memory(NamedTuple):
    """Shared addresses of what `Layout` describes."""

    q: Any
    k: Any
    v: Any
    scales: Any
    table: Any


class Lane(NamedTuple):
    """Where a lane reads its part of fragments with ldmatrix: a row's address in Q and in K, and the
    place of its first chunk of 16 bytes. The column enters by XOR with an even chunk number.
    """

    q: Any
    q_chunk: Any
    k: Any
    k_chunk: Any


@functools.cache
def make_memory_at(layout: Layout) -> Any:
    """memory_at(base) -> Memory, from where shared memory begins."""
    k, v, scales, table = layout.k, layout.v, layout.scales, layout.table

    @device_function
    def memory_at(base):
        return Memory(base, base + u32(k), base + u32(v), base + u32(scales), base + u32(table))

    return memory_at


@functools.cache
def make_find_lane(d: int, own_keys: int) -> Any:
    """find_lane(memory: Memory, lane, rows_of, half) -> Lane.

    In the `rows_of`-th 16 rows of Q, and among the `own_keys` keys of a block that are its warp's: the
    first ones, or with `half` 1 the others.
    """
    q_chunk, k_chunk = make_first_chunk(d)

    @device_function
    def find_lane(memory, lane, rows_of, half):
        q_row = i32(rows_of * 16 + left_row(lane))
        k_row = i32(half * own_keys + right_row(lane))
        return Lane(
            memory.q + u32(q_row * d),
            q_chunk(lane, q_row),
            memory.k + u32(k_row * d),
            k_chunk(lane, k_row),
        )

    return find_lane


@functools.cache
def make_multiply_keys(d: int, own_tiles: int, turing: bool) -> Any:
    """multiply_keys(s, at: Lane): S = Q . K^T of a warp's 16 rows and `own_tiles` times 8 keys, exact."""
    k_steps, n_s = d // 32, 4 * own_tiles
    product = ptx.mma_turing_s8 if turing else ptx.mma_s8

    @device_function
    def multiply_keys(s, at):
        a, b = cuda.local.array(4, u32), cuda.local.array(4, u32)
        for i in range(n_s):
            s[i] = i32(0)
        for step in range(k_steps):
            ptx.ldmatrix(a, 0, at.q + ((at.q_chunk ^ u32(2 * step)) << u32(4)))
            for n in range(own_tiles // 2):
                ptx.ldmatrix(
                    b, 0, at.k + u32(n * 16 * d) + ((at.k_chunk ^ u32(2 * step)) << u32(4))
                )
                product(s, 8 * n, a, 0, b, 0)
                product(s, 8 * n + 4, a, 0, b, 2)

    return multiply_keys


@functools.cache
def make_bring(layout: Layout) -> tuple[Any, Any, Any]:
    """(values_of, bring_values, bring): what copies a block of keys to shared memory.

    values_of(call: Call, before): where the values of a key head are, behind those of `before` others.
    bring_values(memory: Memory, call, values, start, thread): those of the keys from `start` on.
    bring(memory, call, before, values, start, keys, thread): keys and their scales, and values that
    have a place of their own and are bytes; `keys` is how many keys there are.
    """
    d, dv, threads, wide = layout.d, layout.dv, layout.threads, layout.pv == "fp32"
    asynchronous = not layout.turing
    load_k = make_load_tile(KEY_BLOCK, d, threads, asynchronous)
    load_v = make_load_tile(dv, KEY_BLOCK, threads, asynchronous)
    copy, with_values = make_copy(asynchronous), asynchronous and not wide

    @device_function
    def values_of(call, before):
        _, key_count, _, stored, channels = call.sizes[:5]
        return call.pointers[V] + before * (
            u64(key_count) * u64(channels * 4) if wide else u64(channels * stored)
        )

    @device_function
    def bring_values(memory, call, values, start, thread):
        """Stored transposed: a row is a channel."""
        stored, channels = call.sizes[3:5]
        at, left = values + u64(start), i32(stored - start)
        load_v(memory.v, at, i64(stored), channels, left, thread)

    @device_function
    def bring(memory, call, before, values, start, keys, thread):
        _, key_count, d_left, stored = call.sizes[:4]
        k = call.pointers[K] + (before * u64(key_count) + u64(start)) * u64(d_left)
        load_k(memory.k, k, i64(d_left), i32(keys - start), d_left, thread)
        if with_values:
            bring_values(memory, call, values, start, thread)
        if thread < KEY_BLOCK // 4:
            first = before * u64(stored) + u64(start + 4 * thread)
            at = call.pointers[KEY_SCALES] + first * u64(4)
            copy(memory.scales + u32(thread * 16), 0, at, True)

    return values_of, bring_values, bring
