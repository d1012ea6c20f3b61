"""The fused INT8 attention.

Integer Q.K^T, fixed-point online softmax and integer P.V, one query tile at a time.

The plan is that of the A64FX summary (docs/sources.md), with the integer pipeline of
`reference.integer_model`, whose bits it produces. One source for every instruction set: the
register tiles come from `microkernels`. Per query tile of `block_q` rows (`attend_tile`):

    first    the sequence's first keys, taken out of their block: m, l and O begin with them (begin_rows)
    for every key block that a row can see (`attend_block`):
        scores   S = Q.K^T in int32 registers -> log2 scores, int16 Q8.8; own octave of each row
                                                                                    (block_scores)
        merge    running octave m; O and l shift by whole octaves when it grows      (grow_rows)
        softmax  weights P of 8 or 15 bits and their sum, added to l                 (weigh, add_sums)
        values   O += P.V in int32 registers, added to float32 O                     (add_values)
    out = O / l * v_scale                                                            (store_rows)

Blocks at the edge of what is visible get hidden scores before the softmax. Softcap, ALiBi, bias and
dense masks change the scores before they are stored as int16 (`score_changes`), from which a row of
ALiBi subtracts the whole octaves that are a lower bound of its distance. Score and mask functions
change them in float32 (`function_scores`); what is taken off a row there is its octave in the block
before. Where int16 does not hold a row (beyond 127 octaves,
keys that are not finite), `wide_scores` rounds float32 scores relative to the row's own octave; the
bits are the same where both apply. On AMX, blocks without options go through `amx_stream`, which
runs the same steps of many blocks side by side; it calls score functions, but asks no mask.

`int8.call` quantises or packs the operands and runs it, for `launch_int8`: mostly a worker does so with the
heads that it attends to (`by_head`). Shapes and dtypes of the
arrays are in `arguments`, the fixed-point formats in numerics/fixedpoint.py.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from ...jit.compiler import bare, inline, inlined, separate
from ...jit.parallel import over_tasks
from ...numerics import fixedpoint as fx
from ...tiling import KEY_BLOCK, tiling
from ..isa.amx_tiles import tile_state
from ..isa.isas import VECTOR_ISAS, padded
from ..isa.score_calls import all_empty
from ..isa.vectors import next_task
from ..semantics import Dense, row_of, row_ranges, step_of
from .amx_stream import add_turns, most_turns, run_turns, stream_blocks, stream_stop
from .amx_stream_data import TURNS
from .arguments import Part
from .begin_rows import make_begin_rows
from .block_scores import make_block_scores
from .blocks import value_block, value_rows
from .first_keys import FirstKeys
from .function_scores import function_for
from .hidden_blocks import make_hides
from .rows import (
    State,
    Tile,
    blank_rows,
    block_at,
    key_span,
    make_store_rows,
    mark_live,
    padded_changes,
    query_nonfinite,
)
from .score_changes import Changes
from .softmax import HALF, add_sums, grow_rows, weigh_rows
from .tile_scratch import make_scratch, state_of, tile_of

F = np.float32
I = np.int32
NEVER, FROM_FIRST, FROM_SECOND = range(3)  # which blocks of a tile go through the stream
# Tiles with up to so many keys go block by block where they are alone: the stream fills and drains
# once a run, which takes as long as two of its turns.
TOO_SHORT = 2 * KEY_BLOCK
SLOTS = 4  # tiles that go through the stream in one run
EDGE_ROWS = 12  # rows of P.V that stop at the same key where a block is cut off


class Head(NamedTuple):
    """One KV head, packed."""

    keys: np.ndarray
    start: np.ndarray  # int32 that a key's sums begin with
    scale: np.ndarray  # float32 scale of each key; NaN where it is not finite
    wide: np.ndarray  # per block, whether int16 may not hold its scores
    values: np.ndarray
    first: FirstKeys  # of all heads
    number: int  # of this one in the packed operands


class Place(NamedTuple):
    """Where a tile is: batch entry, query head of it, query head of all, first row."""

    b: int
    h: int
    n: int
    row: int


class Job(NamedTuple):
    """One query tile and its KV head: what all steps share."""

    place: Place
    tile: Tile
    kv: Head
    state: State
    changed: bool  # whether options change scores
    has_dense: bool  # whether there is a bias or a mask
    dense: Dense
    options: Changes
    options_end: Changes  # the same for the last keys, see `copy_end`


def query_rows(isa_name: str, pv: str, block_q: int = 0) -> int:
    """Rows of a query tile: the tiling's, in whole units of both products' register tiles."""
    rows = block_q or tiling(isa_name).block_q
    unit = math.lcm(value_rows(isa_name, pv), VECTOR_ISAS[isa_name].rows[-1])
    return max(unit, rows - rows % unit)


@bare
def changes_scores(semantics):
    """Whether softcap, ALiBi, bias or mask change the scores of some head."""
    slopes = semantics.slopes.size > 1 or semantics.slopes[0, 0] != F(0)
    return semantics.softcap > F(0) or semantics.has_bias or semantics.has_mask or slopes


@inlined
def tile_changes(semantics, dense, place, last, scratch, base):
    """The options of a tile's scores: see `score_changes`."""
    b, h, _, row = place
    shift, numbers = scratch.floats[3], scratch.floats[4]
    capped = semantics.softcap > F(0)
    if capped:
        for i in range(last + 1):
            shift[i] = semantics.shift[b, h, row + i]
    numbers[0] = F(semantics.softcap * fx.CAP_UNIT)
    numbers[1] = semantics.slopes[b, h] if semantics.slopes.size > 1 else semantics.slopes[0, 0]
    return Changes(
        capped,
        numbers[1] != F(0),
        semantics.has_bias,
        semantics.has_mask,
        shift,
        numbers,
        row + semantics.diagonal[b],
        base,
        dense.bias,
        row_of(semantics.bias, b, h, row),
        step_of(semantics.bias),
        dense.mask,
        row_of(semantics.mask, b, h, row),
        step_of(semantics.mask),
        last,
    )


@functools.cache
def make_load_rows(operand: Any, q_offset: int):
    """f(operands, semantics, place, s, tile, state): the rows of a tile as operands, and the keys
    each of them attends to.
    """

    @bare
    def copy(source, target):
        for e in range(source.size):
            target[e] = operand(np.int16(source[e]) + np.int16(q_offset))

    @bare
    def copy_rows(q, place, tile):
        """Whole tiles at once where their rows are not padded: one row alone is too short for the
        loop that LLVM makes of it.
        """
        _, length, d = q.shape
        if d == tile.q.shape[1]:
            first = (place.n * length + place.row) * d
            flat = q.reshape(q.size)[first : first + tile.real * d]
            copy(flat, tile.q.reshape(tile.q.size))
        else:
            for i in range(tile.real):
                copy(q[place.n, place.row + i], tile.q[i])

    @inlined
    def load_rows(operands, semantics, place, s, tile, state):
        b, _, n, row = place
        copy_rows(operands.q, place, tile)
        row_ranges(semantics, b, row, s, tile.start[: tile.real], tile.hi[: tile.real])
        scale, lo, start, first_keys = operands.cq[n], tile.lo, tile.start, tile.first_keys
        for i in range(tile.real):
            tile.scale[i] = scale[row + i]
        for i in range(tile.real):
            lo[i] = max(start[i], first_keys)
        state.spoiled[:], state.base[: tile.real] = 0, I(0)
        for i in range(tile.real, tile.rows):  # computed by the stream, stored by nobody
            tile.scale[i], state.base[i] = F(0), I(0)
            tile.lo[i], tile.hi[i] = tile.lo[tile.real - 1], tile.hi[tile.real - 1]

    return load_rows


@functools.cache
def make_add_values(isa_name: str, pv: str):
    """f(p, kv, tile, block, inside, state): O += P.V of a block, at its edges a few rows at a time
    and only up to the last key that they see: beyond it P is 0.
    """
    values, step = value_block(isa_name, pv), VECTOR_ISAS[isa_name].step
    edge_rows = padded(EDGE_ROWS, value_rows(isa_name, pv))

    @bare
    def add_values(p, kv, tile, block, inside, state):
        part = tile.rows if inside else edge_rows
        for i in range(0, tile.rows, part):
            stop, seen = min(i + part, tile.rows), block.columns
            if not inside:
                last = tile.hi[min(stop, tile.real) - 1] - block.first
                seen = min(seen, (last + step - 1) // step * step)
            if seen > 0:
                scale, total = state.scale[i:stop], state.total[i:stop]
                values(
                    p[i:stop], kv.values, block.first, seen, scale, total, stop - i, state.o[i:stop]
                )

    return add_values


@bare
def tiles_of(length, block_q):
    """Query tiles of a head."""
    return (length + block_q - 1) // block_q


@functools.cache
def make_run_tiles(isa_name: str, pv: str, block_q: int = 0):
    """The kernel of one instruction set, with P.V in integers (weights of 8 bits with pv "int8", of
    15 with "int16") or in floats ("bf16", "fp32"); query tiles as in its tiling, or of about
    `block_q` rows.

    run_tiles(operands, semantics, sizes, part, counter, results, scratch, slots): one worker's query tiles;
    counter (1,) int64, the next tile of the `Part`

    Longer than a screen: its loops, from the block of keys to all tiles, stand one above the other.
    """
    isa = VECTOR_ISAS[isa_name]
    block_q = query_rows(isa_name, pv, block_q)
    begin_rows = make_begin_rows(isa_name, pv)
    hides = make_hides(isa_name)
    block_scores = make_block_scores(isa_name, pv)
    weigh = weigh_rows(isa_name, pv)
    add_values = make_add_values(isa_name, pv)
    load_rows = make_load_rows(np.uint8 if isa.group == 4 else np.int16, isa.q_offset)
    store_rows = make_store_rows(isa_name)
    unit = F(fx.SUM_UNIT[pv])
    unit_rows = isa.rows[-1]
    streams = streams_of(isa_name, pv)

    @inlined
    def attend_block(job, semantics, block, left, scratch):
        """A block of keys. Returns whether its scores left int16; `left`: they are likely to."""
        place, tile, state = job.place, job.tile, job.state
        last = place.row + tile.real - 1
        called = function_for(semantics.functions, place.b, place.h, place.row, last, block)
        mark_live(tile, block)
        if job.has_dense and hides(job, semantics, block, 0, tile.real):
            return left
        wide = left or job.kv.wide[block.first // KEY_BLOCK] != 0
        inside, unused, left = block_scores(job, semantics, block, called, wide, scratch)
        real, p, total, scale = tile.real, scratch.p, state.total, state.scale
        grow_rows(state.octave, state.top, real, state.m, state.l, scale, state.o)
        weigh(scratch.x, real, block.columns, state.top, scale, p, scratch.sums, total)
        if unused:
            blank_rows(p, tile, total)
        add_sums(total, real, unit, scale, state.l)
        add_values(p, job.kv, tile, block, inside, state)
        return left

    @inlined
    def attend_tile(job, operands, semantics, sizes, scratch, may_wait, turns):
        """The first keys, then every block of keys that the tile's rows attend to.

        Returns the number of turns in the table of the stream: more than the `turns` that it has if
        the blocks of this tile wait there.

        Blocks go one by one through `attend_block`. On AMX a run of blocks without options goes
        through the stream instead, which keeps scores in int16 and gives up where they leave it.
        The last run of a tile that `may_wait` is put into the table, behind those of other tiles, for
        `run_tiles` to do. Others are done here (`stream_blocks`), and what happens is in `streaming`:

        * FROM_FIRST: the stream takes all runs. Where it gives up, everything starts again with
          NEVER; with a function whose first block made it give up, with FROM_SECOND.
        * FROM_SECOND: the first block by itself, the stream from then on. Scores of a function are
          kept relative to those of the block before, so that often only the first leaves int16.
        * NEVER: block by block. Also without AMX, with options, with scores known to be large, and
          where keys are few.
        """
        place, tile, kv, state, functions = (
            job.place, job.tile, job.kv, job.state, semantics.functions
        )  # fmt: skip
        span, last = key_span(tile, sizes.keys), place.row + tile.real - 1
        always_wide = semantics.extreme or query_nonfinite(tile)
        left = False  # whether the last block's scores left int16: those of this one are likely to
        streaming = NEVER
        begin_at = span.first // KEY_BLOCK * KEY_BLOCK
        pays = span.stop - begin_at > (HALF if may_wait else TOO_SHORT)
        if streams and sizes.stream != 0 and pays and not (job.changed or always_wide):
            streaming = FROM_FIRST
        following, starting = begin_at, True
        while starting or following < span.stop:
            # The start is an iteration of this loop, because it happens again where the stream gives up:
            # one call of `begin_rows`, whose code is inlined, serves both.
            if starting:
                begin_rows(operands.q, job, semantics, scratch.wide.reshape(scratch.wide.size))
                starting = False
                continue
            first = following
            stop = first
            if streams and (
                streaming == FROM_FIRST or (streaming == FROM_SECOND and first > begin_at)
            ):
                stop = stream_stop(tile, kv, place, functions, first, span.stop)
            if streams and stop > first:
                following = stop
                if may_wait and stop >= span.stop:
                    turns = add_turns(
                        scratch.turns[0], turns, tile, kv, place, functions, sizes.keys, state, first,
                        stop,
                    )  # fmt: skip
                    continue
                reached = stream_blocks(
                    sizes, scratch.turns[1], scratch.stream, tile, kv, place, functions, state, first,
                    stop,
                )  # fmt: skip
                if reached < stop:
                    # scores left int16: again from the start, block by block; those of a function,
                    # which are relative to the block before, may need that for the first one only
                    again = functions.unmasked != 0 and reached == begin_at
                    again = again and streaming == FROM_FIRST
                    streaming = FROM_SECOND if again else NEVER
                    following, starting = begin_at, True
                continue
            following = first + KEY_BLOCK
            block = block_at(span, first, sizes.keys, tile.first_keys)
            if not all_empty(
                functions, place.b, place.h, place.row, last, first, first + block.real
            ):
                left = attend_block(job, semantics, block, always_wide or left, scratch)
        return turns

    @bare
    def place_of(task, operands, sizes, part):
        """Where the tile of a task is, its number of rows, and where its KV head is packed."""
        length = operands.q.shape[1]
        tiles = tiles_of(length, block_q)
        n, row = task // tiles, (tiles - 1 - task % tiles) * block_q  # long causal tiles first
        b, h = n // sizes.heads, n % sizes.heads
        n_kv = b * sizes.kv_heads + h * sizes.kv_heads // sizes.heads - part.before
        return Place(b, h, n, row), min(block_q, length - row), n_kv

    @inlined
    def tile_job(slot, operands, semantics, sizes, part, scratch):
        """The tile of the task in a slot, its rows loaded."""
        keys, first_keys = operands.keys, operands.first
        place, real, n_kv = place_of(scratch.tasks[slot], operands, sizes, part)
        rows = (real + unit_rows - 1) // unit_rows * unit_rows
        tile = tile_of(scratch, slot, rows, real, min(first_keys.number, sizes.keys))
        state = state_of(scratch, slot)
        kv = Head(
            keys.data[n_kv], keys.start[n_kv], keys.scale[n_kv], keys.wide[n_kv],
            operands.values[n_kv], first_keys, n_kv,
        )  # fmt: skip
        load_rows(operands, semantics, place, sizes.keys, tile, state)
        has_dense, changed = semantics.has_bias or semantics.has_mask, changes_scores(semantics)
        dense = Dense(
            semantics.mask.reshape(semantics.mask.size),
            semantics.bias.reshape(semantics.bias.size),
            scratch.mask_end,
            scratch.wide.reshape(scratch.wide.size),
        )
        # vectors may read beyond the last keys of bias and mask: `copy_end` puts these where a
        # whole block fits
        end_at = -(sizes.keys // KEY_BLOCK * KEY_BLOCK)
        options = tile_changes(semantics, dense, place, real - 1, scratch, state.base)
        options_end = padded_changes(options, dense.bias_end, dense.mask_end, end_at)
        return Job(place, tile, kv, state, changed, has_dense, dense, options, options_end)

    @inlined
    def store_tile(slot, operands, sizes, part, results, scratch):
        """The results of the finished tile in a slot."""
        place, real, n_kv = place_of(scratch.tasks[slot], operands, sizes, part)
        tile = tile_of(scratch, slot, real, real, 0)
        v_scale = operands.v_scale[n_kv + part.before]
        store_rows(tile, state_of(scratch, slot), place, v_scale, results)

    @separate(_nrt=False)
    def run_tiles(operands, semantics, sizes, part, counter, results, scratch, slots):
        """Query tiles, as long as there are any.

        On AMX the blocks of up to SLOTS of them wait for one run of the stream, which fills and
        drains once. Where it gives up, each of these tiles is done again by itself.
        """
        tasks = part.stop
        most = most_turns(block_q, sizes.keys)
        left = tasks  # that nobody has taken yet
        waiting, turns = 0, 0  # tiles in the first slots, and their turns in the table
        again = 0  # tiles in the first slots, at which the stream gave up
        while left > 0 or again > 0:
            alone, slot = again > 0, waiting
            if alone:
                again -= 1
                slot = again
            else:
                scratch.tasks[slot] = next_task(counter)
                left = max(0, tasks - 1 - scratch.tasks[slot])
            first, stop = slot, slot  # slots whose tiles are finished
            if scratch.tasks[slot] < tasks:
                job = tile_job(slot, operands, semantics, sizes, part, scratch)
                may_wait = not alone and slots > 1
                now = attend_tile(job, operands, semantics, sizes, scratch, may_wait, turns)
                if now > turns:
                    waiting, turns = waiting + 1, now
                else:
                    stop = slot + 1
            # the last tasks are left to other threads
            enough = left < waiting * part.workers if part.workers > 1 else left == 0
            full = waiting == slots or turns + most > TURNS
            if streams and waiting > 0 and (enough or full):
                if run_turns(sizes.stream, scratch.turns[0], turns, scratch.stream):
                    first, stop = 0, max(stop, waiting)
                else:
                    # from now on one by one: scores of others may leave int16, too
                    again, slots = waiting, 1
                waiting, turns = 0, 0
            for n in range(first, stop):
                store_tile(n, operands, sizes, part, results, scratch)

    return run_tiles


def streams_of(isa_name: str, pv: str) -> bool:
    """Whether there is an AMX stream for it."""
    return VECTOR_ISAS[isa_name].tiled and pv == "int8"


@functools.cache
def make_slots(isa_name: str, pv: str, block_q: int):
    """f(tiles, sizes): how many tiles of `tiles` may wait for a run of the stream."""
    streams = streams_of(isa_name, pv)

    @bare
    def slots_for(tiles, sizes):
        # one table of turns has room for them
        fits = sizes.keys > HALF and most_turns(block_q, sizes.keys) <= TURNS
        return SLOTS if streams and sizes.stream != 0 and tiles > 1 and fits else 1

    return slots_for


@functools.cache
def make_attend(isa_name: str, pv: str, block_q: int = 0):
    """Attention of operands that are packed: f(operands, semantics, sizes, counter, results)."""
    run_tiles = make_run_tiles(isa_name, pv, block_q)
    block_q = query_rows(isa_name, pv, block_q)
    slots_for = make_slots(isa_name, pv, block_q)
    scratch_of = make_scratch(isa_name, pv, block_q)
    begin, end = tile_state(isa_name)

    @inline
    def work(_, operands, semantics, sizes, counter, results):
        """One worker."""
        n, length, d = operands.q.shape
        tiles = n * tiles_of(length, block_q)
        slots = slots_for(tiles // sizes.workers, sizes)
        scratch = scratch_of(d, results.out.d, slots)
        begin()  # after what may fail: the tiles of AMX stay configured until `end`
        part = Part(tiles, sizes.workers, 0)
        run_tiles(operands, semantics, sizes, part, counter, results, scratch, slots)
        end()

    @separate(no_cpython_wrapper=False)
    def attend(operands, semantics, sizes, counter, results):
        """All query tiles of all heads: see `arguments`; counter (1,) int64 zero."""
        over_tasks(work, sizes.workers, (operands, semantics, sizes, counter, results))

    return attend
