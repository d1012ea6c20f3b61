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

A worker packs K and V of one head and computes all query tiles that need them, so that they stay in
L2 as far as they fit. Where workers would not get equally many heads, all heads are packed first and a
task is one query tile. Longer K and V come from beyond L2 once per query tile, so the tile is large.
Its rows go in groups, as many as a register tile has (6, or 32 with AMX). The maximum is followed only
when it grows by more than 8 octaves: p stays below 2**8, and O is hardly ever rescaled. Keys that no
row of a group can see are neither multiplied nor read, nor panels at the ends of a key block that a
dense mask hides from all of them.

What float32 cannot hold (scores that overflow, NaN or infinity in a hidden value, a row of biases
near the lowest float) is noticed per row, by the largest magnitudes or by the result itself, and
done again by `flash_rows` in float64.

`floats.call` packs K and V and runs it, for `launch_float`. Shapes and dtypes of the arrays are in
`float_state`: q (B, H, L, D), packed keys and values of each KV head, out (B, H, L, Dv), lse.
"""

from __future__ import annotations

import functools

import numpy as np

from ...jit.compiler import bare, inline, inlined, separate
from ...jit.memory import arrays_together, reinterpret
from ...jit.parallel import over_tasks
from ...tiling import tiling
from ..isa.amx_tiles import tile_state
from ..isa.vectors import next_task
from ..semantics import Dense
from . import float_tiles as tiles
from .float_isas import FLOAT_ISAS
from .float_packing import make_packing
from .float_state import Group, State, Tile
from .group_weights import make_group_weights
from .key_spans import make_group_spans
from .query_rows import make_query_rows


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
    spare = isa.spare
    apart = key_block + spare  # elements from row to row of scores and weights
    # score1 to score4 compute 1 to `nv` vectors of keys: the last keys of a block fill fewer than a
    # panel. Where a panel has 2 vectors (AVX2), score3 and score4 are score2.
    score1, score2, score3, score4 = (tiles.score_tile(name, min(n, nv)) for n in (1, 2, 3, 4))
    value1, value2, value4 = (tiles.value_tile(name, n) for n in (1, max(1, nv // 2), nv))
    half = max(1, nv // 2) * lanes
    begin_tiles, end_tiles = tile_state(name)
    operand = np.float32 if group == 1 else np.uint16
    group_spans = make_group_spans(name, key_block)
    group_weights = make_group_weights(name, key_block)
    load_tile, store_rows = make_query_rows(name)
    pack_head, pack_all = make_packing(name)

    @inlined
    def scores(state, g, k, first, stop, to):
        """x[to:] = Q.K^T of the group at row g, for keys `first` to `stop` of one panel."""
        stride = state.q.shape[1]
        column = first % panel
        n = (stop - first + unit - 1) // unit * (unit // lanes)
        at = (first - column) * stride + column * group
        q, x, row, step = state.q, state.x, g * stride, stride // group
        if n == nv:
            score4(q, row, stride, k, at, step, x, to, apart)
        elif n == 3:
            score3(q, row, stride, k, at, step, x, to, apart)
        elif n == 2:
            score2(q, row, stride, k, at, step, x, to, apart)
        else:
            score1(q, row, stride, k, at, step, x, to, apart)

    @inlined
    def block_scores(state, tile, k, block, end):
        """The scores of a key block, panel by panel: a panel of K stays in L1 for all rows."""
        for j in range(block, min(block + key_block, end), panel):
            for g in range(0, tile.real, mr):
                first = max(state.first[g // mr], j)
                stop = min(state.stop[g // mr], j + panel)
                if first < stop:
                    scores(state, g, k, first, stop, g * apart + first - block)

    @inlined
    def add_values(state, tile, v, block, columns, v_row):
        """O += P.V of all groups, a chunk of V's columns after the other."""
        p, o, o_row = state.p, state.o, state.o.shape[1]
        t = 0
        while t < columns:
            width = (
                panel if t + panel <= columns else half if nv > 1 and t + half <= columns else lanes
            )
            for g in range(0, tile.real, mr):
                first = state.first[g // mr]
                n = state.stop[g // mr] - first
                if n > 0:
                    steps = (n + step - 1) // step * (step // group)
                    at = g * apart + first - block
                    where, to = first * v_row + t * group, g * o_row + t
                    if width == panel:
                        value4(p, at, apart, v, where, v_row * group, steps, o, to, o_row)
                    elif width == half:
                        value2(p, at, apart, v, where, v_row * group, steps, o, to, o_row)
                    else:
                        value1(p, at, apart, v, where, v_row * group, steps, o, to, o_row)
            t += width

    @bare
    def run_tile(n, slot, row, x, results, c, semantics, sizes, counter, state, dense):
        """One query tile of head n, from `row` on: the loop of this file's description."""
        s = sizes.keys
        n_kv = n // (sizes.heads // sizes.kv_heads)
        tile = Tile(n, n // sizes.heads, n % sizes.heads, row, min(sizes.block_q, x.q.length - row))
        keys, values = x.keys[slot], x.values[n_kv if sizes.in_place else slot]
        shifted = semantics.has_bias or semantics.slopes.size > 0
        limit = reinterpret(x.limits, np.uint32)[slot]
        first, stop = load_tile(x.q, limit, semantics, tile, s, state)
        for block in range(first // key_block * key_block, stop, key_block):
            group_spans(semantics, dense, state, tile, block, s)
            block_scores(state, tile, keys, block, stop)
            for g in range(0, tile.real, mr):
                seen, seen_stop = state.first[g // mr], state.stop[g // mr]
                if seen < seen_stop:
                    rows = Group(g, min(mr, tile.real - g), seen, seen_stop, block)
                    group_weights(semantics, dense, tile, rows, c, state)
                    state.first[g // mr] += state.skip[g // mr]
            add_values(state, tile, values, block, sizes.columns, sizes.value_row)
        store_rows(tile, shifted, state, counter, results)

    @bare
    def run_tiles(worker, x, results, c, semantics, sizes, counter, state, dense):
        """Query tiles, or all tiles of the heads that share a KV head, as long as there are any."""
        n_heads, length = results.lse.shape
        tiles = (length + sizes.block_q - 1) // sizes.block_q
        group = sizes.heads // sizes.kv_heads
        together = group * tiles if sizes.by_head else 1
        while True:
            task = next_task(counter)
            if task * together >= n_heads * tiles:
                break
            slot = task * together // (group * tiles)
            if sizes.by_head:
                slot = worker
                pack_head(x, sizes, task, slot)
            for i in range(task * together, (task + 1) * together):
                row = (tiles - 1 - i % tiles) * sizes.block_q  # the longest causal tiles first
                run_tile(
                    i // tiles, slot, row, x, results, c, semantics, sizes, counter, state, dense
                )

    @inline
    def work(worker, x, results, c, semantics, sizes, counter):
        """One worker."""
        stride, block_q = (x.q.d + step - 1) // step * step, sizes.block_q
        arrays = arrays_together(
            (block_q, stride), operand, "float query tile",
            (block_q * apart,), np.float32, "float scores",
            (block_q * apart * (group - 1),), operand, "bfloat16 weights",
            (lanes,), np.uint8, "float last part of the mask",
            (lanes,), np.float32, "float last part of the bias",
            (block_q, sizes.columns + spare // 2), np.float32, "float output tile",
            (block_q, lanes), np.float32, "float sums of weights",
            (block_q,), np.float32, "float maxima",
            (block_q,), np.uint8, "float rows beyond the limit",
            (block_q,), np.int64, "float first keys of rows",
            (block_q,), np.int64, "float last keys of rows",
            (block_q // mr,), np.int64, "float first keys of groups",
            (block_q // mr,), np.int64, "float last keys of groups",
            (block_q // mr,), np.int64, "float skipped keys of groups",
        )  # fmt: skip
        q, scores, weights, mask_end, bias_end = arrays[:5]
        q[:] = operand(0)
        if group == 1:  # they take the place of the scores
            weights = scores
        state = State(q, scores, weights, *arrays[5:])
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            mask_end,
            bias_end,
        )
        begin_tiles()  # after what may fail: the tiles of AMX stay configured until `end_tiles`
        run_tiles(worker, x, results, c, semantics, sizes, counter, state, dense)
        end_tiles()

    @separate(no_cpython_wrapper=False)
    def attend(x, results, c, semantics, sizes, counter):
        """All query tiles of all heads.

        x Operands; results Results; c float32 scale * log2(e); counter (2,) int64 zeros, the second
        1 afterwards if there is a row to redo.
        """
        if not sizes.by_head:
            pack_all(x, sizes)
        over_tasks(work, sizes.workers, (x, results, c, semantics, sizes, counter))

    return attend
