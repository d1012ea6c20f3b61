"""The fused floating-point attention.

Register tiles, online softmax in base 2, float32 sums, one query tile at a time.

FlashAttention 2 (Dao 2023, algorithm 1) on one core. Per query tile of `block_q` rows and key
block:

    scores    s = Q.K^T                                 `score_tile`: a panel of K stays in L1
    change    score functions, softcap, ALiBi, bias,
              mask, edges of the keys a row attends to  `edge_rows`, only where asked for
    softmax   running maximum m, p = 2**(c * s - m),
              running sum l; c = scale * log2(e)        `row_exceeds`, `row_weights`
    values    O += P.V                                  `value_tile`: columns of V stay in L1

and at the end of a tile out = O / l, lse = (m + log2(l)) * ln 2.

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

import numpy as np

from ...jit.compiler import bare, inline, separate
from ...jit.memory import LINE, reinterpret, uncleared, zeros
from ...jit.parallel import over_tasks
from ...numerics.fixedpoint import LN2, LOG2E
from ...tiling import tiling
from ..isa.amx_tiles import tile_state
from ..isa.operands import Rows
from ..isa.score_calls import Corner, Function, batch_of, call_tile, full_run, has_holes, trimmed
from ..isa.vectors import address, next_task, prefetch_line, prefetch_written
from ..semantics import Dense, row_of, seen_range, step_of
from . import float_rows
from . import float_tiles as tiles
from .float_exp2 import FLOOR
from .float_isas import FLOAT_ISAS
from .float_state import Group, State, Tile

F = np.float32
HIDDEN = F(-np.inf)
GROWTH = F(8)  # octaves that the maximum may grow before O is rescaled
# From so many octaves on a row's scores are multiplied by their factor before they become weights.
# There a rounded product, as the maximum is one, is whole octaves away from the exact one inside a
# multiply-add, and the weight of the largest score would be 0 or infinite instead of 1.
COARSE = F(2.0**24)
MAGNITUDE = np.uint32(0x7FFFFFFF)
LOWEST = F(-1e37)  # a row whose maximum is lower is computed again
inlined = bare(forceinline=True)  # a call would copy all arrays of its tuples


@functools.cache
def make_attend(name: str, precision: str, key_block: int = 0):
    """The kernel of one target, with the key blocks of its tiling or of `key_block` keys.

    attend(operands, results, c, semantics, sizes, counter), see `Operands`, `Results`, `Sizes`.
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
    top_of = float_rows.row_max(name)
    exceeds = float_rows.row_exceeds(name)
    weights = float_rows.row_weights(name)
    scale = float_rows.row_scale(name)
    total_of = float_rows.row_total(name)
    times = float_rows.row_times(name)
    softcap = float_rows.row_softcap(name)
    softcap_seen = float_rows.row_softcap(name, hidden=True)
    alibi = float_rows.row_alibi(name)
    add_bias = float_rows.row_bias(name)
    apply_mask = float_rows.row_mask(name)
    found = float_rows.any_byte(name)
    beyond = float_rows.row_beyond(name)
    operand, word = (np.float32, np.uint32) if group == 1 else (np.uint16, np.uint16)
    spare = np.uint32(32 - 8 * np.dtype(word).itemsize)  # bits of a float32 that no operand has

    @inlined
    def scores(state, g, k, first, stop, to):
        """x[to:] = Q.K^T of the group at row g, for keys `first` to `stop` of one panel."""
        stride = state.q.shape[1]
        column = first % panel
        n = (stop - first + unit - 1) // unit * (unit // lanes)
        at = (first - column) * stride + column * group
        q, x, row, step = state.q, state.x, g * stride, stride // group
        if n == nv:
            score4(q, row, stride, k, at, step, x, to, key_block)
        elif n == 3:
            score3(q, row, stride, k, at, step, x, to, key_block)
        elif n == 2:
            score2(q, row, stride, k, at, step, x, to, key_block)
        else:
            score1(q, row, stride, k, at, step, x, to, key_block)

    @inlined
    def block_scores(state, tile, k, block, stop):
        """The scores of a key block, panel by panel: a panel of K stays in L1 for all rows."""
        for j in range(block, min(block + key_block, stop), panel):
            for g in range(0, tile.real, mr):
                a, z = max(state.start[g // mr], j), min(state.stop[g // mr], j + panel)
                if a < z:
                    scores(state, g, k, a, z, g * key_block + a - block)

    @inlined
    def panel_seen(mask, at, step, rows, n):
        """Whether the dense mask lets any of the rows, from mask[at] on and `step` apart, attend to
        any of n keys.
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
    def panels_seen(semantics, dense, tile, g, rows, first, stop):
        """first .. stop without the panels at either end that the dense mask hides from all rows."""
        mask, step = dense.mask, step_of(semantics.mask)
        at = row_of(semantics.mask, tile.b, tile.h, tile.row + g)
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

    @inlined
    def union(state, g, rows, s):
        """The keys that any of a group's rows attends to."""
        left, right = s, 0
        for i in range(g, g + rows):
            if state.hi[i] > state.lo[i]:
                left, right = min(left, state.lo[i]), max(right, state.hi[i])
        return left, right

    @inlined
    def group_spans(semantics, dense, state, tile, block, s):
        """The keys of a block that each group computes: start, stop, skip."""
        functions = semantics.functions
        for g in range(0, tile.real, mr):
            rows = min(mr, tile.real - g)
            left, right = union(state, g, rows, s)
            a, z = max(left // unit * unit, block), min(right, block + key_block)
            if functions.states.size > 0 and a < z:
                b, h, row, last = tile.b, tile.h, tile.row + g, tile.row + g + rows - 1
                if has_holes(functions, b, h, row, last):
                    a, z = trimmed(functions, b, h, row, last, a, z, unit)
            if semantics.has_mask:
                a, z = panels_seen(semantics, dense, tile, g, rows, a, z)
            state.start[g // mr] = a
            state.stop[g // mr] = z
            state.skip[g // mr] = max(left - a, 0) // step * step

    @inlined
    def add_values(state, tile, v, block, columns):
        """O += P.V of all groups, a chunk of V's columns after the other."""
        p, o = state.p, state.o
        t = 0
        while t < columns:
            width = (
                panel if t + panel <= columns else half if nv > 1 and t + half <= columns else lanes
            )
            for g in range(0, tile.real, mr):
                first = state.start[g // mr]
                n = state.stop[g // mr] - first
                if n > 0:
                    steps = (n + step - 1) // step * (step // group)
                    at = g * key_block + first - block
                    where, to = first * columns + t * group, g * columns + t
                    if width == panel:
                        value4(p, at, key_block, v, where, columns * group, steps, o, to, columns)
                    elif width == half:
                        value2(p, at, key_block, v, where, columns * group, steps, o, to, columns)
                    else:
                        value1(p, at, key_block, v, where, columns * group, steps, o, to, columns)
            t += width

    @bare
    def grow_row(state, i, at, count, factor):
        """Raise the maximum of row i to that of its scores x[at:] * factor, and rescale its sums.

        A NaN beside hidden scores only becomes the maximum.
        """
        x, m = state.x, state.m
        top = top_of(x, at, count)
        if top == HIDDEN:
            for j in range(at, at + count * lanes):
                if x[j] != x[j]:
                    top = F(np.nan)
        top = F(top * factor)
        if m[i] != HIDDEN:
            below, row, sums = F(m[i] - top), state.o[i], state.l[i]
            shrink = F(0) if below < F(FLOOR) else F(np.exp2(below))
            for t in range(row.size):
                row[t] = row[t] * shrink
            for t in range(lanes):
                sums[t] = sums[t] * shrink
        m[i] = top

    @inlined
    def weigh_row(state, i, at, count, factor):
        """Scores x[at:] of row i, in units of `factor` > 0, to weights p, and their sum to l."""
        x, m = state.x, state.m
        if m[i] == HIDDEN or exceeds(x, at, count, factor, F(m[i] + GROWTH)):
            grow_row(state, i, at, count, factor)
            if not abs(m[i]) < COARSE:
                scale(x, at, count, factor)
                factor = F(1)
        if m[i] == HIDDEN:
            for j in range(at, at + count * lanes):
                state.p[j] = operand(0)
        else:
            weights(x, at, count, factor, m[i], state.p, at, state.l, i * lanes)

    @inlined
    def edge_rows(semantics, dense, tile, group, c, state):
        """Weights of a group's rows that options change or that attend to a part of its keys.

        Softcap, ALiBi, bias and mask in the field's order.
        """
        first = group.first
        n = group.stop - first
        count, whole, rest = (n + unit - 1) // unit * (unit // lanes), n // lanes, n % lanes
        some = (n + lanes - 1) // lanes
        x, b, h, row = state.x, tile.b, tile.h, tile.row
        cap, slope = semantics.softcap, F(0)
        if semantics.slopes.size > 0:
            slope = semantics.slopes[b, h]
        bias, bias_end, mask, mask_end = dense.bias, dense.bias_end, dense.mask, dense.mask_end
        bias_at = row_of(semantics.bias, b, h, row + group.g) + first
        mask_at = row_of(semantics.mask, b, h, row + group.g) + first
        bias_step, mask_step = step_of(semantics.bias), step_of(semantics.mask)
        centre = row + semantics.diagonal[b] - first
        early = cap > F(0) or slope != F(0) or semantics.has_bias or not c > F(0)
        for i in range(group.g, group.g + group.rows):
            at = i * key_block + first - group.block
            tail, end = at + whole * lanes, at + count * lanes
            left, right = max(state.lo[i] - first, 0), min(state.hi[i], group.stop) - first
            if right > left:
                factor = c
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
                weigh_row(state, i, at, count, factor)
            else:
                for j in range(at, end):
                    state.p[j] = operand(0)
            bias_at, mask_at = bias_at + bias_step, mask_at + mask_step

    @inlined
    def call_functions(semantics, tile, group, c, x):
        """The user's functions on a group's scores; the factor that they leave the scores with.

        A run of keys that all rows see is left to the function without the mask, if there is one.
        """
        functions, b, h = semantics.functions, tile.b, tile.h
        row, rows = tile.row + group.g, group.rows
        masked, unmasked = Function(functions.masked, functions.masked_frame), functions.unmasked
        batch, at = batch_of(functions, b), group.g * key_block - group.block
        a, z = full_run(functions, b, h, row, row + rows - 1, group.first, group.stop)
        scale, unit, factor = F(c * F(LN2)), F(LOG2E), F(1)
        if unmasked == 0 and c > F(0):  # the mask leaves the units of the scores as they are
            scale, unit, factor = F(1), F(1), c
        elif unmasked == 0:
            a = z = group.first
        elif a < z:
            alone, corner = Function(unmasked, functions.unmasked_frame), Corner(batch, h, row, a)
            call_tile(alone, Rows(x, at + a, key_block), rows, z - a, corner, scale, unit)
        for key, stop in ((group.first, a), (z, group.stop)):
            if key < stop:
                corner = Corner(batch, h, row, key)
                call_tile(
                    masked, Rows(x, at + key, key_block), rows, stop - key, corner, scale, unit
                )
        return factor

    @inlined
    def soften(semantics, dense, tile, group, c, state):
        """Scores of a group to weights."""
        most, least = 0, group.stop  # the keys that all rows of the group attend to
        for i in range(group.g, group.g + group.rows):
            most, least = max(most, state.lo[i]), min(least, state.hi[i])
        factor = c
        if semantics.functions.masked != 0:
            factor = call_functions(semantics, tile, group, c, state.x)
        partial = most > group.first or least < group.stop
        changed = semantics.general or not factor > F(0)
        if changed or partial or (group.stop - group.first) % unit:
            edge_rows(semantics, dense, tile, group, factor, state)
        else:
            count = (group.stop - group.first) // lanes
            for i in range(group.g, group.g + group.rows):
                weigh_row(state, i, i * key_block + group.first - group.block, count, factor)

    @bare(forceinline=True)
    def beyond_limit(row, limit):
        """Whether an operand of the row is above the limit, or not finite; `limit` is bits."""
        bits, whole = reinterpret(row, word), row.size // (lanes * group)
        found = beyond(row, 0, whole, limit)
        for e in range(whole * lanes * group, row.size):
            found |= (bits[e] & (MAGNITUDE >> spare)) > (limit >> spare)
        return found

    @bare
    def load_tile(q, limit, semantics, tile, s, state):
        """Load the rows of a tile as operands, the keys each attends to, and the empty state.

        Returns the range of keys that any row attends to.
        """
        first, stop = s, 0
        for i in range(tile.real):
            source, target = q[tile.n, tile.row + i], state.q[i]
            for e in range(source.size):
                target[e] = source[e]
            lo, hi = seen_range(semantics, tile.b, tile.h, tile.row + i, s)
            state.lo[i], state.hi[i] = lo, hi
            state.m[i] = HIDDEN
            state.beyond[i] = beyond_limit(source, limit)
            if hi > lo:
                first, stop = min(first, lo), max(stop, hi)
        groups = (tile.real + mr - 1) // mr * mr
        state.q[tile.real : groups] = operand(0)
        state.o[:groups], state.l[:groups] = F(0), F(0)
        return first, stop

    @bare(forceinline=True)
    def ask_for_rows(q, n, first, count):
        """Prefetch the query rows of the next tile that this worker is likely to take."""
        if first >= 0:
            place, size = address(q[n, first]), q.shape[2] * q.itemsize
            for line in range(0, min(count, q.shape[1] - first) * size, LINE):
                prefetch_line(place + line)

    @bare
    def store_rows(tile, shifted, state, counter, results):
        """out = O / l and the LSE of each row, and whether it must be computed again in float64."""
        m, (out, lse, redo) = state.m, results
        for i in range(tile.real):
            result, sums = out[tile.n, tile.row + i], state.o[i]
            total = total_of(state.l, i * lanes)
            seen = state.hi[i] > state.lo[i]
            infinite = False
            if seen:
                r, whole = F(0) if total == F(0) else F(1) / total, result.size // lanes
                infinite = times(sums, 0, whole, r, result, 0)
                for t in range(whole * lanes, result.size):
                    result[t] = sums[t] * r
                    infinite |= not np.isfinite(result[t])
            else:  # `sums` may be NaN: 0 * NaN of keys that other rows attend to
                result[:] = F(0)
            lse[tile.n, tile.row + i] = (
                F((m[i] + np.log2(np.float64(total))) * LN2) if total != F(0) else HIDDEN
            )
            held = m[i] > LOWEST or (m[i] == HIDDEN and not shifted)
            again = seen and (infinite or state.beyond[i] or not held)
            redo[tile.n, tile.row + i] = again
            if again:
                counter[1] = 1

    @bare
    def run_tiles(x, results, c, semantics, sizes, counter, state, dense):
        """Query tiles, as long as there are any: the loop of this file's description."""
        n_heads, length, _ = x.q.shape
        tiles = (length + sizes.block_q - 1) // sizes.block_q
        shifted = semantics.has_bias or semantics.slopes.size > 0
        s = sizes.keys
        while True:
            task = next_task(counter)
            if task >= n_heads * tiles:
                break
            n = task // tiles
            row = (tiles - 1 - task % tiles) * sizes.block_q  # the longest causal tiles first
            b, h = n // sizes.heads, n % sizes.heads
            n_kv = b * sizes.kv_heads + h * sizes.kv_heads // sizes.heads
            tile = Tile(n, b, h, row, min(sizes.block_q, length - row))
            limit = reinterpret(x.limits, np.uint32)[n_kv]
            first, stop = load_tile(x.q, limit, semantics, tile, s, state)
            ask_for_rows(x.q, n, row - sizes.workers * sizes.block_q, sizes.block_q)
            own = results.out[n, row]  # a store waits for its cache line, too
            for line in range(0, tile.real * own.size * 4, LINE):
                prefetch_written(address(own) + line)
            for block in range(first // key_block * key_block, stop, key_block):
                group_spans(semantics, dense, state, tile, block, s)
                block_scores(state, tile, x.keys[n_kv], block, stop)
                for g in range(0, tile.real, mr):
                    a, z = state.start[g // mr], state.stop[g // mr]
                    if a < z:
                        rows = Group(g, min(mr, tile.real - g), a, z, block)
                        soften(semantics, dense, tile, rows, c, state)
                        state.start[g // mr] += state.skip[g // mr]
                add_values(state, tile, x.values[n_kv], block, sizes.columns)
            store_rows(tile, shifted, state, counter, results)

    @inline
    def work(_, x, results, c, semantics, sizes, counter):
        """One worker."""
        stride, block_q = (x.q.shape[2] + step - 1) // step * step, sizes.block_q
        scores = uncleared((block_q * key_block,), np.float32, "float scores")
        state = State(
            zeros((block_q, stride), operand, "float query tile"),
            scores,
            scores
            if group == 1
            else uncleared((block_q * key_block,), operand, "bfloat16 weights"),
            uncleared((block_q, sizes.columns), np.float32, "float output tile"),
            uncleared((block_q, lanes), np.float32, "float sums of weights"),
            uncleared((block_q,), np.float32, "float maxima"),
            uncleared((block_q,), np.uint8, "float rows beyond the limit"),
            uncleared((block_q,), np.int64, "float first keys of rows"),
            uncleared((block_q,), np.int64, "float last keys of rows"),
            uncleared((block_q // mr,), np.int64, "float first keys of groups"),
            uncleared((block_q // mr,), np.int64, "float last keys of groups"),
            uncleared((block_q // mr,), np.int64, "float skipped keys of groups"),
        )
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            uncleared((lanes,), np.uint8, "float last part of the mask"),
            uncleared((lanes,), np.float32, "float last part of the bias"),
        )
        begin_tiles()  # after what may fail: the tiles of AMX stay configured until `end_tiles`
        run_tiles(x, results, c, semantics, sizes, counter, state, dense)
        end_tiles()

    @separate(no_cpython_wrapper=False)
    def attend(x, results, c, semantics, sizes, counter):
        """All query tiles of all heads.

        x Operands; results Results; c float32 scale * log2(e); counter (2,) int64 zeros, the second
        1 afterwards if there is a row to redo.
        """
        over_tasks(work, sizes.workers, (x, results, c, semantics, sizes, counter))

    return attend
