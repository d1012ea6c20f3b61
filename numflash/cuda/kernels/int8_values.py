"""The second product of `flash_int8`: O = O * alpha + (P . V) * share, of bytes or of floats."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from ...tiling import KEY_BLOCK
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_pairs import make_take
from .int8_softmax import ONE_Q16, make_shrink
from .tiles import make_copy

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
# what depends on the number is computed anew after this: kept for every tile, it would spill
renew = ptx.register_fence(1, i32)
# pv "fp32": keys of V in shared memory at a time; bytes between rows, for the banks
FLOAT_KEYS = 32
PADDING = 16
TOGETHER = 4  # tiles of 8 channels between two branches, with two planes


class Values(NamedTuple):
    """Float32 values of one batch entry and key head in global memory."""

    address: Any
    keys: Any
    channels: Any


@functools.cache
def make_byte_values(value_tiles: int, planes: int, turing: bool) -> Any:
    """add_values(o, p, factors, sv, channels, lane): O = O * alpha + (P . V) * share for bytes.

    With two `planes` of weights P . V is 256 times the first one's and the second one's, rounded to a
    float where it has more bits; with its share it enters O by a fused multiply-add.

    `factors` = (alpha, share); `sv` is where the warp's channels start, of which `channels` exist.
    """
    steps, shrink, n_acc = KEY_BLOCK // 64, make_shrink(value_tiles), 4 * planes
    product = ptx.mma_turing_u8s8 if turing else ptx.mma_u8s8
    # ptxas loads operands of later tiles ahead, with two planes of more than registers hold, but not
    # across a branch. It skips channels that pad the head size.
    together = value_tiles if planes == 1 else math.gcd(TOGETHER, value_tiles)

    @device_function
    def multiply(acc, p, sv, n, lane):
        """The products of tile n of 8 channels, one per plane."""
        b = cuda.local.array(4, u32)
        for i in range(n_acc):
            acc[i] = i32(0)
        for step in range(steps):  # four 8 x 16-byte matrices: 8 channels, 64 keys
            chunk = u32((4 * step + (lane >> 3)) ^ (lane & 7))
            ptx.ldmatrix(b, 0, sv + u32((n * 8 + (lane & 7)) * KEY_BLOCK) + (chunk << u32(4)))
            for plane in range(planes):
                at = 2 * n_acc * step + 4 * plane
                product(acc, 4 * plane, p, at, b, 0)
                product(acc, 4 * plane, p, at + n_acc, b, 2)

    @device_function
    def add_values(o, p, factors, sv, channels, lane):
        acc, (alpha, share) = cuda.local.array(n_acc, i32), factors
        shrink(o, alpha)
        for first in range(0, value_tiles, together):
            if planes == 1 or 8 * first < channels:
                for n in range(first, first + together):
                    multiply(acc, p, sv, n, lane)
                    for i in range(4):
                        x = acc[i] if planes == 1 else i32((acc[i] << 8) + acc[i + n_acc - 4])
                        o[4 * n + i] = ptx.fma(ptx.to_float(x), share[i >> 1], o[4 * n + i])

    return add_values


@functools.cache
def make_float_values(dv: int, value_tiles: int, threads: int, paired: bool) -> Any:
    """add_values(o, weights, factors, sv, values: Values, first, begin, thread).

    O = O * alpha + (P . V) * share for weights in Q16.16 and float32 values from key `first` on,
    `FLOAT_KEYS` keys at a time in shared memory at `sv`.

    `factors` = (alpha, share); `begin` is the first of the warp's channels, `value_tiles` times 8.
    `weights` = (s, given): they are in `s`, or of a pair of warps at `given` in shared memory.
    """
    row_bytes, key_tiles, n_a = dv * 4 + PADDING, FLOAT_KEYS // 8, FLOAT_KEYS // 2
    pieces, chunks, n_rest = FLOAT_KEYS * dv // 4, dv // 4, (KEY_BLOCK - FLOAT_KEYS) // 2
    turns, even = (pieces + threads - 1) // threads, pieces % threads == 0
    copy = make_copy(True)
    wait_all = ptx.cp_async_wait[0]
    unit = f32(1 / ONE_Q16)
    high = u32(0xFFFFE000)
    take, shrink = make_take(n_a), make_shrink(value_tiles)

    @device_function
    def add_values(o, weights, factors, sv, values, first, begin, thread):
        (s, given), (alpha, share), (v, keys, channels) = weights, factors, values
        acc = cuda.local.array(4, f32)
        a_high, a_low = cuda.local.array(n_a, u32), cuda.local.array(n_a, u32)
        b_high, b_low = cuda.local.array(2, u32), cuda.local.array(2, u32)
        lane, loader = thread & 31, cuda.local.array(1, i32)
        loader[0] = thread
        shrink(o, alpha)
        for part in range(KEY_BLOCK // FLOAT_KEYS):
            start = first + part * FLOAT_KEYS
            renew(loader, 0)
            cuda.syncthreads()  # the last part is done with
            for i in range(turns):
                piece = loader[0] + i * threads
                r = piece // chunks
                c = piece - r * chunks
                if even or piece < pieces:
                    copy(
                        sv + u32(r * row_bytes + (c << 4)),
                        0,
                        v + u64(start + r) * u64(channels * 4) + u64(c << 4),
                        start + r < keys and (c << 2) < channels,
                    )
            ptx.cp_async_commit()
            wait_all()
            cuda.syncthreads()
            if paired:
                take(s, given + u32(part * (n_a * 128)))
            for t in range(key_tiles):
                for i in range(4):  # rows g, g + 8 with key 2 q, then the same with key 2 q + 1
                    w = ptx.mul(ptx.to_float(s[4 * t + 2 * (i & 1) + (i >> 1)]), unit)
                    a_high[4 * t + i] = ptx.bits(w) & high
                    a_low[4 * t + i] = ptx.bits(ptx.sub(w, ptx.from_bits(ptx.bits(w) & high)))
            if not paired:
                # the next part's weights come to the front: registers have no index
                for i in range(n_rest):
                    s[i] = s[i + n_a]
            for n in range(value_tiles):
                for i in range(4):
                    acc[i] = f32(0)
                for t in range(key_tiles):
                    at = sv + u32(
                        (8 * t + 2 * (lane & 3)) * row_bytes + (begin + 8 * n + (lane >> 2)) * 4
                    )
                    for i in range(2):
                        x = ptx.load_shared_f32(at + u32(i * row_bytes))
                        b_high[i] = ptx.bits(x) & high
                        b_low[i] = ptx.bits(ptx.sub(x, ptx.from_bits(b_high[i]))) & high
                    ptx.mma_tf32(acc, 0, a_low, 4 * t, b_high, 0)
                    ptx.mma_tf32(acc, 0, a_high, 4 * t, b_low, 0)
                    ptx.mma_tf32(acc, 0, a_high, 4 * t, b_high, 0)
                for i in range(4):
                    o[4 * n + i] = ptx.fma(acc[i], share[i >> 1], o[4 * n + i])

    return add_values
