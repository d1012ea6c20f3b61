"""The softmax of the integer pipeline on a fragment of scores.

What the INT8 kernels do between their two products.

A thread holds two rows of the scores, 8 keys apart in tiles: element 4 n + 2 r + e is key 8 n + 2
(lane % 4) + e of row r. Only exactly rounded float operations are used, each named with its
rounding so that nothing is contracted: the bits are those of `reference.integer_model`. Selections
instead of branches keep a warp together.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from ...numerics import fixedpoint as fx
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_rows import PART, Int8Options
from .pieces import NEG_INF
from .scores import softcap_exact

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
# t of a masked key, and of a score that is NaN: beyond every other
MASKED_SCORE = -(1 << 31)
SPOILED = (1 << 31) - 1
MIN_OCTAVE, T_LIMIT = fx.MIN_OCTAVE, f32(fx.T_LIMIT)
P_A, P_B, P_WIDE = int(fx.P_A), int(fx.P_B), int(fx.P_WIDE)
Q_A, Q_B, ONE_Q16 = int(fx.Q_A), int(fx.Q_B), int(fx.ONE_Q16)
LOG2E_Q8 = f32(fx.LOG2E_Q8)
# of prmt: bytes 1 and 5; 0, 1, 4 and 5
SECOND_BYTES = u32(0x51)
LOW_HALVES = u32(0x5410)
ONES = u32(0x01010101)


@device_function
def distance(t, octave):
    """Q8.8 distance of a score below its octave, at most 65535.

    A masked key's distance from every octave.
    """
    return ptx.umin(u32((octave << 8) - t), u32(65535))


@device_function
def weight_p16(t, octave):
    """The weight before its rounding, 65280 * 2**((t - 256 * octave) / 256).

    `fixedpoint.exp2_p16` in 32-bit arithmetic.

    From 16 octaves on it is 0, there 0 or 1: neither makes a byte. So a masked key has weight 0.
    """
    y = distance(t, octave)
    f = u32(u32(y << u32(8)) & u32(0xFFFF))
    g = u32(u32(f * u32(P_B)) >> u32(16))
    h = u32(u32(f * u32(u32(P_A) - g)) >> u32(16))
    return ptx.shift_right(u32(u32(P_WIDE) - h), u32(y >> u32(8)))


@device_function
def rounded_p16(t, octave):
    """A number whose second byte is the P8 weight round(255 * 2**((t - 256 * octave) / 256)).

    `fixedpoint.exp2_p8`.
    """
    return u32(weight_p16(t, octave) + u32(128))


@device_function
def weight_q16(t, octave):
    """The same in Q16.16 without the rounding to a byte: `fixedpoint.exp2_quadratic`.

    From 18 octaves on it is 0.
    """
    y = distance(t, octave)
    f = u32(u32(y & u32(255)) << u32(8))
    g = u32(u32(f * u32(Q_B)) >> u32(16))
    h = u32(u32(f * u32(u32(Q_A) - g)) >> u32(16))
    return ptx.shift_right(u32(u32(ONE_Q16) - h), u32(y >> u32(8)))


@device_function
def power(n):
    """2**-min(n, 126) for n >= 0, made of exponent bits."""
    return ptx.from_bits((u32(127) - ptx.umin(u32(n), u32(126))) << u32(23))


@device_function
def octave_of(top):
    """The octave of a row's largest score: the whole power of two that its weights refer to."""
    return i32(MIN_OCTAVE) if top == MASKED_SCORE else i32((top + 255) >> 8)


@device_function
def quad_imax(x):
    """Largest over the four lanes that hold one row."""
    x = ptx.imax(x, ptx.shuffle_xor_i32(x, u32(1)))
    return ptx.imax(x, ptx.shuffle_xor_i32(x, u32(2)))


@device_function
def quad_isum(x):
    x = i32(x + ptx.shuffle_xor_i32(x, u32(1)))
    return i32(x + ptx.shuffle_xor_i32(x, u32(2)))


@functools.cache
def make_finish_score(options: Int8Options) -> Any:
    """finish(x, seen, j, row, block: Block, given: OptionData): the score x of key j to Q8.8.

    `row` = (query, head, slope, shift).
    """
    _, mask, bias, softcap, alibi = options
    general = softcap or alibi or bias

    @device_function
    def finish(x, seen, j, row, block, given):
        query, head, slope, shift = row
        batch, strides = block.batch, given.strides
        number = x == x
        if general:  # beyond the limit nothing changes, but infinities would make NaN
            x = ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT)
        if softcap:
            x = softcap_exact(ptx.add(x, shift), given.cap)
        if alibi:
            x = ptx.sub(x, ptx.mul(slope, ptx.to_float(i32(abs(query + block.diagonal - j)))))
        if mask and seen:
            seen = ptx.load_global_u8(
                given.mask
                + u64(batch * strides[0] + head * strides[1] + query * strides[2] + j * strides[3])
            ) != u32(0)
        if bias and seen:
            y = ptx.load_global_f32(
                given.bias
                + u64(batch * strides[4] + head * strides[5] + query * strides[6] + j * strides[7])
            )
            x = ptx.add(x, ptx.mul(y, LOG2E_Q8))
            seen = y != NEG_INF
        t = ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT))
        t = t if number & (x == x) else i32(SPOILED)
        return t if seen else i32(MASKED_SCORE)

    return finish


@functools.cache
def make_log2_scores(key_tiles: int, options: Int8Options) -> Any:
    """log2_scores(s, top, table, first, scales_at, block: Block, given: OptionData).

    Scores to Q8.8: t = round((float32(S) * ck) * cq), options applied in the field's order, masked
    keys `MASKED_SCORE`. With softcap, cq makes scores in units of the cap, to which the row's shift
    belongs.

    `s` becomes t, `top` the largest of each row. `table` is the place of the thread's first row
    (`int8_rows`), `first` the key of its first element, `scales_at` the shared address of that key's
    ck.
    """
    n_s = 4 * key_tiles
    # too much code to unroll: the fragment turns instead, a tile at a time, and is never indexed
    turns = options.softcap or options.alibi or options.bias or options.mask
    described = options.alibi or options.mask or options.bias
    finish = make_finish_score(options)

    @device_function
    def log2_scores(s, top, table, first, scales_at, block, given):
        scales = cuda.local.array(2, f32)
        done = cuda.local.array(4, i32)
        four = cuda.local.array(4, u32)
        start, stop = cuda.local.array(2, i32), cuda.local.array(2, i32)
        query = cuda.local.array(2, i32)
        head = cuda.local.array(2, i32)
        slope = cuda.local.array(2, f32)
        cq, shift = cuda.local.array(2, f32), cuda.local.array(2, f32)
        for r in range(2):
            ptx.load_shared_v4(four, 0, table + u32(128 * r))
            start[r], stop[r] = i32(i32(four[0]) - first), i32(i32(four[1]) - first)
            cq[r], shift[r], top[r] = (
                ptx.from_bits(four[2]),
                ptx.from_bits(four[3]),
                i32(MASKED_SCORE),
            )
            if described:
                ptx.load_shared_v4(four, 0, table + u32(PART + 128 * r))
                query[r], head[r], slope[r] = i32(four[0]), i32(four[1]), ptx.from_bits(four[2])
        for n in range(key_tiles):
            at = 0 if turns else 4 * n
            ptx.load_shared_f32_v2(scales, 0, scales_at + u32(32 * n))
            for e in range(2):
                ahead = i32(8 * n + e)
                for r in range(2):
                    x = ptx.mul(ptx.mul(ptx.to_float(s[at + 2 * r + e]), scales[e]), cq[r])
                    seen = (ahead >= start[r]) & (ahead < stop[r])
                    j = i32(first + ahead)
                    t = finish(x, seen, j, (query[r], head[r], slope[r], shift[r]), block, given)
                    s[at + 2 * r + e] = t
                    top[r] = ptx.imax(top[r], t)
            if turns:
                for i in range(4):
                    done[i] = s[i]
                for i in range(n_s - 4):
                    s[i] = s[i + 4]
                for i in range(4):
                    s[n_s - 4 + i] = done[i]
        for r in range(2):
            top[r] = quad_imax(top[r])

    return log2_scores


@functools.cache
def make_weigh(key_tiles: int, wide: bool) -> Any:
    """weigh(s, p, top): the weights of scores against their block's largest.

    `p` takes four bytes per register as A operands of k32 products (4 registers per 32 keys: tiles
    2 h and 2 h + 1 fill one register of each row), or with `wide` nothing, and `s` takes the Q16.16
    weights.
    """
    pairs = key_tiles // 2

    @device_function
    def weigh(s, p, top):
        octave = cuda.local.array(2, i32)
        for r in range(2):
            octave[r] = octave_of(top[r])
        for n in range(pairs):  # two tiles: four bytes of a row
            for r in range(2):
                at, second = 8 * n + 2 * r, 8 * n + 2 * r + 4
                if wide:
                    for i in range(2):
                        s[at + i] = i32(weight_q16(s[at + i], octave[r]))
                        s[second + i] = i32(weight_q16(s[second + i], octave[r]))
                else:
                    low = ptx.prmt(
                        rounded_p16(s[at], octave[r]),
                        rounded_p16(s[at + 1], octave[r]),
                        SECOND_BYTES,
                    )
                    high = ptx.prmt(
                        rounded_p16(s[second], octave[r]),
                        rounded_p16(s[second + 1], octave[r]),
                        SECOND_BYTES,
                    )
                    p[2 * n + r] = ptx.prmt(low, high, LOW_HALVES)

    return weigh


@device_function
def find_shares(top, m, alpha, share):
    """Factors of one key block, whole octaves.

    `alpha` for the sums so far, `share` for the block's own. `m` becomes theirs.
    """
    for r in range(2):
        octave = octave_of(top[r])
        new = ptx.imax(m[r], octave)
        alpha[r] = power(i32(new - m[r]))
        share[r] = f32(0) if top[r] == MASKED_SCORE else power(i32(new - octave))
        m[r] = new


@functools.cache
def make_sum_weights(registers: int, wide: bool) -> Any:
    """sum_weights(w, total).

    Sums of each row's weights in so many registers of `p`, or with `wide` of `s`.
    """

    @device_function
    def sum_weights(w, total):
        for r in range(2):
            total[r] = i32(0)
        for i in range(registers):
            if wide:
                total[(i >> 1) & 1] = i32(total[(i >> 1) & 1] + i32(w[i]))
            else:
                total[i & 1] = ptx.dot4(w[i], ONES, total[i & 1])

    return sum_weights


@functools.cache
def make_add_weights(wide: bool) -> Any:
    """add_weights(total, top, l, alpha, share).

    The row's weights, of which `total` is the thread's part, enter the running sum.

    A sum that has seen what is no number is NaN, and stays it.
    """
    unit = f32(1 / ONE_Q16)

    @device_function
    def add_weights(total, top, l, alpha, share):
        for r in range(2):
            x = ptx.to_float(quad_isum(total[r]))
            if wide:
                x = ptx.mul(x, unit)
            l[r] = (
                f32(np.nan)
                if top[r] == SPOILED
                else ptx.add(ptx.mul(l[r], alpha[r]), ptx.mul(x, share[r]))
            )

    return add_weights
