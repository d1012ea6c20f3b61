"""The fused floating-point attention.

Register tiles, online softmax in base 2, float32 sums, one query tile at a time.

FlashAttention 2 (Dao 2023, algorithm 1) on one core. Per query tile of `block_q` rows and key
block:

    scores   s = Q.K^T                                                  (score_tile: a panel of K
    stays in L1 for all rows) change   softcap, ALiBi, bias, mask, edges of the keys a row attends
    to (edge_rows, only where asked for) softmax  running maximum m, p = 2**(c * s - m), running sum
    l (row_exceeds, row_weights); c = scale * log2(e) values   O += P.V (value_tile: so do the
    columns of V) out = O / l, lse = (m + log2(l)) * ln 2

K and V come from beyond L2 once per query tile, so the tile is large. Its rows go in groups, as
many as a register tile has (6, or 32 with AMX). The maximum is followed only when it grows by more
than 8 octaves: p stays below 2**8, and O is hardly ever rescaled. Keys that no row of a group can
see are neither multiplied nor read, nor panels at the ends of a key block that a dense mask hides
from all of them.

What float32 cannot hold (scores that overflow, NaN or infinity in a hidden value, a row of biases
near the lowest float) is noticed per row, by the largest magnitudes or by the result itself, and
done again by `flash_rows` in float64.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, separate
from ...jit.memory import reinterpret, uncleared, zeros
from ...jit.parallel import over_tasks
from ...tiling import tiling
from ..isa.amx_tiles import tile_state
from ..isa.score_calls import batch_of, call_tile, must_mask, trimmed
from ..isa.vectors import next_task
from ..semantics import Dense, row_of, seen_range, step_of
from . import float_tiles as tiles
from .float_packing import largest
from .float_tiles import FLOAT_ISAS

F = np.float32
HIDDEN = F(-np.inf)
GROWTH = F(8)  # octaves that the maximum may grow before O is rescaled
LOWEST = F(-1e37)  # a row whose maximum is lower is computed again
LN2 = np.log(2.0)
LOG2E = 1 / LN2
inlined = bare(forceinline=True)  # where options go in: a call would copy them all


class Room(NamedTuple):
    """What a worker needs for one query tile.

    The rows of `bounds` and `spans` are named in `run_tiles`.
    """

    q: np.ndarray  # (block_q, channels) operands
    x: np.ndarray  # (block_q * key_block,) float32 scores
    p: np.ndarray  # (block_q * key_block,) weights as operands: x itself where these are float32
    o: np.ndarray  # (block_q, columns) float32
    l: np.ndarray  # (block_q, lanes) float32 sums of the weights
    m: np.ndarray  # (block_q,) float32 maxima
    magnitude: np.ndarray  # (block_q,) uint32: bits of the largest |q|
    bounds: np.ndarray  # (2, block_q) int64
    spans: np.ndarray  # (3, groups) int64
    mask_end: np.ndarray  # (lanes,) uint8 and float32: copies of the last keys' mask and bias
    bias_end: np.ndarray


@functools.cache
def make_attend(name: str, precision: str, key_block: int = 0):
    """The kernel of one target, with the key blocks of its tiling or of `key_block` keys.

    attend(q, keys, limits, values, columns, c, semantics, heads, s, counter, out, lse, redo).
    """
    isa = FLOAT_ISAS[name]
    key_block = key_block or tiling(name, precision).key_block
    lanes = isa.lanes
    group = isa.group
    panel = isa.panel
    nv = isa.nv
    mr = isa.rows
    step = isa.step
    unit = isa.unit
    score1, score2, score3, score4 = (tiles.score_tile(name, min(n, nv)) for n in (1, 2, 3, 4))
    value1, value2, value4 = (tiles.value_tile(name, n) for n in (1, max(1, nv // 2), nv))
    half = max(1, nv // 2) * lanes
    begin_tiles, end_tiles = tile_state(name)
    top_of = tiles.row_max(name)
    exceeds = tiles.row_exceeds(name)
    weights = tiles.row_weights(name)
    scale = tiles.row_scale(name)
    softcap = tiles.row_softcap(name)
    softcap_seen = tiles.row_softcap(name, hidden=True)
    alibi = tiles.row_alibi(name)
    add_bias = tiles.row_bias(name)
    apply_mask = tiles.row_mask(name)
    found = tiles.any_byte(name)
    operand = np.float32 if group == 1 else np.uint16

    @bare
    def scores(q, q_off, stride, k, first, stop, x, x_off):
        """x[:, x_off ...] = Q.K^T of a group of rows for keys first ..

        Stop of one panel, in whole units.
        """
        column = first % panel
        n = (stop - first + unit - 1) // unit * (unit // lanes)
        at = (first - column) * stride + column * group
        if n == nv:
            score4(q, q_off, stride, k, at, stride // group, x, x_off, key_block)
        elif n == 3:
            score3(q, q_off, stride, k, at, stride // group, x, x_off, key_block)
        elif n == 2:
            score2(q, q_off, stride, k, at, stride // group, x, x_off, key_block)
        else:
            score1(q, q_off, stride, k, at, stride // group, x, x_off, key_block)

    @inlined
    def panel_seen(mask, at, step, rows, n):
        """Whether the dense mask lets any of the rows, from mask[at] on and `step` apart, see any
        of n keys.
        """
        for _ in range(rows):
            if found(mask, at, n // lanes):
                return True
            for j in range(at + n // lanes * lanes, at + n):
                if mask[j]:
                    return True
            at += step
        return False

    @inlined
    def panels_seen(semantics, dense, b, h, row, rows, first, stop):
        """first .. stop without the panels at either end that the dense mask hides from all rows."""
        mask, at, step = dense.mask, row_of(semantics.mask, b, h, row), step_of(semantics.mask)
        while first < stop:
            after = min(stop, first // panel * panel + panel)
            if panel_seen(mask, at + first, step, rows, after - first):
                break
            first = after
        while first < stop:
            before = max(first, (stop - 1) // panel * panel)
            if panel_seen(mask, at + before, step, rows, stop - before):
                break
            stop = before
        return first, stop

    @bare
    def values(p, start, stop, real, v, block, columns, o):
        """O += P.V of all groups, a chunk of V's columns after the other.

        Group g attends to keys start[g] .. stop[g] of the block.
        """
        stride, t = columns * group, 0
        while t < columns:
            width = (
                panel if t + panel <= columns else half if nv > 1 and t + half <= columns else lanes
            )
            for g in range(0, real, mr):
                first, n = start[g // mr], stop[g // mr] - start[g // mr]
                if n > 0:
                    steps = (n + step - 1) // step * (step // group)
                    at = g * key_block + first - block
                    where, to = first * columns + t * group, g * columns + t
                    if width == panel:
                        value4(p, at, key_block, v, where, stride, steps, o, to, columns)
                    elif width == half:
                        value2(p, at, key_block, v, where, stride, steps, o, to, columns)
                    else:
                        value1(p, at, key_block, v, where, stride, steps, o, to, columns)
            t += width

    @bare
    def grow_row(x, at, count, m, l, o, i):
        """Follow the maximum of a row, and bring its sums to it.

        a NaN beside hidden scores only becomes the maximum.
        """
        top = top_of(x, at, count)
        if top == HIDDEN:
            for j in range(at, at + count * lanes):
                if x[j] != x[j]:
                    top = F(np.nan)
        if m[i] != HIDDEN:
            shrink, row, sums = F(np.exp2(F(m[i] - top))), o[i], l[i]
            for t in range(row.size):
                row[t] = row[t] * shrink
            for t in range(lanes):
                sums[t] = sums[t] * shrink
        m[i] = top

    @inlined
    def edge_rows(
        semantics, dense, b, h, row, g, rows, first, stop, block, lo, hi, c, x, p, m, l, o
    ):
        """Weights of a group's rows that do not see all keys of first .. stop as they are.

        Softcap, ALiBi, bias and mask in the field's order. No array is taken out of a tuple, and no
        slice made, row by row: each costs two atomic operations on a counter.
        """
        n = stop - first
        count, whole, rest = (n + unit - 1) // unit * (unit // lanes), n // lanes, n % lanes
        some = (n + lanes - 1) // lanes
        cap, slope = semantics.softcap, F(0)
        if semantics.slopes.size > 0:
            slope = semantics.slopes[b, h]
        bias, bias_end, mask, mask_end = dense.bias, dense.bias_end, dense.mask, dense.mask_end
        bias_at, bias_step = row_of(semantics.bias, b, h, row + g) + first, step_of(semantics.bias)
        mask_at, mask_step = row_of(semantics.mask, b, h, row + g) + first, step_of(semantics.mask)
        centre = row + semantics.diagonal[b] - first
        early = cap > F(0) or slope != F(0) or semantics.has_bias or not c > F(0)
        for i in range(g, g + rows):
            at = i * key_block + first - block
            tail, end = at + whole * lanes, at + count * lanes
            left, right = max(lo[i] - first, 0), min(hi[i], stop) - first
            factor = c
            if right > left:
                if early:
                    scale(x, at, count, c)
                    factor = F(1)
                if cap > F(0):
                    if semantics.functions.masked != 0:
                        softcap_seen(x, at, some, cap)
                    else:
                        softcap(x, at, some, cap)
                if slope != F(0):
                    alibi(x, at, some, slope, centre + i)
                if semantics.has_bias:
                    add_bias(x, at, whole, bias, bias_at)
                    if rest:
                        for j in range(rest):
                            bias_end[j] = bias[bias_at + whole * lanes + j]
                        add_bias(x, tail, 1, bias_end, 0)
                if semantics.has_mask:
                    apply_mask(x, at, whole, mask, mask_at)
                    if rest:
                        for j in range(rest):
                            mask_end[j] = mask[mask_at + whole * lanes + j]
                        apply_mask(x, tail, 1, mask_end, 0)
                for j in range(at, at + left):
                    x[j] = HIDDEN
                for j in range(at + right, end):
                    x[j] = HIDDEN
                if exceeds(x, at, count, factor, F(m[i] + GROWTH)):
                    scale(x, at, count, factor)
                    factor = F(1)
                    grow_row(x, at, count, m, l, o, i)
            if right <= left or m[i] == HIDDEN:
                for j in range(at, end):
                    p[j] = operand(0)
            else:
                weights(x, at, count, factor, m[i], p, at, l, i * lanes)
            bias_at, mask_at = bias_at + bias_step, mask_at + mask_step

    @bare
    def run_tiles(
        q,
        keys,
        limits,
        values_packed,
        columns,
        c,
        semantics,
        heads,
        block_q,
        s,
        counter,
        out,
        lse,
        redo,
        room,
    ):
        """Query tiles, as long as there are any."""
        n_heads, length, d = q.shape
        dv = out.shape[2]
        h_all, h_kv, _ = heads
        tiles = (length + block_q - 1) // block_q
        functions = semantics.functions
        shifted = semantics.has_bias or semantics.slopes.size > 0
        q_tile, x, p, o, l, m, worst, bounds, spans, mask_end, bias_end = room
        stride, magnitude = q_tile.shape[1], reinterpret(worst, np.float32)
        lo, hi, start, end, skip = bounds[0], bounds[1], spans[0], spans[1], spans[2]
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            mask_end,
            bias_end,
        )
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            # the longest causal tiles first
            n = task // tiles
            row = (tiles - 1 - task % tiles) * block_q
            b, h = n // h_all, n % h_all
            n_kv = b * h_kv + h * h_kv // h_all
            real = min(block_q, length - row)
            k, v = keys[n_kv], values_packed[n_kv]
            first, stop = s, 0
            for i in range(real):
                source, target = q[n, row + i], q_tile[i]
                for e in range(d):
                    target[e] = source[e]
                lo[i], hi[i] = seen_range(semantics, b, h, row + i, s)
                m[i] = HIDDEN
                worst[i] = largest(reinterpret(q_tile[i], np.uint32), group, np.uint32(0))
                if hi[i] > lo[i]:
                    first, stop = min(first, lo[i]), max(stop, hi[i])
            groups = (real + mr - 1) // mr * mr
            q_tile[real:groups] = operand(0)
            o[:groups], l[:groups] = F(0), F(0)
            for block in range(first // key_block * key_block, stop, key_block):
                for g in range(0, real, mr):
                    # keys that any row of the group attends to
                    rows = min(mr, real - g)
                    left = s
                    right = 0
                    for i in range(g, g + rows):
                        if hi[i] > lo[i]:
                            left, right = min(left, lo[i]), max(right, hi[i])
                    a, z = max(left // unit * unit, block), min(right, block + key_block)
                    if functions.states.size > 0 and a < z:
                        last = row + g + rows - 1
                        a, z = trimmed(functions, b, h, row + g, last, a, z, unit)
                    if semantics.has_mask:
                        a, z = panels_seen(semantics, dense, b, h, row + g, rows, a, z)
                    start[g // mr], end[g // mr], skip[g // mr] = (
                        a,
                        z,
                        max(left - a, 0) // step * step,
                    )
                for j in range(block, min(block + key_block, stop), panel):
                    for g in range(0, real, mr):
                        a, z = max(start[g // mr], j), min(end[g // mr], j + panel)
                        if a < z:
                            scores(
                                q_tile, g * stride, stride, k, a, z, x, g * key_block + a - block
                            )
                for g in range(0, real, mr):
                    a, z = start[g // mr], end[g // mr]
                    if a >= z:
                        continue
                    # keys that all rows of the group see
                    rows = min(mr, real - g)
                    most = 0
                    least = s
                    for i in range(g, g + rows):
                        most, least = max(most, lo[i]), min(least, hi[i])
                    factor_all = c
                    if functions.masked != 0:
                        address, frame = functions.masked, functions.masked_frame
                        if not must_mask(functions, b, h, row + g, row + g + rows - 1, a, z):
                            address, frame = functions.unmasked, functions.unmasked_frame
                        if address != 0:
                            at = g * key_block + a - block
                            call_tile(
                                address,
                                frame,
                                x,
                                at,
                                key_block,
                                rows,
                                z - a,
                                batch_of(functions, b),
                                h,
                                row + g,
                                a,
                                F(c * F(LN2)),
                                F(LOG2E),
                            )
                            factor_all = F(1)
                    if semantics.general or most > a or least < z or (z - a) % unit:
                        edge_rows(
                            semantics,
                            dense,
                            b,
                            h,
                            row,
                            g,
                            rows,
                            a,
                            z,
                            block,
                            lo,
                            hi,
                            factor_all,
                            x,
                            p,
                            m,
                            l,
                            o,
                        )
                    else:
                        count = (z - a) // lanes
                        for i in range(g, g + rows):
                            at, factor = i * key_block + a - block, factor_all
                            if exceeds(x, at, count, factor, F(m[i] + GROWTH)):
                                scale(x, at, count, factor)
                                factor = F(1)
                                grow_row(x, at, count, m, l, o, i)
                            if m[i] == HIDDEN:  # only a function hides keys on this path
                                for j in range(at, at + count * lanes):
                                    p[j] = operand(0)
                            else:
                                weights(x, at, count, factor, m[i], p, at, l, i * lanes)
                    start[g // mr] += skip[g // mr]
                values(p, start, end, real, v, block, columns, o)
            for i in range(real):
                result, sums, bits = out[n, row + i], o[i], np.uint32(0)
                total = F(0)
                for t in range(lanes):
                    total = total + l[i, t]
                r = F(0) if total == F(0) else F(1) / total
                seen = hi[i] > lo[i]  # else `sums` may be NaN: 0 * NaN of keys that other rows see
                for t in range(dv):
                    result[t] = sums[t] * r if seen else F(0)
                words = reinterpret(result, np.uint32)
                for t in range(dv):
                    bits = max(bits, np.uint32(words[t] & np.uint32(0x7FFFFFFF)))
                lse[n, row + i] = (
                    F((m[i] + np.log2(np.float64(total))) * LN2) if total != F(0) else HIDDEN
                )
                held = m[i] > LOWEST or (m[i] == HIDDEN and not shifted)
                held &= magnitude[i] <= limits[n_kv]
                redo[n, row + i] = seen and not (held and bits < np.uint32(0x7F800000))
                if redo[n, row + i]:
                    counter[1] = 1

    @inline
    def work(
        _,
        q,
        keys,
        limits,
        values_packed,
        columns,
        c,
        semantics,
        heads,
        block_q,
        s,
        counter,
        out,
        lse,
        redo,
    ):
        """One worker."""
        stride = (q.shape[2] + step - 1) // step * step
        begin_tiles()
        x = uncleared((block_q * key_block,), np.float32, "float scores")
        p = x if group == 1 else uncleared((block_q * key_block,), operand, "bfloat16 weights")
        room = Room(
            zeros((block_q, stride), operand, "float query tile"),
            x,
            p,
            uncleared((block_q, columns), np.float32, "float output tile"),
            uncleared((block_q, lanes), np.float32, "float sums of weights"),
            uncleared((block_q,), np.float32, "float maxima"),
            uncleared((block_q,), np.uint32, "float query magnitudes"),
            uncleared((2, block_q), np.int64, "float bounds of rows"),
            uncleared((3, block_q // mr), np.int64, "float bounds of groups"),
            uncleared((lanes,), np.uint8, "float last part of the mask"),
            uncleared((lanes,), np.float32, "float last part of the bias"),
        )
        run_tiles(
            q,
            keys,
            limits,
            values_packed,
            columns,
            c,
            semantics,
            heads,
            block_q,
            s,
            counter,
            out,
            lse,
            redo,
            room,
        )
        end_tiles()

    @separate(no_cpython_wrapper=False)
    def attend(
        q,
        keys,
        limits,
        values_packed,
        columns,
        c,
        semantics,
        heads,
        block_q,
        s,
        counter,
        out,
        lse,
        redo,
    ):
        """All query tiles of all heads.

        q (N, L, D) operands; keys, values_packed (Nkv, ...) packed; limits (Nkv,) float32 largest
        |q| without overflow; columns of a row of V; c float32 scale * log2(e); heads = (H, Hkv,
        workers); block_q rows of a tile, whole groups; counter (2,) int64 zeros, the second 1
        afterwards if there is a row to redo; out (N, L, Dv), lse (N, L) float32; redo (N, L) uint8,
        1 for a row that float32 cannot hold.
        """
        over_tasks(
            work,
            heads[2],
            (
                q,
                keys,
                limits,
                values_packed,
                columns,
                c,
                semantics,
                heads,
                block_q,
                s,
                counter,
                out,
                lse,
                redo,
            ),
        )

    return attend
