"""INT8 attention on tensor cores: the integer pipeline, with the bits of the CPU kernels and of the integer model.

Scores are m16n8k32 products of signed bytes; softmax weights are rounded to unsigned bytes once per row and key block of 128
(`tiling.KEY_BLOCK`, the same on every device) and multiply signed values in a second integer product. Between the two only
exactly rounded float operations are used, each named with its rounding so that nothing is contracted.

The accumulator of the first product is the A operand of the second if keys are taken in another order: lane quad q of 8-key
tiles 2 t and 2 t + 1 holds keys 2 q, 2 q + 1 of both, while the operand wants four consecutive keys per lane. So the values lie
transposed (channels x keys) with the keys of each 32 permuted accordingly (`permuted_keys`); integer sums do not mind.
"""
from __future__ import annotations

import numpy as np

from ... import fixedpoint as fx
from ...tiling import KEY_BLOCK
from .. import ptx
from .._target import cuda, device_function, types
from ..compile import Source
from .pieces import NEG_INF, make_load_rows, make_load_tile, swizzle_of, tanh_exact

i32, i64, u32, u64, f32 = types.int32, types.int64, types.uint32, types.uint64, types.float32
HIDDEN, MIN_OCTAVE, T_LIMIT = -(1 << 31), fx.MIN_OCTAVE, f32(fx.T_LIMIT)
P_A, P_B, P_WIDE = int(fx.P_A), int(fx.P_B), int(fx.P_WIDE)
LOG2E_Q8 = f32(fx.LOG2E_Q8)

# pointers: q, k, v (transposed), out, m, l, cq, ck (padded as v), value scale, diagonal, key_lengths, mask, bias, slopes, shift
# strides in bytes of the mask, then of the bias: batch, head, query, key
# sizes: queries, keys, bytes per row of q and k, keys stored per row of v, channels of v, query heads, left, right
# factors: softcap in Q8.8
SIGNATURE = types.void(types.UniTuple(u64, 15), types.UniTuple(i64, 8), types.UniTuple(i32, 8), types.UniTuple(f32, 1))


def permuted_keys(keys: int) -> np.ndarray:
    """Key number at each place of the transposed values, for a multiple of 32 keys."""
    place = np.arange(32)
    half, quad, e = place >> 4, (place & 15) >> 2, place & 3
    key = 16 * half + 8 * (e >> 1) + 2 * quad + (e & 1)
    return (np.arange(0, keys, 32)[:, None] + key).reshape(-1)


@device_function
def weight(t, octave):
    """P8 weight round(255 * 2**((t - 256 * octave) / 256)) of a Q8.8 score: `fixedpoint.exp2_p8` in 32-bit arithmetic."""
    y = ptx.umin(u32((octave << 8) - t), u32(65535))
    f = (y << u32(8)) & u32(0xFFFF)
    g = (f * u32(P_B)) >> u32(16)
    h = (f * (u32(P_A) - g)) >> u32(16)
    e = ptx.umin(y >> u32(8), u32(15))
    return u32(((((u32(P_WIDE) - h) & u32(0xFFFF)) >> e) + u32(128)) >> u32(8))


@device_function
def power(n):
    """2**-min(n, 126) for n >= 0, made of exponent bits."""
    return ptx.from_bits((u32(127) - ptx.umin(u32(n), u32(126))) << u32(23))


def flash_int8(d: int, dv: int, block_q: int, group: int = 1, band: bool = False, mask: bool = False, bias: bool = False,
               softcap: bool = False, alibi: bool = False) -> Source:
    """The kernel for padded head sizes d (64, 128, 256: whole swizzles) and dv (a multiple of 8)."""
    block_k = KEY_BLOCK
    threads = block_q * 2
    k_steps, key_tiles, value_tiles, p_steps = d // 32, block_k // 8, dv // 8, block_k // 32
    n_s, n_o, n_p = key_tiles * 4, value_tiles * 4, key_tiles * 2
    shift_k, xor_k = swizzle_of(d)
    q_size, k_size, v_size = block_q * d, block_k * d, dv * block_k
    load_q = make_load_rows(block_q, d, threads, group)
    load_k = make_load_tile(block_k, d, threads)
    load_v = make_load_tile(dv, block_k, threads)
    mma_s, mma_p, wait_all = ptx.mma_s8, ptx.mma_u8s8, ptx.cp_async_wait[0]

    def flash(pointers, strides, sizes, factors):
        q, k, v, out, m_out, l_out, cq, ck, v_scale, diagonals, lengths, mask_at, bias_at, slopes, shifts = pointers
        queries, key_count, d_left, key_stride, channels, heads, left, right = sizes
        cap = factors[0]
        shared = cuda.shared.array(0, u32)
        thread = i32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        kv_head, batch = i32(cuda.blockIdx.y), i32(cuda.blockIdx.z)
        kv_heads = heads // group
        sq = ptx.shared_address(shared)
        sk = sq + u32(q_size)
        sv = sk + u32(k_size)
        sc = sv + u32(v_size)
        kv = batch * kv_heads + kv_head
        k = k + u64(kv) * u64(key_count * d_left)
        v = v + u64(kv) * u64(channels * key_stride)
        ck = ck + u64(kv) * u64(key_stride * 4)
        v_scale = v_scale + u64(kv) * u64(channels * 4)
        q = q + u64(batch * heads + kv_head * group) * u64(queries * d_left)

        rows = queries * group
        first = i32(cuda.blockIdx.x) * block_q
        keys = ptx.load_global_s32(lengths + u64(batch * 4))
        diagonal = ptx.load_global_s32(diagonals + u64(batch * 4))
        tile, tiles = i32(0), (keys + block_k - 1) // block_k
        whole_low, whole_high = i32(0), keys
        if band:
            low = first // group + diagonal
            high = (min(first + block_q, rows) - 1) // group + diagonal
            tile = max(low - left, 0) // block_k
            tiles = min(tiles, (max(high + right + 1, 0) + block_k - 1) // block_k)
            whole_low, whole_high = max(high - left, 0), min(keys, low + right + 1)
        row0 = first + warp * 16 + (lane >> 2)
        query0, query1 = row0 // group, (row0 + 8) // group
        head0 = kv_head * group + (row0 - query0 * group)
        head1 = kv_head * group + (row0 + 8 - query1 * group)
        low0, low1, high0, high1 = i32(0), i32(0), keys, keys
        if band:
            low0, low1 = query0 + diagonal - left, query1 + diagonal - left
            high0, high1 = min(keys, query0 + diagonal + right + 1), min(keys, query1 + diagonal + right + 1)
        there0, there1 = row0 < rows, row0 + 8 < rows
        at0 = u64(((batch * heads + head0) * queries + query0) * 4)
        at1 = u64(((batch * heads + head1) * queries + query1) * 4)
        cq0 = ptx.load_global_f32(cq + at0) if there0 else f32(0)
        cq1 = ptx.load_global_f32(cq + at1) if there1 else f32(0)
        slope0, slope1, shift0, shift1 = f32(0), f32(0), f32(0), f32(0)
        if alibi:
            slope0 = ptx.load_global_f32(slopes + u64((batch * heads + head0) * 4)) if there0 else f32(0)
            slope1 = ptx.load_global_f32(slopes + u64((batch * heads + head1) * 4)) if there1 else f32(0)
        if softcap:
            shift0 = ptx.load_global_f32(shifts + at0) if there0 else f32(0)
            shift1 = ptx.load_global_f32(shifts + at1) if there1 else f32(0)

        load_q(sq, q, i64(queries * d_left), i64(d_left), first, rows, d_left, thread)
        ptx.cp_async_commit()
        wait_all()
        cuda.syncthreads()
        s = cuda.local.array(n_s, i32)                 # scores, then Q8.8 scores
        acc = cuda.local.array(4, i32)
        scales = cuda.local.array(2, f32)
        o = cuda.local.array(n_o, f32)
        p = cuda.local.array(n_p, u32)       # weights as A operands: 4 registers per 32 keys
        a = cuda.local.array(4, u32)
        b = cuda.local.array(4, u32)
        for i in range(n_o):
            o[i] = f32(0)
        m0, m1, l0, l1 = i32(MIN_OCTAVE), i32(MIN_OCTAVE), f32(0), f32(0)
        bad0, bad1 = i32(0), i32(0)
        q_row = warp * 16 + (lane & 15)
        q_chunk = u32((lane >> 4) ^ ((q_row >> shift_k) & xor_k))
        k_row = ((lane >> 4) << 3) + (lane & 7)
        k_chunk = u32(((lane >> 3) & 1) ^ ((k_row >> shift_k) & xor_k))
        u32(((lane >> 3) & 1) ^ (k_row & 7))
        while tile < tiles:
            start = tile * block_k
            load_k(sk, k + u64(start * d_left), i64(d_left), keys - start, d_left, thread)
            load_v(sv, v + u64(start), i64(key_stride), channels, key_stride - start, thread)
            if thread < block_k // 4:
                ptx.cp_async(sc + u32(thread * 16), ck + u64(start * 4 + thread * 16))
            ptx.cp_async_commit()
            wait_all()
            cuda.syncthreads()

            # S = Q . K^T, exact
            for i in range(n_s):
                s[i] = i32(0)
            for step in range(k_steps):
                ptx.ldmatrix(a, 0, sq + u32(q_row * d) + ((q_chunk ^ u32(2 * step)) << u32(4)))
                for n in range(key_tiles // 2):
                    ptx.ldmatrix(b, 0, sk + u32((n * 16 + k_row) * d) + ((k_chunk ^ u32(2 * step)) << u32(4)))
                    mma_s(s, 8 * n, a, 0, b, 0)
                    mma_s(s, 8 * n + 4, a, 0, b, 2)

            # t = round((float32(S) * ck) * cq) in Q8.8, hidden keys apart; the block's own maximum
            top0, top1 = i32(HIDDEN), i32(HIDDEN)
            edge = start < whole_low or start + block_k > whole_high
            for n in range(key_tiles):
                ptx.load_shared_f32_v2(scales, 0, sc + u32((8 * n + 2 * (lane & 3)) * 4))
                for e in range(2):
                    j = start + 8 * n + 2 * (lane & 3) + e
                    for r in range(2):
                        query = query1 if r else query0
                        x = ptx.mul(ptx.mul(ptx.to_float(s[4 * n + 2 * r + e]), scales[e]), cq1 if r else cq0)
                        seen = not (edge and (j < (low1 if r else low0) or j >= (high1 if r else high0)))
                        if softcap:
                            x = ptx.mul(cap, tanh_exact(ptx.div(ptx.add(x, shift1 if r else shift0), cap)))
                        if alibi:
                            x = ptx.sub(x, ptx.mul(slope1 if r else slope0, ptx.to_float(i32(abs(query + diagonal - j)))))
                        if mask or bias:
                            head = head1 if r else head0
                            seen = seen and (there1 if r else there0)
                            if seen and mask:
                                seen = ptx.load_global_u8(mask_at + u64(batch * strides[0] + head * strides[1] + query * strides[2]
                                                                        + j * strides[3])) != u32(0)
                            if seen and bias:
                                y = ptx.load_global_f32(bias_at + u64(batch * strides[4] + head * strides[5] + query * strides[6]
                                                                      + j * strides[7]))
                                x = ptx.add(x, ptx.mul(y, LOG2E_Q8))
                        if x == NEG_INF:
                            seen = False
                        spoiled = seen and x != x
                        if spoiled:
                            seen = False
                            if r:
                                bad1 = i32(1)
                            else:
                                bad0 = i32(1)
                        t = ptx.to_int(ptx.fmax(ptx.fmin(x, T_LIMIT), -T_LIMIT)) if seen else i32(HIDDEN)
                        s[4 * n + 2 * r + e] = t
                        if r:
                            top1 = ptx.imax(top1, t)
                        else:
                            top0 = ptx.imax(top0, t)
            top0 = ptx.imax(top0, ptx.shuffle_xor_i32(top0, u32(1)))
            top0 = ptx.imax(top0, ptx.shuffle_xor_i32(top0, u32(2)))
            top1 = ptx.imax(top1, ptx.shuffle_xor_i32(top1, u32(1)))
            top1 = ptx.imax(top1, ptx.shuffle_xor_i32(top1, u32(2)))

            # the block's octave, weights at that octave, and the whole octaves by which the sums so far shrink
            octave0 = i32(MIN_OCTAVE) if top0 == HIDDEN else i32((top0 + 255) >> 8)
            octave1 = i32(MIN_OCTAVE) if top1 == HIDDEN else i32((top1 + 255) >> 8)
            sum0, sum1 = i32(0), i32(0)
            for n in range(key_tiles):
                w0, w1, w2, w3 = u32(0), u32(0), u32(0), u32(0)
                if s[4 * n] != HIDDEN:
                    w0 = weight(s[4 * n], octave0)
                if s[4 * n + 1] != HIDDEN:
                    w1 = weight(s[4 * n + 1], octave0)
                if s[4 * n + 2] != HIDDEN:
                    w2 = weight(s[4 * n + 2], octave1)
                if s[4 * n + 3] != HIDDEN:
                    w3 = weight(s[4 * n + 3], octave1)
                sum0 = i32(sum0 + i32(w0) + i32(w1))
                sum1 = i32(sum1 + i32(w2) + i32(w3))
                # tiles 4 t .. 4 t + 3 fill registers (row, half): halves of a register come from tiles 2 h and 2 h + 1
                at = (n >> 2) * 4 + ((n >> 1) & 1) * 2
                if n & 1:
                    p[at] |= (w0 | (w1 << u32(8))) << u32(16)
                    p[at + 1] |= (w2 | (w3 << u32(8))) << u32(16)
                else:
                    p[at] = w0 | (w1 << u32(8))
                    p[at + 1] = w2 | (w3 << u32(8))
            sum0 = i32(sum0 + ptx.shuffle_xor_i32(sum0, u32(1)))
            sum0 = i32(sum0 + ptx.shuffle_xor_i32(sum0, u32(2)))
            sum1 = i32(sum1 + ptx.shuffle_xor_i32(sum1, u32(1)))
            sum1 = i32(sum1 + ptx.shuffle_xor_i32(sum1, u32(2)))
            new0, new1 = ptx.imax(m0, octave0), ptx.imax(m1, octave1)
            alpha0, alpha1 = power(i32(new0 - m0)), power(i32(new1 - m1))
            share0 = f32(0) if top0 == HIDDEN else power(i32(new0 - octave0))
            share1 = f32(0) if top1 == HIDDEN else power(i32(new1 - octave1))
            l0 = ptx.add(ptx.mul(l0, alpha0), ptx.mul(ptx.to_float(sum0), share0))
            l1 = ptx.add(ptx.mul(l1, alpha1), ptx.mul(ptx.to_float(sum1), share1))
            m0, m1 = new0, new1

            # O = O * alpha + (P . V) * share: the product exact, each float operation rounded once
            for n in range(value_tiles):
                for i in range(4):
                    acc[i] = i32(0)
                for step in range(p_steps // 2):
                    # four 8 x 16-byte matrices: 8 channels, 64 keys
                    ptx.ldmatrix(b, 0, sv + u32((n * 8 + (lane & 7)) * block_k)
                                 + ((u32((4 * step + (lane >> 3)) ^ (lane & 7))) << u32(4)))
                    mma_p(acc, 0, p, 8 * step, b, 0)
                    mma_p(acc, 0, p, 8 * step + 4, b, 2)
                for e in range(2):
                    o[4 * n + e] = ptx.add(ptx.mul(o[4 * n + e], alpha0), ptx.mul(ptx.to_float(acc[e]), share0))
                    o[4 * n + 2 + e] = ptx.add(ptx.mul(o[4 * n + 2 + e], alpha1), ptx.mul(ptx.to_float(acc[2 + e]), share1))
            cuda.syncthreads()
            tile += 1

        bad0 = ptx.imax(bad0, ptx.shuffle_xor_i32(bad0, u32(1)))
        bad0 = ptx.imax(bad0, ptx.shuffle_xor_i32(bad0, u32(2)))
        bad1 = ptx.imax(bad1, ptx.shuffle_xor_i32(bad1, u32(1)))
        bad1 = ptx.imax(bad1, ptx.shuffle_xor_i32(bad1, u32(2)))
        if bad0:
            l0 = f32(np.nan)
        if bad1:
            l1 = f32(np.nan)
        if lane & 3 == 0:
            if there0:
                ptx.store_global(m_out + at0, u32(m0))
                ptx.store_global_f32(l_out + at0, l0)
            if there1:
                ptx.store_global(m_out + at1, u32(m1))
                ptx.store_global_f32(l_out + at1, l1)
        r0, r1 = ptx.rcp(l0), ptx.rcp(l1)
        for n in range(value_tiles):
            for e in range(2):
                c = 8 * n + 2 * (lane & 3) + e
                if c < channels:
                    scale = ptx.load_global_f32(v_scale + u64(c * 4))
                    if there0:
                        x = f32(0) if l0 == f32(0) else ptx.mul(ptx.mul(o[4 * n + e], r0), scale)
                        ptx.store_global_f32(out + at0 * u64(channels) + u64(c * 4), x)
                    if there1:
                        x = f32(0) if l1 == f32(0) else ptx.mul(ptx.mul(o[4 * n + 2 + e], r1), scale)
                        ptx.store_global_f32(out + at1 * u64(channels) + u64(c * 4), x)

    return Source(flash, SIGNATURE, threads, q_size + k_size + v_size + block_k * 4)
