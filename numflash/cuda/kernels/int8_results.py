"""What the INT8 kernels leave to the caller's arrays: the log-sum-exp, sinks, dtype and layout.

On the host `scores.log_sum_exp` and `merge.apply_sinks` do this in float64. Here it is float32, so
an LSE, and a row with a sink, agree to float32's rounding; without sinks the output keeps its bits.
"""

from __future__ import annotations

import math

from ...numerics import fixedpoint as fx
from ..compile import Source
from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .pieces import make_find_block
from .scores import LN2, LOG2E

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
THREADS = 128
WARPS = THREADS // 32
LOWEST, INFINITE = f32(-3.4028234663852886e38), f32(math.inf)

# pointers: out of the kernel, m, l, q bytes, their scales, mean of k, sinks; out and lse of the
# caller
# strides in bytes: batch, head and row of out
# sizes: query heads, KV heads, queries, D, Dv, bytes of a row of q, channels of the kernel's out
# factors: scale of the scores
SIGNATURE = types.void(
    types.UniTuple(u64, 9), types.UniTuple(i64, 3), types.UniTuple(i32, 7), types.UniTuple(f32, 1)
)


@device_function
def warp_sum(x):
    for n in range(5):
        x = ptx.add(x, ptx.shuffle_xor(x, u32(1 << n)))
    return x


@device_function
def half_of(x):
    """float16 bits."""
    return ptx.half_bits(x)


@device_function
def bfloat16_of(x):
    """bfloat16 bits, rounded to even; sm_75 has no instruction for it."""
    bits = ptx.bits(x)
    rounded = (bits + u32(0x7FFF) + ((bits >> u32(16)) & u32(1))) >> u32(16)
    return u32(0x7FC0) if x != x else u32(rounded)


def int8_results(
    d: int,
    dv: int,
    dtype: str,
    pv: str = "int8",
    smooth: bool = True,
    sinks: bool = False,
    folded: bool = False,
) -> Source:
    """The kernel for padded head sizes, the dtype of the caller's output, and the weights of `pv`.

    A warp takes a row. Blocks: rows, query heads, batches.
    """
    wide, size = dtype == "float32", 4 if dtype == "float32" else 2
    unit = f32(1 / fx.WEIGHT_ONE[pv])
    narrow = bfloat16_of if dtype == "bfloat16" else half_of
    turns, v_turns, find_block = (
        (d + 31) // 32,
        (dv + 31) // 32,
        make_find_block(WARPS, folded=folded),
    )

    def results(pointers, strides, sizes, factors):
        found, m, l, q, q_scale, means, sinks_at, out, lse_out = pointers
        heads, kv_heads, queries, channels, columns, row_bytes, v_columns = sizes
        thread = i32(cuda.threadIdx.x)
        first, head, batch = find_block(queries)
        lane, i = i32(thread & 31), i32(first + (thread >> 5))
        if i < queries:
            number = u64(i32(batch * heads + head)) * u64(queries) + u64(i)
            at = number * u64(4)
            total = ptx.load_global_f32(l + at)
            octave = ptx.to_float(ptx.load_global_s32(m + at))
            lse = ptx.mul(ptx.add(octave, ptx.lg2(ptx.mul(total, unit))), LN2)
            if smooth:  # what was taken off every score of the row
                kv = i32(batch * kv_heads + head // (heads // kv_heads))
                dot = f32(0)
                for t in range(turns):
                    c = i32(lane + 32 * t)
                    if c < channels:
                        n = ptx.load_global_u8(q + number * u64(row_bytes) + u64(c))
                        mean = ptx.load_global_f32(means + u64(i32(kv * channels + c) * 4))
                        dot = ptx.fma(ptx.to_float(i32(u32(n) << u32(24)) >> 24), mean, dot)
                scale = ptx.load_global_f32(q_scale + at)
                lse = ptx.add(lse, ptx.mul(ptx.mul(warp_sum(dot), scale), factors[0]))
            if lse < LOWEST:
                lse = LOWEST
            if total == f32(0):
                lse = -INFINITE
            share = f32(1)
            if sinks:
                sink = ptx.load_global_f32(sinks_at + u64(head * 4))
                if lse < INFINITE:
                    top = ptx.fmax(lse, sink)
                    base = f32(0) if top == -INFINITE else top
                    own = ptx.ex2(ptx.mul(ptx.sub(lse, base), LOG2E))
                    both = ptx.add(own, ptx.ex2(ptx.mul(ptx.sub(sink, base), LOG2E)))
                    share = f32(0) if both == f32(0) else ptx.div(own, both)
                    lse = ptx.add(base, ptx.mul(ptx.lg2(both), LN2))
            if lane == 0:
                ptx.store_global_f32(lse_out + at, lse)
            found += number * u64(v_columns * 4)
            out += u64(i64(batch) * strides[0] + i64(head) * strides[1] + i64(i) * strides[2])
            for t in range(v_turns):
                c = i32(lane + 32 * t)
                if c < columns:
                    x = ptx.load_global_f32(found + u64(c * 4))
                    if sinks:
                        x = f32(0) if share == f32(0) else ptx.mul(x, share)
                    if wide:
                        ptx.store_global_f32(out + u64(c * size), x)
                    else:
                        ptx.store_global_u16(out + u64(c * size), narrow(x))

    return Source(results, SIGNATURE, THREADS)
