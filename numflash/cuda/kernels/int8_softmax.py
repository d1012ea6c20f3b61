"""The softmax of the integer pipeline on a fragment of scores.

What the INT8 kernels do between their two products.

A thread holds two rows of the scores, 8 keys apart in tiles: element 4 n + 2 r + e is key 8 n + 2
(lane % 4) + e of row r. Only exactly rounded float operations are used, each named with its
rounding so that nothing is contracted: the bits are those of `reference.integer_model`. Selections
instead of branches keep a warp together. Weights are `int8_weights`.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from ...numerics import fixedpoint as fx
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .int8_rows import PART, Int8Options
from .scores import softcap_exact
from .softmax import NEG_INF

i32, u32, u64, f32 = types.int32, types.uint32, types.uint64, types.float32
# t of a masked key, and of a score that is NaN: beyond every other
MASKED_SCORE = -(1 << 31)
SPOILED = (1 << 31) - 1
MIN_OCTAVE, T_LIMIT = fx.MIN_OCTAVE, f32(fx.T_LIMIT)
# a row whose scores reach no farther needs no limit: what lies below -T_LIMIT has weight 0 anyway
NEAR = f32(fx.T_LIMIT / 2)
LOG2E_Q8 = f32(fx.LOG2E_Q8)
ONE_Q16 = int(fx.ONE_Q16)
ONES = u32(0x01010101)
HALF_OCTAVE, QUARTER_OCTAVE, EIGHTH_OCTAVE = fx.HALF_OCTAVE, fx.QUARTER_OCTAVE, fx.EIGHTH_OCTAVE


class Rows(NamedTuple):
    """Of a thread's two rows, local arrays: state, and what the last block makes of it."""

    m: Any  # octaves of the maxima
    l: Any  # sums of the weights
    top: Any  # the block's largest scores
    total: Any  # sums of the block's weights
    alpha: Any  # factors of the sums so far
    share: Any  # and of the block's


@functools.cache
def make_larger(turing: bool) -> Any:
    """larger(a, b): the larger of two floats, NaN if one is; sm_75 has no instruction for that."""

    @device_function
    def larger(a, b):
        if turing:
            return a if (a >= b) | (a != a) else b
        return ptx.fmax_nan(a, b)

    return larger


@functools.cache
def make_limited(turing: bool) -> Any:
    """limited(x): within `T_LIMIT`, NaN if x is."""

    @device_function
    def limited(x):
        if turing:
            return ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT) if x == x else x
        return ptx.fmax_nan(ptx.fmin_nan(x, T_LIMIT), -T_LIMIT)

    return limited


@device_function
def rounded(x):
    """t of a score x, also of a hidden key's (-inf) and of NaN."""
    return ptx.to_int(x) if x == x else i32(SPOILED)


@device_function
def power(n):
    """2**-min(n, MOST_BELOW) for n >= 0, made of exponent bits."""
    return ptx.from_bits((u32(127) - ptx.umin(u32(n), u32(fx.MOST_BELOW))) << u32(23))


@device_function
def octave_of(top):
    """The octave of a row's largest score: the whole power of two at or above it."""
    return i32(MIN_OCTAVE) if top == MASKED_SCORE else i32(i32(top + 255) >> i32(8))


@device_function
def rounded_up(top, step):
    """A row's largest score rounded up to `step`: what its weights refer to."""
    return i32(i32(top + i32(step - 1)) & i32(-step))


@device_function
def below_octave(top):
    """`fixedpoint.below_octave`, of a reference `rounded_up` to eighths of an octave."""
    n = i32(-i32(top >> i32(5)))
    half = HALF_OCTAVE if n & 4 else f32(1)
    quarter = QUARTER_OCTAVE if n & 2 else f32(1)
    return ptx.mul(ptx.mul(half, quarter), EIGHTH_OCTAVE if n & 1 else f32(1))


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
def make_finish_score(options: Int8Options, turing: bool = False) -> Any:
    """finish(x, seen, j, row, block: Block, given: OptionData): the score x of key j in Q8.8.

    Still a float, within `T_LIMIT`, -inf where hidden, NaN where it is no number.

    `row` = (query, head, slope, shift).
    """
    _, mask, bias, softcap, alibi = options
    general, limited = softcap or alibi or bias, make_limited(turing)

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
        x = limited(x)
        if general and not number:
            x = f32(np.nan)
        return x if seen else NEG_INF

    return finish


@functools.cache
def make_log2_scores(key_tiles: int, options: Int8Options, turing: bool = False) -> Any:
    """log2_scores(s, top, table, first, scales_at, block: Block, given: OptionData).

    Scores to Q8.8: x = (float32(S) * ck) * cq, options applied in the field's order, -inf for masked
    keys. With softcap, cq makes scores in units of the cap, to which the row's shift belongs. A warp
    whose rows see every key of the block, with scores far from `T_LIMIT` and no NaN, is done with the
    scaling.

    `s` becomes the bits of x, `top` round(x) of each row's largest. `table` is the place of the
    thread's first row (`int8_rows`), `first` the key of its first element, `scales_at` the shared
    address of that key's ck.
    """
    n_s = 4 * key_tiles
    # too much code to unroll: the fragment turns instead, a tile at a time, and is never indexed
    turns = options.softcap or options.alibi or options.bias or options.mask
    described = options.alibi or options.mask or options.bias
    finish, larger = make_finish_score(options, turing), make_larger(turing)
    last = 8 * key_tiles - 7  # the thread's last key, from `first` on

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
        most = cuda.local.array(2, f32)
        for r in range(2):
            ptx.load_shared_v4(four, 0, table + u32(128 * r))
            start[r], stop[r] = i32(i32(four[0]) - first), i32(i32(four[1]) - first)
            cq[r], shift[r], most[r] = ptx.from_bits(four[2]), ptx.from_bits(four[3]), NEG_INF
            if described:
                ptx.load_shared_v4(four, 0, table + u32(PART + 128 * r))
                query[r], head[r], slope[r] = i32(four[0]), i32(four[1]), ptx.from_bits(four[2])
        plain = True
        for n in range(key_tiles):
            ptx.load_shared_f32_v2(scales, 0, scales_at + u32(32 * n))
            for e in range(2):
                for r in range(2):
                    x = ptx.mul(ptx.mul(ptx.to_float(s[4 * n + 2 * r + e]), scales[e]), cq[r])
                    s[4 * n + 2 * r + e] = i32(ptx.bits(x))
                    most[r] = larger(most[r], x)
        for r in range(2):
            plain &= (start[r] <= 0) & (stop[r] > last) & (abs(most[r]) <= NEAR)
        if turns or not ptx.vote_all(i32(plain)):
            most[0], most[1] = NEG_INF, NEG_INF
            for n in range(key_tiles):
                at = 0 if turns else 4 * n
                for e in range(2):
                    ahead = i32(8 * n + e)
                    for r in range(2):
                        x = ptx.from_bits(u32(s[at + 2 * r + e]))
                        seen = (ahead >= start[r]) & (ahead < stop[r])
                        j = i32(first + ahead)
                        row = query[r], head[r], slope[r], shift[r]
                        x = finish(x, seen, j, row, block, given)
                        s[at + 2 * r + e] = i32(ptx.bits(x))
                        most[r] = larger(most[r], x)
                if turns:
                    for i in range(4):
                        done[i] = s[i]
                    for i in range(n_s - 4):
                        s[i] = s[i + 4]
                    for i in range(4):
                        s[n_s - 4 + i] = done[i]
        for r in range(2):
            top[r] = quad_imax(rounded(most[r]))

    return log2_scores


@functools.cache
def make_find_shares(pv: str) -> Any:
    """find_shares(top, m, alpha, share): factors of one key block.

    `alpha`, whole octaves, for the sums so far, `share` for the block's own. `m` becomes theirs.
    """
    step = fx.REFERENCE_STEP[pv]

    @device_function
    def find_shares(top, m, alpha, share):
        for r in range(2):
            octave = octave_of(top[r])
            new = ptx.imax(m[r], octave)
            alpha[r] = power(i32(new - m[r]))
            own = power(i32(new - octave))
            if step < fx.ONE_Q8:
                own = ptx.mul(own, below_octave(rounded_up(top[r], step)))
            share[r] = f32(0) if top[r] == MASKED_SCORE else own
            m[r] = new

    return find_shares


@functools.cache
def make_shrink(value_tiles: int) -> Any:
    """shrink(o, alpha): O times alpha, where a row of the warp has a new octave."""

    @device_function
    def shrink(o, alpha):
        if not ptx.vote_all(i32((alpha[0] == f32(1)) & (alpha[1] == f32(1)))):
            for n in range(value_tiles):
                for i in range(4):
                    o[4 * n + i] = ptx.mul(o[4 * n + i], alpha[i >> 1])

    return shrink


@functools.cache
def make_sum_weights(registers: int, pv: str) -> Any:
    """sum_weights(w, total).

    Sums of each row's weights in so many registers of `p` (`int8_weights.make_weigh`), or with pv
    "fp32" of `s`.
    """
    wide, planes = pv == "fp32", 2 if pv == "int16" else 1

    @device_function
    def sum_weights(w, total):
        high = cuda.local.array(2, i32)
        for r in range(2):
            total[r], high[r] = i32(0), i32(0)
        for i in range(registers):
            if wide:
                total[(i >> 1) & 1] = i32(total[(i >> 1) & 1] + i32(w[i]))
            elif planes == 2 and i & 4 == 0:
                high[i & 1] = ptx.dot4(w[i], ONES, high[i & 1])
            else:
                total[i & 1] = ptx.dot4(w[i], ONES, total[i & 1])
        if planes == 2:
            for r in range(2):
                total[r] = i32(total[r] + (high[r] << 8))

    return sum_weights


@functools.cache
def make_add_weights(pv: str) -> Any:
    """add_weights(total, top, l, alpha, share).

    The row's weights, of which `total` is the thread's part, enter the running sum.

    A sum that has seen what is no number is NaN, and stays it.
    """
    wide, unit = pv == "fp32", f32(1 / ONE_Q16)

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
