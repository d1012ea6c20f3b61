"""What happens to a tile of scores in the 16-bit Hopper kernel: options, hidden keys, softmax."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..compile.target import cuda, device_function, types
from ..instructions import ptx
from .score_functions import known, make_apply, make_tile_list
from .scores import LN2, Mask, Place, Rows, ScoreOptions, load_slopes, make_adjust, make_hide
from .softmax import make_softmax

i32, f32 = types.int32, types.float32
OWN, MASK, SLOPES = 9, 5, 6  # pointers before those of the functions; places of two of them
WIDE = 128  # value channels from which on registers are short: fewer scores at a time


class Block(NamedTuple):
    """What a thread's scores need to know of its rows and of their block, for every tile."""

    quad: Any  # the thread's place among the four that share its rows
    row: Any  # the first of the thread's two
    first_head: Any  # of those that are packed together
    batch: Any
    heads: Any
    slope: Any  # ALiBi's, of the two rows
    listed_at: Any
    last: Any  # the tile of keys that comes as number n is last - n
    diagonal: Any
    queries: Any
    keys: Any
    left: Any
    right: Any


@functools.cache
def make_describe(packed: int) -> Any:
    """describe(query, head, row, first_head): query and head of the thread's two rows, 8 apart."""

    @device_function
    def describe(query, head, row, first_head):
        for r in range(2):
            query[r] = i32((row + 8 * r) // packed)
            head[r] = i32(first_head + (row + 8 * r - query[r] * packed))

    return describe


@functools.cache
def make_soften(chosen: ScoreOptions, dv: int, block_k: int, packed: int, edge: bool) -> Any:
    """soften(s, state, n, block: Block, call: Call): the scores of the tile that comes as number n.

    Functions, options and the online softmax. Only at an `edge` of what the rows attend to is there
    code that hides keys.
    """
    band, mask, softcap, alibi, _, _, functions, listed = chosen
    key_tiles, wide = block_k // 8, dv > WIDE
    code = known(functions)
    changes, masks = code.changes, code.masks
    scaled = chosen.transforms and not changes  # by `adjust`
    adjusted = scaled or softcap or alibi or bool(mask)
    transform = chosen.transforms or changes
    _, start_of, is_full, _ = make_tile_list(OWN, listed, block_k)
    part = 2 if wide else 4  # of wide heads slopes are read again for every tile, too
    adjust = make_adjust(key_tiles, scaled, softcap, alibi, mask, part, bool(functions))
    change = make_apply(OWN, functions, "score", key_tiles, part)
    hide_by_mask = make_apply(OWN, functions, "mask", key_tiles, part)
    softmax, hide, describe = make_softmax(key_tiles), make_hide(key_tiles), make_describe(packed)

    @device_function
    def place_of(block):
        """Where the block's scores are."""
        return Place(block.batch, block.diagonal, block.queries, block.keys)

    @device_function
    def hide_edge(s, here, query, block):
        low, high = cuda.local.array(2, i32), cuda.local.array(2, i32)
        for r in range(2):
            low[r], high[r] = i32(0), block.keys
            if band:
                own = i32(query[r] + block.diagonal)
                low[r] = i32(own - block.left)
                high[r] = i32(min(block.keys, i32(own + block.right + 1)))
        hide(s, here, low, high)

    @device_function
    def soften(s, state, n, block, call):
        t = i32(block.last - n)
        here = i32(start_of(block.listed_at, t) + 2 * block.quad)
        query, head = cuda.local.array(2, i32), cuda.local.array(2, i32)
        # not in registers from tile to tile
        describe(query, head, ptx.fresh(block.row), block.first_head)
        if alibi and wide:
            slopes = call.pointers[SLOPES]
            load_slopes(block.slope, slopes, block.batch * block.heads, head)
        held = Rows(query, head, block.slope)
        change(s, here, held, place_of(block), call.factors[0] * LN2, call.pointers)
        if adjusted:
            given = Mask(call.pointers[MASK], call.strides[3:])
            adjust(s, here, held, place_of(block), call.factors, given)
        if masks and not is_full(block.listed_at, t):
            hide_by_mask(s, here, held, place_of(block), f32(1), call.pointers)
        if edge:
            hide_edge(s, here, query, block)
        softmax(s, state.m, state.l, state.alpha, f32(1) if transform else call.factors[0])

    return soften
