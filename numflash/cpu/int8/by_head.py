"""A worker takes KV heads one after the other, makes their operands, and computes all their query tiles.

So packed keys and values stay in its L2, and threads meet once a call. `head_shares` says when.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ...jit.compiler import inline
from ...jit.memory import uncleared
from ...jit.parallel import over_tasks
from ..head_shares import heads_together
from ..isa.amx_tiles import tile_state
from ..isa.vectors import next_task
from ..semantics import semantics_at
from .arguments import Part
from .flash_int8 import make_run_tiles, make_slots, query_rows, tiles_of
from .tile_scratch import make_scratch

MOST = 2.0**30  # scores from here on are not rounded to int32 at once
ENOUGH_TILES = 8  # for a run of heads: to change between packing and attending costs 2 to 3 us
TOO_LARGE = np.inf  # the bound of scores that are left to `general_int8`


def make_attend_heads(
    isa_name: str, pv: str, needs_of: Any, prepare: Any, block_q: int = 0
) -> Callable[..., None]:
    """attend_heads(given, options, softcap, operands, sizes, counter, results): all heads.

    needs_of : jitted f(heads, given) -> memory that a worker needs to make operands of so many
    prepare : jitted f(first, stop, slot, given, needs) -> a bound of all scores of KV heads `first` to
        stop - 1, or TOO_LARGE; it packs their keys and values to slots of `operands`, from one on
    options : OptionNumbers
    counter : (2,) int64 zeros, the second 1 afterwards if a bound was TOO_LARGE; results are then to be
        computed again
    """
    run_tiles = make_run_tiles(isa_name, pv, block_q)
    block_q = query_rows(isa_name, pv, block_q)
    slots_for = make_slots(isa_name, pv, block_q)
    scratch_of = make_scratch(isa_name, pv, block_q)
    begin, end = tile_state(isa_name)

    @inline
    def work(worker, given, options, softcap, operands, sizes, counter, results):
        """One worker."""
        n, length, d = operands.q.shape
        n_kv = n // sizes.heads * sizes.kv_heads
        tiles = sizes.heads // sizes.kv_heads * tiles_of(length, block_q)  # of a KV head
        together = heads_together(n_kv, sizes.workers, tiles, ENOUGH_TILES)
        slots = slots_for(together * tiles, sizes)
        scratch = scratch_of(d, results.out.d, slots)
        needs = needs_of(together, given)
        next_tile = uncleared((1,), np.int64, "INT8 tiles of a worker")
        begin()  # after what may fail: the tiles of AMX stay configured until `end`
        while counter[1] == 0:
            first = next_task(counter) * together
            if first >= n_kv:
                break
            stop, slot = min(first + together, n_kv), worker * together
            most = prepare(first, stop, slot, given, needs)
            if most >= TOO_LARGE:
                counter[1] = 1
                break
            next_tile[0] = first * tiles
            semantics = semantics_at(options, softcap, most >= MOST)
            part = Part(stop * tiles, 1, first - slot)
            run_tiles(operands, semantics, sizes, part, next_tile, results, scratch, slots)
        end()

    @inline
    def attend_heads(given, options, softcap, operands, sizes, counter, results):
        over_tasks(
            work, sizes.workers, (given, options, softcap, operands, sizes, counter, results)
        )

    return attend_heads
